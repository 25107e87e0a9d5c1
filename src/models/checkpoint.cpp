#include "models/checkpoint.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <iostream>
#include <set>
#include <span>
#include <stdexcept>
#include <utility>

#include "base/folders.h"
#include "models/activations.h"
#include "models/checksums.h"
#include "models/dtypes.h"
#include "models/matching.h"
#include "ops/stored.h"

namespace gka::models {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfigName = "config.json";
constexpr const char* kAutoModelName = "gka_hf.py";
constexpr const char* kWeightsName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kGenerationName = "generation_config.json";
constexpr const char* kTokenizerName = "tokenizer.json";
constexpr const char* kTokenizerConfigName = "tokenizer_config.json";
constexpr const char* kHeadName = "lm_head.weight";
constexpr const char* kEmbeddingName = "model.embed_tokens.weight";
constexpr std::string_view kLayers = "model.layers.";
constexpr std::string_view kAttention = ".self_attn.";
constexpr std::string_view kSliding = ".swa.";                     // as published in hybrids
constexpr std::string_view kFrequencies = ".rotary_emb.inv_freq";  // older Llama files store what follows from theta

/// Which file of the folder holds each tensor.
std::map<std::string, std::string> read_index(const fs::path& path) {
  const auto json = read_json(path);
  const auto map = json.find("weight_map");
  const auto is_text = [](const Json& value) { return value.is_string(); };
  if (!json.is_object() || map == json.end() || !map->is_object() || !std::ranges::all_of(*map, is_text)) {
    throw std::runtime_error(path.string() + " has no 'weight_map' that names a file for each tensor");
  }
  return map->get<std::map<std::string, std::string>>();
}

std::string shard_name(std::size_t number, std::size_t count) {
  char name[64];
  std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", number + 1, count);
  return name;
}

bool is_weights_name(const std::string& name) {
  return name == kWeightsName || name == kIndexName || (name.starts_with("model-") && name.ends_with(".safetensors"));
}

void remove_other_weights(const fs::path& folder, const std::set<std::string>& kept) {
  std::vector<fs::path> stale;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    if (is_weights_name(name) && !kept.contains(name)) stale.push_back(entry.path());
  }
  for (const auto& path : stale) fs::remove(path);
}

/// In order, each group below the limit.
std::vector<std::span<const PlannedTensor>> split(std::span<const PlannedTensor> tensors, std::int64_t limit) {
  std::vector<std::span<const PlannedTensor>> shards;
  std::size_t begin = 0;
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto size = tensors[i].bytes();
    if (bytes + size > limit && i > begin) {
      shards.push_back(tensors.subspan(begin, i - begin));
      begin = i;
      bytes = 0;
    }
    bytes += size;
  }
  shards.push_back(tensors.subspan(begin));
  return shards;
}

void write_shard(const fs::path& path, std::span<const PlannedTensor> tensors) {
  std::vector<SafetensorsWriter::Planned> planned;
  for (const auto& tensor : tensors) {
    planned.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
  }
  SafetensorsWriter writer(path, std::move(planned), {{"format", "pt"}});
  for (const auto& tensor : tensors) writer.write(tensor.make());
  writer.commit();
}

void warn_on_stderr(const std::string& line) { std::cerr << "gka: warning: " << line << "\n"; }

/// How a tokenizer.json spells one of its tokens.
std::optional<std::string> text_of_token(const Json& tokenizer, std::int64_t id) {
  for (const auto& added : tokenizer.value("added_tokens", Json::array())) {
    if (added.value("id", Json()) == id && added.contains("content")) return added["content"].get<std::string>();
  }
  const auto model = tokenizer.find("model");
  if (model == tokenizer.end() || !model->contains("vocab")) return std::nullopt;
  for (const auto& [text, number] : (*model)["vocab"].items()) {
    if (number == id) return text;
  }
  return std::nullopt;
}

/// The number of the layer in "model.layers.3.self_attn.…", or nothing.
std::optional<std::size_t> layer_of(std::string_view parameter) {
  if (!parameter.starts_with(kLayers)) return std::nullopt;
  const auto* first = parameter.data() + kLayers.size();
  std::size_t layer = 0;
  const auto read = std::from_chars(first, parameter.data() + parameter.size(), layer);
  return read.ec == std::errc() ? std::optional(layer) : std::nullopt;
}

/// The name under which a sliding layer's parameter is published in hybrids; itself for all others.
std::string sliding_name(const ModelConfig& config, const std::string& parameter) {
  const auto layer = layer_of(parameter);
  if (!layer || *layer >= config.layer_types.size() || config.layer_types[*layer] != "SWA") return parameter;
  auto name = parameter;
  const auto place = name.find(kAttention);
  if (place != std::string::npos) name.replace(place, kAttention.size(), kSliding);
  return name;
}

