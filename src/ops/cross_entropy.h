// Cross entropy of a linear head without its logits: tokens go through the head in slices, and a slice's gradient is
// taken while its logits are there, so that [tokens, vocabulary] never exists at once.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gka::ops {

struct CrossEntropy {
  at::Tensor loss;       // scale · Σ over the tokens, float32 (float64 for float64), differentiable
  at::Tensor predicted;  // int64 [M]: the likeliest class of each token; undefined unless asked for
};
/// hidden [M, C], weight [V, C], labels int64 [M] below V or kIgnoredLabel, `scale` a scalar, all on one device;
/// `slice` tokens at a time. Products run in the type of `hidden`, and each gradient has the type of what it belongs
/// to.
CrossEntropy sliced_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                  const at::Tensor& scale, std::int64_t slice, bool predict);

}  // namespace gka::ops
