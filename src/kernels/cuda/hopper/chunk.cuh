// How the Hopper kernels cut a problem, and what they know of a chunk of 64 tokens: gates and token tiles.
//
// Chunk *slots* are numbered as the plain path numbers its segments of 128 tokens, two to a segment: slot 2s + h is
// half h of segment s. *Groups* are runs of segments of one sequence; states are carried from group to group, and
// inside a group one thread block walks. The number of segments in a group depends on sizes alone.
//
// Decays are sums of logarithms in float64. γ = 0 counts as a logarithm of −10⁶: every product across it is then
// exactly 0 in float32 and float64, and no case has to be told apart.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/cuda/hopper/wgmma.cuh"
#include "kernels/cuda/segments.cuh"

namespace gka::kernels::cuda::hopper {

inline constexpr int kTokens = 64;          // of a chunk
inline constexpr int kWarpgroup = 128;      // threads of a block
inline constexpr double kForget = -1e6;     // log γ of γ = 0
inline constexpr double kForgets = -745.2;  // below this γ is 0 in float64
inline constexpr double kLogZero = -1e30;   // log 0, with which one can still subtract
inline constexpr double kVanished = -85;    // log ‖H‖_F below which 1/‖H‖_F leaves float32: nothing is remembered

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

/// Consecutive tokens of one sequence.
struct Stretch {
  std::int64_t batch, begin, length;
};

/// One block finds segments and groups of every sequence.
static __global__ void make_cut(const __grid_constant__ Problem p, Cut cut) {
  __shared__ std::int64_t sums[2][kThreads];
  const std::int64_t share = (p.sequences + kThreads - 1) / kThreads;
  const std::int64_t from = thread() * share, to = least(from + share, p.sequences);
  // Nobody has looked at cu_seqlens: whatever is in it, no token outside the arrays is touched.
  const auto start = [&](std::int64_t n) {
    return p.cu_seqlens != nullptr ? least(most(p.cu_seqlens[n], std::int64_t{0}), p.tokens) : std::int64_t{0};
  };
  const auto length = [&](std::int64_t n) {
    return p.cu_seqlens != nullptr ? most(start(n + 1) - start(n), std::int64_t{0}) : p.tokens;
  };
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
    cut.plan.begin[n] = least(segment, cut.plan.most);
    cut.group_begin[n] = least(group, cut.room);
    segment += segments(n), group += groups(n);
  }
  if (thread() == 0) {
    cut.plan.begin[p.sequences] = least(sums[0][kThreads - 1], cut.plan.most);
    cut.group_begin[p.sequences] = least(sums[1][kThreads - 1], cut.room);
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
                             .length = least(kSegment, whole - t),
                             .last = t + kSegment >= whole};
  }
  for (std::int64_t at = thread(); at < cut.group_begin[p.sequences]; at += kThreads) {
    const std::int64_t n = owner(cut.group_begin, at), first = (at - cut.group_begin[n]) * cut.per_group;
    cut.groups[at] = {.segment = cut.plan.begin[n] + first,
                      .count = static_cast<int>(least<std::int64_t>(cut.per_group, segments(n) - first))};
  }
}

__device__ inline Stretch tokens_of(const Cut& cut, const Group& group) {
  const Segment first = cut.plan.segments[group.segment], last = cut.plan.segments[group.segment + group.count - 1];
  return {first.batch, first.begin, last.begin + last.length - first.begin};
}
__device__ inline Stretch tokens_of(const Plan& plan, std::int64_t slot) {
  const Segment s = plan.segments[slot / 2];
  const std::int64_t skip = slot % 2 * kTokens;
  return {s.batch, s.begin + skip, least<std::int64_t>(s.length - skip, kTokens)};
}
/// The part of a stretch that is its chunk i.
__device__ inline Stretch chunk_of(const Stretch& whole, int i) {
  return {whole.batch, whole.begin + i * kTokens, least<std::int64_t>(whole.length - i * kTokens, kTokens)};
}

// ---- Accumulators -----------------------------------------------------------------------------------------------

