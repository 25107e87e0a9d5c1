// The kernels of the forward pass in the order in which they run, for the host; the backward pass reuses the pieces.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "kernels/cuda/hopper/blocks.h"
#include "kernels/cuda/hopper/chunk_o.cuh"
#include "kernels/cuda/hopper/solve_increments.cuh"
#include "kernels/cuda/hopper/solve_wide.cuh"
#include "kernels/cuda/saved.h"
#include "kernels/cuda/trial.h"

namespace gka::kernels::cuda::hopper {

/// Calls body with the type of the tokens as a compile-time constant. Float16 can be left out of a build
/// (GKA_HOPPER_FLOAT16): it is half of what there is to compile.
template <typename Body>
void with_type(const Problem& p, Body&& body) {
  switch (p.q.dtype) {
#if defined(GKA_HOPPER_FLOAT16) && !GKA_HOPPER_FLOAT16
    case DType::float16:
      throw std::runtime_error("gka: built without float16 on Hopper (GKA_HOPPER_FLOAT16); GKA_GPU=plain takes it");
#else
    case DType::float16: return body(Storage<DType::float16>{});
#endif
    case DType::bfloat16: return body(Storage<DType::bfloat16>{});
    case DType::float64:
    case DType::float32: break;  // never chosen
  }
  throw std::logic_error("gka: the Hopper kernels were called with a type they do not take");
}

/// Whether a problem's heads need not be padded to 64 channels. What Saved holds does not depend on it.
inline bool is_narrow(const Problem& p) {
  return p.key_dim <= kNarrowSize && p.value_dim <= kNarrowSize && p.options.part == Part::both &&
         p.options.ridge_mode == RidgeMode::adaptive;
}

/// Calls body with the D of the problem, unless it is narrow or wide, as a compile-time constant.
template <typename Body>
void with_padded_size(const Problem& p, Body&& body) {
  if (size_for(p.key_dim, p.value_dim) == kSmallSize) {
    body(std::integral_constant<int, kSmallSize>{});
  } else {
    body(std::integral_constant<int, kLargeSize>{});
  }
}
template <typename Body>
void with_size(const Problem& p, bool narrow, Body&& body) {
  if (narrow) {
    body(std::integral_constant<int, kNarrowSize>{});
  } else {
    with_padded_size(p, body);
  }
}

/// Calls body with a flag as a compile-time constant; for narrow and wide heads with what `is_narrow`, and
/// `takes_wide` of choose.h, ask of it.
template <int D, bool kOfTheirs, typename Body>
void with_known(bool flag, Body&& body) {
  if constexpr (D == kNarrowSize || D == kWideSize) {
    body(std::bool_constant<kOfTheirs>{});
  } else if (flag) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}
/// The same with whether the ridge is constant, and whether there are values.
template <int D, typename Body>
void with_ridge(const Problem& p, Body&& body) {
  with_known<D, false>(p.options.ridge_mode == RidgeMode::constant, body);
}
template <int D, typename Body>
void with_values(const Problem& p, Body&& body) {
  with_known<D, true>(p.options.part == Part::both, body);
}
/// The keys' part alone as the whole operator without values: what it would ask of them is not there.
inline Problem without_values(Problem p) {
  if (p.options.part == Part::both) return p;
  p.value_dim = 0;
  p.v = p.alpha = {};
  p.u0 = nullptr;
  p.options.scale = 1;
  return p;
}

/// Room for the states of `across` blocks of kStateColumns<D> columns at the start of every chunk.
template <int D>
ChunkStates room_for_states(const Problem& p, const Device& device, int across) {
  const std::int64_t slots = slots_of(p);
  return {.tiles = allocate<__half>(device, slots * across * D * kStateColumns<D>),
          .norm = allocate<float>(device, slots * across),
          .trace = allocate<float>(device, slots * kStateBlocks<D>),
          .ample = allocate<int>(device, slots),
          .across = across};
}

struct KeptStates {
  ChunkStates h, u;
};
/// Where tiles lie that are kept for the backward pass.
template <int D>
KeptStates kept_states(const Problem& p, const Saved& saved) {
  const SavedTiles layout{.slots = slots_of(p), .dim = D};
  const auto behind = [](void* tiles, std::int64_t bytes) { return static_cast<char*>(tiles) + bytes; };
  const auto numbers = [&](void* tiles, std::int64_t bytes) { return reinterpret_cast<float*>(behind(tiles, bytes)); };
  return {.h = {.tiles = static_cast<__half*>(saved.h),
                .norm = numbers(saved.h, layout.h_norm()),
                .trace = numbers(saved.h, layout.h_trace()),
                .ample = reinterpret_cast<int*>(behind(saved.u, layout.ample()))},
          .u = {.tiles = static_cast<__half*>(saved.u), .norm = numbers(saved.u, layout.u_norm())}};
}

/// How a pass begins: the cut, and what its chunks do to a state. In one launch where sequences are not packed.
struct Beginning {
  Cut cut;
  StateUpdates updates;
};
inline Beginning start_pass(const Problem& p, int per_group, const Device& device) {
  const bool packed = p.cu_seqlens != nullptr;
  const Cut cut = packed ? start_cut(p, per_group, device) : room_for_cut(p, per_group, device);
  const std::int64_t slots = slots_of(p);
  const StateUpdates updates{.weight = allocate<float>(device, slots * kChunk),
                             .chunk = allocate<float2>(device, slots),
                             .gates = allocate<ChunkGates>(device, slots)};
  with_type(p, [&](auto type) {
    const std::int64_t tasks = (slots + kWarps - 1) / kWarps + (packed ? 0 : 1);
    start<kThreads>(chunk_gates<decltype(type)::type>, tasks, 0, device, p, cut, updates, !packed);
  });
  return {cut, updates};
}

/// H and U of groups of segments, or at the start of every chunk.
template <int D, bool kEveryChunk>
void start_chunk_h(const Problem& p, const Cut& cut, const ChunkHCall& call, const Device& device) {
  const bool shared = p.key_group > 1 || p.value_group > 1;
  with_type(p, [&](auto type) {
    with_values<D>(p, [&](auto values) {
      constexpr DType kType = decltype(type)::type;
      constexpr bool kValues = decltype(values)::value;
      const std::int64_t across = kValues ? blocks_across<D>(static_cast<int>(p.value_dim)) : 1;
      // Keys alone always ask for the group: an instance less to compile.
      start<kChunkHThreads>(
          shared ? chunk_h<D, kEveryChunk, kType, kValues, true> : chunk_h<D, kEveryChunk, kType, kValues, !kValues>,
          cut.room * p.heads * across, ChunkHLayout<D, kEveryChunk>::kBytes, device, p, cut, call);
    });
  });
}

/// How many blocks share the chunks of all heads.
template <typename Kernel>
std::int64_t blocks_of_chunks(Kernel kernel, const Problem& p, int shared_bytes, const Device& device,
                              int threads = kWarpgroup) {
  std::int64_t blocks = blocks_of(kernel, slots_of(p), shared_bytes, device.index, threads);
  // So that another stream's kernels, which memory bounds, run beside the products.
  if (on_trial(Trial::lesser_solve)) blocks = std::max<std::int64_t>(1, blocks * 3 / 4);
  return blocks_for_heads(blocks, slots_of(p), p.heads);
}

/// The solve's steps. With weights that are found token by token they are always the usual ones.
inline Schedules schedules_of(const Problem& p) {
  const Options& of = p.options;
  return make_schedules(of.ridge, of.iterations, of.refine, p.key_dim);
}

/// The same by increments.
template <int D, bool kReads>
void start_increments(const Problem& p, const Plan& plan, const ChunkStates& states, const SolveCall& call,
                      const Device& device, const char* systems, const Schedules& schedules, bool conjugate) {
  const Options& of = p.options;
  IncrementSchedules increments = make_increment_schedules(schedules, of.ridge, of.iterations, of.refine);
  const auto start_as = [&](auto type, auto constant, auto by_conjugates) {
    constexpr auto kernel =
        solve_increments<D, decltype(type)::type, kReads, decltype(constant)::value, decltype(by_conjugates)::value>;
    constexpr int kBytes = IncrementsLayout<D>::kBytes;
    const std::int64_t blocks = blocks_of_chunks(kernel, p, kBytes, device);
    start(kernel, blocks, kBytes, device, p, plan, states, call, increments, systems, whole_pairs(call.rhs, p.key_dim));
  };
  if (conjugate && of.ridge_mode == RidgeMode::adaptive) {
    increments.conjugate = conjugate_limits(of.ridge, of.iterations, of.refine, !kReads);
  }
  with_type(p, [&](auto type) {
    if (increments.conjugate.most > 0) return start_as(type, std::false_type{}, std::true_type{});
    with_ridge<D>(p, [&](auto constant) { start_as(type, constant, std::false_type{}); });
  });
}

/// x for the right-hand side that the systems hold (and the call, for residuals).
template <int D, bool kReads = false>
void start_solve(const Problem& p, const Plan& plan, const ChunkStates& states, const SolveCall& call,
                 const Device& device, const char* systems) {
  const Schedules schedules = schedules_of(p);
  if (p.batch * p.tokens * p.heads == 0) return;
  const bool conjugate = on_trial(Trial::conjugate);
  if (conjugate || on_trial(Trial::increments)) {
    return start_increments<D, kReads>(p, plan, states, call, device, systems, schedules, conjugate);
  }
  with_type(p, [&](auto type) {
    with_ridge<D>(p, [&](auto constant) {
      constexpr auto kernel = solve<D, decltype(type)::type, kReads, decltype(constant)::value>;
      const std::int64_t blocks = blocks_of_chunks(kernel, p, kSolveBytes<D>, device);
      auto* const parked = allocate<float4>(device, blocks * kParked<D>);
      start(kernel, blocks, kSolveBytes<D>, device, p, plan, states, call, schedules, systems, parked,
            whole_pairs(call.rhs, p.key_dim));
    });
  });
}

/// The same of wide heads.
template <bool kReads>
void start_wide_solve(const Problem& p, const Plan& plan, const ChunkStates& states, const SolveCall& call,
                      const Device& device, const char* systems) {
  const Schedules schedules = schedules_of(p);
  if (p.batch * p.tokens * p.heads == 0) return;
  constexpr int kBytes = WideLayout::kBytes;
  const std::int64_t blocks = blocks_of_chunks(solve_wide<kReads>, p, kBytes, device, kWideThreads);
  auto* const parked = allocate<float4>(device, blocks * kWideGroups * kParked<kWideColumns>);
  start<kWideThreads>(solve_wide<kReads>, blocks, kBytes, device, p, plan, states, call, schedules, systems, parked);
}

}  // namespace gka::kernels::cuda::hopper
