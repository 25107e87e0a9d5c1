// bwd_dkdv: dk, dv, dβ and dg from the chunk itself and from what arrives. Warpgroups share a chunk, each with 64
// of D columns of every product. What is not obvious: masked scores become left operands by way of shared memory, in
// float16 times a power of two for their row that is known before they are, from bounds; so all that dk_j takes from
// tokens is added up in the tensor cores.
#pragma once

#include "kernels/cuda/hopper/bwd_shared.cuh"

namespace gka::kernels::cuda::hopper::bwd {

/// Of wide heads: where slices of R̄', H_0 and Ḡ' arrive, in place of do and q; sums for which the gates have no room.
template <int D, bool = kInSlices<D>>
struct alignas(1024) DkDvSlices {
  SliceRing<D> ring;
  float h_share[kStateBlocks<D>];
  float pair_sums[2][kSumParts<D> * kChunk];
};
template <int D>
struct DkDvSlices<D, false> {};

template <int D>
struct DkDvShared : DkDvSlices<D> {
  static constexpr int kLeft = kChunk * kChunk;  // numbers of a left operand
  static constexpr int kQueries = kTileNumbers<D> > 2 * kLeft ? kTileNumbers<D> : 2 * kLeft;
  static constexpr int kSums = kSumParts<D> * kChunk;
  std::uint16_t k[kTileNumbers<D>];
  std::uint16_t v[kTileNumbers<D>];
  std::uint16_t d_o[kTileNumbers<D>], q[kQueries];       // q then two left operands; from d_o on: R̄', then H_0
  std::uint16_t x[kTileNumbers<D>], y[kTileNumbers<D>];  // then, from x on, Ḡ'
  std::uint16_t left[kLeft];
  TokenGates gates;
  Solutions solutions;
  BulkBarrier tokens, states;
  alignas(8) float of_q[kChunk], of_x[kChunk];     // what rows of q and x are to be multiplied by, with s (1 − α), s α
  float up_k[kChunk], up_v[kChunk], up_s[kChunk];  // powers of two for rows of left operands of dk, dv and squares
  float key_inner[kSums];                          // k_jᵀ H_0 k_j / η
  float arriving[kSums], values_arriving[kSums];   // k_jᵀ Ḡ' k_j, k_jᵀ R̄' v_j
  float state_solved[kSums];                       // x_cᵀ H_0 ŷ_c / η
  // Of the chunk:
  Place place;
  float h_norm, r_down, g_down;  // 0 for what is lost
  float inner;                   // ⟨R̄', U_0⟩ + ⟨Ḡ', H_0⟩
  bool values_lost, keys_lost;   // R̄', or one of R̄' and Ḡ'

  // In room that the gates no longer need: the last token with γ = 0 up to c, or −1; Σ_{c > j} P_jc; Σ_c P_jc / β_j.
  __device__ float* since() { return reinterpret_cast<float*>(gates.sums); }
  __device__ float* after() {
    if constexpr (kInSlices<D>) return this->pair_sums[0];
    return since() + kChunk;
  }
  __device__ float* d_beta() {
    if constexpr (kInSlices<D>) return this->pair_sums[1];
    return gates.udo_down;
  }
  __device__ float* still_read() { return up_s; }  // Σ_{c ≥ j} M_jc ζ_c w_c
};

/// Numbers of the two columns of a place. Read where they are needed: registers are what this kernel is short of.
__device__ __forceinline__ Pair columns(const float* values, const At& at) {
  return *reinterpret_cast<const Pair*>(values + at.column);
}
/// M_jc there, 0 where the row is the later token; `between`: whichever is later.
template <int D>
struct SharedFading {
  const float* reach;
  typename SharedScores<D>::OfRows row;

