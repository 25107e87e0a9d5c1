// What `gka eval` makes of a model's answers: the metrics of lm-evaluation-harness by its definitions, with standard
// errors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/eval_task.h"

namespace gka::cli {

/// What the model said to one question: how likely it finds the ending and whether it would say it itself (greedily),
/// or the text it generated.
struct Answer {
  double log_likelihood = 0;
  bool greedy = true;
  std::string text{};
};

struct Metric {
  std::string name{};
  double value = 0;
  double error = 0;  // standard error; not a number where there is none
};

/// `answers` has one for each ending of each item (choice), else one for each item, in order.
std::vector<Metric> measure(const Task& task, const std::vector<Answer>& answers);

/// Which choice the model takes, and which is likeliest per character and per byte.
struct Choice {
  std::int64_t plain = 0, per_character = 0, per_byte = 0;
};
Choice choose(const TaskItem& item, const Answer* answers);

/// Whether a generated text counts.
bool counts(const Task& task, const TaskItem& item, const std::string& text);

}  // namespace gka::cli
