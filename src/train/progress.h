// What the user sees of a run: one line that is rewritten on a terminal, a plain line now and then anywhere else.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

namespace gka::train {

struct StepReport {
  std::int64_t step = 0, steps = 0;
  double loss = 0, learning_rate = 0, gradient_norm = 0;
  double tokens_per_second = 0, memory_bytes = 0, seconds_left = 0;
  std::optional<double> eval_loss, eval_accuracy;
  const char* counted = "tok";  // what is counted per second
};

std::string describe_step(const StepReport& report);

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class Progress {
 public:
  Progress(std::FILE* out, std::int64_t log_every);
  /// Leaves the last line where it is.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void step(const StepReport& report);
  /// A line of its own that stays.
  void say(const std::string& text);
  /// Says so where a run goes on with other threads than it had.
  void note_threads(int before, int now);

 private:
  std::FILE* out_;
  bool terminal_, live_ = false;
  std::int64_t log_every_;
  std::chrono::steady_clock::time_point shown_;
};

}  // namespace gka::train
