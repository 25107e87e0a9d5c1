// States. A block walks the chunks of a group of segments with a state in its accumulators,
//
//   H ← ζ_C H + Kᵀ diag(w) K,   U ← ζ_C U + Kᵀ diag(w) V,   w_j = β_j M_jC
//
// with operands split into two bf16 parts (H gets √w on both sides, so it stays symmetric). It does so twice: from
// zero, to find what each group adds (after which the plain path's `carry` runs along the groups), and then from the
// state that arrives, this time leaving the state at the start of every chunk where the solve finds it. Walking twice
// is cheaper than writing and reading a state per chunk three times over.
#pragma once

#include "kernels/cuda/hopper/chunk.cuh"

namespace gka::kernels::cuda::hopper {

/// H at the start of every chunk as the solve takes it: H/‖H‖_F in two float16 parts, each a tile of D/64 blocks of D
/// rows, so that one bulk copy brings it in. A state that is zero, or lost (not finite), is a tile of zeros.
struct KeyStates {
  __half* tiles = nullptr;  // [slots, heads, 2, D²]
  float* norm = nullptr;    // [slots, heads]: ‖H‖_F; NaN for a lost one

  __host__ __device__ __half* tile(std::int64_t slot, std::int64_t heads, std::int64_t head, int dim) const {
    return tiles + (slot * heads + head) * 2 * dim * dim;
  }
};

/// Where the two walks begin and what they leave.
struct Walk {
  float* states = nullptr;  // [groups, heads, rows, columns]: own parts go there, or start states come from there
  double* zeta = nullptr;   // [groups, heads]: own walk: what is left of an earlier state
  int rows = 0, columns = 0;
  KeyStates spread{};
  float* saved = nullptr;  // spread walk: [segments, heads, D, D], the states at the start of segments; or null
  bool skip_last = false;  // own walk: nobody asks for the end of a sequence
  bool whole_k = false, whole_v = false;
};

/// Tiles of tokens: the weighted rows in two parts and, for values, the keys in two (of which bf16 needs one).
template <int D, int N, bool kKeys, bool kSpread>
inline constexpr int kWalkBytes = 1024 + kTokens * 2 * (2 * N + (kKeys ? 0 : 2 * D)) + (kSpread ? 4 * D * N : 0);

/// What `join` makes of everybody's value, in the same order every time. Begins and ends with a barrier.
template <typename Join>
__device__ inline float over_block(float value, float* room, Join&& join) {
#pragma unroll
  for (int reach = 16; reach > 0; reach /= 2) value = join(value, __shfl_xor_sync(0xffffffffu, value, reach));
  sync();
  if (lane() == 0) room[thread() / 32] = value;
  sync();
  return join(join(room[0], room[1]), join(room[2], room[3]));
}

/// A state of D×N over the accumulators of D/64 products.
template <int D, int N>
struct State {
  float part[D / 64][N / 2];

