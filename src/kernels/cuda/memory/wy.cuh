// What both kinds of chunk_wy do: T, and what becomes of the values. `Shared` is a pass's shared memory, of which they
// use t, a, v, beta and weighted.values.
//
// T, the inverse of a unit lower triangle, is made in float32: four 16 × 16 triangles by substitution, a thread a
// column; then pairs are joined, 16 to 32 to 64, by [A 0; C B]⁻¹ = [A⁻¹ 0; −B⁻¹ C A⁻¹ B⁻¹].
#pragma once

#include "kernels/cuda/memory/tile.cuh"

namespace gka::kernels::cuda::memory::wy {

inline constexpr int kBlock = 256;
inline constexpr int kTriangle = kChunk + 8;  // rows of a float32 triangle: as many bytes as two tiles have
inline constexpr int kValues = 128;           // values at a time

/// The inverse of I + a's diagonal blocks of 16, into t.
template <typename Shared>
__device__ __forceinline__ void invert_diagonal(Shared& s) {
  if (thread() >= kChunk) return;
  const int first = thread() / 16 * 16, j = thread() % 16;
  float x[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    float sum = r == j ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < r; ++i) sum -= s.a[first + r][first + i] * x[i];
    x[r] = sum;
  }
#pragma unroll
  for (int r = 0; r < 16; ++r) s.t[first + r][first + j] = x[r];
}

/// Joins neighbouring triangles of kSize: t's block below each pair becomes −B⁻¹ C A⁻¹. C A⁻¹ goes through a's mirror
/// block above the diagonal, which nobody needs. A thread has four neighbours of a row.
template <int kSize, typename Shared>
__device__ __forceinline__ void join(Shared& s) {
  constexpr int kPairs = kChunk / (2 * kSize), kRow = kSize / 4;
  static_assert(kPairs * kSize * kRow <= kBlock);
  const int first = thread() / (kSize * kRow) * 2 * kSize, r = thread() / kRow % kSize, c = thread() % kRow * 4;
  const bool busy = thread() < kPairs * kSize * kRow;
  const auto multiply = [&](const float* left, const float* right, int from, int to) {
    Four sum{};
    for (int i = from; i < to; i += 4) {
      const Four row = four_at(left + i);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const Four column = four_at(right + (i + n) * kTriangle);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum.x[j] += row.x[n] * column.x[j];
      }
    }
    return sum;
  };
  if (busy) {  // above row c A⁻¹ is zero
    const Four sum = multiply(&s.a[first + kSize + r][first], &s.t[first][first + c], c, kSize);
    *reinterpret_cast<Four*>(&s.a[first + r][first + kSize + c]) = sum;
  }
  sync();
  if (busy) {  // behind column r B⁻¹ is zero
    Four sum = multiply(&s.t[first + kSize + r][first + kSize], &s.a[first][first + kSize + c], 0, r / 4 * 4 + 4);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum.x[j] = -sum.x[j];
    *reinterpret_cast<Four*>(&s.t[first + kSize + r][first + c]) = sum;
  }
  sync();
}

/// Rows of a warp's tile, from its first row and column on, into a [tokens, heads, width] array.
template <int kAcross>
__device__ __forceinline__ void write_rows(Sums<kAcross>& sums, Bits* to, const ChunkedMemory& m, const Chunk& chunk,
                                           std::int64_t head, int first_row, int first_column, std::int64_t width) {
  sums.each([&](int i, int n, float first, float second) {
    const int t = first_row + Sums<kAcross>::row(i), c = first_column + Sums<kAcross>::column(n);
    if (t >= chunk.tokens || c >= width) return;
    put_two(to + ((chunk.first + t) * m.heads + head) * width + c, first, second);
  });
}

/// A tile as it lies.
template <int kWidth>
__device__ __forceinline__ void write_tile(Bits (&to)[kChunk][kWidth], const Bits (&from)[kChunk][kWidth]) {
  for (int i = 8 * thread(); i < kChunk * kWidth; i += 8 * kBlock) copy_vector(to[0] + i, from[0] + i);
}

/// T β v, or β v, kValues columns at a time.
template <bool kDelta, typename Shared>
__device__ __forceinline__ void write_values(Shared& s, const ChunkedMemory& m, const Chunk& chunk, std::int64_t head,
                                             Bits* u) {
  const int rows = warp() % 4 * 16, columns = warp() / 4 * (kValues / 2);
  const auto width = static_cast<int>(m.value_dim);
  for (int from = 0; from < width; from += kValues) {
    if (from > 0) fetch<kBlock, kValues>(s.v[0], m.v, chunk, head, width, from);  // the first ones are on their way
    wait_for_copies();
    sync();
    Sums<kValues / 16> sums;
    sums.clear();
    if constexpr (kDelta) {
      sums.template multiply<kChunk, Lies::straight, Lies::straight>(s.weighted.values[rows], kSquare, &s.v[0][columns],
                                                                     kValues + kPad);
    } else {
      sums.each([&](int i, int n, float& first, float& second) {
        const int t = rows + sums.row(i);
        const std::uint32_t two = two_at(&s.v[t][columns + sums.column(n)]);
        first = s.beta[t] * low_half(two);
        second = s.beta[t] * high_half(two);
      });
    }
    write_rows(sums, u, m, chunk, head, rows, from + columns, m.value_dim);
    sync();
  }
}

}  // namespace gka::kernels::cuda::memory::wy
