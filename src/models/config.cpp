#include "models/config.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "base/unique_keys.h"
#include "layers/frequencies.h"
#include "layers/kinds.h"
#include "models/pattern.h"
#include "models/ranges.h"
#include "models/vision_config.h"

namespace gka::models {
namespace {

constexpr std::array kFamilies{
    Family{"hybrid_qwen3", "HybridQwen3ForCausalLM", true, false},
    Family{"qwen3", "Qwen3ForCausalLM", true, false},
    Family{"qwen2", "Qwen2ForCausalLM", false, true},
    Family{"llama", "LlamaForCausalLM", false, false},
};
constexpr const Family& kHybrid = kFamilies.front();

/// Keys that published files have and that change nothing here.
constexpr std::array<std::string_view, 17> kInert{
    "transformers_version", "torch_dtype",       "dtype",        "use_cache",
    "attention_dropout",    "bos_token_id",      "pad_token_id", "auto_map",
    "_name_or_path",        "output_attentions", "return_dict",  "output_hidden_states",
    "is_encoder_decoder",   "problem_type",      "id2label",     "label2id",
    "pretraining_tp",
};

/// What config.json says of matrices that are stored as int8 (ops/stored.h).
const Json kInt8Files{{"quant_method", "gka_int8"}, {"group_size", 64}};

/// Keys that would change the mathematics into something gka does not have, and the value that leaves it as it is.
/// Null always does.
struct Refused {
  std::string_view key;
  Json harmless;
};
const std::array kRefused{
    Refused{"quantization_config", kInt8Files},
    Refused{"mlp_bias", false},
    Refused{"partial_rotary_factor", 1.0},
    Refused{"attn_logit_softcapping", nullptr},
    Refused{"final_logit_softcapping", nullptr},
    Refused{"query_pre_attn_scalar", nullptr},
    Refused{"embedding_multiplier", 1.0},
    Refused{"residual_multiplier", 1.0},
    Refused{"attention_multiplier", nullptr},
    Refused{"logits_scaling", 1.0},
    Refused{"clip_qkv", nullptr},
    Refused{"num_experts", 0},
    Refused{"num_local_experts", 0},
    Refused{"no_rope_layers", nullptr},
    Refused{"attention_chunk_size", nullptr},
};

/// What other programs are told where nobody said how long a text may be; gka itself has no limit.
constexpr std::int64_t kUsualLength = 32768;

/// Choices published files have no word for: written only where they differ from the default.
constexpr std::array<std::string_view, 11> kExtensions{"ridge_mode", "gradient", "beta_weight", "use_q_conv",
                                                       "use_k_conv", "head_dim", "expand_k",    "expand_v",
                                                       "sketch_dim", "qk_norm",  "qkv_bias"};
/// Inside a group, what published files may hold that changes nothing here.
constexpr std::array<std::string_view, 1> kInertInGroups{"chunk_size"};

/// transformers' names of layers. A memory has one for all of them, so only a pattern says which.
constexpr std::array<std::pair<std::string_view, std::string_view>, 2> kOtherNamesOfLayers{{
    {"full_attention", "*"},
    {"sliding_attention", "SWA"},
}};
constexpr std::int64_t kMostLayers = 10'000;
constexpr std::string_view kSomeMemory = "linear_attention";

struct Rope {
  layers::RopeConfig scaling{};
  std::optional<double> rope_theta{};
  std::string type{};  // older files say type for rope_type
};

/// What a file says, before it is made into a configuration: sizes that may be left out, and two ways to say one thing.
struct Draft {
  ModelConfig config{};
  std::string model_type{kHybrid.model_type};
  std::vector<std::string> architectures{};
  std::int64_t num_hidden_layers = 0;
  bool use_sliding_window = false;
  std::int64_t max_window_layers = 0;
  std::optional<std::string> pattern{};
  std::string hidden_act = "silu";
  Json eos_token_id{};
  Json groups = Json::object();
  Json gka_overrides{};
  Json rope_parameters{};
  Json rope_scaling{};
  Json swa_config{};
};

/// Every key of the file that holds one value.
template <typename Visit>
void visit_values(Draft& d, Visit&& visit) {
  auto& c = d.config;
  visit("model_type", d.model_type);
  visit("architectures", d.architectures);
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
  visit("max_position_embeddings", c.max_position_embeddings);
  visit("sliding_window", c.mixer.sliding_window);
  visit("use_sliding_window", d.use_sliding_window);
  visit("max_window_layers", d.max_window_layers);
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
  visit("swa_config", d.swa_config);
}

template <typename List>
bool contains(const List& list, std::string_view word) {
  return std::ranges::find(list, word) != std::end(list);
}

const Refused* refused(std::string_view key) {
  const auto* found = std::ranges::find(kRefused, key, &Refused::key);
  return found == kRefused.end() ? nullptr : found;
}

void check_refused(const Refused& known, const Json& value, const std::string& where) {
  if (value.is_null() || value == known.harmless) return;
  const auto shown = value.is_structured() ? std::string("set") : value.dump();
  throw std::runtime_error("'" + std::string(known.key) + "' of " + where + " is " + shown +
                           ", which changes the model into one that gka does not have; it must be " +
                           (known.harmless.is_null() ? "left out" : known.harmless.dump()));
}

const Family& family_of(const Draft& draft, const std::string& where) {
  std::string known;
  for (const auto& family : kFamilies) {
    if (family.model_type == draft.model_type) return family;
    known += (known.empty() ? "" : ", ") + std::string(family.model_type);
  }
  throw std::runtime_error("'model_type' of " + where + " is '" + draft.model_type +
                           "', a kind of model that gka does not have; it has " + known);
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
  if (is_vision(json)) {
    throw std::runtime_error(where + " is of a model for images, which reads no text: see `gka vision --help`");
  }
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
    } else if (const auto* known = refused(key)) {
      check_refused(*known, value, where);
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
  const auto& family = family_of(draft, where);
  draft.config.mixer.attention.qk_norm = family.qk_norm;
  draft.config.mixer.attention.qkv_bias = family.qkv_bias;
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

/// Both of `rope_parameters` and its older form `rope_scaling`, which has no theta.
void read_rope(Draft& draft, const std::string& where, const OnUnknown& unknown) {
  const auto read = [&](const Json& json, const char* key) {
    if (json.is_null()) return;
    const auto place = "'" + std::string(key) + "' of " + where;
    Rope rope;
    read_fields(json, place, unknown, [&](auto&& visit) {
      layers::RopeConfig::fields(rope.scaling, visit);
      visit("rope_theta", rope.rope_theta);
      visit("type", rope.type);
    });
    if (!rope.type.empty()) json::read_key(Json(rope.type), "type", place, rope.scaling.rope_type);
    if (rope.rope_theta) draft.config.mixer.rope_theta = *rope.rope_theta;
    const bool empty =
        json.contains("rope_type") || json.contains("type") || json.size() == (rope.rope_theta ? 1U : 0U);
    if (!empty) throw std::runtime_error(place + " has no 'rope_type' that says what its numbers are for");
    draft.config.mixer.rope = rope.scaling;
    auto& original = draft.config.mixer.rope.original_max_position_embeddings;
    if (original == 0 && rope.scaling.rope_type == layers::RopeType::yarn) {
      original = draft.config.max_position_embeddings;
    }
    try {
      layers::rotary_frequencies(2, draft.config.mixer.rope_theta, draft.config.mixer.rope);
    } catch (const std::invalid_argument& error) {
      throw std::runtime_error(place + " cannot be used: " + error.what());
    }
  };
  read(draft.rope_scaling, "rope_scaling");
  read(draft.rope_parameters, "rope_parameters");
}

/// How far the authors' sliding layers see.
void read_swa(Draft& draft, const std::string& where, const OnUnknown& unknown) {
  if (draft.swa_config.is_null()) return;
  read_fields(draft.swa_config, "'swa_config' of " + where, unknown,
              [&](auto&& visit) { visit("window_size", draft.config.mixer.sliding_window); });
}

void check_layer(const std::string& token, std::size_t place, const std::string& where) {
  std::string known;
  for (const auto& kind : layers::kKindNames) {
    if (kind.token == token) return;
    known += (known.empty() ? "" : ", ") + std::string(kind.token);
  }
  std::string what = "is not known";
  if (token == "BMF") what = "is B'MOJO's, which gka does not have";
  if (token.size() > 1 && token.ends_with('*')) what = "is a fused pair for distillation, which gka does not have";
  throw std::runtime_error("layer " + std::to_string(place) + " of " + where + " has the type '" + token + "', which " +
                           what + "; the types are " + known);
}

bool is_attention(const std::string& token) { return token == "*" || token == "SWA"; }

bool say_the_same(const std::vector<std::string>& types, const std::vector<std::string>& pattern) {
  return std::ranges::equal(types, pattern, [](const auto& type, const auto& token) {
    return type == token || (type == kSomeMemory && !is_attention(token));
  });
}

/// Attention throughout; where windows are used, the first max_window_layers layers have none.
std::vector<std::string> attention_layers(const Draft& draft) {
  const auto count = std::clamp<std::int64_t>(draft.num_hidden_layers, 0, kMostLayers);
  std::vector<std::string> tokens(static_cast<std::size_t>(count), "*");
  if (!draft.use_sliding_window || draft.config.mixer.sliding_window == 0) return tokens;
  for (auto i = std::max<std::int64_t>(0, draft.max_window_layers); i < count; ++i) tokens[i] = "SWA";
  return tokens;
}

/// The tokens of layer_types, of the pattern, or attention throughout; where a file says it twice, it says the same.
void read_layers(Draft& draft, const std::string& where) {
  auto& tokens = draft.config.layer_types;
  for (auto& token : tokens) {
    for (const auto& [other, own] : kOtherNamesOfLayers) {
      if (token == other) token = own;
    }
  }
  if (draft.pattern) {
    auto expanded = expand_pattern(*draft.pattern);
    if (!tokens.empty() && !say_the_same(tokens, expanded)) {
      throw std::runtime_error("'layer_types' and 'hybrid_override_pattern' of " + where +
                               " say different things: " + join_pattern(tokens) + " and " + *draft.pattern);
    }
    tokens = std::move(expanded);
  }
  check_range("num_hidden_layers", draft.num_hidden_layers, where);
  if (tokens.empty()) tokens = attention_layers(draft);
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
           return !layers::kind_name(token).stands_alone;
         });
}

/// Fills in what follows from other sizes and checks that each makes sense.
void check_sizes(ModelConfig& config, const std::string& where) {
  auto& mixer = config.mixer;
  check_ranges(config, where);
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

template <typename Group>
bool is_usual(const Group& group) {
  const Group usual{};
  return write_fields([&](auto&& visit) { Group::fields(group, visit); }) ==
         write_fields([&](auto&& visit) { Group::fields(usual, visit); });
}

/// What the file is called: attention alone under transformers' own name, where it has one.
const Family& written_as(const ModelConfig& config) {
  const auto* family = config.attention_family();
  return family != nullptr ? *family : kHybrid;
}

Json rope_to_json(const layers::MixerConfig& mixer) {
  const layers::RopeConfig usual{};
  const auto all = write_fields([&](auto&& visit) { layers::RopeConfig::fields(mixer.rope, visit); });
  const auto defaults = write_fields([&](auto&& visit) { layers::RopeConfig::fields(usual, visit); });
  Json json{{"rope_type", all["rope_type"]}, {"rope_theta", mixer.rope_theta}};
  for (const auto& [key, value] : all.items()) {
    if (value != defaults[key]) json[key] = value;
  }
  return json;
}

/// transformers' names, for a file that transformers reads.
Json layers_to_json(const ModelConfig& config) {
  Json names = Json::array();
  for (const auto& token : config.layer_types) {
    for (const auto& [other, own] : kOtherNamesOfLayers) {
      if (token == own) names.push_back(other);
    }
  }
  return names;
}

}  // namespace

std::span<const Family> families() { return kFamilies; }

const Family* ModelConfig::attention_family() const {
  const auto& attention = mixer.attention;
  if (!std::ranges::all_of(layer_types, is_attention) || attention.conv_size != 0) return nullptr;
  const bool windows = contains(layer_types, "SWA");
  for (const auto& family : kFamilies) {
    if (&family == &kHybrid || (windows && family.model_type == "llama")) continue;
    if (family.qk_norm == attention.qk_norm && family.qkv_bias == attention.qkv_bias &&
        !(mixer.attention_bias && family.qkv_bias)) {
      return &family;
    }
  }
  return nullptr;
}

std::vector<std::int64_t> read_end_tokens(const Json& json, std::int64_t vocab_size, const std::string& where) {
  std::vector<std::int64_t> tokens;
  if (json.is_null()) return tokens;
  if (std::int64_t one = 0; json::read(json, one)) {
    tokens = {one};
  } else if (!json::read(json, tokens)) {
    throw std::runtime_error("'eos_token_id' of " + where + " takes a token number or a list of them, and is " +
                             json.dump());
  }
  for (const auto token : tokens) {
    if (token >= 0 && token < vocab_size) continue;
    throw std::runtime_error("'eos_token_id' of " + where + " is " + std::to_string(token) +
                             ", outside the vocabulary of " + std::to_string(vocab_size) + " tokens");
  }
  return tokens;
}

ModelConfig parse_config(const Json& json, const std::string& where, const OnUnknown& unknown) {
  auto draft = read_draft(json, where, unknown);
  for (const char* key : {"layer_types", "max_window_layers"}) {  // what a hybrid's file says twice it gets back twice
    if (draft.pattern && json.contains(key)) draft.config.extra[key] = json[key];
  }
  read_groups(draft, where, unknown);
  read_rope(draft, where, unknown);
  read_swa(draft, where, unknown);
  read_layers(draft, where);
  if (draft.hidden_act != "silu") {
    throw std::runtime_error("'hidden_act' of " + where + " is '" + draft.hidden_act + "'; gka has 'silu'");
  }
  check_sizes(draft.config, where);
  draft.config.eos_token_id = read_end_tokens(draft.eos_token_id, draft.config.vocab_size, where);
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

const Json& int8_files() { return kInt8Files; }

Json to_json(const ModelConfig& config) {
  const auto& mixer = config.mixer;
  const auto& family = written_as(config);
  const bool hybrid = &family == &kHybrid;
  const bool windows = contains(config.layer_types, "SWA");
  Json json{{"architectures", {family.architecture}}, {"model_type", family.model_type}};
  for (const auto& [key, value] : config.extra.items()) json[key] = value;
  json["vocab_size"] = config.vocab_size;
  json["hidden_size"] = mixer.hidden_size;
  json["intermediate_size"] = config.intermediate_size;
  json["num_hidden_layers"] = config.blocks();
  json["num_attention_heads"] = mixer.num_attention_heads;
  json["num_key_value_heads"] = mixer.num_key_value_heads;
  json["head_dim"] = mixer.head_dim;
  // transformers refuses names of layers that it does not know, so a hybrid has its pattern alone, unless it came with
  // both.
  if (hybrid) json["hybrid_override_pattern"] = join_pattern(config.layer_types);
  if (!hybrid) json["layer_types"] = layers_to_json(config);
  if (hybrid && config.extra.contains("layer_types")) json["layer_types"] = config.layer_types;
  json["hidden_act"] = "silu";
  json["rms_norm_eps"] = mixer.rms_norm_eps;
  json["rope_theta"] = mixer.rope_theta;
  json["rope_parameters"] = rope_to_json(mixer);
  json["max_position_embeddings"] = config.max_position_embeddings > 0 ? config.max_position_embeddings : kUsualLength;
  json["sliding_window"] = mixer.sliding_window > 0 ? Json(mixer.sliding_window) : Json(nullptr);
  json["use_sliding_window"] = windows;
  if (hybrid && windows) json["swa_config"] = {{"window_size", mixer.sliding_window}};
  json["attention_bias"] = mixer.attention_bias;
  json["tie_word_embeddings"] = config.tie_word_embeddings;
  json["initializer_range"] = mixer.initializer_range;
  if (mixer.conv_initializer_range != 0) json["conv_initializer_range"] = mixer.conv_initializer_range;
  if (config.mlp_everywhere) json["mlp_everywhere"] = true;
  const auto& eos = config.eos_token_id;
  json["eos_token_id"] = eos.empty() ? Json(nullptr) : eos.size() == 1 ? Json(eos.front()) : Json(eos);
  std::set<std::string> used;
  for (const auto& token : config.layer_types) {
    const auto prefix = is_attention(token) ? "attention" : std::string(layers::kind_name(token).prefix);
    used.insert(prefix + "_config");
  }
  layers::visit_groups(mixer, [&](std::string_view key, const auto& group) {
    if (!used.contains(std::string(key))) return;
    // Published files have no group for attention: it is there only where it says something.
    if (key == "attention_config" && (!hybrid || is_usual(group))) return;
    json[std::string(key)] = group_to_json(group);
  });
  return json;
}

Json read_json(const std::filesystem::path& path) { return read_json_with_unique_keys(path); }

}  // namespace gka::models
