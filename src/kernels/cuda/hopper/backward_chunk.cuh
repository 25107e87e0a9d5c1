// One chunk of 64 tokens as the backward passes see it: decays between its tokens, and its arrays in memory.
#pragma once

#include "kernels/cuda/hopper/backward_tiles.cuh"
#include "kernels/cuda/segments.cuh"

namespace gka::kernels::cuda::hopper::passes {

inline constexpr int kChunk = 64;

template <typename Body>
__device__ __forceinline__ void each_of(int n, Body&& body) {
  for (int i = tile_thread(); i < n; i += kTileThreads) body(i);
  sync();
}

/// Numbers of the chunk's tokens, token c at data + c · stride.
template <typename T>
struct Field {
  T* data;
  int stride;

  __device__ __forceinline__ T* at(int c, int i) const { return data + static_cast<std::int64_t>(c) * stride + i; }
};

/// Where a chunk is: tokens begin … begin + len − 1 of row `batch`.
struct Place {
  std::int64_t batch, begin, head;
  int len;

  __device__ std::int64_t at(const View& view, int c) const {
    return batch * view.batch_stride + (begin + c) * view.token_stride + head * view.head_stride;
  }
  /// Of an array [batch, tokens, heads, n], contiguous.
  template <typename T>
  __device__ Field<T> field(const Problem& p, T* data, int n) const {
    return {data + ((batch * p.tokens + begin) * p.heads + head) * n, static_cast<int>(p.heads) * n};
  }
  /// Of a view of 16-bit numbers.
  __device__ Field<const std::uint16_t> field(const View& view) const {
    return {static_cast<const std::uint16_t*>(view.data) + at(view, 0), static_cast<int>(view.token_stride)};
  }
};

/// Half a segment.
__device__ inline Place place_of(const Segment& segment, int half, std::int64_t head) {
  const std::int64_t left = segment.length - half * kChunk;
  return {.batch = segment.batch,
          .begin = segment.begin + half * kChunk,
          .head = head,
          .len = static_cast<int>(least<std::int64_t>(most<std::int64_t>(left, 0), kChunk))};
}

/// Per-token numbers. Tokens behind the last one neither decay nor write, so nothing below asks how many there are.
///
/// M_jc = 2^(reach_c − reach_j). A γ of 0, like every one that float32 would take to 0, counts as 2^-300: products
/// across it are then exactly 0, and reach stays small enough for float32.
struct Gates {
  double sums[kChunk];
  float reach[kChunk];  // log₂ Π_{i≤c} γ_i
  float beta[kChunk], alpha[kChunk];
  float sigma[kChunk];  // 1/‖H_c‖, 0 where there is nothing to solve
  float zeta[kChunk];   // what is left of the state before the chunk
  float end[kChunk];    // what is left at the chunk's end of what token c wrote
  float parts[kTileWarps * kChunk];

  __device__ void load(const Problem& p, const double* norm, const Place& place) {
    const Field<const double> norms = place.field(p, norm, 1);
    each_of(kChunk, [&](int c) {
      const bool there = c < place.len;
      const auto gate = [&](const View& view, float otherwise) {
        return view.data != nullptr ? read<float>(view, place.at(view, c)) : otherwise;
      };
      const float g = there ? gate(p.log_decay, 0) : 0;
      sums[c] = g < -100 ? -300.0 : g * 1.4426950408889634;
      beta[c] = there ? gate(p.beta, 1) : 0;
      alpha[c] = there ? gate(p.alpha, 1) : 0;
      const double f = there ? *norms.at(c, 0) : 0;
      sigma[c] = f == 0 ? 0 : static_cast<float>(1 / f);
    });
    add_up(sums);
    each_of(kChunk, [&](int c) {
      reach[c] = static_cast<float>(sums[c]);
      zeta[c] = power_of_two(reach[c]);
      end[c] = power_of_two(static_cast<float>(sums[kChunk - 1] - sums[c]));
    });
  }
};

/// Asks for rows of `columns` numbers that will be read later.
template <typename T>
__device__ __forceinline__ void announce_rows(const Field<T>& field, int len, int columns) {
  const int across = (columns * static_cast<int>(sizeof(T)) + 127) / 128;
  for (int i = tile_thread(); i < len * across; i += kTileThreads) {
    announce_line(field.at(i / across, i % across * 128 / static_cast<int>(sizeof(T))));
  }
}

/// Four 16-bit numbers; kAligned: at a multiple of 8 bytes.
template <bool kAligned>
__device__ __forceinline__ Packed read_packed(const std::uint16_t* p) {
  if constexpr (kAligned) return read_words(p);
  const auto word = [&](int i) { return p[i] | static_cast<std::uint32_t>(p[i + 1]) << 16; };
  return {word(0), word(2)};
}

template <DType kType>
__device__ __forceinline__ Pair unpack(std::uint32_t word) {
  if constexpr (kType == DType::float16) {
    return {half_to_float(static_cast<std::uint16_t>(word)), half_to_float(static_cast<std::uint16_t>(word >> 16))};
  } else {
    return unpack_pair(word);
  }
}
template <DType kType>
__device__ __forceinline__ Quad unpack(const Packed& packed) {
  const Pair a = unpack<kType>(packed.words[0]), b = unpack<kType>(packed.words[1]);
  return {a.x, a.y, b.x, b.y};
}

/// Times a factor; 0 clears, also what is not finite.
__device__ __forceinline__ float faded(float x, float by) { return by == 0 ? 0 : x * by; }
__device__ __forceinline__ Quad faded(Quad q, float by) {
  return {faded(q.x[0], by), faded(q.x[1], by), faded(q.x[2], by), faded(q.x[3], by)};
}

/// Every four columns of an array of tokens: value(row, column, load(row, column)) for tokens and columns that are
/// there, else 0. Several loads are under way at a time.
template <int kDim, typename Load, typename Value>
__device__ __forceinline__ void fill_rows(const Rows& to, int len, int columns, Load&& load, Value&& value) {
  constexpr int kAtOnce = 4, kAcross = kDim / 4;
  for (int first = tile_thread(); first < kChunk * kAcross; first += kAtOnce * kTileThreads) {
    decltype(load(0, 0)) values[kAtOnce];
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      const int i = first + a * kTileThreads, row = i / kAcross, column = i % kAcross * 4;
      if (row < len && column < columns) values[a] = load(row, column);
    }
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      const int i = first + a * kTileThreads, row = i / kAcross, column = i % kAcross * 4;
      if (row >= kChunk) continue;
      store_quad(to, row, column, row < len && column < columns ? value(row, column, values[a]) : Quad{});
    }
  }
}

