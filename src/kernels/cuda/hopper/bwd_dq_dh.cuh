// bwd_dq_dh: dq, dα, scores between keys and solutions, and the chunk's own part of the gradient of H_0. A chunk has
// a warpgroup for every 64 channels.
#pragma once

#include "kernels/cuda/hopper/bwd_shared.cuh"

namespace gka::kernels::cuda::hopper::bwd {

template <int D>
struct DqShared : SliceRoom<D> {
  std::uint16_t k[kTileNumbers<D>];
  std::uint16_t x[kTileNumbers<D>];
  std::uint16_t y[kTileNumbers<D>];     // then, from here on, the own part of the gradient of H_0, unless it is wide
  std::uint16_t x_lo[kTileNumbers<D>];  // q before, and then weighted keys
  TokenGates gates;
  BulkBarrier arrival;
  Solutions solutions;
  alignas(8) float of_y[kChunk], of_k[kChunk];
  // x_c·ŷ_c; U_c do_c times x_c and q_c, all to be multiplied by powers of two.
  static constexpr int kSums = kSumParts<D> * kChunk;
  float along_y[kSums], along_x[kSums], along_q[kSums];
  std::uint32_t x_top[kChunk], y_top[kChunk];  // the largest bits of a number's size
};

/// dq, dα, the weights w, and the tiles of x‖H‖ and ŷ. kWide: ŷ and U_c do_c are there in float32.
template <typename Shape, bool kWide>
__device__ __forceinline__ void read_solutions(const Problem& p, const Gradients& out,
                                               const Scratch<Shape::kSize>& scratch, const Place& place,
                                               DqShared<Shape::kSize>& memory, SharedWide<Shape::kSize>& x,
                                               SharedWide<Shape::kSize>& udo) {
  using Rows = SharedWide<Shape::kSize>;
  TokenGates& gates = memory.gates;
  Solutions& solutions = memory.solutions;
  constexpr int D = Shape::kSize;
  const Tile x_tile = tile_of<D>(memory.x), x_lo = tile_of<D>(memory.x_lo), y_tile = tile_of<D>(memory.y), q = x_lo;
  const float scale = static_cast<float>(p.options.scale);
  const float ridge = !Shape::kConstant && p.options.ridge_gradient ? static_cast<float>(p.options.ridge) : 0;
  Rows y;
  if constexpr (kWide) {
    read_tokens<Shape>(udo, p, place, scratch.udo);
    read_tokens<Shape>(y, p, place, scratch.y);
    x.row_sums_with(y, memory.along_y);
    y.row_tops(memory.y_top);
  } else {
    x.row_sums_with(y_tile, memory.along_y);
  }
  x.row_tops(memory.x_top);
  x.row_sums_with(udo, memory.along_x);
  udo.row_sums_with(q, memory.along_q);
  sync();
  const auto tops = [](const std::uint32_t* of) { return Rows::per_row([&](int row) { return of[row]; }); };
  scale_rows(x, tops(memory.x_top), [&](auto&& by) { x.template store_parts<true>(x_tile, x_lo, by); });
  {
    const auto direct = Rows::per_row([&](int row) { return scale * (1 - gates.alpha[row]) * gates.udo_down[row]; });
    const auto solved =
        Rows::per_row([&](int row) { return scale * gates.alpha[row] * (kWide ? 1 : solutions.y_down[row]); });
    const auto lost = Rows::per_row([&](int row) {
      return gates.bad[row] & kBadQuery || !usable(memory.x_top[row]) ? bits_to_float(0x7fc00000u) : 0;
    });
    const auto mix = [&](const At& at, float& a, float& b, float y_a, float y_b) {
      a = solved.x[at.r] * y_a + (direct.x[at.r] * a + lost.x[at.r]);
      b = solved.x[at.r] * y_b + (direct.x[at.r] * b + lost.x[at.r]);
    };
    if constexpr (kWide) {
      udo.each_with(y, mix);
      scale_rows(y, tops(memory.y_top), [&](auto&& by) { y.store_rows(y_tile, by); });
    } else {
      udo.each_beside(y_tile,
                      [&](const At& at, float& a, float& b, const Pair& of_y) { mix(at, a, b, of_y.x, of_y.y); });
    }
    write_rows<Shape>(udo, out.d_q, place, Sides<Shape>(p).dim);
  }
  sync();
  each_of(kChunk, [&](int c) {
    const float y_unit = kWide ? 1 : solutions.y_down[c], sigma = gates.sigma[c];
    const bool x_fine = usable(memory.x_top[c]), y_fine = kWide ? usable(memory.y_top[c]) : finite(y_unit);
    const float lost = gates.bad[c] & kBadQuery || !x_fine ? bits_to_float(0x7fc00000u) : 0;
    if (!x_fine) gates.found(c, kBadQuery);
    if (!y_fine) gates.found(c, kBadSolved);
    solutions.x_down[c] = scale_of(memory.x_top[c]).down * sigma;
    solutions.y_down[c] = kWide ? scale_of(memory.y_top[c]).down : y_fine ? y_unit : 1;
    const float along_y = sum_of_parts<D>(memory.along_y, c);
    const float w = 2 * ridge * gates.alpha[c] * scale * (along_y * y_unit * sigma) * sigma;
    solutions.weight[c] = x_fine && y_fine && finite(w) ? w : 0;
    if (c < place.len && out.d_alpha.data != nullptr) {
      const float along =
          sigma * sum_of_parts<D>(memory.along_x, c) - gates.q_down[c] * sum_of_parts<D>(memory.along_q, c);
      write(out.d_alpha, place.at(out.d_alpha, c), scale * gates.udo_down[c] * along + lost);
    }
  });
}

/// Longer than most: each tile is used for two things in turn, and one has to see when the first is done with it.
template <typename Shape>
__global__ void __launch_bounds__(kTeams<Shape::kSize>* kTileThreads, by_size<Shape::kSize>(6, 4, 2, 1))
    bwd_dq_dh(const __grid_constant__ Problem p, const __grid_constant__ Saved saved,
              const __grid_constant__ Gradients out, Plan plan, const __grid_constant__ Scratch<Shape::kSize> scratch) {
  constexpr int D = Shape::kSize;
  const std::int64_t task = block();
  auto& memory = *reinterpret_cast<DqShared<D>*>(tile_memory());
  TokenGates& gates = memory.gates;
  Solutions& solutions = memory.solutions;
  const Tile k = tile_of<D>(memory.k), x = tile_of<D>(memory.x), weighted = tile_of<D>(memory.x_lo),
             y = tile_of<D>(memory.y);
  const Tile x_lo = weighted;
  const float scale = static_cast<float>(p.options.scale);

  memory.arrival.init();
  const BulkCopy of_gates{static_cast<KeptGates*>(&gates), scratch.gates + task, sizeof(KeptGates)},
      of_k{memory.k, scratch.packed(task, 0), kTileBytes<D>},
      of_q{memory.x_lo, scratch.q_tiles + task * kTileNumbers<D>, kTileBytes<D>};
  if constexpr (kAlwaysFloat32<D>) {
    memory.arrival.request(of_gates, of_k, of_q);
  } else {
    memory.arrival.request(of_gates, of_k,
                           BulkCopy{solutions.y_down, scratch.y_down + task * kChunk, sizeof(solutions.y_down)},
                           BulkCopy{memory.y, scratch.y_tiles + task * kTileNumbers<D>, kTileBytes<D>}, of_q);
  }
  const Place place = place_of_task(p, plan, static_cast<unsigned>(task));
  each_of(kChunk, [&](int c) {
    for (int part = 0; part < kSumParts<D>; ++part) {
      const int at = part * kChunk + c;
      memory.along_y[at] = memory.along_x[at] = memory.along_q[at] = 0;
    }
    memory.x_top[c] = memory.y_top[c] = 0;
  });
  if (place.len == 0) return memory.arrival.wait(0);
  {
    SharedWide<D> solved, udo;
    read_tokens<Shape>(solved, p, place, static_cast<const float*>(saved.x));
    udo.take(scratch.packed(task, SystemLayout<D>::kRhs));
    memory.arrival.wait(0);
    if (kAlwaysFloat32<D> || gates.wide) {
      read_solutions<Shape, true>(p, out, scratch, place, memory, solved, udo);
    } else if constexpr (!kAlwaysFloat32<D>) {
      read_solutions<Shape, false>(p, out, scratch, place, memory, solved, udo);
    }
  }
  publish();
  sync();
  send_tile(scratch.x_tiles + task * kTileNumbers<D>, memory.x, kTileBytes<D>);
  if (gates.wide) send_tile(scratch.y_tiles + task * kTileNumbers<D>, memory.y, kTileBytes<D>);
  decayed_sums<true, 2>(
      gates.reach, [&](int c) { return solutions.weight[c]; },
      [&](int j, float total) {
        solutions.reach[j] = total;
        solutions.bad[j] = gates.bad[j];
        if (j == 0) solutions.any_bad = gates.any_bad;
      });
  {
    SharedScores<D> scores;
    scores.template multiply<Major::k, D>(k, x);
    scores.template multiply<Major::k, D, true>(k, x_lo);
    scores.save(scratch.scores + task * kChunk * kChunk);
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
  weigh_rows<D, kTeams<D>>(y, y, [&](int c) { return memory.of_y[c]; });
  weigh_rows<D, kTeams<D>>(weighted, k, [&](int c) { return memory.of_k[c]; });
  publish();
  sync();
  if (tile_thread() == 0) {
    const float norm = scratch.h.norm[task];
    scratch.of_h[task] = finite(norm) ? faded(-0.5f * solutions.reach[0] * norm, gates.zeta[0] * gates.zeta[0]) : 0;
  }
  const bool lost = gates.spoils_start(kBadKey | kBadQuery | kBadSolved);
  if constexpr (kInSlices<D>) {
#pragma unroll 1
    for (int which = 0; which < kSlices<D>; ++which) {
      const Tile slice = tile_of<D>(memory.slices[which % 2]);
      SharedWide<D> own;
      own.template outer<false>(column_block(x, which), y);
      own.template outer<true>(column_block(y, which), x);
      own.template outer<true>(column_block(weighted, which), k);
      wait_until_sent();
      send_slice<D, kTeams<D>>(
          own.own_largest(), down, [&](float by) { own.store(slice, by); }, slice, which, scratch.g, task, lost, gates);
    }
  } else {
    SharedSquare<D> own;
    own.template outer<false>(x, y);
    own.template outer<true>(y, x);
    own.template outer<true>(weighted, k);
    send_state<D, true>(own, down, tile_of<D>(memory.y, D), scratch.g, task, lost, gates);
  }
  finish_sending();
}

}  // namespace gka::kernels::cuda::hopper::bwd
