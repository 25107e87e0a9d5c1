// Sources from their JSON, and batches as tensors: the only file of this folder that knows torch.
#include "data/source.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/masked_select.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "base/fields.h"
#include "data/tasks.h"
#include "data/token_set.h"
#include "data/turns.h"

namespace gka::data {
namespace {

at::Tensor integers(std::int64_t rows, std::int64_t columns) { return at::empty({rows, columns}, at::kLong); }

std::span<std::int64_t> row_of(at::Tensor& tensor, std::int64_t row) {
  const auto width = tensor.size(1);
  return {tensor.data_ptr<std::int64_t>() + row * width, static_cast<std::size_t>(width)};
}

/// Packed batches count their tokens in 32 bits.
void check_sizes(std::int64_t batch, std::int64_t tokens, bool packed = false) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (packed && batch > kMost / std::max<std::int64_t>(1, tokens)) {
    throw std::invalid_argument("a packed batch takes at most " + std::to_string(kMost) + " tokens; asked for " +
                                std::to_string(batch) + " times " + std::to_string(tokens));
  }
  if (batch < 1 || tokens < 1) {
    throw std::invalid_argument("a batch needs at least one sequence of one token; asked for " + std::to_string(batch) +
                                " of " + std::to_string(tokens));
  }
}

std::string with_unit(std::int64_t number) {
  constexpr std::array<std::pair<double, const char*>, 3> kUnits{{{1e9, "G"}, {1e6, "M"}, {1e3, "k"}}};
  for (const auto& [size, unit] : kUnits) {
    if (static_cast<double>(number) < 10 * size) continue;
    return std::to_string(std::llround(static_cast<double>(number) / size)) + unit;
  }
  return std::to_string(number);
}

class TokenSource final : public Source {
 public:
  TokenSource(const TokenSetOptions& options, bool packed) : set_(options), part_(options.part), packed_(packed) {}

  Batch next(std::int64_t batch, std::int64_t tokens) override {
    check_sizes(batch, tokens, packed_);
    auto inputs = integers(batch, tokens), targets = integers(batch, tokens);
    std::vector<std::int32_t> bounds{0};
    for (std::int64_t row = 0; row < batch; ++row) {
      const auto wanted = row_of(targets, row);
      const auto starts = set_.fill(position_ + row, row_of(inputs, row), wanted);
      if (!packed_) continue;
      for (const auto start : starts) {
        wanted[static_cast<std::size_t>(start - 1)] = kIgnoredLabel;  // the next document cannot be foreseen
        if (start < tokens) bounds.push_back(static_cast<std::int32_t>(row * tokens + start));
      }
      bounds.push_back(static_cast<std::int32_t>((row + 1) * tokens));
    }
    position_ += batch;
    if (!packed_) return {inputs, targets, {}};
    const auto cu_seqlens = at::empty({static_cast<std::int64_t>(bounds.size())}, at::kInt);
    std::ranges::copy(bounds, cu_seqlens.data_ptr<std::int32_t>());
    return {inputs.view({1, -1}), targets.view({1, -1}), cu_seqlens};
  }

  std::int64_t position() const override { return position_; }
  void seek(std::int64_t position) override { position_ = position; }
  std::int64_t epoch(std::int64_t tokens) const override { return set_.windows(tokens); }
  std::int64_t vocab_size() const override { return set_.vocab_size(); }
  std::int64_t longest(std::int64_t tokens) const override {
    if (part_ == Part::train) set_.check_length(tokens);  // of the other part evaluation may never ask for every file
    return tokens;
  }
  std::string describe() const override {
    return "tokens: " + std::to_string(set_.files()) + (set_.files() == 1 ? " file, " : " files, ") +
           with_unit(set_.tokens()) + " tokens, " + with_unit(set_.documents()) + " documents" +
           (packed_ ? ", packed" : "") + (part_ == Part::train ? " (train split)" : " (eval split)");
  }

 private:
  TokenSet set_;
  Part part_;
  bool packed_;
  std::int64_t position_ = 0;
};

class TaskSource final : public Source {
 public:
  explicit TaskSource(TaskStream stream) : stream_(std::move(stream)) {}

  Batch next(std::int64_t batch, std::int64_t /*tokens*/) override {
    check_sizes(batch, 1);
    const auto length = stream_.fill(position_, batch, inputs_, targets_);
    Batch made{integers(batch, length), integers(batch, length), {}};
    std::ranges::copy(inputs_, made.inputs.data_ptr<std::int64_t>());
    std::ranges::copy(targets_, made.targets.data_ptr<std::int64_t>());
    position_ += batch;
    return made;
  }

