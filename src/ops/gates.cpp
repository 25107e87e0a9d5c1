#include "ops/gates.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "ops/checks.h"
#include "ops/fused.h"
#include "ops/on_gpu.h"

namespace gka::ops {

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

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Rows of neighbouring numbers, evenly apart: contiguous, or columns of what is.
bool has_even_rows(const at::Tensor& tensor) {
  if (tensor.dim() < 2 || tensor.stride(-1) != 1) return false;
  for (std::int64_t i = 0; i + 2 < tensor.dim(); ++i) {
    if (tensor.stride(i) != tensor.stride(i + 1) * tensor.size(i + 1)) return false;
  }
  return true;
}

std::vector<at::Tensor> forward_of(const at::Tensor& projected, const std::vector<GateKind>& kinds) {
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

struct GateGradients {
  at::Tensor d_projected;
  std::vector<at::Tensor> d_bias, d_a_log;  // of each kind
};

/// `d_values` contiguous; undefined: 0.
GateGradients backward_of(const std::vector<at::Tensor>& d_values, const at::Tensor& projected,
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

/// Inputs: the projection, and for each kind its bias and, where it has one, its A_log.
struct FusedGates : torch::autograd::Function<FusedGates> {
  static variable_list forward(AutogradContext* context, at::TensorList inputs, const std::vector<GateKind>& kinds) {
    context->save_for_backward(inputs.vec());
    std::vector<std::int64_t> gates;
    for (const auto& kind : kinds) gates.push_back(static_cast<std::int64_t>(kind.gate));
    context->saved_data["gates"] = gates;
    context->set_materialize_grads(false);
    return forward_of(inputs[0], kinds);
  }

  static variable_list backward(AutogradContext* context, const variable_list& slopes) {
    const auto kept = context->get_saved_variables();
    std::vector<GateKind> kinds;
    std::vector<at::Tensor> d_values;
    std::size_t next = 1;
    for (const auto gate : context->saved_data["gates"].toIntVector()) {
      kinds.push_back({.gate = static_cast<Gate>(gate), .bias = kept[next++], .a_log = {}});
      if (kinds.back().gate == Gate::log_decay) kinds.back().a_log = kept[next++];
      const auto& slope = slopes[d_values.size()];
      d_values.push_back(slope.defined() ? slope.contiguous() : slope);
    }
    auto gradients = backward_of(d_values, kept[0], kinds);
    variable_list results{gradients.d_projected};
    for (std::size_t i = 0; i < kinds.size(); ++i) {  // a gate that nobody asked has no gradient, not one of zeros
      const bool asked = d_values[i].defined();
      results.push_back(asked ? gradients.d_bias[i] : at::Tensor());
      if (kinds[i].a_log.defined()) results.push_back(asked ? gradients.d_a_log[i] : at::Tensor());
    }
    results.emplace_back();  // for the kinds
    return results;
  }
};

}  // namespace

bool has_gates(const at::Tensor& projected, const std::vector<GateKind>& kinds) {
  const auto is_plain = [](const at::Tensor& t) { return t.scalar_type() == at::kFloat && t.is_contiguous(); };
  return has_kernels(projected) && has_even_rows(projected) &&
         kinds.size() <= std::size(kernels::cuda::Gates{}.kinds) &&
         std::ranges::all_of(kinds, [&](const GateKind& kind) {
           return is_plain(kind.bias) && (kind.gate != Gate::log_decay || is_plain(kind.a_log));
         });
}

std::vector<at::Tensor> gates(const at::Tensor& projected, const std::vector<GateKind>& kinds) {
  std::vector<at::Tensor> inputs{projected};
  for (const auto& kind : kinds) {
    inputs.push_back(kind.bias);
    if (kind.gate == Gate::log_decay) inputs.push_back(kind.a_log);
  }
  return FusedGates::apply(at::TensorList(inputs), kinds);
}

}  // namespace gka::ops
