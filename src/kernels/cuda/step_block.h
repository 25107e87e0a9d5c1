// One token of a GKA block, all that lies between its projections, in one kernel: the short convolutions of q, k and v
// with their states, the gates, the memory, the gated norm of what it answers.
#pragma once

#include "gka/block_kernels.h"
#include "kernels/cuda/fused.h"

namespace gka::kernels::cuda {

/// All of one type. As many query, key and value heads as there are, or fewer, each for a run of neighbouring heads.
struct StepBlock {
  Step step{};                                // q, k, v, log_decay, beta, alpha and o are not read
  ShortConvStep convs[3] = {};                // of q, k and v; y is not written, and slots are those of the step
  Gates gates{};                              // tokens: sequences; values are not written
  int log_decay = -1, beta = -1, alpha = -1;  // which kind of the gates; −1: none
  GatedRmsNorm norm{};                        // gate: a sequence every batch_stride; x is not read
  View y{};                                   // what comes out, [batch, heads, value_dim]
};

/// Whether `step_block` takes the call; otherwise its parts have kernels of their own.
bool takes_step_block(const StepBlock& block);
void step_block(const StepBlock& block, const Device& device);

}  // namespace gka::kernels::cuda
