#include "models/config.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "base/files.h"
#include "layers/mixers.h"
#include "models/pattern.h"

namespace gka::models {
namespace {

/// Keys that published files have and that change nothing here.
constexpr std::array<std::string_view, 21> kInert{
    "architectures",
    "model_type",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "attention_dropout",
    "max_window_layers",
    "bos_token_id",
    "pad_token_id",
    "auto_map",
    "_name_or_path",
    "use_sliding_window",
    "output_attentions",
    "return_dict",
    "output_hidden_states",
    "is_encoder_decoder",
    "problem_type",
    "max_position_embeddings",
    "id2label",
    "label2id",
};

/// Choices published files have no word for: written only where they differ from the default.
constexpr std::array<std::string_view, 9> kExtensions{"ridge_mode", "gradient",   "beta_weight",
                                                      "use_q_conv", "use_k_conv", "head_dim",
                                                      "expand_k",   "expand_v",   "sketch_dim"};
/// Inside a group, what published files may hold that changes nothing here.
constexpr std::array<std::string_view, 1> kInertInGroups{"chunk_size"};

constexpr std::array<std::pair<std::string_view, std::string_view>, 2> kOtherNamesOfLayers{{
    {"full_attention", "*"},
    {"sliding_attention", "SWA"},
}};

struct Rope {
  std::string rope_type = "default";
  std::optional<double> rope_theta{};
};

/// What a file says, before it is made into a configuration: sizes that may be left out, and two ways to say one thing.
struct Draft {
  ModelConfig config{};
  std::int64_t num_hidden_layers = 0;
  std::string pattern{};
  std::string hidden_act = "silu";
  Json eos_token_id{};
  Json groups = Json::object();
  Json gka_overrides{};
  Json rope_parameters{};
  Json rope_scaling{};
};

/// Every key of the file that holds one value.
template <typename Visit>
void visit_values(Draft& d, Visit&& visit) {
  auto& c = d.config;
  visit("vocab_size", c.vocab_size);
  visit("hidden_size", c.mixer.hidden_size);
  visit("intermediate_size", c.intermediate_size);
  visit("num_hidden_layers", d.num_hidden_layers);
  visit("num_attention_heads", c.mixer.num_attention_heads);
  visit("num_key_value_heads", c.mixer.num_key_value_heads);
  visit("head_dim", c.mixer.head_dim);
  visit("hybrid_override_pattern", d.pattern);
  visit("layer_types", c.layer_types);
  visit("hidden_act", d.hidden_act);
  visit("rms_norm_eps", c.mixer.rms_norm_eps);
  visit("rope_theta", c.mixer.rope_theta);
  visit("sliding_window", c.mixer.sliding_window);
  visit("attention_bias", c.mixer.attention_bias);
  visit("tie_word_embeddings", c.tie_word_embeddings);
  visit("initializer_range", c.mixer.initializer_range);
  visit("conv_initializer_range", c.mixer.conv_initializer_range);
  visit("mlp_everywhere", c.mlp_everywhere);
}

/// The keys whose value has a shape of its own.
template <typename Visit>
void visit_objects(Draft& d, Visit&& visit) {
  visit("eos_token_id", d.eos_token_id);
  visit("gka_overrides", d.gka_overrides);
  visit("rope_parameters", d.rope_parameters);
  visit("rope_scaling", d.rope_scaling);
}

template <typename List>
bool contains(const List& list, std::string_view word) {
  return std::ranges::find(list, word) != std::end(list);
}

bool is_group(std::string_view key) {
  bool found = false;
  const layers::MixerConfig any;
  layers::visit_groups(any, [&](std::string_view group, const auto&) { found = found || group == key; });
  return found;
}

/// Sorts every key of the file into the draft.
Draft read_draft(const Json& json, const std::string& where, const OnUnknown& unknown) {
  if (!json.is_object()) throw std::runtime_error(where + " does not hold a JSON object");
  Draft draft;
  Json values = Json::object();
  for (const auto& [key, value] : json.items()) {
    bool taken = false;
    visit_objects(draft, [&, &key = key, &value = value](std::string_view name, Json& place) {
      if (name != key) return;
      taken = true;
      place = value;
    });
    if (taken) continue;
    if (is_group(key)) {
      draft.groups[key] = value;
    } else if (contains(kInert, key)) {
      draft.config.extra[key] = value;
    } else {
      values[key] = value;
    }
  }
  const auto keep = [&](const std::string& key, const std::string&) {
    draft.config.extra[key] = values[key];
    std::vector<std::string_view> known(kInert.begin(), kInert.end());
    const auto add = [&](std::string_view name, const auto&) { known.push_back(name); };
    visit_values(draft, add);
    visit_objects(draft, add);
    layers::visit_groups(draft.config.mixer, add);
    unknown(key, unknown_key(key, where, known));
  };
  read_fields(values, where, keep, [&](auto&& visit) { visit_values(draft, visit); });
  return draft;
}

void read_groups(Draft& draft, const std::string& where, const OnUnknown& unknown) {
  if (!draft.gka_overrides.is_null()) {
    if (!draft.gka_overrides.is_object()) throw std::runtime_error("'gka_overrides' of " + where + " takes an object");
    draft.groups["gka_config"].update(draft.gka_overrides);
  }
  layers::visit_groups(draft.config.mixer, [&](std::string_view key, auto& group) {
    const auto found = draft.groups.find(key);
    if (found == draft.groups.end() || found->is_null()) return;
    const auto place = "'" + std::string(key) + "' of " + where;
    const auto complain = [&](const std::string& name, const std::string& complaint) {
      if (!contains(kInertInGroups, name)) unknown(std::string(key) + "." + name, complaint);
    };
    read_fields(*found, place, complain, [&](auto&& visit) { group.fields(group, visit); });
  });
}

void read_rope(Draft& draft, const std::string& where, const OnUnknown& unknown) {
  if (!draft.rope_scaling.is_null()) {
    throw std::runtime_error("'rope_scaling' of " + where + " is not supported: it must be null or left out");
  }
  if (draft.rope_parameters.is_null()) return;
  Rope rope;
  read_fields(draft.rope_parameters, "'rope_parameters' of " + where, unknown, [&](auto&& visit) {
    visit("rope_type", rope.rope_type);
    visit("rope_theta", rope.rope_theta);
  });
  if (rope.rope_type != "default") {
    throw std::runtime_error("the rope_type '" + rope.rope_type + "' of " + where +
                             " is not supported; it takes 'default'");
  }
  if (rope.rope_theta) draft.config.mixer.rope_theta = *rope.rope_theta;
}

void read_eos(Draft& draft, const std::string& where) {
  auto& tokens = draft.config.eos_token_id;
  const auto& json = draft.eos_token_id;
  if (json.is_null()) return;
  if (std::int64_t one = 0; json::read(json, one)) {
    tokens = {one};
  } else if (!json::read(json, tokens)) {
    throw std::runtime_error("'eos_token_id' of " + where + " takes a token number or a list of them, and is " +
                             json.dump());
  }
}

void check_layer(const std::string& token, std::size_t place, const std::string& where) {
  std::string known;
  for (const auto& kind : layers::mixer_kinds()) {
    if (kind.token == token) return;
    known += (known.empty() ? "" : ", ") + std::string(kind.token);
  }
  std::string what = "is not known";
  if (token == "BMF") what = "is B'MOJO's, which gka does not have";
  if (token.size() > 1 && token.ends_with('*')) what = "is a fused pair for distillation, which gka does not have";
  throw std::runtime_error("layer " + std::to_string(place) + " of " + where + " has the type '" + token + "', which " +
                           what + "; the types are " + known);
}

/// The tokens of layer_types, of the pattern, or attention throughout; where a file says it twice, it says the same.
void read_layers(Draft& draft, const std::string& where) {
  auto& tokens = draft.config.layer_types;
  for (auto& token : tokens) {
    for (const auto& [other, own] : kOtherNamesOfLayers) {
      if (token == other) token = own;
    }
  }
  if (!draft.pattern.empty()) {
    auto expanded = expand_pattern(draft.pattern);
    if (!tokens.empty() && tokens != expanded) {
      throw std::runtime_error("'layer_types' and 'hybrid_override_pattern' of " + where +
                               " say different things: " + join_pattern(tokens) + " and " + draft.pattern);
    }
    tokens = std::move(expanded);
  }
  if (tokens.empty()) tokens.assign(static_cast<std::size_t>(std::max<std::int64_t>(0, draft.num_hidden_layers)), "*");
  for (std::size_t i = 0; i < tokens.size(); ++i) check_layer(tokens[i], i, where);
  const auto blocks = static_cast<std::int64_t>(tokens.size());
  if (draft.num_hidden_layers != 0 && draft.num_hidden_layers != blocks) {
    throw std::runtime_error("'num_hidden_layers' of " + where + " is " + std::to_string(draft.num_hidden_layers) +
                             ", and its pattern has " + std::to_string(blocks) + " layers");
  }
  if (blocks == 0) {
    throw std::runtime_error(where + " has no layers: it needs 'hybrid_override_pattern', such as 4x(3xGKA-*)");
  }
}

bool has_mlp(const ModelConfig& config) {
  return config.mlp_everywhere || std::ranges::any_of(config.layer_types, [](const auto& token) {
           return !layers::mixer_kind(token).stands_alone;
         });
}

/// Fills in what follows from other sizes and checks that each makes sense.
void check_sizes(ModelConfig& config, const std::string& where) {
  auto& mixer = config.mixer;
  const auto require = [&](const char* name, std::int64_t value, const char* what) {
    if (value > 0) return;
    throw std::runtime_error(
        "'" + std::string(name) + "' of " + where +
        (value == 0 ? " is missing: it is " + std::string(what) : " must be above 0, and is " + std::to_string(value)));
  };
  require("vocab_size", config.vocab_size, "the number of tokens");
  require("hidden_size", mixer.hidden_size, "the width of the model");
  require("num_attention_heads", mixer.num_attention_heads, "the number of query heads");
  if (has_mlp(config)) require("intermediate_size", config.intermediate_size, "the width of the MLP");
  if (mixer.num_key_value_heads == 0) mixer.num_key_value_heads = mixer.num_attention_heads;
  if (mixer.head_dim == 0) mixer.head_dim = mixer.hidden_size / mixer.num_attention_heads;
  require("num_key_value_heads", mixer.num_key_value_heads, "the number of key and value heads");
  require("head_dim", mixer.head_dim, "the width of a head");
  if (mixer.num_attention_heads % mixer.num_key_value_heads != 0) {
    throw std::runtime_error(
        "'num_attention_heads' of " + where + " must be a multiple of 'num_key_value_heads', and " +
        std::to_string(mixer.num_attention_heads) + " is not of " + std::to_string(mixer.num_key_value_heads));
  }
  if (contains(config.layer_types, "SWA")) require("sliding_window", mixer.sliding_window, "how far SWA layers see");
  for (const auto token : config.eos_token_id) {
    if (token >= 0 && token < config.vocab_size) continue;
    throw std::runtime_error("'eos_token_id' of " + where + " is " + std::to_string(token) +
                             ", outside the vocabulary of " + std::to_string(config.vocab_size) + " tokens");
  }
}

/// A group as it is written: the extensions only where they say something.
template <typename Group>
Json group_to_json(const Group& group) {
  const Group usual{};
  auto json = write_fields([&](auto&& visit) { Group::fields(group, visit); });
  const auto defaults = write_fields([&](auto&& visit) { Group::fields(usual, visit); });
  for (const auto extension : kExtensions) {
    const auto key = std::string(extension);
    if (json.contains(key) && json[key] == defaults[key]) json.erase(key);
  }
  if (json.contains("kv_proj_rank") && json["kv_proj_rank"] == 0) json["kv_proj_rank"] = nullptr;
  return json;
}

}  // namespace

ModelConfig parse_config(const Json& json, const std::string& where, const OnUnknown& unknown) {
  auto draft = read_draft(json, where, unknown);
  read_groups(draft, where, unknown);
  read_rope(draft, where, unknown);
  read_eos(draft, where);
  read_layers(draft, where);
  if (draft.hidden_act != "silu") {
    throw std::runtime_error("'hidden_act' of " + where + " is '" + draft.hidden_act + "'; gka has 'silu'");
  }
  check_sizes(draft.config, where);
  return std::move(draft.config);
}

ModelConfig parse_training_config(const Json& json, const std::string& where) {
  return parse_config(json, where,
                      [](const std::string&, const std::string& complaint) { throw std::runtime_error(complaint); });
}

ModelConfig parse_checkpoint_config(const Json& json, const std::string& where, const Warn& warn) {
  std::string keys;
  auto config = parse_config(
      json, where, [&](const std::string& key, const std::string&) { keys += (keys.empty() ? "" : ", ") + key; });
  if (!keys.empty()) warn(where + " has keys that gka does not know and ignores: " + keys);
  return config;
}

Json to_json(const ModelConfig& config) {
  const auto& mixer = config.mixer;
  Json json{{"architectures", {"HybridQwen3ForCausalLM"}}, {"model_type", "hybrid_qwen3"}};
  for (const auto& [key, value] : config.extra.items()) json[key] = value;
  json["vocab_size"] = config.vocab_size;
  json["hidden_size"] = mixer.hidden_size;
  json["intermediate_size"] = config.intermediate_size;
  json["num_hidden_layers"] = config.blocks();
  json["num_attention_heads"] = mixer.num_attention_heads;
  json["num_key_value_heads"] = mixer.num_key_value_heads;
  json["head_dim"] = mixer.head_dim;
  json["hybrid_override_pattern"] = join_pattern(config.layer_types);
  json["layer_types"] = config.layer_types;
  json["hidden_act"] = "silu";
  json["rms_norm_eps"] = mixer.rms_norm_eps;
  json["rope_theta"] = mixer.rope_theta;
  json["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", mixer.rope_theta}};
  json["sliding_window"] = mixer.sliding_window > 0 ? Json(mixer.sliding_window) : Json(nullptr);
  json["attention_bias"] = mixer.attention_bias;
  json["tie_word_embeddings"] = config.tie_word_embeddings;
  json["initializer_range"] = mixer.initializer_range;
  if (mixer.conv_initializer_range != 0) json["conv_initializer_range"] = mixer.conv_initializer_range;
  if (config.mlp_everywhere) json["mlp_everywhere"] = true;
  const auto& eos = config.eos_token_id;
  json["eos_token_id"] = eos.empty() ? Json(nullptr) : eos.size() == 1 ? Json(eos.front()) : Json(eos);
  std::set<std::string> used;
  for (const auto& token : config.layer_types) used.insert(std::string(layers::mixer_kind(token).prefix) + "_config");
  layers::visit_groups(mixer, [&](std::string_view key, const auto& group) {
    if (used.contains(std::string(key))) json[std::string(key)] = group_to_json(group);
  });
  return json;
}

Json read_json(const std::filesystem::path& path) {
  const MappedFile file(path);
  try {
    return Json::parse(file.text());
  } catch (const nlohmann::json::parse_error& error) {
    const auto before = file.text().substr(0, std::min(error.byte, file.size()));
    throw std::runtime_error(path.string() + " is not valid JSON: there is a mistake in line " +
                             std::to_string(1 + std::ranges::count(before, '\n')));
  }
}

}  // namespace gka::models
