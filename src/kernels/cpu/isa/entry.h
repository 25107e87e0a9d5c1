// The entry points of one instruction set.
#pragma once

#include "gka/block_kernels.h"
#include "gka/kernels.h"
#include "kernels/products.h"

namespace gka::kernels::cpu::GKA_ISA {

void forward(const Problem& problem, const Outputs& outputs, const Executor& executor);
void backward(const Problem& problem, const Saved& saved, const Gradients& gradients, const Executor& executor);
void step(const Step& step, const Executor& executor);

void short_conv(const ShortConv& conv, const ShortConvOutputs& outputs, const Executor& executor);
void short_conv_backward(const ShortConv& conv, const ShortConvGradients& gradients, const Executor& executor);
void short_conv_step(const ShortConvStep& step, const Executor& executor);
void gated_rms_norm(const GatedRmsNorm& norm, const View& y, const Executor& executor);
void gated_rms_norm_backward(const GatedRmsNorm& norm, const GatedRmsNormGradients& gradients,
                             const Executor& executor);

void products(const Products& products, const Executor& executor);

}  // namespace gka::kernels::cpu::GKA_ISA
