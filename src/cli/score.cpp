// `gka score`: how likely a model finds texts. The engine reads them, so the numbers are those a server gives for
// `echo` with `logprobs`; with --packed they are read as training reads them.
#include <ATen/ops/tensor.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/fields.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/model_inputs.h"
#include "cli/numbers.h"
#include "cli/outputs.h"
#include "cli/packed_scores.h"
#include "cli/progress.h"
#include "data/text_input.h"
#include "infer/make_engine.h"
#include "models/safetensors.h"

namespace gka::cli {
namespace {

constexpr std::size_t kAtOnce = 16;  // sequences in the engine at a time

struct Arguments {
  ModelArguments model;
  std::string text, ids, tokens;
  std::string logits, kv_cache_dtype;
  std::int64_t window = 0, overlap = 0, packed = 0;
  bool per_token = false;
};

/// The log-probability of every token but the first, given those before it (in its window).
struct Score {
  std::int64_t tokens = 0;
  std::vector<double> log_probabilities{};
};

/// Tokens first … end − 1 of a sequence in one piece; the first `known` of them are only there to be seen.
struct Window {
  std::size_t sequence;
  std::int64_t first, end, known;
};

std::vector<Window> cut(const std::vector<Tokens>& sequences, const Arguments& arguments) {
  std::vector<Window> windows;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const auto size = std::ssize(sequences[i]), most = arguments.window > 0 ? arguments.window : size;
    std::int64_t scored = 0;
    do {
      const auto first = std::max<std::int64_t>(0, scored - arguments.overlap);
      const auto end = std::min(size, first + most);
      windows.push_back({.sequence = i, .first = first, .end = end, .known = scored - first});
      scored = end;
    } while (scored < size);
  }
  return windows;
}

std::optional<models::SafetensorsWriter> open_logits(const std::string& path, const std::vector<Tokens>& sequences,
                                                     std::int64_t vocabulary) {
  if (path.empty()) return std::nullopt;
  std::vector<models::SafetensorsWriter::Planned> planned;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    planned.push_back(
        {.name = "logits." + std::to_string(i), .dtype = at::kFloat, .shape = {std::ssize(sequences[i]), vocabulary}});
  }
  return std::make_optional<models::SafetensorsWriter>(path, std::move(planned));
}

/// Scores windows with an engine, several at a time and in any order.
class Scoring {
 public:
  Scoring(infer::Engine& engine, const std::vector<Tokens>& sequences) : engine_(engine), sequences_(sequences) {
    for (const auto& sequence : sequences) scores_.push_back({.tokens = std::ssize(sequence)});
  }

  /// With `logits`, one after the other, for they are written in order.
  std::vector<Score> run(const std::vector<Window>& windows, models::SafetensorsWriter* logits) {
    results_.resize(windows.size());
    LiveLine line;
    for (std::size_t i = 0; i < windows.size(); ++i) {
      submit(windows, i, logits);
      wait(logits != nullptr ? 1 : kAtOnce);
      line.show([&] {
        return std::to_string(i + 1) + " of " + std::to_string(windows.size()) + " sequences or windows begun";
      });
    }
    wait(1);
    for (std::size_t i = 0; i < windows.size(); ++i) {
      auto& all = scores_[windows[i].sequence].log_probabilities;
      all.insert(all.end(), results_[i].begin(), results_[i].end());
    }
    return std::move(scores_);
  }

 private:
  void submit(const std::vector<Window>& windows, std::size_t i, models::SafetensorsWriter* logits) {
    const auto& window = windows[i];
    const auto& sequence = sequences_[window.sequence];
    infer::Request request{.max_tokens = 0, .prompt_logprobs = true};
    request.prompt.assign(sequence.begin() + window.first, sequence.begin() + window.end);
    infer::Sink sink;
    sink.on_prompt = [this, i, known = std::max<std::int64_t>(window.known, 1)](const auto& events) {
      for (auto t = static_cast<std::size_t>(known); t < events.size(); ++t) results_[i].push_back(events[t].logprob);
    };
    const auto rows = std::make_shared<std::vector<float>>();
    if (logits != nullptr) {
      sink.on_logits = [rows](std::span<const float> row) { rows->insert(rows->end(), row.begin(), row.end()); };
    }
    sink.on_end = [this, rows, logits](infer::Finish, const infer::Usage& usage, const std::string& error) {
      const std::lock_guard lock(mutex_);
      if (error_.empty()) error_ = error;
      if (logits != nullptr && error.empty()) write(*rows, usage.prompt_tokens, *logits);
      --running_;
      changed_.notify_all();
    };
    {
      const std::lock_guard lock(mutex_);
      ++running_;
    }
    engine_.submit(std::move(request), std::move(sink));
  }