/// Whether a view is of bfloat16 that lie at multiples of four of them.
inline bool lies_whole(const View& view) {
  const auto whole = [](std::int64_t stride) { return stride % 4 == 0; };
  return view.data == nullptr ||
         (view.dtype == DType::bfloat16 && reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 &&
          whole(view.batch_stride) && whole(view.token_stride) && whole(view.head_stride));
}

/// A view's tokens as they are, there after `wait_for_copies`: eight at a time where they are bfloat16 and lie that
/// way.
template <int kDim, DType kType, bool kAligned>
__device__ __forceinline__ void load_rows(const Rows& to, const View& view, const Place& place, int columns) {
  const Field<const std::uint16_t> from = place.field(view);
  const bool whole = columns % 8 == 0 && from.stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(from.data) % 16 == 0;
  if (kType != DType::bfloat16 || !whole) {
    return fill_rows<kDim>(
        to, place.len, columns, [&](int c, int i) { return read_packed<kAligned>(from.at(c, i)); },
        [](int, int, const Packed& packed) { return unpack<kType>(packed); });
  }
  constexpr int kAcross = kDim / 8;
  for (int i = tile_thread(); i < kChunk * kAcross; i += kTileThreads) {
    const int row = i / kAcross, column = i % kAcross * 8;
    const bool there = row < place.len && column < columns;
    copy_sixteen(to.hi + row * to.ld + column, there ? from.at(row, column) : from.data, !there);
  }
}

/// Where gradients of the chunk's tokens go, in pairs. kWhole: bfloat16, and aligned.
template <bool kWhole>
struct Out {
  char* data;
  int stride;
  DType dtype;

  __device__ Out(const View& view, const Place& place)
      : data(static_cast<char*>(view.data)), stride(static_cast<int>(view.token_stride)), dtype(view.dtype) {
    if (data != nullptr) data += place.at(view, 0) * (dtype == DType::float32 ? 4 : 2);
  }
  __device__ __forceinline__ void put(int c, int i, float x, float y) const {
    const std::int64_t at = static_cast<std::int64_t>(c) * stride + i;
    if constexpr (kWhole) {
      *reinterpret_cast<std::uint32_t*>(data + at * 2) = pack_pair(x, y);
    } else if (dtype == DType::float32) {
      auto* to = reinterpret_cast<float*>(data) + at;
      to[0] = x;
      to[1] = y;
    } else {
      auto* to = reinterpret_cast<std::uint16_t*>(data) + at;
      const bool half = dtype == DType::float16;
      const std::uint32_t packed = pack_pair(x, y);
      to[0] = half ? float_to_half(x) : static_cast<std::uint16_t>(packed);
      to[1] = half ? float_to_half(y) : static_cast<std::uint16_t>(packed >> 16);
    }
  }
};

/// Hands out arrays of tokens from a kernel's shared memory.
template <int kDim>
struct Shelf {
  std::uint16_t* next;

  static constexpr int plane() { return kChunk * (kDim + 8); }
  static constexpr int score_plane() { return kChunk * (kChunk + 8); }

  __device__ Rows rows(bool exact) { return take(plane(), kDim + 8, exact); }
  __device__ Rows scores() { return take(score_plane(), kChunk + 8, false); }

 private:
  __device__ Rows take(int size, int ld, bool exact) {
    const Rows rows{.hi = next, .lo = exact ? nullptr : next + size, .ld = ld};
    next += exact ? size : 2 * size;
    return rows;
  }
};

}  // namespace gka::kernels::cuda::hopper::passes
