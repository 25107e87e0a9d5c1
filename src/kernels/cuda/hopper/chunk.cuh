// How the Hopper kernels cut a problem, and what they know of a chunk of 64 tokens: gates and token tiles.
//
// *Groups* are runs of segments of one sequence; states are carried from group to group, and inside a group one thread
// block walks. The number of segments in a group depends on sizes alone.
//
// Decays are sums of logarithms in float64. γ = 0 counts as a logarithm of −10⁶: every product across it is then
// exactly 0 in float32 and float64, and no case has to be told apart.
#pragma once

#include <type_traits>

#include "kernels/cuda/hopper/gates.h"
#include "kernels/cuda/hopper/system.cuh"
#include "kernels/cuda/hopper/wgmma.cuh"
#include "kernels/cuda/segments.cuh"

namespace gka::kernels::cuda::hopper {

inline constexpr int kWarpgroup = 128;  // threads of a block

// ---- The cut ----------------------------------------------------------------------------------------------------

struct Group {
  std::int64_t segment;  // its first
  int count;             // of segments
};

struct Cut {
  Plan plan;
  Group* groups;
  std::int64_t* group_begin;  // [sequences + 1]
  std::int64_t room;          // for groups
  int per_group;              // segments

  __device__ std::int64_t count(const Problem& p) const { return group_begin[p.sequences]; }
};

/// One block of kThreads finds segments and groups of every sequence.
__device__ inline void find_cut(const Problem& p, const Cut& cut) {
  __shared__ std::int64_t sums[2][kThreads];
  const std::int64_t share = (p.sequences + kThreads - 1) / kThreads;
  const std::int64_t from = thread() * share, to = min(from + share, p.sequences);
  const auto start = [&](std::int64_t n) { return first_token(p, n); };
  const auto length = [&](std::int64_t n) { return tokens_of_sequence(p, n); };
  const auto segments = [&](std::int64_t n) { return (length(n) + kSegment - 1) / kSegment; };
  const auto groups = [&](std::int64_t n) { return (segments(n) + cut.per_group - 1) / cut.per_group; };
  std::int64_t own[2] = {0, 0};
  for (std::int64_t n = from; n < to; ++n) own[0] += segments(n), own[1] += groups(n);
  for (int s = 0; s < 2; ++s) sums[s][thread()] = own[s];
  sync();
  for (int reach = 1; reach < kThreads; reach *= 2) {
    std::int64_t before[2] = {0, 0};
    for (int s = 0; s < 2 && thread() >= reach; ++s) before[s] = sums[s][thread() - reach];
    sync();
    for (int s = 0; s < 2; ++s) sums[s][thread()] += before[s];
    sync();
  }
  std::int64_t segment = sums[0][thread()] - own[0], group = sums[1][thread()] - own[1];
  for (std::int64_t n = from; n < to; ++n) {
    cut.plan.begin[n] = min(segment, cut.plan.most);
    cut.group_begin[n] = min(group, cut.room);
    segment += segments(n), group += groups(n);
  }
  if (thread() == 0) {
    cut.plan.begin[p.sequences] = min(sums[0][kThreads - 1], cut.plan.most);
    cut.group_begin[p.sequences] = min(sums[1][kThreads - 1], cut.room);
  }
  sync();
  const auto owner = [&](const std::int64_t* begin, std::int64_t at) {  // the last sequence that begins at or before
    std::int64_t low = 0, high = p.sequences;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (begin[middle] <= at ? low : high) = middle;
    }
    return low;
  };
  for (std::int64_t at = thread(); at < cut.plan.begin[p.sequences]; at += kThreads) {
    const std::int64_t n = owner(cut.plan.begin, at), t = (at - cut.plan.begin[n]) * kSegment, whole = length(n);
    cut.plan.segments[at] = {.sequence = n,
                             .batch = p.cu_seqlens != nullptr ? 0 : n,
                             .begin = start(n) + t,
                             .length = min(kSegment, whole - t),
                             .last = t + kSegment >= whole};
  }
  for (std::int64_t at = thread(); at < cut.group_begin[p.sequences]; at += kThreads) {
    const std::int64_t n = owner(cut.group_begin, at), first = (at - cut.group_begin[n]) * cut.per_group;
    cut.groups[at] = {.segment = cut.plan.begin[n] + first,
                      .count = static_cast<int>(min<std::int64_t>(cut.per_group, segments(n) - first))};
  }
}

