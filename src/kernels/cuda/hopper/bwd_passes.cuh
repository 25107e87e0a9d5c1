// The passes of the implicit backward around the second solve, one thread block per chunk and head:
//
//   bwd_rhs_du U_c do_c, which is the solve's right-hand side, and the chunk's own part of the gradient of U_0
//   bwd_dq_dh  dq, dα, and the chunk's own part of the gradient of H_0
//   bwd_carry  what arrives at the end of every chunk from all later ones, along each sequence in reverse
//   bwd_dkdv   dk, dv, dβ and dg from the chunk itself and from what arrives
//
// With ŷ_c = (H_c + λ_c I)⁻¹ U_c do_c the y_c of docs/mathematics.md is α_c s ŷ_c. All gradients of a token are of the
// form Σ_{c ≥ j} M_jc (…): masked scores between tokens times tokens, plus what arrives, faded. What is not obvious:
//
// - Operands are one float16 each, with rows or tiles scaled by powers of two. That is enough because what cancels is
//   brought together first: x_c, whose part outside the keys' span is 1/ridge times larger than the rest, meets
//   (v_j·do_c) − (k_j·ŷ_c) in dk; dβ is a sum over pairs of tokens, not k·dk; and k_j·x_c has x in two parts.
// - dg is the sum over pairs without cancellation of that page, Σ_{j<t} Σ_{c≥t} P_jc, as running sums of P's rows minus
//   its columns since the last γ = 0: the same float32 numbers enter both.
// - Rows that are not finite are read as 0; see TokenGates.
#pragma once

#include "kernels/cuda/hopper/bwd_carry.cuh"
#include "kernels/cuda/hopper/bwd_dkdv.cuh"
#include "kernels/cuda/hopper/bwd_dq_dh.cuh"
#include "kernels/cuda/hopper/bwd_rhs_du.cuh"

namespace gka::kernels::cuda::hopper::bwd {

template <int D>
States<D> room_for_states(const Device& device, std::int64_t tasks) {
  return {.tiles = allocate<std::uint16_t>(device, tasks * kStateNumbers<D>),
          .down = allocate<float>(device, tasks * kSlices<D>),
          .top = allocate<float>(device, tasks * kSlices<D>)};
}

/// Queues the carrying of both gradients.
template <int D, bool kValues>
void start_carry(const Problem& p, const Plan& plan, const Device& device, const float* zeta, CarriedGradient<D> of_u,
                 CarriedGradient<D> of_h) {
  const std::int64_t states = p.sequences * p.heads;
  for (CarriedGradient<D>* c : {&of_u, &of_h}) {
    if (c->start == nullptr || (!kValues && c == &of_u)) continue;
    float* const largest = allocate<float>(device, states);
    launch_tiles(find_largest, states, 1024, device.stream, static_cast<std::int64_t>(c->rows) * c->columns, c->start,
                 largest);
    c->largest = largest;
  }
  constexpr int kBlocks = kValues ? kCarryBlocks<D> : kCarryBlocksOfKeys<D>;
  launch_tiles(bwd_carry<D, kValues>, states * kBlocks, sizeof(CarryShared), device.stream, p, plan, zeta, of_u, of_h);
}

/// Queues a backward pass. `scratch` has H and U already; solve(scratch) queues the solve of
/// (H_c + λ_c I) ŷ_c = U_c do_c for all tokens.
template <typename Shape, typename Solve>
void run(const Problem& p, const Saved& saved, const Gradients& out, const Plan& plan, const Device& device,
         Scratch<Shape::kSize> scratch, Solve&& solve) {
  constexpr int D = Shape::kSize;
  const std::int64_t segments = segments_of(p), tasks = 2 * segments * p.heads, tokens = p.batch * p.tokens * p.heads;
  const int dim = static_cast<int>(p.key_dim), values = static_cast<int>(p.value_dim);
  scratch.udo = allocate<float>(device, tokens * p.key_dim);
  scratch.y = allocate<float>(device, tokens * p.key_dim);
  scratch.systems = allocate<char>(device, tasks * SystemLayout<D>::kBytes);
  scratch.q_tiles = allocate<std::uint16_t>(device, tasks * kTileNumbers<D>);
  scratch.gates = allocate<KeptGates>(device, tasks);
  scratch.x_tiles = allocate<std::uint16_t>(device, tasks * kTileNumbers<D>);
  scratch.y_tiles = allocate<std::uint16_t>(device, tasks * kTileNumbers<D>);
  scratch.y_down = allocate<float>(device, tasks * kChunk);
  scratch.scores = allocate<std::uint16_t>(device, tasks * kChunk * kChunk);
  scratch.solutions = allocate<Solutions>(device, tasks);
  scratch.g_inner = allocate<float>(device, tasks * kPartials<D>);
  if (Shape::kValues) scratch.r_inner = allocate<float>(device, tasks * kPartials<D>);
  scratch.zeta = allocate<float>(device, tasks);
  scratch.of_h = allocate<float>(device, tasks);
  scratch.g = room_for_states<D>(device, tasks);
  if (Shape::kValues) scratch.r = room_for_states<D>(device, tasks);
  scratch.g_down = allocate<float>(device, tasks);
  if (Shape::kValues) scratch.r_down = allocate<float>(device, tasks);

  launch_tiles(bwd_rhs_du<Shape>, tasks, sizeof(RhsShared<D>), device.stream, p, saved, out, plan, scratch);
  solve(scratch);
  launch_tiles<kTeams<D>>(bwd_dq_dh<Shape>, tasks, sizeof(DqShared<D>), device.stream, p, saved, out, plan, scratch);
  start_carry<D, Shape::kValues>(p, plan, device, scratch.zeta,
                                 {.parts = scratch.r,
                                  .down = scratch.r_down,
                                  .start = static_cast<const float*>(out.d_u),
                                  .last = static_cast<float*>(out.d_u0),
                                  .rows = dim,
                                  .columns = values,
                                  .states = scratch.u,
                                  .inner = scratch.r_inner},
                                 {.parts = scratch.g,
                                  .down = scratch.g_down,
                                  .start = static_cast<const float*>(out.d_h),
                                  .last = static_cast<float*>(out.d_h0),
                                  .rows = dim,
                                  .columns = dim,
                                  .states = scratch.h,
                                  .inner = scratch.g_inner,
                                  .of_h = scratch.of_h});
  if (out.d_h0 != nullptr) {
    const std::int64_t numbers = p.sequences * p.heads * dim * dim;
    launch_tiles(make_symmetric, min<std::int64_t>((numbers + kTileThreads - 1) / kTileThreads, 1 << 16), 0,
                 device.stream, p.sequences * p.heads, dim, static_cast<float*>(out.d_h0));
  }
  launch_tiles<kTeams<D>>(bwd_dkdv<typename Shape::WithoutRidge>, tasks, sizeof(DkDvShared<D>), device.stream, p, out,
                          plan, scratch);
}

}  // namespace gka::kernels::cuda::hopper::bwd
