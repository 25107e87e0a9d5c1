// The Hopper kernels: bfloat16 and float16 inputs on tensor cores, compute capability 9.0. They carry part of the
// operator; what they do not carry runs on the plain path (kernels/cuda), and `unsupported` says why.
#pragma once

#include "gka/kernels.h"

namespace gka::kernels::cuda::hopper {

/// Why these kernels do not take a call, or nullptr if they do. Says nothing of the device.
const char* unsupported(const Problem& problem);
inline bool takes(const Problem& problem) { return unsupported(problem) == nullptr; }
/// Whether the device is one they run on.
bool runs_on(int device);

/// Whether Saved has H and U as the tiles that their backward pass reads, at every chunk, not as the float32 states of
/// the plain path, at every segment: of one size. `save_tiles` makes the former of the latter, `restore_states` the
/// latter of the former, in `to`.
bool keeps_tiles(const Problem& problem);
void save_tiles(const Problem& problem, const Saved& from, const Saved& to, const Device& device);
void restore_states(const Problem& problem, const Saved& from, const Saved& to, const Device& device);

/// As cuda::forward, for a problem they take, without a report.
void forward(const Problem& problem, const Outputs& outputs, const Device& device);
/// As cuda::backward, where they take the forward pass and this too.
bool takes_backward(const Problem& problem, const Gradients& gradients);
void backward(const Problem& problem, const Saved& saved, const Gradients& gradients, const Device& device);
/// The same from float32 states, whatever `keeps_tiles` says.
void backward_from_states(const Problem& problem, const Saved& saved, const Gradients& gradients, const Device& device);
/// As `backward` where only the value channels are too many, block after block of them.
bool takes_backward_in_blocks(const Problem& problem, const Gradients& gradients);
void backward_in_blocks(const Problem& problem, const Saved& saved, const Gradients& gradients, const Device& device);

}  // namespace gka::kernels::cuda::hopper
