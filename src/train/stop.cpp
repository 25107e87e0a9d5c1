#include "train/stop.h"

#include <unistd.h>

#include <array>
#include <csignal>
#include <string_view>

namespace gka::train {
namespace {

constexpr std::array kSignals{SIGINT, SIGTERM, SIGHUP};

// A file beyond the limit of `ulimit -f` is then an error of write(), which has a sentence, and not the end; and a
// reader of the progress that goes away (`| head`) takes no run with it.
constexpr std::array kIgnored{SIGXFSZ, SIGPIPE};

// A handler may touch nothing else, and the process has one set of handlers.
volatile std::sig_atomic_t g_received = 0;
const char* volatile g_notice = "";

void on_signal(int number) {
  g_received = number;
  for (const int signal : kSignals) std::signal(signal, SIG_DFL);
  const std::string_view text = g_notice;
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
}

}  // namespace

StopSignals::StopSignals(const char* notice) {
  g_received = 0;
  g_notice = notice;
  for (const int signal : kSignals) {
    if (std::signal(signal, on_signal) == SIG_IGN) std::signal(signal, SIG_IGN);  // as under nohup
  }
  for (const int signal : kIgnored) std::signal(signal, SIG_IGN);
}

StopSignals::~StopSignals() {
  for (const int signal : kSignals) {
    if (std::signal(signal, SIG_DFL) == SIG_IGN) std::signal(signal, SIG_IGN);
  }
  for (const int signal : kIgnored) std::signal(signal, SIG_DFL);
}

int StopSignals::received() const { return g_received; }

}  // namespace gka::train
