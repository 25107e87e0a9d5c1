// What both stand-ins for src/kernels/cuda/device.cuh do to numbers: what the card's instructions do, on the host.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace gka::kernels::cuda {

inline float half_to_float(std::uint16_t bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
inline std::uint16_t float_to_half(float value) { return std::bit_cast<std::uint16_t>(static_cast<_Float16>(value)); }
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
inline float power_of_two(float x) { return x < -126 ? 0 : std::exp2(x); }
inline float quick_exp(float x) { return std::exp(x); }
inline float quick_inverse(float x) { return 1.0f / x; }
inline float quick_sqrt(float x) { return std::sqrt(x); }

}  // namespace gka::kernels::cuda
