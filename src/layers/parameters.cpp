#include "layers/parameters.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_qr.h>

#include <stdexcept>
#include <tuple>

namespace gka::layers {

namespace init {

Init constant(double value) {
  return [value](at::Tensor& t, const at::Generator&) { t.fill_(value); };
}

Init normal(double deviation) {
  return [deviation](at::Tensor& t, const at::Generator& g) { t.normal_(0.0, deviation, g); };
}

Init uniform(double low, double high) {
  return [low, high](at::Tensor& t, const at::Generator& g) { t.uniform_(low, high, g); };
}

Init orthonormal_rows() {
  return [](at::Tensor& t, const at::Generator& g) {
    // The Q factor of a normal matrix, with R's diagonal made positive, is uniform among orthonormal columns.
    const auto columns = at::empty_like(t.transpose(-1, -2)).normal_(0.0, 1.0, g);
    const auto [q, r] = at::linalg_qr(columns);
    const auto signs = r.diagonal(0, -2, -1).sign();
    t.copy_((q * signs.unsqueeze(-2)).transpose(-1, -2));
  };
}

}  // namespace init

at::Tensor Parameters::room(at::IntArrayRef shape) const {
  return at::empty(shape, at::TensorOptions().device(options_.device).dtype(options_.dtype));
}

at::Tensor Parameters::add(const std::string& name, at::IntArrayRef shape, const Init& init, WeightDecay decay,
                           const at::Tensor& place) {
  if (!index_.emplace(name, all_.size()).second) {
    throw std::invalid_argument("There is a parameter '" + name + "' already; each layer needs a prefix of its own.");
  }
  // A leaf of its own in the same memory: its changes are not its neighbours'.
  at::Tensor value = place.defined() ? place.variable_data() : room(shape);
  if (options_.generator && options_.device.type() != at::kMeta) {
    const auto dtype = options_.dtype == at::kDouble ? at::kDouble : at::kFloat;
    at::Tensor drawn = at::empty(shape, at::TensorOptions().device(options_.generator->device()).dtype(dtype));
    init(drawn, *options_.generator);
    value.copy_(drawn);
  }
  value.set_requires_grad(options_.requires_grad);
  all_.push_back({.name = name, .value = value, .weight_decay = decay});
  return value;
}

const Parameter* Parameters::find(std::string_view name) const {
  const auto found = index_.find(std::string(name));
  return found == index_.end() ? nullptr : &all_[found->second];
}

std::int64_t Parameters::count() const {
  std::int64_t total = 0;
  for (const auto& parameter : all_) total += parameter.value.numel();
  return total;
}

void Parameters::require_grad(bool on) {
  options_.requires_grad = on;
  for (auto& parameter : all_) parameter.value.set_requires_grad(on);
}

}  // namespace gka::layers
