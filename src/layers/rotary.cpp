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

Rotation shared_rotation(Rotations* shared, const at::Tensor& positions, const std::vector<double>& turns,
                         const at::Tensor& on_device, double factor, at::ScalarType dtype) {
  if (shared == nullptr) return rotation_at(positions, on_device, factor, dtype);
  const bool same =
      shared->made.cos.defined() && shared->turns == turns && shared->factor == factor && shared->dtype == dtype;
  if (!same) {
    *shared = {
        .turns = turns, .factor = factor, .dtype = dtype, .made = rotation_at(positions, on_device, factor, dtype)};
  }
  return shared->made;
}

}  // namespace gka::layers