  /// body(row, column, first, second)
  template <typename Body>
  __device__ __forceinline__ void each(Body&& body) {
#pragma unroll
    for (int m = 0; m < D / 64; ++m) {
      each_pair(part[m], [&](int row, int column, float& a, float& b) { body(64 * m + row, column, a, b); });
    }
  }
  __device__ __forceinline__ void fill(float value) {
    each([&](int, int, float& a, float& b) { a = b = value; });
  }
  __device__ __forceinline__ void hold() {
#pragma unroll
    for (int m = 0; m < D / 64; ++m) hopper::hold(part[m]);
  }
  /// 0 clears, also what is not finite.
  __device__ __forceinline__ void fade(float by) {
    each([&](int, int, float& a, float& b) { a = by == 0 ? 0 : a * by, b = by == 0 ? 0 : b * by; });
  }
  /// From or to rows of `columns` numbers, of which the first is at `at`.
  __device__ __forceinline__ void load(const float* from, int rows, int columns, int first) {
    each_in_memory(rows, columns, first, [&](auto pairs, std::int64_t at, bool one, bool two, float& a, float& b) {
      const float2 pair = read_pair<DType::float32, decltype(pairs)::value>(from, at, one, two);
      a = pair.x, b = pair.y;
    });
  }
  __device__ __forceinline__ void store(float* to, int rows, int columns, int first) {
    each_in_memory(rows, columns, first, [&](auto pairs, std::int64_t at, bool one, bool two, float& a, float& b) {
      if (one) store_pair<decltype(pairs)::value>(to + at, a, b, two);
    });
  }
  /// body(both at once, offset, is there, is the second there, first, second)
  template <typename Body>
  __device__ __forceinline__ void each_in_memory(int rows, int columns, int first, Body&& body) {
    const int row = opaque(own_row()), column = opaque(first + own_column());
    with_flag(columns % 2 == 0, [&](auto pairs) {
#pragma unroll
      for (int m = 0; m < D / 64; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = row + 64 * m + 8 * half;
          const std::int64_t at = static_cast<std::int64_t>(r) * columns + column;
#pragma unroll
          for (int i = 0; i < N / 8; ++i) {
            const bool one = r < rows && column + 8 * i < columns, two = r < rows && column + 8 * i + 1 < columns;
            body(pairs, at + 8 * i, one, two, part[m][4 * i + 2 * half], part[m][4 * i + 2 * half + 1]);
          }
        }
      }
    });
  }
  /// ‖state‖_F whatever its scale; NaN where it is not finite. Begins and ends with a barrier.
  __device__ __forceinline__ float norm(float* room) {
    float top = 0;
    each([&](int, int, float& a, float& b) { top = fmaxf(top, fmaxf(fabsf(a), fabsf(b))); });
    float square = 0;
    top = over_block(top, room, [](float a, float b) { return fmaxf(a, b); });
    const float scale = top > 1e-37f && top < 3e38f ? 1 / top : 0;  // fmaxf passes NaN over: the squares find it
    each([&](int, int, float& a, float& b) { square += (a * scale) * (a * scale) + (b * scale) * (b * scale); });
    square = over_block(square, room, [](float a, float b) { return a + b; });
    return scale > 0 ? top * sqrtf(square) : square == 0 && top <= 1e-37f ? 0 : bits_to_float(0x7fc00000u);
  }
  /// As two tiles (bf16, or float16) of N/64 blocks of D rows, times `by`; 0 clears here too.
  template <bool kHalf = false>
  __device__ __forceinline__ void split(char* hi, char* lo, float by) {
    const int matrix = opaque(lane() / 8), row = opaque(thread() / 32 * 16 + matrix % 2 * 8 + lane() % 8);
#pragma unroll
    for (int m = 0; m < D / 64; ++m) {
#pragma unroll
      for (int i = 0; i < N / 2; i += 8) {
        std::uint32_t top[4], rest[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float a = by == 0 ? 0 : part[m][i + 2 * w] * by, b = by == 0 ? 0 : part[m][i + 2 * w + 1] * by;
          top[w] = kHalf ? pack_half(a, b) : pack(a, b);
          rest[w] = kHalf ? pack_half_rest(a, b, top[w]) : pack_rest(a, b, top[w]);
        }
        const int at = unit_at(64 * m + row, i / 4 + matrix / 2, D);
        store_matrices(shared_address(hi + at), top[0], top[1], top[2], top[3]);
        store_matrices(shared_address(lo + at), rest[0], rest[1], rest[2], rest[3]);
      }
    }
  }
  /// += Aᵀ B: tiles of 64 rows, of D and of N columns.
  __device__ __forceinline__ void add(const char* a, const char* b) {
    constexpr int kBlock = kTokens * 128;
    const std::uint64_t right = descriptor(b, kBlock);
#pragma unroll
    for (int m = 0; m < D / 64; ++m) {
      const std::uint64_t left = descriptor(a + m * kBlock, kBlock);
#pragma unroll
      for (int s = 0; s < kTokens / 16; ++s) {
        mma<true, true>(part[m], mn_major_step(left, s), mn_major_step(right, s));
      }
    }
  }
};

