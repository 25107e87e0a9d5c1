// Sends the process SIGINT when it writes to a file, or gives one its name: preloaded by test_unfinished.py, for a
// moment that no clock would find again. SIGNAL_AT is "write TEXT" or "rename TEXT"; TEXT is a part of the file's path.
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void signal_at(const char* verb, const char* path) {
  const char* at = getenv("SIGNAL_AT");
  if (at && strncmp(at, verb, strlen(verb)) == 0 && strstr(path, at + strlen(verb))) kill(getpid(), SIGINT);
}

ssize_t write(int file, const void* bytes, size_t size) {
  const ssize_t written = syscall(SYS_write, file, bytes, size);
  char link[64], path[4096] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  if (readlink(link, path, sizeof path - 1) > 0) signal_at("write ", path);
  return written;
}

int rename(const char* from, const char* to) {
  const int failed = (int)syscall(SYS_renameat2, -100 /* AT_FDCWD */, from, -100, to, 0);
  signal_at("rename ", to);
  return failed;
}
