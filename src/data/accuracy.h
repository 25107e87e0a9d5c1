// How a synthetic task is scored, the same for all: an *answer* is a run of neighbouring positions that have a target,
// and it counts when every token of it is right. In MQAR an answer is one token, in copying the whole copy.
#pragma once

#include <cstdint>
#include <span>

#include "base/labels.h"

namespace gka::data {

struct Accuracy {
  std::int64_t tokens = 0, right_tokens = 0;        // positions with a target
  std::int64_t answers = 0, right_answers = 0;      // runs of them
  std::int64_t sequences = 0, right_sequences = 0;  // sequences with all answers right

  double exact_match() const { return answers == 0 ? 0.0 : static_cast<double>(right_answers) / answers; }
  double token_accuracy() const { return tokens == 0 ? 0.0 : static_cast<double>(right_tokens) / tokens; }
  double sequence_accuracy() const { return sequences == 0 ? 0.0 : static_cast<double>(right_sequences) / sequences; }

  Accuracy& operator+=(const Accuracy& other);
};

/// `targets` are sequences of `length` positions one after the other; `predicted` has one token per target that is not
/// kIgnoredLabel, in the same order.
Accuracy score(std::span<const std::int64_t> targets, std::int64_t length, std::span<const std::int64_t> predicted);

}  // namespace gka::data
