// Sampling: draws follow the probabilities, each option cuts what it says, and a row depends on itself alone.
#include "infer/sampling.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "infer/asking.h"

namespace gka::infer::test {
namespace {

const std::vector<double> kProbabilities{0.5, 0.3, 0.15, 0.05};

at::Tensor logits() { return at::tensor(kProbabilities, at::kDouble).log().to(at::kFloat); }

/// How often each token is drawn in 20,000 draws of one request.
std::vector<double> shares(const Sampling& sampling, const std::function<void(Row&)>& change = {}) {
  constexpr int kDraws = 20'000;
  std::vector<Row> rows;
  for (int i = 0; i < kDraws; ++i) {
    Row row{.sampling = &sampling, .drawn = static_cast<std::uint64_t>(i)};
    if (change) change(row);
    rows.push_back(std::move(row));
  }
  std::vector<double> counts(kProbabilities.size());
  for (const auto& drawn : draw(logits().expand({kDraws, -1}), rows)) {
    counts.at(static_cast<std::size_t>(drawn.event.token)) += 1.0 / kDraws;
  }
  return counts;
}

void expect_shares(const std::vector<double>& got, const std::vector<double>& wanted) {
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], wanted[i], 0.015) << i;
    if (wanted[i] == 0) {
      EXPECT_EQ(got[i], 0) << i;
    }
  }
}

TEST(Sampling, DrawsFollowTheProbabilities) {
  expect_shares(shares({}), kProbabilities);
  expect_shares(shares({.temperature = 0.5}), {0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365});
  expect_shares(shares({.temperature = 0}), {1, 0, 0, 0});
}

TEST(Sampling, EachOptionKeepsTheTokensItSays) {
  expect_shares(shares({.top_p = 0.8}), {0.625, 0.375, 0, 0});
  expect_shares(shares({.top_p = 0.01}), {1, 0, 0, 0});
  expect_shares(shares({.top_k = 3}), {0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0});
  expect_shares(shares({.top_p = 0.6, .top_k = 2}), {1, 0, 0, 0});
  expect_shares(shares({.min_p = 0.25}), {0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0});
}

TEST(Sampling, PenaltiesBiasesAndMasksChangeTheLogits) {
  const auto ban = [](Row& row) { row.banned = {0}; };
  expect_shares(shares({}, ban), {0, 0.6, 0.3, 0.1});
  static const std::vector<bool> allowed{false, false, true, true};
  expect_shares(shares({}, [](Row& row) { row.allowed = &allowed; }), {0, 0, 0.75, 0.25});
  Sampling bias;
  bias.logit_bias = {{1, std::log(5.0F / 3.0F)}};
  expect_shares(shares(bias), {0.5 / 1.2, 0.5 / 1.2, 0.15 / 1.2, 0.05 / 1.2});
  // Logits below 0 are multiplied: p² for a penalty of 2.
  expect_shares(shares({.repetition_penalty = 2}, [](Row& row) { row.seen = {0}; }),
                {0.25 / 0.75, 0.3 / 0.75, 0.15 / 0.75, 0.05 / 0.75});
  const auto came = [](Row& row) { row.came = {{0, 3}, {1, 1}}; };
  expect_shares(shares({.presence_penalty = std::log(2.0)}, came), {0.25 / 0.6, 0.15 / 0.6, 0.15 / 0.6, 0.05 / 0.6});
  const double first = 0.5 / 8, second = 0.3 / 2, total = first + second + 0.2;
  expect_shares(shares({.frequency_penalty = std::log(2.0)}, came),
                {first / total, second / total, 0.15 / total, 0.05 / total});
}

TEST(Sampling, LogprobsAreTheModelsWhateverIsDrawn) {
  const Sampling sampling{.temperature = 0.3};
  const std::vector<Row> rows{{.sampling = &sampling, .banned = {0, 1}, .top = 2}};
  const auto drawn = draw(logits().unsqueeze(0), rows)[0].event;
  EXPECT_NEAR(drawn.logprob, std::log(kProbabilities[static_cast<std::size_t>(drawn.token)]), 1e-6);
  ASSERT_EQ(drawn.top.size(), 2U);
  EXPECT_EQ(drawn.top[0].token, 0);
  EXPECT_NEAR(drawn.top[1].logprob, std::log(0.3), 1e-6);
}

