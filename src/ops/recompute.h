// Activation checkpointing: keep a block's input, forget what it computed on the way, compute it again in the backward
// pass. The gradients are those of the plain run to the bit, because the same operations run in the same order.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace gka::ops {

/// body(x), where `body` reads no tensors that need a gradient but x and `parameters`. Without gradients wanted it is
/// body(x) itself; so it is inside a body that is being computed again, which keeps nothing for long.
at::Tensor recompute(const std::function<at::Tensor(const at::Tensor&)>& body, const at::Tensor& x,
                     const std::vector<at::Tensor>& parameters);

}  // namespace gka::ops
