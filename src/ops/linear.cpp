#include "ops/linear.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "kernels/cuda/many_products.h"
#include "kernels/cuda/small_products.h"
#include "ops/checks.h"
#include "ops/fused.h"
#include "ops/on_gpu.h"
#include "ops/stored.h"

namespace gka::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Inputs: x [N, C], then the weights. They are kept in the type they multiply in.
struct ProjectAll : torch::autograd::Function<ProjectAll> {
  static variable_list forward(AutogradContext* context, at::TensorList inputs) {
    const auto& x = inputs[0];
    variable_list kept{x}, outputs;
    for (const auto& weight : dense_all(inputs.slice(1), x.size(1), x.scalar_type())) {
      kept.push_back(weight);
      outputs.push_back(at::mm(x, weight.t()));
    }
    context->saved_data["type"] = inputs[1].scalar_type();
    context->save_for_backward(std::move(kept));
    context->set_materialize_grads(false);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& slopes) {
    const auto kept = context->get_saved_variables();
    const auto type = context->saved_data["type"].toScalarType();
    variable_list gradients(kept.size());
    auto& to_x = gradients[0];
    // From the last, the smallest, on: it is the first that writes and need not add.
    for (std::size_t i = slopes.size(); i-- > 0;) {
      if (!slopes[i].defined()) continue;
      if (context->needs_input_grad(0)) {
        to_x = to_x.defined() ? to_x.addmm_(slopes[i], kept[i + 1]) : at::mm(slopes[i], kept[i + 1]);
      }
      if (context->needs_input_grad(i + 1)) gradients[i + 1] = product_as(type, slopes[i].t(), kept[0]);
    }
    return gradients;
  }
};

}  // namespace

bool is_learning(const at::Tensor& weight) { return at::GradMode::is_enabled() && weight.requires_grad(); }

at::Tensor stacked(at::TensorList weights, at::ScalarType type) {
  std::int64_t rows = 0;
  for (const auto& weight : weights) rows += weight.size(0);
  const auto& first = weights.front();
  const auto all = at::empty({rows, first.size(1)}, first.options().dtype(type).requires_grad(false));
  std::int64_t row = 0;
  for (const auto& weight : weights) {
    all.narrow(0, row, weight.size(0)).copy_(weight);
    row += weight.size(0);
  }
  return all;
}

at::Tensor product_as(at::ScalarType type, const at::Tensor& a, const at::Tensor& b) {
  const bool sums_wider = a.is_cuda() && (a.scalar_type() == at::kBFloat16 || a.scalar_type() == at::kHalf);
  return sums_wider && type == at::kFloat ? at::mm(a, b, type) : at::mm(a, b).to(type);
}

bool has_small_products(const at::Tensor& x, at::TensorList weights) {
  using kernels::cuda::SmallProducts;
  if (at::GradMode::is_enabled() || !x.is_cuda() || x.size(-1) == 0 || !has_fused(x)) return false;
  const auto type = x.scalar_type();
  const auto rows = x.numel() / x.size(-1);
  if (type != at::kBFloat16 || rows == 0 || !kernels::cuda::has_small_products(rows, x.size(-1))) return false;
  if (weights.size() > SmallProducts::kMostMatrices) return false;
  const auto stored = weights.empty() ? type : weights.front().scalar_type();
  if (stored != type && stored != at::kChar) return false;
  return std::ranges::all_of(weights, [&](const at::Tensor& weight) {
    return weight.scalar_type() == stored && weight.is_contiguous() && is_aligned(weight);
  });
}

bool has_small_norm(const InputNorm& norm) {
  const auto& weight = norm.weight;
  return weight.scalar_type() == at::kFloat && weight.is_contiguous() && is_aligned(weight);
}

namespace {

struct SmallCall {
  InputNorm norm{};
  at::Tensor onto{};
  bool gated = false;
};

std::vector<at::Tensor> run_small(const at::Tensor& x, at::TensorList weights, const SmallCall& how) {
  kernels::cuda::SmallProducts call{.rows = x.numel() / x.size(-1),
                                    .depth = x.size(-1),
                                    .int8 = is_int8(weights.front()),
                                    .x = x.const_data_ptr(),
                                    .eps = static_cast<float>(how.norm.eps),
                                    .count = static_cast<int>(weights.size()),
                                    .gated = how.gated};
  if (how.norm.weight.defined()) call.norm = how.norm.weight.const_data_ptr<float>();
  if (how.onto.defined()) call.onto = how.onto.const_data_ptr();
  std::vector<at::Tensor> results;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    auto shape = x.sizes().vec();
    shape.back() = weights[i].size(0);
    if (i == 0 || !how.gated) results.push_back(at::empty(shape, x.options()));
    call.of[i] = {.weight = weights[i].const_data_ptr(),
                  .y = i < results.size() ? results[i].data_ptr() : nullptr,
                  .outputs = weights[i].size(0)};
  }
  on_gpu(x, [&](const auto& device) { kernels::cuda::small_products(call, device); });
  return results;
}

}  // namespace

