// Matrix products of float32 numbers on tensor cores, by one warp: 16 rows and 8·kAcross columns at a time.
//
// Tensor cores take 11 bits of a number (TF32). So each is cut into two such parts, high and low, and three of the four
// products are summed: 22 bits, whatever the numbers' range. A tensor core drops bits where it adds to a sum; sums of
// 32 products are therefore begun from 0, the small terms first, and added up in float32.
//
// tests/kernels/cuda_on_host has a stand-in for this header, too: the same parts and products, one thread.
#pragma once

#include "kernels/cuda/device.cuh"

namespace gka::kernels::cuda {

struct Parts {
  std::uint32_t high, low;  // bits of float32; tensor cores ignore the lowest 13
};

/// Rounded to 11 bits, and what that leaves. Not a number: the low part carries it.
__device__ __forceinline__ Parts parts_of(float x) {
  const std::uint32_t high = (float_to_bits(x) + 0x1000u) & 0xffffe000u;
  return {high, float_to_bits(x - bits_to_float(high))};
}

/// sums += A[16 × 8] · B[8 × 8], a and b as `mma` wants them spread over the lanes.
__device__ __forceinline__ void multiply_add(float (&sums)[4], const std::uint32_t (&a)[4],
                                             const std::uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <int kAcross>
struct WarpTile {
  static constexpr int kRows = 16, kColumns = 8 * kAcross;
  static constexpr int kWidth = 2;              // a thread has pairs of neighbours,
  static constexpr int kVectors = 2 * kAcross;  // so many of them

  float sums[kAcross][4];

  __device__ __forceinline__ static int row(int v) { return lane() / 4 + v % 2 * 8; }
  __device__ __forceinline__ static int column(int v) { return v / 2 * 8 + lane() % 4 * 2; }
  __device__ __forceinline__ float* vector(int v) { return sums[v / 2] + v % 2 * 2; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kAcross; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] = 0;
    }
  }

  /// += A[rows × k] · B[k × columns] with A(i, l) = a[i·row + l·step] and B(l, j) = b[l·ldb + j]. Behind the last
  /// column it reads, and drops, whatever there is, up to kColumns.
  __device__ __forceinline__ void multiply(const float* a, int row, int step, int rows, const float* b, int ldb,
                                           [[maybe_unused]] int columns, int k) {
    const int group = lane() / 4, within = lane() % 4;
    const int upper = group < rows ? group : rows - 1, lower = group + 8 < rows ? group + 8 : rows - 1;
    a += upper * row + within * step;
    b += within * ldb + group;
    const Apart apart{.down = (lower - upper) * row, .over = 4 * step};
    const int whole = k / kLong;
    float coming[kAhead][4];  // of A, on their way from wherever it lies
#pragma unroll
    for (int s = 0; s < kAhead; ++s) load_left(a + s * kStep * step, apart, whole > 0, coming[s]);
#pragma unroll 1
    for (int l = 0; l < whole; ++l) {
      float part[kAcross][4] = {};
#pragma unroll 1
      for (int at = 0; at < kLong; at += kAhead * kStep) {
        const bool more = l + 1 < whole || at + kAhead * kStep < kLong;
#pragma unroll
        for (int s = 0; s < kAhead; ++s) {
          const Left left(coming[s]);
          load_left(a + kAhead * kStep * step, apart, more, coming[s]);
          add_step<false>(part, left, b, ldb, kStep);
          a += kStep * step;
          b += kStep * ldb;
        }
      }
      add(part);
    }
    int left_over = k - whole * kLong;
    if (left_over == 0) return;
    float part[kAcross][4] = {};
#pragma unroll 1
    for (; left_over > 0; left_over -= kStep) {
      const bool first = within < left_over, second = within + 4 < left_over;
      const Left left({first ? a[0] : 0.0f, first ? a[apart.down] : 0.0f, second ? a[apart.over] : 0.0f,
                       second ? a[apart.down + apart.over] : 0.0f});
      add_step<true>(part, left, b, ldb, left_over - within);
      a += kStep * step;
      b += kStep * ldb;
    }
    add(part);
  }

 private:
  static constexpr int kStep = 8, kLong = 32;
  static constexpr int kAhead = kAcross > 2 ? 2 : 4;    // steps: there are registers for so many
  static constexpr int kAtOnce = kAcross == 4 ? 4 : 2;  // sums that a tensor core works at in turn

  /// From one number of A that a thread has to the others.
  struct Apart {
    int down, over;
  };

  /// 16 × 8 of A.
  struct Left {
    std::uint32_t high[4], low[4];

    __device__ __forceinline__ explicit Left(const float (&values)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Parts parts = parts_of(values[i]);
        high[i] = parts.high;
        low[i] = parts.low;
      }
    }
  };

  __device__ __forceinline__ static void load_left(const float* a, const Apart& apart, bool there, float (&to)[4]) {
    to[0] = there ? a[0] : 0.0f;
    to[1] = there ? a[apart.down] : 0.0f;
    to[2] = there ? a[apart.over] : 0.0f;
    to[3] = there ? a[apart.down + apart.over] : 0.0f;
  }

  __device__ __forceinline__ void add(const float (&part)[kAcross][4]) {
#pragma unroll
    for (int n = 0; n < kAcross; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] += part[n][i];
    }
  }

  /// Eight columns of A, rows of B; kGuarded: of this thread's two only those below `left` count.
  template <bool kGuarded>
  __device__ __forceinline__ static void add_step(float (&part)[kAcross][4], const Left& a, const float* b, int ldb,
                                                  int left) {
    const bool first = !kGuarded || left > 0, second = !kGuarded || left > 4;
#pragma unroll
    for (int from = 0; from < kAcross; from += kAtOnce) {
      std::uint32_t high[kAtOnce][2], low[kAtOnce][2];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const Parts x = parts_of(first ? b[8 * (from + n)] : 0.0f);
        const Parts y = parts_of(second ? b[4 * ldb + 8 * (from + n)] : 0.0f);
        high[n][0] = x.high;
        high[n][1] = y.high;
        low[n][0] = x.low;
        low[n][1] = y.low;
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) multiply_add(part[from + n], a.low, high[n]);
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) multiply_add(part[from + n], a.high, low[n]);
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) multiply_add(part[from + n], a.high, high[n]);
    }
  }
};

}  // namespace gka::kernels::cuda
