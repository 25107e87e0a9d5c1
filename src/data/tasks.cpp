// The tasks themselves. Where an answer is several tokens long it is given to the model as it goes along (teacher
// forcing): such a task writes T + 1 tokens and says which are answers, and `predict_next` makes inputs and targets of
// them. MQAR and selective copying show no answer at all.
#include "data/tasks.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <unordered_set>

#include "base/nearest.h"

namespace gka::data {
namespace {

using Tokens = std::span<std::int64_t>;

enum Mark : std::int64_t { kNothing = 0, kNeedle = 1, kQuery = 2, kAssign = 3, kSeparator = 4, kFirstFree = 5 };

/// What a sequence may have of anything; products of two such numbers, and a few of those together, fit 64 bits.
constexpr std::int64_t kMostOfAnything = std::int64_t{1} << 28;
constexpr std::int64_t kMostExamples = std::int64_t{1} << 40;

/// Part `part` of `parts` equal ones of what the marks leave of the vocabulary.
std::pair<std::int64_t, std::int64_t> share(const TaskOptions& o, std::int64_t part, std::int64_t parts) {
  const auto width = (o.vocab_size - kFirstFree) / parts;
  return {kFirstFree + part * width, kFirstFree + (part + 1) * width};
}

/// `count` different numbers of first … last − 1, in random order.
std::vector<std::int64_t> draw_distinct(Random& random, std::int64_t count, std::int64_t first, std::int64_t last) {
  std::vector<std::int64_t> drawn;
  drawn.reserve(static_cast<std::size_t>(count));
  if (4 * count >= last - first) {  // most of them: shuffle all
    std::vector<std::int64_t> all(static_cast<std::size_t>(last - first));
    std::iota(all.begin(), all.end(), first);
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      std::swap(all[i], all[static_cast<std::size_t>(random.between(static_cast<std::int64_t>(i), last - first))]);
      drawn.push_back(all[i]);
    }
    return drawn;
  }
  std::unordered_set<std::int64_t> seen;
  while (drawn.size() < static_cast<std::size_t>(count)) {
    const auto number = random.between(first, last);
    if (seen.insert(number).second) drawn.push_back(number);
  }
  return drawn;
}

std::vector<std::int64_t> draw_distinct(Random& random, std::int64_t count,
                                        std::pair<std::int64_t, std::int64_t> range) {
  return draw_distinct(random, count, range.first, range.second);
}

/// `count` of the numbers 0 … weights.size() − 1 without repetition, one after the other in proportion to the weights
/// of those left: the order of −ln(u)/w is the order of such draws.
std::vector<std::int64_t> draw_weighted(Random& random, std::int64_t count, std::span<const double> weights) {
  std::vector<std::pair<double, std::int64_t>> race(weights.size());
  for (std::size_t i = 0; i < weights.size(); ++i) {
    race[i] = {-std::log(random.uniform()) / weights[i], static_cast<std::int64_t>(i)};
  }
  std::partial_sort(race.begin(), race.begin() + count, race.end());
  std::vector<std::int64_t> drawn;
  for (std::int64_t i = 0; i < count; ++i) drawn.push_back(race[static_cast<std::size_t>(i)].second);
  return drawn;
}

/// inputs and targets from T + 1 tokens: a target wherever the next token is an answer.
void predict_next(std::span<const std::int64_t> sequence, std::span<const char> answer, Tokens inputs, Tokens targets) {
  for (std::size_t t = 0; t < inputs.size(); ++t) {
    inputs[t] = sequence[t];
    targets[t] = answer[t + 1] ? sequence[t + 1] : kIgnoredLabel;
  }
}

// ---- MQAR

std::int64_t mqar_needs(const TaskOptions& o) { return 4 * o.pairs; }

/// p_i ∝ a·i^(a−1), i = 1 … places.
std::vector<double> power_law(double a, std::int64_t places) {
  std::vector<double> p(static_cast<std::size_t>(places));
  for (std::size_t i = 0; i < p.size(); ++i) p[i] = a * std::pow(static_cast<double>(i + 1), a - 1);
  return p;
}

void mqar(const TaskOptions& o, Random& random, Tokens inputs, Tokens targets) {
  const auto half = o.vocab_size / 2;
  const auto keys = draw_distinct(random, o.pairs, 1, half);
  const auto values = draw_distinct(random, o.pairs, half, o.vocab_size);
  const auto context = 2 * o.pairs;
  const auto gaps = draw_weighted(random, o.pairs, power_law(o.power, (o.tokens - context) / 2));

  std::ranges::fill(inputs, kNothing);
  std::ranges::fill(targets, kIgnoredLabel);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    inputs[2 * i] = keys[i];
    inputs[2 * i + 1] = values[i];
    const auto asked = static_cast<std::size_t>(context + 2 * gaps[i]);
    inputs[asked] = keys[i];
    targets[asked] = values[i];
  }
  if (o.filler == Filler::zeros) return;
  for (auto& token : inputs) {
    if (token == kNothing) token = random.below(o.vocab_size);
  }
}

