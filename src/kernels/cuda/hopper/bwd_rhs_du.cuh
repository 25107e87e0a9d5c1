// bwd_rhs_du: U_c do_c, which is the solve's right-hand side, with all else that the solve of the chunk begins with;
// and the chunk's own part of the gradient of U_0.
//
// Four tiles of shared memory are used in turn for more, so that several blocks fit a multiprocessor: what waits here
// waits for memory. Of wide heads one block does, with room of its own for U_0.
#pragma once

#include "kernels/cuda/hopper/bwd_shared.cuh"

namespace gka::kernels::cuda::hopper::bwd {

/// Of wide heads: slices of U_0, then of its gradient; m_cᵀ U_0 do_c of slices and blocks of columns.
template <int D, bool = kInSlices<D>>
struct alignas(1024) RhsSlices : SliceRoom<D> {
  float read[kSlices<D>][kStateBlocks<D>][kChunk];
};
template <int D>
struct RhsSlices<D, false> {};

template <int D>
struct RhsShared : RhsSlices<D> {
  std::uint16_t v[kTileNumbers<D>];  // then ζ_c s m_c
  std::uint16_t d_o[kTileNumbers<D>];
  // Then 64 rows of U_0 each, q the first ones; and from k on the gradient of U_0.
  std::uint16_t k[kTileNumbers<D>];
  std::uint16_t q[kTileNumbers<D>];
  TokenGates gates;
  BulkBarrier arrival, arrival_rest;
  alignas(8) float m_down[kChunk], weight[kChunk], weight_rest[kChunk];
  // Of the solve, logarithms to base 2: m_cj = 2^(row_c + column_j) for from_c ≤ j ≤ c.
  alignas(8) float row[kChunk], column[kChunk], square[kChunk];  // |k_j|² of the scaled keys
  float log_norm[kChunk], spread[kChunk];                        // tr H_c / ‖H_c‖
  int from[kChunk];
  int refined, everywhere;
  int lacks[kReaches];  // there is a token for which the next schedule is the first that will do
};

/// The tile of ζ_c s m_c, in place of the values, from x and the tile of queries.
template <int D>
__device__ __forceinline__ void mix(Wide<D>& x, float scale, RhsShared<D>& memory) {
  TokenGates& gates = memory.gates;
  {
    const auto of_q =
        Wide<D>::per_row([&](int c) { return scale * gates.zeta[c] * (1 - gates.alpha[c]) * gates.q_down[c]; });
    const auto of_x = Wide<D>::per_row([&](int c) { return scale * gates.zeta[c] * gates.alpha[c] * gates.sigma[c]; });
    x.each_beside(tile_of<D>(memory.q), [&](const At& at, float& a, float& b, const Pair& query) {
      a = of_q.x[at.r] * query.x + of_x.x[at.r] * a;
      b = of_q.x[at.r] * query.y + of_x.x[at.r] * b;
    });
  }
  const auto top = x.largest_bits();
  scale_rows(x, top, [&](auto&& by) { x.store_rows(tile_of<D>(memory.v), by); });
  x.each_row([&](int c, int r) {
    memory.m_down[c] = scale_of(top.x[r]).down;
    if (!usable(top.x[r])) gates.found(c, kBadQuery);
  });
}

/// How the chunk is refined and how many steps it takes otherwise, where tokens have schedules of their own.
/// `memory.weight` and `memory.spread` are the chunk's and the state's part of σ tr H; a barrier inside.
template <int D>
__device__ __forceinline__ void choose_steps(const Place& place, const Options& options, bool ample, SystemRows& rows,
                                             RhsShared<D>& memory) {
  const auto ridge = static_cast<float>(options.ridge);
  const bool may_refine = options.refine && options.iterations > 0 && !ample;
  each_of(kChunk, [&](int c) {
    const float sigma = memory.gates.sigma[c], rho = ridge * sigma, rest = 1 - rho;
    const bool live = memory.row[c] != kLog2Zero;
    memory.m_down[c] = live ? 1 / sigma : 0;
    if (!live || !may_refine || c >= place.len || !is_asked(c, place.len) || !(rest > 1e-6f)) return;
    const float trace = memory.weight[c] / TokenSchedule::pace_of(min(rho, 1.0f)) + memory.spread[c];
    const Refined how = refined_for(rho / rest, trace / rest, options.iterations);
    if (how != kNot) raise(&memory.refined);
    if (how == kEverywhere) raise(&memory.everywhere);
  });
  const float largest = bits_to_float(largest_of_tokens(memory.m_down));
  if (tile_thread() != 0) return;
  rows.refined = !memory.refined ? kNot : memory.everywhere ? kEverywhere : kTwice;
  rows.schedule = token_steps(largest > 0 ? min(ridge / largest, 1.0f) : 1, options.iterations, options.refine);
}

/// Keys and rows of the system, from ‖H_0‖ and tr H_0. `gates.poison` says what of H is lost.
template <int D, bool kConstant>
__device__ __forceinline__ void prepare_solve(const Place& place, const Options& options, const Scratch<D>& scratch,
                                              std::int64_t task, float eta, float trace, bool ample,
                                              RhsShared<D>& memory) {
  TokenGates& gates = memory.gates;
  const SolveNumbers& solve = scratch.solve;
  SystemRows& rows = scratch.rows(task);
  const float log_eta = eta > 0 ? log2f(eta) : kLog2Zero, log_pace = log2f(solve.pace);
  const auto pace_of = [&](int c) {
    const float ridge = kConstant ? static_cast<float>(options.ridge) : 0;
    return kConstant ? TokenSchedule::pace_of(min(ridge * gates.sigma[c], 1.0f)) : solve.pace;
  };
  Scores squares;
  squares.template multiply<Major::k, D>(tile_of<D>(memory.k), tile_of<D>(memory.k));
  squares.each([&](const At& at, float a, float b) {
    if (at.column == at.row) memory.square[at.row] = a;
    if (at.column + 1 == at.row) memory.square[at.row] = b;
  });
  if (tile_thread() == 0) memory.refined = memory.everywhere = 0;
  each_of(kChunk, [&](int c) {
    if (c < kReaches) memory.lacks[c] = 0;
    int from = 0;
    bool forgotten = false;  // what was before the chunk
    double before = 0;
    for (int i = 0; gates.any_forgets && i <= c; ++i) {
      if (gates.forgets[i]) forgotten = true, from = i, before = gates.sums[i];
    }
    const auto since = static_cast<float>(gates.sums[c] - before);
    const bool lost = gates.poison[c] != 0, live = c < place.len && !lost && memory.log_norm[c] > kVanishedLog2;
    const float row = live ? since - memory.log_norm[c] + (kConstant ? log2f(pace_of(c)) : log_pace) : kLog2Zero;
    const float column = gates.beta[c] > 0 ? log2f(gates.beta[c]) + 2 * log2f(gates.k_down[c]) - since : kLog2Zero;
    // Below 1e-12 the state is nothing beside what the chunk itself has written.
    const float left = live && !forgotten ? power_of_two(gates.reach[c] + log_eta - memory.log_norm[c]) : 0;
    memory.row[c] = row;
    memory.column[c] = column;
    memory.from[c] = rows.from[c] = from;
    memory.spread[c] = left * (eta > 0 ? trace / eta : 0);
    rows.row[c] = row * static_cast<float>(kLn2);
    rows.column[c] = column * static_cast<float>(kLn2);
    rows.t[c] = pace_of(c) * max(left, 1e-12f);
    if constexpr (kConstant) rows.inverse_norm[c] = gates.sigma[c];
    rows.factor[c] = live ? gates.sigma[c] : lost ? bits_to_float(0x7fc00000u) : 0;
    if (c == 0) rows.chunk = {place.batch, place.begin, place.len};
  });
  const auto row = Scores::of_rows(memory.row);
  const auto column = Scores::of_columns(memory.column), square = Scores::of_columns(memory.square);
  squares.each([&](const At& at, float& a, float& b) {
    const auto mask = [&](int e) {
      const int j = at.column + e;
      const float m = power_of_two(row.x[at.r] + column.x[at.c + e]);
      return j >= memory.from[at.row] && j <= at.row ? m : 0;
    };
    a = mask(0);
    b = mask(1);
  });
  squares.keep(scratch.packed(task, SystemLayout<D>::kMask), 0, [](const At&) { return 1.0f; });
  squares.row_sums(memory.weight,
                   [&](const At& at, float a, float b) { return a * square.x[at.c] + b * square.x[at.c + 1]; });
  sync();
  if constexpr (kConstant) return choose_steps<D>(place, options, ample, rows, memory);
  each_of(place.len, [&](int c) {
    const float spread = memory.weight[c] / solve.pace + memory.spread[c];
    if (memory.row[c] == kLog2Zero) return;
    if (!ample && is_asked(c, place.len)) {
      if (!(spread >= solve.least_spread)) raise(&memory.refined);
      if (!(spread >= solve.least_for_two)) raise(&memory.everywhere);
    }
    int first = 0;
    while (first < solve.reaches && !(spread >= solve.spread[first])) ++first;
    if (first > 0) raise(&memory.lacks[first - 1]);
  });
  if (tile_thread() != 0) return;
  int first = solve.reaches;
  while (first > 0 && memory.lacks[first - 1] == 0) --first;
  rows.refined = !memory.refined ? kNot : memory.everywhere ? kEverywhere : kTwice;
  rows.schedule = first < solve.reaches ? kFirstReach + first : 0;
}

/// M_jc β_j (v_j·do_c), of which the keys make U_c do_c, as a left operand.
template <int D>
__device__ __forceinline__ Left<true> weigh_values(const Tile& d_o, const Tile& v, const TokenGates& gates) {
  Scores read;
  read.template multiply<Major::k, D>(d_o, v);
  const Fading fading(gates);
  const auto o_down = Scores::of_rows(gates.o_down);
  const auto beta = Scores::of_columns(gates.beta), v_down = Scores::of_columns(gates.v_down),
             k_down = Scores::of_columns(gates.k_down);
  return read.as_left<true>([&](const At& at, float a, float b) -> Pair {
    const auto by = [&](int e) {
      return fading.to_row(at, e) * o_down.x[at.r] * (beta.x[at.c + e] * v_down.x[at.c + e] * k_down.x[at.c + e]);
    };
    return {a * by(0), b * by(1)};
  });
}

/// Adds what do_c reads of U_0, up to 64 of its rows at a time, as they arrive.
template <int D>
__device__ __forceinline__ void add_state(BlockOf<D> (&udo)[kColumnBlocks<D>], const Left<true>& left, float u_norm,
                                          RhsShared<D>& memory) {
  const TokenGates& gates = memory.gates;
  const Tile d_o = tile_of<D>(memory.d_o), q = tile_of<D>(memory.q), k = tile_of<D>(memory.k);
  const auto o_down = Scores::of_rows(gates.o_down), zeta = Scores::of_rows(gates.zeta);
  const auto lost = Scores::per_row(
      [&](int row) { return gates.poison[row] + (gates.bad[row] & kBadOutput ? bits_to_float(0x7fc00000u) : 0); });
#pragma unroll
  for (int half = 0; half < kColumnBlocks<D>; ++half) {
    (half == 0 ? memory.arrival : memory.arrival_rest).wait(0);
    BlockOf<D> read;
    read.template multiply<Major::k, D>(d_o, half == 0 ? q : k);
    read.row_sums_with(tile_of<D>(memory.v + half * kChunk * 64), half == 0 ? memory.weight : memory.weight_rest);
    udo[half].each_with(read, [&](const At& at, float& a, float& b, float read_a, float read_b) {
      const float by = o_down.x[at.r] * u_norm * zeta.x[at.r], factor = left.factor[at.r];
      a = read_a * by + (a * factor + lost.x[at.r]);
      b = read_b * by + (b * factor + lost.x[at.r]);
    });
  }
}

/// The same of wide heads, slice by slice; U_0 comes in blocks of columns that are divided by their own norms.
template <int D>
__device__ __forceinline__ void add_slices(BlockOf<D> (&udo)[kColumnBlocks<D>], const Left<true>& left, float u_norm,
                                           const std::uint16_t* u, const float (&share)[kStateBlocks<D>],
                                           RhsShared<D>& memory) {
  const TokenGates& gates = memory.gates;
  const Tile d_o = tile_of<D>(memory.d_o), m = tile_of<D>(memory.v);
  const auto o_down = Scores::of_rows(gates.o_down), zeta = Scores::of_rows(gates.zeta);
  const auto lost = Scores::per_row(
      [&](int row) { return gates.poison[row] + (gates.bad[row] & kBadOutput ? bits_to_float(0x7fc00000u) : 0); });
#pragma unroll
  for (int which = 0; which < kSlices<D>; ++which) {
    const Tile slice = tile_of<D>(memory.slices[which % 2]);
    udo[which].each([&](const At& at, float& a, float& b) {
      a = a * left.factor[at.r] + lost.x[at.r];
      b = b * left.factor[at.r] + lost.x[at.r];
    });
    memory.ring.wait(which);
#pragma unroll
    for (int block = 0; block < kStateBlocks<D>; ++block) {
      BlockOf<D> read;
      read.template multiply<Major::k, 64>(column_block(d_o, block), column_block(slice, block));
      read.row_sums_with(column_block(m, which), memory.read[which][block]);
      const float norm = u_norm * share[block];
      udo[which].each_with(read, [&](const At& at, float& a, float& b, float read_a, float read_b) {
        const float by = o_down.x[at.r] * norm * zeta.x[at.r];
        a += read_a * by;
        b += read_b * by;
      });
    }
    sync();
    if (which + 2 < kSlices<D>) memory.ring.request(which, slice, u, which + 2);
  }
}

/// U_c do_c in float32, of refined chunks.
template <typename Shape>
__device__ __forceinline__ void leave_float32(BlockOf<Shape::kSize> (&udo)[kColumnBlocks<Shape::kSize>],
                                              const Problem& p, const Place& place,
                                              const Scratch<Shape::kSize>& scratch) {
  const Sides<Shape> sides(p);
  const Field<float> rows = place.field(p, scratch.udo, sides.dim);
  for (int half = 0; half < kColumnBlocks<Shape::kSize>; ++half) {
    udo[half].each([&](const At& at, float a, float b) {
      const int column = at.column + 64 * half;
      if (at.row >= place.len || !(Shape::kWhole || column < sides.dim)) return;
      *reinterpret_cast<Pair*>(rows.at(at.row, column)) = {a, b};
    });
  }
}

/// The right-hand side as the solve takes it: rows scaled by powers of two so that float16 holds the iterates.
template <int D, bool kConstant>
__device__ __forceinline__ void leave_rhs(BlockOf<D> (&udo)[kColumnBlocks<D>], const Options& options,
                                          const Scratch<D>& scratch, std::int64_t task, bool wide, TokenGates& gates) {
  auto tops = udo[0].tops();
  for (int half = 1; half < kColumnBlocks<D>; ++half) {
    const auto others = udo[half].tops();
    for (int r = 0; r < static_cast<int>(sizeof(tops.x) / sizeof(float)); ++r) {
      tops.x[r] = max(tops.x[r], others.x[r]);
    }
  }
  for (int r = 0; r < static_cast<int>(sizeof(tops.x) / sizeof(float)); ++r) {
    tops.x[r] = scale_of(float_to_bits(tops.x[r])).up * (kConstant ? 1 : scratch.solve.headroom);
  }
  if constexpr (kConstant) {
    const auto headroom =
        Scores::per_row([&](int row) { return token_headroom(static_cast<float>(options.ridge) * gates.sigma[row]); });
    for (int r = 0; r < static_cast<int>(sizeof(tops.x) / sizeof(float)); ++r) tops.x[r] *= headroom.x[r];
  }
  udo[0].each_row([&](int row, int r) {
    scratch.rows(task).unscale[row] = 1 / tops.x[r];
    gates.udo_down[row] = wide ? 1 : 1 / tops.x[r];
  });
  for (int half = 0; half < kColumnBlocks<D>; ++half) {
    udo[half].keep(scratch.packed(task, SystemLayout<D>::kRhs), half, [&](const At& at) { return tops.x[at.r]; });
  }
}

/// The chunk's own part of the gradient of U_0, and the gates for the kernels that follow.
template <int D>
__device__ __forceinline__ void leave_du(const Scratch<D>& scratch, std::int64_t task, float u_norm, bool wide,
                                         RhsShared<D>& memory) {
  TokenGates& gates = memory.gates;
  const Tile m = tile_of<D>(memory.v), d_o = tile_of<D>(memory.d_o);
  each_of(kChunk, [&](int c) {
    const float down = memory.m_down[c] * gates.o_down[c];
    if constexpr (kInSlices<D>) {
      float read = 0;
      for (int block = 0; block < kStateBlocks<D>; ++block) {
        float of_block = 0;
        for (int slice = 0; slice < kSlices<D>; ++slice) of_block += memory.read[slice][block][c];
        read += scratch.u.share[task * kStateBlocks<D> + block] * of_block;
      }
      gates.state_read[c] = read * down * u_norm;
    } else {
      const float rest = D == 128 ? memory.weight_rest[c] : 0;
      gates.state_read[c] = (memory.weight[c] + rest) * down * u_norm;
    }
    memory.weight[c] = down;
  });
  if (tile_thread() == 0) gates.wide = wide;
  sync();
  keep(scratch.gates[task], static_cast<const KeptGates&>(gates));
  float* weights[] = {memory.weight};
  const float down = normalise(weights);
  weigh_rows<D>(m, m, [&](int c) { return memory.weight[c]; });
  publish();
  sync();
  const bool lost = gates.spoils_start(kBadKey | kBadQuery | kBadOutput);
  if constexpr (kInSlices<D>) {
#pragma unroll 1
    for (int which = 0; which < kSlices<D>; ++which) {
      const Tile slice = tile_of<D>(memory.slices[which % 2]);
      BlockOf<D> own[kColumnBlocks<D>];
      std::uint32_t largest = 0;
#pragma unroll
      for (int block = 0; block < kColumnBlocks<D>; ++block) {
        own[block].template outer<false>(column_block(m, which), column_block(d_o, block));
        largest = max(largest, own[block].own_largest());
      }
      wait_until_sent();
      const auto put = [&](float by) {
#pragma unroll
        for (int block = 0; block < kColumnBlocks<D>; ++block) own[block].store(column_block(slice, block), by);
      };
      send_slice<D, 1>(largest, down, put, slice, which, scratch.r, task, lost, gates);
    }
  } else {
    Square<D> own;
    own.template outer<false>(m, d_o);
    send_state<D, false>(own, down, tile_of<D>(memory.k, D), scratch.r, task, lost, gates);
  }
}

/// The keys' part alone: do_c is the right-hand side, and nothing is known of values.
template <typename Shape>
__device__ __forceinline__ void leave_keys_alone(const Problem& p, const Place& place,
                                                 const Scratch<Shape::kSize>& scratch, std::int64_t task,
                                                 RhsShared<Shape::kSize>& memory) {
  constexpr int D = Shape::kSize;
  TokenGates& gates = memory.gates;
  BlockOf<D> udo[kColumnBlocks<D>];
  const auto o_down = Scores::of_rows(gates.o_down);
  const auto lost = Scores::per_row(
      [&](int row) { return gates.poison[row] + (gates.bad[row] & kBadOutput ? bits_to_float(0x7fc00000u) : 0); });
#pragma unroll
  for (int half = 0; half < kColumnBlocks<D>; ++half) {
    udo[half].each_beside(tile_of<D>(memory.d_o + half * kChunk * 64), [&](const At& at, float& a, float& b, Pair of) {
      a = of.x * o_down.x[at.r] + lost.x[at.r];
      b = of.y * o_down.x[at.r] + lost.x[at.r];
    });
  }
  const bool wide = scratch.solve.float32 || memory.refined;
  if (wide) leave_float32<Shape>(udo, p, place, scratch);
  leave_rhs<D, Shape::kConstant>(udo, p.options, scratch, task, wide, gates);
  each_of(kChunk, [&](int c) { gates.state_read[c] = gates.v_down[c] = 0; });
  if (tile_thread() == 0) gates.wide = wide;
  sync();
  keep(scratch.gates[task], static_cast<const KeptGates&>(gates));
}

/// Longer than most, for which tile is free for what comes next follows from the order of barriers here.
template <typename Shape>
__global__ void __launch_bounds__(kTileThreads, by_size<Shape::kSize>(5, 4, 3, 1))
    bwd_rhs_du(const __grid_constant__ Problem p, const __grid_constant__ Saved saved,
               const __grid_constant__ Gradients out, Plan plan,
               const __grid_constant__ Scratch<Shape::kSize> scratch) {
  constexpr int D = Shape::kSize;
  constexpr bool kWhole = Shape::kWhole;
  const std::int64_t task = block();
  const Place place = place_of_task(p, plan, static_cast<unsigned>(task));
  if (place.len == 0) {
    if (tile_thread() == 0) scratch.rows(task).chunk = {};
    return;
  }
  auto& memory = *reinterpret_cast<RhsShared<D>*>(tile_memory());
  const Sides<Shape> sides(p);
  TokenGates& gates = memory.gates;
  const Tile k = tile_of<D>(memory.k), v = tile_of<D>(memory.v), d_o = tile_of<D>(memory.d_o), q = tile_of<D>(memory.q);

  // Asked for early, needed late.
  const float h_given = scratch.h.norm[task], u_given = Shape::kValues ? scratch.u.norm[task] : 0;
  const float trace = scratch.trace != nullptr ? scratch.trace[task] : 0;
  const bool ample = scratch.ample != nullptr && scratch.ample[task] != 0;
  memory.arrival.init();
  memory.arrival_rest.init();
  if constexpr (kInSlices<D>) {
    memory.ring.init();
    for (int n = 0; n < 2; ++n) memory.ring.request(n, tile_of<D>(memory.slices[n]), scratch.u.tile(task), n);
  }
  if constexpr (Shape::kValues) {
    fetch_rows<D, kWhole>(v, p.v, place.of_head(value_head(p, place.head)), sides.values);
    fetch_rows<D, kWhole>(d_o, out.d_o, place, sides.values);
  } else {
    fetch_rows<D, kWhole>(d_o, out.d_o, place, sides.dim);
  }
  fetch_rows<D, kWhole>(k, p.k, place.of_head(key_head(p, place.head)), sides.dim);
  fetch_rows<D, kWhole>(q, p.q, place, sides.dim);
  gates.load<Shape::kConstant>(p, saved.norm, place, memory.log_norm);
  wait_for_copies();
  sync();
  if constexpr (Shape::kValues) {
    settle_rows<D, Shape::kType, 4, kBadValue | kBadOutput << 4 | kBadKey << 8 | kBadQuery << 12>(memory.v,
                                                                                                  gates.v_down, gates);
  } else {
    settle_rows<D, Shape::kType, 3, kBadOutput | kBadKey << 4 | kBadQuery << 8>(memory.d_o, gates.o_down, gates);
  }
  publish();
  sync();
  send_tile(scratch.q_tiles + task * kTileNumbers<D>, memory.q, kTileBytes<D>);
  send_tile(scratch.packed(task, 0), memory.k, kTileBytes<D>);
  gates.lose_after(kBadKey, !finite(h_given));
  prepare_solve<D, Shape::kConstant>(place, p.options, scratch, task, h_given, trace, ample, memory);
  if constexpr (!Shape::kValues) {
    if (tile_thread() == 0) scratch.zeta[task] = gates.zeta[kChunk - 1];
    leave_keys_alone<Shape>(p, place, scratch, task, memory);
    return finish_sending();
  }
  const float u_norm = finite(u_given) ? u_given : 0;
  gates.lose_after(kBadKey | kBadValue, !finite(u_given));
  if (tile_thread() == 0) scratch.zeta[task] = gates.zeta[kChunk - 1];

  Left<true> left;
  {
    Wide<D> x;
    read_tokens<Shape>(x, p, place, static_cast<const float*>(saved.x));
    left = weigh_values<D>(d_o, v, gates);
    wait_until_sent();
    sync();
    mix<D>(x, static_cast<float>(p.options.scale), memory);
  }
  sync();
  BlockOf<D> udo[kColumnBlocks<D>];
  const bool wide = scratch.solve.float32 || memory.refined;
  const auto multiply_keys = [&] {
    for (int half = 0; half < kColumnBlocks<D>; ++half) {
      udo[half].multiply(left, tile_of<D>(memory.k + half * kChunk * 64));
    }
  };
  if constexpr (kInSlices<D>) {
    float share[kStateBlocks<D>];
#pragma unroll
    for (int block = 0; block < kStateBlocks<D>; ++block) {
      share[block] = scratch.u.share[task * kStateBlocks<D> + block];
    }
    multiply_keys();
    add_slices<D>(udo, left, u_norm, scratch.u.tile(task), share, memory);
  } else {
    const auto request_state = [&](BulkBarrier& arrival, std::uint16_t* to, int half) {  // rows 64 half … of all blocks
      const std::uint16_t* from = scratch.u.tile(task) + half * kChunk * 64;
      if constexpr (D == 128) {
        constexpr int kBlock = kChunk * 64;  // numbers
        arrival.request(BulkCopy{to, from, 2 * kBlock}, BulkCopy{to + kBlock, from + D * 64, 2 * kBlock});
      } else {
        arrival.request(BulkCopy{to, from, kStateBytes<D>});
      }
    };
    request_state(memory.arrival, memory.q, 0);
    multiply_keys();
    sync();
    if constexpr (D == 128) request_state(memory.arrival_rest, memory.k, 1);
    add_state<D>(udo, left, u_norm, memory);
  }
  if (wide) leave_float32<Shape>(udo, p, place, scratch);
  leave_rhs<D, Shape::kConstant>(udo, p.options, scratch, task, wide, gates);
  sync();
  leave_du<D>(scratch, task, u_norm, wide, memory);
  finish_sending();
}

}  // namespace gka::kernels::cuda::hopper::bwd
