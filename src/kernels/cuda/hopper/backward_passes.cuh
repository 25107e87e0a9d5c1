// The passes of the implicit backward around the second solve, one thread block per chunk and head:
//
//   answers    U_c do_c, which is the solve's right-hand side, and the chunk's own part of the gradient of U_0
//   keys       dq, dα, dv, and the chunk's own part of the gradient of H_0
//   carry_back what arrives at the end of every chunk from all later ones, along each sequence in reverse
//   gradients  dk, dβ and dg from the chunk itself and from what arrives
//
// With ŷ_c = (H_c + λ_c I)⁻¹ U_c do_c the y_c of docs/mathematics.md is α_c s ŷ_c. All gradients of a token are of the
// form Σ_{c ≥ j} M_jc (…): masked scores between tokens times tokens, plus what arrives, faded. What is not obvious:
//
// - Operands are one float16 each, with rows or tiles scaled by powers of two. That is enough because what cancels is
//   brought together first: x_c, whose part outside the keys' span is 1/ridge times larger than the rest, meets
//   (v_j·do_c) − (k_j·ŷ_c) in dk; dβ is a sum over pairs of tokens, not k·dk; and k_j·x_c has x in two parts.
// - dg is the sum over pairs without cancellation of that page, Σ_{j<t} Σ_{c≥t} P_jc, as running sums of P's rows minus
//   its columns since the last γ = 0: the same float32 numbers enter both.
// - Rows that are not finite are read as 0; see Gates.
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

// ---- answers ----------------------------------------------------------------------------------------------------

struct AnswersMemory {
  std::uint16_t k[kTileBytes / 2], v[kTileBytes / 2], d_o[kTileBytes / 2];
  std::uint16_t state[kStateNumbers];  // q, then U_0, then the gradient of U_0
  std::uint16_t m[kTileBytes / 2];     // ζ_c s m_c
  Gates gates;
  Arrival arrival;
  alignas(8) float m_down[kChunk], weight[kChunk];
};

/// The tile of ζ_c s m_c.
template <typename Shape>
__device__ __forceinline__ void read_mixed(const Problem& p, const Saved& saved, const Place& place,
                                           AnswersMemory& memory) {
  const Sides<Shape::kWhole> sides(p);
  Gates& gates = memory.gates;
  const Tile m{memory.m, kChunk};
  const float scale = static_cast<float>(p.options.scale);
  const auto q = place.field(p.q);
  const auto x = place.field(p, static_cast<const float*>(saved.x), sides.dim);
  struct Loaded {
    Unit q;
    Eight x;
  };
  sweep_rows<1, 0, 4>(
      [&](int c, int u) {
        return Loaded{read_row<Shape::kWhole>(q, c, 8 * u, place.len, sides.dim),
                      read_row<Shape::kWhole>(x, c, 8 * u, place.len, sides.dim)};
      },
      [&](int c, int, const Loaded& from, auto& of) {
        const Mixed mixed = Mixed::of<Shape::kType>(from.q, from.x, gates.sigma[c]);
        of.top[0] = largest_of(mixed.at(gates.alpha[c], scale * gates.zeta[c]));
      },
      [&](int c, int u, const Loaded& from, const auto& of) {
        const Mixed mixed = Mixed::of<Shape::kType>(from.q, from.x, gates.sigma[c]);
        const Scale by = scale_of(of.top[0]);
        const Eight mix = mixed.at(gates.alpha[c], scale * gates.zeta[c]);
        m.put(c, u, usable(of.top[0]) ? pack_eight(mix, by.up) : Unit{});
        if (u != 0) return;
        memory.m_down[c] = by.down;
        if (!usable(of.top[0])) gates.found(c, kBadQuery);
      });
}

