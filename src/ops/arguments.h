// Every argument of every operator, by the name its schema gives it.
//
// The operators share one set of arguments and differ in which of them they take and in what order. So kernels are
// boxed: they read a call into this struct by name, and build calls of other operators from it by name. A schema in
// schema.cpp is then the only place that lists an operator's arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gka/kernels.h"

namespace gka::ops {

struct Arguments {
  // What one call reads. Undefined: left out.
  at::Tensor q, k, v, log_decay, beta, alpha, ridge_diagonal, h0, u0, cu_seqlens;

  double scale = 1.0;
  double ridge = 0.02;
  std::int64_t iterations = 30;
  std::string solver = "chebyshev";
  std::string gradient = "implicit";
  std::string ridge_mode = "adaptive";
  bool ridge_gradient = true;
  bool decay_keys = true;
  bool refine = true;
  bool output_final_state = false;

  // Between gated_kalmanet_forward and gated_kalmanet_backward.
  std::string part = "both";
  bool save = false;                           // keep what the backward pass needs: the next four
  at::Tensor x, norm, h_segments, u_segments;  // kernels::Saved
  at::Tensor d_o, d_h, d_u;
  std::vector<bool> needs;  // which of kDifferentiable want a gradient

  // The step.
  at::Tensor h, u, state_indices, iterations_per_sequence;

  // The block's small operations, which read x (above) and share cu_seqlens, state_indices and the like.
  at::Tensor weight, bias, gate, initial_state, state, d_y, d_final_state;
  std::string activation = "silu";
  std::string l2_norm = "none";
  std::int64_t head_dim = 0;
  double eps = 1e-6;
};

/// The inputs that have a gradient, in the order in which gated_kalmanet_backward returns them.
inline constexpr at::Tensor Arguments::* kDifferentiable[] = {
    &Arguments::q,     &Arguments::k,  &Arguments::v,  &Arguments::log_decay,      &Arguments::beta,
    &Arguments::alpha, &Arguments::h0, &Arguments::u0, &Arguments::ridge_diagonal,
};

/// Takes a call's arguments off the stack.
Arguments pop_arguments(const c10::FunctionSchema& schema, torch::jit::Stack& stack);

/// Calls `name` (of this library) through the dispatcher with those of `arguments` that its schema has.
std::vector<at::Tensor> call(std::string_view name, const Arguments& arguments);

/// Leaves an operator's results on the stack.
void push_results(torch::jit::Stack& stack, const std::vector<at::Tensor>& results);

/// The arguments that are not tensors, by name, for a backward pass to find again.
std::vector<std::pair<std::string, c10::IValue>> save_scalars(const Arguments& arguments);
void load_scalar(Arguments& arguments, std::string_view name, const c10::IValue& value);

}  // namespace gka::ops
