// The learning rate of each step: a straight line up, then half a cosine down.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace gka::train {

struct Schedule {
  double peak = 1e-3;
  double warmup = 0.05;  // fraction of the steps
  double final = 0.1;    // fraction of the peak
  std::int64_t steps = 1;

  std::int64_t warmup_steps() const { return std::llround(warmup * static_cast<double>(steps)); }

  /// Steps count from 1. The last step of the warm-up has the peak, the last step of all has peak × final.
  double operator()(std::int64_t step) const {
    const auto rising = warmup_steps();
    if (step <= rising) return peak * static_cast<double>(step) / static_cast<double>(rising);
    const auto falling = static_cast<double>(std::max<std::int64_t>(1, steps - rising));
    const double progress = std::min(1.0, static_cast<double>(step - rising) / falling);
    return peak * (final + (1 - final) * 0.5 * (1 + std::cos(std::numbers::pi * progress)));
  }
};

}  // namespace gka::train
