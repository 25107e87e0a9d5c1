// Reading a training file. Defaults are JSON in the table of keys and go through the same reader as what the user
// wrote.
#include "train/config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <vector>

#include "models/config.h"
#include "models/vision_config.h"

namespace gka::train {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& sentence) { throw std::runtime_error(sentence); }

bool read_number(const Json& value, double& into, double least, double most) {
  return json::read(value, into) && into >= least && into <= most;
}

/// The largest whole number a key takes: the product of two of them still fits 64 bits.
constexpr std::int64_t kMostOfOne = std::int64_t{1} << 31;
/// For those that are products themselves: tokens in a step and in a run.
constexpr std::int64_t kMostTokens = std::int64_t{1} << 52;

bool read_count(const Json& value, std::int64_t& into, std::int64_t least, std::int64_t most = kMostOfOne) {
  return json::read(value, into) && into >= least && into <= most;
}

bool read_name(const Json& value, std::string& into, std::initializer_list<std::string_view> names) {
  if (!json::read(value, into)) return false;
  return std::ranges::find(names, into) != names.end();
}

bool read_device(const Json& value, std::string& into) {
  if (!json::read(value, into)) return false;
  if (into == "auto" || into == "cpu" || into == "cuda") return true;
  const auto index = into.starts_with("cuda:") ? std::string_view(into).substr(5) : std::string_view();
  return !index.empty() && index.size() < 4 && std::ranges::all_of(index, [](char c) { return c >= '0' && c <= '9'; });
}

bool read_betas(const Json& value, std::array<double, 2>& into) {
  if (!value.is_array() || value.size() != 2) return false;
  return read_number(value[0], into[0], 0, 1) && into[0] < 1 && read_number(value[1], into[1], 0, 1) && into[1] < 1;
}

constexpr double kMost = 1e300;

