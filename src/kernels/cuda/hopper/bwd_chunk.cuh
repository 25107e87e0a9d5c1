// One chunk of 64 tokens as the backward passes see it: decays between its tokens, what of it is not finite, and its
// arrays as tiles.
#pragma once

#include "kernels/cuda/hopper/gates.h"
#include "kernels/cuda/hopper/stretch.cuh"
#include "kernels/cuda/hopper/warpgroup.cuh"
#include "kernels/system_scale.h"

namespace gka::kernels::cuda::hopper::bwd {

template <int D>
inline constexpr int kTileNumbers = kChunk * D;
template <int D>
inline constexpr int kTileBytes = kTileNumbers<D> * 2;
template <int D>
inline constexpr int kStateNumbers = D * D;
template <int D>
inline constexpr int kStateBytes = kStateNumbers<D> * 2;

template <typename Body>
__device__ __forceinline__ void each_of(int n, Body&& body) {
#pragma unroll 1
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

/// A stretch that is a chunk, of one head.
struct Place {
  std::int64_t batch, begin, head;
  int len;

  /// The same tokens of another head.
  __device__ Place of_head(std::int64_t other) const { return {batch, begin, other, len}; }
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

__device__ inline Place place_of(const Stretch& tokens, std::int64_t head) {
  return {.batch = tokens.batch,
          .begin = tokens.begin,
          .head = head,
          .len = static_cast<int>(max<std::int64_t>(tokens.length, 0))};
}

/// Times a factor; 0 clears, also what is not finite.
__device__ __forceinline__ float faded(float x, float by) { return by == 0 ? 0 : x * by; }

// ---- Gates, and what is lost
// ------------------------------------------------------------------------------------

/// What of a token is not finite. Such rows are read as 0, so that no product carries them to other tokens; who is
/// lost with them is found by walking the chunk, up to the next γ = 0.
enum Bad : int { kBadKey = 1, kBadValue = 2, kBadOutput = 4, kBadQuery = 8, kBadSolved = 16 };

/// Per-token numbers, found once and kept for the kernels that follow. Tokens behind the last one neither decay nor
/// write, so nothing below asks how many there are.
///
/// M_jc = 2^(reach_c − reach_j). A γ of 0, like every one that float32 would take to 0, counts as 2^-160 or less:
/// products across it are then exactly 0, and reach stays small enough for float32.
struct alignas(16) KeptGates {
  float reach[kChunk];  // log₂ Π_{i≤c} γ_i
  float beta[kChunk], alpha[kChunk];
  float sigma[kChunk];  // 1/‖H_c‖ (with a constant ridge 1/(‖H_c‖ + λ)), 0 where there is nothing to solve
  float zeta[kChunk];   // what is left of the state before the chunk
  float end[kChunk];    // what is left at the chunk's end of what token c wrote
  float v_down[kChunk], o_down[kChunk], k_down[kChunk], q_down[kChunk];  // by which rows of tiles are to be multiplied
  float udo_down[kChunk];                                                // the same for U_c do_c
  float state_read[kChunk];                                              // ζ_c s m_cᵀ U_0 do_c
  int bad[kChunk], forgets[kChunk];
  int any_bad;
  int wide;  // whether U_c do_c and ŷ_c are there in float32
  int padding[2];
};

struct TokenGates : KeptGates {
  double sums[kChunk];
  double carry;
  int any_forgets, any_poison;
  alignas(8) float poison[kChunk];  // to be added to what is written for a token: 0, or NaN
  alignas(16) float parts[4 * kChunk];

  /// `log_norm` gets −log₂ σ_c, kLog2Zero where there is none.
  template <bool kConstant>
  __device__ void load(const Problem& p, const double* norm, const Place& place, float* log_norm) {
    const Field<const double> norms = place.field(p, norm, 1);
    if (tile_thread() == 0) any_bad = any_forgets = any_poison = 0;
    sync();
    each_of(kChunk, [&](int c) {
      const bool there = c < place.len;
      const auto gate = [&](const View& view, float otherwise) {
        return there && view.data != nullptr ? read<float>(view, place.at(view, c)) : otherwise;
      };
      const float g = gate(p.log_decay, 0), b = gate(p.beta, there ? 1 : 0), a = gate(p.alpha, there ? 1 : 0);
      const double f = there ? *norms.at(c, 0) : 0;
      bad[c] = (g != g || !finite(b) ? kBadKey : 0) | (!finite(a) || !finite(f) ? kBadQuery : 0);
      if (bad[c] != 0) raise(&any_bad);
      forgets[c] = g < kForgetsNarrow;
      if (forgets[c]) raise(&any_forgets);
      sums[c] = g != g ? 0.0 : forgets[c] ? kForgetLog2 : g * 1.4426950408889634;
      if constexpr (!kConstant) log_norm[c] = f > 0 && finite(f) ? log2f(static_cast<float>(f)) : kLog2Zero;
      beta[c] = finite(b) ? b : 0;
      alpha[c] = finite(a) ? a : 0;
      if constexpr (kConstant) {
        sigma[c] = there ? static_cast<float>(system_scale(p.options, f, 1, 1e38, false).sigma) : 0;
        log_norm[c] = sigma[c] > 0 ? -log2f(sigma[c]) : kLog2Zero;
      } else {
        sigma[c] = f == 0 || !finite(f) ? 0 : static_cast<float>(1 / f);
      }
      poison[c] = 0;
    });
    scan_tokens(&carry, [&](int c) { return sums[c]; }, [&](int c, double sum) { sums[c] = sum; });
    each_of(kChunk, [&](int c) {
      reach[c] = any_forgets ? reach_across(c) : static_cast<float>(sums[c]);
      zeta[c] = power_of_two(reach[c]);
      end[c] = power_of_two(static_cast<float>(sums[kChunk - 1] - sums[c]));
    });
  }

  /// A row of this token is not finite.
  __device__ __forceinline__ void found(int c, int what) {
    mark(&bad[c], what);
    raise(&any_bad);
  }
  // After a barrier behind the loading of rows; these end with one where anything changes. `poison` is 0 at first.
  /// Lost is what has such a mark, and what comes after it, or after a lost state `before` the chunk.
  __device__ bool lose_after(int marks, bool before) {
    return lose(before, [&](bool reached, int i) { return (reached && !forgets[i]) || (bad[i] & marks) != 0; });
  }
  /// Lost is what has such a mark, and what comes before it, or before a lost gradient `behind` the chunk.
  __device__ void lose_before(int marks, bool behind) {
    lose(
        behind,
        [&](bool reached, int i) {
          const int c = kChunk - 1 - i;
          return (reached && (i == 0 || !forgets[c + 1])) || (bad[c] & marks) != 0;
        },
        true);
  }
  /// Whether a token with such a mark reaches the state before the chunk.
  __device__ bool spoils_start(int marks) const {
    if (!any_bad) return false;
#pragma unroll 1
    for (int c = 0; c < kChunk && !forgets[c]; ++c) {
      if (bad[c] & marks) return true;
    }
    return false;
  }

 private:
  /// `reach` where there is a γ = 0. Behind it sums begin anew, in multiples of 2^-14, which float32 adds to whole
  /// numbers without rounding: the differences between two tokens then do not depend on what came before.
  __device__ float reach_across(int c) const {
    const auto steps = [](double sum) { return static_cast<float>(rint(sum * 16384)) / 16384; };
    float before = 0;
    double start = 0;
    for (int i = 0; i <= c; ++i) {
      if (!forgets[i]) continue;
      before += floorf(steps(sums[i] - start));
      start = sums[i];
    }
    return before + steps(sums[c] - start);
  }
  template <typename Step>
  __device__ bool lose(bool reached, Step&& step, bool backwards = false) {
    if (!reached && !any_bad && !any_poison) return false;
    sync();
    if (tile_thread() == 0) any_poison = 1;
#pragma unroll 1
    for (int i = 0; i < kChunk; ++i) {
      reached = step(reached, i);
      if (tile_thread() == 0) poison[backwards ? kChunk - 1 - i : i] = reached ? bits_to_float(0x7fc00000u) : 0;
    }
    sync();
    return reached;
  }
};

// ---- Rows -------------------------------------------------------------------------------------------------------

struct alignas(16) Eight {
  float x[8];
};

template <DType kType>
__device__ __forceinline__ Eight unpack(const Unit& unit) {
  Eight eight;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const Pair pair = kType == DType::float16 ? unpack_halves(unit.words[w]) : unpack_bfloats(unit.words[w]);
    eight.x[2 * w] = pair.x;
    eight.x[2 * w + 1] = pair.y;
  }
  return eight;
}
template <DType kType>
__device__ __forceinline__ std::uint32_t pack_as(float x, float y) {
  return kType == DType::float16 ? pack_halves(x, y) : pack_bfloats(x, y);
}
__device__ __forceinline__ Unit pack_eight(const Eight& eight, float by) {
  Unit unit;
#pragma unroll
  for (int w = 0; w < 4; ++w) unit.words[w] = pack_halves(eight.x[2 * w] * by, eight.x[2 * w + 1] * by);
  return unit;
}
/// The largest bits of a number's size among eight packed ones, without unpacking them.
template <DType kType>
__device__ __forceinline__ std::uint32_t largest_of(const Unit& unit) {
  const std::uint32_t top = largest_word(unit);
  return kType == DType::float16 ? float_to_bits(half_to_float(static_cast<std::uint16_t>(top))) : top << 16;
}
__device__ __forceinline__ bool usable(std::uint32_t top) { return top < 0x7f800000u; }

/// Eight 16-bit numbers from a multiple of eight on, of `columns` (a multiple of 4).
__device__ __forceinline__ Unit read_row(const Field<const std::uint16_t>& from, int c, int i, int len, int columns) {
  if (c >= len || i >= columns) return {};
  const std::uint16_t* p = from.at(c, i);
  Unit unit{};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (i + e < columns) unit.words[e / 2] |= static_cast<std::uint32_t>(p[e]) << 16 * (e % 2);
  }
  return unit;
}

/// Whether a view is of such 16-bit numbers, at multiples of eight of them.
inline bool lies_whole(const View& view, DType dtype) {
  const auto whole = [](std::int64_t stride) { return stride % 8 == 0; };
  return view.data == nullptr || (view.dtype == dtype && reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 &&
                                  whole(view.batch_stride) && whole(view.token_stride) && whole(view.head_stride));
}

/// A view's rows into a tile as they are. Every thread gets the units that it will see in `sweep_units`.
template <int D, bool kWhole, int kGroups = 1>
__device__ __forceinline__ void fetch_rows(const Tile& to, const View& view, const Place& place, int columns) {
  const Field<const std::uint16_t> from = place.field(view);
  if constexpr (kWhole) {
    copy_rows<D, kGroups>(to, from.data, from.stride, place.len);
  } else {
    sweep_units<D, kGroups>([&](int c, int u) { return read_row(from, c, 8 * u, place.len, columns); },
                            [&](int c, int u, const Unit& unit) { to.put(c, u, unit); });
  }
}

/// Half the units of a row of D numbers.
template <int D>
struct HalfRow {
  Unit units[D / 16];
};

/// Rows that `fetch_rows` brought into tiles one behind the other, after `wait_for_copies` and a barrier: as float16,
/// times powers of two of which `down` (kChunk numbers for each tile) gets the inverse. kBad: four bits for each tile.
/// The tiles are taken in turn, so that there is little code.
template <int D, DType kType, int kTiles, int kBad>
__device__ __forceinline__ void settle_rows(std::uint16_t* tiles, float* down, TokenGates& gates) {
#pragma unroll 1
  for (int i = 0; i < kTiles; ++i) {
    const Tile tile = tile_of<D>(tiles + i * kTileNumbers<D>);
    sweep_half_rows<D>(
        [&](int c, int first) {
          HalfRow<D> half;
#pragma unroll
          for (int u = 0; u < D / 16; ++u) half.units[u] = tile.unit(c, first + u);
          return half;
        },
        [](const HalfRow<D>& half) {
          std::uint32_t top = 0;
#pragma unroll
          for (const Unit& unit : half.units) top = max(top, largest_of<kType>(unit));
          return top;
        },
        [&](int c, int first, const HalfRow<D>& half, std::uint32_t top) {
          const Scale scale = scale_of(top);
          const bool fine = usable(top);
#pragma unroll
          for (int u = 0; u < D / 16; ++u) {
            tile.put(c, first + u, fine ? pack_eight(unpack<kType>(half.units[u]), scale.up) : Unit{});
          }
          if (first != 0) return;
          down[i * kChunk + c] = scale.down;
          if (!fine) gates.found(c, kBad >> 4 * i & 15);
        });
  }
}

/// to = from · factor(c), row by row, as float16. Every thread has the units that it would fetch.
template <int D, int kGroups = 1, DType kType = DType::float16, typename Factor>
__device__ __forceinline__ void weigh_rows(const Tile& to, const Tile& from, Factor&& factor) {
  sweep_units<D, kGroups>(
      [&](int c, int u) { return from.unit(c, u); },
      [&](int c, int u, const Unit& unit) { to.put(c, u, pack_eight(unpack<kType>(unit), factor(c))); });
}
/// Scales weights of the 64 tokens so that float16 holds rows times them; what undoes it is returned. Between barriers.
template <int kArrays>
__device__ __forceinline__ float normalise(float* (&weights)[kArrays]) {
  std::uint32_t top = 0;
  for (const float* of : weights) top = max(top, largest_of_tokens(of));
  sync();
  const Scale scale = scale_of(top);
  each_of(kChunk, [&](int c) {
    for (float* of : weights) of[c] *= scale.up;
  });
  return scale.down;
}

/// Where gradients of the chunk's tokens go, in pairs. Shape::kWhole: as the inputs, and aligned.
template <typename Shape>
struct Out {
  static constexpr bool kWhole = Shape::kWhole;
  char* data;
  int stride;
  DType dtype;

