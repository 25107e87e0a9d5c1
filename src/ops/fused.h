// A decoder's other operations fused, for tensors on a GPU: below autograd, for the floors above to build on. Elsewhere
// torch's own operations do: ask `has_fused` first.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace gka::ops {

/// Whether there are kernels for the tensor's device and type, and its memory suits them.
bool has_fused(const at::Tensor& tensor);

/// SiLU(gate) ⊙ up, and the gradients of both; all of one shape and type, contiguous.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
std::pair<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& d_y, const at::Tensor& gate, const at::Tensor& up);

/// x [..., heads, D] contiguous; cos and sin float32 [..., 1, D/2] contiguous. Sign −1 turns back.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign);

struct CrossEntropyRows {
  at::Tensor losses;     // float32 [M]; 0 where the label is negative
  at::Tensor predicted;  // int64 [M]; undefined unless asked for
};
/// logits [M, N] contiguous, of which the first `classes` columns count; labels int64 [M]. Where `scale` (float32, a
/// scalar on the device) is defined, logits become scale · (softmax − one-hot), and 0 in the other columns.
CrossEntropyRows cross_entropy_(at::Tensor logits, const at::Tensor& labels, std::int64_t classes,
                                const at::Tensor& scale, bool predict);

}  // namespace gka::ops