constexpr std::array kKeys{
    Key{"model", "a path to a model's config.json, or that object itself", "",
        "the model; `--set model.hidden_size=64` changes one key of it", true,
        [](const Json& v, Config& c) { return c.model = v, v.is_object(); }},
    Key{"from", "a path to a checkpoint, a run or a model, or null", "null",
        "weights to start from, as `--from` gives them; null: drawn from `seed`", true,
        [](const Json& v, Config& c) {
          if (v.is_null()) return true;
          std::string path;
          const bool right = json::read(v, path) && !path.empty();
          c.from = path;
          return right;
        }},
    Key{"data", "a source: an object", "", "what is trained on; [data.md](data.md) has its keys", true,
        [](const Json& v, Config& c) { return c.data = v, v.is_object(); }},
    Key{"eval_data", "a source, or null", "null", "what evaluation measures; null: the part of `data` kept for it",
        false, [](const Json& v, Config& c) { return c.eval_data = v, v.is_null() || v.is_object(); }},
    Key{"length", "a whole number of tokens, from 1 to 2^31", "2048", "tokens per sequence (T)", true,
        [](const Json& v, Config& c) { return read_count(v, c.length, 1); }},
    Key{"batch_tokens", "a whole number of tokens, a multiple of length × accumulation, at most 2^52", "",
        "tokens per step of the optimiser", true,
        [](const Json& v, Config& c) { return read_count(v, c.batch_tokens, 1, kMostTokens); }},
    Key{"accumulation", "a whole number from 1 to 2^31", "1",
        "parts in which a batch goes through the model, one after the other; more parts, less memory", true,
        [](const Json& v, Config& c) { return read_count(v, c.accumulation, 1); }},
    Key{"steps", "a whole number from 1 to 2^31, or null", "null", "steps of the optimiser in all; this or `tokens`",
        true, [](const Json& v, Config& c) { return v.is_null() || read_count(v, c.steps, 1); }},
    Key{"tokens", "a whole number from 1 to 2^52, or null", "null",
        "tokens in all, rounded up to whole steps; this or `steps`", true,
        [](const Json& v, Config&) {
          std::int64_t ignored = 0;
          return v.is_null() || read_count(v, ignored, 1, kMostTokens);
        }},
    Key{"learning_rate", "a number, at least 0", "1e-3", "the highest learning rate", true,
        [](const Json& v, Config& c) { return read_number(v, c.learning_rate, 0, kMost); }},
    Key{"warmup", "a fraction from 0 to 1", "0.05", "the part of the steps over which the learning rate rises from 0",
        true, [](const Json& v, Config& c) { return read_number(v, c.warmup, 0, 1); }},
    Key{"final_learning_rate", "a fraction from 0 to 1", "0.1",
        "where the cosine ends, as a fraction of `learning_rate`; 1 keeps it constant", true,
        [](const Json& v, Config& c) { return read_number(v, c.final_learning_rate, 0, 1); }},
    Key{"weight_decay", "a number, at least 0", "0.1", "decoupled decay; never on norms, biases, `A_log` and `dt_bias`",
        true, [](const Json& v, Config& c) { return read_number(v, c.weight_decay, 0, kMost); }},
    Key{"betas", "two fractions, each at least 0 and below 1", "[0.9, 0.95]", "AdamW's running averages", true,
        [](const Json& v, Config& c) { return read_betas(v, c.betas); }},
    Key{"eps", "a number, at least 0", "1e-8", "AdamW's ε", true,
        [](const Json& v, Config& c) { return read_number(v, c.eps, 0, kMost); }},
    Key{"clip", "a number, at least 0", "1.0", "the longest gradient that is taken as it is; 0 clips nothing", true,
        [](const Json& v, Config& c) { return read_number(v, c.clip, 0, kMost); }},
    Key{"seed", "a whole number, at least 0 and below 2^63", "0", "decides the first weights and the order of the data",
        true,
        [](const Json& v, Config& c) {
          std::int64_t seed = 0;
          const bool right = read_count(v, seed, 0, std::numeric_limits<std::int64_t>::max());
          c.seed = static_cast<std::uint64_t>(seed);
          return right;
        }},
    Key{"dtype", "auto, float32, bfloat16 or float64", "\"auto\"",
        "what matrix products compute in; weights and optimiser stay in float32 (float64 for float64). auto: bfloat16 "
        "on "
        "CUDA, float32 on the CPU",
        true,
        [](const Json& v, Config& c) { return read_name(v, c.dtype, {"auto", "float32", "bfloat16", "float64"}); }},
    Key{"device", "auto, cpu, cuda or cuda:N", "\"auto\"", "auto: the first GPU, or the CPU where there is none", false,
        [](const Json& v, Config& c) { return read_device(v, c.device); }},
    Key{"checkpoint_activations", "true or false", "false",
        "keep only what enters each block and compute the rest again in the backward pass: less memory, about a third "
        "more time",
        false,
        [](const Json& v, Config& c) { return v.is_boolean() && (c.checkpoint_activations = v.get<bool>(), true); }},
    Key{"cuda_graph", "true or false", "false",
        "on CUDA, record the step of each shape of batch once and play it from then on: for small models, whose steps "
        "take longer to launch than to compute; not with `accumulation` or packed data",
        true, [](const Json& v, Config& c) { return v.is_boolean() && (c.cuda_graph = v.get<bool>(), true); }},
    Key{"eval_every", "a whole number from 0 to 2^31", "200",
        "steps between evaluations; the last step has one too; 0: never", false,
        [](const Json& v, Config& c) { return read_count(v, c.eval_every, 0); }},
    Key{"eval_batches", "a whole number from 1 to 2^31", "8", "batches per evaluation, the same ones every time", false,
        [](const Json& v, Config& c) { return read_count(v, c.eval_batches, 1); }},
    Key{"stop_accuracy", "a fraction from 0 to 1, or null", "null",
        "end the run once an evaluation's accuracy has reached this", false,
        [](const Json& v, Config& c) { return v.is_null() || read_number(v, c.stop_accuracy.emplace(), 0, 1); }},
    Key{"checkpoint_every", "a whole number from 0 to 2^31", "1000",
        "steps between checkpoints; 0: only after the last step and on Ctrl-C", false,
        [](const Json& v, Config& c) { return read_count(v, c.checkpoint_every, 0); }},
    Key{"keep", "a whole number from 1 to 2^31", "2", "how many checkpoints stay; the oldest goes first", false,
        [](const Json& v, Config& c) { return read_count(v, c.keep, 1); }},
    Key{"log_every", "a whole number from 1 to 2^31", "10", "steps between lines where the output is not a terminal",
        false, [](const Json& v, Config& c) { return read_count(v, c.log_every, 1); }},
    Key{"output", "a path", "",
        "the folder of the run, relative to the current folder; where left out, runs/NAME for NAME.json and "
        "runs/FOLDER-NAME for FOLDER/NAME.train.json",
        false,
        [](const Json& v, Config& c) {
          if (!v.is_string() || v.get<std::string>().empty()) return false;
          c.output = v.get<std::string>();
          return true;
        }},
};

const Key* find_key(std::string_view name) {
  const auto found = std::ranges::find(kKeys, name, &Key::name);
  return found == kKeys.end() ? nullptr : &*found;
}

const Key& key_named(std::string_view name) {
  if (const auto* key = find_key(name)) return *key;
  std::vector<std::string_view> names;
  for (const auto& key : kKeys) names.push_back(key.name);
  const auto complaint = unknown_key(name, "the training file", names);
  fail(complaint + (complaint.ends_with('?') ? "" : ";") + " `gka train --keys` lists all of them.");
}