template <typename Shape>
__global__ void __launch_bounds__(kTileThreads, 2)
    answers(const __grid_constant__ Problem p, const __grid_constant__ Saved saved,
            const __grid_constant__ Gradients out, Plan plan, const __grid_constant__ Scratch scratch) {
  constexpr bool kWhole = Shape::kWhole;
  const std::int64_t slot = block() / p.heads, head = block() % p.heads, task = block();
  if (slot / 2 >= plan.count(p)) return;
  const Place place = place_of(plan.segments[slot / 2], static_cast<int>(slot % 2), head);
  if (place.len == 0) return;
  auto& memory = *reinterpret_cast<AnswersMemory*>(tile_memory());
  const Sides<kWhole> sides(p);
  Gates& gates = memory.gates;
  const Tile k{memory.k, kChunk}, v{memory.v, kChunk}, d_o{memory.d_o, kChunk}, m{memory.m, kChunk};
  const Tile state{memory.state, kWidth};

  memory.arrival.init();
  fetch_rows<kWhole>(k, p.k, place, sides.dim);
  fetch_rows<kWhole>(v, p.v, place, sides.values);
  fetch_rows<kWhole>(d_o, out.d_o, place, sides.values);
  fetch_rows<kWhole>({memory.state, kChunk}, p.q, place, sides.dim);
  gates.load(p, saved.norm, place);
  read_mixed<Shape>(p, saved, place, memory);
  wait_for_copies();
  settle_rows<Shape::kType, 4, kBadKey | kBadValue << 4 | kBadOutput << 8 | kBadQuery << 12>(memory.k, gates.k_down,
                                                                                             gates);
  publish();
  sync();
  send_tile(scratch.tokens + task * 4 * kChunk * kWidth, memory.k, 4 * kTileBytes);
  wait_until_sent();
  memory.arrival.request(Piece{state.data, scratch.u.tile(task), kStateBytes});
  const float u_given = scratch.u.norm[task], u_norm = finite(u_given) ? u_given : 0;
  gates.lose_after(kBadKey | kBadValue, !finite(u_given));
  if (tile_thread() == 0) scratch.zeta[task] = gates.zeta[kChunk - 1];

  Left<true> left;
  {
    Scores read;
    read.multiply<Lies::by_columns>(d_o, v);
    const Fading fading(gates);
    const auto o_down = Scores::of_rows(gates.o_down);
    const auto beta = Scores::of_columns(gates.beta), v_down = Scores::of_columns(gates.v_down),
               k_down = Scores::of_columns(gates.k_down);
    left = read.as_left<true>([&](const At& at, float a, float b) -> Pair {
      const auto by = [&](int e) {
        return fading.to_row(at, e) * o_down.x[at.r] * (beta.x[at.c + e] * v_down.x[at.c + e] * k_down.x[at.c + e]);
      };
      return {a * by(0), b * by(1)};
    });
  }
  Wide answer, part;
  part.multiply(left, k);
  memory.arrival.wait(0);
  answer.multiply<Lies::by_columns>(d_o, state);
  answer.row_sums(memory.weight, [&](const At& at, float a, float b) {
    const Pair mixed = m.pair(at.row, at.column);
    return mixed.x * a + mixed.y * b;
  });
  {
    const Field<float> udo = place.field(p, scratch.udo, sides.dim);
    const auto o_down = Wide::of_rows(gates.o_down), zeta = Wide::of_rows(gates.zeta),
               poison = Wide::of_rows(gates.poison);
    answer.each_with(part, [&](const At& at, float a, float b, float own_a, float own_b) {
      if (at.row >= place.len || !(kWhole || at.column < sides.dim)) return;
      const float by = o_down.x[at.r] * u_norm * zeta.x[at.r], factor = left.factor[at.r];
      const float lost = poison.x[at.r] + (gates.bad[at.row] & kBadOutput ? bits_to_float(0x7fc00000u) : 0);
      *reinterpret_cast<Pair*>(udo.at(at.row, at.column)) = {a * by + own_a * factor + lost,
                                                             b * by + own_b * factor + lost};
    });
  }
  sync();
  // The chunk's own part of the gradient of U_0.
  each_of(kChunk, [&](int c) {
    const float down = memory.m_down[c] * gates.o_down[c];
    gates.state_read[c] = memory.weight[c] * down * u_norm;
    memory.weight[c] = down;
  });
  keep(scratch.gates[task], static_cast<const KeptGates&>(gates));
  float* weights[] = {memory.weight};
  const float down = normalise(weights);
  weigh_rows(m, m, memory.weight);
  publish();
  sync();
  Square own;
  own.outer<false>(m, d_o);
  own.each([&](const At&, float& a, float& b) { a *= down, b *= down; });
  send_state(own, state, scratch.r, task, gates.spoils_start(kBadKey | kBadQuery | kBadOutput), gates);
  finish_sending();
}

// ---- keys -------------------------------------------------------------------------------------------------------

struct KeysMemory {
  std::uint16_t k[kTileBytes / 2], d_o[kTileBytes / 2];
  std::uint16_t q[kTileBytes / 2], x[kTileBytes / 2];     // then the gradient of U that arrives
  std::uint16_t x_lo[kTileBytes / 2], y[kTileBytes / 2];  // then the own part of the gradient of H_0
  Gates gates;
  Arrival arrival;
  Solutions solutions;
  alignas(8) float of_y[kChunk], of_k[kChunk];
};

