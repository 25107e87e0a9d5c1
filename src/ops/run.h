// The operators' kernels below autograd, boxed. The same functions serve every device and, without running anything,
// the meta device on which torch.compile traces.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "gka/kernels.h"

namespace gka::ops {

struct MemoryCall;
struct Sizes;
/// A checked step as the kernels see it, its tensors in the layout they read; o [B,H,V] gets the answer.
kernels::Step step_of(MemoryCall& call, const Sizes& sizes, kernels::Options options, const at::Tensor& o);

/// gated_kalmanet, ridge_solve, linear_memory: the same operator by its part.
template <kernels::Part part>
void run_part(const c10::OperatorHandle& op, torch::jit::Stack* stack);
/// The same with what a backward pass needs, the part among its arguments.
void run_forward(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void run_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void run_step(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void run_certainty(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void run_report(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace gka::ops