  std::int64_t position() const override { return position_; }
  void seek(std::int64_t position) override { position_ = position; }
  std::int64_t epoch(std::int64_t /*tokens*/) const override { return stream_.epoch(); }
  std::int64_t vocab_size() const override { return stream_.vocab_size(); }
  std::int64_t longest(std::int64_t /*tokens*/) const override { return stream_.longest(); }
  std::string describe() const override { return stream_.describe(); }

 private:
  TaskStream stream_;
  std::vector<std::int64_t> inputs_, targets_;
  std::int64_t position_ = 0;
};

/// Each batch is of one source: those of tasks have lengths of their own.
class MixtureSource final : public Source {
 public:
  struct Part {
    double weight = 1;
    std::unique_ptr<Source> source{};
  };
  MixtureSource(std::vector<Part> parts, std::uint64_t seed) : parts_(std::move(parts)) {
    std::vector<double> weights;
    for (const auto& part : parts_) weights.push_back(part.weight);
    turns_ = Turns(weights, mix({seed, 5}));
  }

  Batch next(std::int64_t batch, std::int64_t tokens) override {
    check_sizes(batch, tokens);
    const auto [part, number] = turns_(position_ / batch);
    auto& source = *parts_[part].source;
    source.seek(number * batch);
    position_ += batch;
    return source.next(batch, tokens);
  }

  std::int64_t position() const override { return position_; }
  void seek(std::int64_t position) override { position_ = position; }
  std::int64_t epoch(std::int64_t tokens) const override {
    std::int64_t all = 0;
    for (const auto& part : parts_) {
      const auto own = part.source->epoch(tokens);
      if (own == 0) return 0;
      all += own;
    }
    return all;
  }
  std::int64_t vocab_size() const override {
    return most([](const Source& source) { return source.vocab_size(); });
  }
  std::int64_t longest(std::int64_t tokens) const override {
    return most([&](const Source& source) { return source.longest(tokens); });
  }
  std::string describe() const override {
    double sum = 0;
    for (const auto& part : parts_) sum += part.weight;
    std::string text = "mixture:";
    for (const auto& part : parts_) {
      const auto percent = std::llround(100 * part.weight / sum);
      text += (&part == parts_.data() ? " " : "; ") + std::to_string(percent) + "% " + part.source->describe();
    }
    return text;
  }

 private:
  template <typename Number>
  std::int64_t most(Number&& number) const {
    std::int64_t found = 0;
    for (const auto& part : parts_) found = std::max(found, number(*part.source));
    return found;
  }

