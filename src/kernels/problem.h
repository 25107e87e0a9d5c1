// What every backend on the host needs to read a Problem: sequences, element access by type, and conversions.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>

#include "gka/kernels.h"
#include "kernels/views.h"

namespace gka::kernels {

/// bfloat16 as storage: the upper half of a float32, rounded to nearest even.
struct BFloat16 {
  std::uint16_t bits = 0;

  BFloat16() = default;
  explicit BFloat16(float value) {
    const auto raw = std::bit_cast<std::uint32_t>(value);
    const bool nan = (raw & 0x7fffffffu) > 0x7f800000u;
    bits = nan ? 0x7fc0 : static_cast<std::uint16_t>((raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
  explicit operator double() const { return static_cast<float>(*this); }
};

#if defined(__aarch64__) && !defined(__clang__) && __GNUC__ < 13
using Float16 = __fp16;  // g++ 12 knows it there by this name alone
#else
using Float16 = _Float16;
#endif

/// Calls body(T{}) with the C++ type of `dtype`.
template <typename Body>
decltype(auto) with_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::float64: return std::forward<Body>(body)(double{});
    case DType::bfloat16: return std::forward<Body>(body)(BFloat16{});
    case DType::float16: return std::forward<Body>(body)(Float16{});
    case DType::float32: break;
  }
  return std::forward<Body>(body)(float{});
}

/// Through float32 for the half types, so that rounding happens once and as torch does it.
template <typename To, typename From>
To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (sizeof(To) == 2) {
    return static_cast<To>(static_cast<float>(value));
  } else {
    return static_cast<To>(value);
  }
}

/// Tokens `begin` … `begin + length − 1` of row `batch`.
struct Sequence {
  std::int64_t batch = 0;
  std::int64_t begin = 0;
  std::int64_t length = 0;
};

/// Sequence n of a call that has batch rows or cu_seqlens.
template <typename Call>
Sequence sequence(const Call& p, std::int64_t n) {
  if (p.cu_seqlens == nullptr) return {.batch = n, .begin = 0, .length = p.tokens};
  return {.batch = 0, .begin = p.cu_seqlens[n], .length = p.cu_seqlens[n + 1] - p.cu_seqlens[n]};
}

inline bool solves(const Problem& p) { return p.options.part != Part::memory; }
inline bool remembers_values(const Problem& p) { return p.options.part != Part::solve; }

}  // namespace gka::kernels
