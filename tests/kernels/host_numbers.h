// What both stand-ins for src/kernels/cuda/device.cuh do to numbers: what the card's instructions do, on the host.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/problem.h"

namespace gka::kernels::cuda {

/// From a table: there is no instruction for it that every machine has, and a function takes its time.
inline float half_to_float(std::uint16_t bits) {
  static const auto table = [] {
    auto all = std::make_unique<std::array<float, 65536>>();
    for (std::size_t i = 0; i < all->size(); ++i) {
      (*all)[i] = static_cast<float>(std::bit_cast<Float16>(static_cast<std::uint16_t>(i)));
    }
    return all;
  }();
  return (*table)[bits];
}
inline std::uint16_t float_to_half(float value) { return std::bit_cast<std::uint16_t>(static_cast<Float16>(value)); }
inline float bits_to_float(std::uint32_t bits) { return std::bit_cast<float>(bits); }
inline std::uint32_t float_to_bits(float value) { return std::bit_cast<std::uint32_t>(value); }

/// Two numbers rounded to bfloat16, to even; no number stays none.
inline std::uint32_t two_bfloat16(float first, float second) {
  const auto rounded = [](float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    return value != value ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  };
  return rounded(first) | rounded(second) << 16;
}
inline std::uint32_t fma_two_bfloat16(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const auto low = [](std::uint32_t two) { return std::bit_cast<float>(two << 16); };
  const auto high = [](std::uint32_t two) { return std::bit_cast<float>(two & 0xffff0000u); };
  return two_bfloat16(std::fma(low(a), low(b), low(c)), std::fma(high(a), high(b), high(c)));
}
template <std::uint32_t kWhich>
std::uint32_t pick_bytes(std::uint32_t low, std::uint32_t high) {
  const auto all = (static_cast<std::uint64_t>(high) << 32) | low;
  std::uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) picked |= static_cast<std::uint32_t>(all >> 8 * (kWhich >> 4 * i & 7) & 0xff) << 8 * i;
  return picked;
}
inline float power_of_two(float x) { return x < -126 ? 0 : std::exp2(x); }
inline float quick_exp(float x) { return std::exp(x); }
inline float quick_inverse(float x) { return 1.0f / x; }
inline float quick_sqrt(float x) { return std::sqrt(x); }

}  // namespace gka::kernels::cuda