static __global__ void __launch_bounds__(kThreads) make_cut(const __grid_constant__ Problem p, Cut cut) {
  find_cut(p, cut);
}

__device__ inline Stretch tokens_of(const Cut& cut, const Group& group) {
  const Segment first = cut.plan.segments[group.segment], last = cut.plan.segments[group.segment + group.count - 1];
  return {first.batch, first.begin, last.begin + last.length - first.begin};
}
__device__ inline Stretch tokens_of(const Plan& plan, int slot) { return tokens_of(plan.segments[slot / 2], slot % 2); }
/// The part of a stretch that is its chunk i.
__device__ inline Stretch chunk_of(const Stretch& whole, int i) {
  return {whole.batch, whole.begin + i * kChunk, min<std::int64_t>(whole.length - i * kChunk, kChunk)};
}

/// Tasks, slots and heads are counted in 32 bits, of which a task's tiles in memory are room enough: a division of 64
/// bits takes a hundred instructions.
__device__ __forceinline__ int heads_of(const Problem& p) { return static_cast<int>(p.heads); }
__device__ __forceinline__ int chunk_tasks(const Problem& p, const Plan& plan) {
  return 2 * static_cast<int>(plan.count(p)) * heads_of(p);
}
__device__ __forceinline__ int own_block() { return static_cast<int>(block()); }
__device__ __forceinline__ int all_blocks() { return static_cast<int>(blocks()); }

// ---- Accumulators -----------------------------------------------------------------------------------------------

__device__ __forceinline__ int lane() { return thread() % 32; }
/// This thread's first row of a 64-row accumulator (the other is 8 below), and its first column (others 8 apart).
__device__ __forceinline__ int own_row() { return thread() % kWarpgroup / 32 * 16 + lane() / 4; }
__device__ __forceinline__ int own_column() { return lane() % 4 * 2; }

/// body(row, column, first, second) for each pair of neighbouring numbers this thread holds.
template <int kCount, typename Body>
__device__ __forceinline__ void each_pair(float (&d)[kCount], Body&& body) {
  const int row = opaque(own_row()), column = opaque(own_column());
#pragma unroll
  for (int i = 0; i < kCount; i += 2) body(row + (i & 2) * 4, i / 4 * 8 + column, d[i], d[i + 1]);
}

