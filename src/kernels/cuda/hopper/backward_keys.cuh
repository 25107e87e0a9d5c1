// keys: dq, dα, dv, and the chunk's own part of the gradient of H_0.
#pragma once

#include "kernels/cuda/hopper/backward_shared.cuh"

namespace gka::kernels::cuda::hopper::passes {

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

}  // namespace gka::kernels::cuda::hopper::passes
