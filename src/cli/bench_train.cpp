// `gka bench train`: tokens per second of whole training steps, forward, backward, clipping and AdamW, by the very code
// that `gka train` runs.
//
// Models take turns at every length, so that a machine that slows down slows all of them alike: a turn is one step that
// is not counted (memory comes back, caches fill) and a few that are. Tokens are drawn at random, or come from text on
// which the models have learned for a while: how much work GKA's solve is depends on the keys, and those on the text.
#include <ATen/ops/randint.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/bench.h"
#include "cli/numbers.h"
#include "cli/progress.h"
#include "cli/table.h"
#include "layers/mixers.h"
#include "models/config.h"
#include "train/learner.h"
#include "train/text.h"

namespace gka::cli {
namespace {

namespace fs = std::filesystem;
using train::print;

constexpr std::int64_t kStepsPerTurn = 3;
/// Small: random tokens have nothing to teach, and weights must stay where they are ordinary.
constexpr double kLearningRate = 1e-5;
/// On text: that of configs/440m, to which it rises while the models learn.
constexpr double kTextRate = 1e-3;

constexpr const char* kExplained =
    "Measures what `gka train` does in a step: forward, backward, clipping, AdamW. Models take turns at each length, "
    "all\n"
    "with the same tokens per step, on random tokens or, after some steps of learning, on text; the median step "
    "counts.\n"
    "Columns:\n"
    "  tokens/s     tokens per second\n"
    "  × attention  tokens/s over those of the model of --against, from neighbouring turns\n"
    "  MFU          model FLOPs utilisation: tokens/s × FLOP per token, over the rate of a large matrix product of "
    "the\n"
    "               same type, measured in the same run. Per token these are 6 per parameter (all but an untied\n"
    "               embedding) and what the definition of the memory asks for: attention sees half the sequence on\n"
    "               average, GKA solves once forward and once backward\n"
    "  memory       the most in use during a step: weights, optimiser, gradients, activations; of the process on a "
    "CPU\n"
    "  kernel       which of torch's attention kernels was faster, or was asked for\n"
    "\n"
    "Examples:\n"
    "  gka bench train configs/440m/gka.json                     against configs/440m/attention.json\n"
    "  gka bench train configs/440m/{gka,gdn,mamba2}.json --lengths 4k,64k --json > speed.json\n"
    "  gka bench train configs/440m/gka.json --text wikipedia.tokens --after 100\n"
    "  gka bench train configs/tiny/gka.json --lengths 64,256 --device cpu";

struct Arguments {
  std::vector<std::string> configs, text;
  std::string against;
  std::string lengths = "4096,16384,65536";
  std::int64_t batch_tokens = 0, accumulation = 1, steps = 12, after = 0;
  std::string attention = "auto";
  bool recompute = false, json = false, json_lines = false;
  Place place;
};

std::string name_of_config(const fs::path& path) {
  auto name = path.stem();
  if (name.extension() == ".train") name = name.stem();
  const auto folder = fs::absolute(path).lexically_normal().parent_path().filename();
  return folder.empty() ? name.string() : (folder / name).string();
}

/// A model's file or a training file; of the latter what decides how a step is computed.
train::Config read_config(const fs::path& path, const Arguments& arguments) {
  if (!fs::exists(path)) throw std::runtime_error("there is no configuration '" + path.string() + "'; check the path.");
  auto settings = models::read_json(path);
  settings = settings.contains("model") ? train::read_settings(path) : Json{{"model", settings}};
  for (const char* key : {"eval_data", "from", "tokens", "stop_accuracy"}) settings.erase(key);
  settings["data"] = Json::object();
  settings["length"] = settings["batch_tokens"] = settings["steps"] = settings["accumulation"] = 1;
  settings["output"] = "none";
  settings["checkpoint_activations"] = arguments.recompute;
  settings["device"] = arguments.place.device;
  settings["dtype"] = arguments.place.dtype;
  return train::parse(settings);
}

/// The model to compare with: what was asked for, else the attention model beside the first one.
std::optional<fs::path> find_rival(const Arguments& arguments) {
  if (arguments.against == "none") return std::nullopt;
  if (!arguments.against.empty()) return arguments.against;
  const auto beside = fs::path(arguments.configs.front()).parent_path() / "attention.json";
  return fs::exists(beside) ? std::optional(beside) : std::nullopt;
}

/// nullptr without text.
std::unique_ptr<data::Source> open_text(const Arguments& arguments) {
  if (arguments.text.empty()) return nullptr;
  return data::open_source(Json{{"kind", "tokens"}, {"files", arguments.text}});
}

class Contestant {
 public:
  Contestant(const fs::path& path, const Arguments& arguments)
      : name_(name_of_config(path)),
        config_(read_config(path, arguments)),
        compute_(choose_compute(arguments.place)),
        text_(open_text(arguments)),
        rate_(text_ ? kTextRate : kLearningRate) {
    const auto before = train::memory_now(compute_.device);
    learner_ = std::make_unique<train::Learner>(config_, compute_, /*source=*/compute_.device);
    own_bytes_ = train::memory_now(compute_.device) - before;
    if (text_ && text_->vocab_size() > model().vocab_size) {
      throw std::runtime_error("--text has " + std::to_string(text_->vocab_size()) + " kinds of tokens and " + name_ +
                               " knows " + std::to_string(model().vocab_size) + "; tokenise it for this model.");
    }
  }

