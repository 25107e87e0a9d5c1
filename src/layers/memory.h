// The recurrences of the rivals, for whole sequences and token by token for a step; by kernels (ops/recurrence.h) where
// there are some for the call.
//
//   add      S ← diag(γ) S + β k vᵀ                              linear attention, RetNet, Mamba2, GLA
//   delta    S ← (I − β k kᵀ) diag(γ) S + β k vᵀ                 DeltaNet, Gated DeltaNet, Kimi Delta Attention
//            o = scale · Sᵀ q
//
// with γ = exp(log_decay) one number per head or per key channel. By torch's operations, in chunks, both are matrix
// products with a short loop over the chunks' states; the delta rule first replaces the values of a chunk by what is
// left of them once the memory has answered (a triangular system). Decays enter only as exp of sums of log_decay over
// the tokens between, never as a quotient, so strong decay underflows to 0 and nothing overflows.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "layers/mixer.h"

namespace gka::layers {

enum class MemoryRule : std::uint8_t { add, delta };

struct MemoryInputs {
  at::Tensor q, k;         // [B,T,H,K]; in a step [B,H,K]
  at::Tensor v;            // [B,T,H,V]
  at::Tensor log_decay{};  // [B,T,H] or [B,T,H,K], ≤ 0; undefined: 0
  at::Tensor beta{};       // [B,T,H]; undefined: 1
  double scale = 1.0;
};

/// o [B,T,H,V] (or [B,H,V]) in the type of q. Takes one tensor of the state, S [slots,H,K,V].
at::Tensor remember(const MemoryInputs& in, MemoryRule rule, Call& call);
/// The same for whole sequences by torch's operations: what no kernels take, and what is traced.
at::Tensor remember_in_chunks(const MemoryInputs& in, MemoryRule rule, Call& call);

/// FLOP per token, forward and backward: a write and an answer; the delta rule asks the memory before it writes as
/// well.
double memory_flops(std::int64_t heads, std::int64_t key_dim, std::int64_t value_dim, MemoryRule rule);
/// The same for H of so many dimensions and a solve with it: every number takes part in the write, the norm, and each
/// step of the solver, which runs once forward and once backward (with the gradient unrolled, as any product).
double solve_flops(std::int64_t heads, std::int64_t dim, std::int64_t iterations, bool unrolled);

/// The state's field.
StateField memory_field(std::int64_t heads, std::int64_t key_dim, std::int64_t value_dim, at::ScalarType dtype);

}  // namespace gka::layers
