// Decays per channel in a chunk. Its tokens are cut into spans of 16, and sums of log decays run over a span, in powers
// of two: x[t][c] is log2 of what channel c keeps from the span's start through token t.
#pragma once

#include "kernels/cuda/memory/tile.cuh"

namespace gka::kernels::cuda::memory {

inline constexpr int kSpan = 16, kSpans = kChunk / kSpan;

/// A log decay as a power of two. Those below −100 are that one, of which float32 makes 0 already, so that sums stay
/// small enough to be exact to 1e-4.
__device__ __forceinline__ float power_of_decay(float log_decay) {
  constexpr float kForgotten = -100, kLog2E = 1.4426950408889634f;
  return kLog2E * (log_decay < kForgotten ? kForgotten : log_decay);  // NaN stays
}

/// The running sums of a span.
__device__ __forceinline__ void sum_up(float (&x)[kSpan]) {
#pragma unroll
  for (int i = 1; i < kSpan; ++i) x[i] += x[i - 1];
}

struct Eight {
  float x[8];
};
__device__ __forceinline__ Eight eight_at(const float* from) {
  const Four low = four_at(from), high = four_at(from + 4);
  return {low.x[0], low.x[1], low.x[2], low.x[3], high.x[0], high.x[1], high.x[2], high.x[3]};
}

/// Eight neighbours, each times factor(its place), rounded.
template <typename Factor>
__device__ __forceinline__ void put_weighted(Bits* to, const Vector& from, Factor&& factor) {
  Vector y;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    y.two[j] = two_bfloat16(factor(2 * j) * low_half(from.two[j]), factor(2 * j + 1) * high_half(from.two[j]));
  }
  *reinterpret_cast<Vector*>(to) = y;
}

}  // namespace gka::kernels::cuda::memory
