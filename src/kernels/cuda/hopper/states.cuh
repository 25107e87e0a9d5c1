// States. A block walks the chunks of a group of segments with states in its accumulators,
//
//   H ← ζ_C H + Wᵀ K,   U ← ζ_C U + Wᵀ V,   W = diag(w) K,   w_j = β_j M_jC
//
// two warpgroups with H, two with 128 columns of U, from the same tiles: keys and values as they come, which is
// exact, and W in two 16-bit parts. It does so twice: from zero, to find what each group adds (after which
// `carry_groups` runs along the groups), and then from the state that arrives, this time leaving the state at the start
// of every chunk where the solve and the answers find it. Walking twice is cheaper than writing and reading a state per
// chunk three times over. While the products of a chunk run, the tiles of the next one are made: one barrier of all a
// chunk.
#pragma once

#include "kernels/cuda/hopper/chunk.cuh"

namespace gka::kernels::cuda::hopper {

inline constexpr int kWidth = 128;  // columns of U that a warpgroup walks with

/// States at the start of every chunk, divided by their norms, in float16: tiles of 64-column blocks of D rows, so that
/// one bulk copy brings one in; behind each, where somebody asks for it, a tile of what float16 lost. A state that is
/// zero, or lost (not finite), is a tile of zeros.
struct KeyStates {
  __half* tiles = nullptr;  // [slots, heads, across, parts, D, 128]
  float* norm = nullptr;    // [slots, heads, across]: ‖·‖_F; NaN for a lost one
  float* trace = nullptr;   // [slots, heads]: of H
  int parts = 1;            // 2: with what float16 lost
  int across = 1;           // blocks of 128 columns

  /// `at`: slot · heads + head.
  __host__ __device__ __half* tile(std::int64_t at, int dim, int column_block = 0) const {
    return tiles + (at * across + column_block) * parts * dim * kWidth;
  }
};

/// What a chunk does to a state, for all chunks: found once.
struct Fades {
  float* weight = nullptr;  // [slots, heads, 64]: w_j over `unit`; 0 for a token that is lost itself
  float2* chunk = nullptr;  // [slots, heads]: ζ_C, NaN if the chunk's end is lost; and the unit
};

/// One of the two states of a walk.
struct Track {
  float* states = nullptr;  // [groups, heads, rows, columns]: own parts go there, or start states come from there
  int rows = 0, columns = 0;
  KeyStates spread{};
  float* saved = nullptr;  // spreading: [segments, heads, rows, columns], the states at the start of segments; or null
};

struct Walk {
  Fades fades{};
  Track h{}, u{};
  double* zeta = nullptr;  // [groups, heads]: own walk: what is left of an earlier state
  bool skip_last = false;  // own walk: nobody asks for the end of a sequence
  bool whole_k = false, whole_v = false;
};

/// Finds Fades: a warp has a chunk of a head. The unit is a power of two that brings the largest weight near 1, for
/// float16, whose range is small; bf16 has it at 1.
template <DType kType>
static __global__ void __launch_bounds__(256) find_fades(const __grid_constant__ Problem p, Plan plan, Fades fades) {
  const std::int64_t tasks = 2 * plan.count(p) * p.heads;
  for (std::int64_t task = block() * 8 + thread() / 32; task < tasks; task += blocks() * 8) {
    const Stretch chunk = tokens_of(plan, task / p.heads);
    const std::int64_t head = task % p.heads;
    if (chunk.length <= 0) continue;
    double sum[2];
    float beta[2];
    unsigned forgets[2], bad[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = lane() + 32 * i;
      const auto get = [&](const View& view, float otherwise) {
        return view.data != nullptr ? read<float>(view, offset(view, chunk.batch, chunk.begin + c, head)) : otherwise;
      };
      const bool there = c < chunk.length;
      const float decay = there ? get(p.log_decay, 0) : 0;
      beta[i] = there ? get(p.beta, 1) : 0;
      const bool wrong = decay != decay || !finite(beta[i]);
      if (wrong) beta[i] = 0;
      bad[i] = __ballot_sync(0xffffffffu, wrong);
      const double step = decay >= kForget ? static_cast<double>(decay) : kForget;
      forgets[i] = __ballot_sync(0xffffffffu, step < kForgets);
      sum[i] = step < kForgets ? kForget : step;
#pragma unroll
      for (int reach = 1; reach < 32; reach *= 2) {
        const double other = __shfl_up_sync(0xffffffffu, sum[i], reach);
        if (lane() >= reach) sum[i] += other;
      }
    }
    sum[1] += __shfl_sync(0xffffffffu, sum[0], 31);
    const double end = __shfl_sync(0xffffffffu, sum[1], 31);
    // The end is lost where a bad token comes at or after the last γ = 0.
    const auto last = [](unsigned low, unsigned high) {
      return high != 0 ? 63 - __clz(static_cast<int>(high)) : low != 0 ? 31 - __clz(static_cast<int>(low)) : -1;
    };
    const bool lost = (bad[0] | bad[1]) != 0 && last(bad[0], bad[1]) >= last(forgets[0], forgets[1]);
    float weight[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // 0 stands for what is forgotten, not for what is only small
      const double since = end - sum[i];
      const float faded = most(beta[i] * __expf(static_cast<float>(since)), 1e-40f);
      weight[i] = beta[i] > 0 && since > kForget / 2 ? faded : 0;
    }
    float unit = 1;
    if constexpr (kType == DType::float16) {
      float top = fmaxf(weight[0], weight[1]);
#pragma unroll
      for (int reach = 16; reach > 0; reach /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, reach));
      const std::uint32_t bits = float_to_bits(top) & 0x7f800000u;
      if (bits > 0x08000000u && bits < 0x77000000u) unit = bits_to_float(bits);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) fades.weight[task * kTokens + lane() + 32 * i] = weight[i] / unit;
    const auto zeta = __expf(static_cast<float>(end));
    if (lane() == 0) fades.chunk[task] = {lost ? bits_to_float(0x7fc00000u) : zeta, unit};
  }
}