  void write(const std::vector<float>& rows, std::int64_t tokens, models::SafetensorsWriter& logits) {
    try {
      logits.write(at::tensor(rows).view({tokens, -1}));
    } catch (const std::exception& error) {
      error_ = error.what();
    }
  }

  /// Until fewer than `most` run.
  void wait(std::size_t most) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return running_ < most; });
    if (!error_.empty()) throw std::runtime_error(error_);
  }

  infer::Engine& engine_;
  const std::vector<Tokens>& sequences_;
  std::vector<Score> scores_;
  std::vector<std::vector<double>> results_;  // of each window
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t running_ = 0;
  std::string error_;
};

/// The same without an engine: windows packed one behind the other.
std::vector<Score> score_windows(const models::Decoder& decoder, const std::vector<Tokens>& sequences,
                                 const std::vector<Window>& windows, std::int64_t tokens) {
  std::vector<Ending> endings;
  for (const auto& window : windows) {
    const auto size = static_cast<std::size_t>(window.end - window.first);
    endings.push_back({.tokens = std::span(sequences[window.sequence]).subspan(window.first, size),
                       .scored = window.end - window.first - std::max<std::int64_t>(window.known, 1)});
  }
  LiveLine line;
  const auto found = score_packed(decoder, endings, tokens, [&](std::size_t done) {
    line.show([&] { return std::to_string(done) + " of " + std::to_string(endings.size()) + " sequences or windows"; });
  });
  std::vector<Score> scores;
  for (const auto& sequence : sequences) scores.push_back({.tokens = std::ssize(sequence)});
  for (std::size_t i = 0; i < windows.size(); ++i) {
    auto& all = scores[windows[i].sequence].log_probabilities;
    all.insert(all.end(), found[i].log_probabilities.begin(), found[i].log_probabilities.end());
  }
  return scores;
}

double sum(const std::vector<double>& values) {
  double total = 0;
  for (const auto value : values) total += value;
  return total;
}

/// exp of the mean surprise; nothing where no token had one.
Json perplexity(double log_probability, std::int64_t tokens) {
  return tokens > 0 ? Json(std::exp(-log_probability / static_cast<double>(tokens))) : Json(nullptr);
}

Json report(const Arguments& arguments, const std::vector<Score>& scores) {
  Json sequences = Json::array();
  double total = 0;
  std::int64_t tokens = 0, predicted = 0;
  for (const auto& score : scores) {
    const auto log_probability = sum(score.log_probabilities);
    const auto count = std::ssize(score.log_probabilities);
    if (arguments.per_token) {
      sequences.push_back({{"tokens", score.tokens},
                           {"log_probability", log_probability},
                           {"perplexity", perplexity(log_probability, count)},
                           {"log_probabilities", score.log_probabilities}});
    }
    total += log_probability;
    tokens += score.tokens;
    predicted += count;
  }
  Json summary{{"model", arguments.model.model},
               {"tokens", tokens},
               {"predicted_tokens", predicted},
               {"log_probability", total},
               {"perplexity", perplexity(total, predicted)}};
  summary["sequences"] = arguments.per_token ? std::move(sequences) : Json(scores.size());
  return summary;
}

std::vector<Tokens> inputs_of(const Arguments& arguments, std::int64_t vocabulary) {
  if (!arguments.ids.empty()) return read_ids(arguments.ids, vocabulary);
  if (!arguments.tokens.empty()) return read_token_file(arguments.model, arguments.tokens, vocabulary);
  return {encode(load_tokenizer(arguments.model), data::read_whole_text(arguments.text), arguments.text, vocabulary)};
}

