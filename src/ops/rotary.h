// The rotary embedding: channel i of D turns with channel i + D/2.
#pragma once

#include <ATen/core/Tensor.h>

namespace gka::ops {

/// x [..., heads, D] turned by angles [..., 1, D/2]. With a gradient for x.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin);

}  // namespace gka::ops