Json read_existing(const fs::path& path, const char* what) {
  if (!fs::exists(path)) fail("there is no " + std::string(what) + " '" + path.string() + "'; check the path.");
  return models::read_json(path);
}

/// A shell leaves the ~ of `--set output=~/runs/a` as it is, and a file has no shell.
fs::path from_home(const std::string& path) {
  if (path != "~" && !path.starts_with("~/")) return path;
  const char* home = std::getenv("HOME");
  if (home == nullptr || *home == 0) fail("'" + path + "' is in the home folder, and HOME does not say where that is.");
  return fs::path(home) / path.substr(std::min<std::size_t>(2, path.size()));
}

/// The model's configuration, where a path to it (or to a folder with a config.json) was given.
void follow_model_path(Json& settings, const fs::path& base) {
  const auto model = settings.find("model");
  if (model == settings.end() || !model->is_string()) return;
  fs::path path = base / from_home(model->get<std::string>());
  if (fs::is_directory(path)) path /= "config.json";
  *model = read_existing(path, "model configuration");
}

/// From relative to `base` to absolute: a run can be resumed from any folder. An empty one is left to its reader.
void anchor_path(Json& path, const fs::path& base) {
  if (!path.is_string() || path.get<std::string>().empty()) return;
  path = fs::absolute(base / from_home(path.get<std::string>())).lexically_normal().string();
}

/// The token files named in a source, one or a list, or in the sources of a mixture.
void anchor_files(Json& source, const fs::path& base) {
  if (!source.is_object()) return;
  if (const auto parts = source.find("sources"); parts != source.end() && parts->is_array()) {
    for (auto& part : *parts) anchor_files(part, base);
  }
  if (!source.contains("files")) return;
  auto& files = source["files"];
  const auto anchor = [&](Json& entry) {
    anchor_path(entry.is_object() && entry.contains("path") ? entry["path"] : entry, base);
  };
  if (!files.is_array()) return anchor(files);
  for (auto& entry : files) anchor(entry);
}

void anchor_paths(Json& settings, const fs::path& base) {
  follow_model_path(settings, base);
  if (const auto from = settings.find("from"); from != settings.end()) anchor_path(*from, base);
  if (const auto output = settings.find("output"); output != settings.end() && output->is_string()) {
    *output = from_home(output->get<std::string>()).string();
  }
  for (const char* key : {"data", "eval_data"}) {
    if (const auto source = settings.find(key); source != settings.end()) anchor_files(*source, base);
  }
}

/// NAME for NAME.json, FOLDER-NAME for FOLDER/NAME.train.json: recipes of many sizes have the same names.
std::string name_of_run(const fs::path& file) {
  const auto name = file.stem();
  if (name.extension() != ".train") return name.string();
  return fs::absolute(file).parent_path().filename().string() + "-" + name.stem().string();
}

/// Steps in all, from `steps` or from `tokens`.
std::int64_t count_steps(const Config& config) {
  const auto& steps = config.settings.at("steps");
  const auto& tokens = config.settings.at("tokens");
  if (steps.is_null() == tokens.is_null()) {
    fail("the training file has " +
         std::string(steps.is_null() ? "neither steps nor tokens" : "both steps and tokens") +
         "; give one of them, as it says how long to train.");
  }
  if (!steps.is_null()) return config.steps;
  std::int64_t wanted = 0;
  read_count(tokens, wanted, 1, kMostTokens);
  return (wanted + config.batch_tokens - 1) / config.batch_tokens;
}

void check_batch(const Config& config) {
  const auto part = config.length * config.accumulation;
  if (config.batch_tokens % part == 0) return;
  const auto multiple = std::max<std::int64_t>(1, (config.batch_tokens + part / 2) / part) * part;
  fail("batch_tokens is " + std::to_string(config.batch_tokens) + "; it takes a multiple of length × accumulation, " +
       std::to_string(config.length) + " × " + std::to_string(config.accumulation) + " = " + std::to_string(part) +
       ", such as " + std::to_string(multiple) + ".");
}

}  // namespace

std::span<const Key> keys() { return kKeys; }

std::string describe_keys() {
  std::string text = "| key | takes | default | meaning |\n|---|---|---|---|\n";
  for (const auto& key : kKeys) {
    const auto preset = key.name == "output" ? "from the file's name" : key.preset.empty() ? "must be given" : "";
    text += "| `" + std::string(key.name) + "` | " + std::string(key.takes) + " | " +
            (*preset ? preset : "`" + std::string(key.preset) + "`") + " | " + std::string(key.meaning) + " |\n";
  }
  return text;
}

