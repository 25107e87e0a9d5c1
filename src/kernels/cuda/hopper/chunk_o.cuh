// chunk_o: o_c = s U_cᵀ z_c with z = q + α (x − q), chunk by chunk from U at the chunk's start,
//
//   o_c = s (ζ_c U_0ᵀ z_c + Σ_{j≤c} M_jc β_j (z_cᵀk_j) v_j).
//
// z, keys and U are float16 with their scales beside them: bf16 would cost 8e-3 each, as x is large where H is small;
// of refined chunks, where it is largest, z comes in two parts. Keys and decays come from the system that the solve
// had. Values are taken as they come, so the masked scores are of their type: bf16 in two parts, or float16 with a
// scale for every row.
#pragma once

#include "kernels/cuda/hopper/solve.cuh"

namespace gka::kernels::cuda::hopper {

struct OutputCall {
  View o;
  const char* systems;
  const uint4* z;  // as the solve leaves it
  const float* z_scale;
  ChunkStates states;  // U at the start of every chunk
  bool whole_v, o_pairs, whole_o;
};

/// U, keys, values.
template <int D>
inline constexpr int kOutputBytes = 1024 + 2 * (D * kStateColumns<D> + kChunk * (D + kStateColumns<D>));

struct OutputShared {
  SystemRows rows;
  int bad[kChunk], lost[kChunk];
  std::uint64_t arrived[3];  // U, keys, rows
};

__device__ __forceinline__ void write_pair(const View& view, std::int64_t at, float a, float b, bool second,
                                           bool pairs) {
  const bool bf = view.dtype == DType::bfloat16;
  if (pairs && view.dtype != DType::float32) {
    *reinterpret_cast<std::uint32_t*>(static_cast<std::uint16_t*>(view.data) + at) = bf ? pack(a, b) : pack_half(a, b);
    return;
  }
  write<float>(view, at, a);
  if (second) write<float>(view, at + 1, b);
}

/// Which tokens a bad one, or a state that was lost before, has reached: everything from there to the next γ = 0.
/// `bad_units` of `values` were not finite. Barriers.
template <typename Rows>
__device__ inline void find_lost(OutputShared& s, const Rows&, unsigned bad_units, bool before) {
  if (thread() < kChunk) s.bad[thread()] = s.rows.flags[thread()] & kBadToken;
  sync();
  for (int i = 0; i < Rows::kOwn; ++i) {
    if ((bad_units >> i & 1) != 0 && s.rows.reading[Rows::row(i)] > -1e29f) raise(&s.bad[Rows::row(i)]);
  }
  sync();
  if (thread() == 0) {
    int reached = before;
    for (int c = 0; c < kChunk; ++c) {
      s.lost[c] = reached = (reached && (s.rows.flags[c] & kForgetsAll) == 0) || s.bad[c];
    }
  }
  sync();
}

/// z of a chunk as the solve left it, in registers: the first part, or what that lost.
template <int D>
struct MixedQueries {
  const uint4* from;
  std::uint32_t z[D / 4];

  __device__ __forceinline__ void load(int part) {
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      const uint4 one = from[(n + part * (D / 16)) * kWarpgroup];
      z[4 * n] = one.x, z[4 * n + 1] = one.y, z[4 * n + 2] = one.z, z[4 * n + 3] = one.w;
    }
  }
  /// d = z times a tile, by product(d, step, add) for its steps of 16.
  template <int kCount, typename Product>
  __device__ __forceinline__ void multiply(float (&d)[kCount], bool refined, Product&& product) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) product(d, i, i > 0);
    wgmma_commit();
    wgmma_wait<0>();
    hold(d);
    if (!refined) return;
    load(1);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) product(d, i, 1);
    wgmma_commit();
    wgmma_wait<0>();
    hold(d);
    load(0);
  }
};