// ---- Needles in a haystack

/// Statements hidden at random places of a haystack, then questions with their answers. The roles of tokens: a third of
/// the vocabulary each for keys, values and hay.
struct Haystack {
  const TaskOptions& options;
  Random& random;
  std::vector<std::int64_t> sequence;
  std::vector<char> answer;

  Haystack(const TaskOptions& o, Random& r)
      : options(o), random(r), sequence(static_cast<std::size_t>(o.tokens + 1), kNothing), answer(sequence.size(), 0) {
    if (o.filler == Filler::zeros) return;
    const auto [first, last] = share(o, 2, 3);
    for (auto& token : sequence) token = random.between(first, last);
  }

  std::vector<std::int64_t> keys(std::int64_t count) { return draw_distinct(random, count, share(options, 0, 3)); }

  /// `count` values of value_tokens tokens, no two of which start alike.
  std::vector<std::vector<std::int64_t>> values(std::int64_t count) {
    const auto range = share(options, 1, 3);
    std::vector<std::vector<std::int64_t>> drawn;
    for (const auto head : draw_distinct(random, count, range)) {
      auto& value = drawn.emplace_back(1, head);
      while (static_cast<std::int64_t>(value.size()) < options.value_tokens) {
        value.push_back(random.between(range.first, range.second));
      }
    }
    return drawn;
  }

  /// Puts statements of one length, in this order, at random places before the last `tail` tokens.
  void hide(const std::vector<std::vector<std::int64_t>>& statements, std::int64_t tail) {
    const auto length = static_cast<std::int64_t>(statements.front().size());
    const auto count = static_cast<std::int64_t>(statements.size());
    const auto room = static_cast<std::int64_t>(sequence.size()) - tail - count * (length - 1);
    auto places = draw_distinct(random, count, 0, room);
    std::ranges::sort(places);
    for (std::int64_t i = 0; i < count; ++i) {
      const auto& statement = statements[static_cast<std::size_t>(i)];
      std::ranges::copy(statement, sequence.begin() + places[static_cast<std::size_t>(i)] + i * (length - 1));
    }
  }

  /// The last tokens: each question is a mark, what is asked about, and the answer.
  void ask(const std::vector<std::pair<std::int64_t, std::vector<std::int64_t>>>& questions, std::int64_t tail) {
    auto at = sequence.size() - static_cast<std::size_t>(tail);
    for (const auto& [about, reply] : questions) {
      sequence[at++] = kQuery;
      sequence[at++] = about;
      for (const auto token : reply) {
        sequence[at] = token;
        answer[at++] = 1;
      }
    }
  }
};

std::vector<std::int64_t> needle(std::int64_t key, const std::vector<std::int64_t>& value) {
  std::vector<std::int64_t> statement{kNeedle, key};
  statement.insert(statement.end(), value.begin(), value.end());
  return statement;
}

