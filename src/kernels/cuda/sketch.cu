// A block has a head, and P of it in shared memory; a warp 16 tokens. Rows of tokens go straight from memory into the
// operands of mma.sync: which of 32 channels stands where in a product is free as long as both sides agree, so a lane
// takes eight neighbours, 16 bytes, of a row, and P is read in the order that this makes. The same goes for the columns
// of a result. Only where tokens are summed over are neighbours in an operand of two rows, whose halves are paired.
#include "kernels/cuda/sketch.h"

#include <stdexcept>
#include <type_traits>

#include "kernels/cuda/memory/mma.cuh"
#include "kernels/cuda/memory/tile.cuh"

namespace gka::kernels::cuda {
namespace sketching {

using memory::Bits;
using memory::high_half;
using memory::low_half;
using memory::multiply_add;
using memory::Vector;
using memory::vector_at;

constexpr int kGroup = 32;  // channels that a product takes at a time
constexpr int kOwnWarps = 8, kBlock = kOwnWarps * kLanes, kRows = 16 * kOwnWarps;

/// From row to row of P in shared memory: an odd number of 64 bytes, so that two rows of four vectors lie in different
/// banks.
constexpr int pitch_of(std::int64_t width) { return static_cast<int>(width) + (width / kGroup % 2 == 0 ? kGroup : 0); }

/// A product's operand B: this lane's column of tile j, of four that make up kGroup columns, is `first` and this many.
/// Then x[j][2 i + c] of its sums is the one in row i and column 8 (lane % 4) + 2 j + c.
__device__ __forceinline__ int own_column(int j) { return lane() / 8 * 8 + 2 * j + lane() / 4 % 2; }

/// sums[j] += rows · Bᵀ over kGroup channels, where b is row own_column(0) of B at the channels.
__device__ __forceinline__ void multiply(float (&sums)[4][4], const Vector (&rows)[2], const Bits* b, int pitch) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const Vector right = vector_at(b + 2 * j * pitch);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t left[4]{rows[0].two[2 * half], rows[1].two[2 * half], rows[0].two[2 * half + 1],
                                  rows[1].two[2 * half + 1]};
      multiply_add(sums[j], left, right.two[2 * half], right.two[2 * half + 1]);
    }
  }
}

/// A head and the two tokens of it that a thread has rows of.
struct Own {
  std::int64_t head, token[2];
  bool there[2];

  __device__ __forceinline__ explicit Own(const Sketch& s) : head(block() % s.heads) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      token[i] = block() / s.heads * kRows + 16 * warp() + lane() / 4 + 8 * i;
      there[i] = token[i] < s.tokens;
    }
  }
  /// This thread's eight of kGroup channels from `channel` on, zeros behind the last token.
  __device__ __forceinline__ void fetch(Vector (&to)[2], const MemoryRows& rows, std::int64_t channel) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto* from = static_cast<const Bits*>(rows.data) + token[i] * rows.token_stride + head * rows.head_stride;
      to[i] = there[i] ? vector_at(from + channel + lane() % 4 * 8) : Vector{};
    }
  }
  /// Where they lie in a contiguous array of rows of `width`.
  __device__ __forceinline__ std::int64_t place(const Sketch& s, int i, std::int64_t width) const {
    return (token[i] * s.heads + head) * width + lane() % 4 * 8;
  }
  __device__ __forceinline__ float alpha(const Sketch& s, int i) const {
    return s.alpha != nullptr && there[i] ? s.alpha[token[i] * s.heads + head] : 1.0f;
  }
};

__device__ __forceinline__ const Bits* sketch_of(const Sketch& s, std::int64_t head) {
  return static_cast<const Bits*>(s.p) + head * s.low * s.wide;
}

template <int kLow>
__global__ void __launch_bounds__(kBlock, kLow == kGroup ? 4 : 3)
    leave_sketch(const __grid_constant__ Sketch s, const __grid_constant__ MemoryRows base,
                 const __grid_constant__ MemoryRows low, Bits* to) {
  constexpr int kPitch = pitch_of(kLow), kGroups = kLow / kGroup;
  Bits* turned = reinterpret_cast<Bits*>(shared_memory());  // Pᵀ
  const Own own(s);
  Vector next[2], left[kGroups][2];
  own.fetch(next, base, 0);
#pragma unroll
  for (int n = 0; n < kGroups; ++n) own.fetch(left[n], low, kGroup * n);

  const int width = static_cast<int>(s.wide);
  for (int i = 8 * thread(); i < kLow * width; i += 8 * kBlock) {
    const Vector row = vector_at(sketch_of(s, own.head) + i);
    Bits* column = turned + i % width * kPitch + i / width;
#pragma unroll
    for (int c = 0; c < 8; ++c) column[c * kPitch] = static_cast<Bits>(row.two[c / 2] >> 16 * (c % 2));
  }
  sync();

  float taken[2], kept[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    taken[i] = own.alpha(s, i);
    kept[i] = s.alpha != nullptr ? 1.0f - taken[i] : 1.0f;
  }
  for (int channel = 0; channel < width; channel += kGroup) {
    const Vector now[2]{next[0], next[1]};
    if (channel + kGroup < width) own.fetch(next, base, channel + kGroup);
    float sums[4][4] = {};
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      multiply(sums, left[n], turned + (channel + own_column(0)) * kPitch + kGroup * n + lane() % 4 * 8, kPitch);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!own.there[i]) continue;
      Vector out;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        out.two[j] = two_bfloat16(kept[i] * low_half(now[i].two[j]) + taken[i] * sums[j][2 * i],
                                  kept[i] * high_half(now[i].two[j]) + taken[i] * sums[j][2 * i + 1]);
      }
      *reinterpret_cast<Vector*>(to + own.place(s, i, s.wide) + channel) = out;
    }
  }
}

