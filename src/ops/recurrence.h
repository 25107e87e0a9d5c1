// The memories of layers/memory.h token by token on a GPU, with their gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gka::ops {

struct Recurrence {
  at::Tensor q, k;       // [B,T,H,K], of any floating type: computed in float32, as all below
  at::Tensor v;          // [B,T,H,V]
  at::Tensor log_decay;  // [B,T,H] or [B,T,H,K]; may be undefined, as may those below
  at::Tensor beta;       // [B,T,H]
  at::Tensor initial;    // [N,H,K,V]
  at::Tensor bounds;     // int64 [N+1]: where B·T tokens are several packed sequences; undefined: rows are sequences
  bool delta = false;
  double scale = 1;
};

/// Whether there is a kernel for tensors like q, of any type it can be widened from, with keys so wide.
bool has_recurrence(const at::Tensor& q);

struct RecurrenceResult {
  at::Tensor o;      // float32 [B,T,H,V]
  at::Tensor final;  // float32 [N,H,K,V]; undefined unless asked for
};
/// Differentiable in all tensors but `bounds`.
RecurrenceResult recurrence(const Recurrence& r, bool want_final);

}  // namespace gka::ops