/// dq, dα, the weights w and their sums, and the tiles of x and ŷ.
template <typename Shape>
__device__ __forceinline__ void read_solutions(const Problem& p, const Saved& saved, const Gradients& out,
                                               const Scratch& scratch, const Place& place, KeysMemory& memory) {
  constexpr bool kWhole = Shape::kWhole;
  const Sides<kWhole> sides(p);
  Gates& gates = memory.gates;
  Solutions& solutions = memory.solutions;
  const Tile x{memory.x, kChunk}, x_lo{memory.x_lo, kChunk}, y{memory.y, kChunk};
  const float scale = static_cast<float>(p.options.scale);
  const float ridge = p.options.ridge_gradient ? static_cast<float>(p.options.ridge) : 0;
  const auto q = place.field(p.q);
  const auto solved = place.field(p, static_cast<const float*>(saved.x), sides.dim);
  const auto answered = place.field(p, static_cast<const float*>(scratch.y), sides.dim);
  const auto udo = place.field(p, static_cast<const float*>(scratch.udo), sides.dim);
  const Out<Shape> d_q(out.d_q, place);
  struct Loaded {
    Unit q;
    Eight x, y, udo;
  };
  sweep_rows<2, 2, 2>(
      [&](int c, int u) {
        const int i = 8 * u, len = place.len;
        return Loaded{read_row<kWhole>(q, c, i, len, sides.dim), read_row<kWhole>(solved, c, i, len, sides.dim),
                      read_row<kWhole>(answered, c, i, len, sides.dim), read_row<kWhole>(udo, c, i, len, sides.dim)};
      },
      [&](int c, int, Loaded& from, auto& of) {
        const Eight query = unpack<Shape::kType>(from.q);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          from.x.x[e] *= gates.sigma[c];
          of.sum[0] += from.x.x[e] * from.y.x[e];
          of.sum[1] += (from.x.x[e] - query.x[e]) * from.udo.x[e];
        }
        of.top[0] = largest_of(from.x);
        of.top[1] = largest_of(from.y);
      },
      [&](int c, int u, const Loaded& from, const auto& of) {
        const float alpha = gates.alpha[c], lost = gates.bad[c] & kBadQuery ? bits_to_float(0x7fc00000u) : 0;
        const Scale x_by = scale_of(of.top[0]), y_by = scale_of(of.top[1]);
        const bool x_fine = usable(of.top[0]), y_fine = usable(of.top[1]);
        const Unit hi = x_fine ? pack_eight(from.x, x_by.up) : Unit{};
        x.put(c, u, hi);
        x_lo.put(c, u, x_fine ? pack_rest(from.x, x_by.up, hi) : Unit{});
        y.put(c, u, y_fine ? pack_eight(from.y, y_by.up) : Unit{});
        if (d_q.data != nullptr && c < place.len && (kWhole || 8 * u < sides.dim)) {
          Eight d;
#pragma unroll
          for (int e = 0; e < 8; ++e) d.x[e] = scale * (alpha * from.y.x[e] + (1 - alpha) * from.udo.x[e]) + lost;
          d_q.put(c, 8 * u, d, sides.dim);
        }
        if (u != 0) return;
        solutions.x_down[c] = x_by.down;
        solutions.y_down[c] = y_by.down;
        if (!x_fine) gates.found(c, kBadQuery);
        if (!y_fine) gates.found(c, kBadSolved);
        const float w = x_fine && y_fine ? 2 * ridge * alpha * scale * of.sum[0] * gates.sigma[c] : 0;
        solutions.weight[c] = finite(w) ? w : 0;
        if (c < place.len && out.d_alpha.data != nullptr) {
          write(out.d_alpha, place.at(out.d_alpha, c), scale * of.sum[1] + lost);
        }
      });
  sync();
  each_of(kChunk, [&](int j) {
    float total = 0;
#pragma unroll 8
    for (int c = 0; c < kChunk; ++c) {
      const float fading = c < j ? 0 : power_of_two(gates.reach[c] - gates.reach[j]);
      total += fading * fading * solutions.weight[c];
    }
    solutions.reach[j] = total;
    solutions.bad[j] = gates.bad[j];
    if (j == 0) solutions.any_bad = gates.any_bad;
  });
}

template <typename Shape>
__global__ void __launch_bounds__(kTileThreads, 2)
    keys(const __grid_constant__ Problem p, const __grid_constant__ Saved saved, const __grid_constant__ Gradients out,
         Plan plan, const __grid_constant__ Scratch scratch) {
  constexpr bool kWhole = Shape::kWhole;
  const std::int64_t slot = block() / p.heads, head = block() % p.heads, task = block();
  if (slot / 2 >= plan.count(p)) return;
  const Place place = place_of(plan.segments[slot / 2], static_cast<int>(slot % 2), head);
  if (place.len == 0) return;
  auto& memory = *reinterpret_cast<KeysMemory*>(tile_memory());
  const Sides<kWhole> sides(p);
  Gates& gates = memory.gates;
  Solutions& solutions = memory.solutions;
  const Tile k{memory.k, kChunk}, d_o{memory.d_o, kChunk}, q{memory.q, kChunk}, x{memory.x, kChunk};
  const Tile x_lo{memory.x_lo, kChunk}, y{memory.y, kChunk};
  const Tile own_state{memory.x_lo, kWidth}, arriving{memory.q, kWidth};
  const float scale = static_cast<float>(p.options.scale);

  memory.arrival.init();
  sync();
  const std::uint16_t* tokens = scratch.tokens + task * 4 * kChunk * kWidth;
  memory.arrival.request(Piece{static_cast<KeptGates*>(&gates), scratch.gates + task, sizeof(KeptGates)},
                         Piece{memory.k, tokens, kTileBytes},
                         Piece{memory.d_o, tokens + 2 * kChunk * kWidth, 2 * kTileBytes});
  memory.arrival.wait(0);
  read_solutions<Shape>(p, saved, out, scratch, place, memory);
  publish();
  sync();
  send_tile(scratch.solved + task * 3 * kChunk * kWidth, memory.x, 3 * kTileBytes);
  keep(scratch.solutions[task], solutions);

  // k_j·m_c, with M and the scales of do: what dv takes from the chunk's own tokens.
  Left<false> left;
  {
    Scores scores, queries;
    scores.multiply<Lies::by_columns>(k, x);
    scores.multiply<Lies::by_columns, true>(k, x_lo);
    queries.multiply<Lies::by_columns>(k, q);
    const Fading fading(gates);
    const auto k_down = Scores::of_rows(gates.k_down);
    const auto alpha = Scores::of_columns(gates.alpha), o_down = Scores::of_columns(gates.o_down),
               x_down = Scores::of_columns(solutions.x_down), q_down = Scores::of_columns(gates.q_down);
    scores.each_with(queries, [&](const At& at, float& a, float& b, float q_a, float q_b) {
      const auto mixed = [&](int e, float of_x, float of_q) {
        const float share = alpha.x[at.c + e];
        return share * x_down.x[at.c + e] * of_x + (1 - share) * q_down.x[at.c + e] * of_q;
      };
      a = mixed(0, a, q_a);
      b = mixed(1, b, q_b);
    });
    left = scores.as_left<false>([&](const At& at, float a, float b) -> Pair {
      const auto by = [&](int e) { return fading.to_column(at, e) * k_down.x[at.r] * (scale * o_down.x[at.c + e]); };
      return {a * by(0), b * by(1)};
    });
  }
  // The chunk's own part of the gradient of H_0: both orders of x and y, then the nested term.
  each_of(kChunk, [&](int c) {
    const float key = gates.k_down[c];
    memory.of_y[c] = -0.5f * gates.zeta[c] * gates.alpha[c] * scale * solutions.x_down[c] * solutions.y_down[c];
    memory.of_k[c] = -0.5f * gates.beta[c] * gates.zeta[c] * solutions.reach[c] * key * key;
  });
  float* weights[] = {memory.of_y, memory.of_k};
  const float down = normalise(weights);
  wait_until_sent();
  sync();
  weigh_rows(y, y, memory.of_y);
  weigh_rows(q, k, memory.of_k);
  publish();
  sync();
  {
    Square own;
    own.outer<false>(x, y);
    own.outer<true>(y, x);
    own.outer<true>(q, k);
    own.each([&](const At&, float& a, float& b) { a *= down, b *= down; });
    if (tile_thread() == 0) {
      const float norm = scratch.h.norm[task];
      scratch.of_h[task] = finite(norm) ? faded(-0.5f * solutions.reach[0] * norm, gates.zeta[0] * gates.zeta[0]) : 0;
    }
    const bool lost = gates.spoils_start(kBadKey | kBadQuery | kBadSolved);
    send_state(own, own_state, scratch.g, task, lost, gates);
  }
  memory.arrival.request(Piece{memory.q, scratch.r.tile(task), kStateBytes});
  const float r_down = scratch.r_down[task];
  gates.lose_before(kBadKey | kBadQuery | kBadOutput, !finite(r_down));

  Wide d_v, part;
  part.multiply(left, d_o);
  memory.arrival.wait(1);
  d_v.multiply<Lies::by_depth>(k, arriving);
  const Out<Shape> to(out.d_v, place);
  const auto beta = Wide::of_rows(gates.beta), end = Wide::of_rows(gates.end), k_down = Wide::of_rows(gates.k_down),
             poison = Wide::of_rows(gates.poison);
  const float by = finite(r_down) ? r_down : 0;
  d_v.each_with(part, [&](const At& at, float a, float b, float own_a, float own_b) {
    if (to.data == nullptr || at.row >= place.len || !(kWhole || at.column < sides.values)) return;
    const float fade = end.x[at.r] * k_down.x[at.r] * by, factor = left.factor[at.r], weight = beta.x[at.r];
    const float lost = poison.x[at.r];
    to.put(at.row, at.column, weight * (a * fade + own_a * factor) + lost, weight * (b * fade + own_b * factor) + lost);
  });
  finish_sending();
}

