// The operators' kernels above the backends, boxed: gradients and autocast.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/variable.h>

#include <string>

#include "gka/kernels.h"

namespace gka::ops {

/// gated_kalmanet, ridge_solve, linear_memory: the same operator by its part.
template <kernels::Part part>
void differentiate_part(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// Whether one of an operator's arguments, the last values of the stack, takes part in a graph, or has a tangent (which
/// torch's autograd functions then refuse).
bool wants_gradient(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

/// The results of a gradient of `name`, made of these inputs, can be used, but not differentiated once more: that is
/// refused where it is asked for.
void forbid_second_derivative(const std::string& name, const torch::autograd::variable_list& inputs,
                              const torch::autograd::variable_list& results);
/// The same for gated_kalmanet_backward and its like.
void differentiable_once(const c10::OperatorHandle& op, torch::jit::Stack* stack);
/// For gated_kalmanet_step and gated_kalmanet_forward: refuses inputs that require a gradient.
void refuse_gradient(const c10::OperatorHandle& op, torch::jit::Stack* stack);
/// For gated_kalmanet_report: results without a gradient.
void ignore_gradient(const c10::OperatorHandle& op, torch::jit::Stack* stack);
/// For gated_kalmanet_step: tells autograd that h and u have changed, so that a graph that kept them complains.
void mark_states_changed(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// Casts the first arguments, so many of q, k and v as the operator has, to autocast's type; gates and states stay as
/// they are.
template <int count>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace gka::ops
