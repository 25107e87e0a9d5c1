// chunk_h: H and U at the start of every chunk. A block walks the chunks of a group of segments with states in its
// accumulators,
//
//   H ← ζ_C H + Wᵀ K,   U ← ζ_C U + Wᵀ V,   W = diag(w) K,   w_j = β_j M_jC
//
// one warpgroup with H, one with D columns of U, from the same tiles: keys and values as they come, which is exact,
// and W in two 16-bit parts. Two more warpgroups do nothing but make tiles, two or three chunks ahead, so that neither
// state waits for memory or for the other. It does so twice: from zero, to find what each group adds (after which
// `carry_groups` runs along the groups), and then from the state that arrives, this time leaving the state at the start
// of every chunk where `solve` and `chunk_o` find it. Walking twice is cheaper than writing and reading a state per
// chunk three times over.
//
// A state of 256 rows does not fit a warpgroup's registers: of wide heads a block has 64 columns of H and of U, and the
// blocks of a head walk by themselves, each with all keys. They know nothing of each other: each leaves its columns
// divided by their own norm.
#pragma once

#include "kernels/cuda/hopper/chunk.cuh"

namespace gka::kernels::cuda::hopper {

/// States at the start of every chunk, divided by their norms, in float16: tiles of blocks of D rows, so that
/// one bulk copy brings one in. A state that is zero, or lost (not finite), is a tile of zeros.
struct ChunkStates {
  __half* tiles = nullptr;  // [slots, heads, across, D, columns]
  float* norm = nullptr;    // [slots, heads, across]: ‖·‖_F; NaN for a lost one
  float* trace = nullptr;   // [slots, heads, across]: of H
  // [slots, heads]: 1 where `chunk_system` has found enough keys beside an outlier, so that the backward pass knows.
  int* ample = nullptr;
  int across = 1;  // blocks of kStateColumns<D> columns

  /// `at`: slot · heads + head.
  template <int D>
  __host__ __device__ __half* tile(std::int64_t at, int column_block = 0) const {
    return tiles + (at * across + column_block) * (D * kStateColumns<D>);
  }
};

/// ‖·‖_F of a state of a chunk, and what each block of columns has of it.
template <int D>
__device__ __forceinline__ float join_norms(const ChunkStates& states, std::int64_t at,
                                            float (&share)[kStateBlocks<D>]) {
  float largest = 0, squares = 0;
#pragma unroll
  for (int b = 0; b < kStateBlocks<D>; ++b) {
    share[b] = states.norm[at * kStateBlocks<D> + b];
    largest = fmaxf(largest, share[b]);
  }
  const float by = largest > 0 ? 1 / largest : 0;
#pragma unroll
  for (int b = 0; b < kStateBlocks<D>; ++b) squares += (share[b] * by) * (share[b] * by);
  const float norm = squares != squares ? squares : largest * sqrtf(squares);  // NaN where any block is lost
#pragma unroll
  for (int b = 0; b < kStateBlocks<D>; ++b) share[b] = squares > 0 ? share[b] * by * rsqrtf(squares) : 0;
  return norm;
}

/// ‖H_0‖_F and tr H_0 of a chunk, and what a block of columns has of that norm: its tile is to be multiplied by that.
template <int D>
struct FirstState {
  float norm, trace, share[kStateBlocks<D>];

