#include "train/adamw.h"

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <stdexcept>

namespace gka::train {
namespace {

/// The length of all gradients together, in float64: squares of float32 numbers overflow where the length does not.
at::Tensor length_of(const std::vector<at::Tensor>& gradients) {
  const auto each = at::_foreach_norm(gradients, 2, at::kDouble);
  return at::linalg_vector_norm(at::stack(each), 2);
}

/// What shortens a gradient of this length to `clip`; 1 where it is short enough, and where it is not finite, so that
/// one can still see which parts of it are not.
at::Tensor shortening(const at::Tensor& length, double clip) {
  const auto factor = length.add(1e-6).reciprocal().mul(clip).clamp_max(1);
  return factor.masked_fill(length.isfinite().logical_not(), 1);
}

}  // namespace

AdamW::AdamW(const std::vector<layers::Parameter>& parameters, const AdamWOptions& options) : options_(options) {
  groups_[0].weight_decay = options.weight_decay;
  groups_[1].weight_decay = 0;
  for (const auto& parameter : parameters) {
    const auto& tensor = parameter.value;
    auto& group = groups_[parameter.weight_decay == layers::WeightDecay::yes ? 0 : 1];
    group.names.push_back(parameter.name);
    group.parameters.push_back(tensor);
    group.first.push_back(at::zeros_like(tensor.detach()));
    group.second.push_back(at::zeros_like(tensor.detach()));
    group.steps.push_back(at::zeros({}, tensor.options().dtype(at::kFloat).requires_grad(false)));
  }
}

void AdamW::zero_gradients() {
  for (auto& group : groups_) {
    for (auto& parameter : group.parameters) parameter.mutable_grad() = at::Tensor();
  }
}

at::Tensor AdamW::step(double learning_rate) { return update(learning_rate); }
at::Tensor AdamW::step(const at::Tensor& learning_rate) { return update(learning_rate); }

template <typename Rate>
at::Tensor AdamW::update(const Rate& learning_rate) {
  const c10::NoGradGuard no_gradients;
  std::vector<at::Tensor> all;
  for (const auto& group : groups_) {
    for (const auto& parameter : group.parameters) {
      if (parameter.grad().defined()) all.push_back(parameter.grad());
    }
  }
  if (all.empty()) throw std::logic_error("no parameter has a gradient");
  const auto length = length_of(all);
  if (options_.clip > 0) at::_foreach_mul_(all, shortening(length, options_.clip).to(all[0].scalar_type()));
  const auto broken = length.isfinite().logical_not().to(at::kFloat);

  for (auto& group : groups_) {
    std::vector<at::Tensor> parameters, gradients, first, second, steps;
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      if (!group.parameters[i].grad().defined()) continue;
      parameters.push_back(group.parameters[i].detach());
      gradients.push_back(group.parameters[i].grad());
      first.push_back(group.first[i]);
      second.push_back(group.second[i]);
      steps.push_back(group.steps[i]);
    }
    if (parameters.empty()) continue;
    at::_foreach_add_(steps, 1);
    at::_fused_adamw_(parameters, gradients, first, second, /*max_exp_avg_sqs=*/{}, steps, learning_rate,
                      options_.betas[0], options_.betas[1], group.weight_decay, options_.eps, /*amsgrad=*/false,
                      /*maximize=*/false, /*grad_scale=*/{}, broken);
  }
  return length;
}

std::map<std::string, at::Tensor> AdamW::state() const {
  std::map<std::string, at::Tensor> state;
  for (const auto& group : groups_) {
    for (std::size_t i = 0; i < group.names.size(); ++i) {
      state["exp_avg." + group.names[i]] = group.first[i];
      state["exp_avg_sq." + group.names[i]] = group.second[i];
      state["step." + group.names[i]] = group.steps[i];
    }
  }
  return state;
}

void AdamW::load(const std::map<std::string, at::Tensor>& state) {
  const auto own = this->state();
  for (const auto& [name, tensor] : own) {
    const auto saved = state.find(name);
    if (saved == state.end()) throw std::runtime_error("the optimiser's state lacks '" + name + "'");
    if (saved->second.sizes() != tensor.sizes()) {
      throw std::runtime_error("the optimiser's state has another shape for '" + name + "'");
    }
    tensor.copy_(saved->second);
  }
}

}  // namespace gka::train