  __device__ explicit SharedFading(const TokenGates& gates)
      : reach(gates.reach), row(SharedScores<D>::of_rows(gates.reach)) {}
  __device__ __forceinline__ Pair between(const At& at) const {
    const Pair column = columns(reach, at);
    const auto fade = [&](float x) { return power_of_two(-bits_to_float(size_bits(row.x[at.r] - x))); };
    return {fade(column.x), fade(column.y)};
  }
  __device__ __forceinline__ Pair to_column(const At& at) const {
    const Pair fade = between(at);
    return {at.column < at.row ? 0 : fade.x, at.column + 1 < at.row ? 0 : fade.y};
  }
};

/// Blocks on a multiprocessor.
template <int D>
inline constexpr int kDkDvBlocks = by_size<D>(3, 3, 2, 1);
static_assert((sizeof(DkDvShared<32>) + 1024) * kDkDvBlocks<32> <= 228 * 1024);
static_assert((sizeof(DkDvShared<64>) + 1024) * kDkDvBlocks<64> <= 228 * 1024);
static_assert((sizeof(DkDvShared<128>) + 1024) * kDkDvBlocks<128> <= 228 * 1024);
static_assert(sizeof(DkDvShared<256>) + 1024 <= 228 * 1024);

/// 2^n for a whole number n.
__device__ __forceinline__ float exactly_two_to(float n) {
  const int exponent = static_cast<int>(min(max(n, -120.0f), 120.0f));
  return bits_to_float(static_cast<std::uint32_t>(exponent + 127) << 23);
}

/// of_q, of_x, and up_k, up_v and up_s. A row of a tile has numbers below 2, so products of two rows are below 2⁹; with
/// at most three terms in a number, everything stays below 2¹⁵.
template <int D>
__device__ __forceinline__ void bound_rows(DkDvShared<D>& memory, float scale) {
  constexpr float kFar = 1024;  // beyond all logarithms
  TokenGates& gates = memory.gates;
  const Solutions& solutions = memory.solutions;
  float *since = memory.since(), *read = gates.parts, *solved = read + kChunk, *nested = solved + kChunk,
        *written = nested + kChunk;
  float* const largest[] = {read, solved, nested, written, memory.up_s};
  const std::uint64_t forgets = marked_tokens(gates.forgets);
  const auto of_q = [&](int c) { return scale * (1 - gates.alpha[c]) * gates.q_down[c]; };
  const auto of_x = [&](int c) { return scale * gates.alpha[c] * solutions.x_down[c]; };
  running_largest<5, kTeams<D>>(
      [&](int i) { return i < 2 || i == 4; },  // from the last token down: read, solved, up_s
      [&](int i, int c) {
        const float reach = gates.reach[c], key = logarithm(gates.beta[c]) + 2 * logarithm(gates.k_down[c]);
        if (i == 0) return reach + logarithm(gates.o_down[c]) + max(logarithm(of_q(c)), logarithm(of_x(c)));
        if (i == 1) {
          return reach + max(logarithm(of_x(c)) + logarithm(solutions.y_down[c]), logarithm(solutions.reach[c]) + key);
        }
        return i == 2 ? key - reach : key + (i == 3 ? kFar : -kFar) * last_marked(forgets, c);
      },
      [&](int i, int c, float value) { largest[i][c] = value; });
  for (int c = tile_thread(); c < kChunk; c += kTileThreads) {
    since[c] = last_marked(forgets, c);
    memory.of_q[c] = of_q(c);
    memory.of_x[c] = of_x(c);
    for (int part = 0; part < kSumParts<D>; ++part) {
      const int at = part * kChunk + c;
      memory.key_inner[at] = memory.arriving[at] = memory.values_arriving[at] = memory.state_solved[at] = 0;
      memory.d_beta()[at] = memory.after()[at] = 0;
    }
    gates.poison[c] = 0;
    gates.bad[c] = solutions.bad[c];
    if (c == 0) gates.any_bad = solutions.any_bad, gates.any_poison = 0;
  }
  sync();
  each_of(kChunk, [&](int j) {
    const float reach = gates.reach[j], key = logarithm(gates.k_down[j]), value = logarithm(gates.v_down[j]);
    const float outer = max(read[j] - reach, logarithm(gates.end[j]) + logarithm(memory.r_down));
    const float inner = max(solved[j] - reach, nested[j] + reach + logarithm(solutions.reach[j]));
    const float squares = max(written[j] - kFar * since[j], memory.up_s[j] + kFar * since[j]);
    memory.up_k[j] = exactly_two_to(3 - std::ceil(max(value + outer, key + inner)));
    memory.up_v[j] = exactly_two_to(3 - std::ceil(key + outer));
    memory.up_s[j] = exactly_two_to(-4 - std::ceil(squares));
  });
}

/// dβ and dg, from sums over rows and columns of P. What arrives is ζ_C (⟨Ḡ', H_0⟩ + ⟨R̄', U_0⟩) for all tokens.
template <int D>
__device__ __forceinline__ void sum_pairs(const Gradients& out, DkDvShared<D>& memory, float scale) {
  TokenGates& gates = memory.gates;
  const Place& place = memory.place;
  const float norm = memory.h_norm, arriving = faded(memory.inner, gates.zeta[kChunk - 1]);
  const float* since = memory.since();
  float* own = memory.up_k;
  // The state's row, and the arriving column.
  decayed_sums<false, 1>(
      gates.reach, [&](int i) { return gates.beta[i] * memory.key_inner[i]; },
      [&](int c, float seen) {
        const float zeta = gates.zeta[c], both = memory.arriving[c] + memory.values_arriving[c];
        const float weight = memory.solutions.weight[c], written = gates.beta[c] * memory.key_inner[c];
        // Pairs of tokens have a part with the state between them: −½ ‖H_0‖ w_c M_jc ζ_c (k_jᵀ H_0 k_j / ‖H_0‖).
        const float nested = 0.5f * norm, still_read = memory.still_read()[c];
        if (c < place.len && out.d_beta.data != nullptr) {
          write(out.d_beta, place.at(out.d_beta, c),
                memory.d_beta()[c] - nested * memory.key_inner[c] * still_read + gates.end[c] * both + gates.poison[c]);
        }
        const float row = memory.after()[c] - nested * written * (still_read - weight * zeta);
        const float column = memory.of_q[c] - nested * weight * zeta * (seen - written);
        const float solved = scale * gates.alpha[c] * memory.state_solved[c] + 0.5f * weight * (zeta * norm + seen);
        gates.state_read[c] -= zeta * norm * solved;
        own[c] = row - column + gates.end[c] * gates.beta[c] * both;
      });
  if (out.d_log_decay.data == nullptr) return;
  sync();
  // Over the tokens from the last γ = 0 to before t: P's rows less its columns, and what arrives; from t on: the
  // state's row.
  sum_over_tokens<double, kTeams<D>>(
      place.len,
      [&](int t, int c) {
        const float before = static_cast<float>(c) >= since[t] ? own[c] : 0;
        return static_cast<double>(c < t ? before : gates.state_read[c]);
      },
      [&](int t, double sum) {
        write(out.d_log_decay, place.at(out.d_log_decay, t), static_cast<float>(sum) + arriving + gates.poison[t]);
      });
}

/// The tiles of DkDvShared under the names they have in turn.
struct DkDvTiles {
  Tile k, v, d_o, q, x, y;
  Tile state, last_state;     // R̄' and then H_0; Ḡ'
  Tile left, left_x, left_y;  // left operands
  Tile squares, fadings;      // the last two once more

