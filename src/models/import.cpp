#include "models/import.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "layers/rotary.h"

namespace gka::models {
namespace {

namespace fs = std::filesystem;

// ---- GGUF: names ----------------------------------------------------------------------------------------------------

constexpr std::array<std::pair<std::string_view, std::string_view>, 3> kWholeNames{{
    {"token_embd.weight", "model.embed_tokens.weight"},
    {"output_norm.weight", "model.norm.weight"},
    {"output.weight", "lm_head.weight"},
}};
/// Of "blk.N.attn_q.weight" the part in the middle.
constexpr std::array<std::pair<std::string_view, std::string_view>, 11> kBlockNames{{
    {"attn_norm", "input_layernorm"},
    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},
    {"attn_v", "self_attn.v_proj"},
    {"attn_output", "self_attn.o_proj"},
    {"attn_q_norm", "self_attn.q_norm"},
    {"attn_k_norm", "self_attn.k_norm"},
    {"ffn_norm", "post_attention_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},
    {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
}};
constexpr std::string_view kFrequencyFactors = "rope_freqs.weight";

template <typename Table>
std::optional<std::string> translated(const Table& table, std::string_view word) {
  for (const auto& [theirs, ours] : table) {
    if (theirs == word) return std::string(ours);
  }
  return std::nullopt;
}

/// "blk.3.attn_q.weight" to "model.layers.3.self_attn.q_proj.weight"; a name nobody knows stays as it is, and no model
/// has use for it.
std::string our_name(const std::string& name) {
  if (const auto whole = translated(kWholeNames, name)) return *whole;
  constexpr std::string_view kBlock = "blk.";
  const auto number_end = name.find('.', kBlock.size());
  const auto kind_end = name.rfind('.');
  if (!name.starts_with(kBlock) || number_end == std::string::npos || kind_end <= number_end) return name;
  const auto part = translated(kBlockNames, std::string_view(name).substr(number_end + 1, kind_end - number_end - 1));
  if (!part) return name;
  return "model.layers." + name.substr(kBlock.size(), number_end - kBlock.size()) + "." + *part + name.substr(kind_end);
}

// ---- GGUF: configuration --------------------------------------------------------------------------------------------

/// Keys below the architecture's name that are read or change nothing.
constexpr std::array<std::string_view, 22> kKnownKeys{"block_count",
                                                      "context_length",
                                                      "embedding_length",
                                                      "feed_forward_length",
                                                      "vocab_size",
                                                      "attention.head_count",
                                                      "attention.head_count_kv",
                                                      "attention.key_length",
                                                      "attention.value_length",
                                                      "attention.layer_norm_rms_epsilon",
                                                      "attention.sliding_window",
                                                      "rope.freq_base",
                                                      "rope.dimension_count",
                                                      "rope.scaling.type",
                                                      "rope.scaling.factor",
                                                      "rope.scaling.attn_factor",
                                                      "rope.scaling.original_context_length",
                                                      "rope.scaling.finetuned",
                                                      "rope.scaling.yarn_beta_fast",
                                                      "rope.scaling.yarn_beta_slow",
                                                      "expert_count",
                                                      "tensor_data_layout"};

class GgufConfig {
 public:
  explicit GgufConfig(const GgufFile& file)
      : content_(file.content()),
        where_(file.path().string()),
        architecture_(content_.get<std::string>("general.architecture", where_)) {}

  Json json() const {
    check_supported();
    const auto heads = number("attention.head_count");
    const auto width = number("embedding_length");
    const auto head_dim = number_or("attention.key_length", heads > 0 ? width / heads : 0);
    require("attention.value_length", number_or("attention.value_length", head_dim) == head_dim,
            "keys and values of one size");
    require("rope.dimension_count", number_or("rope.dimension_count", head_dim) == head_dim,
            "a rotary embedding of the whole head");
    return {{"model_type", architecture_},
            {"vocab_size", embedding().shape.front()},
            {"hidden_size", width},
            {"intermediate_size", number("feed_forward_length")},
            {"num_hidden_layers", number("block_count")},
            {"num_attention_heads", heads},
            {"num_key_value_heads", number_or("attention.head_count_kv", heads)},
            {"head_dim", head_dim},
            {"rms_norm_eps", content_.get<double>(key("attention.layer_norm_rms_epsilon"), where_)},
            {"max_position_embeddings", number("context_length")},
            {"tie_word_embeddings", !content_.tensors.contains("output.weight")},
            {"rope_parameters", rope(head_dim)},
            {"eos_token_id", end_tokens()}};
  }

  const std::string& architecture() const { return architecture_; }

 private:
  std::string key(const std::string& name) const { return architecture_ + "." + name; }
  std::int64_t number(const std::string& name) const { return content_.get<std::int64_t>(key(name), where_); }
  std::int64_t number_or(const std::string& name, std::int64_t otherwise) const {
    return content_.get_or<std::int64_t>(key(name), where_, otherwise);
  }
  double real_or(const std::string& name, double otherwise) const {
    return content_.get_or<double>(key(name), where_, otherwise);
  }

  void require(const std::string& name, bool fine, const std::string& what) const {
    if (fine) return;
    throw std::runtime_error("'" + key(name) + "' of " + where_ + " is " + content_.metadata[key(name)].dump() +
                             "; gka takes " + what);
  }

  void check_supported() const {
    std::string known;
    for (const auto& family : families().subspan(1)) known += " " + std::string(family.model_type);
    if ((known + " ").find(" " + architecture_ + " ") == std::string::npos) {
      throw std::runtime_error("'general.architecture' of " + where_ + " is '" + architecture_ +
                               "', which gka does not have; it has" + known);
    }
    for (const auto& [name, value] : content_.metadata.items()) {
      if (!name.starts_with(architecture_ + ".")) continue;
      const auto rest = std::string_view(name).substr(architecture_.size() + 1);
      if (std::ranges::find(kKnownKeys, rest) == kKnownKeys.end()) {
        throw std::runtime_error(where_ + " has the key '" + name +
                                 "', which gka does not know and which may change what the model computes");
      }
    }
    require("expert_count", number_or("expert_count", 0) == 0, "models without experts");
    require("attention.sliding_window", number_or("attention.sliding_window", 0) == 0, "full attention");
    const auto parts = content_.get_or<std::int64_t>("split.count", where_, 1);
    if (parts > 1) {
      throw std::runtime_error(where_ + " is one of " + std::to_string(parts) +
                               " parts of a model; join them first (llama-gguf-split --merge)");
    }
  }

  const GgufTensor& embedding() const {
    const auto found = content_.tensors.find("token_embd.weight");
    if (found == content_.tensors.end() || found->second.shape.size() != 2) {
      throw std::runtime_error(where_ + " has no matrix 'token_embd.weight'");
    }
    return found->second;
  }

  Json rope(std::int64_t head_dim) const {
    const auto theta = real_or("rope.freq_base", 10000.0);
    const auto type = content_.get_or<std::string>(key("rope.scaling.type"), where_, "none");
    Json json{{"rope_theta", theta}, {"rope_type", "default"}};
    if (const auto found = content_.tensors.find(std::string(kFrequencyFactors)); found != content_.tensors.end()) {
      return llama3(found->second, theta, head_dim);
    }
    if (type == "none") return json;
    json["rope_type"] = type;
    json["factor"] = real_or("rope.scaling.factor", 0.0);
    if (type == "yarn") {
      json["original_max_position_embeddings"] = number("rope.scaling.original_context_length");
      json["beta_fast"] = real_or("rope.scaling.yarn_beta_fast", 0.0);
      json["beta_slow"] = real_or("rope.scaling.yarn_beta_slow", 0.0);
      // llama.cpp's factor comes on top of what follows from the length; 1 is what files have.
      require("rope.scaling.attn_factor", real_or("rope.scaling.attn_factor", 1.0) == 1.0, "1");
    }
    return json;
  }

  /// The file keeps by how much each frequency is divided, and not where that comes from: Llama 3's rule with its usual
  /// numbers, or something gka cannot write down.
  Json llama3(const GgufTensor& factors, double theta, std::int64_t head_dim) const {
    std::vector<float> divided(static_cast<std::size_t>(factors.count()));
    dequantise(factors, divided);
    if (std::ssize(divided) == head_dim / 2 && head_dim > 0) {
      const layers::RopeConfig rule{.rope_type = layers::RopeType::llama3,
                                    .factor = std::ranges::max(divided),
                                    .original_max_position_embeddings = 8192,
                                    .low_freq_factor = 1.0,
                                    .high_freq_factor = 4.0};
      if (rule.factor > 0 && std::isfinite(rule.factor) && follows(rule, theta, head_dim, divided)) {
        return {{"rope_type", "llama3"},  {"rope_theta", theta},
                {"factor", rule.factor},  {"original_max_position_embeddings", 8192},
                {"low_freq_factor", 1.0}, {"high_freq_factor", 4.0}};
      }
    }
    throw std::runtime_error(
        "'" + std::string(kFrequencyFactors) + "' of " + where_ +
        " changes the rotary embedding in a way that is not Llama 3's, which is the one gka knows");
  }

  static bool follows(const layers::RopeConfig& rule, double theta, std::int64_t head_dim,
                      const std::vector<float>& divided) {
    const auto plain = layers::rotary_frequencies(head_dim, theta, {}).turns;
    const auto ruled = layers::rotary_frequencies(head_dim, theta, rule).turns;
    for (std::size_t i = 0; i < divided.size(); ++i) {
      if (!(std::abs(plain[i] / ruled[i] / divided[i] - 1.0) < 1e-4)) return false;
    }
    return true;
  }

  Json end_tokens() const {
    std::set<std::int64_t> tokens;
    for (const char* name : {"eos_token_id", "eot_token_id", "eom_token_id"}) {
      const auto id = content_.get_or<std::int64_t>("tokenizer.ggml." + std::string(name), where_, -1);
      if (id >= 0) tokens.insert(id);
    }
    return tokens.empty() ? Json(nullptr) : Json(std::vector<std::int64_t>(tokens.begin(), tokens.end()));
  }

  const Gguf& content_;
  std::string where_, architecture_;
};

// ---- GGUF: tensors --------------------------------------------------------------------------------------------------

/// llama.cpp turns neighbouring channels where we turn channel i with i + D/2, so its converter reorders the rows of
/// Llama's q and k; this undoes it.
at::Tensor halves_from_pairs(const at::Tensor& rows, std::int64_t heads) {
  return rows.unflatten(0, {heads, -1, 2}).transpose(1, 2).flatten(0, 2).contiguous();
}

at::Tensor numbers_of(const GgufTensor& tensor) {
  auto numbers = at::empty(tensor.shape, at::TensorOptions(at::kFloat));
  dequantise(tensor, {numbers.mutable_data_ptr<float>(), static_cast<std::size_t>(numbers.numel())});
  return numbers;
}

std::int64_t heads_in_pairs(const std::string& name, const ModelConfig& config) {
  if (name.find(".q_proj.") != std::string::npos) return config.mixer.num_attention_heads;
  if (name.find(".k_proj.") != std::string::npos) return config.mixer.num_key_value_heads;
  return 0;
}

/// The type that holds every number of a file: its own, or float32 where it has blocks or a mixture.
at::ScalarType lossless_type(const Gguf& content) {
  std::set<GgufType> types;
  for (const auto& [name, tensor] : content.tensors) {
    if (tensor.shape.size() > 1) types.insert(tensor.type);  // norms are float32 in every file
  }
  if (types == std::set{GgufType::f16}) return at::kHalf;
  if (types == std::set{GgufType::bf16}) return at::kBFloat16;
  return at::kFloat;
}

}  // namespace

ForeignModel open_folder(const fs::path& folder, const Warn& warn) {
  ForeignModel model{.config = load_config(folder, warn), .tensors = {}};
  const auto weights = std::make_shared<const Weights>(folder);
  if (const auto bytes = weights->int8(); !bytes.empty()) {
    throw std::runtime_error("'" + *bytes.begin() + "' of " + folder.string() +
                             " is int8, which is written and not read here; take the model that it was made from");
  }
  model.dtype = weights->usual_type();
  for (auto& [name, shape] : weights->shapes()) {
    model.tensors.emplace(name,
                          ForeignTensor{.shape = shape, .make = [weights, name] { return weights->tensor(name); }});
  }
  if (model.config.tie_word_embeddings) weights->check_tied_head();
  return model;
}

ForeignModel open_gguf(const GgufFile& file, const Warn& warn) {
  const GgufConfig described(file);
  ForeignModel model{.config = parse_checkpoint_config(described.json(), file.path().string(), warn), .tensors = {}};
  model.dtype = lossless_type(file.content());
  const bool pairs = described.architecture() == "llama";
  for (const auto& [theirs, tensor] : file.content().tensors) {
    if (theirs == kFrequencyFactors) continue;
    const auto name = our_name(theirs);
    const auto heads = pairs ? heads_in_pairs(name, model.config) : 0;
    if (heads > 0 && tensor.shape.front() % (2 * heads) != 0) {
      throw std::runtime_error("'" + theirs + "' of " + file.path().string() + " has " +
                               std::to_string(tensor.shape.front()) + " rows, which are no pairs for " +
                               std::to_string(heads) + " heads");
    }
    const auto make = [&tensor, heads] {
      const auto numbers = numbers_of(tensor);
      return heads > 0 ? halves_from_pairs(numbers, heads) : numbers;
    };
    model.tensors.emplace(name, ForeignTensor{.shape = tensor.shape, .make = make});
  }
  return model;
}

void write_foreign(const ForeignModel& model, const fs::path& folder, std::optional<at::ScalarType> dtype, bool int8) {
  const Decoder shape(model.config, {.device = at::kMeta});
  Shapes stored;
  for (const auto& [name, tensor] : model.tensors) stored.emplace(name, tensor.shape);
  const auto type = dtype.value_or(model.dtype);
  std::vector<PlannedTensor> tensors;
  for (const auto& [parameter, name] : match_weights(shape, stored)) {
    const auto& tensor = model.tensors.at(name);
    tensors.push_back(planned(*parameter, stored_name(model.config, parameter->name), type, int8, tensor.make));
  }
  write_weights(folder, std::move(tensors));
  write_config(folder, model.config, type, int8);
}

}  // namespace gka::models
