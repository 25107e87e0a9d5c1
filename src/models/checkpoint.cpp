#include "models/checkpoint.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "models/dtypes.h"

namespace gka::models {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfigName = "config.json";
constexpr const char* kWeightsName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kHeadName = "lm_head.weight";

std::string shape_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

/// "a, b, c and 12 more"
std::string some_of(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 5;
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kShown); ++i) text += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > kShown) text += " and " + std::to_string(names.size() - kShown) + " more";
  return text;
}

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

/// In the order of names, each group below the limit.
std::vector<Tensors> split(const Tensors& tensors, std::int64_t limit) {
  std::vector<Tensors> shards(1);
  std::int64_t bytes = 0;
  for (const auto& [name, tensor] : tensors) {
    const auto size = static_cast<std::int64_t>(tensor.nbytes());
    if (bytes + size > limit && !shards.back().empty()) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().emplace(name, tensor);
    bytes += size;
  }
  return shards;
}

void warn_on_stderr(const std::string& line) { std::cerr << "gka: warning: " << line << "\n"; }

at::ScalarType usual_type(const Weights& weights) {
  std::map<at::ScalarType, std::int64_t> numbers;
  for (const auto& name : weights.names()) {
    const auto tensor = weights.tensor(name);
    if (tensor.is_floating_point()) numbers[tensor.scalar_type()] += tensor.numel();
  }
  const auto most = std::ranges::max_element(numbers, {}, [](const auto& entry) { return entry.second; });
  return most == numbers.end() ? at::kFloat : most->first;
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

at::Tensor Weights::tensor(const std::string& name) const {
  const auto found = file_of_.find(name);
  if (found == file_of_.end()) throw std::runtime_error("the weights in " + folder_.string() + " lack '" + name + "'");
  return files_[found->second].tensor(name);
}

void write_weights(const fs::path& folder, const Tensors& tensors, std::int64_t shard_bytes) {
  const Metadata metadata{{"format", "pt"}};
  const auto shards = split(tensors, shard_bytes);
  if (shards.size() == 1) {
    write_safetensors(folder / kWeightsName, tensors, metadata);
    remove_other_weights(folder, {kWeightsName});
    return;
  }
  std::set<std::string> written{kIndexName};
  Json map = Json::object();
  std::int64_t total = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const auto file = shard_name(i, shards.size());
    write_safetensors(folder / file, shards[i], metadata);
    written.insert(file);
    for (const auto& [name, tensor] : shards[i]) {
      map[name] = file;
      total += static_cast<std::int64_t>(tensor.nbytes());
    }
  }
  const Json index{{"metadata", {{"total_size", total}}}, {"weight_map", map}};
  write_text(folder / kIndexName, index.dump(2) + "\n");
  remove_other_weights(folder, written);
}

void load_weights(Decoder& decoder, const Weights& weights, const Warn& warn) {
  const at::NoGradGuard no_gradient;
  std::vector<std::string> missing;
  std::set<std::string> used;
  for (const auto& parameter : decoder.parameters().all()) {
    if (!weights.has(parameter.name)) {
      missing.push_back(parameter.name);
      continue;
    }
    const auto stored = weights.tensor(parameter.name);
    if (stored.sizes() != parameter.value.sizes()) {
      throw std::runtime_error("'" + parameter.name + "' has the shape " + shape_of(stored) +
                               " in the checkpoint and " + shape_of(parameter.value) + " by its configuration");
    }
    parameter.value.copy_(stored);
    used.insert(parameter.name);
  }
  if (!missing.empty()) throw std::runtime_error("the checkpoint lacks tensors of this model: " + some_of(missing));
  if (decoder.config().tie_word_embeddings) used.insert(kHeadName);  // some writers store the embedding twice
  std::vector<std::string> others;
  for (const auto& name : weights.names()) {
    if (!used.contains(name)) others.push_back(name);
  }
  if (!others.empty()) warn("the checkpoint has tensors that this model has no use for: " + some_of(others));
}

Decoder load_model(const fs::path& folder, const LoadOptions& options) {
  if (!fs::exists(folder)) throw std::runtime_error("there is no " + folder.string());
  if (!fs::is_directory(folder) || !fs::exists(folder / kConfigName)) {
    throw std::runtime_error(folder.string() + " is not a checkpoint: that is a folder with a " + kConfigName +
                             " in it");
  }
  const Warn warn = options.warn ? options.warn : warn_on_stderr;
  const auto path = folder / kConfigName;
  auto config = parse_checkpoint_config(read_json(path), path.string(), warn);
  const Weights weights(folder);
  Decoder decoder(std::move(config), {.device = options.device,
                                      .dtype = options.dtype.value_or(usual_type(weights)),
                                      .requires_grad = options.requires_grad});
  load_weights(decoder, weights, warn);
  return decoder;
}

void save_model(const Decoder& decoder, const fs::path& folder, const SaveOptions& options) {
  std::error_code failure;
  fs::create_directories(folder, failure);
  if (failure) throw std::runtime_error("cannot make the folder " + folder.string() + ": " + failure.message());
  const auto dtype = options.dtype.value_or(decoder.parameters().options().dtype);
  Tensors tensors;
  for (const auto& parameter : decoder.parameters().all()) {
    tensors.emplace(parameter.name, parameter.value.detach().to(dtype));
  }
  write_weights(folder, tensors, options.shard_bytes);
  auto json = to_json(decoder.config());
  json["dtype"] = name_of_dtype(dtype);
  write_text(folder / kConfigName, json.dump(2) + "\n");
}

}  // namespace gka::models