int run(const Arguments& arguments) {
  if (arguments.window == 1) {
    throw std::runtime_error("--window is 1, and the first token of a window is not scored; it takes 2 or more");
  }
  if (arguments.overlap >= arguments.window && arguments.overlap > 0) {
    throw std::runtime_error("--overlap is " + std::to_string(arguments.overlap) + " and must be below --window, " +
                             std::to_string(arguments.window));
  }
  keep_apart("--logits", arguments.logits, std::array{arguments.text, arguments.ids, arguments.tokens});
  Interruptible signals(arguments.logits);
  auto decoder = load(arguments.model);
  const auto vocabulary = decoder.config().vocab_size;
  const auto sequences = inputs_of(arguments, vocabulary);
  const auto windows = cut(sequences, arguments);
  std::int64_t longest = 0, tokens = 0;
  for (const auto& window : windows) longest = std::max(longest, window.end - window.first);
  for (const auto& sequence : sequences) tokens += std::ssize(sequence);
  if (!arguments.logits.empty()) signals.writes_file(arguments.logits);
  auto writer = open_logits(arguments.logits, sequences, vocabulary);

  const LiveLine clock;
  const auto scores = [&] {
    if (arguments.packed > 0) return score_windows(decoder, sequences, windows, arguments.packed);
    infer::EngineOptions options{.slots = kAtOnce, .context = longest, .snapshot_bytes = -1, .queue = 2 * kAtOnce};
    options.kv_cache_dtype = arguments.kv_cache_dtype;
    const auto engine = infer::make_engine(std::move(decoder), options);
    return Scoring(*engine, sequences).run(windows, writer ? &*writer : nullptr);
  }();
  const auto seconds = clock.seconds();
  if (writer) signals.finish_file([&] { writer->commit(); });
  std::cout << report(arguments, scores).dump(2) << "\n";
  std::fprintf(stderr, "gka: scored %zu sequences, %lld tokens in %.1f s%s%s\n", scores.size(),
               static_cast<long long>(tokens), seconds, writer ? ", logits in " : "", arguments.logits.c_str());
  return 0;
}

}  // namespace

Action declare_score(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  add_model_arguments(app, arguments->model);
  auto* input = app.add_option_group("What to score");
  input
      ->add_option("--text", arguments->text,
                   "A text file, plain or compressed, scored as one sequence; - is standard input")
      ->type_name("FILE");
  input->add_option("--ids", arguments->ids, "Token numbers separated by white space, one sequence per line")
      ->type_name("FILE");
  input->add_option("--tokens", arguments->tokens, "A token file of gka tokenize; each document is a sequence")
      ->type_name("FILE");
  input->require_option(1);
  auto* window = app.add_option("--window", arguments->window,
                                "Score longer sequences in windows of N tokens, each read by itself")
                     ->check(positive_number())
                     ->type_name("N");
  app.add_option("--overlap", arguments->overlap, "Begin windows N tokens earlier, which they see and do not score")
      ->check(non_negative_number())
      ->needs(window)
      ->type_name("N");
  auto* packed =
      app.add_option("--packed", arguments->packed,
                     "Read sequences without the engine, packed into passes of up to N tokens: faster on a GPU")
          ->check(positive_number())
          ->type_name("N");
  add_cache_option(app, arguments->kv_cache_dtype)->excludes(packed);
  app.add_flag("--per-token", arguments->per_token, "List every sequence with the log-probability of each token");
  app.add_option(
         "--logits", arguments->logits,
         "Write logits.0, logits.1, … ([tokens, vocabulary], float32), one per line of input, to a safetensors file")
      ->excludes(window)
      ->excludes(packed)
      ->type_name("FILE");
  app.footer(
      "Writes JSON to standard output: tokens, their log-probability and perplexity over all sequences; each token "
      "but\n"
      "the first of a sequence (or of a window without overlap) is scored given those before it.\n"
      "\n"
      "Examples:\n"
      "  gka score runs/book --text book.txt --window 2048\n"
      "  gka score model --tokens data/held-out.tokens --window 2048 --overlap 1024\n"
      "  gka score model --ids numbers.txt --per-token --logits logits.safetensors");
  return [arguments] { return run(*arguments); };
}

}  // namespace gka::cli
