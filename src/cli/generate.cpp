// `gka generate`: continues a prompt token by token. The first line that is not finished streams; those after it wait
// until it is their turn, so that lines never mix.
#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/model_inputs.h"
#include "models/generate.h"

namespace gka::cli {
namespace {

struct Arguments {
  ModelArguments model;
  std::string prompt;
  std::string ids;
  std::int64_t max_tokens = 0;
  models::Sampling sampling;
  bool print_ids = false;
};

/// Shows tokens as numbers, or as text once characters are whole.
class Printer {
 public:
  Printer(std::size_t lines, std::optional<data::Tokenizer> tokenizer) : waiting_(lines), over_(lines, false) {
    if (tokenizer) {
      for (std::size_t i = 0; i < lines; ++i) decoders_.emplace_back(*tokenizer);
    }
    if (lines > 0) begun_.resize(lines, false);
  }

  void add(std::size_t line, std::int64_t token, bool last) {
    waiting_[line] += text_of(line, token, last);
    over_[line] = last;
    while (current_ < waiting_.size()) {
      std::cout << waiting_[current_];
      waiting_[current_].clear();
      if (!over_[current_]) break;
      std::cout << "\n";
      ++current_;
    }
    std::cout << std::flush;
  }

  /// Lines that got no token at all.
  void finish() {
    for (; current_ < waiting_.size(); ++current_) std::cout << waiting_[current_] << "\n";
    std::cout << std::flush;
  }

 private:
  std::string text_of(std::size_t line, std::int64_t token, bool last) {
    if (decoders_.empty()) {
      const std::string space = begun_[line] ? " " : "";
      begun_[line] = true;
      return space + std::to_string(token);
    }
    auto text = decoders_[line].push(static_cast<data::Token>(token));
    if (last) text += decoders_[line].finish();
    return text;
  }

  std::vector<data::StreamDecoder> decoders_;  // none: numbers
  std::vector<std::string> waiting_;           // what each line has to show and has not
  std::vector<bool> over_, begun_;
  std::size_t current_ = 0;  // the line that is being shown
};

int run(const Arguments& arguments) {
  const auto decoder = load(arguments.model);
  const auto vocabulary = decoder.config().vocab_size;
  std::optional<data::Tokenizer> tokenizer;
  if (arguments.ids.empty() || !arguments.print_ids) tokenizer = load_tokenizer(arguments.model);
  const auto prompts = arguments.ids.empty()
                           ? std::vector<Tokens>{encode(*tokenizer, arguments.prompt, "the prompt", vocabulary)}
                           : read_ids(arguments.ids, vocabulary);

  Printer printer(prompts.size(), arguments.print_ids ? std::nullopt : tokenizer);
  const auto start = std::chrono::steady_clock::now();
  std::size_t tokens = 0;
  const auto show = [&](std::size_t line, std::int64_t token, bool last) {
    ++tokens;
    printer.add(line, token, last);
  };
  models::generate(decoder, prompts,
                   {.max_tokens = arguments.max_tokens, .sampling = arguments.sampling, .on_token = show});
  printer.finish();
  const auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::fprintf(stderr, "gka: %zu tokens in %.1f s (%.1f tokens/s, prompts included)\n", tokens, seconds,
               static_cast<double>(tokens) / std::max(seconds, 1e-9));
  return 0;
}

}  // namespace

Action declare_generate(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  add_model_arguments(app, arguments->model);
  auto* input = app.add_option_group("What to continue");
  input->add_option("--prompt", arguments->prompt, "A text")->type_name("TEXT");
  input->add_option("--ids", arguments->ids, "Token numbers separated by white space, one sequence per line")
      ->type_name("FILE");
  input->require_option(1);
  app.add_option("--max-tokens", arguments->max_tokens, "How many tokens at most; eos_token_id ends a text earlier")
      ->required()
      ->check(CLI::NonNegativeNumber)
      ->type_name("N");
  auto& sampling = arguments->sampling;
  auto* greedy = app.add_flag("--greedy", sampling.greedy, "The likeliest token each time");
  app.add_option("--temperature", sampling.temperature, "Below 1 bolder, above 1 wilder")
      ->capture_default_str()
      ->excludes(greedy);
  app.add_option("--top-p", sampling.top_p, "Draw among the fewest tokens that hold this much of the probability")
      ->capture_default_str()
      ->excludes(greedy);
  app.add_option("--seed", sampling.seed, "The same seed gives the same text")->capture_default_str()->excludes(greedy);
  app.add_flag("--print-ids", arguments->print_ids,
               "Print the new token numbers alone, one line per line of input (eos_token_id is among them)");
  return [arguments] { return run(*arguments); };
}

}  // namespace gka::cli
