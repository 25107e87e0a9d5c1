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
constexpr at::Tensor Arguments::* kSaved[] = {
    &Arguments::q,     &Arguments::k,    &Arguments::v,          &Arguments::log_decay,  &Arguments::beta,
    &Arguments::alpha, &Arguments::h0,   &Arguments::u0,         &Arguments::cu_seqlens, &Arguments::ridge_diagonal,
    &Arguments::x,     &Arguments::norm, &Arguments::h_segments, &Arguments::u_segments,
};

/// Empty results of the forward operator stand for none.
at::Tensor some(const at::Tensor& tensor, bool there) { return there ? tensor : at::Tensor(); }

constexpr bool solves(Part part) { return part != Part::memory; }
constexpr bool remembers(Part part) { return part != Part::solve; }

/// The inputs among kDifferentiable that were given, which is what autograd counts.
std::vector<std::size_t> given(const Arguments& a) {
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < std::size(kDifferentiable); ++i) {
    if ((a.*kDifferentiable[i]).defined()) indices.push_back(i);
  }
  return indices;
}

struct Operator : torch::autograd::Function<Operator> {
  static constexpr bool is_traceable = true;  // the backward pass reads nothing but its context and its inputs

  /// `inputs` are the tensors of `a` that have a gradient. Returns o and the final states that were asked for.
  static variable_list forward(AutogradContext* ctx, at::TensorList /*inputs*/, Arguments a) {
    at::AutoDispatchBelowADInplaceOrView below;
    const auto results = call("gated_kalmanet_forward", a);
    const bool has_h = a.part != "memory";
    const bool has_u = a.part != "solve";
    if (a.save) {
      a.x = some(results[3], has_h);
      a.norm = some(results[4], has_h);
      a.h_segments = some(results[5], has_h);
      a.u_segments = some(results[6], has_u);
      save(ctx, a);
    }
    variable_list outputs = {results[0]};
    if (a.output_final_state && has_h) outputs.push_back(results[1]);
    if (a.output_final_state && has_u) outputs.push_back(results[2]);
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& incoming) {
    Arguments a = load(ctx);
    std::size_t next = 1;
    a.d_o = incoming[0].defined() ? incoming[0] : zeros_like_o(a);
    if (a.output_final_state && a.part != "memory") a.d_h = incoming[next++];
    if (a.output_final_state && a.part != "solve") a.d_u = incoming[next++];

    const auto inputs = given(a);
    a.needs.assign(std::size(kDifferentiable), false);
    for (std::size_t edge = 0; edge < inputs.size(); ++edge) a.needs[inputs[edge]] = ctx->needs_input_grad(edge);
    const auto results = call("gated_kalmanet_backward", a);

    variable_list gradients;
    for (const auto i : inputs) gradients.push_back(some(results[i], a.needs[i]));
    gradients.emplace_back();  // for `a`
    return gradients;
  }

 private:
  static void save(AutogradContext* ctx, const Arguments& a) {
    ctx->set_materialize_grads(false);
    variable_list tensors;
    for (const auto member : kSaved) tensors.push_back(a.*member);
    ctx->save_for_backward(std::move(tensors));
    for (auto& [name, value] : save_scalars(a)) ctx->saved_data[name] = value;
  }

  static Arguments load(AutogradContext* ctx) {
    Arguments a;
    const auto tensors = ctx->get_saved_variables();
    for (std::size_t i = 0; i < std::size(kSaved); ++i) a.*kSaved[i] = tensors[i];
    for (const auto& [name, value] : ctx->saved_data) load_scalar(a, name, value);
    return a;
  }

  /// Where only the final states have a gradient.
  static at::Tensor zeros_like_o(const Arguments& a) {
    auto shape = a.q.sym_sizes().vec();
    if (a.part != "solve") shape.back() = a.v.sym_size(-1);
    return at::zeros_symint(shape, a.q.options());
  }
};

std::vector<at::Tensor> differentiable_inputs(const Arguments& a) {
  std::vector<at::Tensor> inputs;
  for (const auto i : given(a)) inputs.push_back(a.*kDifferentiable[i]);
  return inputs;
}

bool any_requires_grad(at::TensorList tensors) {
  return at::GradMode::is_enabled() && std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& t) {
           return t.defined() && t.requires_grad();
         });
}

variable_list tensors_of(c10::ArrayRef<c10::IValue> values) {
  variable_list tensors;
  for (const auto& value : values) {
    if (value.isTensor()) tensors.push_back(value.toTensor());
  }
  return tensors;
}

}  // namespace

template <Part part>
void run_part(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Arguments a = pop_arguments(op.schema(), *stack);
  a.part = name_of(part);
  const auto results = call("gated_kalmanet_forward", a);
  stack->emplace_back(results[0]);
  if (solves(part)) stack->emplace_back(results[1]);
  if (remembers(part)) stack->emplace_back(results[2]);
}

template <Part part>
void differentiate_part(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Arguments a = pop_arguments(op.schema(), *stack);
  a.part = name_of(part);
  const auto inputs = differentiable_inputs(a);
  a.save = any_requires_grad(inputs);
  const auto options = a.q.options();
  const bool states = a.output_final_state;
  auto outputs = Operator::apply(at::TensorList(inputs), std::move(a));
  // States that were not asked for are empty, and no part of the graph.
  const std::size_t wanted = 1 + (solves(part) ? 1 : 0) + (remembers(part) ? 1 : 0);
  if (!states) {
    while (outputs.size() < wanted) outputs.push_back(at::empty({0}, options.requires_grad(false)));
  }
  push_results(*stack, outputs);
}

template void run_part<Part::both>(const c10::OperatorHandle&, torch::jit::Stack*);
template void run_part<Part::solve>(const c10::OperatorHandle&, torch::jit::Stack*);
template void run_part<Part::memory>(const c10::OperatorHandle&, torch::jit::Stack*);
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

/// Of the operator with a gradient that `op` is a part of: "short_conv" for short_conv_backward.
std::string differentiable_name(const c10::OperatorHandle& op) {
  const std::string name = own_name(op);
  for (const std::string_view part : {"_backward", "_forward", "_step"}) {
    if (name.ends_with(part)) return name.substr(0, name.size() - part.size());
  }
  return name;
}

}  // namespace

void differentiable_once(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto inputs = tensors_of(torch::jit::last(*stack, op.schema().arguments().size()));
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  if (!any_requires_grad(inputs)) return;
  const auto message =
      differentiable_name(op) + ": it can be differentiated once, and this asks for a second derivative";
  const auto node = error_node(message, torch::autograd::collect_next_edges(inputs));
  for (const auto& result : tensors_of(torch::jit::last(*stack, op.schema().returns().size()))) {
    torch::autograd::set_history(result, node);
  }
}

void refuse_gradient(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& formals = op.schema().arguments();
  const auto values = torch::jit::last(*stack, formals.size());
  for (std::size_t i = 0; i < formals.size(); ++i) {
    if (values[i].isTensor() && any_requires_grad(values[i].toTensor())) {
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
    if (alias != nullptr && alias->isWrite()) changed.push_back(values[i].toTensor());
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  for (const auto& state : changed) torch::autograd::impl::bump_version(state);
}

}  // namespace gka::ops