template <int D, int N, bool kKeys, bool kSpread, DType kType>
__global__ void __launch_bounds__(kWarpgroup, 2) walk(const __grid_constant__ Problem p, Cut cut, Walk w) {
  static_assert(kKeys || !kSpread);
  __shared__ Gates gates;
  __shared__ float weight[kTokens];
  __shared__ float sums[4];
  char* const tiles = aligned_tiles();
  char *const hi = tiles, *const lo = hi + kTokens * 2 * N;
  char *const k = lo + kTokens * 2 * N, *const k_lo = k + kTokens * 2 * D;  // for values
  char* const staged = k;                                                   // for spreading
  const int across = (w.columns + N - 1) / N;
  for (std::int64_t task = block(); task < cut.count(p) * p.heads * across; task += blocks()) {
    const int first = static_cast<int>(task % across) * N;
    const std::int64_t head = task / across % p.heads, at = task / across / p.heads, slot = at * p.heads + head;
    const Group group = cut.groups[at];
    if (!kSpread && w.skip_last && cut.plan.segments[group.segment + group.count - 1].last) continue;
    const Stretch whole = tokens_of(cut, group);
    const int chunks = static_cast<int>((whole.length + kTokens - 1) / kTokens);
    State<D, N> state;
    float* const in_memory = w.states + slot * w.rows * w.columns;
    if (kSpread) {
      state.load(in_memory, w.rows, w.columns, first);
    } else {
      state.fill(0);
    }
    TokenRows<D> keys;
    TokenRows<N> values;
    GateOfToken gate;
    const auto fetch = [&](int i) {
      const Stretch chunk = chunk_of(whole, i);
      keys.fetch(p.k, chunk, head, static_cast<int>(p.key_dim), 0, w.whole_k);
      if (!kKeys) values.fetch(p.v, chunk, head, w.columns, first, w.whole_v);
      gate = fetch_gates(p, chunk, head);
    };
    if (!kSpread || chunks > 1) fetch(0);
    double left = 0;  // log of ζ over the group
    for (int i = 0; i < chunks; ++i) {
      if (kSpread) {
        if (w.saved != nullptr && i % 2 == 0) {
          const std::int64_t segment = group.segment + i / 2;
          state.store(w.saved + (segment * p.heads + head) * w.rows * w.columns, w.rows, w.columns, first);
        }
        const float norm = state.norm(sums);
        const bool usable = norm > 1e-37f && norm < 3e38f;
        state.template split<true>(staged, staged + D * N * 2, usable ? 1 / norm : 0);
        publish();
        sync();
        if (thread() == 0) {
          const std::int64_t chunk = 2 * group.segment + i;
          bulk_store(w.spread.tile(chunk, p.heads, head, D), staged, D * N * 4);
          w.spread.norm[chunk * p.heads + head] = usable ? norm : norm <= 1e-37f ? 0 : bits_to_float(0x7fc00000u);
        }
        if (i + 1 == chunks) break;
      }
      set_gates(gates, gate);
      keys.template check<kType>(gates);
      if (!kKeys) values.template check<kType>(gates);
      const double end = gates.g[kTokens - 1];
      if (thread() < kTokens) {
        const float by = gates.beta[thread()] * __expf(static_cast<float>(end - gates.g[thread()]));
        weight[thread()] = kKeys ? sqrtf(by) : by;
      }
      sync();
      const bool lost = find_lost(gates, false);
      const auto by = [&](int row) { return weight[row]; };
      if constexpr (kKeys) {
        keys.template store<kType>(hi, lo, by);
      } else {
        values.template store<kType>(hi, lo, by);
        keys.template store_split<kType>(k, k_lo);
      }
      publish();
      sync();
      if (i + 1 + (kSpread ? 1 : 0) < chunks) fetch(i + 1);
      state.fade(__expf(static_cast<float>(end)));
      left += end;
      state.hold();
      wgmma_fence();
      state.add(kKeys ? hi : k, hi);
      state.add(kKeys ? hi : k, lo);
      if (kKeys || kType == DType::float16) state.add(kKeys ? lo : k_lo, hi);
      wgmma_commit();
      wgmma_wait<0>();
      state.hold();
      if (lost) state.fill(bits_to_float(0x7fc00000u));
      if (kSpread && thread() == 0) bulk_store_wait();
      sync();
    }
    if (kSpread) {
      if (thread() == 0) bulk_store_wait();
      sync();
    } else {
      state.store(in_memory, w.rows, w.columns, first);
      if (thread() == 0 && first == 0) w.zeta[slot] = exp(left);
    }
  }
  if (kSpread && thread() == 0) bulk_store_finish();
}

}  // namespace gka::kernels::cuda::hopper
