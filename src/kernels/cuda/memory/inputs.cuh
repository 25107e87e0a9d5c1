// What both kinds of bwd_inputs do: a chunk's values, kValues columns at a time, go into all products that sum over
// them. A block of sixteen warps takes one head of one chunk. `Shared` is a pass's shared memory, of which they use t,
// z and beta.
#pragma once

#include "kernels/cuda/memory/tile.cuh"

namespace gka::kernels::cuda::memory::inputs {

inline constexpr int kBlock = 512;
inline constexpr int kParts = kBlock / 128;  // four warps have all tokens; so many times four share the columns
inline constexpr int kValues = 64;
inline constexpr int kRowsAtOnce = kBlock / (kValues / 8);  // of a state, a thread having eight values
static_assert(kChunk == kValues && kChunk == 16 * kParts);

/// kValues columns of all there is per value.
template <int kKeys>
struct Block {
  alignas(16) Bits d_o[kChunk][kSquare], u[kChunk][kSquare], d_u[kChunk][kSquare], v[kChunk][kSquare];
  alignas(16) Bits state[kKeys][kSquare], slope[kKeys][kSquare];
};

/// What a warp has of the products: 16 tokens and a quarter of the tokens, keys or values.
template <int kKeys, Decay kDecay>
struct Products {
  Sums<2> out_u, z_u;                                                 // do uᵀ, z uᵀ
  Sums<kKeys / 32> out_s, z_s, u_d;                                   // do Sᵀ, z Sᵀ, u Dᵀ
  float z_v[2];                                                       // z·v, of both rows of this thread
  float states[kDecay == Decay::per_head ? 1 : kKeys / kRowsAtOnce];  // ⟨D, S⟩; per channel of this thread's rows

  __device__ __forceinline__ void clear() {
    out_u.clear();
    z_u.clear();
    out_s.clear();
    z_s.clear();
    u_d.clear();
    z_v[0] = z_v[1] = 0;
    for (float& sum : states) sum = 0;
  }
};

__device__ __forceinline__ int part_row() { return warp() % 4 * 16; }
__device__ __forceinline__ int part() { return warp() / 4; }

/// The sum over the four lanes that share a row.
__device__ __forceinline__ float sum_row(float x) {
  x += from_lane(x, 1);
  return x + from_lane(x, 2);
}

/// Both rows' sums of this warp's columns.
__device__ __forceinline__ void put_row_sums(float (&to)[kParts][kChunk], const float (&sums)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = sum_row(sums[i]);
    if (lane() % 4 == 0) to[part()][part_row() + Sums<2>::row(i)] = sum;
  }
}

/// Starts copies of a task's queries, keys and, with the delta rule, T.
template <int kKeys, bool kDelta, typename Shared>
__device__ __forceinline__ void fetch_keys(Shared& s, const ChunkedMemory& m, const ChunkedMemorySaved& saved,
                                           const Task& task) {
  fetch_queries_and_keys<kBlock, kKeys>(s, m, task);
  if constexpr (kDelta) fetch_matrix<kBlock, kChunk, kChunk>(s.t[0], t_of(saved, task), kChunk, kChunk, kChunk);
}

template <int kKeys>
__device__ __forceinline__ void fetch_block(Block<kKeys>& to, const ChunkedMemory& m, const ChunkedMemorySaved& saved,
                                            const ChunkedMemoryGradients& g, const Chunk& chunk, std::int64_t head,
                                            int from) {
  const auto keys = static_cast<int>(m.key_dim), values = static_cast<int>(m.value_dim);
  const auto rows = [&](Bits* tile, const MemoryRows& array) {
    fetch<kBlock, kValues>(tile, array, chunk, head, values, from);
  };
  const auto own = [&](const void* data) { return MemoryRows{data, m.heads * m.value_dim, m.value_dim}; };
  rows(to.d_o[0], g.d_o);
  rows(to.u[0], m.has_own_u() ? own(saved.u) : m.v);
  rows(to.d_u[0], own(g.d_u));
  rows(to.v[0], m.v);
  const std::int64_t at = (chunk.slot * m.heads + head) * m.key_dim * m.value_dim + from;
  fetch_matrix<kBlock, kKeys, kValues>(to.state[0], static_cast<const Bits*>(saved.states) + at, values, keys,
                                       values - from);
  fetch_matrix<kBlock, kKeys, kValues>(to.slope[0], static_cast<const Bits*>(g.d_states) + at, values, keys,
                                       values - from);
  end_group();
}

/// z of a block of values, and with it dv and z·v.
template <bool kDelta, int kKeys, Decay kDecay, typename Shared>
__device__ __forceinline__ void slopes_of_values(Shared& s, const Block<kKeys>& b, Products<kKeys, kDecay>& products,
                                                 const ChunkedMemory& m, const Chunk& chunk, std::int64_t head,
                                                 int from, Bits* d_v) {
  const int rows = part_row(), columns = part() * 16;
  Sums<2> z;
  z.clear();
  if constexpr (kDelta) {
    z.template multiply<kChunk, Lies::turned, Lies::straight>(&s.t[0][rows], kSquare, &b.d_u[0][columns], kSquare);
    z.put(&s.z[rows][columns], kSquare);
  } else {
    z.each([&](int i, int n, float& first, float& second) {
      const std::uint32_t two = two_at(&b.d_u[rows + z.row(i)][columns + z.column(n)]);
      first = low_half(two);
      second = high_half(two);
    });
  }
  z.each([&](int i, int n, float first, float second) {
    const int t = rows + z.row(i), c = columns + z.column(n);
    const std::uint32_t v = two_at(&b.v[t][c]);
    products.z_v[i] += first * low_half(v) + second * high_half(v);
    if (t >= chunk.tokens || from + c >= m.value_dim) return;
    put_two(d_v + ((chunk.first + t) * m.heads + head) * m.value_dim + from + c, s.beta[t] * first, s.beta[t] * second);
  });
}

/// Adds a block of values to everything that sums over them.
template <bool kDelta, int kKeys, Decay kDecay, typename Shared>
__device__ __forceinline__ void add_block(const Shared& s, const Block<kKeys>& b, Products<kKeys, kDecay>& p) {
  const int rows = part_row(), tokens = part() * 16, keys = part() * (kKeys / 4);
  p.out_u.template multiply<kValues, Lies::straight, Lies::turned>(b.d_o[rows], kSquare, b.u[tokens], kSquare);
  p.out_s.template multiply<kValues, Lies::straight, Lies::turned>(b.d_o[rows], kSquare, b.state[keys], kSquare);
  p.u_d.template multiply<kValues, Lies::straight, Lies::turned>(b.u[rows], kSquare, b.slope[keys], kSquare);
  if constexpr (kDelta) {
    p.z_u.template multiply<kValues, Lies::straight, Lies::turned>(s.z[rows], kSquare, b.u[tokens], kSquare);
    p.z_s.template multiply<kValues, Lies::straight, Lies::turned>(s.z[rows], kSquare, b.state[keys], kSquare);
  }
  constexpr int kVectors = kValues / 8;
#pragma unroll
  for (int i = 0; i < kKeys; i += kRowsAtOnce) {
    const int r = thread() / kVectors + i, c = thread() % kVectors * 8;
    const Vector x = vector_at(&b.state[r][c]), y = vector_at(&b.slope[r][c]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      p.states[kDecay == Decay::per_head ? 0 : i / kRowsAtOnce] +=
          low_half(x.two[j]) * low_half(y.two[j]) + high_half(x.two[j]) * high_half(y.two[j]);
    }
  }
}

}  // namespace gka::kernels::cuda::memory::inputs
