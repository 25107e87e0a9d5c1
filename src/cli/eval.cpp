// `gka eval`: how well a model does tasks. Items become token sequences that are scored, many in a pass, or that the
// engine continues; texts are cut into context and ending as lm-evaluation-harness does it, so that accuracies are the
// same to the last digit.
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
#include "base/files.h"
#include "cli/commands.h"
#include "cli/eval_metrics.h"
#include "cli/eval_task.h"
#include "cli/interrupt.h"
#include "cli/model_inputs.h"
#include "cli/numbers.h"
#include "cli/outputs.h"
#include "cli/packed_scores.h"
#include "cli/progress.h"
#include "cli/table.h"
#include "cli/white_space.h"
#include "infer/make_engine.h"

namespace gka::cli {
namespace {

struct Arguments {
  ModelArguments model;
  std::vector<std::string> tasks;
  std::int64_t limit = 0, max_length = 0, batch = 0;
  std::string samples;
  bool json = false;
};

/// One sequence for the engine: its last `scored` tokens count; or, where none does, it is continued.
struct Question {
  Tokens tokens{};
  std::int64_t scored = 0;
  std::size_t answer = 0;  // to which of the task's answers it adds
};

struct Plan {
  std::vector<Question> questions{};
  std::size_t answers = 0;
  std::int64_t cut = 0;  // questions that lost their beginning to max_length
};

// ---- From items to tokens

/// Text to tokens, with what the model puts before a text and the longest it may read.
struct Reader {
  const data::Tokenizer& tokenizer;
  std::optional<std::int64_t> first;  // what a text without a context begins with
  std::int64_t vocabulary;
  std::int64_t max_length;  // tokens that the model reads at a time; 0: any number

  Tokens encode(std::string_view text, data::Specials specials, const std::string& where) const {
    const auto ids = tokenizer.encode(text, specials);
    const auto bad = std::ranges::find_if(ids, [&](auto id) { return id >= vocabulary; });
    if (bad != ids.end()) {
      throw std::runtime_error("token " + std::to_string(*bad) + " of " + where +
                               " is outside the model's vocabulary of " + std::to_string(vocabulary) + " tokens");
    }
    return {ids.begin(), ids.end()};
  }

