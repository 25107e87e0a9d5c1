// Autograd for the block's small operations: one function for both, which differ in a table. Nothing is kept for the
// backward pass but the inputs; its kernel recomputes the rest.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <span>

#include "ops/arguments.h"
#include "ops/autograd.h"
#include "ops/block.h"

namespace gka::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What a pair of operators does with its inputs, as fields of their call.
template <typename Call>
struct Differentiable {
  using Member = at::Tensor Call::*;
  const char* forward;
  const char* backward;
  std::span<const Member> inputs;  // in the order in which `backward` returns their gradients
  // Where there is a state: the sequences' bounds, whether the last state is wanted, and its gradient.
  Member cu_seqlens = nullptr;
  bool Call::* output_final_state = nullptr;
  Member d_final_state = nullptr;

  bool gives_state(const Call& call) const { return output_final_state != nullptr && call.*output_final_state; }
};

constexpr at::Tensor ConvCall::* kConvInputs[] = {&ConvCall::x, &ConvCall::weight, &ConvCall::bias,
                                                  &ConvCall::initial_state};
constexpr at::Tensor NormCall::* kNormInputs[] = {&NormCall::x, &NormCall::gate, &NormCall::weight};

constexpr Differentiable<ConvCall> kShortConv = {.forward = "short_conv",
                                                 .backward = "short_conv_backward",
                                                 .inputs = kConvInputs,
                                                 .cu_seqlens = &ConvCall::cu_seqlens,
                                                 .output_final_state = &ConvCall::output_final_state,
                                                 .d_final_state = &ConvCall::d_final_state};
constexpr Differentiable<NormCall> kGatedRmsNorm = {
    .forward = "gated_rms_norm", .backward = "gated_rms_norm_backward", .inputs = kNormInputs};

/// Those of the inputs that were given, which is what autograd counts.
template <typename Call>
std::vector<std::size_t> given(const Call& call, const Differentiable<Call>& op) {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < op.inputs.size(); ++i) {
    if ((call.*op.inputs[i]).defined()) indices.push_back(i);
  }
  return indices;
}

template <typename Call, const Differentiable<Call>& op>
struct Differentiate : torch::autograd::Function<Differentiate<Call, op>> {
  static constexpr bool is_traceable = true;  // the backward pass reads nothing but its context and its inputs

  /// `inputs` are the tensors of `call` that have a gradient. Returns y and, if it was asked for, the final state.
  static variable_list forward(AutogradContext* ctx, at::TensorList /*inputs*/, const Call& call) {
    static const Operator<Call> forward(op.forward);
    at::AutoDispatchBelowADInplaceOrView below;
    auto results = forward(call);
    if (!op.gives_state(call)) results.resize(1);
    ctx->set_materialize_grads(false);
    variable_list kept;
    for (const auto input : op.inputs) kept.push_back(call.*input);
    if (op.cu_seqlens != nullptr) kept.push_back(call.*op.cu_seqlens);
    ctx->save_for_backward(std::move(kept));
    ctx->saved_data["scalars"] = pack_scalars(call);
    return results;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& incoming) {
    static const Operator<Call> backward(op.backward);
    Call call;
    const auto kept = ctx->get_saved_variables();
    for (std::size_t i = 0; i < op.inputs.size(); ++i) call.*op.inputs[i] = kept[i];
    if (op.cu_seqlens != nullptr) call.*op.cu_seqlens = kept.back();
    unpack_scalars(call, ctx->saved_data["scalars"]);
    call.d_y = incoming[0].defined() ? incoming[0] : at::zeros_symint(call.x.sym_sizes(), call.x.options());
    if (op.gives_state(call)) call.*op.d_final_state = incoming[1];

    const auto inputs = given(call, op);
    call.needs.assign(op.inputs.size(), false);
    for (std::size_t edge = 0; edge < inputs.size(); ++edge) call.needs[inputs[edge]] = ctx->needs_input_grad(edge);
    const auto results = backward(call);

    variable_list gradients;
    for (const auto i : inputs) gradients.push_back(call.needs[i] ? results[i] : at::Tensor());
    gradients.emplace_back();  // for `call`
    return gradients;
  }
};

/// A state that was not asked for is empty, and no part of the graph.
template <typename Call, const Differentiable<Call>& op>
void differentiate(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  if (!wants_gradient(handle, *stack)) return ignore_gradient(handle, stack);
  static const Operator<Call> self(handle);
  const Call call = self.pop(*stack);
  std::vector<at::Tensor> inputs;
  for (const auto i : given(call, op)) inputs.push_back(call.*op.inputs[i]);
  auto outputs = Differentiate<Call, op>::apply(at::TensorList(inputs), call);
  while (outputs.size() < handle.schema().returns().size()) outputs.push_back(at::empty({0}, call.x.options()));
  push_results(*stack, outputs);
}

}  // namespace

void differentiate_short_conv(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  differentiate<ConvCall, kShortConv>(op, stack);
}

void differentiate_gated_rms_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  differentiate<NormCall, kGatedRmsNorm>(op, stack);
}

}  // namespace gka::ops