  template <int D>
  __device__ __forceinline__ explicit DkDvTiles(DkDvShared<D>& memory)
      : k(tile_of<D>(memory.k)),
        v(tile_of<D>(memory.v)),
        d_o(tile_of<D>(memory.d_o)),
        q(tile_of<D>(memory.q)),
        x(tile_of<D>(memory.x)),
        y(tile_of<D>(memory.y)),
        state(tile_of<D>(memory.d_o, D)),
        last_state(tile_of<D>(memory.x, D)),
        left{memory.left, kChunk},
        left_x{memory.q, kChunk},
        left_y{memory.q + memory.kLeft, kChunk},
        squares{left_x},
        fadings{left_y} {}
};

/// Asks for what earlier kernels left of the chunk.
template <int D>
__device__ __forceinline__ void request_chunk(const Scratch<D>& scratch, std::int64_t task, DkDvShared<D>& memory) {
  memory.tokens.init();
  memory.states.init();
  if constexpr (kInSlices<D>) memory.ring.init();
  memory.tokens.request(BulkCopy{static_cast<KeptGates*>(&memory.gates), scratch.gates + task, sizeof(KeptGates)},
                        BulkCopy{&memory.solutions, scratch.solutions + task, sizeof(Solutions)},
                        BulkCopy{memory.k, scratch.packed(task, 0), kTileBytes<D>},
                        BulkCopy{memory.q, scratch.q_tiles + task * kTileNumbers<D>, kTileBytes<D>},
                        BulkCopy{memory.x, scratch.x_tiles + task * kTileNumbers<D>, kTileBytes<D>},
                        BulkCopy{memory.y, scratch.y_tiles + task * kTileNumbers<D>, kTileBytes<D>});
}

/// The chunk's place and scales, by one warp: not the one that asks for the tiles.
template <int D, bool kValues>
__device__ __forceinline__ void read_numbers(const Scratch<D>& scratch, std::int64_t task, const Place& place,
                                             DkDvShared<D>& memory) {
  constexpr int kParts = kPartials<D>;
  if (tile_thread() < kTeams<D> * kTileThreads - kLanes) return;
  const auto or_nothing = [](float value) { return finite(value) ? value : 0; };
  const float h_norm = or_nothing(scratch.h.norm[task]), u_norm = kValues ? or_nothing(scratch.u.norm[task]) : 0;
  const float r_down = kValues ? scratch.r_down[task] : 0, g_down = scratch.g_down[task];
  float inner = 0;
#pragma unroll
  for (int i = tile_thread() % kLanes; i < kParts; i += kLanes) {
    const bool symmetric = D == 128 && i / (kParts / 4) == 1;  // of H's only three quarters are there
    if constexpr (kValues) inner += scratch.r_inner[task * kParts + i] * u_norm;
    inner += symmetric ? 0 : scratch.g_inner[task * kParts + i] * h_norm;
  }
  inner = sum_lanes(inner);
  if constexpr (kInSlices<D>) {
    const int block = tile_thread() % kLanes;
    if (block < kStateBlocks<D>) memory.h_share[block] = scratch.h.share[task * kStateBlocks<D> + block];
  }
  if (tile_thread() % kLanes == 0) {
    memory.place = place;
    memory.h_norm = h_norm;
    memory.r_down = or_nothing(r_down);
    memory.g_down = or_nothing(g_down);
    memory.inner = inner;
    memory.values_lost = !finite(r_down);
    memory.keys_lost = !finite(r_down) || !finite(g_down);
  }
}

/// v and do as float16 tiles, times the inverse of what their rows are to be multiplied by; rows that are not finite 0.
template <int D, DType kType>
__device__ __forceinline__ void settle_values(const Tile& v, const Tile& d_o, DkDvShared<D>& memory) {
  const TokenGates& gates = memory.gates;
  const Solutions& solutions = memory.solutions;
  weigh_rows<D, kTeams<D>, kType>(v, v, [&](int c) { return inverse_of_power(gates.v_down[c]); });
  weigh_rows<D, kTeams<D>, kType>(d_o, d_o, [&](int c) { return inverse_of_power(gates.o_down[c]); });
  if (solutions.any_bad) {
    sweep_units<D, kTeams<D>>([&](int c, int) { return solutions.bad[c]; },
                              [&](int c, int u, int bad) {
                                if (bad & kBadValue) v.put(c, u, Unit{});
                                if (bad & kBadOutput) d_o.put(c, u, Unit{});
                              });
  }
}

/// What q_c is weighted with in dk_j: v_j·do_c, of which `values` becomes the whole.
template <int D>
__device__ __forceinline__ void weigh_queries(const Tile& left, SharedScores<D>& values, DkDvShared<D>& memory) {
  using Pairs = SharedScores<D>;
  const TokenGates& gates = memory.gates;
  const auto v_down = Pairs::of_rows(gates.v_down), up = Pairs::of_rows(memory.up_k);
  const SharedFading<D> fading(gates);
  Pairs::put({left}, [&](const At& at, int i, Pair(&to)[1]) {
    const Pair m = fading.to_column(at), of_o = columns(gates.o_down, at), of_q = columns(memory.of_q, at);
    values[i] *= v_down.x[at.r] * of_o.x;
    values[i + 1] *= v_down.x[at.r] * of_o.y;
    to[0] = {values[i] * m.x * (of_q.x * up.x[at.r]), values[i + 1] * m.y * (of_q.y * up.x[at.r])};
  });
}

/// k_j·m_c, which dv takes. Pairs of tokens, in `queries`: (v_j·do_c)(k_j·m_c) − (k_j·x_c)(k_j·y_c), M in them. What
/// x_c and ŷ_c are weighted with in dk.
template <int D>
__device__ __forceinline__ void weigh_solutions(const DkDvTiles& tiles, SharedScores<D>& values,
                                                SharedScores<D>& queries, SharedScores<D>& answered,
                                                const typename SharedScores<D>::Saved& solved, DkDvShared<D>& memory) {
  using Pairs = SharedScores<D>;
  const TokenGates& gates = memory.gates;
  const Solutions& solutions = memory.solutions;
  const auto k_down = Pairs::of_rows(gates.k_down), up = Pairs::of_rows(memory.up_k),
             up_v = Pairs::of_rows(memory.up_v);
  const SharedFading<D> fading(gates);
  Pairs::put({tiles.left, tiles.left_x, tiles.left_y}, [&](const At& at, int i, Pair(&to)[3]) {
    const Pair fade = fading.to_column(at), of_o = columns(gates.o_down, at), of_q = columns(memory.of_q, at),
               of_x = columns(memory.of_x, at), of_y = columns(solutions.y_down, at);
    const float key = k_down.x[at.r], unit = up.x[at.r], unit_v = key * up_v.x[at.r];
    const Pair along_x = solved.pair(i);
    const auto weigh = [&](int e, float m, float by_o, float by_q, float by_x, float by_y, float& of_v, float& of_kx,
                           float& of_ky) {
      const float of_solved = by_x * (e == 0 ? along_x.x : along_x.y), mixed = by_q * queries[i + e] + of_solved;
      const float read = values[i + e], of_answer = key * (by_y * answered[i + e]);
      queries[i + e] = key * m * (mixed * read - of_solved * of_answer);
      of_v = mixed * m * (by_o * unit_v);
      of_kx = (read - of_answer) * (m * by_x * unit);
      of_ky = of_solved * (-m * by_y * (key * unit));
    };
    weigh(0, fade.x, of_o.x, of_q.x, of_x.x, of_y.x, to[0].x, to[1].x, to[2].x);
    weigh(1, fade.y, of_o.y, of_q.y, of_x.y, of_y.y, to[0].y, to[1].y, to[2].y);
  });
}

/// The nested term between tokens; for its share of the pairs Σ_i (k_i·k_j)² M_ic β_i.
template <int D>
__device__ __forceinline__ void weigh_keys(const DkDvTiles& tiles, SharedScores<D>& products, DkDvShared<D>& memory) {
  using Pairs = SharedScores<D>;
  const TokenGates& gates = memory.gates;
  const Solutions& solutions = memory.solutions;
  const auto row_down = Pairs::of_rows(gates.k_down), row_weight = Pairs::of_rows(solutions.reach),
             up = Pairs::of_rows(memory.up_k), up_squares = Pairs::of_rows(memory.up_s);
  const SharedFading<D> fading(gates);
  Pairs::put({tiles.left, tiles.squares, tiles.fadings}, [&](const At& at, int i, Pair(&to)[3]) {
    const Pair fade = fading.between(at), beta = columns(gates.beta, at), down = columns(gates.k_down, at),
               column_weight = columns(solutions.reach, at);
    const float row = row_down.x[at.r] * up.x[at.r];
    const auto weigh = [&](int e, float m, float written, float weight, float& of_k, float& square, float& faded) {
      const float score = products[i + e];
      of_k = -score * (m * (at.row > at.column + e ? row_weight.x[at.r] : weight)) * (written * row);
      square = m == 0 ? 0 : score * score * (written * up_squares.x[at.r]);
      faded = at.row >= at.column + e ? m : 0;
    };
    weigh(0, fade.x, beta.x * down.x * down.x, column_weight.x, to[0].x, to[1].x, to[2].x);
    weigh(1, fade.y, beta.y * down.y * down.y, column_weight.y, to[0].y, to[1].y, to[2].y);
  });
}

/// P less its nested part, of which `products` is one factor; its sums over rows and columns.
template <int D>
__device__ __forceinline__ void sum_scores(SharedScores<D>& queries, const SharedScores<D>& products,
                                           DkDvShared<D>& memory) {
  using Pairs = SharedScores<D>;
  TokenGates& gates = memory.gates;
  const Solutions& solutions = memory.solutions;
  {
    const auto row_down = Pairs::of_rows(gates.k_down), up_squares = Pairs::of_rows(memory.up_s);
    const SharedFading<D> fading(gates);
    queries.each_with(products, [&](const At& at, float& a, float& b, float seen_a, float seen_b) {
      const Pair m = fading.to_column(at), weight = columns(solutions.weight, at);
      const float by = 0.5f * row_down.x[at.r] * row_down.x[at.r] * inverse_of_power(up_squares.x[at.r]);
      a -= weight.x * m.x * (by * seen_a);
      b -= weight.y * m.y * (by * seen_b);
    });
  }
  queries.row_sums(memory.d_beta(), [](const At&, float a, float b) { return a + b; });
  {
    const auto beta = Pairs::of_rows(gates.beta);
    queries.each([&](const At& at, float& a, float& b) {
      a = at.column > at.row ? a * beta.x[at.r] : 0;
      b = at.column + 1 > at.row ? b * beta.x[at.r] : 0;
    });
  }
  queries.row_sums(memory.after(), [](const At&, float a, float b) { return a + b; });
  queries.column_sums(gates.parts, memory.of_q);
  decayed_sums<true, 1>(
      gates.reach, [&](int c) { return solutions.weight[c] * gates.zeta[c]; },
      [&](int j, float total) { memory.still_read()[j] = total; });
}

/// to += by · fades ⊙ rows ⊙ up ⊙ part, row by row.
template <typename Rows>
__device__ __forceinline__ void add_state(Rows& to, const Rows& part, const float* rows, const float* fades,
                                          const float* up, float by) {
  const auto row = Rows::of_rows(rows), fade = Rows::of_rows(fades), unit = Rows::of_rows(up);
  float factor[sizeof(row.x) / sizeof(float)];
#pragma unroll
  for (int r = 0; r < static_cast<int>(sizeof(row.x) / sizeof(float)); ++r) {
    factor[r] = by * fade.x[r] * row.x[r] * unit.x[r];
  }
  add_rows(to, part, factor);
}

template <typename Shape>
__device__ __forceinline__ void write_dv(SharedWide<Shape::kSize>& d_v, const View& view, int columns,
                                         DkDvShared<Shape::kSize>& memory) {
  using Rows = SharedWide<Shape::kSize>;
  const TokenGates& gates = memory.gates;
  const auto beta = Rows::of_rows(gates.beta), poison = Rows::of_rows(gates.poison), up = Rows::of_rows(memory.up_v);
  d_v.each([&](const At& at, float& a, float& b) {
    const float by = beta.x[at.r] * inverse_of_power(up.x[at.r]), lost = poison.x[at.r];
    a = a * by + lost;
    b = b * by + lost;
  });
  write_rows<Shape>(d_v, view, memory.place, columns);
}

/// With Ḡ' k_j, which `part` is.
template <typename Shape>
__device__ __forceinline__ void write_dk(SharedWide<Shape::kSize>& sum, const SharedWide<Shape::kSize>& part,
                                         const View& view, int columns, DkDvShared<Shape::kSize>& memory) {
  using Rows = SharedWide<Shape::kSize>;
  const TokenGates& gates = memory.gates;
  const auto beta = Rows::of_rows(gates.beta), poison = Rows::of_rows(gates.poison), end = Rows::of_rows(gates.end),
             k_down = Rows::of_rows(gates.k_down), up = Rows::of_rows(memory.up_k);
  sum.each_with(part, [&](const At& at, float& a, float& b, float state_a, float state_b) {
    const float own = beta.x[at.r] * inverse_of_power(up.x[at.r]), lost = poison.x[at.r];
    const float fade = beta.x[at.r] * end.x[at.r] * k_down.x[at.r] * (2 * memory.g_down);
    a = own * a + fade * state_a + lost;
    b = own * b + fade * state_b + lost;
  });
  write_rows<Shape>(sum, view, memory.place, columns);
}

/// Sums over rows of tiles become what they are of numbers.
template <int D>
__device__ __forceinline__ void scale_sums(DkDvShared<D>& memory) {
  const TokenGates& gates = memory.gates;
  const Solutions& solutions = memory.solutions;
  each_of(kChunk, [&](int c) {
    const float key = gates.k_down[c];
    if constexpr (kSumParts<D> > 1) {
      for (float* sums : {memory.key_inner, memory.arriving, memory.values_arriving, memory.state_solved,
                          memory.d_beta(), memory.after()}) {
        sums[c] = sum_of_parts<D>(sums, c);
      }
    }
    memory.key_inner[c] *= key * key;
    memory.arriving[c] *= key * key * memory.g_down;
    memory.values_arriving[c] *= key * gates.v_down[c] * memory.r_down;
    memory.state_solved[c] *= solutions.x_down[c] * solutions.y_down[c];
  });
}

template <int D>
__device__ __forceinline__ void request_symmetric(BulkBarrier& states, const Tile& to, const std::uint16_t* from) {
  if constexpr (D == 128) {
    states.request(BulkCopy{to.data, from, kStateBytes<D> / 4},
                   BulkCopy{to.data + kSecondHalf<D>, from + kSecondHalf<D>, kStateBytes<D> / 2});
  } else {
    states.request(BulkCopy{to.data, from, kStateBytes<D>});
  }
}

/// Of wide heads: what dk, dv and the sums over pairs take from states, slice by slice. Four slices each of R̄', for
/// R̄' v_j; of R̄' once more, for R̄'ᵀ k_j, because both sums do not fit the registers; of H_0; of Ḡ'.
template <typename Shape>
struct WideStates {
  static constexpr int D = Shape::kSize, kAgain = kSlices<D>, kBefore = 2 * kSlices<D>, kAfter = 3 * kSlices<D>,
                       kEnd = 4 * kSlices<D>;
  using Rows = SharedWide<D>;
  const Scratch<D>& scratch;
  std::int64_t task;
  const DkDvTiles& tiles;
  DkDvShared<D>& memory;

