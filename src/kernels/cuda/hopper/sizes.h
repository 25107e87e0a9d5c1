// The sizes that the Hopper kernels are compiled for: D key channels, and D value channels at a time, with D of 64 or
// 128. Other problems are padded to one of them; which, is said here.
#pragma once

#include <cstdint>

namespace gka::kernels::cuda::hopper {

inline constexpr int kChunk = 64;  // tokens of a chunk
inline constexpr int kSmallSize = 64, kLargeSize = 128;

/// The D of a problem. More value channels than that are taken block by block.
constexpr int size_for(std::int64_t key_dim, std::int64_t value_dim) {
  return key_dim <= kSmallSize && value_dim <= kSmallSize ? kSmallSize : kLargeSize;
}

}  // namespace gka::kernels::cuda::hopper