// ---- carry_back -------------------------------------------------------------------------------------------------

/// One of the two gradients that are carried.
struct CarryBack {
  States parts;
  float* down;         // of what arrives
  const float* start;  // [sequences, heads, rows, columns]: the final state's gradient, or null
  float* last;         // the first state's, or null
  int rows, columns;
  GivenStates states;              // H or U
  float* inner;                    // [tasks, kPartials]: parts of the inner products of these and what arrives
  const float* of_h = nullptr;     // with kKeys: these times H belong to the parts
  const float* largest = nullptr;  // of `start`
};

/// The largest number of each state, NaN if there is one that is not finite.
static __global__ void __launch_bounds__(kTileThreads) find_largest(std::int64_t size, const float* states, float* to) {
  auto& parts = *reinterpret_cast<float (*)[4]>(tile_memory());
  std::uint32_t top = 0;
  for (std::int64_t i = tile_thread(); i < size; i += kTileThreads) {
    top = most(top, size_bits(states[block() * size + i]));
  }
  top = most_of_threads(top, reinterpret_cast<std::uint32_t*>(parts));
  if (tile_thread() == 0) to[block()] = usable(top) ? bits_to_float(top) : bits_to_float(0x7fc00000u);
}

/// arriving_{s-1} = ζ_s arriving_s + part_s, in place; eight numbers a thread. Every thread knows how large the numbers
/// of a tile can be at most, so all scale it alike. kKeys: for H, whose gradient is symmetric.
template <bool kKeys>
__global__ void __launch_bounds__(kTileThreads)
    carry_back(const __grid_constant__ Problem p, Plan plan, const float* zetas, const __grid_constant__ CarryBack c) {
  constexpr int kAhead = 8, kOwn = 8;
  constexpr std::int64_t kBlocks = kStateNumbers / kOwn / kTileThreads;
  const std::int64_t head = block() / kBlocks % p.heads, n = block() / kBlocks / p.heads, state_at = n * p.heads + head;
  const int e = (static_cast<int>(block() % kBlocks) * kTileThreads + tile_thread()) * kOwn;
  const int row = e / 64 % kWidth, column = e / 64 / kWidth * 64 + ((e % 64 / 8) ^ (row % 8)) * 8;
  const auto inside = [&](int i) { return row < c.rows && column + i < c.columns; };
  const std::int64_t at = state_at * c.rows * c.columns + static_cast<std::int64_t>(row) * c.columns + column;

  Eight state{};
  float bound = 0;
  if (c.start != nullptr) {
    bound = c.largest[state_at];
    for (int i = 0; i < kOwn; ++i) {
      if (!inside(i)) continue;
      state.x[i] = c.start[at + i];
      if (kKeys) state.x[i] = (state.x[i] + c.start[(state_at * c.rows + column + i) * c.columns + row]) / 2;
    }
  }
  const std::int64_t segments = plan.begin[n + 1] - plan.begin[n];
  const std::int64_t count =
      segments == 0 ? 0 : 2 * segments - (plan.segments[plan.begin[n + 1] - 1].length > kChunk ? 0 : 1);
  const std::int64_t last_task = (2 * plan.begin[n] + count - 1) * p.heads + head;
  struct Part {
    Unit own, h;
    float zeta, down, top, of_h;
  };
  const auto load = [&](std::int64_t back) {
    const std::int64_t task = last_task - back * p.heads;
    return Part{*reinterpret_cast<const Unit*>(c.parts.tile(task) + e),
                read_unit(c.states.tile(task) + e),
                zetas[task],
                c.parts.down[task],
                c.parts.top[task],
                kKeys ? c.of_h[task] : 0};
  };
  Part ahead[kAhead];
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    if (a < count) ahead[a] = load(a);
  }
  for (std::int64_t base = 0; base < count; base += kAhead) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (base + a >= count) continue;
      const std::int64_t task = last_task - (base + a) * p.heads;
      const bool fine = finite(bound);
      const Scale scale = scale_of(float_to_bits(bound));
      *reinterpret_cast<Unit*>(c.parts.tile(task) + e) = fine ? pack_eight(state, scale.up) : Unit{};
      if (e == 0) c.down[task] = fine ? scale.down : bits_to_float(0x7fc00000u);
      const Part part = ahead[a];
      const Eight own = unpack<DType::float16>(part.own), h = unpack<DType::float16>(part.h);
      float inner = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        inner += state.x[i] * h.x[i];
        state.x[i] = faded(state.x[i], part.zeta) + own.x[i] * part.down;
        if constexpr (kKeys) state.x[i] += h.x[i] * part.of_h;
      }
      inner = sum_lanes(inner);
      if (e % (kOwn * kLanes) == 0) c.inner[task * kPartials + e / (kOwn * kLanes)] = inner;
      bound = faded(bound, part.zeta) + part.top;
      if constexpr (kKeys) bound += bits_to_float(size_bits(part.of_h));
      if (base + a + kAhead < count) ahead[a] = load(base + a + kAhead);
    }
  }
  if (c.last == nullptr) return;
  for (int i = 0; i < kOwn; ++i) {
    if (inside(i)) c.last[at + i] = state.x[i];
  }
}

