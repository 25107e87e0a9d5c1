// A warp's 16 × 8·kAcross piece of a product, and how a chunk's tiles come into shared memory.
#pragma once

#include "kernels/cuda/memory/memory.h"
#include "kernels/cuda/memory/mma.cuh"
#include "kernels/cuda/memory/passes.h"

namespace gka::kernels::cuda::memory {

inline constexpr int kChunk = ChunkedMemory::kChunk;
inline constexpr int kSquare = kChunk + kPad;  // rows of a tile of kChunk columns

/// What a walk has of a chunk's decays: G; with decays per channel e^{G_C}, and the rest is in the tiles, in which q is
/// scale · e^G ∘ q and k is e^{G_C − G} ∘ k.
template <int kKeys, Decay kDecay>
struct TileDecays {
  TwoFloats sums[kChunk];
};
template <int kKeys>
struct TileDecays<kKeys, Decay::per_channel> {
  float fade[kKeys];
};

/// What chunk_wy leaves of a chunk for the walks, in memory as in shared memory, so that one copy brings it.
template <int kKeys, bool kDelta, Decay kDecay>
struct alignas(16) ChunkTiles : TileDecays<kKeys, kDecay> {
  alignas(16) Bits q[kChunk][kKeys + kPad];
  Bits k[kChunk][kKeys + kPad], w[kDelta ? kChunk : 1][kKeys + kPad];
  Bits p[kChunk][kSquare];
};

template <int kKeys, bool kDelta, Decay kDecay>
constexpr bool is_as_told =
    sizeof(ChunkTiles<kKeys, kDelta, kDecay>) ==
    ChunkedMemory{.key_dim = kKeys, .delta = kDelta, .per_channel = kDecay == Decay::per_channel}.tile_bytes();
static_assert(is_as_told<128, true, Decay::per_head> && is_as_told<64, false, Decay::per_head>);
static_assert(is_as_told<128, true, Decay::per_channel> && is_as_told<64, false, Decay::per_channel>);

template <int kKeys, bool kDelta, Decay kDecay>
__device__ __forceinline__ auto* tiles_at(const ChunkedMemory& m, const ChunkedMemorySaved& saved, std::int64_t slot,
                                          std::int64_t head) {
  return static_cast<ChunkTiles<kKeys, kDelta, kDecay>*>(saved.tiles) + slot * m.heads + head;
}

/// How an operand lies in shared memory, seen from the product A·B: as it is written, or the other way round.
enum class Lies : std::uint8_t { straight, turned };

/// Two neighbours, the first at an even place: rounded and written, and read.
__device__ __forceinline__ void put_two(Bits* to, float first, float second) {
  *reinterpret_cast<std::uint32_t*>(to) = two_bfloat16(first, second);
}
__device__ __forceinline__ std::uint32_t two_at(const Bits* from) {
  return *reinterpret_cast<const std::uint32_t*>(from);
}

template <int kAcross>
struct Sums {
  static_assert(kAcross % 2 == 0);
  float x[kAcross][4];

  /// This thread's numbers: x[n][2·i + j] is the one in row(i) and column(n) + j.
  __device__ __forceinline__ static int row(int i) { return lane() / 4 + 8 * i; }
  __device__ __forceinline__ static int column(int n) { return 8 * n + lane() % 4 * 2; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kAcross; ++n) x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0;
  }

  /// Both rows of this thread, each by a factor of its own.
  __device__ __forceinline__ void scale(float first, float second) {
#pragma unroll
    for (int n = 0; n < kAcross; ++n) {
      x[n][0] *= first;
      x[n][1] *= first;
      x[n][2] *= second;
      x[n][3] *= second;
    }
  }

