// One autograd function for gated_kalmanet, ridge_solve and linear_memory, which are parts of one operator.
//
// Its forward and backward call operators through the dispatcher, so that AOTAutograd, which traces both while
// torch.compile runs, sees two operators and not two opaque functions.
#include "ops/autograd.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <string>

#include "ops/arguments.h"
#include "ops/checks.h"

namespace gka::ops {
namespace {

using kernels::Part;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What the backward pass gets back, in the order in which it is saved.
constexpr at::Tensor MemoryCall::* kSaved[] = {
    &MemoryCall::q,          &MemoryCall::k,
    &MemoryCall::v,          &MemoryCall::log_decay,
    &MemoryCall::beta,       &MemoryCall::alpha,
    &MemoryCall::h0,         &MemoryCall::u0,
    &MemoryCall::cu_seqlens, &MemoryCall::ridge_diagonal,
    &MemoryCall::x,          &MemoryCall::norm,
    &MemoryCall::h_segments, &MemoryCall::u_segments,
};

/// Empty results of the forward operator stand for none.
at::Tensor some(const at::Tensor& tensor, bool there) { return there ? tensor : at::Tensor(); }

/// The inputs among kDifferentiable that were given, which is what autograd counts.
std::vector<std::size_t> given(const MemoryCall& a) {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < std::size(kDifferentiable); ++i) {
    if ((a.*kDifferentiable[i]).defined()) indices.push_back(i);
  }
  return indices;
}

struct Differentiate : torch::autograd::Function<Differentiate> {
  static constexpr bool is_traceable = true;  // the backward pass reads nothing but its context and its inputs

  /// `inputs` are the tensors of `a` that have a gradient. Returns o and the final states that were asked for.
  static variable_list forward(AutogradContext* ctx, at::TensorList /*inputs*/, MemoryCall a) {
    static const Operator<MemoryCall> forward("gated_kalmanet_forward");
    at::AutoDispatchBelowADInplaceOrView below;
    const auto results = forward(a);
    const bool has_h = solves(a.part), has_u = remembers(a.part);
    a.x = some(results[3], has_h);
    a.norm = some(results[4], has_h);
    a.h_segments = some(results[5], has_h);
    a.u_segments = some(results[6], has_u);
    save(ctx, a);
    variable_list outputs = {results[0]};
    if (a.output_final_state && has_h) outputs.push_back(results[1]);
    if (a.output_final_state && has_u) outputs.push_back(results[2]);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& incoming) {
    static const Operator<MemoryCall> backward("gated_kalmanet_backward");
    MemoryCall a = load(ctx);
    std::size_t next = 1;
    a.d_o = incoming[0].defined() ? incoming[0] : zeros_like_o(a);
    if (a.output_final_state && solves(a.part)) a.d_h = incoming[next++];
    if (a.output_final_state && remembers(a.part)) a.d_u = incoming[next++];

    const auto inputs = given(a);
    a.needs.assign(std::size(kDifferentiable), false);
    for (std::size_t edge = 0; edge < inputs.size(); ++edge) a.needs[inputs[edge]] = ctx->needs_input_grad(edge);
    const auto results = backward(a);

    variable_list gradients;
    for (const auto i : inputs) gradients.push_back(some(results[i], a.needs[i]));
    gradients.emplace_back();  // for `a`
    return gradients;
  }

 private:
  static void save(AutogradContext* ctx, const MemoryCall& a) {
    ctx->set_materialize_grads(false);
    variable_list tensors;
    for (const auto member : kSaved) tensors.push_back(a.*member);
    ctx->save_for_backward(std::move(tensors));
    ctx->saved_data["scalars"] = pack_scalars(a);
  }

  static MemoryCall load(AutogradContext* ctx) {
    MemoryCall a;
    const auto tensors = ctx->get_saved_variables();
    for (std::size_t i = 0; i < std::size(kSaved); ++i) a.*kSaved[i] = tensors[i];
    unpack_scalars(a, ctx->saved_data["scalars"]);
    return a;
  }

  /// Where only the final states have a gradient.
  static at::Tensor zeros_like_o(const MemoryCall& a) {
    auto shape = a.q.sym_sizes().vec();
    if (remembers(a.part)) shape.back() = a.v.sym_size(-1);
    return at::zeros_symint(shape, a.q.options());
  }
};

bool requires_gradient(const c10::IValue& value) { return value.isTensor() && value.toTensor().requires_grad(); }
bool has_tangent(const c10::IValue& value) {
  return value.isTensor() && torch::autograd::isFwGradDefined(value.toTensor());
}

template <typename Condition>
bool any_argument(const c10::OperatorHandle& op, const torch::jit::Stack& stack, Condition&& holds) {
  const auto values = torch::jit::last(stack, op.schema().arguments().size());
  return std::any_of(values.begin(), values.end(), holds);
}

bool any_requires_grad(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  return at::GradMode::is_enabled() && any_argument(op, stack, requires_gradient);
}

variable_list tensors_of(c10::ArrayRef<c10::IValue> values) {
  variable_list tensors;
  for (const auto& value : values) {
    if (value.isTensor()) tensors.push_back(value.toTensor());
  }
  return tensors;
}

}  // namespace

