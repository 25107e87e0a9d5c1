// The memories of layers/memory.h by kernels, with their gradients:
//
//   S ← diag(γ) S + k uᵀ,   u = β (v − Sᵀ diag(γ) k) with the delta rule, else β v,   o = scale · Sᵀ q
//
// by three sets of them: token by token on a CPU; on a GPU token by token in float32, for short sequences, and in
// chunks on tensor cores.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace gka::ops {

struct Recurrence {
  at::Tensor q, k;       // [B,T,H,K]
  at::Tensor v;          // [B,T,H,V]
  at::Tensor log_decay;  // [B,T,H] or [B,T,H,K]; may be undefined, as may those below
  at::Tensor beta;       // [B,T,H]
  at::Tensor initial;    // [N,H,K,V]
  at::Tensor bounds;     // int64 [N+1]: where B·T tokens are several packed sequences; undefined: rows are sequences
  bool delta = false;
  double scale = 1;
};

/// Which kernels compute it. `cpu` takes any floating type, `tokens` any but float64; both widen it. `chunks` takes
/// bfloat16 q, k and v.
enum class RecurrencePath : std::uint8_t { none, cpu, tokens, chunks };

/// The one to take, for sequences of which the longest has so many tokens; none: there is no kernel for it, or there
/// are better ways. The initial state does not count.
RecurrencePath recurrence_path(const Recurrence& r, std::int64_t longest);

struct RecurrenceResult {
  at::Tensor o;      // [B,T,H,V] of v's type
  at::Tensor final;  // float32 [N,H,K,V]; undefined unless asked for
};
/// Differentiable in all tensors but `bounds`.
RecurrenceResult recurrence(const Recurrence& r, RecurrencePath path, bool want_final);

/// The same as the torch operator gka::chunked_delta_rule: in chunks or an error.
std::tuple<at::Tensor, at::Tensor> chunked_delta_rule(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                      const std::optional<at::Tensor>& log_decay,
                                                      const std::optional<at::Tensor>& beta, double scale, bool delta,
                                                      const std::optional<at::Tensor>& initial_state,
                                                      bool output_final_state,
                                                      const std::optional<at::Tensor>& cu_seqlens);

/// One token for each of B sequences: q, k [B,H,K], v [B,H,V], log_decay [B,H] or [B,H,K], beta [B,H].
struct RecurrenceStep {
  at::Tensor q, k, v, log_decay, beta;
  at::Tensor pool;   // float32 [slots,H,K,V], changed in place
  at::Tensor slots;  // int64 [B], distinct; undefined: sequence b has slot b
  bool delta = false;
  double scale = 1;
};
bool has_recurrence_step(const RecurrenceStep& step);
/// o [B,H,V] of v's type. No gradient.
at::Tensor recurrence_step(const RecurrenceStep& step);

}  // namespace gka::ops