/// With e = P d: d_base = (1 − α) d, d_low = α e, and dα = (Pᵀ low − base)·d = low·e − base·d, for which nobody has to
/// make Pᵀ low again.
template <int kLow>
__global__ void __launch_bounds__(kBlock)
    differentiate_leaving(const __grid_constant__ Sketch s, const __grid_constant__ SketchGradients g) {
  constexpr int kGroups = kLow / kGroup;
  Bits* p = reinterpret_cast<Bits*>(shared_memory());
  const Own own(s);
  Vector next[2], next_base[2];
  own.fetch(next, g.d, 0);
  own.fetch(next_base, g.base, 0);

  const int width = static_cast<int>(s.wide), pitch = pitch_of(s.wide);
  for (int i = 8 * thread(); i < kLow * width; i += 8 * kBlock) {
    memory::copy_vector(p + i / width * pitch + i % width, sketch_of(s, own.head) + i);
  }
  sync();

  float alpha[2], slope[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) alpha[i] = own.alpha(s, i);
  float sums[kGroups][4][4] = {};
  for (int channel = 0; channel < width; channel += kGroup) {
    const Vector now[2]{next[0], next[1]}, base[2]{next_base[0], next_base[1]};
    if (channel + kGroup < width) {
      own.fetch(next, g.d, channel + kGroup);
      own.fetch(next_base, g.base, channel + kGroup);
    }
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      multiply(sums[n], now, p + (kGroup * n + own_column(0)) * pitch + channel + lane() % 4 * 8, pitch);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Vector out;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float first = low_half(now[i].two[j]), second = high_half(now[i].two[j]);
        slope[i] -= low_half(base[i].two[j]) * first + high_half(base[i].two[j]) * second;
        out.two[j] = two_bfloat16((1.0f - alpha[i]) * first, (1.0f - alpha[i]) * second);
      }
      if (own.there[i])
        *reinterpret_cast<Vector*>(static_cast<Bits*>(g.d_base) + own.place(s, i, s.wide) + channel) = out;
    }
  }
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    Vector low[2];
    own.fetch(low, g.low, kGroup * n);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Vector out;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float first = sums[n][j][2 * i], second = sums[n][j][2 * i + 1];
        slope[i] += low_half(low[i].two[j]) * first + high_half(low[i].two[j]) * second;
        out.two[j] = two_bfloat16(alpha[i] * first, alpha[i] * second);
      }
      if (own.there[i])
        *reinterpret_cast<Vector*>(static_cast<Bits*>(g.d_low) + own.place(s, i, kLow) + kGroup * n) = out;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    slope[i] += from_lane(slope[i], 1);
    slope[i] += from_lane(slope[i], 2);
    if (own.there[i] && lane() % 4 == 0) g.d_alpha[own.token[i] * s.heads + own.head] = slope[i];
  }
}

// ---- Sums over tokens

constexpr int kAddingWarps = 4, kAddingBlock = kAddingWarps * kLanes;
constexpr int kPiece = 64;  // channels of a block, which has kGroup rows of the result

/// Four neighbours.
struct alignas(8) Few {
  std::uint32_t two[2];
};

/// First or second halves of two words.
template <int kHalf>
__device__ __forceinline__ std::uint32_t halves(std::uint32_t first, std::uint32_t second) {
  return pick_bytes<kHalf == 0 ? 0x5410 : 0x7632>(first, second);
}

struct Piece {
  float of[kGroup][kPiece];
};

/// Both by their factor, rounded.
__device__ __forceinline__ std::uint32_t scaled(std::uint32_t two, float factor) {
  return two_bfloat16(factor * low_half(two), factor * high_half(two));
}