TEST(Sampling, ARowDependsOnItselfAlone) {
  std::vector<Sampling> kinds(4);
  kinds[0].temperature = 0;
  kinds[1].seed = 5;
  kinds[2].top_p = 0.7;
  kinds[3].repetition_penalty = 1.3;
  std::vector<at::Tensor> values;
  std::vector<Row> rows;
  for (std::int64_t i = 0; i < 40; ++i) {
    values.push_back((at::tensor(random_tokens(61, static_cast<std::uint64_t>(i)), at::kLong)).to(at::kFloat) / 10);
    rows.push_back({.sampling = &kinds[static_cast<std::size_t>(i) % kinds.size()],
                    .drawn = static_cast<std::uint64_t>(i),
                    .seen = {1, 2, 3}});
  }
  const auto together = draw(at::stack(values), rows);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto alone = draw(values[i].unsqueeze(0), std::span(rows).subspan(i, 1))[0].event;
    EXPECT_EQ(together[i].event.token, alone.token) << i;
    EXPECT_EQ(together[i].event.logprob, alone.logprob) << i;
  }
}

TEST(Sampling, WhatCannotBeDrawnIsAnError) {
  const Sampling sampling;
  const std::vector<bool> none(4, false);
  const std::vector<Row> masked{{.sampling = &sampling, .allowed = &none}};
  EXPECT_EQ(draw(logits().unsqueeze(0), masked)[0].error, "no token is left to draw: the masks forbid all of them");
  const std::vector<Row> plain{{.sampling = &sampling}};
  EXPECT_NE(draw((logits() * NAN).unsqueeze(0), plain)[0].error.find("not numbers"), std::string::npos);
}

TEST(Sampling, OfEqualLogitsTheFirstWins) {
  const Sampling greedy{.temperature = 0}, narrow{.top_k = 1};
  const std::vector<Row> rows{{.sampling = &greedy}, {.sampling = &narrow}};
  const auto same = at::tensor({1.0F, 3.0F, 3.0F, 2.0F}).expand({2, -1});
  for (const auto& drawn : draw(same, rows)) EXPECT_EQ(drawn.event.token, 1);
}

/// Allows one token, then another, and so on.
class Script final : public TokenFilter {
 public:
  explicit Script(Tokens tokens) : tokens_(std::move(tokens)) {}
  bool allowed(std::span<const std::int64_t> generated, std::vector<bool>& mask) override {
    if (generated.size() >= tokens_.size()) return false;
    mask.at(static_cast<std::size_t>(tokens_[generated.size()])) = true;
    return true;
  }

 private:
  Tokens tokens_;
};

TEST(Sampling, AFilterDecidesWhatMayCome) {
  const auto engine = engine_of("GKA");
  Request request{.prompt = {1, 2}, .max_tokens = 5};
  request.filter = std::make_shared<Script>(Tokens{7, 8, 9});
  const auto answer = ask(*engine, request);
  EXPECT_EQ(Tokens(answer.tokens.begin(), answer.tokens.begin() + 3), (Tokens{7, 8, 9}));
  EXPECT_EQ(answer.tokens.size(), 5U);
}

TEST(Sampling, TokensThatStopDoSoOnceTheyMay) {
  auto config = models::test::tiny_config("GKA");
  const Request plain{.prompt = {5}, .sampling = kGreedy, .max_tokens = 12};
  const auto free = ask(*engine_of(config), plain).tokens;
  config.eos_token_id = {free[3]};
  const auto engine = engine_of(config);
  const auto first = std::ranges::find(free, free[3]) - free.begin();
  auto request = plain;
  auto answer = ask(*engine, request);
  EXPECT_EQ(answer.tokens, Tokens(free.begin(), free.begin() + first + 1));
  EXPECT_EQ(answer.finish, Finish::stop);
  request.ignore_eos = true;
  answer = ask(*engine, request);
  EXPECT_EQ(answer.tokens, free);
  EXPECT_EQ(answer.finish, Finish::length);
  request.stop_tokens = {free[0]};
  EXPECT_EQ(ask(*engine, request).tokens, Tokens{free[0]});
  request.min_tokens = 6;
  request.ignore_eos = false;
  const auto late = ask(*engine, request).tokens;
  EXPECT_GE(late.size(), 6U);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_NE(late[i], free[0]);
    EXPECT_NE(late[i], free[3]);
  }
}

TEST(Sampling, ASeedRepeatsAndAnotherDoesNot) {
  const auto engine = engine_of("GKA");
  const auto tokens = [&](std::uint64_t seed) {
    return ask(*engine, {.prompt = {1}, .sampling = {.seed = seed}, .max_tokens = 16}).tokens;
  };
  EXPECT_EQ(tokens(4), tokens(4));
  EXPECT_NE(tokens(4), tokens(5));
}

}  // namespace
}  // namespace gka::infer::test