/// What happens to H, or U, from group to group.
struct GroupStates {
  float* parts = nullptr;  // [groups, heads, rows, columns]: each group's own addition; becomes what arrives there
  const float* start = nullptr;  // [sequences, heads, rows, columns]; null: 0
  float* end = nullptr;          // the same; null: not wanted
  int rows = 0, columns = 0;
  bool symmetric = false;  // `start` counts as its symmetric part
};

/// arriving_s = ζ_{s-1} arriving_{s-1} + part_{s-1} for both states, one element per thread, eight loads under way.
static __global__ void __launch_bounds__(256)
    carry_groups(const __grid_constant__ Problem p, Cut cut, const __grid_constant__ GroupStates h,
                 const __grid_constant__ GroupStates u, const double* zeta) {
  constexpr int kAhead = 8;
  const auto tiles_of = [](const GroupStates& of) { return (of.rows * of.columns + 255) / 256; };
  const int tiles = tiles_of(h) + tiles_of(u);
  for (std::int64_t task = block(); task < p.sequences * p.heads * tiles; task += blocks()) {
    const int tile = static_cast<int>(task % tiles);
    const bool of_u = tile >= tiles_of(h);
    const GroupStates& c = of_u ? u : h;
    const std::int64_t size = static_cast<std::int64_t>(c.rows) * c.columns, sequence_head = task / tiles;
    const int e = (of_u ? tile - tiles_of(h) : tile) * 256 + thread();
    if (e >= size) continue;
    float state = 0;
    if (c.start != nullptr) {
      const float* const start = c.start + sequence_head * size;
      state = c.symmetric ? 0.5f * start[e] + 0.5f * start[e % c.columns * c.columns + e / c.columns] : start[e];
    }
    const std::int64_t n = sequence_head / p.heads, head = sequence_head % p.heads;
    const std::int64_t first = cut.group_begin[n];
    const int count = static_cast<int>(cut.group_begin[n + 1] - first);
    float* const parts = c.parts + (first * p.heads + head) * size + e;
    const double* const left = zeta + first * p.heads + head;
    for (int i = 0; i < count; i += kAhead) {
      float part[kAhead], by[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const std::int64_t at = least(i + a, count - 1) * p.heads;
        part[a] = parts[at * size];
        by[a] = static_cast<float>(left[at]);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (i + a >= count) break;
        parts[(i + a) * p.heads * size] = state;
        state = (by[a] == 0 ? 0 : by[a] * state) + part[a];
      }
    }
    if (c.end != nullptr) c.end[sequence_head * size + e] = state;
  }
}

/// Warpgroups that share a state, each with its part of the columns, and all of a walk.
inline constexpr int kShare = 1, kWalkThreads = 2 * kShare * kWarpgroup;

