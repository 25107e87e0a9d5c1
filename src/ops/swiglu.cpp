#include "ops/swiglu.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include "kernels/cuda/fused.h"
#include "ops/checks.h"
#include "ops/linear.h"
#include "ops/on_gpu.h"

namespace gka::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

kernels::cuda::SwiGlu swiglu_of(const at::Tensor& gate, const at::Tensor& up) {
  return {.rows = gate.size(0),
          .width = gate.size(1),
          .stride = gate.stride(0),
          .dtype = kernel_dtype(gate.scalar_type()),
          .gate = gate.const_data_ptr(),
          .up = up.const_data_ptr()};
}

struct SwiGluGradients {
  at::Tensor d_both;  // [N, 2 C]: of gate and of up
  at::Tensor y;       // SiLU(gate) ⊙ up once more
};

SwiGluGradients swiglu_backward(const at::Tensor& d_y, const at::Tensor& gate, const at::Tensor& up) {
  const auto slope = d_y.contiguous();
  const auto width = gate.size(1);
  const auto d_both = at::empty({gate.size(0), 2 * width}, gate.options());
  const auto d_gate = d_both.narrow(1, 0, width), d_up = d_both.narrow(1, width, width);
  const SwiGluGradients results{.d_both = d_both, .y = at::empty(gate.sizes(), gate.options())};
  on_gpu(gate, [&](const auto& device) {
    kernels::cuda::swiglu_backward(swiglu_of(gate, up),
                                   {.d_y = slope.const_data_ptr(),
                                    .d_gate = d_gate.data_ptr(),
                                    .d_up = d_up.data_ptr(),
                                    .y = results.y.data_ptr()},
                                   device);
  });
  return results;
}

/// The whole of down(SiLU(gate x) · up x). Gate and up are one product, and what leaves them is all that is kept: SiLU
/// and product are cheaper to compute again than to hold.
struct FusedSwiGlu : torch::autograd::Function<FusedSwiGlu> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& gate, const at::Tensor& up,
                            const at::Tensor& down) {
    const auto type = x.scalar_type();
    const auto width = gate.size(0);
    const auto both = stacked({gate, up}, type);
    const auto inner = at::mm(x, both.t());
    const auto outward = down.to(type);
    context->save_for_backward({x, inner, both, outward});
    context->saved_data["type"] = gate.scalar_type();
    return at::mm(swiglu(inner.narrow(1, 0, width), inner.narrow(1, width, width)), outward.t());
  }

  static variable_list backward(AutogradContext* context, const variable_list& slopes) {
    const auto kept = context->get_saved_variables();
    const auto &x = kept[0], &inner = kept[1], &both = kept[2], &outward = kept[3];
    const auto type = context->saved_data["type"].toScalarType();
    const auto width = outward.size(1);
    const auto slope = slopes[0].contiguous();
    const auto inside =
        swiglu_backward(at::mm(slope, outward), inner.narrow(1, 0, width), inner.narrow(1, width, width));
    const auto to_both = product_as(type, inside.d_both.t(), x);
    return {at::mm(inside.d_both, both), to_both.narrow(0, 0, width), to_both.narrow(0, width, width),
            product_as(type, slope.t(), inside.y)};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  const auto y = at::empty(gate.sizes(), gate.options());
  on_gpu(gate, [&](const auto& device) { kernels::cuda::swiglu(swiglu_of(gate, up), y.data_ptr(), device); });
  return y;
}

at::Tensor swiglu_mlp(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& up, const at::Tensor& down) {
  return FusedSwiGlu::apply(x.reshape({-1, x.size(-1)}), gate, up, down).view(x.sizes());
}

}  // namespace gka::ops
