// The kernels of the forward pass in the order in which they run, for the host; the backward pass reuses the pieces.
#pragma once

#include "kernels/cuda/hopper/recall.cuh"

namespace gka::kernels::cuda::hopper {

// Without GKA_HOPPER_ALL the kernels are compiled for D = 128 alone, to which smaller sizes are padded.
#ifdef GKA_HOPPER_ALL
inline constexpr bool kAllShapes = true;
#else
inline constexpr bool kAllShapes = false;
#endif

/// D padded to what the kernels are compiled for.
inline int padded_dim(const Problem& p) { return kAllShapes && p.key_dim <= 64 ? 64 : 128; }

/// Calls body(D, type) with both as compile-time constants.
template <typename Body>
void with_shape(const Problem& p, Body&& body) {
  if constexpr (kAllShapes) {
    if (padded_dim(p) == 64) return body(std::integral_constant<int, 64>{}, Storage<DType::bfloat16>{});
  }
  body(std::integral_constant<int, 128>{}, Storage<DType::bfloat16>{});
}

inline KeyStates room_for_key_states(const Problem& p, const Device& device) {
  const std::int64_t slots = 2 * segments_of(p) * p.heads, dim = padded_dim(p);
  return {.tiles = allocate<__half>(device, slots * 2 * dim * dim), .norm = allocate<float>(device, slots)};
}

/// H at the start of every chunk, from H at the start of every group of `cut` (row-major float32). `saved`, if given,
/// gets H at the start of every segment.
inline void start_spread(const Problem& p, const Cut& cut, const float* group_states, float* saved,
                         const KeyStates& states, const Device& device) {
  with_shape(p, [&](auto dim, auto type) {
    constexpr int kDim = decltype(dim)::value;
    constexpr DType kType = decltype(type)::type;
    const Walk walk_call{.states = const_cast<float*>(group_states),
                         .rows = static_cast<int>(p.key_dim),
                         .columns = static_cast<int>(p.key_dim),
                         .spread = states,
                         .saved = saved,
                         .whole_k = whole_units(p.k, p.key_dim)};
    start(walk<kDim, kDim, true, true, kType>, cut.room * p.heads, kWalkBytes<kDim, kDim, true, true>, device, p, cut,
          walk_call);
  });
}

/// x for any right-hand side.
template <bool kReads = false>
void start_solve(const Problem& p, const Plan& plan, const KeyStates& states, const SolveCall& call,
                 const Device& device) {
  const Schedule schedule = make_schedule(p.options.ridge, p.options.iterations, p.options.refine);
  if (p.batch * p.tokens * p.heads == 0) return;
  with_shape(p, [&](auto dim, auto type) {
    constexpr int kDim = decltype(dim)::value;
    constexpr DType kType = decltype(type)::type;
    const std::int64_t blocks =
        blocks_of(solve<kDim, kType, kReads>, 2 * segments_of(p) * p.heads, kSolveBytes<kDim>, device.index);
    auto* const parked = allocate<float4>(device, blocks * kParked<kDim>);
    start(solve<kDim, kType, kReads>, blocks, kSolveBytes<kDim>, device, p, plan, states, call, schedule, parked,
          whole_units(p.k, p.key_dim), whole_pairs(call.rhs, p.key_dim));
  });
}

}  // namespace gka::kernels::cuda::hopper
