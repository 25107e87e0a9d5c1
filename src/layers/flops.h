// How much arithmetic a mixer's memory is, for the utilisation of a machine. Counted are the multiplications and
// additions its definition asks for, token by token; what a chunked algorithm adds to go faster is not.
#pragma once

#include <cstdint>
#include <string_view>

#include "layers/config.h"

namespace gka::layers {

/// FLOP per token of forward and backward, on average over a sequence of `tokens`, besides those of the projections
/// (which are 6 per parameter).
double mixing_flops(std::string_view token, const MixerConfig& config, std::int64_t tokens);

}  // namespace gka::layers
