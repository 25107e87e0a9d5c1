// Named parameters: a flat, ordered registry that layers fill on construction and that the optimiser and checkpoints
// read. Names are those of published checkpoints ("model.layers.3.gka.q_proj.weight").
//
// A layer keeps the at::Tensor it was given, so whoever loads weights copies into it and never replaces it.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace gka::layers {

/// Fills a tensor. Called with a float32 tensor (float64 for float64 parameters) on the generator's device.
using Init = std::function<void(at::Tensor&, const at::Generator&)>;

namespace init {
Init constant(double value);
Init normal(double deviation);
Init uniform(double low, double high);
/// Rows of each matrix of [..., rows, columns] orthonormal (rows ≤ columns).
Init orthonormal_rows();
}  // namespace init

/// Matrices and convolutions decay; norms, biases, A_log, dt_bias and the like do not.
enum class WeightDecay : bool { no, yes };

struct Parameter {
  std::string name;
  at::Tensor value;                 // of a matrix in int8: its bytes (ops/stored.h)
  std::vector<std::int64_t> shape;  // as the model has it
  WeightDecay weight_decay = WeightDecay::yes;
  bool matrix = false;       // a projection, embedding or head: `ParameterOptions::matrices` is its type
  bool shares_room = false;  // its memory is part of a larger tensor's
};

struct ParameterOptions {
  /// at::kMeta allocates nothing: for counting.
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  /// Of projections, embedding and head, where it is not `dtype`: for inference with weights as they are stored.
  /// at::kChar is int8 with scales.
  std::optional<at::ScalarType> matrices{};
  /// Values are drawn on the generator's own device: a CPU generator gives the same weights whatever `device` is.
  /// Without one the parameters stay uninitialised, for weights that come from a checkpoint.
  std::optional<at::Generator> generator{};
  bool requires_grad = false;
};

class Parameters {
 public:
  explicit Parameters(ParameterOptions options = {}) : options_(std::move(options)) {}
  Parameters(const Parameters&) = delete;
  Parameters& operator=(const Parameters&) = delete;

  /// Throws where the name is taken.
  at::Tensor add(const std::string& name, at::IntArrayRef shape, const Init& init, WeightDecay decay);
  /// The same for a matrix [out, in] that activations are multiplied with, or an embedding. It lies in `room` where
  /// that is given: rows of a tensor that `matrix_room` made.
  at::Tensor add_matrix(const std::string& name, at::IntArrayRef shape, const Init& init, const at::Tensor& room = {});
  /// Memory for matrices that are to lie one below the other; no parameter itself.
  at::Tensor matrix_room(at::IntArrayRef shape) const;

  /// In the order in which they were added.
  const std::vector<Parameter>& all() const { return all_; }
  /// nullptr where there is none of that name.
  const Parameter* find(std::string_view name) const;
  /// How many numbers they hold together.
  std::int64_t count() const;

  void require_grad(bool on);
  const ParameterOptions& options() const { return options_; }

 private:
  at::Tensor keep(Parameter parameter, const Init& init);

  ParameterOptions options_;
  std::vector<Parameter> all_;
  std::unordered_map<std::string, std::size_t> index_;
};

/// A place in the registry: names are added below its prefix. `scope / "gka" / "q_proj"`.
class Scope {
 public:
  // NOLINTNEXTLINE(google-explicit-constructor): a registry is its own root scope.
  Scope(Parameters& parameters, std::string prefix = {}) : parameters_(&parameters), prefix_(std::move(prefix)) {}

  Scope operator/(std::string_view name) const { return {*parameters_, prefix_ + std::string(name) + "."}; }

  at::Tensor add(std::string_view name, at::IntArrayRef shape, const Init& init,
                 WeightDecay decay = WeightDecay::yes) const {
    return parameters_->add(prefix_ + std::string(name), shape, init, decay);
  }
  at::Tensor add_matrix(std::string_view name, at::IntArrayRef shape, const Init& init,
                        const at::Tensor& room = {}) const {
    return parameters_->add_matrix(prefix_ + std::string(name), shape, init, room);
  }
  at::Tensor matrix_room(at::IntArrayRef shape) const { return parameters_->matrix_room(shape); }

  const std::string& prefix() const { return prefix_; }
  at::Device device() const { return parameters_->options().device; }
  const ParameterOptions& options() const { return parameters_->options(); }

 private:
  Parameters* parameters_;
  std::string prefix_;
};

/// Memory for matrices of one input that a step on a GPU multiplies at once (ops::project_all): one below the other.
/// There is none elsewhere, nor where they learn; what is taken then is undefined, and they lie each for itself.
class SharedRoom {
 public:
  SharedRoom(const Scope& scope, std::int64_t rows, std::int64_t columns);
  at::Tensor take(std::int64_t rows);

 private:
  at::Tensor all_;
  std::int64_t taken_ = 0;
};

}  // namespace gka::layers