/// Masked scores as a left operand: bf16 in two parts, or float16 with a power of two for every row, which goes into
/// what the state's part is multiplied by before, and the result after.
template <bool kHalf>
__device__ __forceinline__ void mask_scores(float (&scores)[32], const SystemRows& rows, std::uint32_t (&masked)[16],
                                            std::uint32_t (&rest)[kHalf ? 1 : 16], float (&zeta)[2], float (&by)[2]) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    const float2 m = mask_at(rows.since, rows.reading, rows.from, 2 * n);
    scores[2 * n] = m.x == 0 ? 0 : m.x * scores[2 * n];
    scores[2 * n + 1] = m.y == 0 ? 0 : m.y * scores[2 * n + 1];
  }
  if constexpr (kHalf) {
    float top[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < 32; ++n) top[n / 2 % 2] = fmaxf(top[n / 2 % 2], fabsf(scores[n]));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const RowScale row = scale_of(top[i]);
      zeta[i] *= row.scale, by[i] *= row.unscale, top[i] = row.scale;
    }
#pragma unroll
    for (int n = 0; n < 16; ++n) masked[n] = pack_half(scores[2 * n] * top[n % 2], scores[2 * n + 1] * top[n % 2]);
  } else {
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      masked[n] = pack(scores[2 * n], scores[2 * n + 1]);
      rest[n] = pack_rest(scores[2 * n], scores[2 * n + 1], masked[n]);
    }
  }
}

/// Columns of o, kColumns of them, from column `base` on.
template <bool kHalf, int kColumns>
__device__ __forceinline__ void write_output(const float (&out)[kColumns / 2], const float (&by)[2], bool some_lost,
                                             const OutputShared& s, const OutputCall& call, const Stretch& chunk,
                                             int head, int base, int width) {
  const int row = opaque(own_row()), len = static_cast<int>(chunk.length);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float nothing = some_lost && s.lost[row + 8 * i] != 0 ? bits_to_float(0x7fc00000u) : 0;
    const std::int64_t to = offset(call.o, chunk.batch, chunk.begin + row + 8 * i, head) + base;
    const bool there = row + 8 * i < len;
    if (call.whole_o) {
      // Neighbouring lanes exchange words, so that each has four columns of one of two neighbouring groups of
      // eight: a quad then writes whole sectors.
      const int odd = opaque(lane() % 2), column = opaque(8 * odd + lane() % 4 / 2 * 4);
      auto* const data = static_cast<std::uint16_t*>(call.o.data) + to + column;
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 2) {
        const auto word = [&](int m) {
          const float a = by[i] * out[4 * m + 2 * i] + nothing, b = by[i] * out[4 * m + 2 * i + 1] + nothing;
          return kHalf ? pack_half(a, b) : pack(a, b);
        };
        const std::uint32_t one = word(n), two = word(n + 1);
        const std::uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? one : two, 1);
        if (there && base + 8 * n + column < width) {
          *reinterpret_cast<uint2*>(data + 8 * n) = odd ? uint2{other, two} : uint2{one, other};
        }
      }
    } else {
      const int column = opaque(own_column());
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        if (!there || base + column + 8 * n >= width) continue;
        const float a = by[i] * out[4 * n + 2 * i] + nothing, b = by[i] * out[4 * n + 2 * i + 1] + nothing;
        write_pair(call.o, to + column + 8 * n, a, b, base + column + 8 * n + 1 < width, call.o_pairs);
      }
    }
  }
}

