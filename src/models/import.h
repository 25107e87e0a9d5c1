// Models that others made, in our layout: Hugging Face folders and GGUF files. What comes in is matched name by name
// and shape by shape against the model that its configuration describes before anything is written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "models/checkpoint.h"
#include "models/config.h"
#include "models/gguf.h"

namespace gka::models {

/// A tensor of somebody's file under the name it has in our layout.
struct ForeignTensor {
  std::vector<std::int64_t> shape;
  std::function<at::Tensor()> make;
};

struct ForeignModel {
  ModelConfig config;
  std::map<std::string, ForeignTensor> tensors;
  at::ScalarType dtype = at::kFloat;  // what keeps every number as it is
};

/// A folder with config.json and safetensors; keeps them open as long as the result lives.
ForeignModel open_folder(const std::filesystem::path& folder, const Warn& warn = {});

/// Architectures llama, qwen2 and qwen3. `file` is to live as long as the result.
ForeignModel open_gguf(const GgufFile& file, const Warn& warn = {});

/// Checks the tensors against the configuration and writes config.json and weights into an existing folder. Makes one
/// tensor at a time.
void write_foreign(const ForeignModel& model, const std::filesystem::path& folder,
                   std::optional<at::ScalarType> dtype = {}, bool int8 = false);

}  // namespace gka::models
