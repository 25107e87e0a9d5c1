// Configurations and checkpoints for Python: read, checked and written by the same code as everywhere else. A
// configuration goes over as JSON with every choice in it, so that Python has no defaults of its own.
#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <filesystem>
#include <string>
#include <tuple>
#include <vector>

#include "base/fields.h"
#include "base/folders.h"
#include "layers/mixers.h"
#include "layers/rotary.h"
#include "models/checkpoint.h"
#include "models/checksums.h"
#include "models/config.h"

namespace gka::python {
namespace {

using WeightsByName = c10::Dict<std::string, at::Tensor>;

/// What config.json would say, with every choice of every group, the tokens of all layers and the tensors' prefixes.
std::string spelled_out(const models::ModelConfig& config) {
  auto json = models::to_json(config);
  json["layer_types"] = config.layer_types;
  json["eos_token_id"] = config.eos_token_id;
  json["mlp_everywhere"] = config.mlp_everywhere;
  json["conv_initializer_range"] = config.mixer.conv_initializer_range;
  json["rope_parameters"] = write_fields([&](auto&& visit) { layers::RopeConfig::fields(config.mixer.rope, visit); });
  layers::visit_groups(config.mixer, [&](std::string_view key, const auto& group) {
    json[std::string(key)] = write_fields([&](auto&& visit) { group.fields(group, visit); });
  });
  const bool hybrid = config.attention_family() == nullptr;
  Json prefixes = Json::array(), alone = Json::array();
  for (const auto& token : config.layer_types) {
    const auto& kind = layers::mixer_kind(token);
    prefixes.push_back(hybrid && token == "SWA" ? "swa" : std::string(kind.prefix));
    alone.push_back(kind.stands_alone && !config.mlp_everywhere);
  }
  json["prefixes"] = prefixes;
  json["without_mlp"] = alone;
  return json.dump();
}

/// `strict`: as for a file that somebody wrote; else keys that nobody knows are let go, as for a checkpoint.
std::string parse_config(const std::string& json, const std::string& where, bool strict) {
  const auto parsed = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK_VALUE(!parsed.is_discarded(), where, " is not valid JSON");
  if (strict) return spelled_out(models::parse_training_config(parsed, where));
  return spelled_out(models::parse_checkpoint_config(parsed, where, [](const std::string&) {}));
}

std::string read_config(const std::string& folder) { return spelled_out(models::load_config(folder)); }

/// Every tensor the model asks for, under the name it has in files; none missing and none left over.
WeightsByName load_weights(const std::string& folder) {
  models::verify_if_listed(folder, models::Checked::model);
  const auto config = models::load_config(folder);
  const models::Decoder shape(config, {.device = at::kMeta});
  const models::Weights weights(folder);
  if (config.tie_word_embeddings) weights.check_tied_head();
  WeightsByName all;
  for (const auto& [parameter, stored] : models::match_weights(shape, weights.shapes(), weights.int8())) {
    weights.refuse_not_finite(stored);
    all.insert(models::stored_name(config, parameter->name), weights.dense(stored, parameter->shape));
  }
  return all;
}

void save_model(const std::string& folder, const std::string& json, const WeightsByName& weights) {
  const auto config = models::parse_training_config(Json::parse(json), "the model's configuration");
  const models::Decoder shape(config, {.device = at::kMeta});
  models::Shapes shapes;
  for (const auto& entry : weights) shapes.emplace(entry.key(), entry.value().sizes().vec());
  std::vector<models::PlannedTensor> planned;
  auto dtype = at::kFloat;
  for (const auto& [parameter, stored] : models::match_weights(shape, shapes)) {
    const auto tensor = weights.at(stored);
    dtype = tensor.scalar_type();
    planned.push_back({.name = models::stored_name(config, parameter->name),
                       .dtype = tensor.scalar_type(),
                       .shape = tensor.sizes().vec(),
                       .make = [tensor] { return tensor; }});
  }
  make_folder(folder);
  models::write_weights(folder, std::move(planned));
  models::write_config(folder, config, dtype);
  models::write_tokenizer_config(folder, config);
}

std::tuple<at::Tensor, double> rotary_frequencies(std::int64_t channels, double theta, const std::string& parameters) {
  layers::RopeConfig rope;
  read_fields(
      Json::parse(parameters), "'rope_parameters'", [](const std::string&, const std::string&) {},
      [&](auto&& visit) { layers::RopeConfig::fields(rope, visit); });
  const auto frequencies = layers::rotary_frequencies(channels, theta, rope);
  return {at::tensor(frequencies.turns, at::kDouble), frequencies.factor};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gka, m) {
  m.def("parse_config(str json, str where, bool strict=True) -> str", parse_config);
  m.def("read_config(str folder) -> str", read_config);
  m.def("verify_model(str folder) -> ()",
        [](const std::string& folder) { models::verify_if_listed(folder, models::Checked::model); });
  m.def("load_weights(str folder) -> Dict(str, Tensor)", load_weights);
  m.def("save_model(str folder, str json, Dict(str, Tensor) weights) -> ()", save_model);
  m.def("rotary_frequencies(int channels, float theta, str parameters) -> (Tensor turns, float factor)",
        rotary_frequencies);
}

}  // namespace gka::python
