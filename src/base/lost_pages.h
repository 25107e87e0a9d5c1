// A mapped file that becomes shorter takes its pages away from under whoever reads them, and the system answers the
// next read with SIGBUS. A program that calls `explain_lost_pages` ends then with a sentence that names the file.
#pragma once

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>

namespace gka {

/// One mapping. A list that only grows, whose entries are used again: a signal handler can walk it at any moment.
struct NotedMapping {
  std::atomic<std::uintptr_t> first{0}, last{0};  // [first, last); 0, 0: free
  std::string path{};
  NotedMapping* next = nullptr;
};
inline std::atomic<NotedMapping*> g_mappings{nullptr};
inline std::mutex g_mappings_mutex;

inline NotedMapping* note_mapping(const void* start, std::size_t size, const std::string& path) {
  const std::scoped_lock lock(g_mappings_mutex);
  auto* entry = g_mappings.load();
  while (entry && entry->first != 0) entry = entry->next;
  if (!entry) {
    entry = new NotedMapping;
    entry->next = g_mappings;
    g_mappings = entry;
  }
  entry->path = path;
  entry->last = reinterpret_cast<std::uintptr_t>(start) + size;
  entry->first = reinterpret_cast<std::uintptr_t>(start);
  return entry;
}

inline void forget_mapping(NotedMapping* entry) {
  const std::scoped_lock lock(g_mappings_mutex);
  entry->first = entry->last = 0;
}

namespace lost_pages {

inline void say(const char* text) {
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text, std::strlen(text));
}

inline void on_bus_error(int number, siginfo_t* about, void*) {
  const auto place = reinterpret_cast<std::uintptr_t>(about->si_addr);
  for (auto* entry = g_mappings.load(); entry; entry = entry->next) {
    if (entry->first == 0 || place < entry->first || place >= entry->last) continue;
    say("\ngka: ");
    say(entry->path.c_str());
    say(" became shorter, or could not be read, while it was in use; leave files alone while a program reads them.\n");
    ::_exit(1);
  }
  std::signal(number, SIG_DFL);  // not ours: the same again, to the usual end
}

}  // namespace lost_pages

/// From here on a lost page ends the process with a sentence and the status 1.
inline void explain_lost_pages() {
  struct sigaction action{};
  action.sa_sigaction = lost_pages::on_bus_error;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &action, nullptr);
}

}  // namespace gka
