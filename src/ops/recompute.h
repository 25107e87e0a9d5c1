// What is computed again in the backward pass instead of being kept for it: whole blocks (activation checkpointing), or
// single tensors that cost little. The gradients are those of the plain run to the bit, because the same operations run
// on the same numbers.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace gka::ops {

/// body(x), where `body` reads no tensors that need a gradient but x and `parameters`. Without gradients wanted it is
/// body(x) itself; so it is inside a body that is being computed again, which keeps nothing for long.
at::Tensor recompute(const std::function<at::Tensor(const at::Tensor&)>& body, const at::Tensor& x,
                     const std::vector<at::Tensor>& parameters);

/// A tensor that has its memory to itself, and what makes the same bits once more from tensors that are kept anyhow.
struct Remade {
  at::Tensor tensor;
  std::function<at::Tensor()> make;
};

/// `through`, computed from the `made` tensors by operations that have saved them. From here on only the backward
/// passes of these may read them: their memory is given back, and is there again when the backward pass comes to
/// `through`, which it does before it comes to any of those operations. Without gradients wanted nothing happens; nor
/// inside a body that is being computed again.
at::Tensor forget(const at::Tensor& through, std::vector<Remade> made);

}  // namespace gka::ops