/// A model's configuration in the place of a training file, which names one.
void refuse_model(const Json& settings, const fs::path& file) {
  if (settings.contains("model") || !settings.contains("vocab_size") || !settings.contains("hidden_size")) return;
  auto recipe = file;
  recipe.replace_extension(".train.json");
  fail("'" + file.string() +
       "' is a model's configuration, and gka train takes a training file, whose \"model\" names one" +
       (fs::exists(recipe) ? ": `gka train " + recipe.string() + "`." : "; `gka train --keys` lists its keys."));
}

Json read_settings(const fs::path& path) {
  const bool is_run = fs::is_directory(path);
  const auto file = is_run ? path / "train.json" : path;
  if (is_run && !fs::exists(file)) fail("the folder '" + path.string() + "' holds no run: it has no train.json.");
  auto settings = read_existing(file, "training file");
  if (!settings.is_object()) fail("'" + file.string() + "' holds " + shown(settings) + "; it takes one JSON object.");
  refuse_model(settings, file);
  if (models::is_vision(settings) || (settings.contains("model") && models::is_vision(settings["model"]))) {
    fail("'" + file.string() + "' is of a model for images; `gka vision train` trains those.");
  }
  anchor_paths(settings, file.parent_path());
  if (is_run) settings["output"] = path.string();
  if (!settings.contains("output")) settings["output"] = (fs::path("runs") / name_of_run(file)).string();
  return settings;
}

namespace {

std::optional<std::size_t> number_of(const std::string& name) {
  std::size_t number = 0;
  const auto* end = name.data() + name.size();
  const auto read = std::from_chars(name.data(), end, number);
  return read.ec == std::errc() && read.ptr == end ? std::optional(number) : std::nullopt;
}

/// What was typed may be no UTF-8, and then it can be kept in no file.
void check_text(const Json& value, std::string_view key) {
  try {
    (void)value.dump();
  } catch (const Json::exception&) {
    fail("--set " + shown(Json(std::string(key))) + " takes UTF-8, and got other bytes.");
  }
}

}  // namespace

void assign(Json& settings, std::string_view assignment) {
  const auto equals = assignment.find('=');
  if (equals == std::string_view::npos || equals == 0) {
    fail("--set got '" + std::string(assignment) + "'; it takes key=value, such as learning_rate=1e-3.");
  }
  const auto text = assignment.substr(equals + 1);
  if (nested_too_deep(text)) fail("--set " + std::string(assignment.substr(0, equals)) + " is nested too deep.");
  auto value = parse_json_if_any(text);
  if (value.is_discarded()) value = std::string(text);
  check_text(value, assignment.substr(0, equals));

  std::string_view path = assignment.substr(0, equals);
  const auto first = path.substr(0, path.find('.'));
  key_named(first);
  Json* place = &settings;
  while (true) {
    const auto dot = path.find('.');
    const std::string name(path.substr(0, dot));
    if (const auto number = number_of(name); place->is_array() && number && *number < place->size()) {
      place = &(*place)[*number];
    } else if (place->is_object() || place->is_null()) {
      place = &(*place)[name];
    } else {
      fail("--set " + std::string(assignment.substr(0, equals)) + ": there is nothing named '" + name + "' in " +
           shown(*place) + ".");
    }
    if (dot == std::string_view::npos) break;
    path = path.substr(dot + 1);
  }
  *place = std::move(value);
  anchor_paths(settings, fs::path());
  // How long to train is one thing said in two ways: the newer one counts.
  if (first == "steps" && !settings["steps"].is_null()) settings["tokens"] = nullptr;
  if (first == "tokens" && !settings["tokens"].is_null()) settings["steps"] = nullptr;
}

Config parse(const Json& settings) {
  for (const auto& [name, value] : settings.items()) key_named(name);
  Config config;
  for (const auto& key : kKeys) {
    const auto given = settings.find(key.name);
    if (given == settings.end() && key.preset.empty()) {
      fail("the training file lacks '" + std::string(key.name) + "', which takes " + std::string(key.takes) + ".");
    }
    const Json value = given != settings.end() ? *given : Json::parse(key.preset);
    if (!key.read(value, config)) {
      fail(std::string(key.name) + " is " + shown(value) + "; it takes " + std::string(key.takes) + ".");
    }
    config.settings[std::string(key.name)] = value;
  }
  check_batch(config);
  config.steps = count_steps(config);
  return config;
}

std::optional<std::string_view> first_difference(const Json& before, const Json& now) {
  for (const auto& key : kKeys) {
    if (key.fixed && before.value(std::string(key.name), Json()) != now.value(std::string(key.name), Json())) {
      return key.name;
    }
  }
  return std::nullopt;
}

}  // namespace gka::train
