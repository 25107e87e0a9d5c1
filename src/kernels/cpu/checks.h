// What a call must have before the kernels take its pointers at their word. Whoever comes through torch has been told
// more (ops/checks.cpp); this is for programs that fill the structs themselves, where a forgotten size would compute
// nothing, and a wrong one write beyond an array.
#pragma once

#include "gka/kernels.h"

namespace gka::kernels::cpu {

// Each throws std::invalid_argument with one sentence that names the field.
void check(const Problem& problem);
void check(const Problem& problem, const Saved& saved, const Gradients& gradients);
void check(const Step& step);

}  // namespace gka::kernels::cpu