  /// += A · B over kDepth. A straight: a[m·lda + k], turned: a[k·lda + m]; B straight: b[k·ldb + n], turned: b[n·ldb +
  /// k].
  template <int kDepth, Lies kA, Lies kB>
  __device__ __forceinline__ void multiply(const Bits* a, int lda, const Bits* b, int ldb) {
    const int eight = lane() % 8, second = lane() / 8 % 2 * 8, third = lane() / 16 * 8;
    // Blocks in the order in which mma takes them: A by rows, then by depth; B by depth, then by columns.
    a += kA == Lies::straight ? (eight + second) * lda + third : (eight + third) * lda + second;
    b += kB == Lies::straight ? (eight + second) * ldb + third : (eight + third) * ldb + second;
    const int a_step = kA == Lies::straight ? 16 : 16 * lda;
    const int b_step = kB == Lies::straight ? 16 * ldb : 16, b_across = kB == Lies::straight ? 16 : 16 * ldb;
    // As many steps' operands as there are registers for are under way before the first of them is used.
    constexpr int kSteps = kDepth / 16, kAhead = kAcross == 2 ? kSteps : kAcross == 4 ? (kSteps < 4 ? kSteps : 4) : 2;
    static_assert(kSteps % kAhead == 0);
#pragma unroll
    for (int k = 0; k < kSteps; k += kAhead) {
      std::uint32_t left[kAhead][4], right[kAhead][kAcross / 2][4];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        load_blocks<kA == Lies::turned>(left[i], a + (k + i) * a_step);
#pragma unroll
        for (int n = 0; n < kAcross / 2; ++n) {
          load_blocks<kB == Lies::straight>(right[i][n], b + (k + i) * b_step + n * b_across);
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int n = 0; n < kAcross; ++n) {
          multiply_add(x[n], left[i], right[i][n / 2][n % 2 * 2], right[i][n / 2][n % 2 * 2 + 1]);
        }
      }
    }
  }

  /// body(i, n, first, second): two neighbours in row(i), from column(n) on.
  template <typename Body>
  __device__ __forceinline__ void each(Body&& body) {
#pragma unroll
    for (int n = 0; n < kAcross; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) body(i, n, x[n][2 * i], x[n][2 * i + 1]);
    }
  }

  /// Rounded, into a tile.
  __device__ __forceinline__ void put(Bits* to, int ld) {
    each([&](int i, int n, float first, float second) { put_two(to + row(i) * ld + column(n), first, second); });
  }
};

/// first += A · B and second += A' · B over kDepth, all of them straight.
template <int kDepth>
__device__ __forceinline__ void multiply_two(Sums<2>& first, Sums<2>& second, const Bits* a, const Bits* other, int lda,
                                             const Bits* b, int ldb) {
  const int row = lane() % 8 + lane() / 8 % 2 * 8, column = lane() / 16 * 8;
  a += row * lda + column;
  other += row * lda + column;
  b += row * ldb + column;
  constexpr int kSteps = kDepth / 16;
  std::uint32_t left[kSteps][4], more[kSteps][4], right[kSteps][4];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    load_blocks<false>(left[k], a + 16 * k);
    load_blocks<false>(more[k], other + 16 * k);
    load_blocks<true>(right[k], b + 16 * k * ldb);
  }
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      multiply_add(first.x[n], left[k], right[k][2 * n], right[k][2 * n + 1]);
      multiply_add(second.x[n], more[k], right[k][2 * n], right[k][2 * n + 1]);
    }
  }
}

/// Eight neighbours.
struct alignas(16) Vector {
  std::uint32_t two[4];
};
__device__ __forceinline__ Vector vector_at(const Bits* from) { return *reinterpret_cast<const Vector*>(from); }
__device__ __forceinline__ void copy_vector(Bits* to, const Bits* from) {
  *reinterpret_cast<Vector*>(to) = vector_at(from);
}

struct alignas(16) Four {
  float x[4];
};
__device__ __forceinline__ Four four_at(const float* from) { return *reinterpret_cast<const Four*>(from); }

/// body(at, there, x) for this thread's numbers of a warp's part of a state [K, V], the part from row and column on.
template <int kAcross, typename Body>
__device__ __forceinline__ void each_state(Sums<kAcross>& state, int row, int column, const ChunkedMemory& m,
                                           Body&& body) {
  state.each([&](int i, int n, float& first, float& second) {
    const std::int64_t r = row + state.row(i), c = column + state.column(n);
    const bool there = r < m.key_dim && c < m.value_dim;
    body(r * m.value_dim + c, there, first);
    body(r * m.value_dim + c + 1, there, second);
  });
}

/// Where a chunk of a sequence lies among all tokens.
struct Chunk {
  std::int64_t sequence, first, slot;  // first: of all tokens; slot: where what is kept per chunk lies
  int tokens;                          // 0: there is no such chunk
};

__device__ __forceinline__ std::int64_t first_token(const ChunkedMemory& m, std::int64_t sequence) {
  return m.bounds != nullptr ? m.bounds[sequence] : sequence * m.length;
}
__device__ __forceinline__ std::int64_t first_slot(const ChunkedMemory& m, std::int64_t sequence) {
  return m.bounds != nullptr ? m.bounds[sequence] / kChunk + sequence : sequence * ((m.length + kChunk - 1) / kChunk);
}