/// d_h0 is symmetric: rounding made it so only nearly.
static __global__ void __launch_bounds__(kTileThreads) make_symmetric(std::int64_t matrices, int dim, float* h) {
  const std::int64_t pairs = static_cast<std::int64_t>(dim) * dim;
  for (std::int64_t i = block() * kTileThreads + tile_thread(); i < matrices * pairs; i += blocks() * kTileThreads) {
    const std::int64_t row = i % pairs / dim, column = i % dim;
    if (row >= column) continue;
    float* m = h + i / pairs * pairs;
    m[row * dim + column] = m[column * dim + row] = (m[row * dim + column] + m[column * dim + row]) / 2;
  }
}

// ---- gradients --------------------------------------------------------------------------------------------------

struct GradientsMemory {
  std::uint16_t k[kTileBytes / 2];
  std::uint16_t v[kTileBytes / 2];    // then x
  std::uint16_t d_o[kTileBytes / 2];  // then what is left of x, then M
  std::uint16_t q[kTileBytes / 2];    // then ŷ
  std::uint16_t state[kStateNumbers];
  Gates gates;
  Solutions solutions;
  Arrival tokens, states;
  alignas(8) float direct[kChunk], share[kChunk];   // s (1 − α_c), s α_c
  float key_inner[kChunk];                          // k_jᵀ H_0 k_j / η
  float arriving[kChunk], values_arriving[kChunk];  // k_jᵀ Ḡ' k_j, k_jᵀ R̄' v_j
  float state_solved[kChunk];                       // x_cᵀ H_0 ŷ_c / η
  float d_beta[kChunk], after[kChunk], before[kChunk];
};

/// dβ and dg. `pairs` holds P_jc / β_j but for the state's part of the norm; `arriving` is ζ_C (⟨Ḡ', H_0⟩ +
/// ⟨R̄', U_0⟩).
__device__ __forceinline__ void sum_pairs(const Gradients& out, const Place& place, GradientsMemory& memory, float norm,
                                          float arriving, Scores& pairs) {
  Gates& gates = memory.gates;
  {
    const Fading fading(gates);
    const auto inner = Scores::of_rows(memory.key_inner);
    const auto zeta = Scores::of_columns(gates.zeta), weight = Scores::of_columns(memory.solutions.weight);
    pairs.each([&](const At& at, float& x, float& y) {
      x -= 0.5f * weight.x[at.c] * (zeta.x[at.c] * norm) * inner.x[at.r] * fading.to_column(at, 0);
      y -= 0.5f * weight.x[at.c + 1] * (zeta.x[at.c + 1] * norm) * inner.x[at.r] * fading.to_column(at, 1);
    });
  }
  pairs.row_sums(memory.d_beta, [](const At&, float x, float y) { return x + y; });
  {
    const auto beta = Scores::of_rows(gates.beta);
    pairs.each([&](const At& at, float& x, float& y) {
      x = at.column > at.row ? x * beta.x[at.r] : 0;
      y = at.column + 1 > at.row ? y * beta.x[at.r] : 0;
    });
  }
  pairs.row_sums(memory.after, [](const At&, float x, float y) { return x + y; });
  pairs.column_sums(gates.parts, memory.before);
  sync();
  // The state's row, and the arriving column.
  each_of(kChunk, [&](int c) {
    const float zeta = gates.zeta[c], both = memory.arriving[c] + memory.values_arriving[c];
    if (c < place.len && out.d_beta.data != nullptr) {
      write(out.d_beta, place.at(out.d_beta, c), memory.d_beta[c] + gates.end[c] * both + gates.poison[c]);
    }
    float seen = zeta * norm;
#pragma unroll 8
    for (int i = 0; i < kChunk; ++i) {
      const float m = i > c ? 0 : power_of_two(gates.reach[c] - gates.reach[i]);
      seen += m * gates.beta[i] * memory.key_inner[i];
    }
    const float solved = memory.share[c] * memory.state_solved[c] + 0.5f * memory.solutions.weight[c] * seen;
    gates.state_read[c] -= zeta * norm * solved;
    memory.arriving[c] = gates.end[c] * gates.beta[c] * both;
  });
  if (out.d_log_decay.data == nullptr) return;
  // Over the tokens from the last γ = 0 to before t: P's rows less its columns, and what arrives; from t on: the
  // state's row.
  each_of(place.len, [&](int t) {
    double sum = 0;
#pragma unroll 8
    for (int c = 0; c < kChunk; ++c) {
      if (gates.forgets[c] && c <= t) sum = 0;
      const float own = c < t ? memory.after[c] - memory.before[c] + memory.arriving[c] : gates.state_read[c];
      sum += static_cast<double>(own);
    }
    write(out.d_log_decay, place.at(out.d_log_decay, t), static_cast<float>(sum) + arriving + gates.poison[t]);
  });
}

