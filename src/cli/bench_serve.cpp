// `gka bench serve`: tokens per second of the engine that `gka serve` runs, with random weights, beside what the bytes
// and products of the same machine allow, measured in the same run.
//
// Decoding is measured with the scheduler itself, sampling included, at any length of context: a sequence begins with
// all but the last piece of its prompt taken as read, so that a context of 128K does not have to be read first. What it
// would have read are zeros in its pages and states, which take as long to look at as any other numbers.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/bench.h"
#include "cli/bench_http.h"
#include "cli/model_inputs.h"
#include "cli/numbers.h"
#include "cli/progress.h"
#include "cli/table.h"
#include "infer/make_engine.h"
#include "layers/mixers.h"
#include "models/activations.h"
#include "models/checkpoint.h"
#include "models/config.h"
#include "train/text.h"

namespace gka::cli {
namespace {

using train::print;
using Clock = std::chrono::steady_clock;

constexpr const char* kExplained =
    "Runs the engine of `gka serve`, with random weights of a configuration or a model's own. Columns:\n"
    "  tokens/s   of all sequences together; the median step counts\n"
    "  ms         of one step, or of reading the prompt\n"
    "  bytes      what one step has to read and write: weights, states (both ways), attention's caches\n"
    "  of copy    bytes over what a large copy reads and writes in the same time, measured in the same run\n"
    "  of product FLOP of a prompt over the rate of a large matrix product of the activations' type\n"
    "\n"
    "Examples:\n"
    "  gka bench serve configs/440m/gka.json --batches 1,128\n"
    "  gka bench serve configs/8b/hybrid.json --batches 8,16,32 --contexts 16k,32k,64k,128k --prefill 16k\n"
    "  gka bench serve configs/440m/gka.json --device cpu --weights int8 --batches 1,4 --prefill 512 --json";

struct Arguments {
  std::string model;
  std::string batches = "1,8,32,128", contexts = "64", prefill = "2k", http = "";
  std::int64_t tokens = 0, step_tokens = 0;
  std::string weights, kv_cache_dtype;
  Place place;
  bool deterministic = false, json = false;
};

/// A folder's model, or one with random weights.
models::Decoder make_decoder(const Arguments& arguments, const train::Compute& compute) {
  const auto as = models::weights_named("--weights", arguments.weights);
  const std::filesystem::path path(arguments.model);
  if (std::filesystem::is_directory(path)) {
    return models::load_model(path, {.device = compute.device, .dtype = compute.activations, .weights = as});
  }
  if (!std::filesystem::exists(path)) {
    throw std::runtime_error("there is no configuration or model '" + path.string() + "'; check the path.");
  }
  const auto small = compute.device.is_cpu() ? compute.activations : models::small_type(compute.activations);
  layers::ParameterOptions options{.device = compute.device, .dtype = small};
  options.matrices = models::matrices_type(as, at::kBFloat16, compute.activations, compute.device);
  options.generator = compute.device.is_cpu() ? at::make_generator<at::CPUGeneratorImpl>(1)
                                              : at::globalContext().defaultGenerator(compute.device);
  return models::Decoder(models::parse_training_config(models::read_json(path), path.string()), std::move(options));
}

std::vector<std::int64_t> random_prompt(std::int64_t tokens, std::int64_t vocabulary, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> prompt(static_cast<std::size_t>(tokens));
  for (auto& token : prompt) token = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(vocabulary));
  return prompt;
}

std::unique_ptr<infer::Sequence> make_sequence(const models::Decoder& decoder, std::int64_t number,
                                               std::int64_t context, std::int64_t tokens) {
  auto sequence = std::make_unique<infer::Sequence>();
  sequence->id = static_cast<infer::RequestId>(number + 1);
  sequence->tokens = random_prompt(context, decoder.config().vocab_size, static_cast<std::uint64_t>(number));
  sequence->prompt = context;
  sequence->iterations = decoder.config().mixer.gka.num_iter;
  sequence->request = {.prompt = {}, .sampling = {.seed = static_cast<std::uint64_t>(number)}, .max_tokens = tokens};
  sequence->request.ignore_eos = true;
  return sequence;
}

/// Lets a sequence begin where only the last piece of its prompt is left to read.
void take_as_read(infer::Scheduler& scheduler, infer::Sequence& sequence) {
  const auto read = infer::grid_floor(sequence.prompt - 1);
  if (read == 0) return;
  const auto& decoder = scheduler.decoder();
  auto state = decoder.make_state(1, {.device = decoder.device(),
                                      .dtype = models::activations_of(decoder.parameters().options()),
                                      .capacity = read,
                                      .pages = 1});
  sequence.state = std::move(state);
  sequence.read = read;
}

struct Measured {
  std::string what;
  std::int64_t batch = 0, context = 0;
  double tokens_per_second = 0, milliseconds = 0;
  double bytes = 0, share = 0;  // of the copy's bytes, or of the product's FLOP
  std::string failure{};
};

class Bench {
 public:
  Bench(const Arguments& arguments, const train::Compute& compute)
      : arguments_(arguments), compute_(compute), decoder_(make_decoder(arguments, compute)) {
    copy_ = copy_rate(compute.device);
    product_ = matrix_rate(compute.device, compute.activations);
  }

