// What the two walks along a sequence share. A block has kColumns columns of one head's state (or of its gradient), in
// the registers of its eight warps and, rounded, in shared memory, where the products read it; while it works on a
// chunk the next ones' tiles arrive.
#pragma once

#include "kernels/cuda/memory/tile.cuh"

namespace gka::kernels::cuda::memory {

inline constexpr int kWalkers = 256;  // threads of a block
inline constexpr int kColumns = 32;
inline constexpr int kRow = kColumns + kPad;
inline constexpr int kStages = 3;  // chunks whose tiles are in shared memory or on their way

/// A block's place: one head of one sequence, and the first of its columns.
struct Walk {
  std::int64_t sequence, head, begin, end, slot;  // its tokens, and where what is kept of its first chunk lies
  std::int64_t state;                             // where its state begins in an array of final states
  int first_column;

  __device__ explicit Walk(const ChunkedMemory& m) {
    const std::int64_t parts = (m.value_dim + kColumns - 1) / kColumns;
    first_column = static_cast<int>(block() % parts * kColumns);
    head = block() / parts % m.heads;
    sequence = block() / parts / m.heads;
    begin = first_token(m, sequence);
    end = first_token(m, sequence + 1);
    slot = first_slot(m, sequence);
    state = (sequence * m.heads + head) * m.key_dim * m.value_dim;
  }

  __device__ int chunks() const { return static_cast<int>((end - begin + kChunk - 1) / kChunk); }
  __device__ Chunk chunk(int n) const { return chunk_of(sequence, begin, end, slot, n); }
};

inline std::int64_t walks(const ChunkedMemory& m) {
  return m.sequences * m.heads * ((m.value_dim + kColumns - 1) / kColumns);
}

/// A chunk's tiles and the walk's columns of u or of do.
template <int kKeys, bool kDelta, Decay kDecay>
struct Stage : ChunkTiles<kKeys, kDelta, kDecay> {
  alignas(16) Bits rows[kChunk][kRow];
};

/// Fetches a walk's chunks one after the other; kWay is 1, or −1 from the last one on.
template <int kKeys, bool kDelta, Decay kDecay, int kWay>
class Fetcher {
 public:
  static_assert(kWalkers == kChunk * kColumns / 8);  // a thread has eight neighbours of a row

  __device__ Fetcher(const ChunkedMemory& m, const ChunkedMemorySaved& saved, const MemoryRows& rows, const Walk& walk,
                     std::uint64_t* barriers)
      : left_(walk.chunks()),
        last_(static_cast<int>(walk.end - walk.begin) - (left_ - 1) * kChunk),
        barriers_(barriers) {
    const std::int64_t first = kWay > 0 || left_ == 0 ? 0 : left_ - 1;
    tiles_ = tiles_at<kKeys, kDelta, kDecay>(m, saved, walk.slot + first, walk.head);
    tiles_step_ = kWay * m.heads;
    there_ = walk.first_column + column() < m.value_dim;
    rows_ = static_cast<const Bits*>(rows.data) + (walk.begin + first * kChunk + row()) * rows.token_stride +
            walk.head * rows.head_stride + (there_ ? walk.first_column + column() : 0);
    rows_step_ = kWay * kChunk * rows.token_stride;
    anything_ = static_cast<const Bits*>(rows.data);
    chunks_ = left_;
  }

  /// Into stage n % kStages; a group of copies, empty behind the last chunk.
  __device__ __forceinline__ void next(Stage<kKeys, kDelta, kDecay>* stages) {
    if (left_ > 0) {
      auto& stage = stages[to_];
      const bool is_last = kWay > 0 ? left_ == 1 : left_ == chunks_;
      const bool there = there_ && (!is_last || row() < last_);
      copy_bytes<kWalkers>(&stage, tiles_, sizeof(ChunkTiles<kKeys, kDelta, kDecay>), barriers_ + to_);
      copy_async_or_zero<16>(&stage.rows[row()][column()], there ? rows_ : anything_, there);
      tiles_ += tiles_step_;
      rows_ += rows_step_;
      to_ = to_ + 1 == kStages ? 0 : to_ + 1;
      --left_;
    }
    end_group();
  }