/// Tensors that say the layer is another one than ours of that name.
void refuse_other_layers(const Shapes& stored) {
  for (const auto& [name, shape] : stored) {
    if (!layer_of(name) || name.find(".mamba.") == std::string::npos) continue;
    throw std::runtime_error(
        "the checkpoint has '" + name +
        "': its M2 layers are the published hybrids', with a rotary embedding and norms of B and C, "
        "which gka does not have; its own are 'mamba2.*'");
  }
}

}  // namespace

Weights::Weights(const fs::path& folder) : folder_(folder) {
  if (fs::exists(folder / kIndexName)) {
    std::map<std::string, std::size_t> places;
    for (const auto& [name, file] : read_index(folder / kIndexName)) {
      if (!places.contains(file)) {
        places[file] = files_.size();
        files_.emplace_back(folder / file);
      }
      if (!files_[places[file]].has(name)) {
        throw std::runtime_error((folder / kIndexName).string() + " says that '" + name + "' is in " + file +
                                 ", and it is not");
      }
      file_of_[name] = places[file];
    }
    return;
  }
  if (!fs::exists(folder / kWeightsName)) {
    throw std::runtime_error(folder.string() + " holds no weights: neither " + kWeightsName + " nor " + kIndexName);
  }
  files_.emplace_back(folder / kWeightsName);
  for (const auto& [name, entry] : files_.front().entries()) file_of_[name] = 0;
}

std::vector<std::string> Weights::names() const {
  std::vector<std::string> all;
  for (const auto& [name, file] : file_of_) all.push_back(name);
  return all;
}

Shapes Weights::shapes() const {
  Shapes all;
  for (const auto& [name, file] : file_of_) all.emplace(name, files_[file].entries().at(name).shape);
  return all;
}

at::Tensor Weights::tensor(const std::string& name) const {
  const auto found = file_of_.find(name);
  if (found == file_of_.end()) throw std::runtime_error("the weights in " + folder_.string() + " lack '" + name + "'");
  return files_[found->second].tensor(name);
}

at::Tensor Weights::dense(const std::string& name, at::IntArrayRef shape) const {
  const auto stored = tensor(name);
  return ops::is_int8(stored) ? ops::dense(stored, shape.back(), at::kFloat) : stored;
}

std::set<std::string> Weights::int8() const {
  std::set<std::string> names;
  for (const auto& [name, file] : file_of_) {
    if (files_[file].entries().at(name).dtype == at::kChar) names.insert(name);
  }
  return names;
}

PlannedTensor planned(const layers::Parameter& parameter, std::string name, at::ScalarType dtype, bool int8,
                      std::function<at::Tensor()> make) {
  if (!int8 || !parameter.matrix) {
    return {.name = std::move(name), .dtype = dtype, .shape = parameter.shape, .make = [dtype, make = std::move(make)] {
              return make().to(dtype);
            }};
  }
  const auto shape = ops::int8_shape(parameter.shape[0], parameter.shape[1]);
  return {.name = std::move(name), .dtype = at::kChar, .shape = shape, .make = [shape, make = std::move(make)] {
            const auto bytes = at::empty(shape, at::kChar);
            ops::store(make(), bytes);
            return bytes;
          }};
}

std::int64_t PlannedTensor::bytes() const {
  auto size = static_cast<std::int64_t>(at::elementSize(dtype));
  for (const auto extent : shape) size *= extent;
  return size;
}

at::ScalarType Weights::usual_type() const {
  std::map<at::ScalarType, std::int64_t> numbers;
  for (const auto& name : names()) {
    const auto stored = tensor(name);
    if (stored.is_floating_point()) numbers[stored.scalar_type()] += stored.numel();
  }
  const auto most = std::ranges::max_element(numbers, {}, [](const auto& entry) { return entry.second; });
  return most == numbers.end() ? at::kFloat : most->first;
}

void Weights::check_tied_head() const {
  if (has(kHeadName) && has(kEmbeddingName) && !at::equal(tensor(kHeadName), tensor(kEmbeddingName))) {
    throw std::runtime_error(
        "the checkpoint has a 'lm_head.weight' that is not its embedding, and 'tie_word_embeddings' of its "
        "configuration "
        "says that they are one");
  }
}

void Weights::refuse_not_finite(const std::string& name) const {
  const auto stored = tensor(name);
  if (ops::is_int8(stored) ? ops::scales_are_finite(stored) : files_[file_of_.at(name)].finite(name)) return;
  throw std::runtime_error("'" + name + "' in " + folder_.string() +
                           " has numbers that are not finite (NaN or infinity)");
}

