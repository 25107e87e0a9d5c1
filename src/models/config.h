// A model's configuration: the published config.json (Qwen3's keys, the pattern of mixers, a group of choices per kind
// of mixer), extended where it has no word for something. docs/models.md lists the keys.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/fields.h"
#include "layers/config.h"

namespace gka::models {

/// A kind of model whose files are read: what they mean where they say nothing, and what transformers calls it.
struct Family {
  std::string_view model_type, architecture;
  bool qk_norm, qkv_bias;
};
std::span<const Family> families();

struct ModelConfig {
  std::int64_t vocab_size = 0;
  std::int64_t intermediate_size = 0;      // of the MLP
  std::vector<std::string> layer_types{};  // the mixer of every block, as tokens of the pattern
  bool tie_word_embeddings = false;
  /// Blocks whose mixer is published without an MLP beside it (Mamba2) get one all the same.
  bool mlp_everywhere = false;
  std::vector<std::int64_t> eos_token_id{};  // any of them ends a text
  std::int64_t max_position_embeddings = 0;  // the longest text it was made for; 0: nobody said
  layers::MixerConfig mixer{};
  /// Keys that change nothing here (transformers_version, …) or that nobody knows: written back as they were.
  Json extra = Json::object();

  std::int64_t blocks() const { return static_cast<std::int64_t>(layer_types.size()); }
  /// Attention alone, as a family of transformers has it; nullptr for a hybrid.
  const Family* attention_family() const;
};

/// From JSON that errors call `where`. Sizes that are missing or make no sense, a value of the wrong kind and a layer
/// that is not supported throw one sentence; unknown keys go to `unknown`.
ModelConfig parse_config(const Json& json, const std::string& where, const OnUnknown& unknown);

/// For a configuration somebody wrote: an unknown key is an error that names the nearest known one.
ModelConfig parse_training_config(const Json& json, const std::string& where);

/// For a checkpoint: unknown keys are named in one line of warning.
using Warn = std::function<void(const std::string& line)>;
ModelConfig parse_checkpoint_config(const Json& json, const std::string& where, const Warn& warn);

/// The tokens of `eos_token_id`, a number or a list of them, checked against the vocabulary.
std::vector<std::int64_t> read_end_tokens(const Json& json, std::int64_t vocab_size, const std::string& where);

/// As published readers expect it, every size spelled out: attention alone under the name transformers has for it, any
/// other mixture as hybrid_qwen3.
Json to_json(const ModelConfig& config);
/// What config.json has as `quantization_config` where matrices are stored as int8.
const Json& int8_files();

/// A JSON file; throws one sentence with the place of a mistake.
Json read_json(const std::filesystem::path& path);

}  // namespace gka::models
