// Limits that more than one floor states.
#pragma once

#include <cstdint>

namespace gka {

/// Steps of a solver. A solve has converged after a few dozen; a schedule of 2^60 steps would not fit memory.
inline constexpr std::int64_t kMostIterations = 10'000;

/// Of a head: D of queries and keys, V of values.
inline constexpr std::int64_t kLargestDim = 256;

}  // namespace gka
