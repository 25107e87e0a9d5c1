// The memories of layers/memory.h token by token in one kernel, for sequences too short to be worth cutting into
// chunks:
//
//   S ← diag(γ) S + k uᵀ,   u = β (v − Sᵀ diag(γ) k) with the delta rule, else β v,   o = scale · Sᵀ q
//
// Arrays are contiguous float32 [tokens, heads, …], sequence after sequence.
#pragma once

#include <cstdint>

#include "gka/kernels.h"

namespace gka::kernels::cuda {

/// The widest key these kernels take.
inline constexpr std::int64_t kRecurrenceKeys = 128;

struct Recurrence {
  std::int64_t sequences = 0, heads = 0, key_dim = 0, value_dim = 0;
  std::int64_t length = 0;               // of every sequence, unless `bounds` says otherwise
  std::int64_t tokens = 0;               // of all sequences together
  const std::int64_t* bounds = nullptr;  // sequence n is the tokens bounds[n] … bounds[n+1] − 1
  bool delta = false;
  bool per_channel = false;  // log_decay is [tokens, heads, K], not [tokens, heads]
  float scale = 1;
  const float* q = nullptr;
  const float* k = nullptr;
  const float* v = nullptr;
  const float* log_decay = nullptr;  // absent: 0
  const float* beta = nullptr;       // absent: 1
  const float* initial = nullptr;    // [sequences, heads, K, V]; absent: 0

  /// S is kept before every so many tokens for the backward pass: [kept_states, heads, K, V].
  static constexpr std::int64_t kSegment = 8;
  std::int64_t kept_states() const { return tokens / kSegment + sequences; }
  /// Blocks share a head's columns. A gradient to which all columns add has a part of each: [column_blocks, tokens, …].
  std::int64_t column_blocks() const { return (value_dim + columns_of(key_dim) - 1) / columns_of(key_dim); }

  /// The wider the key, the fewer columns a block has room for.
  static constexpr std::int64_t columns_of(std::int64_t key_dim) { return key_dim <= 32 ? 32 : key_dim <= 64 ? 16 : 8; }
};

struct RecurrenceOutputs {
  float* o = nullptr;
  float* states = nullptr;  // may be left out
  float* final = nullptr;   // likewise
};
void recurrence(const Recurrence& r, const RecurrenceOutputs& out, const Device& device);

struct RecurrenceGradients {
  const float* d_o = nullptr;
  const float* d_final = nullptr;  // absent: 0
  const float* states = nullptr;
  float* d_q = nullptr;  // in parts, as are d_k, d_beta and d_log_decay, which is [parts, tokens, heads, K] in any case
  float* d_k = nullptr;
  float* d_v = nullptr;
  float* d_log_decay = nullptr;  // may be left out
  float* d_beta = nullptr;       // likewise
  float* d_initial = nullptr;    // likewise
};
void recurrence_backward(const Recurrence& r, const RecurrenceGradients& gradients, const Device& device);

}  // namespace gka::kernels::cuda
