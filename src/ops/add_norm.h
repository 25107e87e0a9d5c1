// The sum a block of a decoder begins with and its RMS norm, in one pass over memory, for tensors on a GPU.
#pragma once

#include <ATen/core/Tensor.h>

namespace gka::ops {

/// Whether `add_norm` takes the tensors; y may be undefined.
bool has_add_norm(const at::Tensor& x, const at::Tensor& y, const at::Tensor& weight);

struct AddNorm {
  at::Tensor sum, normed;  // x + y, and it over its root mean square, times the weight
};
/// x and y [..., C] contiguous of one type; y undefined: the sum is x. Weight float32 [C]. With gradients.
AddNorm add_norm(const at::Tensor& x, const at::Tensor& y, const at::Tensor& weight, double eps);

}  // namespace gka::ops
