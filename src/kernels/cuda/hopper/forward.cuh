// The kernels of the forward pass in the order in which they run, for the host; the backward pass reuses the pieces.
// They are compiled for D = 128, to which smaller sizes are padded.
#pragma once

#include "kernels/cuda/hopper/recall.cuh"

namespace gka::kernels::cuda::hopper {

inline constexpr int kDim = 128;
inline int padded_dim(const Problem&) { return kDim; }

/// Calls body with the type of the tokens as a compile-time constant.
template <typename Body>
void with_type(const Problem& p, Body&& body) {
  if (p.q.dtype == DType::float16) return body(Storage<DType::float16>{});
  body(Storage<DType::bfloat16>{});
}

/// Room for the states of `across` blocks of 128 columns at the start of every chunk; `parts` as in KeyStates.
inline KeyStates room_for_states(const Problem& p, const Device& device, int across, int parts) {
  const std::int64_t slots = 2 * segments_of(p) * p.heads;
  return {.tiles = allocate<__half>(device, slots * across * parts * kDim * kWidth),
          .norm = allocate<float>(device, slots * across),
          .trace = allocate<float>(device, slots),
          .parts = parts,
          .across = across};
}

inline Fades start_fades(const Problem& p, const Plan& plan, const Device& device) {
  const std::int64_t slots = 2 * segments_of(p) * p.heads;
  const Fades fades{.weight = allocate<float>(device, slots * kTokens), .chunk = allocate<float2>(device, slots)};
  with_type(
      p, [&](auto type) { start<256>(find_fades<decltype(type)::type>, (slots + 7) / 8, 0, device, p, plan, fades); });
  return fades;
}

/// A walk over H and U.
template <bool kSpread>
void start_walk(const Problem& p, const Cut& cut, const Walk& call, const Device& device) {
  const std::int64_t across = (p.value_dim + kWidth - 1) / kWidth;
  with_type(p, [&](auto type) {
    start<kWalkThreads>(walk<kDim, kSpread, decltype(type)::type>, cut.room * p.heads * across,
                        WalkRoom<kDim, kSpread>::kBytes, device, p, cut, call);
  });
}

/// x for any right-hand side. Returned are the packages (prepare.cuh), in scratch.
template <bool kReads = false>
const char* start_solve(const Problem& p, const Plan& plan, const KeyStates& states, const SolveCall& call,
                        const Device& device) {
  const Schedules schedules = make_schedules(p.options.ridge, p.options.iterations, p.options.refine);
  if (p.batch * p.tokens * p.heads == 0) return nullptr;
  const std::int64_t tasks = 2 * segments_of(p) * p.heads;
  auto* const packages = allocate<char>(device, tasks * Package<kDim>::kBytes);
  with_type(p, [&](auto type) {
    constexpr auto kernel = solve<kDim, decltype(type)::type, kReads>;
    const std::int64_t blocks = blocks_of(kernel, tasks, kSolveBytes<kDim>, device.index);
    auto* const parked = allocate<float4>(device, blocks * kParked<kDim>);
    const bool rhs_pairs = whole_pairs(call.rhs, p.key_dim);
    start(prepare<kDim, decltype(type)::type>, tasks, kPrepareBytes<kDim>, device, p, plan, states, call, schedules,
          packages, whole_units(p.k, p.key_dim), rhs_pairs);
    start(kernel, blocks, kSolveBytes<kDim>, device, p, plan, states, call, schedules,
          static_cast<const char*>(packages), parked, rhs_pairs);
  });
  return packages;
}

}  // namespace gka::kernels::cuda::hopper
