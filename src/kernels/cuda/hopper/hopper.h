// The Hopper kernels: bfloat16 and float16 inputs on tensor cores, compute capability 9.0. They carry part of the
// operator; what they do not carry runs on the plain path (kernels/cuda), and `unsupported` says why. What a forward
// pass saves is the same on both, so either backward pass may follow either forward pass.
#pragma once

#include "gka/kernels.h"

namespace gka::kernels::cuda::hopper {

/// Why these kernels do not take a call, or nullptr if they do. Says nothing of the device.
const char* unsupported(const Problem& problem);
inline bool takes(const Problem& problem) { return unsupported(problem) == nullptr; }
/// Whether the device is one they run on.
bool runs_on(int device);

/// As cuda::forward, for a problem they take, without a report.
void forward(const Problem& problem, const Outputs& outputs, const Device& device);
/// As cuda::backward, where they take the forward pass and this too.
bool takes_backward(const Problem& problem, const Gradients& gradients);
void backward(const Problem& problem, const Saved& saved, const Gradients& gradients, const Device& device);

}  // namespace gka::kernels::cuda::hopper
