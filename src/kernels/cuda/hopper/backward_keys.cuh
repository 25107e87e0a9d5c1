// keys: dq, dα, scores between keys and solutions, and the chunk's own part of the gradient of H_0. Two warpgroups have
// a chunk.
#pragma once

#include "kernels/cuda/hopper/backward_shared.cuh"

namespace gka::kernels::cuda::hopper::passes {

struct KeysMemory {
  std::uint16_t k[kTileBytes / 2];
  std::uint16_t x[kTileBytes / 2];
  std::uint16_t y[kTileBytes / 2];     // then, together with
  std::uint16_t x_lo[kTileBytes / 2];  // this one, then weighted keys, the own part of the gradient of H_0
  Gates gates;
  Arrival arrival;
  Solutions solutions;
  alignas(8) float of_y[kChunk], of_k[kChunk];
};

/// dq, dα, the weights w, and the tiles of x and ŷ.
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
  const std::uint16_t* const udo_tile = scratch.udo_tiles + block() * kChunk * kWidth;
  const bool wide = scratch.takes_float32(block());
  const Out<Shape> d_q(out.d_q, place);
  struct Loaded {
    Unit q;
    Eight x, y, udo;
  };
  sweep_rows<2, 2, 2, kTeams>(
      [&](int c, int u) {
        const int i = 8 * u, len = place.len;
        return Loaded{read_row<kWhole>(q, c, i, len, sides.dim), read_row<kWhole>(solved, c, i, len, sides.dim),
                      read_row<kWhole>(answered, c, i, len, sides.dim),
                      wide ? read_row<kWhole>(udo, c, i, len, sides.dim)
                           : unpack<DType::float16>(read_unit(udo_tile + Tile::place(kChunk, c, i)))};
      },
      [&](int c, int, Loaded& from, auto& of) {
        memory.arrival.wait(0);
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
          const float direct = (1 - alpha) * gates.udo_down[c];
          Eight d;
#pragma unroll
          for (int e = 0; e < 8; ++e) d.x[e] = scale * (alpha * from.y.x[e] + direct * from.udo.x[e]) + lost;
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
          write(out.d_alpha, place.at(out.d_alpha, c), scale * gates.udo_down[c] * of.sum[1] + lost);
        }
      });
}

template <typename Shape>
__global__ void __launch_bounds__(kTeams* kTileThreads, 2)
    keys(const __grid_constant__ Problem p, const __grid_constant__ Saved saved, const __grid_constant__ Gradients out,
         Plan plan, const __grid_constant__ Scratch scratch) {
  const std::int64_t slot = block() / p.heads, head = block() % p.heads, task = block();
  if (slot / 2 >= plan.count(p)) return;
  const Place place = place_of(plan.segments[slot / 2], static_cast<int>(slot % 2), head);
  if (place.len == 0) return;
  auto& memory = *reinterpret_cast<KeysMemory*>(tile_memory());
  Gates& gates = memory.gates;
  Solutions& solutions = memory.solutions;
  const Tile k{memory.k, kChunk}, x{memory.x, kChunk}, weighted{memory.x_lo, kChunk}, y{memory.y, kChunk};
  const Tile x_lo = weighted, own_state{memory.y, kWidth};
  const float scale = static_cast<float>(p.options.scale);

  memory.arrival.init();
  sync();
  memory.arrival.request(Piece{static_cast<KeptGates*>(&gates), scratch.gates + task, sizeof(KeptGates)},
                         Piece{memory.k, scratch.packed(task, 0), kTileBytes});
  read_solutions<Shape>(p, saved, out, scratch, place, memory);
  publish();
  sync();
  std::uint16_t* solved = scratch.solved + task * 3 * kChunk * kWidth;
  send_tile(solved, memory.x, 2 * kTileBytes);
  decayed_sums<true, 2>(
      gates.reach, [&](int c) { return solutions.weight[c]; },
      [&](int j, float total) {
        solutions.reach[j] = total;
        solutions.bad[j] = gates.bad[j];
        if (j == 0) solutions.any_bad = gates.any_bad;
      });
  {
    SharedScores scores;
    scores.multiply<Lies::by_columns>(k, x);
    scores.multiply<Lies::by_columns, true>(k, x_lo);
    scores.save(reinterpret_cast<float*>(solved + 2 * kChunk * kWidth));
  }
  sync();
  keep(scratch.solutions[task], solutions);
  // Both orders of x and y, then the nested term.
  each_of(kChunk, [&](int c) {
    const float key = gates.k_down[c];
    memory.of_y[c] = -0.5f * gates.zeta[c] * gates.alpha[c] * scale * solutions.x_down[c] * solutions.y_down[c];
    memory.of_k[c] = -0.5f * gates.beta[c] * gates.zeta[c] * solutions.reach[c] * key * key;
  });
  float* weights[] = {memory.of_y, memory.of_k};
  const float down = normalise(weights);
  wait_until_sent();
  sync();
  weigh_rows<kTeams>(y, y, memory.of_y);
  weigh_rows<kTeams>(weighted, k, memory.of_k);
  publish();
  sync();
  SharedSquare own;
  own.outer<false>(x, y);
  own.outer<true>(y, x);
  own.outer<true>(weighted, k);
  if (tile_thread() == 0) {
    const float norm = scratch.h.norm[task];
    scratch.of_h[task] = finite(norm) ? faded(-0.5f * solutions.reach[0] * norm, gates.zeta[0] * gates.zeta[0]) : 0;
  }
  send_state(own, down, own_state, scratch.g, task, gates.spoils_start(kBadKey | kBadQuery | kBadSolved), gates);
  finish_sending();
}

}  // namespace gka::kernels::cuda::hopper::passes
