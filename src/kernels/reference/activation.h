// The activations between the block's small operations, with their derivatives.
#pragma once

#include <cmath>

#include "gka/types.h"

namespace gka::kernels::reference {

struct Activated {
  double value = 0;
  double slope = 0;
};

inline Activated activate(Activation activation, double z) {
  const double sigmoid = 1 / (1 + std::exp(-z));
  switch (activation) {
    case Activation::silu: return {.value = z * sigmoid, .slope = sigmoid * (1 + z * (1 - sigmoid))};
    case Activation::sigmoid: return {.value = sigmoid, .slope = sigmoid * (1 - sigmoid)};
    case Activation::none: break;
  }
  return {.value = z, .slope = 1};
}

}  // namespace gka::kernels::reference