  __device__ __forceinline__ Tile slice(int n) const { return n % 2 == 0 ? tiles.d_o : tiles.q; }
  __device__ __forceinline__ void request(int n) const {
    if (n >= kEnd) return;
    const std::uint16_t* state = n < kBefore  ? scratch.r.tile(task)
                                 : n < kAfter ? scratch.h.tile(task)
                                              : scratch.g.tile(task);
    memory.ring.request(n, slice(n), state, n % kSlices<D>);
  }
  /// body(slice, its number in the state) for a state's slices, the first of which is number `first`.
  template <typename Body>
  __device__ __forceinline__ void each(int first, Body&& body) const {
#pragma unroll 1
    for (int which = 0; which < kSlices<D>; ++which) {
      const int n = first + which;
      memory.ring.wait(n);
      body(slice(n), which);
      sync();
      request(n + 2);
    }
  }
  static __device__ __forceinline__ void clear(Rows& rows) {
    rows.each([](const At&, float& a, float& b) { a = b = 0; });
  }
  /// The tile of these rows times a state: its rows are what is summed over.
  __device__ __forceinline__ void multiply(Rows& part, const Tile& rows, int first) const {
    clear(part);
    each(first, [&](const Tile& slice, int which) {
      part.template multiply<Major::mn, kChunk, true>(column_block(rows, which), slice);
    });
  }