  std::vector<Part> parts_;
  Turns turns_;
  std::int64_t position_ = 0;
};

// ---- From JSON

/// A value that is read later.
struct Raw {
  Json value{};
};
bool read(const Json& json, Raw& raw) {
  raw.value = json;
  return true;
}
std::string kind(const Raw&) { return "any value"; }

void refuse(const std::string& /*key*/, const std::string& complaint) {
  throw std::runtime_error("data: " + complaint);
}

/// A path, or an object with one.
struct FileEntry {
  TokenSetFile file{};
};
bool read(const Json& json, FileEntry& entry) {
  if (json.is_string()) {
    entry.file = {.path = json.get<std::string>()};
    return true;
  }
  if (!json.is_object()) return false;
  entry.file.weight = 1;
  read_fields(json, "an entry of files", refuse, [&](auto&& visit) {
    visit("path", entry.file.path);
    visit("weight", entry.file.weight);
  });
  return true;
}

/// Several of them, or one by itself.
struct FileList {
  std::vector<FileEntry> entries{};
};
bool read(const Json& json, FileList& list) {
  if (!json.is_array()) return read(json, list.entries.emplace_back());
  for (const auto& entry : json) {
    if (!read(entry, list.entries.emplace_back())) return false;
  }
  return true;
}
std::string kind(const FileList&) { return "paths, or objects with path and weight: one or a list"; }

std::unique_ptr<Source> open_tokens(const Json& config, Split split, Verify verify) {
  const bool train = split == Split::train;
  TokenSetOptions options{.part = train ? Part::train : Part::eval, .shuffle = train, .verify = verify == Verify::yes};
  Raw kind_of_source;
  FileList files;
  bool packed = false;
  std::int64_t seed = 0;
  read_fields(config, "a source of kind \"tokens\"", refuse, [&](auto&& visit) {
    visit("kind", kind_of_source);
    visit("files", files);
    visit("seed", seed);
    visit("packed", packed);
    visit("eval_fraction", options.eval_fraction);
    visit("shuffle", options.shuffle);
  });
  for (const auto& entry : files.entries) options.files.push_back(entry.file);
  options.seed = static_cast<std::uint64_t>(seed);
  return std::make_unique<TokenSource>(options, packed);
}

/// Visits the options that the task reads.
template <typename Visit>
void visit_options(const Task& task, TaskOptions& options, Visit&& visit) {
  TaskOptions::fields(options, [&](std::string_view name, auto& field) {
    if (task.reads(name)) visit(name, field);
  });
}

TaskSize read_size(const Json& json, const Task& task, TaskSize size) {
  read_fields(json, "a size of task " + std::string(task.name), refuse, [&](auto&& visit) {
    visit_options(task, size.options, visit);
    visit("weight", size.weight);
    visit("examples", size.examples);
  });
  return size;
}

std::unique_ptr<Source> open_task(const Json& config, Split split, Verify /*verify*/) {
  if (!config.contains("task") || !config["task"].is_string()) {
    throw std::runtime_error("data: a source of kind \"task\" needs task, the task's name");
  }
  const auto& task = find_task(config["task"].get<std::string>());
  Raw kind_of_source, name;
  std::int64_t seed = 0;
  TaskSize common{.options = task.defaults};
  std::vector<Raw> entries;
  read_fields(config, "task " + std::string(task.name), refuse, [&](auto&& visit) {
    visit("kind", kind_of_source);
    visit("task", name);
    visit("seed", seed);
    visit("examples", common.examples);
    visit("sizes", entries);
    visit_options(task, common.options, visit);
  });
  std::vector<TaskSize> sizes;
  for (const auto& entry : entries) sizes.push_back(read_size(entry.value, task, common));
  if (!config.contains("sizes")) sizes.push_back(common);
  const auto stream = static_cast<std::uint64_t>(split);
  return std::make_unique<TaskSource>(
      TaskStream(task, std::move(sizes), mix({static_cast<std::uint64_t>(seed), stream})));
}

/// A source with a weight beside its own keys; it has the mixture's seed unless it gives one.
MixtureSource::Part open_part(Json config, std::int64_t seed, Split split, Verify verify) {
  MixtureSource::Part part;
  if (!config.is_object()) throw std::runtime_error("data: an entry of sources is an object, and is " + shown(config));
  if (const auto weight = config.find("weight"); weight != config.end()) {
    if (!json::read(*weight, part.weight) || !(part.weight > 0) || std::isinf(part.weight)) {
      throw std::runtime_error("data: weight of a source takes a number above 0, and is " + shown(*weight));
    }
    config.erase("weight");
  }
  if (!config.contains("seed")) config["seed"] = seed;
  part.source = open_source(config, split, verify);
  return part;
}

std::unique_ptr<Source> open_mixture(const Json& config, Split split, Verify verify) {
  Raw kind_of_source;
  std::int64_t seed = 0;
  std::vector<Raw> entries;
  read_fields(config, "a source of kind \"mixture\"", refuse, [&](auto&& visit) {
    visit("kind", kind_of_source);
    visit("seed", seed);
    visit("sources", entries);
  });
  if (entries.empty()) throw std::runtime_error("data: a mixture needs at least one source; sources is empty.");
  std::vector<MixtureSource::Part> parts;
  for (const auto& entry : entries) parts.push_back(open_part(entry.value, seed, split, verify));
  return std::make_unique<MixtureSource>(std::move(parts), static_cast<std::uint64_t>(seed));
}

using Open = std::unique_ptr<Source> (*)(const Json& config, Split split, Verify verify);
constexpr std::array<std::pair<std::string_view, Open>, 3> kKinds{
    {{"tokens", open_tokens}, {"task", open_task}, {"mixture", open_mixture}}};

}  // namespace

std::unique_ptr<Source> open_source(const Json& config, Split split, Verify verify) {
  if (!config.is_object() || !config.contains("kind")) {
    throw std::runtime_error("data: a source is an object with a kind, \"tokens\", \"task\" or \"mixture\".");
  }
  for (const auto& [name, open] : kKinds) {
    if (config["kind"] == name) return open(config, split, verify);
  }
  throw std::runtime_error("data: kind takes \"tokens\", \"task\" or \"mixture\", and is " + shown(config["kind"]));
}

Accuracy accuracy(const at::Tensor& predicted, const at::Tensor& targets) {
  const auto wanted = targets.to(at::kCPU, at::kLong).contiguous();
  auto guesses = predicted.to(at::kCPU, at::kLong).contiguous();
  if (guesses.sizes() == wanted.sizes()) guesses = guesses.masked_select(wanted.ne(kIgnoredLabel));
  const auto span_of = [](const at::Tensor& tensor) {
    return std::span<const std::int64_t>(tensor.const_data_ptr<std::int64_t>(),
                                         static_cast<std::size_t>(tensor.numel()));
  };
  return score(span_of(wanted), wanted.dim() > 0 ? wanted.size(-1) : 1, span_of(guesses));
}

}  // namespace gka::data
