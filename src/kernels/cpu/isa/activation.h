// Sigmoid and SiLU by vectors. The compiler has no vector exp of its own that keeps NaN, so here is one.
#pragma once

#include "gka/types.h"
#include "kernels/cpu/isa/simd.h"

namespace gka::kernels::cpu::GKA_ISA {

template <typename T>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  static constexpr float kLeast = -87.3f, kMost = 88.0f;  // results stay normal numbers
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  static constexpr float kRound = 12582912.0f;  // 1.5 · 2²³: adding it rounds to an integer, in the lowest bits
  static constexpr int kExponentBits = 23;
  static constexpr int kTerms = 7;
};
template <>
struct ExpConstants<double> {
  static constexpr double kLeast = -708.0, kMost = 709.0;
  static constexpr double kLn2High = 0.693145751953125, kLn2Low = 1.42860682030941723212e-6;
  static constexpr double kRound = 6755399441055744.0;
  static constexpr int kExponentBits = 52;
  static constexpr int kTerms = 13;
};

/// e^x within an ulp or two; beyond the range of normal numbers the last one inside it. NaN stays NaN.
template <typename T>
inline Vec<T> exp(Vec<T> x) {
  using C = ExpConstants<T>;
  x = x < C::kLeast ? broadcast(C::kLeast) : x;
  x = x > C::kMost ? broadcast(C::kMost) : x;
  // x = n ln 2 + r, and e^x = 2ⁿ eʳ with eʳ by its series.
  const Vec<T> shifted = x * T(1.44269504088896340736) + C::kRound;
  const Vec<T> n = shifted - C::kRound;
  const Vec<T> r = (x - n * C::kLn2High) - n * C::kLn2Low;
  Vec<T> series = broadcast(T(1));
#pragma GCC unroll 16
  for (int i = C::kTerms; i > 0; --i) series = series * r * T(1.0 / i) + T(1);
  Index<T> bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  Index<T> result;
  std::memcpy(&result, &series, sizeof result);
  result += bits << C::kExponentBits;  // the sum's lowest bits are n; the rest is shifted out
  Vec<T> scaled;
  std::memcpy(&scaled, &result, sizeof scaled);
  return scaled;
}

template <typename T>
struct Activated {
  Vec<T> value;
  Vec<T> slope;
};

template <typename T>
[[gnu::always_inline]] inline Vec<T> activated(Activation activation, Vec<T> z) {
  if (activation == Activation::none) return z;
  const Vec<T> sigmoid = T(1) / (T(1) + exp<T>(-z));
  return activation == Activation::silu ? z * sigmoid : sigmoid;
}

/// With its derivative.
template <typename T>
[[gnu::always_inline]] inline Activated<T> activate(Activation activation, Vec<T> z) {
  if (activation == Activation::none) return {z, broadcast(T(1))};
  const Vec<T> sigmoid = T(1) / (T(1) + exp<T>(-z)), rest = T(1) - sigmoid;
  if (activation == Activation::sigmoid) return {sigmoid, sigmoid * rest};
  return {z * sigmoid, sigmoid * (T(1) + z * rest)};
}

/// The sum of the lanes, halves added to halves.
template <typename T>
inline T sum_lanes(Vec<T> v) {
  T lanes[kLanes<T>];
  store(lanes, v);
  for (int half = kLanes<T> / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

}  // namespace gka::kernels::cpu::GKA_ISA