/// Barriers of one warpgroup, and of those that share its state.
__device__ __forceinline__ void sync_group() {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + thread() / kWarpgroup), "n"(kWarpgroup) : "memory");
}
__device__ __forceinline__ void sync_share() {
  asm volatile("bar.sync %0, %1;" ::"r"(8 + thread() / (kShare * kWarpgroup)), "n"(kShare * kWarpgroup) : "memory");
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
    if (by == 0) return fill(0);
    each([&](int, int, float& a, float& b) { a *= by, b *= by; });
  }
  /// From or to rows of `columns` numbers, of which the first is at `at`.
  __device__ __forceinline__ void load(const float* from, int rows, int columns, int first) {
    each_in_memory(rows, columns, first, [&](auto pairs, std::int64_t at, bool one, bool two, float& a, float& b) {
      const float2 pair = read_pair<DType::float32, decltype(pairs)::value>(from, at, one, two);
      a = pair.x, b = pair.y;
    });
  }
  __device__ __forceinline__ void store(float* to, int rows, int columns, int first, float unit) {
    each_in_memory(rows, columns, first, [&](auto pairs, std::int64_t at, bool one, bool two, float& a, float& b) {
      if (one) store_pair<decltype(pairs)::value>(to + at, a * unit, b * unit, two);
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

  /// Over all who share a state, what `join` makes of their values, in the same order every time. A barrier.
  template <typename Join>
  __device__ __forceinline__ float2 over_share(float2 value, float2 (&room)[4 * kShare], Join&& join) {
#pragma unroll
    for (int reach = 16; reach > 0; reach /= 2) {
      value.x = join(value.x, __shfl_xor_sync(0xffffffffu, value.x, reach));
      value.y = join(value.y, __shfl_xor_sync(0xffffffffu, value.y, reach));
    }
    if (lane() == 0) room[thread() / 32 % (4 * kShare)] = value;
    sync_share();
    value = room[0];
#pragma unroll
    for (int i = 1; i < 4 * kShare; ++i) value = {join(value.x, room[i].x), join(value.y, room[i].y)};
    return value;
  }
  /// What this thread has of the diagonal; its first column is `first`.
  __device__ __forceinline__ float own_diagonal(int first) {
    // Row 64m + 16w + 8h + l/4 meets column 8i + 2(l%4) + e where 8i = 64m + 16w + 8h − first and e = l/4 − 2(l%4).
    float sum = 0;
    const int e = lane() / 4 - 2 * (lane() % 4), at = thread() % kWarpgroup / 32 * 16 - first;
    if (e != 0 && e != 1) return 0;
#pragma unroll
    for (int m = 0; m < D / 64; ++m) {
#pragma unroll
      for (int i = 0; i < N / 8; ++i) {
        const int half = i % 2;  // all else are multiples of 16
        const float value = e == 0 ? part[m][4 * i + 2 * half] : part[m][4 * i + 2 * half + 1];
        sum += 64 * m + 8 * half + at == 8 * i ? value : 0;
      }
    }
    return sum;
  }
  /// ‖state‖_F (NaN where it is not finite) and, of H, its trace. Barriers of those who share it.
  __device__ __forceinline__ float2 measure(bool with_trace, int first, float2 (&room)[2][4 * kShare]) {
    const auto plus = [](float a, float b) { return a + b; };
    const float trace = with_trace ? own_diagonal(first) : 0;
    float square = 0;
    each([&](int, int, float& a, float& b) { square += a * a + b * b; });
    float2 sums = over_share({square, trace}, room[0], plus);
    if (sums.x > 1e-20f && sums.x < 1e20f) return {sqrtf(sums.x), sums.y};
    // Far from 1: the largest number first.
    float top = 0;
    each([&](int, int, float& a, float& b) { top = fmaxf(top, fmaxf(fabsf(a), fabsf(b))); });
    top = over_share({top, 0}, room[1], [](float a, float b) { return fmaxf(a, b); }).x;
    const float by = top > 1e-37f && top < 3e38f ? 1 / top : 0;  // fmaxf passes NaN over: the squares find it
    square = 0;
    each([&](int, int, float& a, float& b) { square += (a * by) * (a * by) + (b * by) * (b * by); });
    square = over_share({square, 0}, room[0], plus).x;
    sync_share();  // both rooms are free again
    if (by > 0) return {sqrtf(square) * top, sums.y};
    return {square == 0 && top <= 1e-37f ? 0 : bits_to_float(0x7fc00000u), 0};
  }
  /// As float16 in a tile of N/64 blocks of D rows, times `by`, which is not 0; kRest: what that lost instead.
  template <bool kRest>
  __device__ __forceinline__ void put(char* tile, float by) {
    const int matrix = opaque(lane() / 8), row = opaque(thread() % kWarpgroup / 32 * 16 + matrix % 2 * 8 + lane() % 8);
#pragma unroll
    for (int m = 0; m < D / 64; ++m) {
#pragma unroll
      for (int i = 0; i < N / 2; i += 8) {
        std::uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float a = part[m][i + 2 * w] * by, b = part[m][i + 2 * w + 1] * by;
          words[w] = pack_half(a, b);
          if (kRest) words[w] = pack_half_rest(a, b, words[w]);
        }
        const int at = unit_at(64 * m + row, i / 4 + matrix / 2, D);
        store_matrices(shared_address(tile + at), words[0], words[1], words[2], words[3]);
      }
    }
  }
  /// A tile of zeros.
  __device__ __forceinline__ void put_nothing(char* tile) {
    for (int i = thread() % kWarpgroup; i < D * N / 8; i += kWarpgroup) reinterpret_cast<uint4*>(tile)[i] = {};
  }
  /// += Aᵀ B: tiles of 64 rows, of D and of N columns.
  template <bool kHalf>
  __device__ __forceinline__ void add(const char* a, const char* b) {
    constexpr int kBlock = kTokens * 128;
    const std::uint64_t right = descriptor(b, kBlock);
#pragma unroll
    for (int m = 0; m < D / 64; ++m) {
      const std::uint64_t left = descriptor(a + m * kBlock, kBlock);
#pragma unroll
      for (int s = 0; s < kTokens / 16; ++s) {
        mma<true, true, kHalf>(part[m], mn_major_step(left, s), mn_major_step(right, s));
      }
    }
  }
};

/// Shared memory of a walk: two sets of token tiles (W in two parts, keys, values), and the tiles of both states.
template <int D, bool kSpread>
struct WalkRoom {
  static constexpr int kTile = kTokens * kWidth * 2, kStage = 4 * kTile, kState = D * kWidth * 2;
  static constexpr int kBytes = 1024 + 2 * kStage + (kSpread ? 2 * kState : 0);
};

/// Leaves this warpgroup's columns, from `first` on, of a state at the start of a chunk.
template <int D, int N>
__device__ __forceinline__ void spread_state(State<D, N>& state, const KeyStates& to, std::int64_t at, int column_block,
                                             int first, bool with_trace, float unit, char* staged,
                                             float2 (&room)[2][4 * kShare]) {
  const bool leader = thread() % kWarpgroup == 0;
  if (leader) bulk_store_wait();
  const float2 measured = state.measure(with_trace, first, room);
  const float norm = measured.x;
  const bool usable = norm > 1e-37f && norm < 3e38f;
  __half* const tile = to.tile(at, D, column_block) + first * D;
  const float by = usable ? 1 / norm : 0;
  const auto finish = [&](__half* to_tile) {
    publish();
    sync_group();
    if (leader) bulk_store(to_tile, staged, D * N * 2);
  };
  usable ? state.template put<false>(staged, by) : state.put_nothing(staged);
  finish(tile);
  if (leader && first == 0) {
    const float is = usable ? norm * unit : norm <= 1e-37f ? 0 : bits_to_float(0x7fc00000u);
    to.norm[at * to.across + column_block] = is;
    if (with_trace) to.trace[at] = measured.y * unit;
  }
  if (to.parts > 1) {
    if (leader) bulk_store_wait();
    sync_group();
    usable ? state.template put<true>(staged, by) : state.put_nothing(staged);
    finish(tile + D * kWidth);
  }
}

template <int D, bool kSpread, DType kType>
__global__ void __launch_bounds__(kWalkThreads, 1)
    walk(const __grid_constant__ Problem p, Cut cut, const __grid_constant__ Walk w) {
  static_assert(D == kWidth);
  constexpr bool kHalf = kType == DType::float16;
  constexpr int kColumns = kWidth / kShare;
  using Room = WalkRoom<D, kSpread>;
  using Rows = TokenRows<D, kWalkThreads>;
  __shared__ float2 room[2][2][4 * kShare];
  __shared__ int lost_in[4][2];  // of the last chunks: whether a key, a value was not finite
  char* const tiles = aligned_tiles();
  const int group_index = thread() / kWarpgroup;
  const bool values_here = group_index >= kShare;
  const int share_first = group_index % kShare * kColumns;  // of this warpgroup's columns
  char* const staged = tiles + 2 * Room::kStage + group_index * (D * kColumns * 2);
  const Track& track = values_here ? w.u : w.h;
  const int across = (w.u.columns + kWidth - 1) / kWidth;
  for (std::int64_t task = block(); task < cut.count(p) * p.heads * across; task += blocks()) {
    const int column_block = static_cast<int>(task % across), first = column_block * kWidth;
    const bool active = values_here || column_block == 0;
    const std::int64_t head = task / across % p.heads, at = task / across / p.heads, slot = at * p.heads + head;
    const Group group = cut.groups[at];
    if (!kSpread && w.skip_last && cut.plan.segments[group.segment + group.count - 1].last) continue;
    const Stretch whole = tokens_of(cut, group);
    const int chunks = static_cast<int>((whole.length + kTokens - 1) / kTokens);
    const int own_first = (values_here ? first : 0) + share_first;
    if (thread() < 8) lost_in[thread() / 2][thread() % 2] = 0;
    State<D, kColumns> state;
    float* const in_memory = track.states + slot * track.rows * track.columns;
    if (kSpread) {
      state.load(in_memory, active ? track.rows : 0, track.columns, own_first);
    } else {
      state.fill(0);
    }
    Rows keys, values;
    float weight[Rows::kOwn];
    float2 next_fade;
    float unit = 1;
    const auto fetch = [&](int i) {
      const Stretch chunk = chunk_of(whole, i);
      const std::int64_t from = (2 * group.segment + i) * p.heads + head;
      keys.fetch(p.k, chunk, head, static_cast<int>(p.key_dim), 0, w.whole_k);
      values.fetch(p.v, chunk, head, w.u.columns, first, w.whole_v);
#pragma unroll
      for (int n = 0; n < Rows::kOwn; ++n) weight[n] = w.fades.weight[from * kTokens + Rows::row(n)];
      next_fade = w.fades.chunk[from];
    };
    const int walked = kSpread ? chunks - 1 : chunks;
    const auto stage_of = [&](int i) { return tiles + i % 2 * Room::kStage; };
    const auto make_tiles = [&](int i) {
      char* const stage = stage_of(i);
      int* const lost = lost_in[i % 4];
      keys.template store_weighted<kType>(stage, stage + Room::kTile, stage + 2 * Room::kTile, weight, lost);
      values.template store_checked<kType>(stage + 3 * Room::kTile, weight, lost + 1);
      publish();
    };
    const auto leave = [&](int i) {
      if (!active) return;
      if (track.saved != nullptr && i % 2 == 0) {
        float* const to = track.saved + ((group.segment + i / 2) * p.heads + head) * track.rows * track.columns;
        state.store(to, track.rows, track.columns, own_first, unit);
      }
      spread_state(state, track.spread, (2 * group.segment + i) * p.heads + head, values_here ? column_block : 0,
                   share_first, !values_here, unit, staged, room[values_here ? 1 : 0]);
    };
    sync();  // no chunk is lost yet
    float2 fade{1, 1};
    if (walked > 0) {
      fetch(0);
      make_tiles(0);
      fade = next_fade;
      if (walked > 1) fetch(1);
    }
    double left = 1;
    for (int i = 0; i < chunks; ++i) {
      if (kSpread) leave(i);
      if (i == walked) break;
      sync();
      const bool lost = fade.x != fade.x || lost_in[i % 4][0] != 0 || (values_here && lost_in[i % 4][1] != 0);
      if (thread() < 2) lost_in[(i + 2) % 4][thread()] = 0;
      left = fade.x == 0 ? 0 : left * fade.x;
      state.fade(kHalf ? fade.x * (unit / fade.y) : fade.x);
      unit = fade.y;
      state.hold();
      wgmma_fence();
      const char* const stage = stage_of(i);
      const char* const right = stage + (values_here ? 3 : 2) * Room::kTile + share_first * (kTokens * 2);
      state.template add<kHalf>(stage, right);
      state.template add<kHalf>(stage + Room::kTile, right);
      wgmma_commit();
      if (i + 1 < walked) {
        make_tiles(i + 1);
        fade = next_fade;
        if (i + 2 < walked) fetch(i + 2);
      }
      wgmma_wait<0>();
      state.hold();
      if (lost) state.fill(bits_to_float(0x7fc00000u));
    }
    if (!kSpread && active) {
      state.store(in_memory, track.rows, track.columns, own_first, unit);
      if (thread() == 0) w.zeta[slot] = left;
    }
    sync();
  }
  if (kSpread && thread() % kWarpgroup == 0) bulk_store_finish();
}

}  // namespace gka::kernels::cuda::hopper
