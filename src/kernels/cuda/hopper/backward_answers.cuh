// answers: U_c do_c, which is the solve's right-hand side, and the chunk's own part of the gradient of U_0.
#pragma once

#include "kernels/cuda/hopper/backward_shared.cuh"

namespace gka::kernels::cuda::hopper::passes {

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

}  // namespace gka::kernels::cuda::hopper::passes