__device__ __forceinline__ float add_quad(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

// ---- ChunkGates
// ------------------------------------------------------------------------------------------------------

/// A chunk's gates, as chunk_gates (states.cuh) leaves them.
struct alignas(16) ChunkGates {
  double g[kChunk];         // Σ_{i≤c} log γ_i
  double log_beta[kChunk];  // kLogZero for 0 and for what is not a number
  // For sums over pairs of tokens, in float32: M_jc = exp(since[c] − since[j]) for from[c] ≤ j ≤ c, else 0.
  float since[kChunk];    // Σ log γ_i over the tokens after from[c]
  int from[kChunk];       // the last token with γ = 0, or 0
  std::uint64_t forgets;  // which tokens have γ = 0
  std::uint64_t bad;      // whose gates are not numbers
};

/// Which tokens a bad one, or a state that was lost before, has reached: everything from there to the next γ = 0.
__device__ inline std::uint64_t lost_tokens(std::uint64_t forgets, std::uint64_t bad, bool before) {
  if (bad == 0 && !before) return 0;
  std::uint64_t lost = 0;
  bool reached = before;
  for (int c = 0; c < kChunk; ++c) {
    reached = (reached && (forgets >> c & 1) == 0) || (bad >> c & 1) != 0;
    lost |= static_cast<std::uint64_t>(reached) << c;
  }
  return lost;
}

// ---- Tiles of tokens --------------------------------------------------------------------------------------------

/// The block's dynamic shared memory, of which the first 1,023 bytes may be passed over: swizzled tiles begin at
/// multiples of 1,024.
__device__ __forceinline__ char* aligned_tiles() {
  return shared_memory() + (1024 - shared_address(shared_memory()) % 1024) % 1024;
}

/// Where 16-byte unit u of row r lies in a tile whose blocks of kColumns columns have `rows` rows.
template <int kColumns = 64>
__device__ __forceinline__ int unit_at(int r, int u, int rows) {
  constexpr int kUnits = kColumns / 8, kBytes = kColumns * 2;
  return u / kUnits * rows * kBytes + r * kBytes + (u % kUnits ^ (kColumns == 64 ? r & 7 : r / 2 & 3)) * 16;
}

template <DType kType>
__device__ __forceinline__ float to_float(std::uint16_t bits) {
  return kType == DType::float16 ? half_to_float(bits) : bits_to_float(static_cast<std::uint32_t>(bits) << 16);
}

template <DType kType>
__device__ __forceinline__ float2 to_floats(std::uint32_t word) {
  if constexpr (kType == DType::float16) return unpack_half(word);
  return {low(word), high(word)};
}

/// Whether eight 16-bit numbers are all finite: one more in the exponent does not reach the sign.
template <DType kType>
__device__ __forceinline__ bool all_finite(const uint4& unit) {
  constexpr std::uint32_t kOne = kType == DType::float16 ? 0x04000400u : 0x00800080u;
  const auto reached = [](std::uint32_t word) { return (word & 0x7fff7fffu) + kOne; };
  return ((reached(unit.x) | reached(unit.y) | reached(unit.z) | reached(unit.w)) & 0x80008000u) == 0;
}

/// Columns first … first + kColumns − 1 of up to 64 rows of tokens, on their way from memory: of a block of kCount
/// threads thread t has units t, t + kCount, … of the tile, row by row.
template <int kColumns, int kCount = kWarpgroup>
struct TokenRows {
  static constexpr int kUnits = kColumns / 8, kOwn = kChunk * kUnits / kCount;
  uint4 unit[kOwn];

  static constexpr int kRowsApart = kCount / kUnits, kBlock = kBlockColumns<kColumns>;
  __device__ static int row(int i) { return thread() / kUnits + i * kRowsApart; }
  __device__ static int column() { return thread() % kUnits; }  // in units
  /// Of unit i in a tile. Where the rows are multiples of 8 apart, the swizzle is the same for all.
  __device__ static int place(int i) {
    if constexpr (kRowsApart % 8 != 0) return unit_at<kBlock>(row(i), column(), kChunk);
    return unit_at<kBlock>(thread() / kUnits, column(), kChunk) + i * kRowsApart * kBlock * 2;
  }

  /// Where this thread's units come from.
  struct Source {
    const std::uint16_t *data, *at;  // the array, and the first unit
    std::int64_t apart;
    int rows, from, columns;
  };
  __device__ __forceinline__ static Source source(const View& view, const Stretch& chunk, std::int64_t head,
                                                  int columns, int first) {
    const int from = first + column() * 8;
    const auto* const data = static_cast<const std::uint16_t*>(view.data);
    return {.data = data,
            .at = data + offset(view, chunk.batch, chunk.begin + row(0), head) + from,
            .apart = kRowsApart * view.token_stride,
            .rows = from < columns ? static_cast<int>(chunk.length) : 0,
            .from = from,
            .columns = columns};
  }
  /// kWhole: rows begin at multiples of 16 bytes and the number of columns is a multiple of 8.
  template <bool kWhole>
  __device__ __forceinline__ void fetch_unit(const Source& s, int i) {
    if constexpr (kWhole) {
      const bool there = row(i) < s.rows;  // what is not there is read somewhere else: no branches between loads
      unit[i] = *reinterpret_cast<const uint4*>(there ? s.at + i * s.apart : s.data);
      if (!there) unit[i] = {0, 0, 0, 0};
    } else {
      std::uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (row(i) < s.rows && s.from + e < s.columns) {
          words[e / 2] |= static_cast<std::uint32_t>(s.at[i * s.apart + e]) << (e % 2 * 16);
        }
      }
      unit[i] = {words[0], words[1], words[2], words[3]};
    }
  }
  template <bool kWhole>
  __device__ __forceinline__ void fetch_units(const Source& s) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) fetch_unit<kWhole>(s, i);
  }
  __device__ __forceinline__ void fetch(const View& view, const Stretch& chunk, std::int64_t head, int columns,
                                        int first, bool whole) {
    const Source from = source(view, chunk, head, columns, first);
    whole ? fetch_units<true>(from) : fetch_units<false>(from);
  }

  /// Unit i as it is, or 0 where it is not finite; returned is whether that loses anything. `kept`: not everybody's is
  /// wanted.
  template <DType kType>
  __device__ __forceinline__ bool store_checked(char* tile, int i, float weight, bool kept = true) {
    const bool fine = all_finite<kType>(unit[i]);
    if (!fine) unit[i] = {};
    if (kept) *reinterpret_cast<uint4*>(tile + place(i)) = unit[i];
    return !fine && weight != 0;
  }
  /// As store_checked, and times its weight in two parts.
  template <DType kType>
  __device__ __forceinline__ bool store_weighted(char* hi, char* lo, char* tile, int i, float weight,
                                                 bool kept = true) {
    constexpr bool kHalf = kType == DType::float16;
    const bool loses = store_checked<kType>(tile, i, weight, kept);
    const std::uint32_t words[4] = {unit[i].x, unit[i].y, unit[i].z, unit[i].w};
    std::uint32_t top[4], rest[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 pair = to_floats<kType>(words[w]);
      const float a = weight * pair.x, b = weight * pair.y;
      top[w] = kHalf ? pack_half(a, b) : pack(a, b);
      rest[w] = kHalf ? pack_half_rest(a, b, top[w]) : pack_rest(a, b, top[w]);
    }
    *reinterpret_cast<uint4*>(hi + place(i)) = {top[0], top[1], top[2], top[3]};
    *reinterpret_cast<uint4*>(lo + place(i)) = {rest[0], rest[1], rest[2], rest[3]};
    return loses;
  }
  /// Units that are not finite become 0; returned is which.
  template <DType kType>
  __device__ __forceinline__ unsigned clear_bad() {
    unsigned bad = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (all_finite<kType>(unit[i])) continue;
      unit[i] = {};
      bad |= 1u << i;
    }
    return bad;
  }

  /// As float16, in one tile, each row divided by the power of two below its largest number, so that float16 holds it
  /// whatever its scale; `exponent[row]` is that power.
  template <DType kType>
  __device__ __forceinline__ void store_half(char* tile, int* exponent) const {
    static_assert(kUnits <= 32 && 32 % kUnits == 0);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float2 pair[4] = {to_floats<kType>(unit[i].x), to_floats<kType>(unit[i].y), to_floats<kType>(unit[i].z),
                              to_floats<kType>(unit[i].w)};
      // Numbers without their signs are ordered as their bits are.
      constexpr unsigned kUnsigned = 0x7fff7fffu;
      const unsigned both = __vmaxu2(__vmaxu2(unit[i].x & kUnsigned, unit[i].y & kUnsigned),
                                     __vmaxu2(unit[i].z & kUnsigned, unit[i].w & kUnsigned));
      unsigned top = max(both & 0xffffu, both >> 16);
#pragma unroll
      for (int reach = kUnits / 2; reach > 0; reach /= 2) top = max(top, __shfl_xor_sync(0xffffffffu, top, reach));
      const std::uint32_t bits = float_to_bits(to_float<kType>(static_cast<std::uint16_t>(top))) & 0x7f800000u;
      const bool usual = bits > 0x01000000u && bits < 0x7e000000u;
      const float by = usual ? bits_to_float(0x7f000000u - bits) : 1;
      if (column() == 0) exponent[row(i)] = usual ? static_cast<int>(bits >> 23) - 127 : 0;
      std::uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = pack_half(pair[w].x * by, pair[w].y * by);
      *reinterpret_cast<uint4*>(tile + place(i)) = {words[0], words[1], words[2], words[3]};
    }
  }
  /// As they are.
  __device__ __forceinline__ void store(char* tile) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) *reinterpret_cast<uint4*>(tile + place(i)) = unit[i];
  }
};

