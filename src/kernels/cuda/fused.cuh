// What the fused operations of a decoder share: a thread has a vector of kFusedVector neighbouring numbers.
#pragma once

#include "kernels/cuda/fused.h"
#include "kernels/cuda/vectors.cuh"
#include "kernels/cuda/warp_rows.cuh"

namespace gka::kernels::cuda {

inline constexpr int kN = kFusedVector;
using Eight = Numbers<kN>;

__device__ __forceinline__ std::int64_t own_vector() { return block() * kThreads + thread(); }
inline std::int64_t grid_for(std::int64_t vectors) { return (vectors + kThreads - 1) / kThreads; }

template <typename Body>
void with_type_of(DType dtype, const Device& device, Body&& body) {
  const CurrentDevice current(device.index);
  with_vectors_of(dtype, body);
}

}  // namespace gka::kernels::cuda
