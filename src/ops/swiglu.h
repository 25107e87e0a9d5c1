// The feed-forward part of a block, for tensors on a GPU that `has_fused` takes.
#pragma once

#include <ATen/core/Tensor.h>

namespace gka::ops {

/// SiLU(gate) ⊙ up, [N, C] each: contiguous, or side by side in a wider contiguous tensor. It has no gradient.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);

/// down(SiLU(gate x) ⊙ up x) with its gradients; x [..., C], the others weights.
at::Tensor swiglu_mlp(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& up, const at::Tensor& down);

}  // namespace gka::ops
