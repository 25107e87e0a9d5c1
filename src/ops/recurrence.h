// The memories of layers/memory.h token by token on a GPU: below autograd.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gka::ops {

struct Recurrence {
  at::Tensor q, k;       // [B,T,H,K], all float32 and contiguous
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
  at::Tensor o;
  at::Tensor states;  // for the backward pass; undefined unless asked for
  at::Tensor final;   // likewise
};
RecurrenceResult recurrence(const Recurrence& r, bool keep_states, bool want_final);

struct RecurrenceGradients {
  at::Tensor q, k, v, log_decay, beta, initial;  // undefined where the input is
};
RecurrenceGradients recurrence_backward(const Recurrence& r, const at::Tensor& states, const at::Tensor& d_o,
                                        const at::Tensor& d_final);

}  // namespace gka::ops