  const std::string& name() const { return name_; }
  const models::ModelConfig& model() const { return learner_->decoder().config(); }

  bool has_attention() const {
    return std::ranges::any_of(model().layer_types, [](const auto& type) { return type == "*" || type == "SWA"; });
  }

  double flops_per_token(std::int64_t length) const {
    const auto& config = model();
    auto parameters = learner_->decoder().parameters().count();
    if (!config.tie_word_embeddings) parameters -= config.vocab_size * config.mixer.hidden_size;
    double flops = 6 * static_cast<double>(parameters);
    for (const auto& type : config.layer_types) flops += layers::mixing_flops(type, config.mixer, length);
    return flops;
  }

  /// The tokens of a step.
  std::vector<data::Batch> draw(std::int64_t length, const Arguments& arguments) const {
    const auto rows = arguments.batch_tokens / (length * arguments.accumulation);
    std::vector<data::Batch> parts;
    for (std::int64_t i = 0; i < arguments.accumulation; ++i) {
      if (text_) {
        parts.push_back(text_->next(rows, length));
        continue;
      }
      const auto tokens = at::randint(model().vocab_size, {rows, length + 1}, at::kLong);
      parts.push_back({.inputs = tokens.narrow(1, 0, length).contiguous(),
                       .targets = tokens.narrow(1, 1, length).contiguous(),
                       .cu_seqlens = {}});
    }
    return parts;
  }

  /// One step as `gka train` takes it: ends when loss and gradient length are on the host.
  double step(const std::vector<data::Batch>& parts) {
    const auto seconds = seconds_of(compute_.device, [&] {
      const auto mean = learner_->backward(parts);
      loss_ = learner_->update(mean, rate_).cpu()[0].item<double>();
    });
    if (!std::isfinite(loss_)) throw std::runtime_error("the loss is not finite");
    return seconds;
  }

  /// Steps that nobody times, with a rate that rises to that of the others.
  void learn(std::int64_t length, const Arguments& arguments, const std::function<void(std::int64_t)>& progress) {
    for (std::int64_t i = 1; i <= arguments.after; ++i) {
      progress(i);
      rate_ = kTextRate * static_cast<double>(i) / static_cast<double>(arguments.after);
      step(draw(length, arguments));
    }
    end_turn();
  }
  bool has_text() const { return text_ != nullptr; }
  double loss() const { return loss_; }

  /// A turn begins without anybody's left-overs.
  void begin_turn() {
    train::reset_memory(compute_.device);
    held_bytes_ = train::memory_now(compute_.device);
  }
  void end_turn() { learner_->optimiser().zero_gradients(); }

