// A decoder's other operations fused, for tensors on a GPU: below autograd, for the floors above to build on. Elsewhere
// torch's own operations do: ask `has_fused` first.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "kernels/cuda/fused.h"

namespace gka::ops {

/// Whether there are kernels for the tensor's device and type, and its memory suits them.
bool has_fused(const at::Tensor& tensor);

/// Last dimensions must be multiples of it.
inline constexpr std::int64_t kFusedMultiple = 8;

/// SiLU(gate) ⊙ up, [N, C] each: contiguous, or side by side in a wider contiguous tensor.
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up);
struct SwiGluGradients {
  at::Tensor d_gate, d_up;  // the halves of d_both
  at::Tensor d_both;        // [N, 2 C]
  at::Tensor y;             // SiLU(gate) ⊙ up once more
};
SwiGluGradients swiglu_backward(const at::Tensor& d_y, const at::Tensor& gate, const at::Tensor& up);

/// Whether x is a tensor whose rows, and a weight for them, `add_norm` takes.
bool has_add_norm(const at::Tensor& x, const at::Tensor& weight);
struct AddNorm {
  at::Tensor sum, normed;  // x + y, and it over its root mean square, times the weight
};
/// x and y [..., C] contiguous of one type; y undefined: the sum is x. Weight float32 [C].
AddNorm add_norm(const at::Tensor& x, const at::Tensor& y, const at::Tensor& weight, double eps);
struct AddNormGradients {
  at::Tensor d_x, d_weight;  // d_x is y's gradient too
};
/// d_sum may be undefined.
AddNormGradients add_norm_backward(const at::Tensor& d_sum, const at::Tensor& d_normed, const at::Tensor& sum,
                                   const at::Tensor& weight, double eps);

using kernels::cuda::Gate;
struct GateKind {
  Gate gate = Gate::sigmoid;
  at::Tensor bias, a_log;  // float32 [heads]; a_log for log_decay alone
};
/// Whether `gates` takes the projection, and the parameters.
bool has_gates(const at::Tensor& projected, const std::vector<GateKind>& kinds);
/// projected [..., kinds · heads], contiguous or columns of what is; float32 [..., heads] for each kind.
std::vector<at::Tensor> gates(const at::Tensor& projected, const std::vector<GateKind>& kinds);
struct GateGradients {
  at::Tensor d_projected;
  std::vector<at::Tensor> d_bias, d_a_log;  // of each kind
};
/// `d_values` contiguous; undefined: 0.
GateGradients gates_backward(const std::vector<at::Tensor>& d_values, const at::Tensor& projected,
                             const std::vector<GateKind>& kinds);

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
