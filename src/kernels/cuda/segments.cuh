// How a problem is cut: sequences into segments of kSegment tokens, the same for every card. A pass finds what each
// (segment, head) adds to a state by itself, `carry` runs along the sequences element by element, and all the costly
// work is then done per (segment, head), in any order. A grid of a few blocks per multiprocessor takes the tasks in
// turn; no block waits for another, and no sum depends on who ran first.
#pragma once

#include "kernels/cuda/chunk.cuh"
#include "kernels/cuda/saved.h"

namespace gka::kernels::cuda {

struct Segment {
  std::int64_t sequence;
  std::int64_t batch, begin, length;  // its tokens
  int last;                           // of its sequence
};

/// The segments of a problem, sequence by sequence, on the device: cu_seqlens is only known there.
struct Plan {
  Segment* segments;
  std::int64_t* begin;  // [sequences + 1]: the first segment of each sequence
  std::int64_t most;    // room for this many

  __device__ std::int64_t count(const Problem& p) const { return begin[p.sequences]; }
};

/// Where a sequence begins in its row, and how many tokens it has. Nobody has looked at cu_seqlens: whatever is in it,
/// no token outside the arrays is touched.
__device__ inline std::int64_t first_token(const Problem& p, std::int64_t n) {
  return p.cu_seqlens != nullptr ? min(max(p.cu_seqlens[n], std::int64_t{0}), p.tokens) : std::int64_t{0};
}
__device__ inline std::int64_t tokens_of_sequence(const Problem& p, std::int64_t n) {
  return p.cu_seqlens != nullptr ? max(first_token(p, n + 1) - first_token(p, n), std::int64_t{0}) : p.tokens;
}

/// One block: thread t counts, then writes, the segments of its share of the sequences.
static __global__ void make_plan(const __grid_constant__ Problem p, Plan plan) {
  double* counts = scratch();
  const std::int64_t share = (p.sequences + kThreads - 1) / kThreads;
  const std::int64_t from = thread() * share, to = min(from + share, p.sequences);
  const auto start = [&](std::int64_t n) { return first_token(p, n); };
  const auto length = [&](std::int64_t n) { return tokens_of_sequence(p, n); };
  std::int64_t own = 0;
  for (std::int64_t n = from; n < to; ++n) own += (length(n) + kSegment - 1) / kSegment;
  counts[thread()] = static_cast<double>(own);
  sync();
  std::int64_t at = 0;
  for (int t = 0; t < thread(); ++t) at += static_cast<std::int64_t>(counts[t]);
  for (std::int64_t n = from; n < to; ++n) {
    plan.begin[n] = at;
    const std::int64_t whole = length(n), row = p.cu_seqlens != nullptr ? 0 : n;
    for (std::int64_t t = 0; t < whole && at < plan.most; t += kSegment, ++at) {
      plan.segments[at] = {.sequence = n,
                           .batch = row,
                           .begin = start(n) + t,
                           .length = min(kSegment, whole - t),
                           .last = t + kSegment >= whole};
    }
  }
  if (to == p.sequences && (from < to || thread() == 0)) plan.begin[p.sequences] = at;
}

/// Contiguous [segments, heads, D, D] and [segments, heads, D, V], and how much of a state is left after each segment.
template <typename T>
struct SegmentStates {
  T* h;
  T* u;
  double* key_zeta;  // [segments, heads]
  double* value_zeta;
  std::int64_t heads, dim, values;

