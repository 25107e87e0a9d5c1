// The sizes that the Hopper kernels are compiled for: D key channels, and D value channels at a time (forward with a D
// of 256 kStateColumns), with D of 32, 64, 128 or 256. Other problems are padded to one of them; which, is said here.
#pragma once

#include <cstdint>

namespace gka::kernels::cuda::hopper {

inline constexpr int kChunk = 64;  // tokens of a chunk
inline constexpr int kNarrowSize = 32, kSmallSize = 64, kLargeSize = 128, kWideSize = 256;

/// Tiles of D columns are blocks of at most 64, one behind the other: columns of a block, and how many there are.
template <int D>
inline constexpr int kBlockColumns = D < 64 ? D : 64;
template <int D>
inline constexpr int kColumnBlocks = D / kBlockColumns<D>;

/// The columns of a state that a block of threads has, and how many such blocks H has: one, unless it is wide. Value
/// channels are taken as many at a time.
template <int D>
inline constexpr int kStateColumns = D == kWideSize ? 64 : D;
template <int D>
inline constexpr int kStateBlocks = D / kStateColumns<D>;

/// A number for each size, as blocks on a multiprocessor.
template <int D>
constexpr int by_size(int narrow, int small, int large, int wide) {
  return D == kNarrowSize ? narrow : D == kSmallSize ? small : D == kLargeSize ? large : wide;
}
template <int D>
constexpr int by_size(int narrow, int small, int large) {
  static_assert(D != kWideSize);
  return by_size<D>(narrow, small, large, 0);
}

/// The D of a problem that is neither narrow nor wide. More value channels than that are taken block by block.
constexpr int size_for(std::int64_t key_dim, std::int64_t value_dim) {
  return key_dim <= kSmallSize && value_dim <= kSmallSize ? kSmallSize : kLargeSize;
}

}  // namespace gka::kernels::cuda::hopper
