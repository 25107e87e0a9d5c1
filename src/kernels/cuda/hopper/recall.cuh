// The answers: o_c = s U_cᵀ z_c with z = q + α (x − q). A block walks the chunks of a group with 64 columns of U in its
// accumulators,
//
//   o_c = s (ζ_c U_0ᵀ z_c + Σ_{j≤c} M_jc β_j (z_cᵀk_j) v_j),   U ← ζ_C U + Kᵀ diag(w) V,
//
// so states of U are neither written nor read chunk by chunk. x is large where H is small, and rounding it or U to bf16
// would cost 8e-3: z, U and the masked scores go into the products in two parts.
#pragma once

#include "kernels/cuda/hopper/solve.cuh"

namespace gka::kernels::cuda::hopper {

inline constexpr int kValues = 64;  // columns of U that a block walks with

struct RecallCall {
  View o;
  const uint4* z;       // as the solve leaves it
  const float* states;  // [groups, heads, D, V]: U where each group begins
  float* saved;         // [segments, heads, D, V], or null
  bool whole_k, whole_v, o_pairs;
};

/// U in two parts, keys and weighted values in two, values in two (float16 only).
template <int D, DType kType>
inline constexpr int kRecallBytes = 1024 + 2 * (2 * D * kValues + (kType == DType::float16 ? 2 : 1) * kTokens * D +
                                                (kType == DType::float16 ? 4 : 3) * kTokens * kValues);

__device__ __forceinline__ void write_pair(const View& view, std::int64_t at, float a, float b, bool second,
                                           bool pairs) {
  const bool bf = view.dtype == DType::bfloat16;
  if (pairs && view.dtype != DType::float32) {
    *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(view.data) + at) =
        bf ? pack(a, b) : float_to_half(a) | static_cast<std::uint32_t>(float_to_half(b)) << 16;
    return;
  }
  write<float>(view, at, a);
  if (second) write<float>(view, at + 1, b);
}

