#include "ops/add_norm.h"

#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "kernels/cuda/fused.h"
#include "ops/checks.h"
#include "ops/fused.h"
#include "ops/on_gpu.h"

namespace gka::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

kernels::cuda::AddNorm add_norm_of(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return {.rows = x.numel() / x.size(-1),
          .width = x.size(-1),
          .dtype = kernel_dtype(x.scalar_type()),
          .x = x.const_data_ptr(),
          .weight = weight.const_data_ptr<float>(),
          .eps = static_cast<float>(eps)};
}

AddNorm forward_of(const at::Tensor& x, const at::Tensor& y, const at::Tensor& weight, double eps) {
  const AddNorm results{.sum = y.defined() ? at::empty_like(x) : x, .normed = at::empty_like(x)};
  on_gpu(x, [&](const auto& device) {
    auto call = add_norm_of(x, weight, eps);
    if (y.defined()) call.y = y.const_data_ptr();
    kernels::cuda::add_norm(call, y.defined() ? results.sum.data_ptr() : nullptr, results.normed.data_ptr(), device);
  });
  return results;
}

struct AddNormGradients {
  at::Tensor d_x, d_weight;  // d_x is y's gradient too
};

/// d_sum may be undefined.
AddNormGradients backward_of(const at::Tensor& d_sum, const at::Tensor& d_normed, const at::Tensor& sum,
                             const at::Tensor& weight, double eps) {
  const auto passed = d_sum.defined() ? d_sum.contiguous() : d_sum, slope = d_normed.contiguous();
  const AddNormGradients results{.d_x = at::empty_like(sum), .d_weight = at::empty_like(weight)};
  on_gpu(sum, [&](const auto& device) {
    kernels::cuda::add_norm_backward(add_norm_of(sum, weight, eps),
                                     {.d_sum = passed.defined() ? passed.const_data_ptr() : nullptr,
                                      .d_normed = slope.const_data_ptr(),
                                      .d_x = results.d_x.data_ptr(),
                                      .d_weight = results.d_weight.data_ptr<float>()},
                                     device);
  });
  return results;
}

/// Inputs: x, the weight and, where there is one, y. Outputs: normed and, with y, the sum.
struct FusedAddNorm : torch::autograd::Function<FusedAddNorm> {
  static variable_list forward(AutogradContext* context, at::TensorList inputs, double eps) {
    const bool adds = inputs.size() > 2;
    const auto result = forward_of(inputs[0], adds ? inputs[2] : at::Tensor(), inputs[1], eps);
    context->save_for_backward({result.sum, inputs[1]});
    context->saved_data["eps"] = eps;
    context->set_materialize_grads(false);
    return adds ? variable_list{result.normed, result.sum} : variable_list{result.normed};
  }

  static variable_list backward(AutogradContext* context, const variable_list& slopes) {
    const auto kept = context->get_saved_variables();
    const bool adds = slopes.size() > 1;
    AddNormGradients gradients{.d_x = adds ? slopes[1] : at::Tensor(), .d_weight = {}};
    if (slopes[0].defined()) {
      gradients = backward_of(gradients.d_x, slopes[0], kept[0], kept[1], context->saved_data["eps"].toDouble());
    }
    variable_list results{gradients.d_x, gradients.d_weight};
    if (adds) results.push_back(gradients.d_x);
    results.emplace_back();  // for eps
    return results;
  }
};

}  // namespace

bool has_add_norm(const at::Tensor& x, const at::Tensor& y, const at::Tensor& weight) {
  if (y.defined() && !(has_fused(y) && y.scalar_type() == x.scalar_type())) return false;
  return has_fused(x) && x.size(-1) <= kernels::cuda::kMaxAddNorm && weight.scalar_type() == at::kFloat &&
         weight.is_contiguous() && is_aligned(weight);
}

AddNorm add_norm(const at::Tensor& x, const at::Tensor& y, const at::Tensor& weight, double eps) {
  std::vector<at::Tensor> inputs{x, weight};
  if (y.defined()) inputs.push_back(y);
  const auto outputs = FusedAddNorm::apply(at::TensorList(inputs), eps);
  return {.sum = y.defined() ? outputs[1] : x, .normed = outputs[0]};
}

}  // namespace gka::ops