  /// The most since the turn began that is this model's: on a GPU without what the others keep there.
  double memory() const {
    const auto most = train::memory_in_use(compute_.device);
    return compute_.device.is_cpu() ? most : most - held_bytes_ + own_bytes_;
  }

 private:
  std::string name_;
  train::Config config_;
  train::Compute compute_;
  std::unique_ptr<data::Source> text_;  // none: random tokens
  std::unique_ptr<train::Learner> learner_;
  double rate_, loss_ = 0, own_bytes_ = 0, held_bytes_ = 0;
};

struct Measured {
  std::string name, kernel, failure;
  std::int64_t length = 0;
  double seconds = 0, memory = 0, flops_per_token = 0, ratio = 0;  // ratio: 0 where there is nothing to compare with
  std::optional<double> loss{};                                    // on text, of the last step
};

/// One model at one length.
class Entry {
 public:
  Entry(Contestant& contestant, std::int64_t length, const Arguments& arguments)
      : contestant_(contestant), length_(length), arguments_(arguments), parts_(contestant.draw(length, arguments)) {}

  void warm_up(at::Device device) {
    attempt([&] {
      if (contestant_.has_attention()) {
        kernel_ = choose_attention(arguments_.attention, device, [&] { return contestant_.step(parts_); });
      }
      contestant_.step(parts_);
    });
  }

  void turn() {
    attempt([&] {
      if (kernel_) prefer(*kernel_);
      contestant_.step(parts_);
      std::vector<double> seconds;
      for (std::int64_t i = 0; i < kStepsPerTurn; ++i) {
        if (contestant_.has_text()) parts_ = contestant_.draw(length_, arguments_);
        seconds.push_back(contestant_.step(parts_));
      }
      turns_.push_back(median(seconds));
      all_.insert(all_.end(), seconds.begin(), seconds.end());
      loss_ = contestant_.loss();
    });
  }

  Measured result(const Entry* rival) const {
    Measured measured{.name = contestant_.name(),
                      .kernel = kernel_ ? kernel_->name : "",
                      .failure = failure_,
                      .length = length_,
                      .seconds = failure_.empty() ? median(all_) : 0,
                      .memory = memory_,
                      .flops_per_token = contestant_.flops_per_token(length_)};
    if (contestant_.has_text()) measured.loss = loss_;
    if (rival != nullptr && failure_.empty() && rival->failure_.empty()) {
      std::vector<double> ratios;
      for (std::size_t i = 0; i < turns_.size(); ++i) ratios.push_back(rival->turns_[i] / turns_[i]);
      measured.ratio = median(ratios);
    }
    return measured;
  }

 private:
  /// What goes wrong at one length is said in its row; the others go on.
  void attempt(const std::function<void()>& work) {
    if (!failure_.empty()) return;
    contestant_.begin_turn();
    try {
      work();
      memory_ = std::max(memory_, contestant_.memory());
    } catch (const c10::Error& error) {
      failure_ = error.what_without_backtrace();
    } catch (const std::exception& error) {
      failure_ = error.what();
    }
    contestant_.end_turn();
    failure_ = is_out_of_memory(failure_) ? "out of memory" : failure_.substr(0, failure_.find('\n'));
  }

  Contestant& contestant_;
  std::int64_t length_;
  const Arguments& arguments_;
  std::vector<data::Batch> parts_;
  std::optional<AttentionKernel> kernel_;
  std::vector<double> turns_, all_;
  double memory_ = 0, loss_ = 0;
  std::string failure_;
};

void check(Arguments& arguments, const std::vector<std::int64_t>& lengths) {
  if (arguments.after > 0 && arguments.text.empty()) {
    throw std::runtime_error("--after is " + std::to_string(arguments.after) +
                             " steps of learning, and there is no --text to learn from; give token files.");
  }
  if (arguments.batch_tokens == 0) arguments.batch_tokens = lengths.back() * arguments.accumulation;
  for (const auto length : lengths) {
    if (arguments.batch_tokens % (length * arguments.accumulation) == 0) continue;
    throw std::runtime_error("--batch-tokens is " + std::to_string(arguments.batch_tokens) +
                             "; it takes a multiple of every length × --accumulation, and " + std::to_string(length) +
                             " × " + std::to_string(arguments.accumulation) + " is one it is not.");
  }
}

struct Report {
  std::string machine;
  train::Compute compute;
  std::int64_t batch_tokens, after;
  std::vector<std::string> text;  // names of the files; none: random tokens
  double matrix_rate;
  std::vector<Measured> rows;

