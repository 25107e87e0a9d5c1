// Vectors of the instruction set this file is compiled for (GKA_ISA), by the compiler's own vector types, so that one
// source serves AVX-512, AVX2 and any other machine. Everything lives in a namespace named after the set: the same
// templates compiled with different flags must never be merged by the linker.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#ifndef GKA_ISA
#error "compile with -DGKA_ISA=portable|avx2|avx512"
#endif

namespace gka::kernels::cpu::GKA_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

/// Lanes of T in one register.
template <typename T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <typename T>
struct VectorOf {
  using type [[gnu::vector_size(kVectorBytes), gnu::may_alias]] = T;
};
template <typename T>
using Vec = typename VectorOf<T>::type;

template <typename T>
inline Vec<T> load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <typename T>
inline void store(T* p, Vec<T> v) {
  std::memcpy(p, &v, sizeof v);
}

template <typename T>
inline Vec<T> broadcast(T x) {
  return x - Vec<T>{};
}

/// Integers as wide as T, which is what a comparison of Vec<T> gives.
template <typename T>
using Index = decltype(Vec<T>{} == Vec<T>{});

/// Lanes 0 … of both inputs alternating, from their lower (kHalf = 0) or upper halves.
template <typename T, int kHalf, int... kLane>
inline Vec<T> interleave(Vec<T> a, Vec<T> b, std::integer_sequence<int, kLane...> /*every lane*/) {
  return __builtin_shufflevector(a, b, (kHalf * kLanes<T> / 2 + kLane / 2 + kLane % 2 * kLanes<T>)...);
}

/// A square of kLanes × kLanes numbers, by interleaving rows half a square apart log₂(kLanes) times.
template <typename T>
inline void transpose(Vec<T> (&rows)[kLanes<T>]) {
  constexpr int n = kLanes<T>;
#pragma GCC unroll 4
  for (int stage = 1; stage < n; stage *= 2) {
    Vec<T> next[n];
#pragma GCC unroll 8
    for (int i = 0; i < n / 2; ++i) {
      const std::make_integer_sequence<int, n> every{};
      next[2 * i] = interleave<T, 0>(rows[i], rows[i + n / 2], every);
      next[2 * i + 1] = interleave<T, 1>(rows[i], rows[i + n / 2], every);
    }
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) rows[i] = next[i];
  }
}

constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

/// n rounded up to whole vectors.
template <typename T>
constexpr int padded(std::int64_t n) {
  return round_up(static_cast<int>(n), kLanes<T>);
}

}  // namespace gka::kernels::cpu::GKA_ISA