template <typename Shape>
__global__ void __launch_bounds__(kTileThreads, 2)
    gradients(const __grid_constant__ Problem p, const __grid_constant__ Gradients out, Plan plan,
              const __grid_constant__ Scratch scratch) {
  constexpr bool kWhole = Shape::kWhole;
  const std::int64_t slot = block() / p.heads, head = block() % p.heads, task = block();
  if (slot / 2 >= plan.count(p)) return;
  const Place place = place_of(plan.segments[slot / 2], static_cast<int>(slot % 2), head);
  if (place.len == 0) return;
  auto& memory = *reinterpret_cast<GradientsMemory*>(tile_memory());
  const Sides<kWhole> sides(p);
  Gates& gates = memory.gates;
  const Tile k{memory.k, kChunk}, v{memory.v, kChunk}, d_o{memory.d_o, kChunk}, q{memory.q, kChunk};
  const Tile &x = v, &x_lo = d_o, &y = q, state{memory.state, kWidth};
  const float scale = static_cast<float>(p.options.scale);
  const auto or_nothing = [](float value) { return finite(value) ? value : 0; };

  memory.tokens.init();
  memory.states.init();
  sync();
  memory.tokens.request(Piece{static_cast<KeptGates*>(&gates), scratch.gates + task, sizeof(KeptGates)},
                        Piece{&memory.solutions, scratch.solutions + task, sizeof(Solutions)},
                        Piece{memory.k, scratch.tokens + task * 4 * kChunk * kWidth, 4 * kTileBytes});
  memory.states.request(Piece{state.data, scratch.r.tile(task), kStateBytes});
  const float norm = or_nothing(scratch.h.norm[task]), u_norm = or_nothing(scratch.u.norm[task]);
  const float r_given = scratch.r_down[task], g_given = scratch.g_down[task];
  const float r_down = or_nothing(r_given), g_down = or_nothing(g_given);
  float inner = 0;  // ⟨R̄', U_0⟩ + ⟨Ḡ', H_0⟩, this thread's share
  for (int i = tile_thread(); i < kPartials; i += kTileThreads) {
    inner += scratch.r_inner[task * kPartials + i] * u_norm + scratch.g_inner[task * kPartials + i] * norm;
  }
  memory.tokens.wait(0);
  each_of(kChunk, [&](int c) {
    memory.direct[c] = scale * (1 - gates.alpha[c]);
    memory.share[c] = scale * gates.alpha[c];
    gates.bad[c] = memory.solutions.bad[c];
    if (c == 0) gates.any_bad = memory.solutions.any_bad;
  });
  gates.lose_before(~0, !finite(r_given) || !finite(g_given));
  const auto along_key = [&](const At& at, float a, float b) {
    const Pair key = k.pair(at.row, at.column);
    return key.x * a + key.y * b;
  };

  // The values' part: R̄' v_j, and (v_j·do_c) q_c.
  Scores values, pairs;
  values.multiply<Lies::by_columns>(v, d_o);
  restore<true>(values, gates.v_down, gates.o_down, gates);
  Wide sum, part;
  memory.states.wait(0);
  sum.multiply<Lies::by_columns>(v, state);
  sum.row_sums(memory.values_arriving, along_key);
  {
    const auto end = Wide::of_rows(gates.end), v_down = Wide::of_rows(gates.v_down);
    sum.each([&](const At& at, float& a, float& b) {
      const float by = end.x[at.r] * v_down.x[at.r] * r_down;
      a *= by;
      b *= by;
    });
  }
  sync();
  memory.states.request(Piece{state.data, scratch.g.tile(task), kStateBytes});
  pairs.multiply<Lies::by_columns>(k, q);
  restore<false>(pairs, gates.k_down, gates.q_down, gates);
  {
    const auto direct = Scores::of_columns(memory.direct), q_down = Scores::of_columns(gates.q_down);
    const auto left = values.as_left<false>([&](const At& at, float a, float b) -> Pair {
      return {a * (direct.x[at.c] * q_down.x[at.c]), b * (direct.x[at.c + 1] * q_down.x[at.c + 1])};
    });
    part.multiply(left, q);
    add_rows(sum, part, left.factor);
  }
  sync();
  memory.tokens.request(Piece{memory.v, scratch.solved + task * 3 * kChunk * kWidth, 3 * kTileBytes});
  memory.tokens.wait(1);

  // Pairs of tokens, M in them: (v_j·do_c)(k_j·m_c) − (k_j·x_c)(k_j·y_c), and what x_c and ŷ_c are weighted with.
  {
    Scores solved, answered;
    const auto share = Scores::of_columns(memory.share);
    solved.multiply<Lies::by_columns>(k, x);
    solved.multiply<Lies::by_columns, true>(k, x_lo);
    restore<false>(solved, gates.k_down, memory.solutions.x_down, gates);
    {
      const auto direct = Scores::of_columns(memory.direct);
      pairs.each_with(solved, [&](const At& at, float& a, float& b, float x_a, float x_b) {
        a = direct.x[at.c] * a + share.x[at.c] * x_a;
        b = direct.x[at.c + 1] * b + share.x[at.c + 1] * x_b;
      });
    }
    pairs.each_with(values, [](const At&, float& a, float& b, float v_a, float v_b) { a *= v_a, b *= v_b; });
    answered.multiply<Lies::by_columns>(k, y);
    restore<true>(answered, gates.k_down, memory.solutions.y_down, gates);
    values.each_with(answered, [](const At&, float& a, float& b, float y_a, float y_b) { a -= y_a, b -= y_b; });
    answered.each_with(solved, [&](const At& at, float& a, float& b, float x_a, float x_b) {
      a *= share.x[at.c] * x_a;
      b *= share.x[at.c + 1] * x_b;
    });
    pairs.each_with(answered, [](const At&, float& a, float& b, float both_a, float both_b) {
      a -= both_a;
      b -= both_b;
    });
    {
      const auto down = Scores::of_columns(memory.solutions.x_down);
      const auto left = values.as_left<false>([&](const At& at, float a, float b) -> Pair {
        return {a * (share.x[at.c] * down.x[at.c]), b * (share.x[at.c + 1] * down.x[at.c + 1])};
      });
      part.multiply(left, x);
      add_rows(sum, part, left.factor);
    }
    const Fading fading(gates);
    const auto down = Scores::of_columns(memory.solutions.y_down);
    const auto left = solved.as_left<false>([&](const At& at, float a, float b) -> Pair {
      return {-a * fading.to_column(at, 0) * (share.x[at.c] * down.x[at.c]),
              -b * fading.to_column(at, 1) * (share.x[at.c + 1] * down.x[at.c + 1])};
    });
    part.multiply(left, y);
    add_rows(sum, part, left.factor);
  }
  const auto add_faded = [&](const float* rows, float by) {
    auto factor = Wide::of_rows(rows);
    const auto down = Wide::of_rows(gates.k_down);
    for (int i = 0; i < static_cast<int>(sizeof(factor.x) / sizeof(float)); ++i) factor.x[i] *= down.x[i] * by;
    add_rows(sum, part, factor.x);
  };

  // What arrives: Ḡ' k_j.
  memory.states.wait(1);
  part.multiply<Lies::by_columns>(k, state);
  part.row_sums(memory.arriving, along_key);
  add_faded(gates.end, 2 * g_down);
  sync();
  memory.states.request(Piece{state.data, scratch.h.tile(task), kStateBytes});

  // The nested term between tokens, and its share of the pairs.
  {
    Scores products, fadings;
    products.multiply<Lies::by_columns>(k, k);
    restore<false>(products, gates.k_down, gates.k_down, gates);
    const Fading fading(gates);
    const auto beta = Scores::of_columns(gates.beta), k_down = Scores::of_columns(gates.k_down);
    const auto row_weight = Scores::of_rows(memory.solutions.reach);
    const auto column_weight = Scores::of_columns(memory.solutions.reach);
    const auto left = products.as_left<false>([&](const At& at, float a, float b) -> Pair {
      const auto by = [&](int e) {
        const bool later = at.row > at.column + e;
        const float nested =
            later ? fading.to_row(at, e) * row_weight.x[at.r] : fading.to_column(at, e) * column_weight.x[at.c + e];
        return -nested * (beta.x[at.c + e] * k_down.x[at.c + e]);
      };
      return {a * by(0), b * by(1)};
    });
    part.multiply(left, k);
    add_rows(sum, part, left.factor);
    fadings.each([&](const At& at, float& a, float& b) {
      a = fading.to_column(at, 0);
      b = fading.to_column(at, 1);
    });
    fadings.store({memory.d_o, kChunk}, 1);
    const auto squares = products.as_left<false>(
        [&](const At& at, float a, float b) -> Pair { return {a * a * beta.x[at.c], b * b * beta.x[at.c + 1]}; });
    publish();
    sync();
    products.multiply(squares, {memory.d_o, kChunk});
    const auto weight = Scores::of_columns(memory.solutions.weight);
    pairs.each_with(products, [&](const At& at, float& a, float& b, float seen_a, float seen_b) {
      a -= 0.5f * weight.x[at.c] * squares.factor[at.r] * seen_a * fading.to_column(at, 0);
      b -= 0.5f * weight.x[at.c + 1] * squares.factor[at.r] * seen_b * fading.to_column(at, 1);
    });
  }
  // With the state before the chunk.
  each_of(kChunk, [&](int c) { memory.solutions.reach[c] *= gates.zeta[c]; });
  memory.states.wait(0);
  part.multiply<Lies::by_columns>(k, state);
  part.row_sums(memory.key_inner, along_key);
  add_faded(memory.solutions.reach, -norm);
  {
    const Out<Shape> to(out.d_k, place);
    const auto beta = Wide::of_rows(gates.beta), poison = Wide::of_rows(gates.poison);
    sum.each([&](const At& at, float a, float b) {
      if (to.data == nullptr || at.row >= place.len || !(kWhole || at.column < sides.dim)) return;
      to.put(at.row, at.column, beta.x[at.r] * a + poison.x[at.r], beta.x[at.r] * b + poison.x[at.r]);
    });
  }
  part.multiply<Lies::by_columns>(x, state);
  part.row_sums(memory.state_solved, [&](const At& at, float a, float b) {
    const Pair other = y.pair(at.row, at.column);
    return other.x * a + other.y * b;
  });
  sync();
  each_of(kChunk, [&](int c) {
    const float key = gates.k_down[c];
    memory.key_inner[c] *= key * key;
    memory.arriving[c] *= key * key * g_down;
    memory.values_arriving[c] *= key * gates.v_down[c] * r_down;
    memory.state_solved[c] *= memory.solutions.x_down[c] * memory.solutions.y_down[c];
  });
  const float arriving = faded(sum_of_threads(inner, gates.parts), gates.zeta[kChunk - 1]);
  sync();
  sum_pairs(out, place, memory, norm, arriving, pairs);
}