  __device__ Out(const View& view, const Place& place)
      : data(static_cast<char*>(view.data)), stride(static_cast<int>(view.token_stride)), dtype(view.dtype) {
    if (data != nullptr) data += place.at(view, 0) * (dtype == DType::float32 ? 4 : 2);
  }
  /// Where Product::write puts a token's numbers, of which the first `len` tokens are there.
  __device__ __forceinline__ char* row(int c, int len) const {
    return data != nullptr && c < len ? data + static_cast<std::int64_t>(c) * stride * 2 : nullptr;
  }
  __device__ __forceinline__ void put(int c, int i, float x, float y) const {
    const std::int64_t at = static_cast<std::int64_t>(c) * stride + i;
    if (dtype == DType::float32) {
      auto* to = reinterpret_cast<float*>(data) + at;
      to[0] = x;
      to[1] = y;
    } else {
      auto* to = reinterpret_cast<std::uint16_t*>(data) + at;
      const std::uint32_t packed =
          dtype == DType::float16 ? pack_as<DType::float16>(x, y) : pack_as<DType::bfloat16>(x, y);
      to[0] = static_cast<std::uint16_t>(packed);
      to[1] = static_cast<std::uint16_t>(packed >> 16);
    }
  }
};

}  // namespace gka::kernels::cuda::hopper::bwd