  double tokens_per_second(const Measured& row) const { return static_cast<double>(batch_tokens) / row.seconds; }
  double utilisation(const Measured& row) const { return tokens_per_second(row) * row.flops_per_token / matrix_rate; }
};

Json row_as_json(const Report& report, const Measured& row) {
  Json entry{{"config", row.name},
             {"length", row.length},
             {"sequences", report.batch_tokens / row.length},
             {"flops_per_token", row.flops_per_token}};
  if (!row.kernel.empty()) entry["attention_kernel"] = row.kernel;
  if (!row.failure.empty()) {
    entry["error"] = row.failure;
    return entry;
  }
  entry["tokens_per_second"] = report.tokens_per_second(row);
  entry["seconds_per_step"] = row.seconds;
  entry["utilisation"] = report.utilisation(row);
  entry["memory_bytes"] = row.memory;
  if (row.ratio > 0) entry["ratio"] = row.ratio;
  if (row.loss) entry["loss"] = *row.loss;
  return entry;
}

/// What all rows have in common.
Json setting_as_json(const Report& report) {
  return {{"machine", report.machine},
          {"date", today()},
          {"device", report.compute.device.str()},
          {"dtype", name_of(report.compute.activations)},
          {"batch_tokens", report.batch_tokens},
          {"text", report.text},
          {"after", report.after},
          {"matrix_product_flops", report.matrix_rate}};
}

Json as_json(const Report& report) {
  auto told = setting_as_json(report);
  auto& rows = told["rows"] = Json::array();
  for (const auto& row : report.rows) rows.push_back(row_as_json(report, row));
  return told;
}

void print_table(const Report& report) {
  std::vector<Row> rows{{"model", "T", "tokens/s", "ms/step", "× attention", "MFU", "memory", "kernel"}};
  for (const auto& row : report.rows) {
    if (!row.failure.empty()) {
      rows.push_back({row.name, grouped(row.length), row.failure});
      continue;
    }
    rows.push_back({row.name, grouped(row.length), grouped(std::llround(report.tokens_per_second(row))),
                    print("%.1f", 1e3 * row.seconds), row.ratio > 0 ? print("%.2f", row.ratio) : "",
                    print("%.1f%%", 100 * report.utilisation(row)), train::short_bytes(row.memory), row.kernel});
  }
  std::cout << layout(rows, {false, true, true, true, true, true, true, false}) << "\n"
            << report.machine << "; " << name_of(report.compute.activations) << ", " << grouped(report.batch_tokens)
            << " tokens per step; a matrix product runs at " << print("%.3g", 1e-12 * report.matrix_rate)
            << " TFLOP/s.\n";
}

int run(Arguments arguments) {
  const auto lengths = parse_lengths(arguments.lengths);
  check(arguments, lengths);
  const auto compute = choose_compute(arguments.place);
  const train::Determinism determinism(compute.device);

  std::vector<std::unique_ptr<Contestant>> contestants;
  for (const auto& config : arguments.configs) contestants.push_back(std::make_unique<Contestant>(config, arguments));
  std::optional<std::size_t> rival;
  if (const auto path = find_rival(arguments)) {
    const auto same = [&](const auto& other) { return other->name() == name_of_config(*path); };
    rival = static_cast<std::size_t>(std::ranges::find_if(contestants, same) - contestants.begin());
    if (*rival == contestants.size()) contestants.push_back(std::make_unique<Contestant>(*path, arguments));
  }

  LiveLine line;
  Report report{.machine = describe_machine(compute.device),
                .compute = compute,
                .batch_tokens = arguments.batch_tokens,
                .after = arguments.after,
                .text = {},
                .matrix_rate = matrix_rate(compute.device, compute.activations),
                .rows = {}};
  for (const auto& file : arguments.text) report.text.push_back(fs::path(file).filename().string());
  for (const auto& contestant : contestants) {
    contestant->learn(lengths.front(), arguments, [&](std::int64_t step) {
      line.show([&] {
        return contestant->name() + " learns: step " + std::to_string(step) + " of " + std::to_string(arguments.after);
      });
    });
  }
  const auto turns = std::max<std::int64_t>(1, (arguments.steps + kStepsPerTurn - 1) / kStepsPerTurn);
  for (const auto length : lengths) {
    std::vector<Entry> entries;
    for (const auto& contestant : contestants) entries.emplace_back(*contestant, length, arguments);
    for (auto& entry : entries) entry.warm_up(compute.device);
    for (std::int64_t turn = 0; turn < turns; ++turn) {
      for (std::size_t i = 0; i < entries.size(); ++i) {
        line.show([&] {
          return "T = " + grouped(length) + ", turn " + std::to_string(turn + 1) + " of " + std::to_string(turns) +
                 ": " + contestants[i]->name();
        });
        entries[i].turn();
      }
    }
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const bool compare = rival && *rival != i;
      report.rows.push_back(entries[i].result(compare ? &entries[*rival] : nullptr));
      const auto& row = report.rows.back();
      line.clear();
      std::cerr << row.name << ", T = " << grouped(length) << ": "
                << (row.failure.empty() ? grouped(std::llround(report.tokens_per_second(row))) + " tokens/s"
                                        : row.failure)
                << "\n";
      if (arguments.json_lines) print_line(setting_as_json(report), row_as_json(report, row));
    }
  }
  if (arguments.json_lines) return 0;
  report.matrix_rate = std::max(report.matrix_rate, matrix_rate(compute.device, compute.activations));
  if (arguments.json) {
    std::cout << as_json(report).dump(2) << "\n";
  } else {
    print_table(report);
  }
  return 0;
}

}  // namespace

