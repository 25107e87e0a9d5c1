#include "layers/functions.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softplus.h>

#include "gka/block.h"

namespace gka::layers {

at::Tensor project(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto dtype = x.scalar_type();
  if (!bias.defined()) return at::linear(x, weight.to(dtype));
  return at::linear(x, weight.to(dtype), bias.to(dtype));
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
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

at::Tensor rotate(const at::Tensor& x, const Rotation& by) {
  const auto half = x.size(-1) / 2;
  const auto wide = accumulate(x);
  const auto first = wide.narrow(-1, 0, half), second = wide.narrow(-1, half, half);
  return at::cat({first * by.cos - second * by.sin, second * by.cos + first * by.sin}, -1).to(x.scalar_type());
}

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
  return project(at::silu(project(x, gate_)) * project(x, up_), down_);
}

}  // namespace gka::layers
