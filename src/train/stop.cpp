#include "train/stop.h"

#include <unistd.h>

#include <array>
#include <csignal>
#include <string_view>

namespace gka::train {
namespace {

constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP};

constexpr std::string_view kNotice = "\nfinishing this step, then saving; once more ends at once\n";

// A handler may touch nothing else, and the process has one set of handlers.
volatile std::sig_atomic_t g_received = 0;

void on_signal(int number) {
  g_received = number;
  for (const int signal : kSignals) std::signal(signal, SIG_DFL);
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kNotice.data(), kNotice.size());
}

}  // namespace

// A reader of the progress that goes away (`| head`) takes no run with it.
StopSignals::StopSignals() : on_broken_pipe_(std::signal(SIGPIPE, SIG_IGN)) {
  g_received = 0;
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

int StopSignals::received() const { return g_received; }

}  // namespace gka::train
