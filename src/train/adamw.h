// AdamW with decoupled weight decay, and clipping of the gradient's length over all parameters.
//
// A step whose gradient is not finite changes nothing: the kernel itself looks at the flag, so a GPU does not wait.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <string>
#include <vector>

#include "layers/parameters.h"

namespace gka::train {

struct AdamWOptions {
  std::array<double, 2> betas{0.9, 0.95};
  double eps = 1e-8;
  double weight_decay = 0.1;
  double clip = 1;  // 0: never
};

class AdamW {
 public:
  AdamW(const std::vector<layers::Parameter>& parameters, const AdamWOptions& options);

  void zero_gradients();

  /// Clips the gradients in place, updates every parameter that has one, and returns their length before clipping: a
  /// float64 scalar on the parameters' device.
  at::Tensor step(double learning_rate);
  /// The same with the rate on the device, a float32 scalar that may change before a recorded step is played.
  at::Tensor step(const at::Tensor& learning_rate);

  /// Both running averages and the number of steps, by name; what `load` takes. They are the tensors themselves, no
  /// copies.
  std::map<std::string, at::Tensor> state() const;
  void load(const std::map<std::string, at::Tensor>& state);

 private:
  /// Parameters with the same weight decay; one fused call updates all of them.
  struct Group {
    double weight_decay;
    std::vector<std::string> names;
    std::vector<at::Tensor> parameters, first, second, steps;
  };

  template <typename Rate>
  at::Tensor update(const Rate& learning_rate);

  AdamWOptions options_;
  std::array<Group, 2> groups_;
};

}  // namespace gka::train
