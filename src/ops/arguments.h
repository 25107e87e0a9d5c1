// A call of an operator as a plain struct, and the one place where it becomes torch's stack of values and back.
//
// The operators of one kind share a struct and differ in which of its fields they take and in what order. So kernels
// are boxed: they read a call off the stack into the struct, and build calls of other operators from it. A schema in
// schema.cpp is then the only place that lists an operator's arguments; which fields they are is looked up once, when
// an `Operator` is made.
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

/// Of gated_kalmanet, its parts and its relatives. Undefined tensors: left out.
struct MemoryCall {
  at::Tensor q, k, v, log_decay, beta, alpha, ridge_diagonal, h0, u0, cu_seqlens;

  kernels::Part part = kernels::Part::both;
  double scale = 1.0;
  double ridge = 0.02;
  std::int64_t iterations = 30;
  Solver solver = Solver::chebyshev;
  Gradient gradient = Gradient::implicit;
  RidgeMode ridge_mode = RidgeMode::adaptive;
  bool ridge_gradient = true;
  bool decay_keys = true;
  bool refine = true;
  bool output_final_state = false;

  // Between gated_kalmanet_forward and gated_kalmanet_backward.
  bool save = false;                           // keep what the backward pass needs: the next four
  at::Tensor x, norm, h_segments, u_segments;  // kernels::Saved
  at::Tensor d_o, d_h, d_u;
  std::vector<bool> needs;  // which of kDifferentiable want a gradient

  // The step.
  at::Tensor h, u, state_indices, iterations_per_sequence;
  at::Tensor certainty;  // written
};

/// The inputs that have a gradient, in the order in which gated_kalmanet_backward returns them.
inline constexpr at::Tensor MemoryCall::* kDifferentiable[] = {
    &MemoryCall::q,     &MemoryCall::k,  &MemoryCall::v,  &MemoryCall::log_decay,      &MemoryCall::beta,
    &MemoryCall::alpha, &MemoryCall::h0, &MemoryCall::u0, &MemoryCall::ridge_diagonal,
};

/// Of short_conv, its backward pass and its step.
struct ConvCall {
  at::Tensor x, weight, bias, initial_state, cu_seqlens;
  Activation activation = Activation::silu;
  L2Norm l2_norm = L2Norm::none;
  std::int64_t head_dim = 0;
  double eps = 1e-6;
  bool output_final_state = false;

  at::Tensor d_y, d_final_state;
  std::vector<bool> needs;  // of x, weight, bias and initial_state, which want a gradient

  at::Tensor state, state_indices;  // the step
};

/// Of gated_rms_norm and its backward pass.
struct NormCall {
  at::Tensor x, gate, weight;
  Activation activation = Activation::silu;
  double eps = 1e-6;

  at::Tensor d_y;
  std::vector<bool> needs;  // of x, gate and weight
};

/// One field of a call, under the name that schemas have for it.
template <typename Call>
struct Field;

/// An operator of this library whose arguments are fields of a Call. Making one looks the fields up, so it is made once
/// per operator, as a static.
template <typename Call>
class Operator {
 public:
  explicit Operator(std::string_view name);
  explicit Operator(const c10::OperatorHandle& handle);

  /// Without the library's name: "gated_kalmanet".
  std::string_view name() const { return name_; }
  /// Takes a call's arguments off the stack. Throws ValueError where a choice has no such name.
  Call pop(torch::jit::Stack& stack) const;
  /// Calls it through the dispatcher.
  std::vector<at::Tensor> operator()(const Call& call) const;

 private:
  c10::OperatorHandle handle_;
  std::string name_;
  std::vector<const Field<Call>*> fields_;  // in the order of the schema
};

/// What a call holds besides tensors and `needs`, as one value for a backward pass to find again.
template <typename Call>
c10::IValue pack_scalars(const Call& call);
template <typename Call>
void unpack_scalars(Call& call, const c10::IValue& packed);

/// Leaves an operator's results on the stack.
void push_results(torch::jit::Stack& stack, const std::vector<at::Tensor>& results);

extern template class Operator<MemoryCall>;
extern template class Operator<ConvCall>;
extern template class Operator<NormCall>;

}  // namespace gka::ops