  double copy() const { return copy_; }
  double product() const { return product_; }
  const models::Decoder& decoder() const { return decoder_; }

  Measured decode(std::int64_t batch, std::int64_t context) const {
    Measured measured{.what = "decode", .batch = batch, .context = context};
    attempt(measured, [&] {
      const auto warm = std::int64_t{8};
      const auto tokens = (arguments_.tokens > 0 ? arguments_.tokens : compute_.device.is_cpu() ? 16 : 128) + warm;
      infer::Scheduler scheduler(decoder_, options_for(batch, context + tokens));
      for (std::int64_t i = 0; i < batch; ++i) {
        auto sequence = make_sequence(decoder_, i, context, tokens);
        sequence->on_begin = take_as_read;
        sequence->sink.on_end = [&](infer::Finish, const infer::Usage&, const std::string& error) {
          if (!error.empty()) measured.failure = error;
        };
        scheduler.add(std::move(sequence));
      }
      while (scheduler.stats().generated_tokens < batch && measured.failure.empty()) scheduler.step();
      std::vector<double> times;
      while (!scheduler.idle() && measured.failure.empty()) {
        const auto start = Clock::now();
        const auto before = scheduler.stats().generated_tokens;
        scheduler.step();
        if (scheduler.stats().generated_tokens - before == batch) times.push_back(seconds_since(start));
      }
      if (!measured.failure.empty()) return;
      times.erase(times.begin(), times.begin() + std::min<std::ptrdiff_t>(warm, std::ssize(times) - 1));
      const auto step = median(times);
      measured.tokens_per_second = static_cast<double>(batch) / step;
      measured.milliseconds = 1e3 * step;
      measured.bytes = step_bytes(batch, context);
      measured.share = measured.bytes / step / copy_;
    });
    return measured;
  }

  Measured prefill(std::int64_t tokens) const {
    Measured measured{.what = "prefill", .batch = 1, .context = tokens};
    attempt(measured, [&] {
      infer::Scheduler scheduler(decoder_, options_for(1, tokens + 1));
      std::vector<double> times;
      for (int i = 0; i < 4 && measured.failure.empty(); ++i) {
        auto sequence = make_sequence(decoder_, i, tokens, 1);
        sequence->sink.on_end = [&](infer::Finish, const infer::Usage&, const std::string& error) {
          if (!error.empty()) measured.failure = error;
        };
        scheduler.add(std::move(sequence));
        const auto time = seconds_of(compute_.device, [&] {
          while (!scheduler.idle()) scheduler.step();
        });
        if (i > 0) times.push_back(time);
      }
      if (!measured.failure.empty()) return;
      const auto time = median(times);
      measured.tokens_per_second = static_cast<double>(tokens) / time;
      measured.milliseconds = 1e3 * time;
      measured.share = measured.tokens_per_second * flops_per_token(tokens) / product_;
    });
    return measured;
  }

  /// Tokens/s of so many streams over HTTP, and of the same requests given to the engine; share: the one of the other.
  std::vector<Measured> http(std::int64_t streams) {
    Measured alone{.what = "engine", .batch = streams, .context = kShortPrompt};
    Measured served{.what = "http", .batch = streams, .context = kShortPrompt};
    attempt(served, [&] {
      const auto tokens = arguments_.tokens > 0 ? arguments_.tokens : compute_.device.is_cpu() ? 16 : 256;
      std::vector<std::vector<std::int64_t>> prompts;
      for (std::int64_t i = 0; i < streams; ++i) {
        prompts.push_back(random_prompt(kShortPrompt, decoder_.config().vocab_size, static_cast<std::uint64_t>(i)));
      }
      const auto rates = http_rates(
          infer::make_engine(std::move(decoder_), engine_options(streams, kShortPrompt + tokens)), prompts, tokens);
      alone.tokens_per_second = rates.engine;
      served.tokens_per_second = rates.http;
      served.share = rates.http / rates.engine;
    });
    alone.failure = served.failure;
    return {alone, served};
  }

