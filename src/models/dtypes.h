// The types a model computes in, by the names that files and options use.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace gka::models {

inline constexpr std::array<std::pair<std::string_view, at::ScalarType>, 4> kDTypeNames{{
    {"float64", at::kDouble},
    {"float32", at::kFloat},
    {"bfloat16", at::kBFloat16},
    {"float16", at::kHalf},
}};

constexpr std::optional<at::ScalarType> dtype_named(std::string_view text) {
  for (const auto& [name, dtype] : kDTypeNames) {
    if (name == text) return dtype;
  }
  return std::nullopt;
}

constexpr std::string_view name_of_dtype(at::ScalarType dtype) {
  for (const auto& [name, entry] : kDTypeNames) {
    if (entry == dtype) return name;
  }
  return "?";
}

/// "float64, float32, bfloat16, float16"
inline std::string list_dtypes() {
  std::string list;
  for (const auto& [name, dtype] : kDTypeNames) list += (list.empty() ? "" : ", ") + std::string(name);
  return list;
}

}  // namespace gka::models
