// The plain path: every call, on any card from compute capability 8.0 on.
#pragma once

#include "gka/kernels.h"

namespace gka::kernels::cuda::plain {

void forward(const Problem& problem, const Outputs& outputs, const Device& device);
void backward(const Problem& problem, const Saved& saved, const Gradients& gradients, const Device& device);

}  // namespace gka::kernels::cuda::plain