  /// The next stage whose copies have arrived, once the block has synced.
  __device__ __forceinline__ int wait() {
    const int stage = from_;
    wait_for_groups_but<kStages - 2>();
    wait_for_bytes(barriers_ + stage, phase_);
    from_ = stage + 1 == kStages ? 0 : stage + 1;
    phase_ ^= from_ == 0 ? 1 : 0;
    return stage;
  }

 private:
  __device__ static int row() { return thread() / (kColumns / 8); }
  __device__ static int column() { return thread() % (kColumns / 8) * 8; }

  int left_, last_, chunks_;  // chunks still to be fetched; tokens of the sequence's last one; all chunks
  std::uint64_t* barriers_;
  int to_ = 0, from_ = 0, phase_ = 0;
  const ChunkTiles<kKeys, kDelta, kDecay>* tiles_;
  const Bits *rows_, *anything_;
  std::int64_t tiles_step_, rows_step_;
  bool there_;
};

/// A warp's part of the state: 16 keys; of 64 keys half of the columns.
template <int kKeys>
struct Part {
  static constexpr int kAcross = kKeys == 128 ? kColumns / 8 : kColumns / 16;
  __device__ static int row() { return warp() % (kKeys / 16) * 16; }
  __device__ static int column() { return warp() / (kKeys / 16) * (8 * kAcross); }
};

/// A state, or its gradient, from one end of the chunk to the other.
template <int kKeys, bool kDelta, Decay kDecay>
__device__ __forceinline__ void fade_state(Sums<Part<kKeys>::kAcross>& state,
                                           const Stage<kKeys, kDelta, kDecay>& stage) {
  if constexpr (kDecay == Decay::per_head) {
    const float fade = decay_from_start(stage.sums[kChunk - 1]);
    state.scale(fade, fade);
  } else {
    const int row = Part<kKeys>::row();
    state.scale(stage.fade[row + state.row(0)], stage.fade[row + state.row(1)]);
  }
}

/// A warp's part of a [kChunk, kColumns] tile.
__device__ __forceinline__ int part_row() { return warp() % 4 * 16; }
__device__ __forceinline__ int part_column() { return warp() / 4 * 16; }

/// A tile of values into a [tokens, heads, V] array.
__device__ __forceinline__ void keep_rows(const Bits (&rows)[kChunk][kRow], const ChunkedMemory& m, const Chunk& chunk,
                                          const Walk& walk, void* to) {
  constexpr int kVectors = kColumns / 8;
  static_assert(kWalkers == kChunk * kVectors);
  const int t = thread() / kVectors, c = thread() % kVectors * 8;
  if (t >= chunk.tokens || walk.first_column + c >= m.value_dim) return;
  copy_vector(static_cast<Bits*>(to) + ((chunk.first + t) * m.heads + walk.head) * m.value_dim + walk.first_column + c,
              &rows[t][c]);
}

/// A rounded state into a [slots, heads, K, V] array.
template <int kKeys>
__device__ __forceinline__ void keep_state(const Bits (&state)[kKeys][kRow], const ChunkedMemory& m, const Chunk& chunk,
                                           const Walk& walk, void* states) {
  constexpr int kVectors = kColumns / 8;
  Bits* to = static_cast<Bits*>(states) + (chunk.slot * m.heads + walk.head) * m.key_dim * m.value_dim;
  const int c = thread() % kVectors * 8;
#pragma unroll
  for (int i = 0; i < kKeys; i += kWalkers / kVectors) {
    const int r = thread() / kVectors + i;
    if (r < m.key_dim && walk.first_column + c < m.value_dim) {
      copy_vector(to + r * m.value_dim + walk.first_column + c, &state[r][c]);
    }
  }
}

}  // namespace gka::kernels::cuda::memory
