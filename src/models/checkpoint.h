// Checkpoints in the published layout: a folder with config.json and model.safetensors, or several files of weights
// with model.safetensors.index.json beside them. What is saved loads to the same bits, here and elsewhere.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "models/decoder.h"
#include "models/safetensors.h"

namespace gka::models {

/// The tensors of a checkpoint folder, whatever number of files they lie in.
class Weights {
 public:
  explicit Weights(const std::filesystem::path& folder);

  std::vector<std::string> names() const;
  bool has(const std::string& name) const { return file_of_.contains(name); }
  at::Tensor tensor(const std::string& name) const;

 private:
  std::filesystem::path folder_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::size_t> file_of_;
};

inline constexpr std::int64_t kShardBytes = 5'000'000'000;

/// Splits over files of at most `shard_bytes` (a tensor larger than that has a file to itself), and removes the weights
/// that an earlier save with another split left in the folder.
void write_weights(const std::filesystem::path& folder, const Tensors& tensors, std::int64_t shard_bytes = kShardBytes);

/// Copies weights of that name into every parameter. One that is missing or of another shape throws one sentence;
/// tensors no parameter asks for are named in one line of warning.
void load_weights(Decoder& decoder, const Weights& weights, const Warn& warn);

struct LoadOptions {
  at::Device device = at::kCPU;
  std::optional<at::ScalarType> dtype{};  // else the type most of the weights have
  bool requires_grad = false;
  Warn warn{};  // else standard error
};

/// Throws one sentence where the folder is not there, or holds no checkpoint that can be read.
Decoder load_model(const std::filesystem::path& folder, const LoadOptions& options = {});

struct SaveOptions {
  std::optional<at::ScalarType> dtype{};  // else the parameters' own
  std::int64_t shard_bytes = kShardBytes;
};

/// Makes the folder where there is none. Every file is written beside and renamed, the configuration last.
void save_model(const Decoder& decoder, const std::filesystem::path& folder, const SaveOptions& options = {});

}  // namespace gka::models