std::vector<at::Tensor> small_products(const at::Tensor& x, at::TensorList weights, const InputNorm& norm) {
  return run_small(x, weights, {.norm = norm});
}

at::Tensor small_gated_product(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& up,
                               const InputNorm& norm) {
  return run_small(x, {gate, up}, {.norm = norm, .gated = true})[0];
}

at::Tensor small_product_onto(const at::Tensor& onto, const at::Tensor& x, const at::Tensor& weight) {
  return run_small(x, {weight}, {.onto = onto})[0];
}

at::Tensor as_one(at::TensorList matrices) {
  const auto& first = matrices.front();
  std::int64_t rows = 0;
  for (const auto& matrix : matrices) {
    const bool below = matrix.is_contiguous() && matrix.scalar_type() == first.scalar_type() && matrix.dim() == 2 &&
                       matrix.size(1) == first.size(1) && matrix.is_alias_of(first) &&
                       matrix.storage_offset() == first.storage_offset() + rows * first.size(1);
    if (!below) return {};
    rows += matrix.size(0);
  }
  return first.as_strided({rows, first.size(1)}, {first.size(1), 1});
}

bool has_many_products(const at::Tensor& x, at::TensorList weights) {
  using kernels::cuda::ManyProducts;
  if (at::GradMode::is_enabled() || !x.is_cuda() || x.scalar_type() != at::kBFloat16 || !has_fused(x)) return false;
  if (!kernels::cuda::has_many_products(x.numel() / std::max<std::int64_t>(x.size(-1), 1), x.size(-1))) return false;
  if (weights.empty() || weights.size() > ManyProducts::kMostMatrices) return false;
  return std::ranges::all_of(weights, [](const at::Tensor& weight) {
    return is_int8(weight) && weight.is_contiguous() && is_aligned(weight);
  });
}

namespace {

/// Few rows fill a GPU only with all matrices together; with many, each by itself does, and its results are contiguous.
bool has_product_of_all(const at::Tensor& x, const std::vector<at::Tensor>& weights) {
  constexpr std::int64_t kFewRows = 512;
  return x.is_cuda() && !at::GradMode::is_enabled() && weights.size() > 1 && x.size(-1) > 0 &&
         x.numel() <= kFewRows * x.size(-1) &&
         (weights.front().scalar_type() == x.scalar_type() || is_int8(weights.front()));
}

std::vector<at::Tensor> product_of_all(const at::Tensor& x, const at::Tensor& all,
                                       const std::vector<at::Tensor>& weights) {
  auto shape = x.sizes().vec();
  shape.back() = all.size(0);
  const auto numbers = dense(all, x.size(-1), x.scalar_type());
  const auto y = at::mm(x.reshape({-1, x.size(-1)}), numbers.t()).view(shape);
  std::vector<at::Tensor> parts;
  std::int64_t column = 0;
  for (const auto& weight : weights) {
    parts.push_back(y.narrow(-1, column, weight.size(0)));
    column += weight.size(0);
  }
  return parts;
}

std::vector<at::Tensor> many_products(const at::Tensor& x, at::TensorList weights) {
  kernels::cuda::ManyProducts call{.rows = x.numel() / x.size(-1),
                                   .depth = x.size(-1),
                                   .x = x.const_data_ptr(),
                                   .count = static_cast<int>(weights.size())};
  std::vector<at::Tensor> results;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    auto shape = x.sizes().vec();
    shape.back() = weights[i].size(0);
    results.push_back(at::empty(shape, x.options()));
    call.of[i] = {
        .weight = weights[i].const_data_ptr(), .y = results[i].mutable_data_ptr(), .outputs = weights[i].size(0)};
  }
  on_gpu(x, [&](const auto& device) { kernels::cuda::many_products(call, device); });
  return results;
}

}  // namespace

std::vector<at::Tensor> project_all(const at::Tensor& x, const std::vector<at::Tensor>& weights) {
  if (takes_stored(x, weights)) return stored_products(x, weights);
  if (has_small_products(x, weights)) return small_products(x, weights);
  if (has_many_products(x, weights)) return many_products(x, weights);
  if (has_product_of_all(x, weights)) {
    if (const auto all = as_one(weights); all.defined()) return product_of_all(x, all, weights);
  }
  std::vector<at::Tensor> inputs{x.reshape({-1, x.size(-1)})};
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  auto outputs = ProjectAll::apply(at::TensorList(inputs));
  for (auto& output : outputs) {
    auto shape = x.sizes().vec();
    shape.back() = output.size(-1);
    output = output.view(shape);
  }
  return outputs;
}

}  // namespace gka::ops
