// The sets of kernels behind ops/recurrence.h, below autograd. Tensors are as `prepare` leaves them.
#pragma once

#include <vector>

#include "ops/recurrence.h"

namespace gka::ops {

struct RecurrenceForward {
  at::Tensor o, final;           // final: undefined unless asked for
  std::vector<at::Tensor> kept;  // for the backward pass; empty unless asked for
};

struct RecurrenceGradients {
  at::Tensor q, k, v, log_decay, beta, initial;  // undefined where the input is
};

/// Room for all of them, contiguous.
RecurrenceGradients gradients_like(const Recurrence& r);

struct RecurrenceKernels {
  bool (*takes)(const Recurrence& r);
  /// The same call as the kernels read it. Differentiable.
  Recurrence (*prepare)(const Recurrence& r);
  RecurrenceForward (*forward)(const Recurrence& r, bool keep, bool want_final);
  /// d_o has any strides; d_final may be undefined.
  RecurrenceGradients (*backward)(const Recurrence& r, const std::vector<at::Tensor>& kept, const at::Tensor& d_o,
                                  const at::Tensor& d_final);
};

extern const RecurrenceKernels kCpuRecurrence;      // recurrence_cpu.cpp
extern const RecurrenceKernels kTokenRecurrence;    // recurrence_tokens.cpp
extern const RecurrenceKernels kChunkedRecurrence;  // recurrence_chunks.cpp

/// Steps have no gradient: where one is needed, torch's operations take the token.
bool needs_gradient(const RecurrenceStep& step);

/// One token, on a CPU; where a GPU has the tensors recurrence_chunks.cpp does it.
bool has_cpu_step(const RecurrenceStep& step);
at::Tensor cpu_step(const RecurrenceStep& step);

// Pointers of tensors that may be undefined.
template <typename T = float>
const T* numbers(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}
template <typename T = float>
T* room(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr<T>() : nullptr;
}

inline bool is_per_channel(const Recurrence& r) { return r.log_decay.defined() && r.log_decay.dim() == r.q.dim(); }

/// What all sets of kernels name alike: the sizes, the gates and the first state, of type T.
template <typename Call, typename T = float>
Call sizes_of(const Recurrence& r) {
  const bool packed = r.bounds.defined();
  Call call;
  call.sequences = packed ? r.bounds.size(0) - 1 : r.q.size(0);
  call.heads = r.q.size(2);
  call.key_dim = r.q.size(3);
  call.value_dim = r.v.size(3);
  call.length = r.q.size(1);
  call.tokens = r.q.size(0) * r.q.size(1);
  call.bounds = packed ? r.bounds.const_data_ptr<std::int64_t>() : nullptr;
  call.delta = r.delta;
  call.per_channel = is_per_channel(r);
  call.scale = static_cast<T>(r.scale);
  call.log_decay = numbers<T>(r.log_decay);
  call.beta = numbers<T>(r.beta);
  call.initial = numbers<T>(r.initial);
  return call;
}

}  // namespace gka::ops
