// The types a model computes in, by the names that files and options use.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <string_view>

#include "ops/dtypes.h"

namespace gka::models {

constexpr std::optional<at::ScalarType> dtype_named(std::string_view text) {
  const auto dtype = parse_name<kernels::DType>(text);
  return dtype ? std::optional(ops::torch_dtype(*dtype)) : std::nullopt;
}

constexpr std::string_view name_of_dtype(at::ScalarType type) {
  const auto dtype = ops::find_dtype(type);
  return dtype ? name_of(*dtype) : "?";
}

/// "float64, float32, bfloat16, float16"
inline std::string list_dtypes() { return list_names<kernels::DType>(); }

}  // namespace gka::models
