// A stand-in for src/kernels/cuda/memory/mma.cuh: lanes hand each other what the card's instructions would fetch.
#pragma once

#include <array>

#include "kernels/cuda/device.cuh"

namespace gka::kernels::cuda::memory {

using Bits = std::uint16_t;

inline constexpr int kPad = 8;

inline float low_half(std::uint32_t two) { return bits_to_float(two << 16); }
inline float high_half(std::uint32_t two) { return bits_to_float(two & 0xffff0000u); }

template <bool kTransposed>
void load_blocks(std::uint32_t (&to)[4], const Bits* row) {
  const Bits* const* rows = from_all_lanes(row);
  for (int block = 0; block < 4; ++block) {
    const auto at = [&](int r, int c) { return static_cast<std::uint32_t>(rows[8 * block + r][c]); };
    const int a = lane() / 4, b = lane() % 4 * 2;
    to[block] = kTransposed ? at(b, a) | at(b + 1, a) << 16 : at(a, b) | at(a, b + 1) << 16;
  }
}

inline std::uint32_t transposed(std::uint32_t two) {
  const auto* all = from_all_lanes(two);
  const auto at = [&](int row, int column) { return all[4 * row + column / 2] >> 16 * (column % 2) & 0xffffu; };
  const int a = lane() / 4, b = lane() % 4 * 2;
  return at(b, a) | at(b + 1, a) << 16;
}

inline void multiply_add(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  const auto* all = from_all_lanes(std::array<std::uint32_t, 6>{a[0], a[1], a[2], a[3], b0, b1});
  const auto half = [](std::uint32_t two, int which) { return which == 0 ? low_half(two) : high_half(two); };
  for (int i = 0; i < 4; ++i) {
    const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
    float sum = 0;
    for (int k = 0; k < 16; ++k) {
      const auto& left = all[row % 8 * 4 + k % 8 / 2];
      const auto& right = all[column * 4 + k % 8 / 2];
      sum += half(left[static_cast<std::size_t>(row / 8 + k / 8 * 2)], k % 2) *
             half(right[static_cast<std::size_t>(4 + k / 8)], k % 2);
    }
    sums[i] += sum;
  }
}

template <int kBlock>
void copy_bytes(void* to, const void* from, int bytes, std::uint64_t*) {
  if (thread() == 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}
inline void make_barriers(std::uint64_t*, int) {}
inline void wait_for_bytes(std::uint64_t*, int) {}

}  // namespace gka::kernels::cuda::memory
