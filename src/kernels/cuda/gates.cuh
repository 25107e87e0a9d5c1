// A gate of one token and head from its projection: for the kernel of all gates, and for the step that opens its own.
#pragma once

#include "kernels/cuda/fused.h"
#include "kernels/cuda/thread_block.cuh"

namespace gka::kernels::cuda {

struct Softplus {
  float value, slope;
};
/// z itself where it is large, as torch has it.
__device__ __forceinline__ Softplus softplus(float z) {
  if (z > 20) return {z, 1};
  const float e = exp(z);
  return {log1pf(e), e / (1.0f + e)};
}

__device__ __forceinline__ float open_gate(float z) { return 1.0f / (1.0f + exp(-z)); }

/// A number of one kind of gate, and what its gradient is times.
struct GateValue {
  float value, slope;
};
__device__ __forceinline__ GateValue value_of(Gate gate, float z, float factor) {
  if (gate == Gate::log_decay) {
    const Softplus s = softplus(z);
    return {factor * s.value, factor * s.slope};
  }
  const float open = open_gate(z), slope = open * (1.0f - open);
  if (gate == Gate::sigmoid) return {open, slope};
  const float above = open + kAboveZero;
  return {above * above, 2 * above * slope};
}

/// −exp(A_log) of a head; 1 for gates that have none.
__device__ __forceinline__ float factor_of(const Gates& g, int kind, int head) {
  return g.kinds[kind].gate == Gate::log_decay ? -exp(g.kinds[kind].a_log[head]) : 1.0f;
}
__device__ __forceinline__ float bias_of(const Gates& g, int kind, int head) {
  return g.kinds[kind].bias != nullptr ? g.kinds[kind].bias[head] : 0.0f;
}

/// z, of which the gate is a function.
template <DType kType>
__device__ __forceinline__ float read_projected(const Gates& g, std::int64_t token, int kind, int head) {
  return read_as<float, kType>(g.projected, token * g.stride + kind * g.heads + head) + bias_of(g, kind, head);
}
template <DType kType>
__device__ __forceinline__ float open_gate_of(const Gates& g, std::int64_t token, int kind, int head) {
  const float z = read_projected<kType>(g, token, kind, head);
  return value_of(g.kinds[kind].gate, z, factor_of(g, kind, head)).value;
}

}  // namespace gka::kernels::cuda
