// The handler runs on the main thread, which is the one that makes files: none appears while it removes them. A handler
// may neither allocate nor lock, so what it says and removes is noted before, and it lists a folder by itself.
#include "cli/interrupt.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>

namespace gka::cli {
namespace {

constexpr int kInterrupted = 128 + SIGINT;  // as a shell reports it
constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP};

/// What the handler reads; changed only while the signals are held back.
struct Notes {
  pthread_t main{};
  std::string lost{}, whole{};  // what is said, by what has become of the output
  std::string begun{};          // what is being written, under its name for the time
  std::string folder{};         // what that will be, where it is a folder
};
Notes g_notes;

void remove_folder(const char* path) {
  alignas(dirent64) static char entries[1 << 14];
  // A folder that changes may be listed with gaps, so once more until it is empty.
  for (bool removed = true; removed && ::rmdir(path) != 0;) {
    removed = false;
    const int folder = ::open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (ssize_t size = 0; (size = ::getdents64(folder, entries, sizeof entries)) > 0;) {
      for (ssize_t at = 0; at < size;) {
        const auto* entry = reinterpret_cast<const dirent64*>(entries + at);
        removed |= ::unlinkat(folder, entry->d_name, 0) == 0;
        at += entry->d_reclen;
      }
    }
    ::close(folder);
  }
}

void on_signal(int number) {
  if (pthread_equal(pthread_self(), g_notes.main) == 0) {
    pthread_kill(g_notes.main, number);
    return;
  }
  const auto& [main, lost, whole, begun, folder] = g_notes;
  if (!begun.empty() && ::unlink(begun.c_str()) != 0 && errno == EISDIR) remove_folder(begun.c_str());
  const bool is_whole = !folder.empty() && ::access(folder.c_str(), F_OK) == 0;  // it was not there before
  const auto& said = is_whole ? whole : lost;
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, said.data(), said.size());
  ::_exit(kInterrupted);
}

/// The signals wait while one lives.
class HoldBack {
 public:
  HoldBack() {
    sigset_t signals;
    sigemptyset(&signals);
    for (const int signal : kSignals) sigaddset(&signals, signal);
    pthread_sigmask(SIG_BLOCK, &signals, &before_);
  }
  ~HoldBack() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  HoldBack(const HoldBack&) = delete;
  HoldBack& operator=(const HoldBack&) = delete;

 private:
  sigset_t before_;
};

void set_handlers(void (*handler)(int)) {
  for (const int signal : kSignals) {
    if (std::signal(signal, handler) == SIG_IGN) std::signal(signal, SIG_IGN);  // as under nohup
  }
}

}  // namespace

Interruptible::Interruptible(const std::string& out) {
  const std::string start = ::isatty(STDERR_FILENO) != 0 ? "\n" : "";  // after ^C and a live line
  const auto whole = start + "gka: interrupted.\n";
  const auto lost = start + "gka: interrupted; " + out + " was not written.\n";
  g_notes = {.main = pthread_self(), .lost = out.empty() ? whole : lost, .whole = whole};
  set_handlers(on_signal);
}

Interruptible::~Interruptible() { set_handlers(SIG_DFL); }

void Interruptible::writes_file(const std::filesystem::path& path) {
  const HoldBack hold;
  g_notes.begun = path.string() + ".writing-" + std::to_string(::getpid());
}

void Interruptible::finish_file(const std::function<void()>& commit) {
  const HoldBack hold;
  commit();
  g_notes.begun.clear();
  g_notes.lost = g_notes.whole;
}

void Interruptible::fills_folder(const std::filesystem::path& folder, const std::filesystem::path& unfinished) {
  const HoldBack hold;
  g_notes.begun = unfinished.string();
  g_notes.folder = folder.string();
}

}  // namespace gka::cli
