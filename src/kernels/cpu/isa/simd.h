// Vectors of the instruction set this file is compiled for (GKA_ISA), by the compiler's own vector types, so that one
// source serves AVX-512, AVX2 and any other machine. Everything lives in a namespace named after the set: the same
// templates compiled with different flags must never be merged by the linker.
#pragma once

#include <cstdint>
#include <cstring>

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

constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

/// n rounded up to whole vectors.
template <typename T>
constexpr int padded(std::int64_t n) {
  return round_up(static_cast<int>(n), kLanes<T>);
}

}  // namespace gka::kernels::cpu::GKA_ISA
