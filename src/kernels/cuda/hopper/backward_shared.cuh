// What the passes of the backward share: their scratch, states and scores between tokens.
#pragma once

#include "kernels/cuda/hopper/backward_chunk.cuh"

namespace gka::kernels::cuda::hopper::passes {

/// Gradients of states as tiles of float16, one for each chunk of a head: the number is `down` times what the tile has,
/// NaN if the state is lost; none is larger than `top`.
struct States {
  std::uint16_t* tiles;
  float *down, *top;

  __device__ std::uint16_t* tile(std::int64_t task) const { return tiles + task * kStateNumbers; }
};
/// H or U at the start of each chunk as the forward pass's walk leaves them: divided by their norm, NaN if lost.
struct GivenStates {
  const std::uint16_t* tiles;
  const float* norm;
  int parts;  // tiles for each, of which the first is read

  __device__ const std::uint16_t* tile(std::int64_t task) const { return tiles + task * parts * kStateNumbers; }
};

/// Per-token numbers that `keys` leaves.
struct alignas(16) Solutions {
  float x_down[kChunk], y_down[kChunk];
  float weight[kChunk];  // w_c
  float reach[kChunk];   // Q_c = Σ_{l ≥ c} M_cl² w_l
  int bad[kChunk];
  int any_bad, padding[3];
};

/// Numbers that a warp of `carry_back` leaves one of for every chunk.
inline constexpr int kPartials = kStateNumbers / 8 / kLanes;

/// Scratch of one backward call. A slot is half a segment: 2 · segment + half; a task a slot of a head.
struct Scratch {
  float* udo;             // [batch, tokens, heads, D]: U_c do_c
  float* y;               // the same: ŷ
  std::uint16_t* tokens;  // [tasks, 4] tiles: k, v, do, q
  KeptGates* gates;       // [tasks]
  std::uint16_t* solved;  // [tasks, 3] tiles: x, what float16 lost of x, ŷ
  Solutions* solutions;   // [tasks]
  float* zeta;            // [tasks]: what is left of a state after the slot
  GivenStates h, u;
  float* of_h;               // [tasks]: times H_0/‖H_0‖: the rest of the slot's own part of the gradient of H_0
  States g, r;               // own parts of the gradients of H_0 and U_0, then what arrives, with
  float *g_down, *r_down;    // this for `down`
  float *g_inner, *r_inner;  // [tasks, kPartials]: parts of ⟨Ḡ', H_0⟩/‖H_0‖ and ⟨R̄', U_0⟩/‖U_0‖
};

using Wide = Product<1, kWidth>;
using Square = Product<2, kWidth>;
using Scores = Product<1, kChunk>;

/// What a kernel is compiled for. kWhole: D = V = 128, and all views are of that type and lie aligned.
template <DType kType_, bool kWhole_>
struct Shape {
  static constexpr DType kType = kType_;
  static constexpr bool kWhole = kWhole_;
};

/// Sizes, known to the compiler where they are 128.
template <bool kWhole>
struct Sides {
  int dim, values;

  __device__ explicit Sides(const Problem& p)
      : dim(kWhole ? kWidth : static_cast<int>(p.key_dim)), values(kWhole ? kWidth : static_cast<int>(p.value_dim)) {}
};

/// M_jc at a place of a product, where the column is the later token (c), or the row is; 0 else.
struct Fading {
  Scores::OfRows row;
  Scores::OfColumns column;

  __device__ explicit Fading(const Gates& gates)
      : row(Scores::of_rows(gates.reach)), column(Scores::of_columns(gates.reach)) {}
  __device__ __forceinline__ float to_column(const At& at, int e) const {
    return at.column + e < at.row ? 0 : power_of_two(column.x[at.c + e] - row.x[at.r]);
  }
  __device__ __forceinline__ float to_row(const At& at, int e) const {
    return at.column + e > at.row ? 0 : power_of_two(row.x[at.r] - column.x[at.c + e]);
  }
};

/// Rows and columns of scores times the powers of two that their operands' rows were divided by, and M if asked.
template <bool kFaded>
__device__ __forceinline__ void restore(Scores& scores, const float* rows, const float* columns, const Gates& gates) {
  const Fading fading(gates);
  const auto row = Scores::of_rows(rows);
  const auto column = Scores::of_columns(columns);
  scores.each([&](const At& at, float& x, float& y) {
    x *= row.x[at.r] * column.x[at.c];
    y *= row.x[at.r] * column.x[at.c + 1];
    if constexpr (kFaded) {
      x *= fading.to_column(at, 0);
      y *= fading.to_column(at, 1);
    }
  });
}
/// sum += part, row by row times factor.
template <typename Factor>
__device__ __forceinline__ void add_rows(Wide& sum, const Wide& part, const Factor& factor) {
  sum.each_with(part, [&](const At& at, float& x, float& y, float a, float b) {
    x += factor[at.r] * a;
    y += factor[at.r] * b;
  });
}

/// One query with its solution: m = q + α (x − q), and x.
struct Mixed {
  Eight q, x;

  template <DType kType>
  __device__ static Mixed of(const Unit& q, const Eight& solved, float sigma) {
    Mixed mixed{unpack<kType>(q), {}};
#pragma unroll
    for (int e = 0; e < 8; ++e) mixed.x.x[e] = solved.x[e] * sigma;
    return mixed;
  }
  __device__ Eight at(float alpha, float scale) const {
    Eight m;
#pragma unroll
    for (int e = 0; e < 8; ++e) m.x[e] = scale * (q.x[e] + alpha * (x.x[e] - q.x[e]));
    return m;
  }
};

/// A product as a state's tile in shared memory, `room`, and on to global memory; `lost`: as a lost one. Barriers
/// inside: before the tile is written, and after it was sent.
__device__ __forceinline__ void send_state(Square& product, const Tile& room, const States& to, std::int64_t task,
                                           bool lost, Gates& gates) {
  const std::uint32_t top = product.largest(reinterpret_cast<std::uint32_t*>(gates.parts));
  const Scale scale = scale_of(top);
  const bool fine = usable(top) && !lost;
  if (fine) {
    product.store(room, scale.up);
  } else {
    each_unit_of_state([&](int row, int u) { room.put(row, u, Unit{}); });
  }
  publish();
  sync();
  send_tile(to.tile(task), room.data, kStateBytes);
  if (tile_thread() == 0) {
    to.down[task] = fine ? scale.down : bits_to_float(0x7fc00000u);
    to.top[task] = fine ? bits_to_float(top) : bits_to_float(0x7fc00000u);
  }
}

/// To global memory, from shared memory.
template <typename T>
__device__ __forceinline__ void keep(T& to, const T& from) {
  static_assert(sizeof(T) % sizeof(Unit) == 0);
  for (int i = tile_thread(); i < static_cast<int>(sizeof(T) / sizeof(Unit)); i += kTileThreads) {
    reinterpret_cast<Unit*>(&to)[i] = reinterpret_cast<const Unit*>(&from)[i];
  }
}

}  // namespace gka::kernels::cuda::hopper::passes