  __device__ T* h_at(std::int64_t segment, std::int64_t head) const { return h + (segment * heads + head) * dim * dim; }
  __device__ T* u_at(std::int64_t segment, std::int64_t head) const {
    return u + (segment * heads + head) * dim * values;
  }
};

/// What `carry` runs over: for H or U, forwards or backwards.
template <typename T>
struct Carry {
  T* parts;            // [segments, heads, rows, columns]: each segment's own addition; becomes what arrives there
  const double* zeta;  // [segments, heads]
  const T* start;      // [sequences, heads, rows, columns]; null: 0
  T* end;              // the same; null: not wanted
  std::int64_t rows, columns;
  bool symmetric;  // `start` counts as its symmetric part
  bool backwards;
};

/// arriving_s = ζ_{s-1} arriving_{s-1} + part_{s-1}, one element per thread.
template <typename T>
__global__ void carry(const __grid_constant__ Problem p, Plan plan, Carry<T> c) {
  const std::int64_t size = c.rows * c.columns, tiles = (size + kThreads - 1) / kThreads;
  for (std::int64_t task = block(); task < p.sequences * p.heads * tiles; task += blocks()) {
    const std::int64_t e = task % tiles * kThreads + thread();
    if (e >= size) continue;
    const std::int64_t head = task / tiles % p.heads, n = task / tiles / p.heads;
    const std::int64_t slot = (n * p.heads + head) * size;
    T state = 0;
    if (c.start != nullptr) {
      state = c.start[slot + e];
      if (c.symmetric) {
        const T mirrored = c.start[slot + e % c.columns * c.columns + e / c.columns];
        if (e / c.columns != e % c.columns) state = (state + mirrored) / 2;
      }
    }
    const std::int64_t first = plan.begin[n], count = plan.begin[n + 1] - first;
    const auto index = [&](std::int64_t i) {
      return (c.backwards ? first + count - 1 - i : first + i) * p.heads + head;
    };
    T part = count > 0 ? c.parts[index(0) * size + e] : T{0};
    for (std::int64_t i = 0; i < count; ++i) {
      const T next = i + 1 < count ? c.parts[index(i + 1) * size + e] : T{0};  // on its way while this one is used
      c.parts[index(i) * size + e] = state;
      state = fade(state, c.zeta[index(i)]) + part;
      part = next;
    }
    if (c.end != nullptr) c.end[slot + e] = state;
  }
}

// ---- On the host ------------------------------------------------------------------------------------------------

inline Sizes sizes_of(const Problem& p) {
  const bool remembers = p.options.part != Part::solve;
  // States at the start of every chunk of a segment are kept in the backward pass: chunks are not cut too small.
  const std::int64_t chunk = p.options.chunk > 0 ? p.options.chunk : kMaxChunk;
  return {.dim = static_cast<int>(p.key_dim),
          .values = remembers ? static_cast<int>(p.value_dim) : 0,
          .chunk = static_cast<int>(min<std::int64_t>(max<std::int64_t>(chunk, 16), kMaxChunk)),
          .solves = p.options.part != Part::memory,
          .remembers = remembers};
}

template <typename T>
T* allocate(const Device& device, std::int64_t n) {
  return n > 0 ? static_cast<T*>(device.allocate(static_cast<std::size_t>(n) * sizeof(T))) : nullptr;
}

inline Plan start_plan(const Problem& p, const Device& device) {
  const std::int64_t room = segments_of(p);
  const Plan plan{.segments = allocate<Segment>(device, room),
                  .begin = allocate<std::int64_t>(device, p.sequences + 1),
                  .most = room};
  launch(make_plan, 1, kScratchBytes, device.stream, p, plan);
  return plan;
}

template <typename T>
void start_carry(const Problem& p, const Plan& plan, const Device& device, const Carry<T>& c) {
  const std::int64_t tiles = (c.rows * c.columns + kThreads - 1) / kThreads;
  launch(carry<T>, min<std::int64_t>(p.sequences * p.heads * tiles, 1 << 20), 0, device.stream, p, plan, c);
}

/// A grid of blocks that share tasks, each with a Workspace at the head of its shared memory and an arena behind it.
struct Grid {
  std::int64_t blocks = 0;
  int shared_bytes = 0;
  std::int64_t slow_bytes = 0;  // of global memory per block
  char* slow = nullptr;
};

/// Scratch that the blocks of one kernel may take together, beyond what one block needs.
inline constexpr std::int64_t kMostScratch = std::int64_t{2} << 30;

template <typename T>
inline constexpr int kWorkspaceBytes = (static_cast<int>(sizeof(T)) + 15) / 16 * 16;

/// `layout(workspace, arena)` makes the requests that the kernel makes.
template <typename Workspace, typename Kernel, typename Layout>
Grid plan_grid(Kernel kernel, std::int64_t tasks, const Device& device, Layout&& layout) {
  constexpr int kHead = kScratchBytes + kWorkspaceBytes<Workspace>;
  Workspace workspace;
  Arena arena{.fast_limit = shared_memory_per_block(device.index) - kHead};
  layout(workspace, arena);
  Grid grid{.shared_bytes = kHead + static_cast<int>(arena.fast_used), .slow_bytes = arena.slow_used};
  const std::int64_t resident = max(resident_blocks(kernel, grid.shared_bytes), 1);
  const std::int64_t affordable = max<std::int64_t>(kMostScratch / max<std::int64_t>(grid.slow_bytes, 1), 1);
  grid.blocks = min(min(tasks, resident * multiprocessors(device.index)), affordable);
  grid.slow = allocate<char>(device, grid.blocks * grid.slow_bytes);
  return grid;
}

/// The block's workspace, laid out.
template <typename Workspace, typename Layout>
__device__ Workspace& own_workspace(const Grid& grid, Layout&& layout) {
  constexpr int kHead = kScratchBytes + kWorkspaceBytes<Workspace>;
  auto& workspace = *reinterpret_cast<Workspace*>(shared_memory() + kScratchBytes);
  alone([&] {
    Arena arena{.fast = shared_memory() + kHead,
                .fast_limit = grid.shared_bytes - kHead,
                .slow = grid.slow + block() * grid.slow_bytes};
    layout(workspace, arena);
  });
  return workspace;
}

}  // namespace gka::kernels::cuda
