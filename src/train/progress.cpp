#include "train/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include "train/text.h"

namespace gka::train {
namespace {

constexpr auto kRefresh = std::chrono::milliseconds(100);

/// Columns of the terminal; a line must not wrap, or it could not be rewritten.
std::size_t width_of(std::FILE* out) {
  winsize size{};
  return ::ioctl(::fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 120;
}

/// The first `columns` characters of UTF-8 text.
std::string cut(const std::string& text, std::size_t columns) {
  std::size_t seen = 0, end = 0;
  for (; end < text.size(); ++end) {
    const bool begins = (static_cast<unsigned char>(text[end]) & 0xC0) != 0x80;
    if (begins && seen++ == columns) break;
  }
  return text.substr(0, end);
}

}  // namespace

std::string describe_step(const StepReport& report) {
  const int digits = static_cast<int>(std::to_string(report.steps).size());
  auto text =
      print("step %*lld/%lld", digits, static_cast<long long>(report.step), static_cast<long long>(report.steps)) +
      print("  loss %.4f  lr %.2e  |g| %.3f", report.loss, report.learning_rate, report.gradient_norm) + "  " +
      short_count(report.tokens_per_second) + " " + report.counted + "/s  " + short_bytes(report.memory_bytes) + "  " +
      short_duration(report.seconds_left) + " left";
  if (report.eval_loss) text += print("  · eval loss %.4f", *report.eval_loss);
  if (report.eval_accuracy) text += print(" accuracy %.4f", *report.eval_accuracy);
  return text;
}

Progress::Progress(std::FILE* out, std::int64_t log_every)
    : out_(out), terminal_(::isatty(::fileno(out)) == 1), log_every_(log_every) {}

Progress::~Progress() {
  if (live_) std::fputc('\n', out_);
}

void Progress::step(const StepReport& report) {
  const bool last = report.step == report.steps;
  if (report.eval_loss || (last && !terminal_)) return say(describe_step(report));
  if (!terminal_) {
    if (report.step % log_every_ == 0) say(describe_step(report));
    return;
  }
  const auto now = std::chrono::steady_clock::now();
  if (now - shown_ < kRefresh && !last) return;
  shown_ = now;
  std::fprintf(out_, "\r\x1b[K%s", cut(describe_step(report), width_of(out_) - 1).c_str());
  std::fflush(out_);
  live_ = true;
}

void Progress::say(const std::string& text) {
  if (live_) std::fputs("\r\x1b[K", out_);
  live_ = false;
  std::fprintf(out_, "%s\n", text.c_str());
  std::fflush(out_);
}

void Progress::note_threads(int before, int now) {
  if (before == now) return;
  say("note: this run was trained with " + std::to_string(before) + " threads and continues with " +
      std::to_string(now) + "; the last bits of its numbers may differ.");
}

}  // namespace gka::train
