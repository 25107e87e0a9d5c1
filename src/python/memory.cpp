// The rivals' memories (layers/memory.h) as an operator. It is made of differentiable operators, so autograd goes
// through it by itself.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "layers/memory.h"
#include "layers/sequences.h"

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
  TORCH_CHECK_VALUE(q.size(0) == 1, "memory: with cu_seqlens B is 1, and q has shape ", q.sizes());
  return layers::Sequences::packed(*cu_seqlens, q.device());
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

}  // namespace

TORCH_LIBRARY_FRAGMENT(gka, m) {
  m.def(
      "memory(Tensor q, Tensor k, Tensor v, Tensor? log_decay=None, Tensor? beta=None, *, str rule=\"delta\", "
      "float scale=1.0, Tensor? initial_state=None, bool output_final_state=False, Tensor? cu_seqlens=None) "
      "-> (Tensor o, Tensor state)",
      memory);
}

}  // namespace gka::python