void write_weights(const fs::path& folder, std::vector<PlannedTensor> tensors, std::int64_t shard_bytes) {
  std::ranges::sort(tensors, {}, &PlannedTensor::name);
  const auto shards = split(tensors, shard_bytes);
  if (shards.size() == 1) {
    write_shard(folder / kWeightsName, tensors);
    remove_other_weights(folder, {kWeightsName});
    return;
  }
  std::set<std::string> written{kIndexName};
  Json map = Json::object();
  std::int64_t total = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const auto file = shard_name(i, shards.size());
    write_shard(folder / file, shards[i]);
    written.insert(file);
    for (const auto& tensor : shards[i]) {
      map[tensor.name] = file;
      total += tensor.bytes();
    }
  }
  const Json index{{"metadata", {{"total_size", total}}}, {"weight_map", map}};
  write_text(folder / kIndexName, index.dump(2) + "\n");
  remove_other_weights(folder, written);
}

std::string stored_name(const ModelConfig& config, const std::string& parameter) {
  return config.attention_family() != nullptr ? parameter : sliding_name(config, parameter);
}

std::vector<Match> match_weights(const Decoder& decoder, const Shapes& stored, const std::set<std::string>& int8) {
  refuse_other_layers(stored);
  std::vector<Match> matches;
  std::vector<std::string> missing, others;
  std::set<std::string> used;
  for (const auto& parameter : decoder.parameters().all()) {
    auto found = stored.find(parameter.name);
    if (found == stored.end()) found = stored.find(sliding_name(decoder.config(), parameter.name));
    if (found == stored.end()) {
      missing.push_back(parameter.name);
      continue;
    }
    const bool bytes = int8.contains(found->first);
    if (bytes && !parameter.matrix) {
      throw std::runtime_error("'" + found->first + "' is int8 in the checkpoint, which only projections may be");
    }
    const auto shape = bytes ? ops::int8_shape(parameter.shape[0], parameter.shape[1]) : parameter.shape;
    if (found->second != shape) {
      refuse_shape(found->first, found->second, shape, bytes ? ", in int8" : "");
    }
    matches.push_back({.parameter = &parameter, .stored = found->first});
    used.insert(found->first);
  }
  refuse_missing(missing);
  if (decoder.config().tie_word_embeddings) used.insert(kHeadName);  // some writers store the embedding twice
  for (const auto& [name, shape] : stored) {
    if (!used.contains(name) && !name.ends_with(kFrequencies)) others.push_back(name);
  }
  refuse_others(others);
  return matches;
}

namespace {

/// Whether a parameter may simply be the file's own pages.
bool can_map(const layers::Parameter& parameter, const at::Tensor& stored) {
  return !parameter.shares_room && parameter.value.is_cpu() && parameter.value.scalar_type() == stored.scalar_type();
}

}  // namespace

at::ScalarType matrices_type(WeightsAs as, at::ScalarType stored, at::ScalarType dtype, at::Device device) {
  auto type = dtype;
  switch (as) {
    case WeightsAs::stored: {
      const bool narrow = device.is_cpu() && dtype == at::kFloat && (stored == at::kBFloat16 || stored == at::kChar);
      const bool bytes = !device.is_cpu() && stored == at::kChar && dtype == at::kBFloat16;
      return narrow || bytes ? stored : dtype;
    }
    case WeightsAs::float32: type = at::kFloat; break;
    case WeightsAs::bfloat16: type = at::kBFloat16; break;
    case WeightsAs::int8: type = at::kChar; break;
  }
  const bool bytes = type == at::kChar && dtype == at::kBFloat16;
  if (!device.is_cpu() && type != dtype && !bytes) {
    throw std::runtime_error("weights are '" + std::string(name_of(as)) + "', and on " + device.str() +
                             " they have the activations' type, " + std::string(name_of_dtype(dtype)) +
                             "; leave them as stored, or give that type to the activations");
  }
  return type;
}

WeightsAs weights_named(const std::string& what, const std::string& name) {
  if (name.empty()) return WeightsAs::stored;
  if (const auto as = parse_name<WeightsAs>(name)) return *as;
  throw std::runtime_error(what + " takes one of " + list_names<WeightsAs>() + ", and got '" + name + "'");
}

