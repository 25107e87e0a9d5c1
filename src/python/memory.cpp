// The rivals' memories (layers/memory.h) as an operator. It is made of differentiable operators, so autograd goes
// through it by itself. torch.func does not, since some of those have their gradients in C++; for it there are two
// operators more, one without gradients and one that computes them. They stand in traced graphs too, where the layout
// of what they return has to be known beforehand: it is contiguous.
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "layers/memory.h"
#include "layers/sequences.h"
#include "ops/autograd.h"

namespace gka::python {
namespace {

using Optional = std::optional<at::Tensor>;

layers::MemoryRule rule_named(const std::string& name) {
  TORCH_CHECK_VALUE(name == "add" || name == "delta", "memory: rule is '", name, "'; it takes 'add' or 'delta'");
  return name == "add" ? layers::MemoryRule::add : layers::MemoryRule::delta;
}

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Optional& log_decay,
           const Optional& beta, const Optional& state, std::int64_t sequences) {
  TORCH_CHECK_VALUE(q.dim() == 4, "memory: q has shape ", q.sizes(), "; it takes [B, T, H, K]");
  TORCH_CHECK_VALUE(k.sizes() == q.sizes(), "memory: k has shape ", k.sizes(), "; it takes that of q, ", q.sizes());
  TORCH_CHECK_VALUE(v.dim() == 4 && v.sizes().slice(0, 3) == q.sizes().slice(0, 3), "memory: v has shape ", v.sizes(),
                    "; it takes [B, T, H, V] with B, T and H of q, ", q.sizes());
  TORCH_CHECK_VALUE(!log_decay || log_decay->sizes() == q.sizes() || log_decay->sizes() == q.sizes().slice(0, 3),
                    "memory: log_decay has shape ", log_decay->sizes(), "; it takes [B, T, H] or [B, T, H, K] of q, ",
                    q.sizes());
  TORCH_CHECK_VALUE(!beta || beta->sizes() == q.sizes().slice(0, 3), "memory: beta has shape ", beta->sizes(),
                    "; it takes [B, T, H] of q, ", q.sizes());
  const std::array<std::int64_t, 4> wanted{sequences, q.size(2), q.size(3), v.size(3)};
  TORCH_CHECK_VALUE(!state || state->sizes() == at::IntArrayRef(wanted), "memory: initial_state has shape ",
                    state->sizes(), "; it takes ", at::IntArrayRef(wanted));
  TORCH_CHECK_TYPE(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(),
                   "memory: q, k and v have types ", q.scalar_type(), ", ", k.scalar_type(), " and ", v.scalar_type(),
                   "; they take one");
}

layers::Sequences sequences_of(const at::Tensor& q, const Optional& cu_seqlens) {
  if (!cu_seqlens) return layers::Sequences::rows(q.size(0), q.size(1), q.device());
  const auto type = cu_seqlens->scalar_type();
  TORCH_CHECK_TYPE(type == at::kInt || type == at::kLong, "memory: cu_seqlens takes int32 or int64, got ", type);
  TORCH_CHECK_VALUE(cu_seqlens->dim() == 1 && cu_seqlens->numel() > 0,
                    "memory: cu_seqlens takes one entry more than there are sequences, got shape ",
                    cu_seqlens->sizes());
  TORCH_CHECK_VALUE(q.size(0) == 1, "memory: with cu_seqlens B is 1, and q has shape ", q.sizes());
  auto sequences = layers::Sequences::packed(*cu_seqlens, q.device());
  TORCH_CHECK_VALUE(sequences.bounds().back() == q.size(1), "memory: cu_seqlens takes the number of tokens, ",
                    q.size(1), ", as its last entry, got ", sequences.bounds().back());
  return sequences;
}

std::tuple<at::Tensor, at::Tensor> memory(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                          const Optional& log_decay, const Optional& beta, const std::string& rule,
                                          double scale, const Optional& initial_state, bool output_final_state,
                                          const Optional& cu_seqlens) {
  TORCH_CHECK_VALUE(q.dim() == 4, "memory: q has shape ", q.sizes(), "; it takes [B, T, H, K]");
  const auto sequences = sequences_of(q, cu_seqlens);
  check(q, k, v, log_decay, beta, initial_state, sequences.count());
  layers::State before;
  if (initial_state) before.tensors.push_back(*initial_state);
  layers::Call call(sequences, initial_state ? &before : nullptr, output_final_state);
  const auto o = layers::remember({.q = q,
                                   .k = k,
                                   .v = v,
                                   .log_decay = log_decay.value_or(at::Tensor()),
                                   .beta = beta.value_or(at::Tensor()),
                                   .scale = scale},
                                  rule_named(rule), call);
  return {o, output_final_state ? call.out().tensors.at(0) : q.new_empty({0})};
}

std::tuple<at::Tensor, at::Tensor> memory_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                  const Optional& log_decay, const Optional& beta,
                                                  const Optional& initial_state, const Optional& cu_seqlens,
                                                  const std::string& rule, double scale, bool output_final_state) {
  const at::NoGradGuard no_gradients;
  const auto [o, state] = memory(q, k, v, log_decay, beta, rule, scale, initial_state, output_final_state, cu_seqlens);
  return {o.contiguous(), state.contiguous()};
}

