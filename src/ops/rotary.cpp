#include "ops/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "kernels/cuda/fused.h"
#include "ops/checks.h"
#include "ops/fused.h"
#include "ops/on_gpu.h"

namespace gka::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor turned_on_gpu(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign) {
  const auto y = at::empty_like(x);
  on_gpu(x, [&](const auto& device) {
    kernels::cuda::rotate({.tokens = cos.numel() / cos.size(-1),
                           .heads = x.size(-2),
                           .half = cos.size(-1),
                           .dtype = kernel_dtype(x.scalar_type()),
                           .x = x.const_data_ptr(),
                           .cos = cos.const_data_ptr<float>(),
                           .sin = sin.const_data_ptr<float>(),
                           .sign = static_cast<float>(sign)},
                          y.data_ptr(), device);
  });
  return y;
}

/// x turned by the angles, or, with sign −1, back. Sums are taken in the type of the angles, and x itself is never
/// copied to it: on a GPU each pass over memory counts.
at::Tensor turned(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign) {
  if (has_fused(x) && has_fused(cos)) return turned_on_gpu(x, cos, sin, sign);
  const auto half = x.size(-1) / 2;
  const auto first = x.narrow(-1, 0, half), second = x.narrow(-1, half, half);
  at::Tensor y = at::empty(x.sizes(), x.options());
  at::Tensor low = y.narrow(-1, 0, half), high = y.narrow(-1, half, half);
  at::addcmul_out(low, first * cos, second, sin, -sign);
  at::addcmul_out(high, second * cos, first, sin, sign);
  return y;
}

/// Its gradient turns back, so the angles are all it keeps.
struct Rotate : torch::autograd::Function<Rotate> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& cos,
                            const at::Tensor& sin) {
    context->save_for_backward({cos, sin});
    return turned(x, cos, sin, 1);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {turned(gradients[0].contiguous(), saved[0], saved[1], -1), {}, {}};
  }
};

}  // namespace

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  return Rotate::apply(x, cos, sin);
}

}  // namespace gka::ops