/// Of 16 tokens at a time a lane has those that operands want of it, 2 (lane % 4), the next, and both 8 later: of each
/// four numbers of `low` and eight of x, the ones at lane / 4.
__global__ void __launch_bounds__(kAddingBlock)
    add_products(const __grid_constant__ Sketch s, const __grid_constant__ MemoryRows low,
                 const __grid_constant__ MemoryRows x, float* parts) {
  const std::int64_t pieces = s.wide / kPiece, groups = s.low / kGroup;
  std::int64_t at = block();
  const std::int64_t piece = at % pieces;
  const std::int64_t group = (at /= pieces) % groups;
  const std::int64_t head = (at /= groups) % s.heads, stretch = at / s.heads;
  const std::int64_t first = stretch * Sketch::kStretch;
  const std::int64_t end = first + Sketch::kStretch < s.tokens ? first + Sketch::kStretch : s.tokens;
  const int own = lane() / 4, quad = lane() % 4;

  float sums[2][8][4] = {};  // rows 4 own + 2 i + h of tile i, its h the halves of an operand; columns by own
#pragma unroll 2
  for (std::int64_t token = first + 16 * warp(); token < end; token += 16 * kAddingWarps) {
    Few left[4];
    Vector right[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const std::int64_t t = token + 2 * quad + r % 2 + r / 2 * 8;
      const auto* few = static_cast<const Bits*>(low.data) + t * low.token_stride + head * low.head_stride;
      const auto* row = static_cast<const Bits*>(x.data) + t * x.token_stride + head * x.head_stride;
      left[r] = t < end ? *reinterpret_cast<const Few*>(few + group * kGroup + 4 * own) : Few{};
      right[r] = t < end ? vector_at(row + piece * kPiece + 8 * own) : Vector{};
      if (s.alpha != nullptr) {
        const float alpha = t < end ? s.alpha[t * s.heads + head] : 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) left[r].two[i] = scaled(left[r].two[i], alpha);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t a[4]{halves<0>(left[0].two[i], left[1].two[i]), halves<1>(left[0].two[i], left[1].two[i]),
                               halves<0>(left[2].two[i], left[3].two[i]), halves<1>(left[2].two[i], left[3].two[i])};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        multiply_add(sums[i][2 * j], a, halves<0>(right[0].two[j], right[1].two[j]),
                     halves<0>(right[2].two[j], right[3].two[j]));
        multiply_add(sums[i][2 * j + 1], a, halves<1>(right[0].two[j], right[1].two[j]),
                     halves<1>(right[2].two[j], right[3].two[j]));
      }
    }
  }
  Piece* pieces_of = reinterpret_cast<Piece*>(shared_memory());
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        // Column c of tile j is the lane's whose `own` is c: its j-th of eight.
        pieces_of[warp()].of[4 * own + 2 * i + n / 2][8 * (2 * quad + n % 2) + j] = sums[i][j][n];
      }
    }
  }
  sync();
  float* to = parts + ((stretch * s.heads + head) * s.low + group * kGroup) * s.wide + piece * kPiece;
  for (int i = thread(); i < kGroup * kPiece; i += kAddingBlock) {
    const int row = i / kPiece, column = i % kPiece;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kAddingWarps; ++w) sum += pieces_of[w].of[row][column];
    to[row * s.wide + column] = sum;
  }
}

/// body(kLow) for the call's.
template <typename Body>
void with_low(const Sketch& s, Body&& body) {
  if (!has_sketch(s.wide, s.low)) throw std::invalid_argument("gka: there is no kernel for a sketch of this size");
  if (s.low == kGroup) return body(std::integral_constant<int, kGroup>{});
  body(std::integral_constant<int, 2 * kGroup>{});
}
std::int64_t blocks_of(const Sketch& s) { return (s.tokens + kRows - 1) / kRows * s.heads; }

}  // namespace sketching

void from_sketch(const Sketch& s, const MemoryRows& base, const MemoryRows& low, void* to, const Device& device) {
  using namespace sketching;
  const CurrentDevice current(device.index);
  with_low(s, [&](auto size) {
    constexpr int kLow = decltype(size)::value;
    const int bytes = static_cast<int>(s.wide * pitch_of(kLow) * sizeof(Bits));
    launch_blocks_of<kBlock>(leave_sketch<kLow>, blocks_of(s), bytes, device.stream, s, base, low,
                             static_cast<Bits*>(to));
  });
}

void from_sketch_backward(const Sketch& s, const SketchGradients& g, const Device& device) {
  using namespace sketching;
  const CurrentDevice current(device.index);
  with_low(s, [&](auto size) {
    constexpr int kLow = decltype(size)::value;
    const int bytes = static_cast<int>(kLow * pitch_of(s.wide) * sizeof(Bits));
    launch_blocks_of<kBlock>(differentiate_leaving<kLow>, blocks_of(s), bytes, device.stream, s, g);
  });
}

void sketch_products(const Sketch& s, const MemoryRows& low, const MemoryRows& x, float* parts, const Device& device) {
  using namespace sketching;
  const CurrentDevice current(device.index);
  const std::int64_t grid = s.stretches() * s.heads * (s.low / kGroup) * (s.wide / kPiece);
  launch_blocks_of<kAddingBlock>(add_products, grid, static_cast<int>(kAddingWarps * sizeof(Piece)), device.stream, s,
                                 low, x, parts);
}

}  // namespace gka::kernels::cuda
