// The entry points of one instruction set.
#pragma once

#include "gka/block_kernels.h"
#include "gka/kernels.h"
#include "kernels/products.h"
#include "kernels/recurrence.h"

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

void recurrence(const Recurrence<float>& r, const RecurrenceOutputs<float>& out, const Executor& executor);
void recurrence(const Recurrence<double>& r, const RecurrenceOutputs<double>& out, const Executor& executor);
void recurrence_backward(const Recurrence<float>& r, const RecurrenceGradients<float>& gradients,
                         const Executor& executor);
void recurrence_backward(const Recurrence<double>& r, const RecurrenceGradients<double>& gradients,
                         const Executor& executor);
void recurrence_step(const RecurrenceStep<float>& step, const Executor& executor);
void recurrence_step(const RecurrenceStep<double>& step, const Executor& executor);

}  // namespace gka::kernels::cpu::GKA_ISA
