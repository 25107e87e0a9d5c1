// The frequencies of the rotary embedding: plain, or changed for texts longer than those a model was first trained on.
//
// Channel pair i of D/2 turns by θ_i = theta^(−2i/D) a token. To reach `factor` times as far,
//   linear   turns all of them slower by the factor;
//   llama3   leaves those alone that turn often within the original length, slows those that hardly turn once, and
//            blends between;
//   yarn     does the same along a ramp over i, and makes attention sharper by a factor on cos and sin.
#pragma once

#include <cstdint>
#include <vector>

#include "layers/config.h"

namespace gka::layers {

struct RotaryFrequencies {
  std::vector<double> turns;  // [channels / 2], in radians a token
  double factor = 1.0;        // on cos and sin
};
/// Throws std::invalid_argument where a number that the type needs is missing or makes no sense.
RotaryFrequencies rotary_frequencies(std::int64_t channels, double theta, const RopeConfig& config);

}  // namespace gka::layers
