// The backward pass of heads with more than 128 key channels: as backward.cu, of states in blocks of columns that are
// divided by their own norms, with U_c do_c and ŷ_c in float32.
#include "kernels/cuda/hopper/backward.cuh"
#include "kernels/cuda/hopper/hopper.h"

namespace gka::kernels::cuda::hopper {
namespace {

/// What there is of a state's blocks, as one: its norm, its trace where it is wanted, what blocks have of the norm.
__global__ void __launch_bounds__(256)
    join_blocks(ChunkStates states, std::int64_t tasks, float* norms, float* traces, float* shares) {
  for (std::int64_t task = block() * 256 + thread(); task < tasks; task += blocks() * 256) {
    float share[kStateBlocks<kWideSize>];
    norms[task] = join_norms<kWideSize>(states, task, share);
    for (int b = 0; b < kStateBlocks<kWideSize>; ++b) shares[task * kStateBlocks<kWideSize> + b] = share[b];
    if (traces == nullptr) continue;
    float trace = 0;
    for (int b = 0; b < kStateBlocks<kWideSize>; ++b) trace += states.trace[task * kStateBlocks<kWideSize> + b];
    traces[task] = trace;
  }
}

bwd::GivenStates<kWideSize> join(const Problem& p, const ChunkStates& states, float* traces, const Device& device) {
  const std::int64_t tasks = slots_of(p);
  auto* const norms = allocate<float>(device, tasks);
  auto* const shares = allocate<float>(device, tasks * kStateBlocks<kWideSize>);
  start<256>(join_blocks, (tasks + 255) / 256, 0, device, states, tasks, norms, traces, shares);
  return {.tiles = reinterpret_cast<const std::uint16_t*>(states.tiles), .norm = norms, .share = shares};
}

template <typename Shape>
void run_as(const Problem& p, const Saved& saved, const Gradients& out, const Device& device) {
  const KeptStates states{room_for_states<kWideSize>(p, device, kStateBlocks<kWideSize>),
                          room_for_states<kWideSize>(p, device, kStateBlocks<kWideSize>)};
  const Cut cut = start_states<kWideSize>(p, saved, states, device);
  auto* const traces = allocate<float>(device, slots_of(p));
  bwd::Scratch<kWideSize> scratch{};
  scratch.h = join(p, states.h, traces, device);
  scratch.u = join(p, states.u, nullptr, device);
  scratch.trace = traces;
  scratch.ample = states.h.ample;
  scratch.solve = solve_numbers(p, bwd::kAlwaysFloat32<kWideSize>);
  bwd::run<Shape>(p, saved, out, cut.plan, device, scratch, [&](const bwd::Scratch<kWideSize>& of) {
    start_wide_solve<false>(p, cut.plan, states.h, second_solve(p, of), device, of.systems);
  });
}

}  // namespace

void backward_wide(const Problem& p, const Saved& saved, const Gradients& out, const Device& device) {
  const CurrentDevice current(device.index);
  with_type(p, [&](auto type) {
    constexpr DType kType = decltype(type)::type;
    if (all_whole(p, out, kWideSize)) {
      run_as<bwd::Shape<kWideSize, kType, true>>(p, saved, out, device);
    } else {
      run_as<bwd::Shape<kWideSize, kType, false>>(p, saved, out, device);
    }
  });
}

}  // namespace gka::kernels::cuda::hopper