  std::int64_t first_token() const {
    if (first) return *first;
    throw std::runtime_error(
        "the tokenizer has no token that begins a text (bos_token or eos_token in tokenizer_config.json, or an "
        "end-of-document token), which an item without context needs");
  }
};

/// Of context and ending as one text the ending's tokens: white space at the context's end belongs to the ending, and
/// the context's tokens are those it has by itself.
Question ending_question(const Reader& reader, const std::string& context, const std::string& ending,
                         const std::string& where) {
  Question question;
  if (context.empty()) {
    question.tokens = reader.encode(ending, data::Specials::no, where);
    if (question.tokens.empty() || question.tokens[0] != reader.first_token()) {
      question.tokens.insert(question.tokens.begin(), reader.first_token());
    }
    question.scored = std::ssize(question.tokens) - 1;
  } else {
    const auto before = reader.encode(without_trailing_space(context), data::Specials::yes, where);
    question.tokens = reader.encode(context + ending, data::Specials::yes, where);
    question.scored = std::max<std::int64_t>(0, std::ssize(question.tokens) - std::ssize(before));
    if (before.empty()) question.tokens.insert(question.tokens.begin(), reader.first_token());
  }
  return question;
}

/// Drops the beginning of what is longer than the model reads; the last token is only predicted.
bool shorten(Question& question, std::int64_t most) {
  const auto excess = std::ssize(question.tokens) - most;
  if (most <= 0 || excess <= 0) return false;
  question.tokens.erase(question.tokens.begin(), question.tokens.begin() + excess);
  question.scored = std::min(question.scored, most - 1);
  return true;
}

/// Windows that each see as much as the model reads, and together score every token once.
void text_questions(const Reader& reader, const std::string& text, const std::string& where, Plan& plan) {
  auto tokens = reader.encode(text, data::Specials::yes, where);
  tokens.insert(tokens.begin(), reader.first_token());
  const auto size = std::ssize(tokens), most = reader.max_length > 0 ? reader.max_length : size;
  for (std::int64_t scored = 1; scored < size;) {
    const auto end = std::min(size, scored + most);
    const auto first = std::max<std::int64_t>(0, end - most - 1);
    plan.questions.push_back({.tokens = Tokens(tokens.begin() + first, tokens.begin() + end),
                              .scored = end - scored,
                              .answer = plan.answers});
    scored = end;
  }
  ++plan.answers;
}

void item_questions(const Reader& reader, const Task& task, const TaskItem& item, const std::string& where,
                    Plan& plan) {
  if (task.kind == TaskKind::text) return text_questions(reader, item.endings[0], where, plan);
  if (task.generates()) {
    Question question{.tokens = reader.encode(item.contexts[0], data::Specials::yes, where), .answer = plan.answers++};
    if (reader.max_length > 0) {
      plan.cut += shorten(question, std::max<std::int64_t>(reader.max_length - task.max_tokens, 1));
    }
    return plan.questions.push_back(std::move(question));
  }
  for (std::size_t i = 0; i < item.endings.size(); ++i) {
    auto question = ending_question(reader, item.context(i), task.delimiter + item.endings[i], where);
    question.answer = plan.answers++;
    if (question.scored == 0) {
      throw std::runtime_error("ending " + std::to_string(i) + " of " + where + " adds no token to its context");
    }
    plan.cut += shorten(question, reader.max_length > 0 ? reader.max_length + 1 : 0);
    plan.questions.push_back(std::move(question));
  }
}

Plan plan_of(const Reader& reader, const Task& task) {
  Plan plan;
  for (std::size_t i = 0; i < task.items.size(); ++i) {
    item_questions(reader, task, task.items[i], "item " + std::to_string(i) + " of " + task.path, plan);
  }
  return plan;
}

// ---- Asking

void show_progress(LiveLine& line, const Task& task, std::size_t done, std::size_t all) {
  line.show([&] {
    const auto part = static_cast<double>(done) / static_cast<double>(all);
    return task.name + ": " + std::to_string(done) + " of " + std::to_string(all) + " questions, " +
           std::to_string(std::lround(line.seconds() * (1 - part) / part)) + " s left";
  });
}

/// What is to be scored. An answer may have several questions, the windows of a text.
std::vector<Answer> score(const models::Decoder& decoder, const Task& task, const Plan& plan, std::int64_t pass) {
  std::vector<Ending> endings;
  for (const auto& question : plan.questions) endings.push_back({.tokens = question.tokens, .scored = question.scored});
  LiveLine line;
  const auto scores =
      score_packed(decoder, endings, pass, [&](std::size_t done) { show_progress(line, task, done, endings.size()); });
  std::vector<Answer> answers(plan.answers);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    auto& answer = answers[plan.questions[i].answer];
    for (const auto log_probability : scores[i].log_probabilities) answer.log_likelihood += log_probability;
    answer.greedy = answer.greedy && scores[i].greedy;
  }
  return answers;
}

/// Has an engine answer a task's questions, several at a time.
class Asking {
 public:
  Asking(infer::Engine& engine, const data::Tokenizer& tokenizer, const Task& task, std::size_t batch)
      : engine_(engine), tokenizer_(tokenizer), task_(task), batch_(batch) {}

  std::vector<Answer> run(const Plan& plan) {
    answers_.resize(plan.answers);
    generating_.resize(plan.answers);
    LiveLine line;
    for (std::size_t i = 0; i < plan.questions.size(); ++i) {
      wait(batch_);
      generate(plan.questions[i]);
      show_progress(line, task_, i + 1, plan.questions.size());
    }
    wait(1);
    return std::move(answers_);
  }

 private:
  struct Generating {
    std::unique_ptr<data::StreamDecoder> decoder{};
    infer::RequestId request = 0;
    bool over = false;
  };

  void generate(const Question& question) {
    infer::Request request{.prompt = question.tokens, .max_tokens = task_.max_tokens};
    request.sampling.temperature = 0;
    generating_[question.answer].decoder = std::make_unique<data::StreamDecoder>(tokenizer_);
    infer::Sink sink;
    sink.on_token = [this, place = question.answer](const infer::TokenEvent& event) {
      const std::lock_guard lock(mutex_);
      if (!generating_[place].over) add(place, generating_[place].decoder->push(static_cast<data::Token>(event.token)));
    };
    submit(std::move(request), std::move(sink), question.answer);
  }

  /// What came, up to the first of what ends an answer.
  void add(std::size_t place, const std::string& text) {
    auto& whole = answers_[place].text;
    whole += text;
    auto end = std::string::npos;
    for (const auto& stop : task_.stop) end = std::min(end, whole.find(stop));
    if (end == std::string::npos) return;
    whole.resize(end);
    generating_[place].over = true;
    engine_.cancel(generating_[place].request);
  }