__device__ __forceinline__ int lane() { return thread() % 32; }
/// The same number, of which the compiler knows nothing: what is computed from it is computed where it is used, not
/// once before a loop and kept in registers that the loop needs.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
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

// ---- Gates ------------------------------------------------------------------------------------------------------

/// The gates of one token, on their way from memory.
struct GateOfToken {
  float log_decay = 0, beta = 0, alpha = 0;
};

struct Gates {
  double g[kTokens];         // Σ_{i≤c} log γ_i
  double log_beta[kTokens];  // kLogZero for 0
  alignas(8) float beta[kTokens];
  float alpha[kTokens];
  int bad[kTokens];   // its gates are not numbers, or (with β ≠ 0) its key or value is not
  int lost[kTokens];  // a bad token has reached it: see find_lost
  int any_bad;
  double carry;  // scratch of scans
  // For sums over pairs of tokens, in float32: M_jc = exp(since[c] − since[j]) for from[c] ≤ j ≤ c, else 0.
  alignas(8) float since[kTokens];  // Σ log γ_i over the tokens after from[c]
  int from[kTokens];                // the last token with γ = 0, or 0
  unsigned forgets[2];              // which tokens have γ = 0
};

__device__ inline GateOfToken fetch_gates(const Problem& p, const Stretch& chunk, std::int64_t head) {
  GateOfToken gate;
  const int c = thread();
  if (c >= chunk.length || c >= kTokens) return gate;
  const auto get = [&](const View& view, float otherwise) {
    return view.data != nullptr ? read<float>(view, offset(view, chunk.batch, chunk.begin + c, head)) : otherwise;
  };
  return {.log_decay = get(p.log_decay, 0), .beta = get(p.beta, 1), .alpha = get(p.alpha, 1)};
}

/// Over the first 64 threads: what `join` makes of all values up to the thread's own. The whole block calls it.
template <typename Join>
__device__ __forceinline__ double scan(double value, double& carry, Join&& join) {
#pragma unroll
  for (int reach = 1; reach < 32; reach *= 2) {
    const double other = __shfl_up_sync(0xffffffffu, value, reach);
    if (lane() >= reach) value = join(other, value);
  }
  if (thread() == 31) carry = value;
  sync();
  if (thread() >= 32 && thread() < kTokens) value = join(carry, value);
  return value;
}

/// Begin with a barrier if anybody may still read the last ones; one more has to come before find_lost.
__device__ inline void set_gates(Gates& s, const GateOfToken& gate) {
  const int c = thread();
  const bool bad = gate.log_decay != gate.log_decay || !finite(gate.beta);
  const double step = gate.log_decay >= kForget ? static_cast<double>(gate.log_decay) : kForget;
  const bool forgets = step < kForgets;
  const unsigned word = __ballot_sync(0xffffffffu, forgets && c < kTokens);
  if (c == 0 || c == 32) s.forgets[c / 32] = word;
  const double sum = scan(forgets ? kForget : step, s.carry, [](double a, double b) { return a + b; });
  if (c < kTokens) {
    const std::uint64_t before = (s.forgets[0] | static_cast<std::uint64_t>(s.forgets[1]) << 32) << (63 - c);
    s.from[c] = before == 0 ? 0 : c - __clzll(static_cast<long long>(before));
    s.since[c] = static_cast<float>(sum - kForget * __popcll(before));
    s.g[c] = sum;
    s.beta[c] = bad ? 0 : gate.beta;
    s.log_beta[c] = !bad && gate.beta > 0 ? static_cast<double>(logf(gate.beta)) : kLogZero;
    s.alpha[c] = gate.alpha;
    s.bad[c] = bad;
    s.lost[c] = 0;
  }
  if (c == 0) s.any_bad = 0;
  sync();
  if (bad) raise(&s.any_bad);
}

