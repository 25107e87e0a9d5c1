// `gka generate`: continues prompts token by token. The first line that is not finished streams; those after it wait
// until it is their turn, so that lines never mix.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "cli/commands.h"
#include "cli/model_inputs.h"
#include "cli/numbers.h"
#include "data/text_input.h"
#include "infer/make_engine.h"

namespace gka::cli {
namespace {

struct Arguments {
  ModelArguments model;
  std::optional<std::string> prompt;
  std::string file, ids;
  std::int64_t max_tokens = 128;
  infer::Sampling sampling;
  bool greedy = false;
  std::vector<std::string> stop;
  std::string iterations, kv_cache_dtype;
  bool print_ids = false, echo = false;
};

/// One line of output as it grows. A text is held back as far as a stop text may have begun in it.
class Line {
 public:
  Line(const std::optional<data::Tokenizer>& tokenizer, const std::vector<std::string>& stops, bool as_numbers)
      : stops_(stops), as_numbers_(as_numbers) {
    if (tokenizer) decoder_.emplace(*tokenizer);
  }

  /// Shown before everything else.
  void begin(std::string text) { ready_ = std::move(text); }

  /// Returns whether the line is over because of a stop text.
  bool add(std::int64_t token) {
    if (as_numbers_) ready_ += (begun_ ? " " : "") + std::to_string(token);
    begun_ = true;
    if (decoder_) text_ += decoder_->push(static_cast<data::Token>(token));
    return look_for_stops();
  }

  /// What can be shown now; with `last`, all of it.
  std::string take(bool last) {
    if (!as_numbers_) {
      if (last && decoder_ && !stopped_) {
        text_ += decoder_->finish();
        look_for_stops();
      }
      std::size_t held = 0;
      for (const auto& stop : stops_) held = std::max(held, stop.size() - 1);
      const auto end = last || stopped_ ? text_.size() : std::max(shown_, text_.size() - std::min(text_.size(), held));
      ready_ += text_.substr(shown_, end - shown_);
      shown_ = end;
    }
    return std::exchange(ready_, {});
  }

 private:
  bool look_for_stops() {
    for (const auto& stop : stops_) {
      const auto found = text_.find(stop, shown_);
      if (found == std::string::npos) continue;
      text_.resize(found);
      stopped_ = true;
    }
    return stopped_;
  }

  std::optional<data::StreamDecoder> decoder_;
  const std::vector<std::string>& stops_;
  bool as_numbers_, begun_ = false, stopped_ = false;
  std::string text_, ready_;
  std::size_t shown_ = 0;
};

/// All lines of the output: what the engine's thread brings, in the order of the input.
class Output {
 public:
  Output(infer::Engine& engine, std::vector<Line> lines)
      : engine_(engine), lines_(std::move(lines)), requests_(lines_.size()), over_(lines_.size(), false) {}

  void submit(std::size_t line, infer::Request request) {
    const std::lock_guard lock(mutex_);  // so that a token that comes at once finds its request's number
    requests_[line] = engine_.submit(
        std::move(request),
        {.on_token = [this, line](const infer::TokenEvent& event) { add(line, event.token); },
         .on_end = [this, line](infer::Finish, const infer::Usage&, const std::string& error) { end(line, error); }});
  }

  /// Until all lines are over; throws what went wrong first. Returns how many tokens came.
  std::size_t wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ended_ == lines_.size(); });
    if (!error_.empty()) throw std::runtime_error(error_);
    return tokens_;
  }

 private:
  void add(std::size_t line, std::int64_t token) {
    const std::lock_guard lock(mutex_);
    if (over_[line]) return;
    ++tokens_;
    if (lines_[line].add(token)) {
      over_[line] = true;
      engine_.cancel(requests_[line]);
    }
    show();
  }

  void end(std::size_t line, const std::string& error) {
    const std::lock_guard lock(mutex_);
    over_[line] = true;
    if (error_.empty()) error_ = error;
    show();
    ++ended_;
    changed_.notify_all();
  }

  void show() {
    for (; current_ < lines_.size(); ++current_) {
      std::cout << lines_[current_].take(over_[current_]);
      if (!over_[current_]) break;
      std::cout << "\n";
    }
    errno = 0;
    std::cout << std::flush;
    if (!std::cout && error_.empty()) give_up(errno);
  }

  /// What nobody can read need not be generated.
  void give_up(int code) {
    error_ = "the output could not be written" + (code != 0 ? ": " + std::generic_category().message(code) : "");
    for (std::size_t i = 0; i < lines_.size(); ++i) {
      over_[i] = true;
      engine_.cancel(requests_[i]);
    }
  }

  infer::Engine& engine_;
  std::vector<Line> lines_;
  std::vector<infer::RequestId> requests_;
  std::vector<bool> over_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t current_ = 0, ended_ = 0, tokens_ = 0;
  std::string error_;
};

std::string prompt_of(const Arguments& arguments) {
  return arguments.prompt ? *arguments.prompt : data::read_whole_text(arguments.file);
}

std::string text_of(const data::Tokenizer& tokenizer, const Tokens& prompt) {
  const std::vector<data::Token> tokens(prompt.begin(), prompt.end());
  return tokenizer.decode(tokens);
}

