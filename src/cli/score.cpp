// `gka score`: how likely a model finds texts. Sequences go through it packed, several at a time, and the logits of
// more than a few tokens exist only where they are asked for.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/fields.h"
#include "base/files.h"
#include "cli/commands.h"
#include "cli/model_inputs.h"
#include "models/safetensors.h"

namespace gka::cli {
namespace {

constexpr std::int64_t kTokensAtOnce = 4096;  // of several sequences; a longer one goes alone

struct Arguments {
  ModelArguments model;
  std::string text;
  std::string ids;
  std::string logits;
};

/// The log-probability of every token but the first, given those before it.
struct Score {
  std::int64_t tokens = 0;
  std::vector<double> log_probabilities;
};

/// A live line on a terminal, nothing elsewhere.
class Progress {
 public:
  explicit Progress(std::size_t sequences) : sequences_(sequences), live_(::isatty(STDERR_FILENO) != 0) {}
  ~Progress() {
    if (live_) std::fputs("\r\033[K", stderr);
  }

  void show(std::size_t done, std::int64_t tokens) const {
    if (!live_) return;
    std::fprintf(stderr, "\r\033[K%zu of %zu sequences, %.0f tokens/s", done, sequences_,
                 static_cast<double>(tokens) / std::max(seconds(), 1e-9));
  }
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  std::size_t sequences_;
  bool live_;
  Clock::time_point start_ = Clock::now();
};

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

/// The sequences from `begin` on that go through the model together, scored; appends to `scores`.
void score_some(const models::Decoder& decoder, const std::vector<Tokens>& sequences, models::SafetensorsWriter* logits,
                std::vector<Score>& scores) {
  Tokens ids, labels, bounds{0};
  auto end = scores.size();
  while (end < sequences.size()) {
    const auto& sequence = sequences[end];
    if (!ids.empty() && std::ssize(ids) + std::ssize(sequence) > kTokensAtOnce) break;
    ids.insert(ids.end(), sequence.begin(), sequence.end());
    labels.insert(labels.end(), sequence.begin() + 1, sequence.end());
    labels.push_back(kIgnoredLabel);
    bounds.push_back(std::ssize(ids));
    ++end;
  }
  const auto packed = layers::Sequences::packed(bounds, decoder.device());
  const auto hidden = decoder.forward(at::tensor(ids, at::kLong).unsqueeze(0), packed).hidden.squeeze(0);
  const auto all = decoder.log_probabilities(hidden, at::tensor(labels, at::kLong)).to(at::kCPU, at::kDouble);
  const auto* values = all.const_data_ptr<double>();
  for (std::size_t n = 0; n + 1 < bounds.size(); ++n) {
    const auto length = bounds[n + 1] - bounds[n];
    scores.push_back({.tokens = length, .log_probabilities = {values + bounds[n], values + bounds[n + 1] - 1}});
    if (logits != nullptr) logits->write(decoder.logits(hidden.narrow(0, bounds[n], length)).to(at::kCPU, at::kFloat));
  }
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

Json report(const std::string& model, const std::vector<Score>& scores) {
  Json sequences = Json::array();
  double total = 0;
  std::int64_t tokens = 0, predicted = 0;
  for (const auto& score : scores) {
    const auto log_probability = sum(score.log_probabilities);
    const auto count = std::ssize(score.log_probabilities);
    sequences.push_back({{"tokens", score.tokens},
                         {"log_probability", log_probability},
                         {"perplexity", perplexity(log_probability, count)},
                         {"log_probabilities", score.log_probabilities}});
    total += log_probability;
    tokens += score.tokens;
    predicted += count;
  }
  return {{"model", model},
          {"tokens", tokens},
          {"predicted_tokens", predicted},
          {"log_probability", total},
          {"perplexity", perplexity(total, predicted)},
          {"sequences", std::move(sequences)}};
}

int run(const Arguments& arguments) {
  const at::NoGradGuard no_gradient;
  const auto decoder = load(arguments.model);
  const auto vocabulary = decoder.config().vocab_size;
  const auto sequences = !arguments.ids.empty()
                             ? read_ids(arguments.ids, vocabulary)
                             : std::vector<Tokens>{encode(load_tokenizer(arguments.model), read_text(arguments.text),
                                                          arguments.text, vocabulary)};
  auto writer = open_logits(arguments.logits, sequences, vocabulary);

  std::vector<Score> scores;
  double seconds = 0;
  std::int64_t tokens = 0;
  {
    Progress progress(sequences.size());
    while (scores.size() < sequences.size()) {
      score_some(decoder, sequences, writer ? &*writer : nullptr, scores);
      tokens = 0;
      for (const auto& score : scores) tokens += score.tokens;
      progress.show(scores.size(), tokens);
    }
    seconds = progress.seconds();
  }
  if (writer) writer->commit();
  std::cout << report(arguments.model.model, scores).dump(2) << "\n";
  std::fprintf(stderr, "gka: scored %zu sequences, %lld tokens in %.1f s%s%s\n", scores.size(),
               static_cast<long long>(tokens), seconds, writer ? ", logits in " : "", arguments.logits.c_str());
  return 0;
}

}  // namespace

Action declare_score(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  add_model_arguments(app, arguments->model);
  auto* input = app.add_option_group("What to score");
  input->add_option("--text", arguments->text, "A text file, scored as one sequence")->type_name("FILE");
  input->add_option("--ids", arguments->ids, "Token numbers separated by white space, one sequence per line")
      ->type_name("FILE");
  input->require_option(1);
  app.add_option(
         "--logits", arguments->logits,
         "Write logits.0, logits.1, … ([tokens, vocabulary], float32), one per line of input, to a safetensors file")
      ->type_name("FILE");
  app.footer(
      "Writes JSON to standard output: perplexity, and the log-probability of every token but the first of each\n"
      "sequence given those before it.");
  return [arguments] { return run(*arguments); };
}

}  // namespace gka::cli
