// Generation and sampling: states instead of recomputation, draws that follow the probabilities.
#include "models/generate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <vector>

#include "models/scratch.h"
#include "models/tiny.h"

namespace gka::models::test {
namespace {

using Tokens = std::vector<std::int64_t>;

/// The likeliest continuation by running the whole text again for every token.
Tokens greedy_by_recomputation(const Decoder& decoder, Tokens text, std::int64_t count) {
  const at::NoGradGuard no_gradient;
  Tokens added;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto ids = at::tensor(text, at::kLong).unsqueeze(0);
    const auto hidden = decoder.forward(ids, layers::Sequences::rows(1, ids.size(1), at::kCPU)).hidden;
    added.push_back(decoder.logits(hidden)[0][-1].argmax().item<std::int64_t>());
    text.push_back(added.back());
  }
  return added;
}

TEST(Generate, StatesGiveTheTokensOfRecomputation) {
  const auto decoder = tiny_model(tiny_config("GKA-*-GDN-SWA-M2"));
  const std::vector<Tokens> prompts{{5}, {1, 2, 3, 4, 5, 6, 7, 8, 9}, {60, 0}};
  const auto tokens = generate(decoder, prompts, {.max_tokens = 300, .sampling = {.greedy = true}});
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(tokens[i].size(), 300U);
    EXPECT_EQ(Tokens(tokens[i].begin(), tokens[i].begin() + 12), greedy_by_recomputation(decoder, prompts[i], 12)) << i;
  }
}

TEST(Generate, AnEndTokenEndsItsSequenceAndNoOther) {
  auto config = tiny_config("GKA");
  const auto free = generate(tiny_model(config), {{5}, {9}}, {.max_tokens = 20, .sampling = {.seed = 3}});
  config.eos_token_id = {free[0][4], 1000};
  std::vector<std::size_t> order;
  std::vector<bool> ended(2, false);
  const auto tokens = generate(
      tiny_model(config), {{5}, {9}},
      {.max_tokens = 20, .sampling = {.seed = 3}, .on_token = [&](std::size_t sequence, std::int64_t, bool last) {
         EXPECT_FALSE(ended[sequence]);
         ended[sequence] = last;
       }});
  EXPECT_EQ(ended, (std::vector<bool>{true, true}));
  for (std::size_t i = 0; i < 2; ++i) {
    const auto end = std::ranges::find(free[i], config.eos_token_id[0]);
    EXPECT_EQ(tokens[i], Tokens(free[i].begin(), end == free[i].end() ? end : end + 1)) << i;
  }
}

TEST(Generate, TheSameSeedGivesTheSameTokensAndAnotherOthers) {
  const auto decoder = tiny_model(tiny_config("GKA"));
  const auto tokens = [&](std::uint64_t seed) {
    return generate(decoder, {{1}, {1}}, {.max_tokens = 16, .sampling = {.seed = seed}});
  };
  EXPECT_EQ(tokens(4), tokens(4));
  EXPECT_NE(tokens(4), tokens(40));
  EXPECT_NE(tokens(4)[0], tokens(4)[1]);
}

TEST(Generate, NothingAskedGivesNothingAndAnEmptyPromptIsRefused) {
  const auto decoder = tiny_model(tiny_config("GKA"));
  EXPECT_EQ(generate(decoder, {{1}}, {.max_tokens = 0}), std::vector<Tokens>{{}});
  EXPECT_ERROR(generate(decoder, {{1}, {}}, {.max_tokens = 3}), "prompt 1 is empty");
}

TEST(Sampler, DrawsFollowTheProbabilities) {
  const std::vector<float> logits{std::log(0.5F), std::log(0.3F), std::log(0.15F), std::log(0.05F)};
  const auto shares = [&](const Sampling& sampling) {
    Sampler sampler(sampling);
    std::vector<double> counts(logits.size());
    for (int i = 0; i < 20'000; ++i) counts[static_cast<std::size_t>(sampler.next(logits))] += 1.0 / 20'000;
    return counts;
  };
  const auto expect = [](const std::vector<double>& got, const std::vector<double>& wanted) {
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], wanted[i], 0.015) << i;
  };
  expect(shares({}), {0.5, 0.3, 0.15, 0.05});
  expect(shares({.temperature = 0.5}), {0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365});
  expect(shares({.top_p = 0.8}), {0.625, 0.375, 0, 0});
  expect(shares({.top_p = 0.01}), {1, 0, 0, 0});
  expect(shares({.greedy = true}), {1, 0, 0, 0});
  EXPECT_EQ(shares({.top_p = 0.8})[2], 0);
}

TEST(Sampler, OfEqualLogitsTheFirstWins) {
  EXPECT_EQ(Sampler({.greedy = true}).next(std::vector<float>{1, 3, 3, 2}), 1);
}

TEST(Sampler, WhatMakesNoSenseIsRefused) {
  EXPECT_ERROR(Sampler({.temperature = 0}), "the temperature must be above 0, and is 0");
  EXPECT_ERROR(Sampler({.top_p = 1.5}), "top-p must be above 0 and at most 1, and is 1.5");
  EXPECT_ERROR(Sampler({}).next(std::vector<float>{1, NAN}), "logits that are not numbers");
}

}  // namespace
}  // namespace gka::models::test
