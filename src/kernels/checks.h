// What a call must have before the kernels on the host take its pointers at their word. Whoever comes through torch has
// been told more (ops/checks.cpp); this is for programs that fill the structs themselves, where a forgotten size would
// compute nothing, and a wrong one write beyond an array.
#pragma once

#include "gka/block_kernels.h"
#include "gka/kernels.h"

namespace gka::kernels {

// Each throws std::invalid_argument with one sentence that names the field.
void check(const Problem& problem, const Outputs& outputs);
void check(const Problem& problem, const Gradients& gradients);
void check(const Problem& problem, const Saved& saved, const Gradients& gradients);
void check(const Step& step);

void check(const ShortConv& conv, const ShortConvOutputs& outputs);
void check(const ShortConv& conv, const ShortConvGradients& gradients);
void check(const ShortConvStep& step);
void check(const GatedRmsNorm& norm, const View& y);
void check(const GatedRmsNorm& norm, const GatedRmsNormGradients& gradients);

void check(const Executor& executor);

}  // namespace gka::kernels
