// Picks the next token from logits: the likeliest, or a draw at a temperature among the fewest tokens that hold `top_p`
// of the probability. The generator is the standard's mt19937_64 and the draw is ours, so that a seed means the same
// text with every standard library.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace gka::models {

struct Sampling {
  bool greedy = false;
  double temperature = 1.0;  // > 0; near 0 it is greedy
  double top_p = 1.0;        // in (0, 1]
  std::uint64_t seed = 0;
};

class Sampler {
 public:
  /// Throws std::invalid_argument where the temperature or top_p is out of range.
  explicit Sampler(const Sampling& sampling);

  /// Of equal logits the first wins. Throws std::runtime_error where a logit is NaN.
  std::int64_t next(std::span<const float> logits);

 private:
  std::int64_t draw(std::span<const float> logits);

  Sampling sampling_;
  std::mt19937_64 generator_;
  std::vector<double> weights_;      // scratch
  std::vector<std::int64_t> order_;  // scratch
};

}  // namespace gka::models
