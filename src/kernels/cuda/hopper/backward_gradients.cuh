// gradients: dk, dβ and dg from the chunk itself and from what arrives.
#pragma once

#include "kernels/cuda/hopper/backward_shared.cuh"

namespace gka::kernels::cuda::hopper::passes {

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

}  // namespace gka::kernels::cuda::hopper::passes