/// A pair of neighbouring 16-bit columns: kPairs loads both at once, and without a branch; else the second (and then
/// the first) may not be there.
template <bool kPairs>
__device__ __forceinline__ std::uint32_t read_word(const void* data, std::int64_t at, bool first, bool second) {
  const auto* from = static_cast<const std::uint16_t*>(data);
  if constexpr (!kPairs)
    return (first ? from[at] : 0u) | (second ? static_cast<std::uint32_t>(from[at + 1]) << 16 : 0u);
  const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(from + (first ? at : 0));
  return first ? word : 0;
}
/// The same of float32.
template <bool kPairs>
__device__ __forceinline__ float2 read_pair(const void* data, std::int64_t at, bool first, bool second) {
  const auto* from = static_cast<const float*>(data);
  if constexpr (!kPairs) return {first ? from[at] : 0, second ? from[at + 1] : 0};
  const float2 pair = *reinterpret_cast<const float2*>(from + (first ? at : 0));
  return {first ? pair.x : 0, first ? pair.y : 0};
}

/// Calls body(std::true_type or std::false_type): a branch once, outside loops.
template <typename Body>
__device__ __forceinline__ void with_flag(bool flag, Body&& body) {
  if (flag) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

template <bool kPairs>
__device__ __forceinline__ void store_pair(float* to, float a, float b, bool second) {
  if constexpr (kPairs) {
    *reinterpret_cast<float2*>(to) = {a, b};
  } else {
    to[0] = a;
    if (second) to[1] = b;
  }
}

/// Whether TokenRows may read whole units.
inline bool whole_units(const View& view, std::int64_t columns) {
  const auto multiple = [](std::int64_t n) { return n % 8 == 0; };
  return multiple(columns) && multiple(view.batch_stride) && multiple(view.token_stride) &&
         multiple(view.head_stride) && reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
}
/// Whether neighbouring columns can be read and written in pairs.
inline bool whole_pairs(const View& view, std::int64_t columns) {
  const auto even = [](std::int64_t n) { return n % 2 == 0; };
  const std::uintptr_t pair = view.dtype == DType::float32 ? 8 : 4;
  return even(columns) && even(view.batch_stride) && even(view.token_stride) && even(view.head_stride) &&
         reinterpret_cast<std::uintptr_t>(view.data) % pair == 0;
}

// ---- On the host ------------------------------------------------------------------------------------------------

/// How many blocks share the tasks of a kernel.
template <typename... Parameters>
std::int64_t blocks_of(void (*kernel)(Parameters...), std::int64_t tasks, int shared_bytes, int device,
                       int threads = kWarpgroup) {
  return min<std::int64_t>(tasks, max(resident_blocks(kernel, shared_bytes, threads), 1) * multiprocessors(device));
}

template <int kBlock = kWarpgroup, typename... Parameters, typename... Arguments>
void start(void (*kernel)(Parameters...), std::int64_t tasks, int shared_bytes, const Device& device,
           Arguments&&... arguments) {
  const std::int64_t blocks = blocks_of(kernel, tasks, shared_bytes, device.index, kBlock);
  launch<kBlock>(kernel, blocks, shared_bytes, device.stream, std::forward<Arguments>(arguments)...);
}

/// The same with a block for each task: what keeps nothing from task to task need not wait for the slowest of a round.
template <typename... Parameters, typename... Arguments>
void start_each(void (*kernel)(Parameters...), std::int64_t tasks, int shared_bytes, const Device& device,
                Arguments&&... arguments) {
  launch_blocks_of<kWarpgroup>(kernel, tasks, shared_bytes, device.stream, std::forward<Arguments>(arguments)...);
}

/// Room for segments, and groups of up to `per_group` of them.
inline Cut room_for_cut(const Problem& p, int per_group, const Device& device) {
  const std::int64_t segments = segments_of(p), length = kSegment * per_group;
  const std::int64_t groups = p.cu_seqlens != nullptr ? min(segments, p.tokens / length + p.sequences)
                                                      : p.batch * ((p.tokens + length - 1) / length);
  return {.plan = {.segments = allocate<Segment>(device, segments),
                   .begin = allocate<std::int64_t>(device, p.sequences + 1),
                   .most = segments},
          .groups = allocate<Group>(device, groups),
          .group_begin = allocate<std::int64_t>(device, p.sequences + 1),
          .room = groups,
          .per_group = per_group};
}
inline Cut start_cut(const Problem& p, int per_group, const Device& device) {
  const Cut cut = room_for_cut(p, per_group, device);
  launch(make_cut, 1, 0, device.stream, p, cut);
  return cut;
}

}  // namespace gka::kernels::cuda::hopper
