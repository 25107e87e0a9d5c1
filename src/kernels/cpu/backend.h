// One instruction set's build of the CPU kernels, as a table of functions; dispatch.cpp picks one at run time.
#pragma once

#include "gka/block_kernels.h"
#include "gka/kernels.h"
#include "kernels/products.h"
#include "kernels/recurrence.h"

namespace gka::kernels::cpu {

template <typename T>
struct RecurrenceKernels {
  void (*forward)(const Recurrence<T>&, const RecurrenceOutputs<T>&, const Executor&);
  void (*backward)(const Recurrence<T>&, const RecurrenceGradients<T>&, const Executor&);
  void (*step)(const RecurrenceStep<T>&, const Executor&);
};

struct InstructionSet {
  const char* name;
  void (*forward)(const Problem&, const Outputs&, const Executor&);
  void (*backward)(const Problem&, const Saved&, const Gradients&, const Executor&);
  void (*step)(const Step&, const Executor&);

  void (*short_conv)(const ShortConv&, const ShortConvOutputs&, const Executor&);
  void (*short_conv_backward)(const ShortConv&, const ShortConvGradients&, const Executor&);
  void (*short_conv_step)(const ShortConvStep&, const Executor&);
  void (*gated_rms_norm)(const GatedRmsNorm&, const View& y, const Executor&);
  void (*gated_rms_norm_backward)(const GatedRmsNorm&, const GatedRmsNormGradients&, const Executor&);

  void (*products)(const Products&, const Executor&);

  RecurrenceKernels<float> recurrence;
  RecurrenceKernels<double> recurrence_in_float64;
};

namespace portable {
extern const InstructionSet kInstructionSet;
}
namespace avx2 {
extern const InstructionSet kInstructionSet;
}
namespace avx512 {
extern const InstructionSet kInstructionSet;
}

}  // namespace gka::kernels::cpu
