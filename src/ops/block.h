// The kernels of short_conv, gated_rms_norm and their relatives, boxed: below autograd, and autograd's own.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <array>
#include <vector>

#include "ops/arguments.h"
#include "ops/gates.h"

namespace gka::ops {

/// The gradients of a short_conv without states, from its arguments and d_y: that of x goes to `d_x`, a view of its
/// shape, and that of the weight is returned. For x that is part of a wider tensor.
at::Tensor short_conv_backward_to(ConvCall call, const at::Tensor& d_x);

/// The gradients of a gated_rms_norm, from its arguments and d_y: that of the gate goes to `d_gate`, a view of its
/// shape. For a gate that is part of a wider tensor.
struct GatedNormGradients {
  at::Tensor d_x, d_weight;
  at::Tensor y;  // once more: that costs less than to keep it
};
GatedNormGradients gated_rms_norm_backward_to(NormCall call, const at::Tensor& d_gate);

/// Up to three short_conv_step of one type in one launch, of tensors on a GPU and below autograd.
std::vector<at::Tensor> short_conv_steps(std::vector<ConvCall> calls);

/// One token of a GKA block between its projections. Query, key and value heads may be fewer than the memory's, each
/// for a run of neighbours.
struct BlockStepCall {
  std::vector<ConvCall> convs;  // of q, k and v, x [B, own heads · dim]
  at::Tensor projected;         // of the gates, [B, kinds · heads]
  std::vector<GateKind> kinds;
  int log_decay = -1, beta = -1, alpha = -1;  // which of the kinds; −1: none
  MemoryCall memory;                          // its q, k, v and gates are not read
  NormCall norm;                              // gate [B, heads, dim], weight, eps; x is not read
};
/// All of it in one kernel, of tensors on a GPU and below autograd: [B, heads, value_dim], the norm's answer. Undefined
/// where that kernel does not take the call; then nothing was done.
at::Tensor block_step(BlockStepCall call);

void run_short_conv(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void run_short_conv_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void run_short_conv_step(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void run_gated_rms_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void run_gated_rms_norm_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack);

void differentiate_short_conv(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void differentiate_gated_rms_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace gka::ops
