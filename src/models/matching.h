// Which stored tensor each parameter of a model is, and what is said where that is unclear.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <vector>

namespace gka::models {

/// Throws one sentence that names both: the tensor has another shape than its model.
[[noreturn]] void refuse_shape(const std::string& name, c10::IntArrayRef stored, c10::IntArrayRef wanted,
                               const std::string& more = {});

/// Throws one sentence that names some of them, where there are any: tensors that the model wants and nobody stored.
void refuse_missing(const std::vector<std::string>& names);

/// The same for tensors that are stored and that the model has no use for.
void refuse_others(const std::vector<std::string>& names);

}  // namespace gka::models