template <int D, DType kType>
__global__ void __launch_bounds__(kWarpgroup, 2)
    recall(const __grid_constant__ Problem p, Cut cut, const __grid_constant__ RecallCall call) {
  constexpr bool kHalf = kType == DType::float16;
  __shared__ Gates gates;
  __shared__ float weight[kTokens];
  __shared__ float sums[4];
  constexpr int kPart = D * kValues * 2, kKeyTile = kTokens * D * 2, kValueTile = kTokens * kValues * 2;
  char *const u_hi = aligned_tiles(), *const u_lo = u_hi + kPart;
  char *const k = u_lo + kPart, *const k_lo = k + (kHalf ? kKeyTile : 0);
  char *const hi = k_lo + kKeyTile, *const lo = hi + kValueTile;
  char *const v = lo + kValueTile, *const v_lo = v + (kHalf ? kValueTile : 0);
  const int dim = static_cast<int>(p.key_dim), width = static_cast<int>(p.value_dim);
  const int across = (width + kValues - 1) / kValues;
  const auto scale = static_cast<float>(p.options.scale);
  for (std::int64_t task = block(); task < cut.count(p) * p.heads * across; task += blocks()) {
    const int first = static_cast<int>(task % across) * kValues;
    const std::int64_t head = task / across % p.heads, at = task / across / p.heads;
    const Group group = cut.groups[at];
    const Stretch whole = tokens_of(cut, group);
    const int chunks = static_cast<int>((whole.length + kTokens - 1) / kTokens);
    State<D, kValues> state;
    state.load(call.states + (at * p.heads + head) * dim * width, dim, width, first);
    bool lost = !finite(state.norm(sums));  // the state at the chunk's start
    TokenRows<D> keys;
    TokenRows<kValues> values;
    GateOfToken gate;
    const auto fetch = [&](int i) {
      const Stretch chunk = chunk_of(whole, i);
      keys.fetch(p.k, chunk, head, dim, 0, call.whole_k);
      values.fetch(p.v, chunk, head, width, first, call.whole_v);
      gate = fetch_gates(p, chunk, head);
    };
    fetch(0);
    for (int i = 0; i < chunks; ++i) {
      const Stretch chunk = chunk_of(whole, i);
      const int len = static_cast<int>(chunk.length);
      if (call.saved != nullptr && i % 2 == 0) {
        state.store(call.saved + ((group.segment + i / 2) * p.heads + head) * dim * width, dim, width, first);
      }
      state.split(u_hi, u_lo, lost ? 0 : 1);
      set_gates(gates, gate);
      keys.template check<kType>(gates);
      values.template check<kType>(gates);
      const double end = gates.g[kTokens - 1];
      if (thread() < kTokens) {
        weight[thread()] = gates.beta[thread()] * __expf(static_cast<float>(end - gates.g[thread()]));
      }
      sync();
      const bool lost_at_end = find_lost(gates, lost);
      keys.template store_split<kType>(k, k_lo);
      values.template store_split<kType>(v, v_lo);
      values.template store<kType>(hi, lo, [&](int row) { return weight[row]; });
      std::uint32_t z[D / 4], z_lo[D / 4];
      const uint4* const from = call.z + ((2 * group.segment + i) * p.heads + head) * (D / 8) * kWarpgroup + thread();
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        const uint4 one = from[n * kWarpgroup], two = from[(n + D / 16) * kWarpgroup];
        z[4 * n] = one.x, z[4 * n + 1] = one.y, z[4 * n + 2] = one.z, z[4 * n + 3] = one.w;
        z_lo[4 * n] = two.x, z_lo[4 * n + 1] = two.y, z_lo[4 * n + 2] = two.z, z_lo[4 * n + 3] = two.w;
      }
      publish();
      sync();
      const std::uint64_t key_tile = descriptor(k, kTokens * 128), key_lo = descriptor(k_lo, kTokens * 128);
      const std::uint64_t state_hi = descriptor(u_hi, D * 128), state_lo = descriptor(u_lo, D * 128);
      float scores[32], out[32];
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < D / 16; ++s) {
        mma<false>(scores, z + 4 * s, k_major_step(key_tile, s, kTokens), s > 0);
        mma<false>(scores, z_lo + 4 * s, k_major_step(key_tile, s, kTokens));
        if (kHalf) mma<false>(scores, z + 4 * s, k_major_step(key_lo, s, kTokens));
      }
      wgmma_commit();
#pragma unroll
      for (int s = 0; s < D / 16; ++s) {
        mma<true>(out, z + 4 * s, mn_major_step(state_hi, s), s > 0);
        mma<true>(out, z_lo + 4 * s, mn_major_step(state_hi, s));
        mma<true>(out, z + 4 * s, mn_major_step(state_lo, s));
      }
      wgmma_commit();
      wgmma_wait<1>();
      hold(scores);
      std::uint32_t masked[16], rest[16];
      const float sinces[2] = {gates.since[own_row()], gates.since[own_row() + 8]};
      const int froms[2] = {gates.from[own_row()], gates.from[own_row() + 8]};
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const int row = own_row() + n % 2 * 8, j = n / 2 * 8 + own_column();
        const float2 beta = *reinterpret_cast<const float2*>(&gates.beta[j]);
        const float2 since = *reinterpret_cast<const float2*>(&gates.since[j]);
        const float one = beta.x * __expf(sinces[n % 2] - since.x) * scores[2 * n];
        const float two = beta.y * __expf(sinces[n % 2] - since.y) * scores[2 * n + 1];
        const float a = j >= froms[n % 2] && j <= row ? one : 0, b = j + 1 >= froms[n % 2] && j + 1 <= row ? two : 0;
        masked[n] = pack(a, b);
        rest[n] = pack_rest(a, b, masked[n]);
      }
      wgmma_wait<0>();
      hold(out);
      const float zeta[2] = {__expf(static_cast<float>(gates.g[own_row()])),
                             __expf(static_cast<float>(gates.g[own_row() + 8]))};
#pragma unroll
      for (int n = 0; n < 32; ++n) out[n] *= zeta[n / 2 % 2];
      state.fade(__expf(static_cast<float>(end)));
      const std::uint64_t value_tile = descriptor(v, kTokens * 128), value_lo = descriptor(v_lo, kTokens * 128);
      hold(out);
      state.hold();
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < kTokens / 16; ++s) {
        mma<true>(out, masked + 4 * s, mn_major_step(value_tile, s));
        mma<true>(out, rest + 4 * s, mn_major_step(value_tile, s));
        if (kHalf) mma<true>(out, masked + 4 * s, mn_major_step(value_lo, s));
      }
      wgmma_commit();
      state.add(k, hi);
      state.add(k, lo);
      if (kHalf) state.add(k_lo, hi);
      wgmma_commit();
      if (i + 1 < chunks) fetch(i + 1);
      wgmma_wait<1>();
      hold(out);
      each_pair(out, [&](int row, int column, float& a, float& b) {
        if (row >= len || first + column >= width) return;
        const float nothing = gates.lost[row] ? bits_to_float(0x7fc00000u) : 0;
        write_pair(call.o, offset(call.o, chunk.batch, chunk.begin + row, head) + first + column, scale * a + nothing,
                   scale * b + nothing, first + column + 1 < width, call.o_pairs);
      });
      wgmma_wait<0>();
      state.hold();
      if (lost_at_end) state.fill(bits_to_float(0x7fc00000u));
      lost = lost_at_end;
      sync();
    }
  }
}

}  // namespace gka::kernels::cuda::hopper