/// `needles` pairs, `asked` of them asked for.
void ask_needles(const TaskOptions& o, std::int64_t needles, std::int64_t asked, Random& random, Tokens inputs,
                 Tokens targets) {
  Haystack hay(o, random);
  const auto keys = hay.keys(needles);
  const auto values = hay.values(needles);
  std::vector<std::vector<std::int64_t>> statements;
  for (std::size_t i = 0; i < keys.size(); ++i) statements.push_back(needle(keys[i], values[i]));
  std::vector<std::pair<std::int64_t, std::vector<std::int64_t>>> questions;
  for (const auto i : draw_distinct(random, asked, 0, needles)) {
    questions.emplace_back(keys[static_cast<std::size_t>(i)], values[static_cast<std::size_t>(i)]);
  }
  const auto tail = asked * (2 + o.value_tokens);
  hay.hide(statements, tail);
  hay.ask(questions, tail);
  predict_next(hay.sequence, hay.answer, inputs, targets);
}

std::int64_t needles_need(const TaskOptions& o, std::int64_t needles, std::int64_t asked) {
  return (needles + asked) * (2 + o.value_tokens) - 1;
}

std::int64_t single_needs(const TaskOptions& o) { return needles_need(o, 1, 1); }
std::int64_t multi_key_needs(const TaskOptions& o) { return needles_need(o, o.needles, 1); }
std::int64_t multi_query_needs(const TaskOptions& o) { return needles_need(o, o.needles, o.queries); }

void needle_single(const TaskOptions& o, Random& random, Tokens inputs, Tokens targets) {
  ask_needles(o, 1, 1, random, inputs, targets);
}

void needle_multi_key(const TaskOptions& o, Random& random, Tokens inputs, Tokens targets) {
  ask_needles(o, o.needles, 1, random, inputs, targets);
}

void needle_multi_query(const TaskOptions& o, Random& random, Tokens inputs, Tokens targets) {
  ask_needles(o, o.needles, o.queries, random, inputs, targets);
}

std::int64_t multi_value_needs(const TaskOptions& o) {
  return o.values * (2 + o.value_tokens) + 2 + o.values * o.value_tokens - 1;
}

void needle_multi_value(const TaskOptions& o, Random& random, Tokens inputs, Tokens targets) {
  Haystack hay(o, random);
  const auto key = hay.keys(1).front();
  std::vector<std::vector<std::int64_t>> statements;
  std::vector<std::int64_t> all;
  for (const auto& value : hay.values(o.values)) {
    statements.push_back(needle(key, value));
    all.insert(all.end(), value.begin(), value.end());
  }
  const auto tail = 2 + o.values * o.value_tokens;
  hay.hide(statements, tail);
  hay.ask({{key, all}}, tail);
  predict_next(hay.sequence, hay.answer, inputs, targets);
}

// ---- Variable tracking

std::int64_t tracking_needs(const TaskOptions& o) { return 3 * o.chains * (o.hops + 1) + 2 + (o.hops + 1) - 1; }