Action declare_bench_train(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  app.add_option("configs", arguments->configs, "Models (config.json) or training files")
      ->required()
      ->type_name("CONFIG");
  app.add_option("--against", arguments->against,
                 "The model to compare with, or none (default: attention.json beside the first CONFIG)")
      ->type_name("CONFIG");
  app.add_option("--lengths", arguments->lengths, "Tokens per sequence, separated by commas; 4k is 4096")
      ->capture_default_str();
  app.add_option("--batch-tokens", arguments->batch_tokens,
                 "Tokens per step, the same at every length (default: the longest length)")
      ->type_name("N")
      ->check(positive_number());
  app.add_option("--accumulation", arguments->accumulation, "How many parts a step's tokens are split into")
      ->type_name("N")
      ->check(positive_number())
      ->capture_default_str();
  app.add_option("--steps", arguments->steps, "Measured steps per model and length")
      ->type_name("N")
      ->check(positive_number())
      ->capture_default_str();
  app.add_option("--text", arguments->text, "Token files (`gka tokenize`) instead of random tokens")->type_name("FILE");
  app.add_option("--after", arguments->after, "Training steps on that text before timing begins, at the first length")
      ->type_name("N")
      ->check(non_negative_number())
      ->capture_default_str();
  app.add_flag("--checkpoint-activations", arguments->recompute,
               "Recompute blocks in the backward pass, which takes less memory");
  app.add_option("--attention", arguments->attention,
                 "torch's attention kernel on a GPU: cuDNN, flash, or auto: whichever is faster, tried with five steps "
                 "at every length")
      ->check(CLI::IsMember({"auto", "cuDNN", "flash"}))
      ->capture_default_str();
  add_place(app, arguments->place);
  auto* json = app.add_flag("--json", arguments->json, "Print JSON");
  app.add_flag("--json-lines", arguments->json_lines, "Print every row as a line of JSON as soon as it is measured")
      ->excludes(json);
  app.footer(kExplained);
  return [arguments] { return run(*arguments); };
}

}  // namespace gka::cli