/// Chunk `index` of a sequence of the tokens from `begin` to `end`, whose first chunk has that slot.
__device__ __forceinline__ Chunk chunk_of(std::int64_t sequence, std::int64_t begin, std::int64_t end,
                                          std::int64_t slot, std::int64_t index) {
  const std::int64_t first = begin + index * kChunk, left = end - first;
  return {.sequence = sequence,
          .first = first,
          .slot = slot + index,
          .tokens = left <= 0       ? 0
                    : left < kChunk ? static_cast<int>(left)
                                    : kChunk};
}

/// The chunk that has a slot.
__device__ __forceinline__ Chunk chunk_at(const ChunkedMemory& m, std::int64_t slot) {
  std::int64_t low = 0, high = m.sequences - 1;  // the last sequence whose first slot is not behind this one
  if (m.bounds == nullptr) {
    low = slot / ((m.length + kChunk - 1) / kChunk);
  } else {
    while (low < high) {
      const std::int64_t middle = (low + high + 1) / 2;
      if (first_slot(m, middle) <= slot) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
  }
  const std::int64_t first = first_slot(m, low);
  return chunk_of(low, first_token(m, low), first_token(m, low + 1), first, slot - first);
}

/// What a block of a pass over chunks has: a chunk of a head.
struct Task {
  std::int64_t slot, head, place;  // place: of all chunks of heads
  Chunk chunk;
};
__device__ __forceinline__ Task own_task(const ChunkedMemory& m) {
  const std::int64_t slot = block() / m.heads, head = block() % m.heads;
  return {.slot = slot, .head = head, .place = slot * m.heads + head, .chunk = chunk_at(m, slot)};
}
/// Where its T is kept.
__device__ __forceinline__ Bits* t_of(const ChunkedMemorySaved& saved, const Task& task) {
  return static_cast<Bits*>(saved.t) + task.place * kChunk * kChunk;
}

/// β of a chunk's tokens, 0 behind its last one.
__device__ __forceinline__ void load_beta(float (&to)[kChunk], const ChunkedMemory& m, const Chunk& chunk,
                                          std::int64_t head) {
  const int t = thread();
  if (t >= kChunk) return;
  const bool there = t < chunk.tokens;
  to[t] = !there ? 0 : m.beta != nullptr ? m.beta[(chunk.first + t) * m.heads + head] : 1;
}

/// Starts copies of kRows rows of kWidth numbers, `ld` apart, into a tile; rows from `rows` on and columns from
/// `columns` on are zero. Rows begin at multiples of 16 bytes, and `columns` is a multiple of 8.
template <int kBlock, int kRows, int kWidth>
__device__ __forceinline__ void fetch_matrix(Bits* to, const Bits* from, int ld, int rows, int columns) {
  constexpr int kVectors = kWidth / 8, kAtOnce = kBlock / kVectors;  // rows
  static_assert(kRows % kAtOnce == 0);
  const int first = thread() / kVectors, c = thread() % kVectors * 8;
#pragma unroll
  for (int i = 0; i < kRows; i += kAtOnce) {
    const int r = first + i;
    const bool there = r < rows && c < columns;
    copy_async_or_zero<16>(to + r * (kWidth + kPad) + c, from + (there ? r * ld + c : 0), there);
  }
}

/// The same of a chunk's rows, from column `from` of the array on.
template <int kBlock, int kWidth>
__device__ __forceinline__ void fetch(Bits* to, const MemoryRows& rows, const Chunk& chunk, std::int64_t head,
                                      int columns, int from = 0) {
  const auto* first = static_cast<const Bits*>(rows.data) + chunk.first * rows.token_stride + head * rows.head_stride;
  fetch_matrix<kBlock, kChunk, kWidth>(to, first + from, static_cast<int>(rows.token_stride), chunk.tokens,
                                       columns - from);
}

/// Starts copies of a task's queries and keys.
template <int kBlock, int kKeys, typename Shared>
__device__ __forceinline__ void fetch_queries_and_keys(Shared& s, const ChunkedMemory& m, const Task& task) {
  fetch<kBlock, kKeys>(s.q[0], m.q, task.chunk, task.head, static_cast<int>(m.key_dim));
  fetch<kBlock, kKeys>(s.k[0], m.k, task.chunk, task.head, static_cast<int>(m.key_dim));
}

/// The decay between two tokens from the sums of log decays up to each. It is a difference of long sums, which
/// TwoFloats keep exact even after a decay of e^(−10,000).
__device__ __forceinline__ float decay_between(const TwoFloats& later, const TwoFloats& earlier) {
  return quick_exp(later.high - earlier.high + (later.low - earlier.low));
}
__device__ __forceinline__ float decay_from_start(const TwoFloats& here) { return quick_exp(here.high + here.low); }

}  // namespace gka::kernels::cuda::memory
