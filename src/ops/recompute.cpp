#include "ops/recompute.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace gka::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Body = std::function<at::Tensor(const at::Tensor&)>;

/// Whether a body is being computed again on this thread.
thread_local bool again = false;

at::Tensor run_again(const Body& body, const at::Tensor& x) {
  struct Reset {
    bool before = std::exchange(again, true);
    ~Reset() { again = before; }
  } const reset;
  return body(x);
}

/// The body travels through the context in an IValue.
struct BodyHolder : torch::CustomClassHolder {
  explicit BodyHolder(Body held) : body(std::move(held)) {}
  Body body;
};

/// Inputs: x, then the parameters, so that their gradients come back through this node and nothing is accumulated
/// behind the caller's back.
struct Recompute : torch::autograd::Function<Recompute> {
  static at::Tensor forward(AutogradContext* context, const Body& body, at::TensorList inputs) {
    context->save_for_backward(inputs.vec());
    context->saved_data["body"] = c10::IValue::make_capsule(c10::make_intrusive<BodyHolder>(body));
    return body(inputs.front());
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    auto inputs = context->get_saved_variables();
    const auto holder = c10::static_intrusive_pointer_cast<BodyHolder>(context->saved_data["body"].toCapsule());
    inputs.front() = inputs.front().detach().set_requires_grad(context->needs_input_grad(0));

    variable_list wanted;
    for (const auto& input : inputs) {
      if (input.requires_grad()) wanted.push_back(input);
    }
    variable_list found;
    {
      const at::AutoGradMode enabled(true);
      const auto output = run_again(holder->body, inputs.front());
      found = torch::autograd::grad({output}, wanted, {gradients[0]}, /*retain_graph=*/false, /*create_graph=*/false,
                                    /*allow_unused=*/true);
    }
    variable_list results{{}};  // the body has no gradient
    auto next = found.begin();
    for (const auto& input : inputs) results.push_back(input.requires_grad() ? *next++ : at::Tensor());
    return results;
  }
};

/// Memory that has been given back, and how to fill it again.
struct Forgotten {
  c10::Storage storage;
  std::function<at::Tensor()> make;
};
struct ForgottenHolder : torch::CustomClassHolder {
  explicit ForgottenHolder(std::vector<Forgotten> held) : forgotten(std::move(held)) {}
  std::vector<Forgotten> forgotten;
};

c10::StorageImpl& impl_of(const c10::Storage& storage) { return *storage.unsafeGetStorageImpl(); }

/// Every tensor on this storage, those that autograd saved among them, is without memory until it is filled.
Forgotten let_go(Remade&& made) {
  const auto& storage = made.tensor.storage();
  if (made.tensor.storage_offset() != 0 || storage.nbytes() != made.tensor.nbytes()) {
    throw std::logic_error("a tensor to be made again shares its memory with others");
  }
  impl_of(storage).set_data_ptr(c10::DataPtr(nullptr, storage.device()));
  return {.storage = storage, .make = std::move(made.make)};
}

void fill(const Forgotten& forgotten) {
  const auto again = forgotten.make();
  if (again.storage().nbytes() != forgotten.storage.nbytes()) {
    throw std::logic_error("a tensor was made again with another size");
  }
  impl_of(forgotten.storage).set_data_ptr(impl_of(again.storage()).set_data_ptr(c10::DataPtr(nullptr, again.device())));
}

/// Passes on what comes, in both directions.
struct Forget : torch::autograd::Function<Forget> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& through,
                            const c10::intrusive_ptr<ForgottenHolder>& holder) {
    context->saved_data["forgotten"] = c10::IValue::make_capsule(holder);
    return through;
  }

  static variable_list backward(AutogradContext* context, const variable_list& slopes) {
    const at::NoGradGuard no_gradient;
    const auto holder =
        c10::static_intrusive_pointer_cast<ForgottenHolder>(context->saved_data["forgotten"].toCapsule());
    // Once: from now on the memory is there as long as the operations that saved it are. The recipes, which hold
    // tensors too, go at once: the graph may outlive them.
    for (const auto& forgotten : std::exchange(holder->forgotten, {})) fill(forgotten);
    return {slopes[0], {}};
  }
};

}  // namespace

at::Tensor forget(const at::Tensor& through, std::vector<Remade> made) {
  if (again || !at::GradMode::is_enabled() || !through.requires_grad()) return through;
  std::vector<Forgotten> forgotten;
  for (auto& one : made) {
    if (one.tensor.numel() > 0) forgotten.push_back(let_go(std::move(one)));
  }
  return Forget::apply(through, c10::make_intrusive<ForgottenHolder>(std::move(forgotten)));
}

at::Tensor recompute(const Body& body, const at::Tensor& x, const std::vector<at::Tensor>& parameters) {
  const auto needs = [](const at::Tensor& tensor) { return tensor.requires_grad(); };
  if (again || !at::GradMode::is_enabled() || !(needs(x) || std::ranges::any_of(parameters, needs))) return body(x);
  variable_list inputs{x};
  inputs.insert(inputs.end(), parameters.begin(), parameters.end());
  return Recompute::apply(body, at::TensorList(inputs));
}

}  // namespace gka::ops
