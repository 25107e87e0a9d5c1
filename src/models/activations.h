// The type a model's activations have unless a call says otherwise.
#pragma once

#include "layers/parameters.h"

namespace gka::models {

/// On a GPU inference keeps norms, gates and biases in float32, which is what the fused kernels read, and activations
/// have the matrices' type; of int8, which products with bfloat16 read, that. Elsewhere matrices may be narrower than
/// activations.
inline at::ScalarType activations_of(const layers::ParameterOptions& options) {
  if (!options.device.is_cuda()) return options.dtype;
  const auto matrices = options.matrices.value_or(options.dtype);
  return matrices == at::kChar ? at::kBFloat16 : matrices;
}

/// What parameters that are no matrices have under activations of `dtype` in inference.
inline at::ScalarType small_type(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf ? at::kFloat : dtype;
}

}  // namespace gka::models