  __device__ __forceinline__ void add(const Gradients& out, const Sides<Shape>& sides, Rows& sum, Rows& d_v,
                                      Rows& part) const {
    TokenGates& gates = memory.gates;
    clear(part);
    each(0, [&](const Tile& slice, int which) {
      if (Rows::own_group() == which) part.template multiply_own<D>(tiles.v, slice);
    });
    part.row_sums_with(tiles.k, memory.values_arriving);
    add_state(sum, part, gates.v_down, gates.end, memory.up_k, memory.r_down);
    multiply(part, tiles.k, kAgain);
    add_state(d_v, part, gates.k_down, gates.end, memory.up_v, memory.r_down);
    write_dv<Shape>(d_v, out.d_v, sides.values, memory);
    {  // The state before the chunk, whose blocks of columns have norms of their own.
      Rows of_x;
      clear(part);
      clear(of_x);
      each(kBefore, [&](const Tile& slice, int which) {
        of_x.template queue<Major::mn, kChunk, true>(column_block(tiles.x, which), slice);
        part.template queue<Major::mn, kChunk, true>(column_block(tiles.k, which), slice);
        Rows::finish(of_x, part);
      });
      const float share = memory.h_share[Rows::own_group()];
      const auto by_share = [share](const At&, float& a, float& b) { a *= share, b *= share; };
      of_x.each(by_share);
      part.each(by_share);
      of_x.row_sums_with(tiles.y, memory.state_solved);
    }
    part.row_sums_with(tiles.k, memory.key_inner);
    each_of(kChunk, [&](int c) { memory.solutions.reach[c] *= gates.zeta[c]; });
    add_state(sum, part, gates.k_down, memory.solutions.reach, memory.up_k, -memory.h_norm);
    gates.lose_before(~0, memory.keys_lost);
    multiply(part, tiles.k, kAfter);
    part.row_sums_with(tiles.k, memory.arriving);
    write_dk<Shape>(sum, part, out.d_k, sides.dim, memory);
  }
};

/// Longer than most: a list of products, in which one sees together which tile is free to be written again, and which
/// sums wait in registers for what arrives.
template <typename Shape>
__global__ void __launch_bounds__(kTeams<Shape::kSize>* kTileThreads, kDkDvBlocks<Shape::kSize>)
    bwd_dkdv(const __grid_constant__ Problem p, const __grid_constant__ Gradients out, Plan plan,
             const __grid_constant__ Scratch<Shape::kSize> scratch) {
  constexpr int D = Shape::kSize;
  constexpr bool kWhole = Shape::kWhole;
  const std::int64_t task = block();
  auto& memory = *reinterpret_cast<DkDvShared<D>*>(tile_memory());
  const Sides<Shape> sides(p);
  TokenGates& gates = memory.gates;
  const DkDvTiles tiles(memory);
  const auto& [k, v, d_o, q, x, y, state, last_state, left, left_x, left_y, squares, fadings] = tiles;
  const float scale = static_cast<float>(p.options.scale);

  request_chunk(scratch, task, memory);
  const Place own_place = place_of_task(p, plan, static_cast<unsigned>(task));
  constexpr bool kValues = Shape::kValues;
  if constexpr (kValues) {
    fetch_rows<D, kWhole, kTeams<D>>(v, p.v, own_place.of_head(value_head(p, own_place.head)), sides.values);
    fetch_rows<D, kWhole, kTeams<D>>(d_o, out.d_o, own_place, sides.values);
  }
  const auto solved = SharedScores<D>::saved(scratch.scores + task * kChunk * kChunk);
  read_numbers<D, kValues>(scratch, task, own_place, memory);
  sync();
  memory.tokens.wait(0);
  wait_for_copies();
  if (memory.place.len == 0) return;
  if constexpr (kValues) settle_values<D, Shape::kType>(v, d_o, memory);
  publish();
  bound_rows(memory, scale);
  if constexpr (kValues) gates.lose_before(kBadKey | kBadQuery | kBadOutput, memory.values_lost);  // for dv

  // (v_j·do_c) q_c needs no solution.
  SharedScores<D> values, queries, answered;
  SharedWide<D> sum, d_v, part;
  if constexpr (kValues) {
    values.template queue<Major::k, D>(v, d_o);
    queries.template queue<Major::k, D>(k, q);
    SharedScores<D>::finish(values, queries);
    weigh_queries<D>(left, values, memory);
    publish();
    sync();
    sum.template queue<Major::mn, kChunk>(left, q);
    answered.template queue<Major::k, D>(k, y);
    SharedWide<D>::finish(sum, answered);
  } else {
    const auto nothing = [](const At&, float& a, float& b) { a = b = 0; };
    values.each(nothing);
    queries.each(nothing);
    answered.template multiply<Major::k, D>(k, y);
  }
  sync();
  weigh_solutions<D>(tiles, values, queries, answered, solved, memory);
  publish();
  sync();
  SharedScores<D> products;
  if constexpr (kValues) d_v.template queue<Major::mn, kChunk>(left, d_o);
  sum.template queue<Major::mn, kChunk, kValues>(left_x, x);
  sum.template queue<Major::mn, kChunk, true>(left_y, y);
  if constexpr (kValues) {
    SharedWide<D>::finish(d_v, sum);
  } else {
    SharedWide<D>::finish(sum);
  }
  sync();
  [[maybe_unused]] const WideStates<Shape> wide{scratch, task, tiles, memory};
  if constexpr (kInSlices<D>) {
    wide.request(0);
  } else if constexpr (kValues) {
    constexpr int kBytes = D == 128 ? kTileBytes<D> : kStateBytes<D>;  // the first half, or all
    memory.states.request(BulkCopy{state.data, scratch.r.tile(task), kBytes});
  }
  products.template multiply<Major::k, D>(k, k);
  weigh_keys<D>(tiles, products, memory);
  publish();
  sync();
  products.template queue<Major::k, kChunk>(squares, fadings);
  sum.template queue<Major::mn, kChunk, true>(left, k);
  SharedWide<D>::finish(products, sum);
  sync();
  if constexpr (kInSlices<D>) wide.request(1);
  if constexpr (kValues && D == 128) {
    memory.tokens.request(BulkCopy{state.data + kSecondHalf<D>, scratch.r.tile(task) + kSecondHalf<D>, kTileBytes<D>});
  }
  if constexpr (!kValues) request_symmetric<D>(memory.states, state, scratch.h.tile(task));
  sum_scores<D>(queries, products, memory);

  if constexpr (kInSlices<D>) {
    wide.add(out, sides, sum, d_v, part);
  } else {
    if constexpr (kValues) {  // What arrives for the values: R̄' v_j and R̄'ᵀ k_j.
      memory.states.wait(0);
      if constexpr (D == 128) memory.tokens.wait(1);
      part.template multiply<Major::k, D>(v, state);
      part.row_sums_with(k, memory.values_arriving);
      add_state(sum, part, gates.v_down, gates.end, memory.up_k, memory.r_down);
      part.template multiply<Major::mn, D>(k, state);
      add_state(d_v, part, gates.k_down, gates.end, memory.up_v, memory.r_down);
      sync();
      request_symmetric<D>(memory.states, state, scratch.h.tile(task));
      write_dv<Shape>(d_v, out.d_v, sides.values, memory);
    }
    // With the state before the chunk.
    memory.states.wait(kValues ? 1 : 0);
    part.multiply_symmetric(x, state);
    part.row_sums_with(y, memory.state_solved);
    sync();
    request_symmetric<D>(memory.states, last_state, scratch.g.tile(task));
    part.multiply_symmetric(k, state);
    part.row_sums_with(k, memory.key_inner);
    each_of(kChunk, [&](int c) { memory.solutions.reach[c] *= gates.zeta[c]; });
    add_state(sum, part, gates.k_down, memory.solutions.reach, memory.up_k, -memory.h_norm);
    gates.lose_before(~0, memory.keys_lost);
    // What arrives: Ḡ' k_j.
    memory.states.wait(kValues ? 0 : 1);
    part.multiply_symmetric(k, last_state);
    part.row_sums_with(k, memory.arriving);
    write_dk<Shape>(sum, part, out.d_k, sides.dim, memory);
  }
  sync();
  scale_sums(memory);
  sum_pairs(out, memory, scale);
}

}  // namespace gka::kernels::cuda::hopper::bwd