void load_weights(Decoder& decoder, const Weights& weights, const WeightsOptions& options) {
  const at::NoGradGuard no_gradient;
  const auto matches = match_weights(decoder, weights.shapes(), weights.int8());
  if (decoder.config().tie_word_embeddings) weights.check_tied_head();
  std::int64_t numbers = 0;
  for (const auto& [parameter, stored] : matches) {
    weights.refuse_not_finite(stored);
    const auto tensor = weights.tensor(stored);
    if (options.map && can_map(*parameter, tensor)) {
      at::Tensor(parameter->value).set_data(tensor);
    } else if (ops::is_int8(tensor) && ops::is_int8(parameter->value)) {
      at::Tensor(parameter->value).copy_(tensor);
    } else {
      ops::store(weights.dense(stored, parameter->shape), parameter->value);
    }
    numbers += c10::multiply_integers(parameter->shape);
    if (options.progress) {
      options.progress(static_cast<double>(numbers) / static_cast<double>(decoder.parameters().count()));
    }
  }
}

ModelConfig load_config(const fs::path& folder, const Warn& warn) {
  if (!fs::exists(folder)) {
    throw std::runtime_error("there is no model '" + folder.string() +
                             "': it is a checkpoint's folder or a training run");
  }
  if (!fs::is_directory(folder) || !fs::exists(folder / kConfigName)) {
    throw std::runtime_error(folder.string() + " is not a checkpoint: that is a folder with a " + kConfigName +
                             " in it");
  }
  verify_if_listed(folder, Checked::model);
  const auto path = folder / kConfigName;
  auto config = parse_checkpoint_config(read_json(path), path.string(), warn ? warn : warn_on_stderr);
  if (const auto generation = folder / kGenerationName; fs::exists(generation)) {
    const auto json = read_json(generation);
    if (json.is_object() && json.contains("eos_token_id") && !json["eos_token_id"].is_null()) {
      config.eos_token_id = read_end_tokens(json["eos_token_id"], config.vocab_size, generation.string());
    }
  }
  return config;
}

Decoder load_model(const fs::path& folder, const LoadOptions& options) {
  auto config = load_config(folder, options.warn);
  const Weights weights(folder);
  const auto stored = weights.usual_type(), dtype = options.dtype.value_or(stored);
  layers::ParameterOptions parameters{.device = options.device, .dtype = dtype, .requires_grad = options.requires_grad};
  if (options.weights) {
    const auto matrices = weights.int8().empty() ? stored : at::kChar;
    parameters.matrices = matrices_type(*options.weights, matrices, dtype, options.device);
    if (!options.device.is_cpu()) parameters.dtype = small_type(dtype);
  }
  Decoder decoder(std::move(config), std::move(parameters));
  load_weights(decoder, weights, {.map = options.weights.has_value(), .progress = options.progress});
  return decoder;
}

void save_model(const Decoder& decoder, const fs::path& folder, const SaveOptions& options) {
  make_folder(folder);
  const auto dtype = options.dtype.value_or(decoder.parameters().options().dtype);
  std::vector<PlannedTensor> tensors;
  for (const auto& parameter : decoder.parameters().all()) {
    const auto make = [&parameter, type = options.int8 ? at::kFloat : dtype] {
      return ops::dense(parameter.value.detach(), parameter.shape.back(), type);
    };
    tensors.push_back(planned(parameter, stored_name(decoder.config(), parameter.name), dtype, options.int8, make));
  }
  write_weights(folder, std::move(tensors), options.shard_bytes);
  write_config(folder, decoder.config(), dtype, options.int8);
}

void write_config(const fs::path& folder, const ModelConfig& config, at::ScalarType dtype, bool int8) {
  auto json = to_json(config);
  if (int8) json["quantization_config"] = int8_files();
  json["dtype"] = name_of_dtype(dtype);
  json.erase("auto_map");  // where the model came from, of files that are not here
  if (config.attention_family() == nullptr) {
    json["auto_map"] = {{"AutoConfig", "gka_hf.GkaConfig"}, {"AutoModelForCausalLM", "gka_hf.GkaForCausalLM"}};
    write_text(folder / kAutoModelName, "from gka.hf import GkaConfig, GkaForCausalLM  # noqa: F401\n");
  }
  write_text(folder / kConfigName, json.dump(2) + "\n");
}

void write_tokenizer_config(const fs::path& folder, const ModelConfig& config, const std::string& chat_template) {
  if (!fs::exists(folder / kTokenizerName)) return;
  const auto tokenizer = read_json(folder / kTokenizerName);
  const auto length = to_json(config)["max_position_embeddings"];
  Json json{{"tokenizer_class", "PreTrainedTokenizerFast"},
            {"model_max_length", length},
            {"clean_up_tokenization_spaces", false}};
  if (!config.eos_token_id.empty()) {
    if (const auto text = text_of_token(tokenizer, config.eos_token_id.front())) json["eos_token"] = *text;
  }
  if (!chat_template.empty()) json["chat_template"] = chat_template;
  write_text(folder / kTokenizerConfigName, json.dump(2) + "\n");
}

}  // namespace gka::models
