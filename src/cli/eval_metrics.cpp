#include "cli/eval_metrics.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <functional>
#include <limits>
#include <numbers>
#include <string_view>
#include <utility>

#include "cli/table.h"
#include "cli/white_space.h"

namespace gka::cli {
namespace {

/// One item says nothing of how others differ from it.
constexpr double kNoError = std::numeric_limits<double>::quiet_NaN();

/// The mean and its standard error, from the sample's deviation (n − 1).
Metric mean_of(std::string name, const std::vector<double>& values) {
  const auto n = static_cast<double>(values.size());
  double sum = 0, squares = 0;
  for (const auto value : values) sum += value;
  for (const auto value : values) squares += (value - sum / n) * (value - sum / n);
  return {.name = std::move(name), .value = sum / n, .error = n > 1 ? std::sqrt(squares / (n - 1) / n) : kNoError};
}

/// Σ log likelihood / Σ length, and its standard error as that of a ratio of means.
Metric ratio_of(const std::vector<double>& tops, const std::vector<double>& lengths) {
  double top = 0, length = 0, squares = 0;
  for (const auto value : tops) top += value;
  for (const auto value : lengths) length += value;
  const auto ratio = top / length, n = static_cast<double>(tops.size());
  for (std::size_t i = 0; i < tops.size(); ++i) squares += std::pow(tops[i] - ratio * lengths[i], 2);
  return {.value = ratio, .error = n > 1 ? std::sqrt(squares * n / (n - 1)) / length : kNoError};
}

/// exp(−x), whose error follows to first order.
Metric exponential(std::string name, const Metric& of) {
  const auto value = std::exp(-of.value);
  return {.name = std::move(name), .value = value, .error = value * of.error};
}

/// The largest of f(0) … f(count − 1); of equals the first.
std::int64_t best(std::size_t count, const std::function<double(std::size_t)>& f) {
  std::size_t found = 0;
  for (std::size_t i = 1; i < count; ++i) {
    if (f(i) > f(found)) found = i;
  }
  return static_cast<std::int64_t>(found);
}

std::vector<Metric> of_choices(const Task& task, const std::vector<Answer>& answers) {
  std::vector<double> plain, per_character, per_byte;
  std::size_t first = 0;
  for (const auto& item : task.items) {
    const auto taken = choose(item, &answers[first]);
    first += item.endings.size();
    plain.push_back(taken.plain == item.answer);
    per_character.push_back(taken.per_character == item.answer);
    per_byte.push_back(taken.per_byte == item.answer);
  }
  return {mean_of("acc", plain), mean_of("acc_norm", per_character), mean_of("acc_bytes", per_byte)};
}

std::vector<Metric> of_last_words(const Task& /*task*/, const std::vector<Answer>& answers) {
  std::vector<double> right, likely;
  for (const auto& answer : answers) {
    right.push_back(answer.greedy);
    likely.push_back(answer.log_likelihood);
  }
  return {mean_of("acc", right), exponential("perplexity", mean_of("", likely))};
}

/// Pieces between white space, as Python's re.split(r"\s+") counts them: white space at an end makes an empty one.
double words(std::string_view text) {
  double count = 1;
  bool inside = false;
  for (std::size_t i = 0; i < text.size();) {
    const auto size = white_space_at(text, i);
    if (size > 0 && !inside) ++count;
    inside = size > 0;
    i += std::max<std::size_t>(1, size);
  }
  return count;
}

std::vector<Metric> of_texts(const Task& task, const std::vector<Answer>& answers) {
  std::vector<double> likely, by_bytes, by_words;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const auto& text = task.items[i].endings[0];
    likely.push_back(answers[i].log_likelihood);
    by_bytes.push_back(static_cast<double>(text.size()));
    by_words.push_back(words(text));
  }
  const auto per_byte = ratio_of(likely, by_bytes);
  return {{"bits_per_byte", -per_byte.value / std::numbers::ln2, per_byte.error / std::numbers::ln2},
          exponential("byte_perplexity", per_byte),
          exponential("word_perplexity", ratio_of(likely, by_words))};
}

std::vector<Metric> of_generated(const Task& task, const std::vector<Answer>& answers) {
  std::vector<double> right;
  for (std::size_t i = 0; i < answers.size(); ++i) right.push_back(counts(task, task.items[i], answers[i].text));
  return {mean_of(task.kind == TaskKind::contains ? "contains" : "exact_match", right)};
}

/// ASCII letters only: what cannot be lowered without tables stays as it is.
std::string lowered(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return c < 128 ? std::tolower(c) : c; });
  return text;
}

std::string normal(const Task& task, std::string text) {
  if (task.ignore_case) text = lowered(std::move(text));
  if (task.ignore_punctuation) {
    std::erase_if(text, [](unsigned char c) { return c < 128 && std::ispunct(c) != 0; });
  }
  return text;
}

}  // namespace

Choice choose(const TaskItem& item, const Answer* answers) {
  const auto per = [&](auto&& length) {
    return best(item.endings.size(), [&](std::size_t i) {
      return answers[i].log_likelihood / static_cast<double>(length(item.endings[i]));
    });
  };
  return {.plain = per([](const std::string&) { return 1; }),
          .per_character = per([](const std::string& ending) { return width(ending); }),
          .per_byte = per([](const std::string& ending) { return ending.size(); })};
}

bool counts(const Task& task, const TaskItem& item, const std::string& text) {
  if (task.kind == TaskKind::contains) {
    const auto said = lowered(text);
    return std::ranges::any_of(item.endings,
                               [&](const auto& answer) { return said.find(lowered(answer)) != std::string::npos; });
  }
  const auto said = normal(task, std::string(without_leading_space(text)));
  return std::ranges::any_of(item.endings, [&](const auto& answer) { return said == normal(task, answer); });
}

std::vector<Metric> measure(const Task& task, const std::vector<Answer>& answers) {
  using Measure = std::vector<Metric> (*)(const Task&, const std::vector<Answer>&);
  constexpr std::array<Measure, kTaskKinds> kMeasures{of_choices, of_last_words, of_texts, of_generated, of_generated};
  return kMeasures[static_cast<std::size_t>(task.kind)](task, answers);
}

}  // namespace gka::cli