using Six = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Of q, k, v, log_decay, beta and initial_state; empty for those that are not needed. The memory is computed again.
Six memory_backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Optional& log_decay,
                    const Optional& beta, const Optional& initial_state, const Optional& cu_seqlens,
                    const std::string& rule, double scale, bool output_final_state, const at::Tensor& d_o,
                    const Optional& d_state, const c10::List<bool>& needs) {
  // A transform of torch.func that called this keeps autograd out.
  const c10::impl::ForceDispatchKeyGuard keys(c10::default_included_set, c10::default_excluded_set);
  const at::AutoGradMode gradients_on(true);
  std::array<Optional, 6> inputs{q, k, v, log_decay, beta, initial_state};
  torch::autograd::variable_list wanted;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i]) continue;
    inputs[i] = inputs[i]->detach().requires_grad_(needs.get(i));
    if (needs.get(i)) wanted.push_back(*inputs[i]);
  }
  const auto [o, state] = memory(*inputs[0], *inputs[1], *inputs[2], inputs[3], inputs[4], rule, scale, inputs[5],
                                 output_final_state, cu_seqlens);
  torch::autograd::variable_list outputs{o}, gradients{d_o};
  if (d_state) {
    outputs.push_back(state);
    gradients.push_back(*d_state);
  }
  const auto found = torch::autograd::grad(outputs, wanted, gradients, /*retain_graph=*/false, /*create_graph=*/false,
                                           /*allow_unused=*/true);
  std::array<at::Tensor, 6> results;
  auto next = found.begin();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i] || !needs.get(i)) {
      results[i] = q.new_empty({0});
    } else {
      results[i] = (next->defined() ? *next : at::zeros_like(*inputs[i])).contiguous();
      ++next;
    }
  }
  return std::tuple_cat(results);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gka, m) {
  m.def(
      "memory(Tensor q, Tensor k, Tensor v, Tensor? log_decay=None, Tensor? beta=None, *, str rule=\"delta\", "
      "float scale=1.0, Tensor? initial_state=None, bool output_final_state=False, Tensor? cu_seqlens=None) "
      "-> (Tensor o, Tensor state)",
      memory);
  m.def(
      "memory_forward(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? beta, Tensor? initial_state, "
      "Tensor? cu_seqlens, str rule, float scale, bool output_final_state) -> (Tensor o, Tensor state)");
  m.impl("memory_forward", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, memory_forward));
  m.def(
      "memory_backward(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? beta, Tensor? initial_state, "
      "Tensor? cu_seqlens, str rule, float scale, bool output_final_state, Tensor d_o, Tensor? d_state, bool[] needs) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.impl("memory_backward", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, memory_backward));
}

// Inside, gradients are taken of detached inputs: without this a second derivative would be zero.
TORCH_LIBRARY_IMPL(gka, Autograd, m) {
  m.impl("memory_backward", torch::CppFunction::makeFromBoxedFunction<ops::differentiable_once>());
}

}  // namespace gka::python
