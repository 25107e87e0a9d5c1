// `gka bench layer`: forward and backward of one layer of each kind, projections and all, against the length.
//
// Layers take turns at every length; the median counts. Gated DeltaNet has values twice as wide as its keys, so that
// its memory is as large as GKA's two.
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>

#include <CLI/CLI.hpp>
#include <algorithm>
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
#include "train/text.h"

namespace gka::cli {
namespace {

struct Arguments {
  std::string layers = "*,DN,GDN,GKA";
  std::string lengths = "1k,2k,4k,8k,16k,32k,64k";
  std::int64_t batch = 4, heads = 8, head_dim = 128, repetitions = 20;
  bool json = false, json_lines = false;
  Place place;
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find(',', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

layers::MixerConfig config_of(const Arguments& arguments) {
  return {.hidden_size = arguments.heads * arguments.head_dim,
          .num_attention_heads = arguments.heads,
          .num_key_value_heads = arguments.heads,
          .head_dim = arguments.head_dim,
          .sliding_window = 2048};
}

/// A layer, and its times at one length after another.
class Contestant {
 public:
  Contestant(const std::string& token, const Arguments& arguments, const train::Compute& compute)
      : compute_(compute),
        kind_(layers::mixer_kind(token)),
        parameters_({.device = compute.device,
                     .dtype = compute.activations,
                     .generator = at::globalContext().defaultGenerator(at::kCPU),
                     .requires_grad = true}),
        mixer_(kind_.make(config_of(arguments), layers::Scope(parameters_))) {}

  const layers::MixerKind& kind() const { return kind_; }

  void begin(const at::Tensor& x, const at::Tensor& slope) {
    times_.clear();
    failure_.clear();
    kernel_.reset();
    attempt([&] {
      if (kind_.prefix == "self_attn") {
        kernel_ = fastest_attention(compute_.device, [&] { return seconds(x, slope); });
      }
      for (int i = 0; i < 2; ++i) seconds(x, slope);
    });
  }

  void turn(const at::Tensor& x, const at::Tensor& slope) {
    attempt([&] {
      if (kernel_) prefer(*kernel_);
      times_.push_back(seconds(x, slope));
    });
  }

  std::optional<double> milliseconds() const {
    return failure_.empty() ? std::optional(1e3 * median(times_)) : std::nullopt;
  }
  const std::string& failure() const { return failure_; }
  const char* kernel() const { return kernel_ ? kernel_->name : ""; }

 private:
  double seconds(const at::Tensor& x, const at::Tensor& slope) {
    const auto input = x.detach().requires_grad_();
    const auto sequences = layers::Sequences::rows(x.size(0), x.size(1), compute_.device);
    const auto time = seconds_of(compute_.device, [&] { mixer_->forward(input, sequences).y.backward(slope); });
    for (const auto& parameter : parameters_.all()) parameter.value.mutable_grad() = at::Tensor();
    return time;
  }

  void attempt(const std::function<void()>& work) {
    if (!failure_.empty()) return;
    try {
      work();
    } catch (const c10::Error& error) {
      failure_ = error.what_without_backtrace();
    } catch (const std::exception& error) {
      failure_ = error.what();
    }
    if (failure_.empty()) return;
    train::reset_memory(compute_.device);
    failure_ = is_out_of_memory(failure_) ? "out of memory" : failure_.substr(0, failure_.find('\n'));
  }

  train::Compute compute_;
  const layers::MixerKind& kind_;
  layers::Parameters parameters_;
  std::unique_ptr<layers::Mixer> mixer_;
  std::vector<double> times_;
  std::optional<AttentionKernel> kernel_;
  std::string failure_;
};

using Contestants = std::vector<std::unique_ptr<Contestant>>;

void race(const Contestants& contestants, const Arguments& arguments, std::int64_t length,
          const train::Compute& compute, LiveLine& line) {
  const auto tell = [&](const Contestant& contestant, const std::string& what) {
    line.show([&] { return "T = " + grouped(length) + ": " + std::string(contestant.kind().name) + ", " + what; });
  };
  const auto shape = {arguments.batch, length, arguments.heads * arguments.head_dim};
  const auto options = at::TensorOptions(compute.device).dtype(compute.activations);
  const auto x = at::randn(shape, options), slope = at::randn(shape, options);
  for (const auto& contestant : contestants) {
    train::reset_memory(compute.device);
    tell(*contestant, "first calls");
    contestant->begin(x, slope);
  }
  for (std::int64_t i = 0; i < arguments.repetitions; ++i) {
    for (const auto& contestant : contestants) {
      tell(*contestant, std::to_string(i + 1) + " of " + std::to_string(arguments.repetitions));
      contestant->turn(x, slope);
    }
  }
}

/// The table, which is printed row by row: the longest lengths take minutes on a CPU.
class Table {
 public:
  Table(const Contestants& contestants, std::int64_t longest) : header_{grouped(longest)} {
    for (const auto& contestant : contestants) header_.push_back(std::string(contestant->kind().name) + ", ms");
    auto first = header_;
    first[0] = "T";
    print(first);
  }
  void print(const Row& row) const {
    const auto lines = layout({header_, row}, std::vector<bool>(header_.size(), true));
    std::cout << lines.substr(lines.find('\n') + 1) << std::flush;
  }

 private:
  Row header_;  // with the widest cell of each column
};

/// What all rows have in common.
Json setting(const Arguments& arguments, const train::Compute& compute) {
  return {{"machine", describe_machine(compute.device)},
          {"date", today()},
          {"device", compute.device.str()},
          {"dtype", name_of(compute.activations)},
          {"batch", arguments.batch},
          {"heads", arguments.heads},
          {"head_dim", arguments.head_dim}};
}

int run(const Arguments& arguments) {
  const auto lengths = parse_lengths(arguments.lengths);
  const auto compute = choose_compute(arguments.place);
  auto generator = at::globalContext().defaultGenerator(at::kCPU);
  generator.set_current_seed(0);
  Contestants contestants;
  for (const auto& token : split(arguments.layers)) {
    contestants.push_back(std::make_unique<Contestant>(token, arguments, compute));
  }
  std::optional<Table> table;
  if (!arguments.json && !arguments.json_lines) table.emplace(contestants, lengths.back());
  auto report = setting(arguments, compute);
  Json rows = Json::array();
  LiveLine line;
  for (const auto length : lengths) {
    race(contestants, arguments, length, compute, line);
    line.clear();
    Row row{grouped(length)};
    for (const auto& contestant : contestants) {
      const auto time = contestant->milliseconds();
      row.push_back(time ? train::print("%.2f", *time) : contestant->failure());
      Json entry{{"layer", contestant->kind().token}, {"name", contestant->kind().name}, {"length", length}};
      if (time) entry["milliseconds"] = *time;
      if (!time) entry["error"] = contestant->failure();
      if (*contestant->kernel()) entry["attention_kernel"] = contestant->kernel();
      if (arguments.json_lines) print_line(report, entry);
      rows.push_back(std::move(entry));
    }
    if (table) table->print(row);
  }
  if (arguments.json_lines) return 0;
  if (arguments.json) {
    report["rows"] = std::move(rows);
    std::cout << report.dump(2) << "\n";
    return 0;
  }
  std::cout << "\n"
            << report["machine"].get<std::string>() << "; " << report["dtype"].get<std::string>() << ", batch "
            << arguments.batch << ", " << arguments.heads << " heads of " << arguments.head_dim
            << "; forward + backward, median of " << arguments.repetitions << ".\n";
  return 0;
}

}  // namespace

Action declare_bench_layer(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  app.add_option("--layers", arguments->layers, "Layers, as a pattern names them, separated by commas")
      ->capture_default_str();
  app.add_option("--lengths", arguments->lengths, "Tokens per sequence, separated by commas; 4k is 4096")
      ->capture_default_str();
  for (const auto& [option, value, meaning] :
       {std::tuple{"--batch", &arguments->batch, "Sequences"},
        {"--heads", &arguments->heads, "Heads"},
        {"--head-dim", &arguments->head_dim, "Channels of a head"},
        {"--repetitions", &arguments->repetitions, "Measured repetitions per layer and length"}}) {
    app.add_option(option, *value, meaning)->type_name("N")->check(positive_number())->capture_default_str();
  }
  add_place(app, arguments->place);
  auto* json = app.add_flag("--json", arguments->json, "Print JSON");
  app.add_flag("--json-lines", arguments->json_lines, "Print every length as a line of JSON as soon as it is measured")
      ->excludes(json);
  app.footer(
      "A layer is all that mixes tokens in a block: projections, convolutions, gates, the memory, the output.\n"
      "\n"
      "Examples:\n"
      "  gka bench layer                                        the paper's figure, in numbers\n"
      "  gka bench layer --layers '*,GKA,M2,KDA' --lengths 4k\n"
      "  gka bench layer --device cpu --batch 1 --heads 2 --head-dim 64 --lengths 256,1k,4k");
  return [arguments] { return run(*arguments); };
}

}  // namespace gka::cli