template <int D, DType kType>
__global__ void __launch_bounds__(kWarpgroup, by_size<D>(5, 4, 3, 2))
    chunk_o(const __grid_constant__ Problem p, Plan plan, const __grid_constant__ OutputCall call) {
  constexpr bool kHalf = kType == DType::float16;
  constexpr int N = kStateColumns<D>, kHalves = kColumnBlocks<N>, kColumns = kBlockColumns<N>;
  __shared__ OutputShared s;
  char *const u = aligned_tiles(), *const k = u + D * N * 2, *const v = k + kChunk * D * 2;
  const int width = static_cast<int>(p.value_dim), across = call.states.across;
  const auto scale = static_cast<float>(p.options.scale);
  if (thread() == 0) {
    for (std::uint64_t& barrier : s.arrived) barrier_init(&barrier);
    barrier_fence();
  }
  sync();
  int phase = 0;
  const int heads = heads_of(p), tasks = chunk_tasks(p, plan) * across;
  for (int task = own_block(); task < tasks; task += all_blocks()) {
    const int column_block = static_cast<int>(task % across), first = column_block * N;
    const int at = task / across, head = at % heads;
    const Stretch chunk = tokens_of(plan, at / heads);
    const int len = static_cast<int>(chunk.length);
    if (len <= 0) continue;
    if (thread() == 0) {
      const char* const system = call.systems + static_cast<std::int64_t>(at) * SystemLayout<D>::kBytes;
      bulk_load(&s.rows, system + SystemLayout<D>::kRows, sizeof(SystemRows), &s.arrived[2]);
      bulk_load(k, system, SystemLayout<D>::kMask, &s.arrived[1]);
      bulk_load(u, call.states.tile<D>(at, column_block), D * N * 2, &s.arrived[0]);
    }
    MixedQueries<D> q;
    q.from = call.z + static_cast<std::int64_t>(at) * (D / 8) * kWarpgroup + thread();
    TokenRows<N> values;
    values.fetch(p.v, chunk, value_head(p, head), width, first, call.whole_v);
    q.load(0);
    float by[2] = {scale * call.z_scale[at * kChunk + own_row()], scale * call.z_scale[at * kChunk + own_row() + 8]};
    const float norm = call.states.norm[at * across + column_block];
    const unsigned bad_units = values.template clear_bad<kType>();
    values.store(v);
    publish();
    barrier_wait(&s.arrived[2], phase);
    const bool bad = bad_units != 0 || norm != norm || (s.rows.flags[thread() % kChunk] & kBadToken) != 0;
    const bool some_lost = __syncthreads_or(bad) != 0;
    if (some_lost) find_lost(s, values, bad_units, norm != norm);
    float zeta[2] = {s.rows.zeta[own_row()], s.rows.zeta[own_row() + 8]};
#pragma unroll
    for (int i = 0; i < 2; ++i) zeta[i] = norm == norm ? zeta[i] * norm : 0;
    const std::uint64_t key_tile = descriptor<kColumns>(k, kChunk);
    std::uint32_t masked[16], rest[kHalf ? 1 : 16];
    barrier_wait(&s.arrived[1], phase);
    {
      float scores[32];
      q.multiply(scores, s.rows.refined != 0, [&](auto& d, int i, int add) {
        mma<false, true>(d, q.z + 4 * i, k_major_step<kColumns>(key_tile, i, kChunk), add);
      });
      mask_scores<kHalf>(scores, s.rows, masked, rest, zeta, by);
    }
    barrier_wait(&s.arrived[0], phase);
    phase ^= 1;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const std::uint64_t state_tile = descriptor<kColumns>(u + half * D * 128, D);
      const std::uint64_t value_tile = descriptor<kColumns>(v + half * kChunk * 128, kChunk);
      float out[kColumns / 2];
      q.multiply(out, s.rows.refined != 0, [&](auto& d, int i, int add) {
        mma<true, true>(d, q.z + 4 * i, mn_major_step<kColumns>(state_tile, i), add);
      });
#pragma unroll
      for (int n = 0; n < kColumns / 2; ++n) out[n] *= zeta[n / 2 % 2];
      hold(out);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kChunk / 16; ++i) {
        const std::uint64_t step = mn_major_step<kColumns>(value_tile, i);
        mma<true, kHalf>(out, masked + 4 * i, step);
        if constexpr (!kHalf) mma<true>(out, rest + 4 * i, step);
      }
      wgmma_commit();
      wgmma_wait<0>();
      hold(out);
      write_output<kHalf, kColumns>(out, by, some_lost, s, call, chunk, head, first + half * kColumns, width);
    }
    sync();  // nobody reads the tiles and rows any more
  }
}

}  // namespace gka::kernels::cuda::hopper
