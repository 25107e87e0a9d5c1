// Autograd for the block's small operations: one function for both, which differ in a table. Nothing is kept for the
// backward pass but the inputs; its kernel recomputes the rest.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <span>

#include "ops/arguments.h"
#include "ops/block.h"

namespace gka::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Member = at::Tensor Arguments::*;

struct Differentiable {
  std::string_view forward;
  std::string_view backward;
  std::span<const Member> inputs;  // in the order in which `backward` returns their gradients
};

constexpr Member kConvInputs[] = {&Arguments::x, &Arguments::weight, &Arguments::bias, &Arguments::initial_state};
constexpr Member kNormInputs[] = {&Arguments::x, &Arguments::gate, &Arguments::weight};

constexpr Differentiable kShortConv = {"short_conv", "short_conv_backward", kConvInputs};
constexpr Differentiable kGatedRmsNorm = {"gated_rms_norm", "gated_rms_norm_backward", kNormInputs};

/// Those of the inputs that were given, which is what autograd counts.
std::vector<std::size_t> given(const Arguments& a, const Differentiable& op) {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < op.inputs.size(); ++i) {
    if ((a.*op.inputs[i]).defined()) indices.push_back(i);
  }
  return indices;
}

template <const Differentiable& op>
struct Operator : torch::autograd::Function<Operator<op>> {
  static constexpr bool is_traceable = true;  // the backward pass reads nothing but its context and its inputs

  /// `inputs` are the tensors of `a` that have a gradient. Returns y and, if it was asked for, the final state.
  static variable_list forward(AutogradContext* ctx, at::TensorList /*inputs*/, const Arguments& a) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto results = call(op.forward, a);
    if (!a.output_final_state) results.resize(1);
    ctx->set_materialize_grads(false);
    variable_list kept;
    for (const Member input : op.inputs) kept.push_back(a.*input);
    kept.push_back(a.cu_seqlens);
    ctx->save_for_backward(std::move(kept));
    for (auto& [name, value] : save_scalars(a)) ctx->saved_data[name] = value;
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& incoming) {
    Arguments a;
    const auto kept = ctx->get_saved_variables();
    for (std::size_t i = 0; i < op.inputs.size(); ++i) a.*op.inputs[i] = kept[i];
    a.cu_seqlens = kept.back();
    for (const auto& [name, value] : ctx->saved_data) load_scalar(a, name, value);
    a.d_y = incoming[0].defined() ? incoming[0] : at::zeros_symint(a.x.sym_sizes(), a.x.options());
    if (a.output_final_state) a.d_final_state = incoming[1];

    const auto inputs = given(a, op);
    a.needs.assign(op.inputs.size(), false);
    for (std::size_t edge = 0; edge < inputs.size(); ++edge) a.needs[inputs[edge]] = ctx->needs_input_grad(edge);
    const auto results = call(op.backward, a);

    variable_list gradients;
    for (const auto i : inputs) gradients.push_back(a.needs[i] ? results[i] : at::Tensor());
    gradients.emplace_back();  // for `a`
    return gradients;
  }
};

/// A state that was not asked for is empty, and no part of the graph.
template <const Differentiable& op>
void differentiate(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const Arguments a = pop_arguments(handle.schema(), *stack);
  std::vector<at::Tensor> inputs;
  for (const auto i : given(a, op)) inputs.push_back(a.*op.inputs[i]);
  auto outputs = Operator<op>::apply(at::TensorList(inputs), a);
  while (outputs.size() < handle.schema().returns().size()) outputs.push_back(at::empty({0}, a.x.options()));
  push_results(*stack, outputs);
}

}  // namespace

void differentiate_short_conv(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  differentiate<kShortConv>(op, stack);
}

void differentiate_gated_rms_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  differentiate<kGatedRmsNorm>(op, stack);
}

}  // namespace gka::ops