/// Which tokens a bad one, or a state that was lost before, has reached: everything from there to the next γ = 0.
/// Returned is whether the chunk's end is among them. After a barrier that follows the loading of tiles; ends with one.
__device__ inline bool find_lost(Gates& s, bool before) {
  if (!before && !s.any_bad) return false;
  sync();
  if (thread() == 0) {
    int reached = before;
    for (int c = 0; c < kTokens; ++c) s.lost[c] = reached = (reached && !(s.forgets[c / 32] >> c % 32 & 1)) || s.bad[c];
  }
  sync();
  return s.lost[kTokens - 1] != 0;
}

// ---- Tiles of tokens --------------------------------------------------------------------------------------------

/// The block's dynamic shared memory, of which the first 1,023 bytes may be passed over: swizzled tiles begin at
/// multiples of 1,024.
__device__ __forceinline__ char* aligned_tiles() {
  return shared_memory() + (1024 - shared_address(shared_memory()) % 1024) % 1024;
}

/// Where 16-byte unit u of row r lies in a tile whose blocks of 64 columns have `rows` rows.
__device__ __forceinline__ int unit_at(int r, int u, int rows) {
  return u / 8 * rows * 128 + r * 128 + (u % 8 ^ (r & 7)) * 16;
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
  static constexpr int kUnits = kColumns / 8, kOwn = kTokens * kUnits / kCount;
  uint4 unit[kOwn];

  static constexpr int kRowsApart = kCount / kUnits;
  __device__ static int row(int i) { return thread() / kUnits + i * kRowsApart; }
  __device__ static int column() { return thread() % kUnits; }  // in units
  /// Of unit i in a tile: the rows are multiples of 8 apart, so the swizzle is the same for all.
  __device__ static int place(int i) { return unit_at(thread() / kUnits, column(), kTokens) + i * kRowsApart * 128; }

  /// `whole`: rows begin at multiples of 16 bytes and `columns` is a multiple of 8.
  __device__ __forceinline__ void fetch(const View& view, const Stretch& chunk, std::int64_t head, int columns,
                                        int first, bool whole) {
    const int from = first + column() * 8, rows = from < columns ? static_cast<int>(chunk.length) : 0;
    const auto* at =
        static_cast<const std::uint16_t*>(view.data) + offset(view, chunk.batch, chunk.begin + row(0), head) + from;
    const std::int64_t apart = kRowsApart * view.token_stride;
    if (whole) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const bool there = row(i) < rows;  // what is not there is read somewhere else: no branches between loads
        unit[i] =
            *reinterpret_cast<const uint4*>(there ? at + i * apart : static_cast<const std::uint16_t*>(view.data));
        if (!there) unit[i] = {0, 0, 0, 0};
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      std::uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (row(i) < rows && from + e < columns) {
          words[e / 2] |= static_cast<std::uint32_t>(at[i * apart + e]) << (e % 2 * 16);
        }
      }
      unit[i] = {words[0], words[1], words[2], words[3]};
    }
  }

  /// Units that are not finite become 0, and their tokens bad unless they write nothing.
  template <DType kType>
  __device__ __forceinline__ void check(Gates& gates) {
    bool fine = true;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) fine = fine & all_finite<kType>(unit[i]);
    if (fine) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (all_finite<kType>(unit[i])) continue;
      unit[i] = {};
      if (gates.beta[row(i)] == 0) continue;
      raise(&gates.bad[row(i)]);
      raise(&gates.any_bad);
    }
  }

  /// As they are; units that are not finite become 0, and raise `lost` where their tokens have a weight.
  template <DType kType>
  __device__ __forceinline__ void store_checked(char* tile, const float (&weight)[kOwn], int* lost) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (!all_finite<kType>(unit[i])) {
        unit[i] = {};
        if (weight[i] != 0) raise(lost);
      }
      *reinterpret_cast<uint4*>(tile + place(i)) = unit[i];
    }
  }
  /// As store_checked, and times their weights in two parts.
  template <DType kType>
  __device__ __forceinline__ void store_weighted(char* hi, char* lo, char* tile, const float (&weight)[kOwn],
                                                 int* lost) {
    constexpr bool kHalf = kType == DType::float16;
    store_checked<kType>(tile, weight, lost);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const std::uint32_t words[4] = {unit[i].x, unit[i].y, unit[i].z, unit[i].w};
      std::uint32_t top[4], rest[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 pair = to_floats<kType>(words[w]);
        const float a = weight[i] * pair.x, b = weight[i] * pair.y;
        top[w] = kHalf ? pack_half(a, b) : pack(a, b);
        rest[w] = kHalf ? pack_half_rest(a, b, top[w]) : pack_rest(a, b, top[w]);
      }
      *reinterpret_cast<uint4*>(hi + place(i)) = {top[0], top[1], top[2], top[3]};
      *reinterpret_cast<uint4*>(lo + place(i)) = {rest[0], rest[1], rest[2], rest[3]};
    }
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
      unsigned top = most(both & 0xffffu, both >> 16);