  __device__ __forceinline__ FirstState(const ChunkStates& states, std::int64_t at) {
    if constexpr (kStateBlocks<D> == 1) {
      norm = states.norm[at], trace = states.trace[at], share[0] = 1;
    } else {
      trace = 0;
#pragma unroll
      for (int b = 0; b < kStateBlocks<D>; ++b) trace += states.trace[at * kStateBlocks<D> + b];
      norm = join_norms<D>(states, at, share);
    }
  }
};

/// What a chunk does to a state, for all chunks: found once.
struct StateUpdates {
  float* weight = nullptr;      // [slots, heads, 64]: w_j over `unit`; 0 for a token that is lost itself
  float2* chunk = nullptr;      // [slots, heads]: ζ_C, NaN if the chunk's end is lost; and the unit
  ChunkGates* gates = nullptr;  // [slots, heads]; null: not wanted
};

/// One of the two states that a block carries.
struct Track {
  float* states = nullptr;  // [groups, heads, rows, columns]: own parts go there, or start states come from there
  int rows = 0, columns = 0;
  ChunkStates chunks{};
  float* saved =
      nullptr;  // every chunk: [segments, heads, rows, columns], the states at the start of segments; or null
};

struct ChunkHCall {
  StateUpdates updates{};
  Track h{}, u{};
  float* zeta = nullptr;   // [groups, heads]: of groups: what is left of an earlier state
  bool skip_last = false;  // of groups: nobody asks for the end of a sequence
  bool whole_k = false, whole_v = false;
};

/// Finds StateUpdates: a warp has a chunk of a head. The unit is a power of two that brings the largest weight near 1,
/// for float16, whose range is small; bf16 has it at 1. `cuts`: the first block finds the cut meanwhile, which is then
/// not there yet.
template <DType kType>
static __global__ void __launch_bounds__(kThreads)
    chunk_gates(const __grid_constant__ Problem p, Cut cut, StateUpdates updates, bool cuts) {
  if (cuts && block() == 0) return find_cut(p, cut);
  const int rows = static_cast<int>(p.batch * ((p.tokens + kSegment - 1) / kSegment)), heads = heads_of(p);
  const int tasks = p.cu_seqlens != nullptr ? chunk_tasks(p, cut.plan) : 2 * rows * heads;
  const int first = own_block() - (cuts ? 1 : 0), others = all_blocks() - (cuts ? 1 : 0);
  for (int task = first * kWarps + thread() / 32; task < tasks; task += others * kWarps) {
    const int slot = task / heads, head = task % heads;
    const Stretch chunk = p.cu_seqlens != nullptr ? tokens_of(cut.plan, slot) : tokens_of_row(p, slot);
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
    if (updates.gates != nullptr) {
      ChunkGates& gates = updates.gates[task];
      const auto both = [](const unsigned (&words)[2]) {
        return words[0] | static_cast<std::uint64_t>(words[1]) << 32;
      };
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int c = lane() + 32 * i;
        const std::uint64_t before = both(forgets) << (63 - c);
        gates.g[c] = sum[i];
        gates.log_beta[c] = beta[i] > 0 ? static_cast<double>(logf(beta[i])) : kLogZero;
        gates.since[c] = static_cast<float>(sum[i] - kForget * __popcll(static_cast<long long>(before)));
        gates.from[c] = before == 0 ? 0 : c - __clzll(static_cast<long long>(before));
      }
      if (lane() == 0) gates.forgets = both(forgets), gates.bad = both(bad);
    }
    // The end is lost where a bad token comes at or after the last γ = 0.
    const auto last = [](unsigned low, unsigned high) {
      return high != 0 ? 63 - __clz(static_cast<int>(high)) : low != 0 ? 31 - __clz(static_cast<int>(low)) : -1;
    };
    const bool lost = (bad[0] | bad[1]) != 0 && last(bad[0], bad[1]) >= last(forgets[0], forgets[1]);
    float weight[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // 0 stands for what is forgotten, not for what is only small
      const double since = end - sum[i];
      const float faded = max(beta[i] * __expf(static_cast<float>(since)), 1e-40f);
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
    for (int i = 0; i < 2; ++i) updates.weight[task * kChunk + lane() + 32 * i] = weight[i] / unit;
    const auto zeta = __expf(static_cast<float>(end));
    if (lane() == 0) updates.chunk[task] = {lost ? bits_to_float(0x7fc00000u) : zeta, unit};
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
                 const __grid_constant__ GroupStates u, const float* zeta) {
  constexpr int kAhead = 8;
  const auto tiles_of = [](const GroupStates& of) { return (of.rows * of.columns + 255) / 256; };
  const int tiles = tiles_of(h) + tiles_of(u);
  const int heads = heads_of(p), tasks = static_cast<int>(p.sequences) * heads * tiles;
  for (int task = own_block(); task < tasks; task += all_blocks()) {
    const int tile = task % tiles;
    const bool of_u = tile >= tiles_of(h);
    const GroupStates& c = of_u ? u : h;
    const std::int64_t size = static_cast<std::int64_t>(c.rows) * c.columns;
    const int sequence_head = task / tiles, n = sequence_head / heads, head = sequence_head % heads;
    const int e = (of_u ? tile - tiles_of(h) : tile) * 256 + thread();
    if (e >= size) continue;
    float state = 0;
    if (c.start != nullptr) {
      const float* const start = c.start + sequence_head * size;
      state = c.symmetric ? 0.5f * start[e] + 0.5f * start[e % c.columns * c.columns + e / c.columns] : start[e];
    }
    const std::int64_t first = cut.group_begin[n];
    const int count = static_cast<int>(cut.group_begin[n + 1] - first);
    const float *part = c.parts + (first * p.heads + head) * size + e, *left = zeta + first * p.heads + head;
    float* arriving = c.parts + (first * p.heads + head) * size + e;
    const std::int64_t apart = p.heads * size;
    for (int i = 0; i < count; i += kAhead) {
      float parts[kAhead], by[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        parts[a] = *part, by[a] = *left;
        if (i + a + 1 < count) part += apart, left += p.heads;
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (i + a >= count) break;
        *arriving = state;
        arriving += apart;
        state = (by[a] == 0 ? 0 : by[a] * state) + parts[a];
      }
    }
    if (c.end != nullptr) c.end[sequence_head * size + e] = state;
  }
}

/// A barrier of one warpgroup.
__device__ __forceinline__ void sync_group() { sync_some<kWarpgroup>(1 + thread() / kWarpgroup); }

/// A state of D×N over the accumulators of products of 64 rows each; of a D below that the last rows are nothing, and
/// 0.
template <int D, int N>
struct State {
  static constexpr int kProducts = kColumnBlocks<D>;
  float part[kProducts][N / 2];

  /// body(row, column, first, second)
  template <typename Body>
  __device__ __forceinline__ void each(Body&& body) {
#pragma unroll
    for (int m = 0; m < kProducts; ++m) {
      each_pair(part[m], [&](int row, int column, float& a, float& b) { body(64 * m + row, column, a, b); });
    }
  }
  __device__ __forceinline__ void fill(float value) {
    each([&](int, int, float& a, float& b) { a = b = value; });
  }
  __device__ __forceinline__ void hold() {
#pragma unroll
    for (int m = 0; m < kProducts; ++m) hopper::hold(part[m]);
  }
  /// 0 clears, also what is not finite.
  __device__ __forceinline__ void fade(float by) {
    if (by == 0) return fill(0);
    each([&](int, int, float& a, float& b) { a *= by, b *= by; });
  }
  /// From or to rows of `columns` numbers, of which the first is at `at`.
  __device__ __forceinline__ void load(const float* from, int rows, int columns, int first) {
    each_in_memory(rows, columns, first, [&](auto pairs, std::int64_t at, bool one, bool two, float& a, float& b) {
      const float2 pair = read_pair<decltype(pairs)::value>(from, at, one, two);
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
      for (int m = 0; m < kProducts; ++m) {
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

  /// Over the warpgroup, what `join` makes of its values, in the same order every time. A barrier.
  template <typename Join>
  __device__ __forceinline__ float2 over_group(float2 value, float2 (&room)[4], Join&& join) {
#pragma unroll
    for (int reach = 16; reach > 0; reach /= 2) {
      value.x = join(value.x, __shfl_xor_sync(0xffffffffu, value.x, reach));
      value.y = join(value.y, __shfl_xor_sync(0xffffffffu, value.y, reach));
    }
    if (lane() == 0) room[thread() / 32 % 4] = value;
    sync_group();
    value = room[0];
#pragma unroll
    for (int i = 1; i < 4; ++i) value = {join(value.x, room[i].x), join(value.y, room[i].y)};
    return value;
  }
  /// What this thread has of the diagonal of H, of which these are all columns, or the so-manieth N of them.
  __device__ __forceinline__ float own_diagonal(int column_block) {
    // Row 64m + 16w + 8h + l/4 meets column 8i + 2(l%4) + e where i = 8m + 2w + h and e = l/4 − 2(l%4).
    float sum = 0;
    const int e = lane() / 4 - 2 * (lane() % 4), w = thread() % kWarpgroup / 32;
    if (e != 0 && e != 1) return 0;
#pragma unroll
    for (int m = 0; m < kProducts; ++m) {
      if (N < D && m != column_block) continue;
#pragma unroll
      for (int n = 0; n < kBlockColumns<D> / 8; ++n) {
        const int at = 4 * ((N < D ? 0 : 8 * m) + n) + 2 * (n % 2);
        sum += n / 2 == w ? (e == 0 ? part[m][at] : part[m][at + 1]) : 0;
      }
    }
    return sum;
  }
  /// The sum of the squares of this thread's numbers times `by`.
  __device__ __forceinline__ float own_squares(float by) {
    float sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int m = 0; m < kProducts; ++m) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) sums[i % 4] += (part[m][i] * by) * (part[m][i] * by);
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
  /// ‖state‖_F (NaN where it is not finite) and, of H, its trace. Barriers of the warpgroup.
  __device__ __forceinline__ float2 measure(bool with_trace, int column_block, float2 (&room)[2][4]) {
    const auto plus = [](float a, float b) { return a + b; };
    const float2 sums = over_group({own_squares(1), with_trace ? own_diagonal(column_block) : 0}, room[0], plus);
    if (sums.x > 1e-20f && sums.x < 1e20f) return {sqrtf(sums.x), sums.y};
    // Far from 1: the largest number first.
    float top = 0;
    each([&](int, int, float& a, float& b) { top = fmaxf(top, fmaxf(fabsf(a), fabsf(b))); });
    top = over_group({top, 0}, room[1], [](float a, float b) { return fmaxf(a, b); }).x;
    const float by = top > 1e-37f && top < 3e38f ? 1 / top : 0;  // fmaxf passes NaN over: the squares find it
    const float square = over_group({own_squares(by), 0}, room[0], plus).x;
    sync_group();  // both rooms are free again
    if (by > 0) return {sqrtf(square) * top, sums.y};
    return {square == 0 && top <= 1e-37f ? 0 : bits_to_float(0x7fc00000u), 0};
  }
  /// As float16 in a tile of blocks of D rows, times `by`, which is not 0; with room for 64 rows.
  __device__ __forceinline__ void put(char* tile, float by) {
    const int matrix = opaque(lane() / 8), row = opaque(thread() % kWarpgroup / 32 * 16 + matrix % 2 * 8 + lane() % 8);
#pragma unroll
    for (int m = 0; m < kProducts; ++m) {
#pragma unroll
      for (int i = 0; i < N / 2; i += 8) {
        std::uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = pack_half(part[m][i + 2 * w] * by, part[m][i + 2 * w + 1] * by);
        const int at = unit_at<kBlockColumns<N>>(64 * m + row, i / 4 + matrix / 2, D);
        store_matrices(shared_address(tile + at), words[0], words[1], words[2], words[3]);
      }
    }
  }
  /// A tile of zeros.
  __device__ __forceinline__ void put_nothing(char* tile) {
    for (int i = thread() % kWarpgroup; i < D * N / 8; i += kWarpgroup) reinterpret_cast<uint4*>(tile)[i] = {};
  }
  /// += Aᵀ B: tiles of 64 rows, of D and of N columns. Where D is less than 64, the rest of 64 rows comes from what
  /// lies behind A, and is to be cleared.
  template <bool kHalf>
  __device__ __forceinline__ void add(const char* a, const char* b) {
    constexpr int kLeft = kBlockColumns<D>, kRight = kBlockColumns<N>;
    const std::uint64_t right = descriptor<kRight>(b, kChunk);
#pragma unroll
    for (int m = 0; m < kProducts; ++m) {
      const std::uint64_t left = descriptor<kLeft>(a + m * kChunk * kLeft * 2, kChunk);
#pragma unroll
      for (int s = 0; s < kChunk / 16; ++s) {
        mma<true, true, kHalf>(part[m], mn_major_step<kLeft>(left, s), mn_major_step<kRight>(right, s));
      }
    }
  }
  __device__ __forceinline__ void clear_rest() {
    if (D < 64 && own_row() >= D) fill(0);
  }
};

/// Two producer warpgroups make tiles, two consumers have H and D columns of U, or 64 columns of each. Registers go
/// where the states are.
inline constexpr int kProducers = 2 * kWarpgroup, kChunkHThreads = kProducers + 2 * kWarpgroup;
/// Blocks on a multiprocessor.
template <int D>
inline constexpr int kChunkHBlocks = by_size<D>(2, 2, 1, 1);
template <int D, bool kEveryChunk>
inline constexpr int kProducerRegisters = by_size<D>(56, 56, 80, kEveryChunk ? 80 : 96);
template <int D, bool kEveryChunk>
inline constexpr int kConsumerRegisters = by_size<D>(72, 72, 176, kEveryChunk ? 176 : 160);

/// Shared memory: stages of token tiles (W in two parts, keys, values), and the tiles of both states.
template <int D, bool kEveryChunk>
struct ChunkHLayout {
  static constexpr int kColumns = kStateColumns<D>, kStages = kEveryChunk || kStateBlocks<D> > 1 ? 2 : 3;
  static constexpr int kTile = kChunk * D * 2, kRight = kChunk * kColumns * 2;
  static constexpr int kKeys = 2 * kTile, kValues = kKeys + kRight, kStage = kValues + kRight;  // in a stage
  static constexpr int kState = (D < 64 ? 64 : D) * kColumns * 2;
  static constexpr int kBytes = 1024 + kStages * kStage + (kEveryChunk ? 2 * kState : 0);
};

/// Which stage chunk n of a block lies in (counted over all of its tasks), and the parity of its turn there.
template <int kStages>
struct Turn {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

/// What passes between producers and consumers.
template <int kStages>
struct ChunkHShared {
  std::uint64_t full[kStages], empty[kStages];
  float2 fade[kStages];  // of the chunk: StateUpdates::chunk
  int lost[kStages][2];  // the last chunk in this stage (counted from 1) whose part of H, of U is not finite
  float2 room[2][2][4];
};

/// A (group, head, block of columns).
struct GroupTask {
  int head, slot, first_chunk;  // of [groups, heads]; of [slots, heads]
  Group group;
  Stretch whole;
  int column_block, chunks, walked;
  bool skipped;
};

template <bool kEveryChunk>
__device__ __forceinline__ GroupTask group_task(const Problem& p, const Cut& cut, const ChunkHCall& w, int task,
                                                int across) {
  const int heads = heads_of(p), head = task / across % heads, at = task / across / heads;
  const Group group = cut.groups[at];
  const Stretch whole = tokens_of(cut, group);
  const int chunks = static_cast<int>((whole.length + kChunk - 1) / kChunk);
  return {.head = head,
          .slot = at * heads + head,
          .first_chunk = 2 * static_cast<int>(group.segment) * heads + head,
          .group = group,
          .whole = whole,
          .column_block = static_cast<int>(task % across),
          .chunks = chunks,
          .walked = kEveryChunk ? chunks - 1 : chunks,
          .skipped = !kEveryChunk && w.skip_last && cut.plan.segments[group.segment + group.count - 1].last != 0};
}

/// The warpgroups that make tiles: a unit of the next chunk is asked for as soon as that of this one is stored.
/// kValues: there is U too. kShared: heads may share keys or values; a switch, because these threads have no register
/// left for it.
template <int D, bool kEveryChunk, DType kType, bool kValues, bool kWhole, bool kShared>
__device__ __forceinline__ void produce_tiles(const Problem& p, const Cut& cut, const ChunkHCall& w, char* tiles,
                                              ChunkHShared<ChunkHLayout<D, kEveryChunk>::kStages>& s, int tasks,
                                              int across) {
  using Room = ChunkHLayout<D, kEveryChunk>;
  using Rows = TokenRows<D, kProducers>;
  using ValueRows = TokenRows<Room::kColumns, kProducers>;
  constexpr bool kInBlocks = kStateBlocks<D> > 1;
  const int heads = heads_of(p);
  Turn<Room::kStages> turn;
  int counted = 0;
  for (int task = own_block(); task < tasks; task += all_blocks()) {
    const GroupTask t = group_task<kEveryChunk>(p, cut, w, task, across);
    if (t.skipped || t.walked <= 0) continue;
    Rows keys;
    ValueRows values;
    // Of wide heads a warp has rows of keys as a whole: a lane has the weight of one of them, for all.
    float weight[kInBlocks ? 1 : Rows::kOwn], own_weight[kInBlocks ? ValueRows::kOwn : 1];
    float2 fade;
    const auto source_of = [&](auto rows, const View& view, std::int64_t group, int i, int columns, int first) {
      const std::int64_t head = kShared ? shared_head(t.head, group) : t.head;
      return decltype(rows)::type::source(view, chunk_of(t.whole, i), head, columns, first);
    };
    const auto keys_of = [&](int i) {
      return source_of(std::type_identity<Rows>{}, p.k, p.key_group, i, static_cast<int>(p.key_dim), 0);
    };
    const auto values_of = [&](int i) {
      return source_of(std::type_identity<ValueRows>{}, p.v, p.value_group, i, w.u.columns,
                       t.column_block * Room::kColumns);
    };
    const auto fetch_weights = [&](int i) {
      const int chunk = t.first_chunk + i * heads;
      if constexpr (kInBlocks) {
        static_assert(Rows::kUnits == 32 && Rows::kOwn <= 32);
        weight[0] = w.updates.weight[chunk * kChunk + Rows::row(lane() % Rows::kOwn)];
#pragma unroll
        for (int n = 0; n < ValueRows::kOwn; ++n) {
          own_weight[n] = w.updates.weight[chunk * kChunk + ValueRows::row(n)];
        }
      } else {
#pragma unroll
        for (int n = 0; n < Rows::kOwn; ++n) weight[n] = w.updates.weight[chunk * kChunk + Rows::row(n)];
      }
      fade = w.updates.chunk[chunk];
    };
    keys.template fetch_units<kWhole>(keys_of(0));
    if constexpr (kValues) values.template fetch_units<kWhole>(values_of(0));
    fetch_weights(0);
    const auto weight_of = [&](int n) {
      if constexpr (kInBlocks) return __shfl_sync(0xffffffffu, weight[0], n);
      return weight[kInBlocks ? 0 : n];
    };
#pragma unroll 1
    for (int i = 0; i < t.walked; ++i, turn.next()) {
      const int next = i + 1 < t.walked ? i + 1 : i;
      ++counted;
      char* const stage = tiles + turn.stage * Room::kStage;
      barrier_wait(&s.empty[turn.stage], turn.parity ^ 1);
      bool lost[2] = {false, false};
      const auto next_keys = keys_of(next);
      const auto next_values = values_of(next);
      // Of keys in blocks the tile has one.
      const bool kept = !kInBlocks || Rows::column() / 8 == t.column_block;
      char* const own_keys = stage + Room::kKeys - (kInBlocks ? t.column_block * Room::kRight : 0);
#pragma unroll
      for (int n = 0; n < Rows::kOwn; ++n) {
        lost[0] |= keys.template store_weighted<kType>(stage, stage + Room::kTile, own_keys, n, weight_of(n), kept);
        keys.template fetch_unit<kWhole>(next_keys, n);
      }
      if constexpr (kValues) {
#pragma unroll
        for (int n = 0; n < ValueRows::kOwn; ++n) {
          lost[1] |= values.template store_checked<kType>(stage + Room::kValues, n,
                                                          kInBlocks ? own_weight[kInBlocks ? n : 0] : weight_of(n));
          values.template fetch_unit<kWhole>(next_values, n);
        }
      }
      if (lost[0]) s.lost[turn.stage][0] = counted;
      if (lost[0] || lost[1]) s.lost[turn.stage][1] = counted;
      if (thread() == 0) s.fade[turn.stage] = fade;
      fetch_weights(next);
      publish();
      barrier_arrive(&s.full[turn.stage]);
    }
  }
}

/// Leaves a state at the start of a chunk: `at` is slot · heads + head.
template <int D, int N>
__device__ __forceinline__ void leave_state(State<D, N>& state, const ChunkStates& to, int at, int column_block,
                                            bool with_trace, float unit, char* staged, float2 (&room)[2][4]) {
  const bool leader = thread() % kWarpgroup == 0;
  if (leader) bulk_store_wait();
  const float2 measured = state.measure(with_trace, column_block, room);
  const float norm = measured.x;
  const bool usable = norm > 1e-37f && norm < 3e38f;
  usable ? state.put(staged, 1 / norm) : state.put_nothing(staged);
  publish();
  sync_group();
  if (!leader) return;
  bulk_store(to.tile<D>(at, column_block), staged, D * N * 2);
  to.norm[at * to.across + column_block] = usable ? norm * unit : norm <= 1e-37f ? 0 : bits_to_float(0x7fc00000u);
  if (with_trace) to.trace[N < D ? at * to.across + column_block : at] = measured.y * unit, to.ample[at] = 0;
}

/// A warpgroup with a state.
template <int D, bool kEveryChunk, DType kType>
__device__ __forceinline__ void consume_tiles(const Problem& p, const Cut& cut, const ChunkHCall& w, char* tiles,
                                              ChunkHShared<ChunkHLayout<D, kEveryChunk>::kStages>& s, int tasks,
                                              int across) {
  using Room = ChunkHLayout<D, kEveryChunk>;
  constexpr bool kHalf = kType == DType::float16, kInBlocks = kStateBlocks<D> > 1;
  constexpr int N = Room::kColumns;
  const bool of_u = thread() / kWarpgroup == kChunkHThreads / kWarpgroup - 1;
  const Track& track = of_u ? w.u : w.h;
  const int heads = heads_of(p);
  Turn<Room::kStages> turn;
  int counted = 0;
  for (int task = own_block(); task < tasks; task += all_blocks()) {
    const GroupTask t = group_task<kEveryChunk>(p, cut, w, task, across);
    if (t.skipped) continue;
    const bool active = !kInBlocks ? of_u || t.column_block == 0
                        : of_u     ? t.column_block * N < track.columns || t.column_block < track.chunks.across
                                   : t.column_block < kStateBlocks<D>;
    const int column_block = kInBlocks || of_u ? t.column_block : 0, size = track.rows * track.columns;
    State<D, N> state;
    if (kEveryChunk) {
      state.load(track.states + static_cast<std::int64_t>(t.slot) * size, active ? track.rows : 0, track.columns,
                 column_block * N);
    } else {
      state.fill(0);
    }
    float unit = 1;
    double left = 1;
#pragma unroll 1
    for (int i = 0, at = t.first_chunk; i < t.chunks; ++i, at += heads) {
      if (kEveryChunk && active) {
        if (track.saved != nullptr && i % 2 == 0) {
          const std::int64_t segment = (at - t.head) / 2 + t.head;  // · heads + head
          state.store(track.saved + segment * size, track.rows, track.columns, column_block * N, unit);
        }
        char* const staged = tiles + Room::kStages * Room::kStage + (of_u ? Room::kState : 0);
        leave_state(state, track.chunks, at, column_block, !of_u, unit, staged, s.room[of_u ? 1 : 0]);
      }
      if (i == t.walked) break;
      barrier_wait(&s.full[turn.stage], turn.parity);
      const float2 fade = s.fade[turn.stage];
      ++counted;
      const bool lost = fade.x != fade.x || s.lost[turn.stage][of_u ? 1 : 0] == counted;
      if (!kEveryChunk) left = fade.x == 0 ? 0 : left * fade.x;
      state.fade(kHalf ? fade.x * (unit / fade.y) : fade.x);
      unit = fade.y;
      state.hold();
      wgmma_fence();
      const char* const stage = tiles + turn.stage * Room::kStage;
      const char* const right = stage + (of_u ? Room::kValues : Room::kKeys);
      if constexpr (kInBlocks && kEveryChunk) {
#pragma unroll 1  // for the registers of the operands' addresses
        for (int part = 0; part < 2; ++part) state.template add<kHalf>(stage + part * Room::kTile, right);
      } else {
        state.template add<kHalf>(stage, right);
        state.template add<kHalf>(stage + Room::kTile, right);
      }
      wgmma_commit();
      wgmma_wait<0>();
      state.hold();
      state.clear_rest();
      if (lane() == 0) barrier_arrive(&s.empty[turn.stage]);
      turn.next();
      if (lost) state.fill(bits_to_float(0x7fc00000u));
    }
    if (!kEveryChunk && active) {
      state.store(track.states + static_cast<std::int64_t>(t.slot) * size, track.rows, track.columns, column_block * N,
                  unit);
      if (!of_u && thread() % kWarpgroup == 0) w.zeta[t.slot] = static_cast<float>(left);
    }
  }
  if (kEveryChunk && thread() % kWarpgroup == 0) bulk_store_finish();
}

/// Blocks of columns that a group is walked with, where there are values of so many channels.
template <int D>
__host__ __device__ constexpr int blocks_across(int values) {
  const int of_u = (values + kStateColumns<D> - 1) / kStateColumns<D>;
  return of_u < kStateBlocks<D> && kStateBlocks<D> > 1 ? kStateBlocks<D> : of_u;
}

/// kValues: else there is no U, and the warpgroup that would have it has nothing to do.
template <int D, bool kEveryChunk, DType kType, bool kValues, bool kShared>
__global__ void __launch_bounds__(kChunkHThreads, kChunkHBlocks<D>)
    chunk_h(const __grid_constant__ Problem p, Cut cut, const __grid_constant__ ChunkHCall w) {
  constexpr int kStages = ChunkHLayout<D, kEveryChunk>::kStages;
  __shared__ ChunkHShared<kStages> s;
  char* const tiles = aligned_tiles();
  if (thread() < kStages) {
    barrier_init(&s.full[thread()], kProducers);
    barrier_init(&s.empty[thread()], (kValues ? 2 : 1) * kWarpgroup / 32);
    s.lost[thread()][0] = s.lost[thread()][1] = 0;
    barrier_fence();
  }
  sync();
  const int across = kValues ? blocks_across<D>(w.u.columns) : 1;
  const int tasks = static_cast<int>(cut.count(p)) * heads_of(p) * across;
  if (thread() < kProducers) {
    set_registers<kProducerRegisters<D, kEveryChunk>, false>();
    if (w.whole_k && w.whole_v) {
      produce_tiles<D, kEveryChunk, kType, kValues, true, kShared>(p, cut, w, tiles, s, tasks, across);
    } else {
      produce_tiles<D, kEveryChunk, kType, kValues, false, kShared>(p, cut, w, tiles, s, tasks, across);
    }
  } else {
    set_registers<kConsumerRegisters<D, kEveryChunk>, true>();
    if (!kValues && thread() >= kChunkHThreads - kWarpgroup) return;
    consume_tiles<D, kEveryChunk, kType>(p, cut, w, tiles, s, tasks, across);
  }
}

}  // namespace gka::kernels::cuda::hopper
