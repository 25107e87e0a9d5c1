// A token from each row of logits by a kernel of the GPU's (kernels/cuda/sample.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace gka::ops {

bool has_sample(const at::Tensor& logits);
/// logits [rows, tokens]; how: float64 [rows, 2] on the same device, temperature and share. Returns float64 [rows, 2]:
/// token and log-probability.
at::Tensor sample(const at::Tensor& logits, const at::Tensor& how);

}  // namespace gka::ops
