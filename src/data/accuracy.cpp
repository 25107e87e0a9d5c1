#include "data/accuracy.h"

#include <stdexcept>
#include <string>

namespace gka::data {

Accuracy& Accuracy::operator+=(const Accuracy& other) {
  tokens += other.tokens;
  right_tokens += other.right_tokens;
  answers += other.answers;
  right_answers += other.right_answers;
  sequences += other.sequences;
  right_sequences += other.right_sequences;
  return *this;
}

namespace {

/// One sequence; takes its predictions from the front of `predicted`.
Accuracy score_sequence(std::span<const std::int64_t> targets, std::span<const std::int64_t>& predicted) {
  Accuracy result{.sequences = 1};
  bool in_answer = false, answer_right = false;
  const auto end_answer = [&] {
    if (in_answer && answer_right) ++result.right_answers;
    in_answer = false;
  };
  for (const auto target : targets) {
    if (target == kIgnoredLabel) {
      end_answer();
      continue;
    }
    if (predicted.empty()) throw std::invalid_argument("score: there are fewer predictions than targets");
    if (!in_answer) {
      ++result.answers;
      in_answer = answer_right = true;
    }
    const bool right = predicted.front() == target;
    predicted = predicted.subspan(1);
    ++result.tokens;
    result.right_tokens += right;
    answer_right = answer_right && right;
  }
  end_answer();
  result.right_sequences = result.right_answers == result.answers;
  return result;
}

}  // namespace

Accuracy score(std::span<const std::int64_t> targets, std::int64_t length, std::span<const std::int64_t> predicted) {
  if (length < 1 || targets.size() % static_cast<std::size_t>(length) != 0) {
    throw std::invalid_argument("score: " + std::to_string(targets.size()) +
                                " targets are no whole number of sequences of " + std::to_string(length));
  }
  Accuracy sum;
  for (std::size_t start = 0; start < targets.size(); start += static_cast<std::size_t>(length)) {
    sum += score_sequence(targets.subspan(start, static_cast<std::size_t>(length)), predicted);
  }
  if (!predicted.empty()) throw std::invalid_argument("score: there are more predictions than targets");
  return sum;
}

}  // namespace gka::data