bool wants_gradient(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  return any_requires_grad(op, stack) || any_argument(op, stack, has_tangent);
}

template <Part part>
void differentiate_part(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!wants_gradient(op, *stack)) return ignore_gradient(op, stack);  // the same values go one floor down
  static const Operator<MemoryCall> self(op);
  MemoryCall a = self.pop(*stack);
  a.part = part;
  a.save = true;
  std::vector<at::Tensor> inputs;
  for (const auto i : given(a)) inputs.push_back(a.*kDifferentiable[i]);
  const auto options = a.q.options();
  const bool states = a.output_final_state;
  auto outputs = Differentiate::apply(at::TensorList(inputs), std::move(a));
  // States that were not asked for are empty, and no part of the graph.
  const std::size_t wanted = 1 + (solves(part) ? 1 : 0) + (remembers(part) ? 1 : 0);
  if (!states) {
    while (outputs.size() < wanted) outputs.push_back(at::empty({0}, options.requires_grad(false)));
  }
  push_results(*stack, outputs);
}

template void differentiate_part<Part::both>(const c10::OperatorHandle&, torch::jit::Stack*);
template void differentiate_part<Part::solve>(const c10::OperatorHandle&, torch::jit::Stack*);
template void differentiate_part<Part::memory>(const c10::OperatorHandle&, torch::jit::Stack*);

namespace {

/// A node that raises `message` when a gradient reaches it. torch holds nodes by shared_ptr up to 2.12 and by
/// intrusive_ptr after; the type of an edge tells which.
template <typename NodePtr = decltype(torch::autograd::Edge::function)>
NodePtr error_node(const std::string& message, torch::autograd::edge_list edges) {
  using torch::autograd::Error;
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<Error>(message, std::move(edges));
  } else {
    return c10::make_intrusive<Error>(message, std::move(edges));
  }
}

/// Without the library's name.
std::string own_name(const c10::OperatorHandle& op) {
  return op.schema().name().substr(std::string_view("gka::").size());
}

/// Of the operator with a gradient that `op` is a part or a form of: "short_conv" for short_conv_backward.
std::string differentiable_name(const c10::OperatorHandle& op) {
  const std::string name = own_name(op);
  for (const std::string_view part : {"_backward", "_forward", "_step", "_certainty", "_report"}) {
    if (name.ends_with(part)) return name.substr(0, name.size() - part.size());
  }
  return name;
}

}  // namespace

void forbid_second_derivative(const std::string& name, const variable_list& inputs, const variable_list& results) {
  const auto message = name + ": it can be differentiated once, and this asks for a second derivative";
  const auto node = error_node(message, torch::autograd::collect_next_edges(inputs));
  for (const auto& result : results) {
    if (result.defined()) torch::autograd::set_history(result, node);
  }
}

void differentiable_once(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!any_requires_grad(op, *stack)) return ignore_gradient(op, stack);
  const auto inputs = tensors_of(torch::jit::last(*stack, op.schema().arguments().size()));
  ignore_gradient(op, stack);
  forbid_second_derivative(differentiable_name(op), inputs,
                           tensors_of(torch::jit::last(*stack, op.schema().returns().size())));
}

void refuse_gradient(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& formals = op.schema().arguments();
  const auto values = torch::jit::last(*stack, formals.size());
  for (std::size_t i = 0; i < formals.size(); ++i) {
    if (at::GradMode::is_enabled() && requires_gradient(values[i])) {
      fail_value(own_name(op) + ": " + formals[i].name() +
                 " takes a tensor that requires no gradient, because this operator has none (" +
                 differentiable_name(op) + " has; or call this one under no_grad), got one that requires it");
    }
  }
  at::AutoDispatchBelowAutograd below;
  op.callBoxed(stack);
}

void ignore_gradient(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
}

void mark_states_changed(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& formals = op.schema().arguments();
  variable_list changed;
  const auto values = torch::jit::last(*stack, formals.size());
  for (std::size_t i = 0; i < formals.size(); ++i) {
    const auto* alias = formals[i].alias_info();
    if (alias != nullptr && alias->isWrite() && values[i].isTensor()) changed.push_back(values[i].toTensor());
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  for (const auto& state : changed) torch::autograd::impl::bump_version(state);
}

}  // namespace gka::ops
