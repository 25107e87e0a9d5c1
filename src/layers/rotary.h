// The rotary embedding at frequencies that frequencies.h has worked out.
#pragma once

#include <ATen/core/Tensor.h>

#include "layers/frequencies.h"
#include "layers/functions.h"

namespace gka::layers {

/// As `rotation` of functions.h, for frequencies that lie on a device: float64 [D/2].
Rotation rotation_at(const at::Tensor& positions, const at::Tensor& turns, double factor, at::ScalarType dtype);

}  // namespace gka::layers
