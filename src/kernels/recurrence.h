// The memories of layers/memory.h token by token:
//
//   S ← diag(γ) S + k uᵀ,   u = β (v − Sᵀ diag(γ) k) with the delta rule, else β v,   o = scale · Sᵀ q
//
// Arrays are contiguous [tokens, heads, …], sequence after sequence. S is kept before every so many tokens (`segment`)
// of a sequence for the backward pass: [kept_states, heads, K, V].
#pragma once

#include <cstdint>

#include "gka/kernels.h"

namespace gka::kernels {

template <typename T>
struct Recurrence {
  std::int64_t sequences = 0, heads = 0, key_dim = 0, value_dim = 0;
  std::int64_t length = 0;               // of every sequence, unless `bounds` says otherwise
  std::int64_t tokens = 0;               // of all sequences together
  const std::int64_t* bounds = nullptr;  // sequence n is the tokens bounds[n] … bounds[n+1] − 1
  bool delta = false;
  bool per_channel = false;  // log_decay is [tokens, heads, K], not [tokens, heads]
  T scale = 1;
  const T* q = nullptr;
  const T* k = nullptr;
  const T* v = nullptr;
  const T* log_decay = nullptr;  // absent: 0
  const T* beta = nullptr;       // absent: 1
  const T* initial = nullptr;    // [sequences, heads, K, V]; absent: 0

  std::int64_t kept_states(std::int64_t segment) const { return tokens / segment + sequences; }
};

template <typename T>
struct RecurrenceOutputs {
  T* o = nullptr;
  T* states = nullptr;  // may be left out
  T* final = nullptr;   // likewise
};

template <typename T>
struct RecurrenceGradients {
  const T* d_o = nullptr;
  const T* d_final = nullptr;  // absent: 0
  const T* states = nullptr;
  T* d_q = nullptr;
  T* d_k = nullptr;
  T* d_v = nullptr;
  T* d_log_decay = nullptr;  // may be left out
  T* d_beta = nullptr;       // likewise
  T* d_initial = nullptr;    // likewise
};

/// One token for each of `tokens` sequences of a call with `length` 1: S of sequence n lies in slot slots[n] (n without
/// slots; they are distinct) of the pool [slots, heads, K, V] and is changed in place. `initial` is not read.
template <typename T>
struct RecurrenceStep {
  Recurrence<T> call{};
  const std::int64_t* slots = nullptr;
  T* pool = nullptr;
  T* o = nullptr;
};

namespace cpu {

inline constexpr std::int64_t kRecurrenceSegment = 32;

/// For float and double. The same bits whatever the number of threads, and however a sequence is cut into calls.
template <typename T>
void recurrence(const Recurrence<T>& r, const RecurrenceOutputs<T>& out, const Executor& executor);
template <typename T>
void recurrence_backward(const Recurrence<T>& r, const RecurrenceGradients<T>& gradients, const Executor& executor);
template <typename T>
void recurrence_step(const RecurrenceStep<T>& step, const Executor& executor);

}  // namespace cpu
}  // namespace gka::kernels
