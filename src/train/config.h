// The training file: which keys there are, what each takes and what it means.
//
// One table drives reading, `gka train --keys`, the table in docs/training.md and what `--resume` may change.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/fields.h"

namespace gka::train {

struct Config {
  Json model;                  // the configuration itself; a path in the file has been followed
  Json data;                   // what data::open_source takes
  Json eval_data;              // null: the evaluation split of `data`
  std::filesystem::path from;  // empty: weights are drawn
  std::int64_t length = 0;
  std::int64_t batch_tokens = 0;
  std::int64_t accumulation = 0;
  std::int64_t steps = 0;  // in all; worked out from `tokens` where those were given
  double learning_rate = 0, warmup = 0, final_learning_rate = 0;
  double weight_decay = 0, eps = 0, clip = 0;
  std::array<double, 2> betas{};
  std::uint64_t seed = 0;
  std::string dtype, device;
  bool checkpoint_activations = false;
  bool cuda_graph = false;
  std::int64_t eval_every = 0, eval_batches = 0, checkpoint_every = 0, keep = 0, log_every = 0;
  std::optional<double> stop_accuracy;
  std::filesystem::path output;
  Json settings;       // every key as it was read: what a run keeps and what --resume compares
  bool verify = true;  // token files against their checksums; `--no-verify` is of a call, not of a run

  /// Sequences that go through the model at once.
  std::int64_t micro_batch() const { return batch_tokens / (length * accumulation); }
};

struct Key {
  std::string_view name;
  std::string_view takes;
  std::string_view preset;  // JSON; empty where the key must be given
  std::string_view meaning;
  bool fixed;  // a resumed run must have the same value, or it would not be the same run
  bool (*read)(const Json& value, Config& config);  // false: not what the key takes
};

std::span<const Key> keys();

/// The table of keys for people: Markdown, as in docs/training.md.
std::string describe_keys();

/// The settings in a training file, or in the folder of a run. Paths in it become relative to nothing.
Json read_settings(const std::filesystem::path& path);

/// One `--set`: "learning_rate=1e-3", "model.hidden_size=64". What is no JSON is text.
void assign(Json& settings, std::string_view assignment);

/// Fills in what was left out and checks everything; errors name the key, what it got and what it takes.
Config parse(const Json& settings);

/// The first key in which a resumed run differs from the one it would continue, or nothing.
std::optional<std::string_view> first_difference(const Json& before, const Json& now);

}  // namespace gka::train