/// x := 7, y := x, z := y …, several chains mixed; asked for a value, name all variables that have it, in order.
void variable_tracking(const TaskOptions& o, Random& random, Tokens inputs, Tokens targets) {
  Haystack hay(o, random);
  const auto length = o.hops + 1;
  const auto names = hay.keys(o.chains * length);
  const auto values = draw_distinct(random, o.chains, share(o, 1, 3));
  const auto name = [&](std::int64_t chain, std::int64_t link) {
    return names[static_cast<std::size_t>(chain * length + link)];
  };

  // Which chain speaks next: every order in which each chain keeps its own is equally likely.
  std::vector<std::int64_t> turns;
  for (std::int64_t chain = 0; chain < o.chains; ++chain)
    turns.insert(turns.end(), static_cast<std::size_t>(length), chain);
  for (std::size_t i = turns.size(); i > 1; --i) {
    std::swap(turns[i - 1], turns[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
  }
  std::vector<std::int64_t> spoken(static_cast<std::size_t>(o.chains), 0);
  std::vector<std::vector<std::int64_t>> statements;
  for (const auto chain : turns) {
    const auto link = spoken[static_cast<std::size_t>(chain)]++;
    const auto from = link == 0 ? values[static_cast<std::size_t>(chain)] : name(chain, link - 1);
    statements.push_back({kAssign, name(chain, link), from});
  }

  const auto asked = random.below(o.chains);
  std::vector<std::int64_t> reply;
  for (std::int64_t link = 0; link < length; ++link) reply.push_back(name(asked, link));
  hay.hide(statements, 2 + length);
  hay.ask({{values[static_cast<std::size_t>(asked)], reply}}, 2 + length);
  predict_next(hay.sequence, hay.answer, inputs, targets);
}

// ---- Copying

std::int64_t copy_needs(const TaskOptions& o) { return 2 * o.symbols; }

/// Filler, the symbols, a separator, the symbols again.
void copy(const TaskOptions& o, Random& random, Tokens inputs, Tokens targets) {
  std::vector<std::int64_t> sequence(static_cast<std::size_t>(o.tokens + 1), kNothing);
  std::vector<char> answer(sequence.size(), 0);
  const auto n = static_cast<std::size_t>(o.symbols);
  const auto separator = sequence.size() - n - 1;
  for (std::size_t i = 0; i < n; ++i) {
    const auto symbol = random.between(kFirstFree, o.vocab_size);
    sequence[separator - n + i] = symbol;
    sequence[separator + 1 + i] = symbol;
    answer[separator + 1 + i] = 1;
  }
  sequence[separator] = kSeparator;
  predict_next(sequence, answer, inputs, targets);
}

std::int64_t selective_copy_needs(const TaskOptions& o) { return 2 * o.symbols; }

/// Symbols scattered among filler, then as many separators, at which they are to be said in order.
void selective_copy(const TaskOptions& o, Random& random, Tokens inputs, Tokens targets) {
  const auto context = o.tokens - o.symbols;
  std::ranges::fill(inputs, kNothing);
  std::ranges::fill(targets, kIgnoredLabel);
  if (o.filler == Filler::random) {
    const auto [first, last] = share(o, 1, 2);
    for (auto& token : inputs) token = random.between(first, last);
  }
  auto places = draw_distinct(random, o.symbols, 0, context);
  std::ranges::sort(places);
  const auto [first, last] = share(o, 0, 2);
  for (std::int64_t i = 0; i < o.symbols; ++i) {
    const auto symbol = random.between(first, last);
    inputs[static_cast<std::size_t>(places[static_cast<std::size_t>(i)])] = symbol;
    inputs[static_cast<std::size_t>(context + i)] = kSeparator;
    targets[static_cast<std::size_t>(context + i)] = symbol;
  }
}

// ---- The table

using Names = std::string_view;
constexpr std::array<Names, 5> kMqarOptions{"tokens", "vocab_size", "filler", "pairs", "power"};
constexpr std::array<Names, 4> kSingleOptions{"tokens", "vocab_size", "filler", "value_tokens"};
constexpr std::array<Names, 5> kMultiKeyOptions{"tokens", "vocab_size", "filler", "value_tokens", "needles"};
constexpr std::array<Names, 5> kMultiValueOptions{"tokens", "vocab_size", "filler", "value_tokens", "values"};
constexpr std::array<Names, 6> kMultiQueryOptions{"tokens",       "vocab_size", "filler",
                                                  "value_tokens", "needles",    "queries"};
constexpr std::array<Names, 5> kTrackingOptions{"tokens", "vocab_size", "filler", "chains", "hops"};
constexpr std::array<Names, 3> kCopyOptions{"tokens", "vocab_size", "symbols"};
constexpr std::array<Names, 4> kSelectiveCopyOptions{"tokens", "vocab_size", "filler", "symbols"};

const std::array kTasks{
    Task{"mqar", "Multi-query associative recall: pairs at the start, each key asked for once more", kMqarOptions,
         mqar_needs, mqar},
    Task{"needle_single", "One key and value in a haystack, asked for at the end", kSingleOptions, single_needs,
         needle_single},
    Task{"needle_multi_key", "Several needles, one asked for", kMultiKeyOptions, multi_key_needs, needle_multi_key},
    Task{"needle_multi_value", "One key with several values, all asked for in order", kMultiValueOptions,
         multi_value_needs, needle_multi_value},
    Task{"needle_multi_query", "Several needles, several asked for", kMultiQueryOptions, multi_query_needs,
         needle_multi_query},
    Task{"variable_tracking", "Chains of assignments; name the variables that hold a value", kTrackingOptions,
         tracking_needs, variable_tracking},
    Task{"copy", "Say a sequence of symbols again", kCopyOptions, copy_needs, copy},
    Task{"selective_copy", "Say the symbols scattered among filler, in order", kSelectiveCopyOptions,
         selective_copy_needs, selective_copy, TaskOptions{.filler = Filler::zeros}},
};

std::runtime_error wrong(const Task& task, const std::string& what) {
  return std::runtime_error("task " + std::string(task.name) + ": " + what + ".");
}

/// At most this many different keys or values are drawn from a range of that size.
void check_vocabulary(const Task& task, const TaskOptions& o) {
  const auto third = (o.vocab_size - kFirstFree) / 3;
  struct Demand {
    std::string_view option;
    std::int64_t wanted, room;
  };
  const Demand demands[]{
      {"pairs", o.pairs, o.vocab_size / 2 - 1},
      {"needles", o.needles, third},
      {"values", o.values, third},
      {"hops", o.chains * (o.hops + 1), third},
      {"value_tokens", 1, third},
      {"symbols", 1, (o.vocab_size - kFirstFree) / 2},
  };
  for (const auto& [option, wanted, room] : demands) {
    if (task.reads(option) && wanted > room) {
      throw wrong(task, "vocab_size " + std::to_string(o.vocab_size) + " is too small for " +
                            (wanted > 1 ? std::to_string(wanted) + " different ones of it" : "it") +
                            "; make it larger");
    }
  }
}

}  // namespace

std::span<const Task> tasks() { return kTasks; }

const Task& find_task(std::string_view name) {
  std::vector<std::string_view> names;
  for (const auto& task : kTasks) {
    if (task.name == name) return task;
    names.push_back(task.name);
  }
  std::string message = "there is no task '" + std::string(name) + "'";
  if (const auto guess = nearest(name, names)) message += "; did you mean '" + std::string(*guess) + "'?";
  message += message.ends_with('?') ? " The tasks are" : "; the tasks are";
  for (std::size_t i = 0; i < names.size(); ++i) message += (i == 0 ? " " : ", ") + std::string(names[i]);
  throw std::runtime_error(message + ".");
}

void check(const Task& task, const TaskOptions& options) {
  TaskOptions::fields(options, [&](std::string_view name, const auto& value) {
    if constexpr (std::is_same_v<decltype(value), const std::int64_t&>) {
      const std::int64_t least = name == "hops" ? 0 : 1;
      if (!task.reads(name) || (value >= least && value <= kMostOfAnything)) return;
      throw wrong(task, std::string(name) + " must be from " + std::to_string(least) + " to " +
                            std::to_string(kMostOfAnything) + ", got " + std::to_string(value));
    }
  });
  if (!(options.power > 0) || !std::isfinite(options.power)) {
    throw wrong(task, "power must be a positive number, got " + std::to_string(options.power));
  }
  check_vocabulary(task, options);
  const bool asks_too_much = task.generate == needle_multi_query && options.queries > options.needles;
  if (asks_too_much) {
    throw wrong(task, "queries (" + std::to_string(options.queries) + ") must not exceed needles (" +
                          std::to_string(options.needles) + ")");
  }
  if (const auto least = task.tokens_needed(options); options.tokens < least) {
    throw wrong(task, "sequences of " + std::to_string(options.tokens) +
                          " tokens are too short for these options, which " + "need at least " + std::to_string(least));
  }
}

TaskStream::TaskStream(const Task& task, std::vector<TaskSize> sizes, std::uint64_t seed)
    : task_(task), sizes_(std::move(sizes)), seed_(seed) {
  if (sizes_.empty()) throw wrong(task, "sizes is empty; give at least one");
  const auto fixed = std::ranges::count_if(sizes_, [](const TaskSize& size) { return size.examples > 0; });
  fixed_ = fixed > 0;
  if (fixed_ && fixed != static_cast<std::ptrdiff_t>(sizes_.size())) {
    throw wrong(task, "either all sizes have examples or none has");
  }
  double sum = 0;
  for (const auto& size : sizes_) {
    check(task, size.options);
    if (size.examples < 0 || size.examples > kMostExamples) {
      throw wrong(task, "examples must be from 0 to " + std::to_string(kMostExamples) + ", got " +
                            std::to_string(size.examples));
    }
    if (!(size.weight >= 0) || !std::isfinite(size.weight))
      throw wrong(task, "weights must be finite and not negative");
    sum += size.weight;
  }
  if (!(sum > 0)) throw wrong(task, "one of the sizes must have a weight above zero");
}

std::int64_t TaskStream::epoch() const {
  std::int64_t all = 0;
  for (const auto& size : sizes_) all += size.examples;
  return all;
}

std::int64_t TaskStream::vocab_size() const {
  return std::ranges::max(sizes_, {}, [](const TaskSize& size) { return size.options.vocab_size; }).options.vocab_size;
}

std::int64_t TaskStream::longest() const {
  return std::ranges::max(sizes_, {}, [](const TaskSize& size) { return size.options.tokens; }).options.tokens;
}

std::string TaskStream::describe() const {
  std::string text = "task " + std::string(task_.name) + ": T";
  for (std::size_t i = 0; i < sizes_.size(); ++i) {
    text += (i == 0 ? " " : ", ") + std::to_string(sizes_[i].options.tokens);
  }
  return text + (fixed_ ? ", " + std::to_string(epoch()) + " fixed sequences" : ", new sequences every step");
}

TaskStream::Choice TaskStream::choose(std::int64_t batch_number, std::int64_t batch) const {
  const auto number = static_cast<std::uint64_t>(batch_number);
  if (!fixed_) {
    double sum = 0;
    for (const auto& size : sizes_) sum += size.weight;
    double at = Random({seed_, 1, number}).uniform() * sum;
    std::size_t chosen = 0;
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      if (sizes_[i].weight == 0) continue;
      chosen = i;
      if (at <= sizes_[i].weight) break;
      at -= sizes_[i].weight;
    }
    return {chosen, batch_number * batch, 0};
  }
  const auto batches_of = [&](const TaskSize& size) { return std::max<std::int64_t>(1, size.examples / batch); };
  std::int64_t in_epoch = 0;
  for (const auto& size : sizes_) in_epoch += batches_of(size);
  const auto epoch = static_cast<std::uint64_t>(batch_number / in_epoch);
  auto place = Permutation(in_epoch, mix({seed_, 2, epoch}))(batch_number % in_epoch);
  std::size_t chosen = 0;
  while (place >= batches_of(sizes_[chosen])) place -= batches_of(sizes_[chosen++]);
  return {chosen, place * batch, epoch};
}

std::int64_t TaskStream::fill(std::int64_t position, std::int64_t batch, std::vector<std::int64_t>& inputs,
                              std::vector<std::int64_t>& targets) const {
  const auto choice = choose(position / batch, batch);
  const auto& size = sizes_[choice.size];
  const auto length = static_cast<std::size_t>(size.options.tokens);
  inputs.resize(static_cast<std::size_t>(batch) * length);
  targets.resize(inputs.size());
  std::optional<Permutation> order;
  if (fixed_) order.emplace(size.examples, mix({seed_, 3, choice.size, choice.epoch}));
  for (std::int64_t row = 0; row < batch; ++row) {
    auto index = choice.first + row;
    if (order) index = (*order)(index % size.examples);
    Random random({seed_, 4, fixed_ ? choice.size : 0, static_cast<std::uint64_t>(index)});
    const auto start = static_cast<std::size_t>(row) * length;
    task_.generate(size.options, random, std::span(inputs).subspan(start, length),
                   std::span(targets).subspan(start, length));
  }
  return size.options.tokens;
}

}  // namespace gka::data