 private:
  static constexpr std::int64_t kShortPrompt = 32;

  static double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  void attempt(Measured& measured, const std::function<void()>& work) const {
    train::reset_memory(compute_.device);  // what the one before had counts as free
    try {
      const at::NoGradGuard no_gradient;
      work();
    } catch (const c10::Error& error) {
      measured.failure = error.what_without_backtrace();
    } catch (const std::exception& error) {
      measured.failure = error.what();
    }
    measured.failure =
        is_out_of_memory(measured.failure) ? "out of memory" : measured.failure.substr(0, measured.failure.find('\n'));
  }

  infer::EngineOptions engine_options(std::int64_t batch, std::int64_t context) const {
    infer::EngineOptions options{.slots = batch, .context = context, .snapshot_bytes = -1};
    options.kv_cache_dtype = arguments_.kv_cache_dtype;
    options.deterministic = arguments_.deterministic;
    options.step_tokens = arguments_.step_tokens;
    return options;
  }

  infer::SchedulerOptions options_for(std::int64_t batch, std::int64_t context) const {
    auto options = infer::scheduler_options(decoder_, engine_options(batch, context));
    const auto pages = batch * infer::pages_for(context);
    if (options.pool.pages > 0 && options.pool.pages < pages) throw std::runtime_error("out of memory");
    return options;
  }

  /// What one step has to move at the least.
  double step_bytes(std::int64_t batch, std::int64_t context) const {
    double weights = 0;
    for (const auto& parameter : decoder_.parameters().all()) {
      const bool looked_up = parameter.name == "model.embed_tokens.weight" && !decoder_.config().tie_word_embeddings;
      if (!looked_up) weights += static_cast<double>(parameter.value.nbytes());
    }
    const bool int8 = infer::has_int8_cache("--kv-cache-dtype", arguments_.kv_cache_dtype);
    const auto sequence = infer::sequence_bytes(decoder_, context, int8);
    const auto cache = static_cast<double>(sequence.page) * static_cast<double>(context) / infer::kGrid;
    return weights + static_cast<double>(batch) * (2.0 * static_cast<double>(sequence.state) + cache);
  }

  /// Forward alone; the head counts once, for the last token.
  double flops_per_token(std::int64_t tokens) const {
    const auto& config = decoder_.config();
    auto parameters = decoder_.parameters().count() - config.vocab_size * config.mixer.hidden_size;
    if (!config.tie_word_embeddings) parameters -= config.vocab_size * config.mixer.hidden_size;
    double flops = 2 * static_cast<double>(parameters);
    for (const auto& type : config.layer_types) {
      flops += layers::mixing_flops(type, config.mixer, tokens) / layers::kWithBackward;
    }
    return flops;
  }

