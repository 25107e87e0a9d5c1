#include "layers/functions.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_rms_norm.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softplus.h>
#include <torch/csrc/autograd/custom_function.h>

#include <tuple>

#include "gka/block.h"
#include "ops/fused.h"

namespace gka::layers {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// x turned by the angles, or, with sign −1, back. Sums are taken in the type of the angles, and x itself is never
/// copied to it: on a GPU each pass over memory counts.
at::Tensor turned(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign) {
  if (ops::has_fused(x) && ops::has_fused(cos)) return ops::rotate(x, cos, sin, sign);
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

/// Inputs: x [N, C], then the weights. They are kept in the type they multiply in.
struct ProjectAll : torch::autograd::Function<ProjectAll> {
  static variable_list forward(AutogradContext* context, at::TensorList inputs) {
    const auto& x = inputs[0];
    variable_list kept{x}, outputs;
    for (const auto& weight : inputs.slice(1)) {
      kept.push_back(weight.to(x.scalar_type()));
      outputs.push_back(at::mm(x, kept.back().t()));
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
    return at::mm(ops::swiglu(inner.narrow(1, 0, width), inner.narrow(1, width, width)), outward.t());
  }

  static variable_list backward(AutogradContext* context, const variable_list& slopes) {
    const auto kept = context->get_saved_variables();
    const auto &x = kept[0], &inner = kept[1], &both = kept[2], &outward = kept[3];
    const auto type = context->saved_data["type"].toScalarType();
    const auto width = outward.size(1);
    const auto slope = slopes[0].contiguous();
    const auto inside =
        ops::swiglu_backward(at::mm(slope, outward), inner.narrow(1, 0, width), inner.narrow(1, width, width));
    const auto to_both = product_as(type, inside.d_both.t(), x);
    return {at::mm(inside.d_both, both), to_both.narrow(0, 0, width), to_both.narrow(0, width, width),
            product_as(type, slope.t(), inside.y)};
  }
};

/// Inputs: x, the weight and, where there is one, y. Outputs: normed and, with y, the sum.
struct FusedAddNorm : torch::autograd::Function<FusedAddNorm> {
  static variable_list forward(AutogradContext* context, at::TensorList inputs, double eps) {
    const bool adds = inputs.size() > 2;
    const auto result = ops::add_norm(inputs[0], adds ? inputs[2] : at::Tensor(), inputs[1], eps);
    context->save_for_backward({result.sum, inputs[1]});
    context->saved_data["eps"] = eps;
    context->set_materialize_grads(false);
    return adds ? variable_list{result.normed, result.sum} : variable_list{result.normed};
  }

  static variable_list backward(AutogradContext* context, const variable_list& slopes) {
    const auto kept = context->get_saved_variables();
    const bool adds = slopes.size() > 1;
    ops::AddNormGradients gradients{.d_x = adds ? slopes[1] : at::Tensor(), .d_weight = {}};
    if (slopes[0].defined()) {
      gradients =
          ops::add_norm_backward(gradients.d_x, slopes[0], kept[0], kept[1], context->saved_data["eps"].toDouble());
    }
    variable_list results{gradients.d_x, gradients.d_weight};
    if (adds) results.push_back(gradients.d_x);
    results.emplace_back();  // for eps
    return results;
  }
};

/// Inputs: the projection, and for each kind its bias and, where it has one, its A_log.
struct FusedGates : torch::autograd::Function<FusedGates> {
  static variable_list forward(AutogradContext* context, at::TensorList inputs, const std::vector<GateKind>& kinds) {
    context->save_for_backward(inputs.vec());
    std::vector<std::int64_t> gates;
    for (const auto& kind : kinds) gates.push_back(static_cast<std::int64_t>(kind.gate));
    context->saved_data["gates"] = gates;
    context->set_materialize_grads(false);
    return ops::gates(inputs[0], kinds);
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
    auto gradients = ops::gates_backward(d_values, kept[0], kinds);
    variable_list results{gradients.d_projected};
    for (std::size_t i = 0; i < kinds.size(); ++i) {
      results.push_back(gradients.d_bias[i]);
      if (kinds[i].a_log.defined()) results.push_back(gradients.d_a_log[i]);
    }
    results.emplace_back();  // for the kinds
    return results;
  }
};

}  // namespace

at::Tensor upload(const at::Tensor& x, at::Device device) {
  if (!x.is_cpu() || !device.is_cuda()) return x.to(device);
  return x.pin_memory().to(device, x.scalar_type(), /*non_blocking=*/true);
}

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

at::Tensor project(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto dtype = x.scalar_type();
  // The weight's gradient then comes as wide as the weight is.
  if (!bias.defined() && is_learning(weight) && ops::has_fused(x)) return project_all(x, {weight})[0];
  if (!bias.defined()) return at::linear(x, weight.to(dtype));
  return at::linear(x, weight.to(dtype), bias.to(dtype));
}

std::vector<at::Tensor> project_all(const at::Tensor& x, const std::vector<at::Tensor>& weights) {
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

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  // Rows as wide as a model: torch's kernels give a row to a block more cleverly than ours.
  constexpr std::int64_t kOurs = 512;
  if (x.is_cuda() && x.size(-1) > kOurs) {
    return std::get<0>(at::_fused_rms_norm(x, weight.sizes(), weight.to(x.scalar_type()), eps));
  }
  return gated_rms_norm(x, {}, weight, {.eps = eps});
}

AddNorm add_norm(const at::Tensor& x, const at::Tensor& y, const at::Tensor& weight, double eps) {
  if (ops::has_add_norm(x, weight) && (!y.defined() || (ops::has_fused(y) && y.scalar_type() == x.scalar_type()))) {
    std::vector<at::Tensor> inputs{x, weight};
    if (y.defined()) inputs.push_back(y);
    const auto outputs = FusedAddNorm::apply(at::TensorList(inputs), eps);
    return {.sum = y.defined() ? outputs[1] : x, .normed = outputs[0]};
  }
  const auto sum = y.defined() ? x.add(y) : x;
  return {.sum = sum, .normed = rms_norm(sum, weight, eps)};
}

at::Tensor unit_norm(const at::Tensor& x, L2Norm norm) {
  constexpr double kEps = 1e-6;
  if (norm == L2Norm::none) return x;
  const auto wide = accumulate(x);
  const auto squares = wide.square().sum(-1, /*keepdim=*/true);
  const auto unit = norm == L2Norm::divide ? wide / (squares.sqrt() + kEps) : wide * at::rsqrt(squares + kEps);
  return unit.to(x.scalar_type());
}

Rotation rotation(const at::Tensor& positions, std::int64_t channels, double theta, at::ScalarType dtype) {
  const auto half = channels / 2;
  const auto type = dtype == at::kDouble ? at::kDouble : at::kFloat;
  // Angles in float64: positions of long sequences times fractions of a turn lose digits in float32.
  const auto exponents =
      at::arange(half, at::TensorOptions(at::kDouble).device(positions.device())) * (-1.0 / static_cast<double>(half));
  const auto angles = (positions.to(at::kDouble).unsqueeze(-1) * at::pow(theta, exponents)).unsqueeze(-2);
  return {.cos = angles.cos().to(type), .sin = angles.sin().to(type)};
}

at::Tensor rotate(const at::Tensor& x, const Rotation& by) { return Rotate::apply(x, by.cos, by.sin); }

at::Tensor repeat_heads(const at::Tensor& x, std::int64_t heads) {
  const auto copies = heads / x.size(-2);
  if (copies == 1) return x;
  auto shape = x.sizes().vec();
  shape.insert(shape.end() - 1, copies);
  return x.unsqueeze(-2).expand(shape).flatten(-3, -2);
}

at::Tensor log_decay(const at::Tensor& projected, const at::Tensor& a_log, const at::Tensor& dt_bias) {
  const auto wide = accumulate(projected);
  const auto type = wide.scalar_type();
  return -a_log.to(type).exp() * at::softplus(wide + dt_bias.to(type));
}

at::Tensor sigmoid_gate(const at::Tensor& projected, const at::Tensor& bias) {
  const auto wide = accumulate(projected);
  return at::sigmoid(bias.defined() ? wide + bias.to(wide.scalar_type()) : wide);
}

std::vector<at::Tensor> open_gates(const at::Tensor& projected, const std::vector<GateKind>& kinds) {
  if (ops::has_gates(projected, kinds)) {
    std::vector<at::Tensor> inputs{projected};
    for (const auto& kind : kinds) {
      inputs.push_back(kind.bias);
      if (kind.gate == Gate::log_decay) inputs.push_back(kind.a_log);
    }
    return FusedGates::apply(at::TensorList(inputs), kinds);
  }
  std::vector<at::Tensor> values;
  const auto parts = projected.split(projected.size(-1) / static_cast<std::int64_t>(kinds.size()), -1);
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const auto& [gate, bias, a_log] = kinds[i];
    values.push_back(gate == Gate::log_decay ? log_decay(parts[i], a_log, bias) : sigmoid_gate(parts[i], bias));
    if (gate == Gate::squared_sigmoid) values.back() = (values.back() + 1e-6).square();
  }
  return values;
}

SwiGlu::SwiGlu(std::int64_t hidden, std::int64_t intermediate, double initializer_range, const Scope& scope)
    : gate_(scope.add("gate_proj.weight", {intermediate, hidden}, init::normal(initializer_range))),
      up_(scope.add("up_proj.weight", {intermediate, hidden}, init::normal(initializer_range))),
      down_(scope.add("down_proj.weight", {hidden, intermediate}, init::normal(initializer_range))) {}

at::Tensor SwiGlu::forward(const at::Tensor& x) const {
  const bool fused = ops::has_fused(x) && gate_.size(0) % ops::kFusedMultiple == 0;
  if (fused && is_learning(gate_)) {
    return FusedSwiGlu::apply(x.reshape({-1, x.size(-1)}), gate_, up_, down_).view(x.sizes());
  }
  const auto parts = project_all(x, {gate_, up_});
  const auto &gate = parts[0], &up = parts[1];
  if (fused && !at::GradMode::is_enabled()) {
    return project(ops::swiglu(gate.flatten(0, -2), up.flatten(0, -2)).view(gate.sizes()), down_);
  }
  return project(at::silu(gate) * up, down_);
}

}  // namespace gka::layers