  void submit(infer::Request request, infer::Sink sink, std::size_t place) {
    sink.on_end = [this, place](infer::Finish, const infer::Usage&, const std::string& error) {
      const std::lock_guard lock(mutex_);
      if (!generating_[place].over) add(place, generating_[place].decoder->finish());
      if (error_.empty()) error_ = error;
      --running_;
      changed_.notify_all();
    };
    const std::lock_guard lock(mutex_);  // so that a token that comes at once finds its request's number
    ++running_;
    generating_[place].request = engine_.submit(std::move(request), std::move(sink));
  }

  /// Until fewer than `most` run.
  void wait(std::size_t most) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return running_ < most; });
    if (!error_.empty()) throw std::runtime_error(task_.path + ": " + error_);
  }

  infer::Engine& engine_;
  const data::Tokenizer& tokenizer_;
  const Task& task_;
  std::size_t batch_;
  std::vector<Answer> answers_;
  std::vector<Generating> generating_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t running_ = 0;
  std::string error_;
};

// ---- What comes out

struct Result {
  const Task* task;
  std::vector<Metric> metrics;
  std::int64_t cut;
  double seconds;
};

Json to_json(const Arguments& arguments, std::int64_t max_length, const std::vector<Result>& results) {
  Json tasks = Json::object();
  for (const auto& result : results) {
    Json metrics = Json::object();
    for (const auto& metric : result.metrics)
      metrics[metric.name] = {{"value", metric.value}, {"stderr", metric.error}};
    tasks[result.task->name] = {{"kind", name_of(result.task->kind)}, {"file", result.task->path},
                                {"items", result.task->items.size()}, {"cut", result.cut},
                                {"seconds", result.seconds},          {"metrics", std::move(metrics)}};
  }
  return {{"model", arguments.model.model}, {"max_length", max_length}, {"tasks", std::move(tasks)}};
}

std::string with_digits(double value) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), value < 100 ? "%.4f" : "%.6g", value);
  return text.data();
}

std::string to_table(const std::vector<Result>& results) {
  std::vector<Row> rows{{"task", "items", "metric", "value", "stderr"}};
  for (const auto& result : results) {
    for (const auto& metric : result.metrics) {
      rows.push_back({result.task->name, std::to_string(result.task->items.size()), metric.name,
                      with_digits(metric.value), std::isnan(metric.error) ? "–" : "±" + with_digits(metric.error)});
    }
  }
  return layout(rows, {false, true, false, true, true});
}

/// One line for every item: what the model answered, for whoever wants to look or to compare.
std::string sample_lines(const Task& task, const std::vector<Answer>& answers) {
  std::string lines;
  std::size_t first = 0;
  for (std::size_t i = 0; i < task.items.size(); ++i) {
    const auto& item = task.items[i];
    Json line{{"task", task.name}, {"item", i}};
    if (task.kind == TaskKind::choice) {
      Json likely = Json::array();
      for (std::size_t j = 0; j < item.endings.size(); ++j) likely.push_back(answers[first + j].log_likelihood);
      const auto taken = choose(item, &answers[first]);
      line.update({{"log_likelihoods", likely},
                   {"answer", item.answer},
                   {"acc", taken.plain == item.answer},
                   {"acc_norm", taken.per_character == item.answer},
                   {"acc_bytes", taken.per_byte == item.answer}});
      first += item.endings.size();
    } else if (task.generates()) {
      line.update({{"text", answers[first].text}, {"right", counts(task, item, answers[first].text)}});
      ++first;
    } else {
      line["log_likelihood"] = answers[first].log_likelihood;
      if (task.kind == TaskKind::last_word) line["greedy"] = answers[first].greedy;
      ++first;
    }
    lines += line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  }
  return lines;
}

std::vector<Task> read_tasks(const Arguments& arguments) {
  std::vector<Task> tasks;
  for (const auto& path : arguments.tasks) {
    tasks.push_back(read_task(path, arguments.limit));
    const auto same = std::ranges::count(tasks, tasks.back().name, &Task::name);
    if (same > 1) throw std::runtime_error(path + " has the task '" + tasks.back().name + "' a second time");
  }
  return tasks;
}

/// Of all questions that are answered by generating, with what is generated.
std::int64_t longest(const std::vector<Task>& tasks, const std::vector<Plan>& plans) {
  std::int64_t most = 1;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    if (!tasks[i].generates()) continue;
    for (const auto& question : plans[i].questions) {
      most = std::max(most, std::ssize(question.tokens) + tasks[i].max_tokens);
    }
  }
  return most;
}

struct Answered {
  std::vector<Answer> answers{};
  double seconds = 0;
};