  const Arguments& arguments_;
  train::Compute compute_;
  models::Decoder decoder_;
  double copy_ = 0, product_ = 0;
};

std::string today() {
  const auto now = std::time(nullptr);
  std::array<char, 16> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%d", std::localtime(&now));
  return text.data();
}

std::string percent(double share) { return share > 0 ? print("%.0f%%", 100 * share) : ""; }

Json as_json(const Measured& row) {
  Json entry{{"what", row.what}, {"sequences", row.batch}, {"context", row.context}};
  if (!row.failure.empty()) {
    entry["error"] = row.failure;
    return entry;
  }
  entry["tokens_per_second"] = row.tokens_per_second;
  if (row.milliseconds > 0) entry["milliseconds"] = row.milliseconds;
  if (row.bytes > 0) entry["bytes"] = row.bytes;
  const char* of = row.what == "decode" ? "of_copy" : row.what == "prefill" ? "of_product" : "of_engine";
  if (row.share > 0) entry[of] = row.share;
  return entry;
}

void print_table(const std::vector<Measured>& rows) {
  std::vector<Row> table{{"", "sequences", "context", "tokens/s", "ms", "bytes", "of copy", "of product", "of engine"}};
  for (const auto& row : rows) {
    auto& line = table.emplace_back(Row{row.what, grouped(row.batch), grouped(row.context)});
    if (!row.failure.empty()) {
      line.push_back(row.failure);
      continue;
    }
    line.push_back(grouped(std::llround(row.tokens_per_second)));
    line.push_back(row.milliseconds > 0 ? print("%.2f", row.milliseconds) : "");
    line.push_back(row.bytes > 0 ? train::short_bytes(row.bytes) : "");
    for (const char* what : {"decode", "prefill", "http"}) line.push_back(row.what == what ? percent(row.share) : "");
  }
  std::cout << layout(table, {false, true, true, true, true, true, true, true, true});
}

int run(const Arguments& arguments) {
  const auto compute = choose_compute(arguments.place);
  const auto list = [](const std::string& text, const char* option) {
    return text.empty() || text == "0" ? std::vector<std::int64_t>{} : parse_lengths(text, option);
  };
  const auto batches = list(arguments.batches, "--batches"), contexts = list(arguments.contexts, "--contexts"),
             prompts = list(arguments.prefill, "--prefill"), over_http = list(arguments.http, "--http");
  LiveLine line;
  const auto show = [&](const std::string& text) { line.show([&] { return text; }); };
  show("making " + arguments.model);
  Bench bench(arguments, compute);
  std::vector<Measured> rows;
  for (const auto context : contexts) {
    for (const auto batch : batches) {
      show("decoding " + grouped(batch) + " sequences after " + grouped(context) + " tokens");
      rows.push_back(bench.decode(batch, context));
    }
  }
  for (const auto tokens : prompts) {
    show("reading " + grouped(tokens) + " tokens");
    rows.push_back(bench.prefill(tokens));
  }
  const auto parameters = bench.decoder().parameters().count();
  const auto kept = bench.decoder().parameters().options().matrices.value_or(compute.activations);
  const std::string weights = kept == at::kChar ? "int8" : std::string(name_of(kept));
  for (const auto streams : over_http) {
    show(grouped(streams) + " streams over HTTP");
    for (auto& row : bench.http(streams)) rows.push_back(std::move(row));
    break;  // the engine has taken the model
  }
  line.clear();
  if (arguments.json) {
    Json entries = Json::array();
    for (const auto& row : rows) entries.push_back(as_json(row));
    std::cout << Json{{"machine", describe_machine(compute.device)},
                      {"date", today()},
                      {"device", compute.device.str()},
                      {"model", arguments.model},
                      {"parameters", parameters},
                      {"dtype", name_of(compute.activations)},
                      {"weights", weights},
                      {"kv_cache_dtype", arguments.kv_cache_dtype.empty() ? "auto" : arguments.kv_cache_dtype},
                      {"deterministic", arguments.deterministic},
                      {"copy_bytes_per_second", bench.copy()},
                      {"matrix_product_flops", bench.product()},
                      {"rows", std::move(entries)}}
                     .dump(2)
              << "\n";
    return 0;
  }
  print_table(rows);
  std::cout << "\n"
            << describe_machine(compute.device) << "; " << arguments.model << ", "
            << train::short_count(static_cast<double>(parameters)) << " parameters, weights " << weights << ", "
            << name_of(compute.activations) << " activations"
            << (arguments.kv_cache_dtype == "int8" ? ", int8 caches" : "")
            << (arguments.deterministic ? ", deterministic" : "") << "; a copy moves "
            << print("%.3g", 1e-9 * bench.copy()) << " GB/s, a matrix product runs at "
            << print("%.3g", 1e-12 * bench.product()) << " TFLOP/s.\n";
  return 0;
}

}  // namespace

Action declare_bench_serve(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  app.add_option("MODEL", arguments->model, "A configuration (random weights), or a model's folder")->required();
  app.add_option("--batches", arguments->batches, "Sequences that decode at once; 0: none")->capture_default_str();
  app.add_option("--contexts", arguments->contexts, "Context lengths, in tokens; 4k is 4096")->capture_default_str();
  app.add_option("--prefill", arguments->prefill, "Lengths of prompts to read; 0: none")->capture_default_str();
  app.add_option("--http", arguments->http, "Streams over HTTP, beside the same streams given to the engine");
  app.add_option("--tokens", arguments->tokens, "Tokens to decode per sequence (default: 128, on a CPU 16)")
      ->type_name("N")
      ->check(positive_number());
  add_weights_option(app, arguments->weights);
  add_cache_option(app, arguments->kv_cache_dtype);
  app.add_option("--step-tokens", arguments->step_tokens,
                 "The most prompt tokens that one step reads (default: 16,384, on a CPU 256)")
      ->type_name("N")
      ->check(positive_number());
  app.add_flag("--deterministic", arguments->deterministic,
               "As `gka serve --deterministic`: sequences step one by one, prompts are read in pieces of 64 tokens");
  add_place(app, arguments->place);
  app.add_flag("--json", arguments->json, "Print JSON");
  app.footer(kExplained);
  return [arguments] { return run(*arguments); };
}

}  // namespace gka::cli
