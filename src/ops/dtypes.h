// The types of numbers that the kernels have (their names are in gka/kernels.h), as torch has them.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "gka/kernels.h"

namespace gka::ops {

constexpr at::ScalarType torch_dtype(kernels::DType dtype) {
  switch (dtype) {
    case kernels::DType::float64: return at::kDouble;
    case kernels::DType::float32: return at::kFloat;
    case kernels::DType::bfloat16: return at::kBFloat16;
    case kernels::DType::float16: return at::kHalf;
  }
  return at::ScalarType::Undefined;
}

constexpr std::optional<kernels::DType> find_dtype(at::ScalarType type) {
  for (const auto& [name, dtype] : kernels::kDTypeNames) {
    if (torch_dtype(dtype) == type) return dtype;
  }
  return std::nullopt;
}

}  // namespace gka::ops