#pragma unroll
      for (int reach = kUnits / 2; reach > 0; reach /= 2) top = most(top, __shfl_xor_sync(0xffffffffu, top, reach));
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

/// A pair of neighbouring columns as float32: kPairs loads both at once, and without a branch; else the second (and
/// then the first) may not be there.
template <DType kType, bool kPairs>
__device__ __forceinline__ float2 read_pair(const void* data, std::int64_t at, bool first, bool second) {
  if constexpr (kType == DType::float32) {
    const auto* from = static_cast<const float*>(data);
    if constexpr (!kPairs) return {first ? from[at] : 0, second ? from[at + 1] : 0};
    const float2 pair = *reinterpret_cast<const float2*>(from + (first ? at : 0));
    return {first ? pair.x : 0, first ? pair.y : 0};
  } else {
    const auto* from = static_cast<const std::uint16_t*>(data);
    std::uint32_t word;
    if constexpr (kPairs) {
      word = *reinterpret_cast<const std::uint32_t*>(from + (first ? at : 0));
      if (!first) word = 0;
    } else {
      word = (first ? from[at] : 0u) | (second ? static_cast<std::uint32_t>(from[at + 1]) << 16 : 0u);
    }
    return {to_float<kType>(static_cast<std::uint16_t>(word & 0xffffu)),
            to_float<kType>(static_cast<std::uint16_t>(word >> 16))};
  }
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
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "sizing shared memory");
  int resident = 0;
  check(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, static_cast<std::size_t>(shared_bytes)),
      "asking for occupancy");
  return least<std::int64_t>(tasks, most(resident, 1) * multiprocessors(device));
}

template <int kBlock = kWarpgroup, typename... Parameters, typename... Arguments>
void start(void (*kernel)(Parameters...), std::int64_t tasks, int shared_bytes, const Device& device,
           Arguments&&... arguments) {
  const std::int64_t blocks = blocks_of(kernel, tasks, shared_bytes, device.index, kBlock);
  if (blocks <= 0) return;
  kernel<<<static_cast<unsigned>(blocks), kBlock, static_cast<std::size_t>(shared_bytes),
           static_cast<cudaStream_t>(device.stream)>>>(std::forward<Arguments>(arguments)...);
  check(cudaGetLastError(), "starting a kernel");
}

/// Segments and groups of up to `per_group` segments.
inline Cut start_cut(const Problem& p, int per_group, const Device& device) {
  const std::int64_t segments = segments_of(p), length = kSegment * per_group;
  const std::int64_t groups = p.cu_seqlens != nullptr ? least(segments, p.tokens / length + p.sequences)
                                                      : p.batch * ((p.tokens + length - 1) / length);
  const Cut cut{.plan = {.segments = allocate<Segment>(device, segments),
                         .begin = allocate<std::int64_t>(device, p.sequences + 1),
                         .most = segments},
                .groups = allocate<Group>(device, groups),
                .group_begin = allocate<std::int64_t>(device, p.sequences + 1),
                .room = groups,
                .per_group = per_group};
  launch(make_cut, 1, 0, device.stream, p, cut);
  return cut;
}

}  // namespace gka::kernels::cuda::hopper
