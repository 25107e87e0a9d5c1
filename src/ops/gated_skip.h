// What Mamba2 does to the memory's answers before its norm: (y + D x) ⊙ SiLU(z), in one pass over memory on a GPU.
#pragma once

#include <ATen/core/Tensor.h>

namespace gka::ops {

/// Whether `gated_skip` takes the tensors: x and v [B,T,H,D], gate [B,T,H·D], all of one type, skip [H].
bool has_gated_skip(const at::Tensor& x, const at::Tensor& v, const at::Tensor& gate);

/// (x + skip ∘ v) ⊙ SiLU(gate), [B,T,H·D], in float32 until it is rounded. With gradients.
at::Tensor gated_skip(const at::Tensor& x, const at::Tensor& v, const at::Tensor& gate, const at::Tensor& skip);

}  // namespace gka::ops