infer::Request request_of(const Arguments& arguments, const Tokens& prompt, std::size_t line) {
  infer::Request request{.prompt = prompt, .sampling = arguments.sampling, .max_tokens = arguments.max_tokens};
  request.sampling.seed += line;
  if (arguments.greedy) request.sampling.temperature = 0;
  request.auto_iterations = arguments.iterations == "auto";
  if (!arguments.iterations.empty() && !request.auto_iterations) request.iterations = std::stoll(arguments.iterations);
  return request;
}

int run(const Arguments& arguments) {
  auto decoder = load(arguments.model);
  const auto vocabulary = decoder.config().vocab_size;
  const bool by_text = arguments.ids.empty();
  std::optional<data::Tokenizer> tokenizer;
  if (by_text || !arguments.print_ids || !arguments.stop.empty()) tokenizer = load_tokenizer(arguments.model);
  const auto text = by_text ? prompt_of(arguments) : "";
  const auto prompts = by_text ? std::vector<Tokens>{encode(*tokenizer, text, "the prompt", vocabulary)}
                               : read_ids(arguments.ids, vocabulary);

  std::size_t longest = 0;
  std::vector<Line> lines;
  for (const auto& prompt : prompts) {
    longest = std::max(longest, prompt.size());
    lines.emplace_back(tokenizer, arguments.stop, arguments.print_ids);
    if (arguments.echo) lines.back().begin(by_text ? text : text_of(*tokenizer, prompt));
  }
  infer::EngineOptions options{.slots = std::min<std::int64_t>(std::ssize(prompts), 256),
                               .context = static_cast<std::int64_t>(longest) + arguments.max_tokens,
                               .queue = std::ssize(prompts)};
  options.kv_cache_dtype = arguments.kv_cache_dtype;
  const auto engine = infer::make_engine(std::move(decoder), options);
  const auto start = std::chrono::steady_clock::now();
  Output output(*engine, std::move(lines));
  for (std::size_t i = 0; i < prompts.size(); ++i) output.submit(i, request_of(arguments, prompts[i], i));
  const auto tokens = output.wait();
  const auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::fprintf(stderr, "gka: %zu tokens in %.1f s (%.1f tokens/s, prompts included)\n", tokens, seconds,
               static_cast<double>(tokens) / std::max(seconds, 1e-9));
  return 0;
}

/// "auto" or a number.
std::string check_iterations(const std::string& text) {
  const bool number =
      !text.empty() && text.size() < 10 && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
  return number || text == "auto" ? "" : "takes a number or auto, and got '" + text + "'";
}

void add_sampling(CLI::App& app, Arguments& arguments) {
  auto& sampling = arguments.sampling;
  auto* greedy = app.add_flag("--greedy", arguments.greedy, "Take the likeliest token each time");
  const auto add = [&](const char* name, auto& value, const char* help) {
    app.add_option(name, value, help)->capture_default_str()->excludes(greedy);
  };
  add("--temperature", sampling.temperature, "Below 1 less random, above 1 more; 0 is greedy");
  add("--top-p", sampling.top_p, "Draw among the fewest tokens that hold this much of the probability");
  add("--top-k", sampling.top_k, "Draw among the N likeliest tokens; 0: all");
  add("--min-p", sampling.min_p, "Draw among tokens at least this likely, as a share of the likeliest");
  add("--seed", sampling.seed, "The same seed gives the same text");
  app.add_option("--repetition-penalty", sampling.repetition_penalty,
                 "Above 1 makes tokens that already occurred less likely")
      ->capture_default_str();
}

}  // namespace

Action declare_generate(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  add_model_arguments(app, arguments->model);
  auto* input = app.add_option_group("What to continue");
  input->add_option("--prompt", arguments->prompt, "A text")->type_name("TEXT");
  input->add_option("--prompt-file", arguments->file, "The text of a file, plain or compressed; - is standard input")
      ->type_name("FILE");
  input->add_option("--ids", arguments->ids, "Token numbers separated by white space, one sequence per line")
      ->type_name("FILE");
  input->require_option(1);
  app.add_option("--max-tokens", arguments->max_tokens, "The most tokens to generate; eos_token_id ends a text earlier")
      ->capture_default_str()
      ->check(non_negative_number())
      ->type_name("N");
  add_sampling(app, *arguments);
  app.add_option("--stop", arguments->stop, "A text that ends the answer and is not shown; may be given several times")
      ->type_name("TEXT")
      ->check([](const std::string& text) { return text.empty() ? "a stop text must not be empty" : std::string(); })
      ->allow_extra_args(false);
  app.add_option("--iterations", arguments->iterations, "GKA's solver steps: 0 to the model's own, or auto")
      ->type_name("N")
      ->check(check_iterations);
  add_cache_option(app, arguments->kv_cache_dtype);
  auto* numbers = app.add_flag("--print-ids", arguments->print_ids,
                               "Print only the new token numbers, one line per line of input (eos_token_id included)");
  app.add_flag("--echo", arguments->echo, "Print the prompt before the answer")->excludes(numbers);
  app.footer(
      "Examples:\n"
      "  gka generate runs/book --prompt 'It was' --max-tokens 80 --temperature 0.8\n"
      "  gka generate model --prompt-file question.txt --greedy --stop '.'\n"
      "  gka generate model --ids numbers.txt --print-ids --greedy");
  return [arguments] { return run(*arguments); };
}

}  // namespace gka::cli
