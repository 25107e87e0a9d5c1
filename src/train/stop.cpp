#include "train/stop.h"

#include <unistd.h>

#include <array>
#include <csignal>
#include <string>
#include <string_view>

namespace gka::train {
namespace {

constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP};

constexpr std::string_view kNotice = "\nfinishing this step, then saving; once more ends at once\n";

constexpr std::string_view kNothingBegun = "\ngka: interrupted before the first step; nothing was begun.\n";

constexpr int kInterrupted = 128 + SIGINT;  // as a shell reports it

// A handler may touch nothing else, and the process has one set of handlers.
volatile std::sig_atomic_t g_received = 0;
volatile std::sig_atomic_t g_begun = 0;
std::vector<std::string> g_made;  // changed only while no handler listens

/// A file that is read for its checksum may be large, a model on its way to a GPU too: nobody should wait for them.
void end_now() {
  for (const auto& path : g_made) {
    if (::unlink(path.c_str()) != 0) ::rmdir(path.c_str());
  }
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kNothingBegun.data(), kNothingBegun.size());
  ::_exit(kInterrupted);
}

void on_signal(int number) {
  if (g_begun == 0) end_now();
  g_received = number;
  for (const int signal : kSignals) std::signal(signal, SIG_DFL);
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kNotice.data(), kNotice.size());
}

}  // namespace

// A reader of the progress that goes away (`| head`) takes no run with it.
StopSignals::StopSignals(const std::vector<std::filesystem::path>& made)
    : on_broken_pipe_(std::signal(SIGPIPE, SIG_IGN)) {
  g_received = 0;
  g_begun = 0;
  g_made.clear();
  for (const auto& path : made) g_made.push_back(path.string());
  for (const int signal : kSignals) {
    if (std::signal(signal, on_signal) == SIG_IGN) std::signal(signal, SIG_IGN);  // as under nohup
  }
}

StopSignals::~StopSignals() {
  for (const int signal : kSignals) {
    if (std::signal(signal, SIG_DFL) == SIG_IGN) std::signal(signal, SIG_IGN);
  }
  std::signal(SIGPIPE, on_broken_pipe_);
}

void StopSignals::begin() { g_begun = 1; }

int StopSignals::received() const { return g_received; }

}  // namespace gka::train
