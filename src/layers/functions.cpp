#include "layers/functions.h"

#include <ATen/ops/_fused_rms_norm.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/arange.h>
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
    for (std::size_t i = 0; i < slopes.size(); ++i) {
      if (!slopes[i].defined()) continue;
      if (context->needs_input_grad(0)) {
        to_x = to_x.defined() ? to_x.addmm_(slopes[i], kept[i + 1]) : at::mm(slopes[i], kept[i + 1]);
      }
      if (context->needs_input_grad(i + 1)) gradients[i + 1] = at::mm(slopes[i].t(), kept[0]).to(type);
    }
    return gradients;
  }
};

/// SiLU(gate) ⊙ up by a kernel that reads and writes each number once.
struct FusedSwiGlu : torch::autograd::Function<FusedSwiGlu> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    context->save_for_backward({gate, up});
    return ops::swiglu(gate, up);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    auto [d_gate, d_up] = ops::swiglu_backward(gradients[0], saved[0], saved[1]);
    return {d_gate, d_up};
  }
};

}  // namespace

at::Tensor upload(const at::Tensor& x, at::Device device) {
  if (!x.is_cpu() || !device.is_cuda()) return x.to(device);
  return x.pin_memory().to(device, x.scalar_type(), /*non_blocking=*/true);
}

at::Tensor project(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto dtype = x.scalar_type();
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

SwiGlu::SwiGlu(std::int64_t hidden, std::int64_t intermediate, double initializer_range, const Scope& scope)
    : gate_(scope.add("gate_proj.weight", {intermediate, hidden}, init::normal(initializer_range))),
      up_(scope.add("up_proj.weight", {intermediate, hidden}, init::normal(initializer_range))),
      down_(scope.add("down_proj.weight", {hidden, intermediate}, init::normal(initializer_range))) {}

at::Tensor SwiGlu::forward(const at::Tensor& x) const {
  const auto parts = project_all(x, {gate_, up_});
  const auto &gate = parts[0], &up = parts[1];
  const bool fused = ops::has_fused(gate) && ops::has_fused(up);
  return project(fused ? FusedSwiGlu::apply(gate, up) : at::silu(gate) * up, down_);
}

}  // namespace gka::layers
