// The small operations around the memory in a block, fused, as functions of torch tensors.
//
//   #include <gka/block.h>
//
//   auto [q, state] = gka::short_conv(x, weight, {.l2_norm = gka::L2Norm::divide, .head_dim = 128});
//   auto y = gka::gated_rms_norm(o, gate, weight, {.eps = 1e-6});
//
// Types: x is float64, float32, bfloat16 or float16, and so is every other tensor, each for itself; arithmetic is in
// float32 (float64 where x is), results have the type of x, and each gradient its own input's. Views are taken without
// a copy as long as their last dimension is contiguous.
//
// The functions call the torch operators of the same names, so autograd and tracing see them. Differentiable once. Bad
// input throws c10::ValueError or c10::TypeError with one sentence that names the argument, what it got and what it
// takes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "gka/types.h"

namespace gka {

struct ShortConvOptions {
  at::Tensor bias{};                         // [C]
  Activation activation = Activation::silu;  // none or silu
  L2Norm l2_norm = L2Norm::none;             // after the activation, over each head's channels
  std::int64_t head_dim = 0;                 // channels of a head, 1 to 256, a divisor of C; read with l2_norm only
  double eps = 1e-6;                         // of l2_norm

  /// [N,C,W−1]: the last W − 1 inputs before the first token, oldest first. Undefined: zero. N is B or the number of
  /// packed sequences.
  at::Tensor initial_state{};
  bool output_final_state = false;

  /// Packed sequences: B = 1, and sequence n is the tokens cu_seqlens[n] … cu_seqlens[n+1] − 1. int32 or int64 [N+1]
  /// from 0 to T, never decreasing.
  at::Tensor cu_seqlens{};
};

struct ShortConvResult {
  at::Tensor y;            // [B,T,C], the type of x
  at::Tensor final_state;  // [N,C,W−1], the type of x; undefined unless output_final_state
};

/// Causal depthwise convolution, activation and norm: y_t = norm(act(bias + Σ_j weight[:,0,j] ⊙ x_{t−W+1+j})).
/// x [B,T,C]; weight [C,1,W] with W from 1 to 8, the last tap on the token itself, as torch's conv1d has it.
ShortConvResult short_conv(const at::Tensor& x, const at::Tensor& weight, const ShortConvOptions& options = {});

struct ShortConvStepOptions {
  at::Tensor bias{};
  Activation activation = Activation::silu;
  L2Norm l2_norm = L2Norm::none;
  std::int64_t head_dim = 0;
  double eps = 1e-6;

  /// [N,C,W−1], updated in place, contiguous: one slot per sequence, or a larger pool of which state_indices picks.
  at::Tensor state{};
  /// int32 or int64 [B], distinct: the slot of each sequence. Undefined: sequence b has slot b.
  at::Tensor state_indices{};
};

/// One token for each sequence, for decoding: x [B,C]. Returns y [B,C] and has no gradient.
at::Tensor short_conv_step(const at::Tensor& x, const at::Tensor& weight, const ShortConvStepOptions& options);

struct GatedRmsNormOptions {
  Activation activation = Activation::silu;  // on the gate
  double eps = 1e-6;
};

/// y = x / √(mean(x²) + eps) ⊙ weight ⊙ act(gate) over the last dimension (1 to 8192 wide). x [..., D] of one to four
/// dimensions; gate as x; weight [D]. An undefined gate or weight is left out.
at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& gate = {}, const at::Tensor& weight = {},
                          const GatedRmsNormOptions& options = {});

}  // namespace gka
