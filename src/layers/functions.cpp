#include "layers/functions.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_rms_norm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softplus.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <stdexcept>
#include <tuple>

#include "gka/block.h"
#include "ops/fused.h"
#include "ops/recompute.h"
#include "ops/rotary.h"
#include "ops/stored.h"
#include "ops/swiglu.h"

namespace gka::layers {

at::Tensor upload(const at::Tensor& x, at::Device device) {
  if (!x.is_cpu() || !device.is_cuda()) return x.to(device);
  return x.pin_memory().to(device, x.scalar_type(), /*non_blocking=*/true);
}

at::Tensor project(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto dtype = x.scalar_type();
  // The weight's gradient then comes as wide as the weight is.
  if (!bias.defined() && is_learning(weight) && ops::has_fused(x)) return project_all(x, {weight})[0];
  if (!bias.defined() && (ops::has_small_products(x, {weight}) || ops::has_many_products(x, {weight}))) {
    return project_all(x, {weight})[0];
  }
  if (ops::takes_stored(x, {weight})) {
    const auto y = ops::stored_products(x, {weight})[0];
    return bias.defined() ? y + bias.to(dtype) : y;
  }
  const auto matrix = ops::dense(weight, x.size(-1), dtype);
  return bias.defined() ? at::linear(x, matrix, bias.to(dtype)) : at::linear(x, matrix);
}

std::vector<at::Tensor> project_all(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                                    const InputNorm& norm) {
  if (!norm.weight.defined()) return project_all(x, weights);
  if (ops::has_small_products(x, weights) && ops::has_small_norm(norm)) return ops::small_products(x, weights, norm);
  return project_all(add_norm(x, {}, norm.weight, norm.eps).normed, weights);
}

at::Tensor project_onto(const at::Tensor& onto, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const bool suits = onto.is_contiguous() && onto.scalar_type() == x.scalar_type() && !bias.defined();
  if (suits && ops::has_small_products(x, {weight})) return ops::small_product_onto(onto, x, weight);
  return onto.add(project(x, weight, bias));
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
  if (ops::has_add_norm(x, y, weight)) return ops::add_norm(x, y, weight, eps);
  const auto sum = y.defined() ? x.add(y) : x;
  return {.sum = sum, .normed = rms_norm(sum, weight, eps)};
}

at::Tensor unit_norm(const at::Tensor& x, L2Norm norm) {
  constexpr double kEps = 1e-6;
  if (norm == L2Norm::none) return x;
  const auto wide = accumulate(x);
  const auto squares = wide.square().sum(-1, /*keepdim=*/true);
  switch (norm) {
    case L2Norm::none: break;
    case L2Norm::divide: return (wide / (squares.sqrt() + kEps)).to(x.scalar_type());
    case L2Norm::rsqrt: return (wide * at::rsqrt(squares + kEps)).to(x.scalar_type());
  }
  return x;
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

at::Tensor rotate(const at::Tensor& x, const Rotation& by) { return ops::rotate(x, by.cos, by.sin); }

at::Tensor repeat_heads(const at::Tensor& x, std::int64_t heads) {
  const auto copies = heads / x.size(-2);
  if (copies == 1) return x;
  auto shape = x.sizes().vec();
  shape.insert(shape.end() - 1, copies);
  return x.unsqueeze(-2).expand(shape).flatten(-3, -2);
}

namespace {

/// Whether a number's bits are to be its own: torch takes some of a tensor by vectors and the rest one by one, with
/// other last bits, and which they are depends on how many rows there are. Not where parameters learn: a model in
/// training has the same bits with and without gradients.
bool by_number(const at::Tensor& x, std::initializer_list<at::Tensor> parameters) {
  const auto learns = [](const at::Tensor& parameter) { return parameter.defined() && parameter.requires_grad(); };
  return x.is_cpu() && x.scalar_type() == at::kFloat && !at::GradMode::is_enabled() && !at::isTensorSubclassLike(x) &&
         !std::ranges::any_of(parameters, learns);
}

/// Where there are so few numbers in a row, a loop costs less than torch's operators. Of those exp and log1p have the
/// same bits for a number wherever it stands.
bool is_narrow(const at::Tensor& x) { return x.size(-1) <= 256; }

template <typename Of>
at::Tensor each_number(const at::Tensor& x, const Of& of) {
  const auto rows = x.contiguous();
  const at::Tensor result = at::empty_like(rows);
  const auto* from = rows.const_data_ptr<float>();
  std::transform(from, from + rows.numel(), result.mutable_data_ptr<float>(), of);
  return result;
}

}  // namespace

at::Tensor softplus_gate(const at::Tensor& projected, const at::Tensor& bias, const at::Tensor& a_log) {
  const auto wide = accumulate(projected);
  const auto z = wide + bias.to(wide.scalar_type());
  if (!by_number(projected, {bias, a_log})) return at::softplus(z);
  if (!is_narrow(z)) return z.abs().neg_().exp_().log1p_().add_(z.clamp_min(0));
  return each_number(z, [](float x) { return x > 20 ? x : std::log1p(std::exp(x)); });
}

at::Tensor log_decay(const at::Tensor& projected, const at::Tensor& a_log, const at::Tensor& dt_bias) {
  const auto delta = softplus_gate(projected, dt_bias, a_log);
  return -a_log.to(delta.scalar_type()).exp() * delta;
}

at::Tensor sigmoid_gate(const at::Tensor& projected, const at::Tensor& bias, const at::Tensor& weight) {
  const auto wide = accumulate(projected);
  const auto z = bias.defined() ? wide + bias.to(wide.scalar_type()) : wide;
  const bool fixed = (bias.defined() || weight.defined()) && by_number(projected, {bias, weight});
  if (!fixed) return at::sigmoid(z);
  if (!is_narrow(z)) return z.neg().exp_().add_(1).reciprocal_();
  return each_number(z, [](float x) { return 1 / (1 + std::exp(-x)); });
}

at::Tensor silu(const at::Tensor& x, const at::Tensor& weight) {
  return by_number(x, {weight}) ? x.neg().exp_().add_(1).reciprocal_().mul_(x) : at::silu(x);
}

at::Tensor wide_gate(const std::function<at::Tensor(const at::Tensor&)>& gate, const at::Tensor& projected,
                     const std::vector<at::Tensor>& parameters) {
  return projected.is_cuda() ? ops::recompute(gate, projected, parameters) : gate(projected);
}

at::Tensor activated(const at::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::none: return x;
    case Activation::silu: return at::silu(x);
    case Activation::sigmoid: return at::sigmoid(x);
  }
  throw std::logic_error("an activation that is none of the table's");
}

namespace {

at::Tensor open_gate(const at::Tensor& projected, const GateKind& kind) {
  switch (kind.gate) {
    case Gate::log_decay: return log_decay(projected, kind.a_log, kind.bias);
    case Gate::sigmoid: return sigmoid_gate(projected, kind.bias);
    case Gate::squared_sigmoid: return (sigmoid_gate(projected, kind.bias) + 1e-6).square();
  }
  throw std::logic_error("a gate that is none of the table's");
}

}  // namespace

std::vector<at::Tensor> open_gates(const at::Tensor& projected, const std::vector<GateKind>& kinds) {
  if (ops::has_gates(projected, kinds)) return ops::gates(projected, kinds);
  std::vector<at::Tensor> values;
  const auto parts = projected.split(projected.size(-1) / static_cast<std::int64_t>(kinds.size()), -1);
  for (std::size_t i = 0; i < kinds.size(); ++i) values.push_back(open_gate(parts[i], kinds[i]));
  return values;
}

SwiGlu::SwiGlu(std::int64_t hidden, std::int64_t intermediate, double initializer_range, const Scope& scope)
    : SwiGlu(hidden, intermediate, initializer_range, scope, SharedRoom(scope, 2 * intermediate, hidden)) {}

SwiGlu::SwiGlu(std::int64_t hidden, std::int64_t intermediate, double initializer_range, const Scope& scope,
               SharedRoom room)
    : gate_(scope.add_matrix("gate_proj.weight", {intermediate, hidden}, init::normal(initializer_range),
                             room.take(intermediate))),
      up_(scope.add_matrix("up_proj.weight", {intermediate, hidden}, init::normal(initializer_range),
                           room.take(intermediate))),
      down_(scope.add_matrix("down_proj.weight", {hidden, intermediate}, init::normal(initializer_range))) {}

bool SwiGlu::is_fused(const at::Tensor& x) const {
  return ops::has_fused(x) && gate_.size(0) % ops::kFusedMultiple == 0;
}

at::Tensor SwiGlu::onto(const at::Tensor& x, const InputNorm& norm) const {
  if (is_fused(x) && ops::has_small_products(x, {gate_, up_}) && ops::has_small_norm(norm)) {
    return project_onto(x, ops::small_gated_product(x, gate_, up_, norm), down_);
  }
  return x.add(forward(add_norm(x, {}, norm.weight, norm.eps).normed));
}

at::Tensor SwiGlu::forward(const at::Tensor& x) const {
  const bool fused = is_fused(x);
  if (fused && is_learning(gate_)) return ops::swiglu_mlp(x, gate_, up_, down_);
  if (fused && ops::has_small_products(x, {gate_, up_})) return project(ops::small_gated_product(x, gate_, up_), down_);
  const auto parts = project_all(x, {gate_, up_});
  const auto &gate = parts[0], &up = parts[1];
  if (fused && !at::GradMode::is_enabled()) {
    return project(ops::swiglu(gate.flatten(0, -2), up.flatten(0, -2)).view(gate.sizes()), down_);
  }
  return project(silu(gate, gate_) * up, down_);
}

}  // namespace gka::layers
