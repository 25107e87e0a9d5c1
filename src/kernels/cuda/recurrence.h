// The memories of layers/memory.h token by token in one kernel (kernels/recurrence.h), for sequences too short to be
// worth cutting into chunks; float32.
#pragma once

#include <cstdint>

#include "gka/kernels.h"
#include "kernels/recurrence.h"

namespace gka::kernels::cuda {

/// The widest key these kernels take.
inline constexpr std::int64_t kRecurrenceKeys = 128;

using Recurrence = kernels::Recurrence<float>;
using RecurrenceOutputs = kernels::RecurrenceOutputs<float>;
/// d_q, d_k, d_beta and d_log_decay, which is [parts, tokens, heads, K] in any case, come in parts.
using RecurrenceGradients = kernels::RecurrenceGradients<float>;

inline constexpr std::int64_t kRecurrenceSegment = 8;

/// The wider the key, the fewer columns a block has room for.
constexpr std::int64_t recurrence_columns(std::int64_t key_dim) { return key_dim <= 32 ? 32 : key_dim <= 64 ? 16 : 8; }
/// Blocks share a head's columns. A gradient to which all columns add has a part of each: [parts, tokens, …].
constexpr std::int64_t recurrence_parts(const Recurrence& r) {
  return (r.value_dim + recurrence_columns(r.key_dim) - 1) / recurrence_columns(r.key_dim);
}

void recurrence(const Recurrence& r, const RecurrenceOutputs& out, const Device& device);
void recurrence_backward(const Recurrence& r, const RecurrenceGradients& gradients, const Device& device);

}  // namespace gka::kernels::cuda
