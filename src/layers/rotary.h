// The rotary embedding at frequencies that frequencies.h has worked out.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "layers/frequencies.h"
#include "layers/functions.h"

namespace gka::layers {

/// As `rotation` of functions.h, for frequencies that lie on a device: float64 [D/2].
Rotation rotation_at(const at::Tensor& positions, const at::Tensor& turns, double factor, at::ScalarType dtype);

/// A rotation that layers of one call share: all of them have the same positions, and most the same frequencies.
struct Rotations {
  std::vector<double> turns{};
  double factor = 1;
  at::ScalarType dtype = at::kFloat;
  Rotation made{};
};
/// From `shared` (which may be null) where it is the same; else made, and kept there. `on_device` is turns, on the
/// device.
Rotation shared_rotation(Rotations* shared, const at::Tensor& positions, const std::vector<double>& turns,
                         const at::Tensor& on_device, double factor, at::ScalarType dtype);

}  // namespace gka::layers
