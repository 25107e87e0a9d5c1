#include "layers/rotary.h"

#include <ATen/TensorOperators.h>

namespace gka::layers {

Rotation rotation_at(const at::Tensor& positions, const at::Tensor& turns, double factor, at::ScalarType dtype) {
  const auto type = dtype == at::kDouble ? at::kDouble : at::kFloat;
  // Angles in float64: positions of long sequences times fractions of a turn lose digits in float32.
  const auto angles = (positions.to(at::kDouble).unsqueeze(-1) * turns).unsqueeze(-2);
  if (factor == 1.0) return {.cos = angles.cos().to(type), .sin = angles.sin().to(type)};
  return {.cos = (angles.cos() * factor).to(type), .sin = (angles.sin() * factor).to(type)};
}

}  // namespace gka::layers
