// The passes of memory.h in the order in which they run; each reads what the ones before it left.
#pragma once

#include "kernels/cuda/memory/memory.h"

namespace gka::kernels::cuda::memory {

/// Leaves the tiles; with the delta rule t, and in u T β v; without it β v in u.
void run_chunk_wy(const ChunkedMemory& m, const ChunkedMemorySaved& saved, const Device& device);
void run_chunk_wy_channels(const ChunkedMemory& m, const ChunkedMemorySaved& saved, const Device& device);
/// Leaves o, the final state, u and the states.
void run_chunk_states(const ChunkedMemory& m, const ChunkedMemorySaved& saved, const ChunkedMemoryOutputs& out,
                      const Device& device);

/// Leaves d_u, d_states and d_initial.
void run_bwd_states(const ChunkedMemory& m, const ChunkedMemorySaved& saved, const ChunkedMemoryGradients& gradients,
                    const Device& device);
/// Leaves the gradients of the inputs.
void run_bwd_inputs(const ChunkedMemory& m, const ChunkedMemorySaved& saved, const ChunkedMemoryGradients& gradients,
                    const Device& device);
void run_bwd_inputs_channels(const ChunkedMemory& m, const ChunkedMemorySaved& saved,
                             const ChunkedMemoryGradients& gradients, const Device& device);

/// The bytes of a pass's shared memory.
template <typename Shared>
constexpr int shared_bytes() {
  static_assert(sizeof(Shared) <= ChunkedMemory::kSharedBytes);
  return sizeof(Shared);
}

/// Whether a head has one decay or each of its key channels.
enum class Decay : std::uint8_t { per_head, per_channel };

/// body.operator()<kKeys, kDelta>() with the narrowest tiles that hold the keys.
template <typename Body>
void with_shape(const ChunkedMemory& m, Body&& body) {
  if (m.key_dim <= 64) {
    m.delta ? body.template operator()<64, true>() : body.template operator()<64, false>();
  } else {
    m.delta ? body.template operator()<128, true>() : body.template operator()<128, false>();
  }
}

/// body.operator()<kKeys, kDelta, kDecay>().
template <typename Body>
void with_shape_and_decay(const ChunkedMemory& m, Body&& body) {
  with_shape(m, [&]<int kKeys, bool kDelta>() {
    m.per_channel ? body.template operator()<kKeys, kDelta, Decay::per_channel>()
                  : body.template operator()<kKeys, kDelta, Decay::per_head>();
  });
}

}  // namespace gka::kernels::cuda::memory
