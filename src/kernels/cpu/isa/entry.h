// The entry points of one instruction set.
#pragma once

#include "gka/kernels.h"

namespace gka::kernels::cpu::GKA_ISA {

void forward(const Problem& problem, const Outputs& outputs, const Executor& executor);
void backward(const Problem& problem, const Saved& saved, const Gradients& gradients, const Executor& executor);
void step(const Step& step, const Executor& executor);

}  // namespace gka::kernels::cpu::GKA_ISA
