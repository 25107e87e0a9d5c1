// Matrix products as in tiles.cuh, of numbers that were cut into parts before: two float16 numbers of 11 bits each, of
// what a power of two has brought into float16's range. For operands that are multiplied many times: a step takes a
// quarter of the instructions, and tensor cores are twice as fast.
//
// tests/kernels/cuda_on_host has a stand-in for this header.
#pragma once

#include "kernels/cuda/device.cuh"

namespace gka::kernels::cuda {

/// Rows of ld float16 numbers, twice: what a number is rounded to 11 bits, and the rest of it.
struct SplitArray {
  std::uint16_t *high, *low;
  int ld;

  __device__ __forceinline__ SplitArray from(int row, int column) const {
    return {high + row * ld + column, low + row * ld + column, ld};
  }
};

/// Whether tiles can read them as left or transposed operands.
__device__ inline bool near(const SplitArray& array) { return in_shared(array.high); }

__device__ __forceinline__ void multiply_add_halves(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                    std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Four 8 × 8 matrices of 16-bit numbers from shared memory, the rows of one from the addresses of eight lanes.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(const std::uint16_t* p, std::uint32_t (&to)[4]) {
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(p));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
  }
}

/// 16·kDown rows and 16 columns of a product, by one warp.
template <int kDown>
struct SplitTile {
  static constexpr int kRows = 16 * kDown, kColumns = 16;
  static constexpr int kWidth = 2, kVectors = 4 * kDown;

  float sums[kDown][2][4];   // of high parts
  float small[kDown][2][4];  // the rest

  __device__ __forceinline__ static int row(int v) { return v / 4 * 16 + v % 2 * 8 + lane() / 4; }
  __device__ __forceinline__ static int column(int v) { return v / 2 % 2 * 8 + lane() % 4 * 2; }
  __device__ __forceinline__ float* vector(int v) { return sums[v / 4][v / 2 % 2] + v % 2 * 2; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int v = 0; v < 2 * kVectors; ++v) sums[v / 8][v / 4 % 2][v % 4] = small[v / 8][v / 4 % 2][v % 4] = 0;
  }

  /// Once after all products: the two kinds of sums become one.
  __device__ __forceinline__ void fold() {
#pragma unroll
    for (int v = 0; v < 2 * kVectors; ++v) {
      sums[v / 8][v / 4 % 2][v % 4] += small[v / 8][v / 4 % 2][v % 4];
      small[v / 8][v / 4 % 2][v % 4] = 0;
    }
  }

  /// += A · B with A(i, l) = a[i][l] and B(l, j) = b[j][l]; a in shared memory, b there too or (kFar) in global memory.
  template <bool kFar>
  __device__ __forceinline__ void multiply(const SplitArray& a, const SplitArray& b, int k) {
    const SplitArray left = a.from(lane() % 16, lane() / 16 * 8);
    const SplitArray near = b.from(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2 * 8);
    const SplitArray far = b.from(lane() / 4, lane() % 4 * 2);
    std::uint32_t high[4], low[4];
    if constexpr (kFar) {
      load_far(far.high, b.ld, high);
      load_far(far.low, b.ld, low);
    }
#pragma unroll 2
    for (int l = 0; l < k; l += 16) {
      if constexpr (kFar) {
        const int next = l + 16 < k ? l + 16 : l;
        std::uint32_t next_high[4], next_low[4];
        load_far(far.high + next, b.ld, next_high);
        load_far(far.low + next, b.ld, next_low);
        add_step(left, l, high, low);
#pragma unroll
        for (int i = 0; i < 4; ++i) high[i] = next_high[i], low[i] = next_low[i];
      } else {
        load_matrices<false>(near.high + l, high);
        load_matrices<false>(near.low + l, low);
        add_step(left, l, high, low);
      }
    }
  }

  /// += A · B with B(l, j) = b[l][j], both in shared memory.
  __device__ __forceinline__ void multiply_rows(const SplitArray& a, const SplitArray& b, int k) {
    const SplitArray left = a.from(lane() % 16, lane() / 16 * 8), right = b.from(lane() % 16, lane() / 16 * 8);
#pragma unroll 1
    for (int l = 0; l < k; l += 16) {
      std::uint32_t high[4], low[4];
      load_matrices<true>(right.high + l * b.ld, high);
      load_matrices<true>(right.low + l * b.ld, low);
      add_step(left, l, high, low);
    }
  }

 private:
  /// Columns 0 … 7 of B, lines 0 … 7 and 8 … 15, then columns 8 … 15.
  __device__ __forceinline__ static void load_far(const std::uint16_t* b, int ld, std::uint32_t (&to)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = *reinterpret_cast<const std::uint32_t*>(b + i / 2 * 8 * ld + i % 2 * 8);
  }

  __device__ __forceinline__ void add_step(const SplitArray& left, int l, const std::uint32_t (&high)[4],
                                           const std::uint32_t (&low)[4]) {
#pragma unroll
    for (int d = 0; d < kDown; ++d) {
      std::uint32_t a_high[4], a_low[4];
      load_matrices<false>(left.high + d * 16 * left.ld + l, a_high);
      load_matrices<false>(left.low + d * 16 * left.ld + l, a_low);
#pragma unroll
      for (int n = 0; n < 2; ++n) multiply_add_halves(small[d][n], a_low, high[2 * n], high[2 * n + 1]);
#pragma unroll
      for (int n = 0; n < 2; ++n) multiply_add_halves(sums[d][n], a_high, high[2 * n], high[2 * n + 1]);
#pragma unroll
      for (int n = 0; n < 2; ++n) multiply_add_halves(small[d][n], a_high, low[2 * n], low[2 * n + 1]);
    }
  }
};

}  // namespace gka::kernels::cuda
