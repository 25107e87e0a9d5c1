#include "ops/fused.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "ops/checks.h"
#include "ops/on_gpu.h"

namespace gka::ops {
namespace {

static_assert(kFusedMultiple == kernels::cuda::kFusedVector);

bool is_aligned(const at::Tensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

kernels::cuda::SwiGlu swiglu_of(const at::Tensor& gate, const at::Tensor& up) {
  return {.rows = gate.size(0),
          .width = gate.size(1),
          .stride = gate.stride(0),
          .dtype = kernel_dtype(gate.scalar_type()),
          .gate = gate.const_data_ptr(),
          .up = up.const_data_ptr()};
}

kernels::cuda::AddNorm add_norm_of(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return {.rows = x.numel() / x.size(-1),
          .width = x.size(-1),
          .dtype = kernel_dtype(x.scalar_type()),
          .x = x.const_data_ptr(),
          .weight = weight.const_data_ptr<float>(),
          .eps = static_cast<float>(eps)};
}

kernels::cuda::Gates gates_of(const at::Tensor& projected, const std::vector<GateKind>& kinds) {
  const auto heads = projected.size(-1) / static_cast<std::int64_t>(kinds.size());
  kernels::cuda::Gates call{.tokens = projected.numel() / projected.size(-1),
                            .heads = static_cast<int>(heads),
                            .count = static_cast<int>(kinds.size()),
                            .dtype = kernel_dtype(projected.scalar_type()),
                            .projected = projected.const_data_ptr(),
                            .stride = projected.stride(-2)};
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    call.kinds[i].gate = kinds[i].gate;
    call.kinds[i].bias = kinds[i].bias.const_data_ptr<float>();
    if (kinds[i].a_log.defined()) call.kinds[i].a_log = kinds[i].a_log.const_data_ptr<float>();
  }
  return call;
}

/// Whether there are kernels for the tensor's device and type.
bool has_kernels(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return kHasCuda && tensor.is_cuda() && (type == at::kBFloat16 || type == at::kHalf || type == at::kFloat) &&
         tensor.numel() > 0;
}

/// Rows of neighbouring numbers, evenly apart: contiguous, or columns of what is.
bool has_even_rows(const at::Tensor& tensor) {
  if (tensor.dim() < 2 || tensor.stride(-1) != 1) return false;
  for (std::int64_t i = 0; i + 2 < tensor.dim(); ++i) {
    if (tensor.stride(i) != tensor.stride(i + 1) * tensor.size(i + 1)) return false;
  }
  return true;
}

}  // namespace

bool has_fused(const at::Tensor& tensor) {
  return has_kernels(tensor) && tensor.is_contiguous() && tensor.size(-1) % kFusedMultiple == 0 && is_aligned(tensor);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  const auto y = at::empty(gate.sizes(), gate.options());
  on_gpu(gate, [&](const auto& device) { kernels::cuda::swiglu(swiglu_of(gate, up), y.data_ptr(), device); });
  return y;
}

SwiGluGradients swiglu_backward(const at::Tensor& d_y, const at::Tensor& gate, const at::Tensor& up) {
  const auto slope = d_y.contiguous();
  const auto width = gate.size(1);
  const auto d_both = at::empty({gate.size(0), 2 * width}, gate.options());
  const SwiGluGradients results{.d_gate = d_both.narrow(1, 0, width),
                                .d_up = d_both.narrow(1, width, width),
                                .d_both = d_both,
                                .y = at::empty(gate.sizes(), gate.options())};
  on_gpu(gate, [&](const auto& device) {
    kernels::cuda::swiglu_backward(swiglu_of(gate, up),
                                   {.d_y = slope.const_data_ptr(),
                                    .d_gate = results.d_gate.data_ptr(),
                                    .d_up = results.d_up.data_ptr(),
                                    .y = results.y.data_ptr()},
                                   device);
  });
  return results;
}

bool has_add_norm(const at::Tensor& x, const at::Tensor& weight) {
  return has_fused(x) && x.size(-1) <= kernels::cuda::kMaxAddNorm && weight.scalar_type() == at::kFloat &&
         weight.is_contiguous() && is_aligned(weight);
}

AddNorm add_norm(const at::Tensor& x, const at::Tensor& y, const at::Tensor& weight, double eps) {
  const AddNorm results{.sum = y.defined() ? at::empty_like(x) : x, .normed = at::empty_like(x)};
  on_gpu(x, [&](const auto& device) {
    auto call = add_norm_of(x, weight, eps);
    if (y.defined()) call.y = y.const_data_ptr();
    kernels::cuda::add_norm(call, y.defined() ? results.sum.data_ptr() : nullptr, results.normed.data_ptr(), device);
  });
  return results;
}

AddNormGradients add_norm_backward(const at::Tensor& d_sum, const at::Tensor& d_normed, const at::Tensor& sum,
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

bool has_gates(const at::Tensor& projected, const std::vector<GateKind>& kinds) {
  const auto is_plain = [](const at::Tensor& t) { return t.scalar_type() == at::kFloat && t.is_contiguous(); };
  return has_kernels(projected) && has_even_rows(projected) &&
         kinds.size() <= std::size(kernels::cuda::Gates{}.kinds) &&
         std::ranges::all_of(kinds, [&](const GateKind& kind) {
           return is_plain(kind.bias) && (kind.gate != Gate::log_decay || is_plain(kind.a_log));
         });
}

std::vector<at::Tensor> gates(const at::Tensor& projected, const std::vector<GateKind>& kinds) {
  auto call = gates_of(projected, kinds);
  auto shape = projected.sizes().vec();
  shape.back() = call.heads;
  std::vector<at::Tensor> values;
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    values.push_back(at::empty(shape, projected.options().dtype(at::kFloat)));
    call.kinds[i].value = values.back().data_ptr<float>();
  }
  on_gpu(projected, [&](const auto& device) { kernels::cuda::gates(call, device); });
  return values;
}

GateGradients gates_backward(const std::vector<at::Tensor>& d_values, const at::Tensor& projected,
                             const std::vector<GateKind>& kinds) {
  auto call = gates_of(projected, kinds);
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    if (d_values[i].defined()) call.kinds[i].d_value = d_values[i].const_data_ptr<float>();
  }
  const auto sums = projected.options().dtype(at::kFloat);
  const auto d_bias = at::empty({projected.size(-1)}, sums), d_a_log = at::empty({projected.size(-1)}, sums);
  GateGradients results{.d_projected = at::empty(projected.sizes(), projected.options()),
                        .d_bias = d_bias.split(call.heads),
                        .d_a_log = d_a_log.split(call.heads)};
  on_gpu(projected, [&](const auto& device) {
    kernels::cuda::gates_backward(call, results.d_projected.data_ptr(), d_bias.data_ptr<float>(),
                                  d_a_log.data_ptr<float>(), device);
  });
  return results;
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign) {
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

CrossEntropyRows cross_entropy_(at::Tensor logits, const at::Tensor& labels, std::int64_t classes,
                                const at::Tensor& scale, bool predict) {
  CrossEntropyRows rows{.losses = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat)), .predicted = {}};
  if (predict) rows.predicted = at::empty({logits.size(0)}, labels.options());
  on_gpu(logits, [&](const auto& device) {
    kernels::cuda::cross_entropy({.rows = logits.size(0),
                                  .classes = classes,
                                  .stride = logits.size(1),
                                  .dtype = kernel_dtype(logits.scalar_type()),
                                  .logits = logits.data_ptr(),
                                  .labels = labels.const_data_ptr<std::int64_t>(),
                                  .scale = scale.defined() ? scale.const_data_ptr<float>() : nullptr,
                                  .losses = rows.losses.data_ptr<float>(),
                                  .predicted = predict ? rows.predicted.data_ptr<std::int64_t>() : nullptr},
                                 device);
  });
  return rows;
}

}  // namespace gka::ops