// ---- On the host ------------------------------------------------------------------------------------------------

inline States room_for_states(const Device& device, std::int64_t tasks) {
  return {.tiles = allocate<std::uint16_t>(device, tasks * kStateNumbers),
          .down = allocate<float>(device, tasks),
          .top = allocate<float>(device, tasks)};
}

/// Queues the carrying of one gradient.
template <bool kKeys>
void start_carry_back(const Problem& p, const Plan& plan, const Device& device, const float* zeta, CarryBack c,
                      float* largest) {
  const std::int64_t states = p.sequences * p.heads;
  c.largest = largest;
  if (c.start != nullptr) {
    launch_tiles(find_largest, states, 1024, device.stream, static_cast<std::int64_t>(c.rows) * c.columns, c.start,
                 largest);
  }
  launch_tiles(carry_back<kKeys>, states * (kStateNumbers / 8 / kTileThreads), 0, device.stream, p, plan, zeta, c);
}

/// Queues a backward pass. `scratch` has H and U already; solve(right, y) queues the solve of
/// (H_c + λ_c I) ŷ_c = right_c for all tokens.
template <typename Shape, typename Solve>
void run(const Problem& p, const Saved& saved, const Gradients& out, const Plan& plan, const Device& device,
         Scratch scratch, Solve&& solve) {
  const std::int64_t segments = segments_of(p), tasks = 2 * segments * p.heads, tokens = p.batch * p.tokens * p.heads;
  const int dim = static_cast<int>(p.key_dim), values = static_cast<int>(p.value_dim);
  scratch.udo = allocate<float>(device, tokens * p.key_dim);
  scratch.y = allocate<float>(device, tokens * p.key_dim);
  scratch.tokens = allocate<std::uint16_t>(device, tasks * 4 * kChunk * kWidth);
  scratch.gates = allocate<KeptGates>(device, tasks);
  scratch.solved = allocate<std::uint16_t>(device, tasks * 3 * kChunk * kWidth);
  scratch.solutions = allocate<Solutions>(device, tasks);
  scratch.g_inner = allocate<float>(device, tasks * kPartials);
  scratch.r_inner = allocate<float>(device, tasks * kPartials);
  scratch.zeta = allocate<float>(device, tasks);
  scratch.of_h = allocate<float>(device, tasks);
  scratch.g = room_for_states(device, tasks);
  scratch.r = room_for_states(device, tasks);
  scratch.g_down = allocate<float>(device, tasks);
  scratch.r_down = allocate<float>(device, tasks);
  float* const largest = allocate<float>(device, p.sequences * p.heads);

  launch_tiles(answers<Shape>, tasks, sizeof(AnswersMemory), device.stream, p, saved, out, plan, scratch);
  start_carry_back<false>(p, plan, device, scratch.zeta,
                          {.parts = scratch.r,
                           .down = scratch.r_down,
                           .start = static_cast<const float*>(out.d_u),
                           .last = static_cast<float*>(out.d_u0),
                           .rows = dim,
                           .columns = values,
                           .states = scratch.u,
                           .inner = scratch.r_inner},
                          largest);
  solve(scratch.udo, scratch.y);
  launch_tiles(keys<Shape>, tasks, sizeof(KeysMemory), device.stream, p, saved, out, plan, scratch);
  start_carry_back<true>(p, plan, device, scratch.zeta,
                         {.parts = scratch.g,
                          .down = scratch.g_down,
                          .start = static_cast<const float*>(out.d_h),
                          .last = static_cast<float*>(out.d_h0),
                          .rows = dim,
                          .columns = dim,
                          .states = scratch.h,
                          .inner = scratch.g_inner,
                          .of_h = scratch.of_h},
                         largest);
  if (out.d_h0 != nullptr) {
    const std::int64_t numbers = p.sequences * p.heads * dim * dim;
    launch_tiles(make_symmetric, least<std::int64_t>((numbers + kTileThreads - 1) / kTileThreads, 1 << 16), 0,
                 device.stream, p.sequences * p.heads, dim, static_cast<float*>(out.d_h0));
  }
  launch_tiles(gradients<Shape>, tasks, sizeof(GradientsMemory), device.stream, p, out, plan, scratch);
}

}  // namespace gka::kernels::cuda::hopper::passes
