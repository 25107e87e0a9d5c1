#include "layers/parameters.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linalg_qr.h>
#include <c10/util/accumulate.h>

#include <stdexcept>
#include <tuple>
#include <utility>

#include "ops/stored.h"

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

at::Tensor Parameters::matrix_room(at::IntArrayRef shape) const {
  const auto type = options_.matrices.value_or(options_.dtype);
  const auto options = at::TensorOptions().device(options_.device).dtype(type);
  return type == at::kChar ? at::empty(ops::int8_shape(shape[0], shape[1]), options) : at::empty(shape, options);
}

at::Tensor Parameters::add(const std::string& name, at::IntArrayRef shape, const Init& init, WeightDecay decay) {
  at::Tensor value = at::empty(shape, at::TensorOptions().device(options_.device).dtype(options_.dtype));
  return keep({.name = name, .value = std::move(value), .shape = shape.vec(), .weight_decay = decay}, init);
}

at::Tensor Parameters::add_matrix(const std::string& name, at::IntArrayRef shape, const Init& init,
                                  const at::Tensor& room) {
  // A leaf of its own in the same memory: its changes are not its neighbours'.
  at::Tensor value = room.defined() ? room.variable_data() : matrix_room(shape);
  return keep(
      {.name = name, .value = std::move(value), .shape = shape.vec(), .matrix = true, .shares_room = room.defined()},
      init);
}

at::Tensor Parameters::keep(Parameter parameter, const Init& init) {
  if (!index_.emplace(parameter.name, all_.size()).second) {
    throw std::invalid_argument("There is a parameter '" + parameter.name +
                                "' already; each layer needs a prefix of its own.");
  }
  if (options_.generator && options_.device.type() != at::kMeta) {
    const auto dtype = options_.dtype == at::kDouble ? at::kDouble : at::kFloat;
    at::Tensor drawn =
        at::empty(parameter.shape, at::TensorOptions().device(options_.generator->device()).dtype(dtype));
    init(drawn, *options_.generator);
    ops::store(drawn, parameter.value);
  }
  if (parameter.value.is_floating_point()) parameter.value.set_requires_grad(options_.requires_grad);
  all_.push_back(std::move(parameter));
  return all_.back().value;
}

SharedRoom::SharedRoom(const Scope& scope, std::int64_t rows, std::int64_t columns) {
  const auto& options = scope.options();
  if (options.device.is_cuda() && !options.requires_grad) all_ = scope.matrix_room({rows, columns});
}

at::Tensor SharedRoom::take(std::int64_t rows) {
  if (!all_.defined()) return {};
  return all_.narrow(0, std::exchange(taken_, taken_ + rows), rows);
}

const Parameter* Parameters::find(std::string_view name) const {
  const auto found = index_.find(std::string(name));
  return found == index_.end() ? nullptr : &all_[found->second];
}

std::int64_t Parameters::count() const {
  std::int64_t total = 0;
  for (const auto& parameter : all_) total += c10::multiply_integers(parameter.shape);
  return total;
}

void Parameters::require_grad(bool on) {
  options_.requires_grad = on;
  for (auto& parameter : all_) parameter.value.set_requires_grad(on);
}

}  // namespace gka::layers
