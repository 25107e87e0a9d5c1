// The Hopper kernels: bfloat16 and float16 inputs on tensor cores, compute capability 9.0. They carry part of the
// operator; kernels/cuda/choose.h says which, and all else runs on the plain path.
#pragma once

#include "gka/kernels.h"
#include "kernels/cuda/hopper/sizes.h"

namespace gka::kernels::cuda::hopper {

/// As cuda::forward and cuda::backward, for a problem they take.
void forward(const Problem& problem, const Outputs& outputs, const Device& device);
void backward(const Problem& problem, const Saved& saved, const Gradients& gradients, const Device& device);
/// How many value channels a backward pass takes at a time: 128, or 256 beside more than 128 key channels.
constexpr std::int64_t widest_values(const Problem& problem) {
  return problem.key_dim > kLargeSize ? kWideSize : kLargeSize;
}
/// The latter for more than 128 key channels and up to 256 value channels.
void backward_wide(const Problem& problem, const Saved& saved, const Gradients& gradients, const Device& device);
/// The same for any number of key channels and so many value channels, from float32 states, whatever `keeps_tiles`
/// says.
void backward_from_states(const Problem& problem, const Saved& saved, const Gradients& gradients, const Device& device);
/// The same for any number of value channels, block after block of them.
void backward_in_blocks(const Problem& problem, const Saved& saved, const Gradients& gradients, const Device& device);

/// Where `keeps_tiles` (kernels/cuda/saved.h) says so, Saved has H and U as the tiles that their backward pass reads,
/// at every chunk, not as the float32 states of the plain path, at every segment. `save_tiles` makes the former of the
/// latter, `restore_states` the latter of the former, in `to`.
void save_tiles(const Problem& problem, const Saved& from, const Saved& to, const Device& device);
void restore_states(const Problem& problem, const Saved& from, const Saved& to, const Device& device);

}  // namespace gka::kernels::cuda::hopper
