// Picks the next token of each row of logits, on the device the logits are on: penalties, biases and masks, then the
// likeliest token or a draw. A row's result depends on that row alone: its random number is a hash of the request's
// seed and of how many tokens it drew before, not the next of a shared generator.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "infer/engine.h"

namespace gka::infer {

/// What is asked of one row.
struct Row {
  const Sampling* sampling = nullptr;
  std::uint64_t drawn = 0;                                    // tokens this request drew before
  std::vector<std::int64_t> seen{};                           // distinct tokens of the prompt and the answer so far
  std::vector<std::pair<std::int64_t, std::int64_t>> came{};  // distinct tokens of the answer, and how often
  std::vector<std::int64_t> banned{};
  const std::vector<bool>* allowed = nullptr;  // of the vocabulary; nullptr: all
  std::int64_t top = 0;                        // alternatives to report
};

struct Drawn {
  TokenEvent event;
  std::string error;  // one sentence where no token could be drawn
};

/// Throws Refused where a value is out of its range.
void check_sampling(const Sampling& sampling, std::int64_t vocabulary);

/// Tokens that are drawn, and on their way to the host.
class Draws {
 public:
  /// `numbers`: float64 [B,n], token, its log-probability, its score after what the request adjusts (where n > 2), then
  /// the likeliest tokens' log-probabilities and the tokens; of those row i reports `tops[i]`.
  Draws(const at::Tensor& numbers, std::vector<std::int64_t> tops);

  /// int64 [B], where the logits are: a next step can begin with them before the host has seen them.
  at::Tensor tokens() const;
  /// Waits until they are here.
  std::vector<Drawn> wait();

 private:
  at::Tensor numbers_, host_;
  std::vector<std::int64_t> tops_;
  std::optional<c10::Event> arrived_;
};

/// logits [B,V]; one host transfer for all rows.
Draws begin_draw(const at::Tensor& logits, std::span<const Row> rows);
std::vector<Drawn> draw(const at::Tensor& logits, std::span<const Row> rows);

/// log p of tokens[i] in row i of logits, and the `top` likeliest.
std::vector<TokenEvent> score(const at::Tensor& logits, std::span<const std::int64_t> tokens, std::int64_t top);

/// In [0, 1): the number a request with that seed draws its n-th token with.
double uniform(std::uint64_t seed, std::uint64_t n);

}  // namespace gka::infer
