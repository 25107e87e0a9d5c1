// What the backward passes of all sizes begin with, for the host.
#pragma once

#include <algorithm>

#include "kernels/cuda/hopper/bwd_passes.cuh"
#include "kernels/cuda/hopper/forward.cuh"

namespace gka::kernels::cuda::hopper {

/// H and U at the start of every chunk, from float32 states at the start of segments.
template <int D>
Cut start_states(const Problem& p, const Saved& saved, const KeptStates& to, const Device& device) {
  const auto [cut, updates] = start_pass(p, 1, device);
  const int dim = static_cast<int>(p.key_dim), values = static_cast<int>(p.value_dim);
  const ChunkHCall call{.updates = updates,
                        .h = {.states = static_cast<float*>(saved.h), .rows = dim, .columns = dim, .chunks = to.h},
                        .u = {.states = static_cast<float*>(saved.u), .rows = dim, .columns = values, .chunks = to.u},
                        .whole_k = whole_units(p.k, p.key_dim),
                        .whole_v = whole_units(p.v, p.value_dim)};
  start_chunk_h<D, true>(p, cut, call, device);
  return cut;
}

/// What the passes know of the solve.
inline bwd::SolveNumbers solve_numbers(const Problem& p, bool float32) {
  const Schedules schedules = schedules_of(p);
  bwd::SolveNumbers of{.pace = schedules.of[0].pace,
                       .headroom = schedules.of[0].headroom,
                       .least_spread = schedules.may_refine ? schedules.least_spread : 0,
                       .least_for_two = schedules.may_refine ? schedules.least_for_two : 0,
                       .float32 = float32,
                       .reaches = schedules.reaches};
  std::copy_n(schedules.spread, kReaches, of.spread);
  return of;
}
/// The second solve's right-hand side, and where its answer goes.
template <int D>
SolveCall second_solve(const Problem& p, const bwd::Scratch<D>& of) {
  return {.rhs = {.data = of.udo,
                  .dtype = DType::float32,
                  .batch_stride = p.tokens * p.heads * p.key_dim,
                  .token_stride = p.heads * p.key_dim,
                  .head_stride = p.key_dim},
          .x = of.y,
          .tiles = reinterpret_cast<char*>(of.y_tiles),
          .tile_down = of.y_down};
}

/// Whether all that is read and written of tokens lies aligned, in heads of so many channels.
inline bool all_whole(const Problem& p, const Gradients& g, int size) {
  if (p.key_dim != size || (p.value_dim != size && p.options.part == Part::both)) return false;
  for (const View& view : {p.q, p.k, p.v, g.d_o, g.d_q, g.d_k, g.d_v}) {
    if (!bwd::lies_whole(view, p.q.dtype)) return false;
  }
  return true;
}

}  // namespace gka::kernels::cuda::hopper