/// Every task's answers: first of those that are scored, with the model itself; then the engine takes it over and
/// continues the others.
std::vector<Answered> ask(const std::vector<Task>& tasks, const std::vector<Plan>& plans, models::Decoder decoder,
                          const data::Tokenizer& tokenizer, std::int64_t batch) {
  std::vector<Answered> answered(tasks.size());
  const auto each = [&](bool generates, const auto& answer) {
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      if (tasks[i].generates() != generates) continue;
      const LiveLine clock;
      answered[i].answers = answer(tasks[i], plans[i]);
      answered[i].seconds = clock.seconds();
      std::fprintf(
          stderr, "gka: %s, %zu items in %.1f s%s\n", tasks[i].name.c_str(), tasks[i].items.size(), answered[i].seconds,
          plans[i].cut > 0 ? (", " + std::to_string(plans[i].cut) + " cut to the model's length").c_str() : "");
    }
  };
  each(false,
       [&](const Task& task, const Plan& plan) { return score(decoder, task, plan, usual_pass(decoder.device())); });
  if (std::ranges::none_of(tasks, &Task::generates)) return answered;
  const auto engine = infer::make_engine(
      std::move(decoder), {.slots = batch, .context = longest(tasks, plans), .snapshot_bytes = -1, .queue = 2 * batch});
  each(true, [&](const Task& task, const Plan& plan) {
    return Asking(*engine, tokenizer, task, static_cast<std::size_t>(batch)).run(plan);
  });
  return answered;
}

int run(const Arguments& arguments) {
  const auto tasks = read_tasks(arguments);
  keep_apart("--samples", arguments.samples, arguments.tasks);
  std::optional<NewFile> samples;  // opened now: hours later is too late to hear that there is no such folder
  Interruptible signals(arguments.samples);
  if (!arguments.samples.empty()) {
    signals.writes_file(arguments.samples);
    samples.emplace(arguments.samples);
  }
  const auto tokenizer = load_tokenizer(arguments.model);
  auto decoder = load(arguments.model);
  const auto max_length = arguments.max_length > 0
                              ? arguments.max_length
                              : std::max<std::int64_t>(decoder.config().max_position_embeddings, 0);
  const Reader reader{.tokenizer = tokenizer,
                      .first = first_token(arguments.model, tokenizer),
                      .vocabulary = decoder.config().vocab_size,
                      .max_length = max_length};
  std::vector<Plan> plans;
  for (const auto& task : tasks) plans.push_back(plan_of(reader, task));

  const auto batch = arguments.batch > 0 ? arguments.batch : decoder.device().is_cpu() ? 16 : 128;
  const auto answers = ask(tasks, plans, std::move(decoder), tokenizer, batch);
  std::vector<Result> results;
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    results.push_back({&tasks[i], measure(tasks[i], answers[i].answers), plans[i].cut, answers[i].seconds});
  }
  std::cout << (arguments.json ? to_json(arguments, max_length, results).dump(2) + "\n" : to_table(results));
  if (!samples) return 0;
  for (std::size_t i = 0; i < tasks.size(); ++i) samples->write(sample_lines(tasks[i], answers[i].answers));
  signals.finish_file([&] { samples->commit(); });
  return 0;
}

}  // namespace

Action declare_eval(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  add_model_arguments(app, arguments->model);
  app.add_option("--tasks", arguments->tasks, "Task files: JSON lines, as experiments/data writes them")
      ->required()
      ->type_name("FILE ...");
  app.add_option("--limit", arguments->limit, "Use only the first N items of each task")
      ->check(positive_number())
      ->type_name("N");
  app.add_option("--max-length", arguments->max_length,
                 "The most tokens the model reads at a time (default: its max_position_embeddings); longer contexts "
                 "lose their beginning")
      ->check(positive_number())
      ->type_name("N");
  app.add_option("--batch", arguments->batch, "Answers to generate at a time (default: 16 on the CPU, else 128)")
      ->check(positive_number())
      ->type_name("N");
  app.add_option("--samples", arguments->samples, "Write every item's answer to a file of JSON lines")
      ->type_name("FILE");
  app.add_flag("--json", arguments->json, "Print JSON instead of the table");
  app.footer(
      "Metrics are those of lm-evaluation-harness: acc, acc_norm (per character), acc_bytes; acc and perplexity of "
      "last\n"
      "words; bits_per_byte, byte_ and word_perplexity of texts; contains; exact_match.\n"
      "docs/evaluation.md describes task files.\n"
      "\n"
      "Example:\n"
      "  gka eval runs/book --tasks arc.jsonl lambada.jsonl --limit 100 --samples answers.jsonl");
  return [arguments] { return run(*arguments); };
}

}  // namespace gka::cli
