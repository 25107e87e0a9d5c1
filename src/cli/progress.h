// The live line of a long command: rewritten a few times a second on a terminal, not written at all elsewhere.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>

namespace gka::cli {

class LiveLine {
 public:
  LiveLine() : live_(::isatty(STDERR_FILENO) != 0) {}
  ~LiveLine() { clear(); }
  LiveLine(const LiveLine&) = delete;
  LiveLine& operator=(const LiveLine&) = delete;

  /// `text()` makes the line, and is called only when it is time for one.
  template <typename Text>
  void show(Text&& text) {
    const auto now = Clock::now();
    if (!live_ || now - shown_ < std::chrono::milliseconds(200)) return;
    shown_ = now;
    std::fputs(("\r\033[K" + text()).c_str(), stderr);
  }
  void clear() {
    if (live_) std::fputs("\r\033[K", stderr);
  }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  bool live_;
  Clock::time_point start_ = Clock::now(), shown_{};
};

}  // namespace gka::cli
