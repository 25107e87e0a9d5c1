// Continuations: states instead of recomputation, several at once.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <vector>

#include "infer/asking.h"
#include "models/checkpoint.h"
#include "models/goldens.h"

namespace gka::infer::test {
namespace {

using models::test::tiny_config;
using models::test::tiny_model;

/// The likeliest continuation by running the whole text again for every token.
Tokens greedy_by_recomputation(const models::Decoder& decoder, Tokens text, std::int64_t count) {
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
  const auto config = tiny_config("GKA-*-GDN-SWA-M2");
  const auto decoder = tiny_model(config);
  const auto engine = engine_of(config, {}, at::kDouble);
  const std::vector<Tokens> prompts{{5}, {1, 2, 3, 4, 5, 6, 7, 8, 9}, {60, 0}};
  std::vector<std::future<Answer>> answers;
  for (const auto& prompt : prompts) {
    answers.push_back(ask_later(*engine, {.prompt = prompt, .sampling = kGreedy, .max_tokens = 300}));
  }
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    const auto tokens = answers[i].get().tokens;
    ASSERT_EQ(tokens.size(), 300U);
    EXPECT_EQ(Tokens(tokens.begin(), tokens.begin() + 12), greedy_by_recomputation(decoder, prompts[i], 12)) << i;
  }
}

TEST(Generate, AnEndTokenEndsItsSequenceAndNoOther) {
  auto config = tiny_config("GKA");
  const auto both = [](Engine& engine) {
    std::vector<std::future<Answer>> later;
    for (const std::int64_t first : {5, 9}) {
      later.push_back(ask_later(engine, {.prompt = {first}, .sampling = {.seed = 3}, .max_tokens = 20}));
    }
    return std::vector{later[0].get().tokens, later[1].get().tokens};
  };
  const auto free = both(*engine_of(config));
  config.eos_token_id = {free[0][4], 1000};
  const auto tokens = both(*engine_of(config));
  for (std::size_t i = 0; i < 2; ++i) {
    const auto end = std::ranges::find(free[i], config.eos_token_id[0]);
    EXPECT_EQ(tokens[i], Tokens(free[i].begin(), end == free[i].end() ? end : end + 1)) << i;
  }
}

TEST(Generate, NothingAskedGivesNothing) {
  const auto answer = ask(*engine_of("GKA"), {.prompt = {1}, .max_tokens = 0});
  EXPECT_EQ(answer.tokens, Tokens{});
  EXPECT_EQ(answer.finish, Finish::length);
}

class PublishedCheckpoint : public testing::TestWithParam<const char*> {};

TEST_P(PublishedCheckpoint, ContinuesGreedilyWithItsTokens) {
  const auto folder = models::test::goldens() / GetParam();
  const models::SafetensorsFile golden(folder / "golden.safetensors");
  const auto list = [&](const char* name) {
    const auto ids = golden.tensor(name);
    return Tokens(ids.const_data_ptr<std::int64_t>(), ids.const_data_ptr<std::int64_t>() + ids.numel());
  };
  const auto expected = list("greedy");
  const auto engine = Engine::load(folder, {.device = "cpu"});
  // A second sequence beside it changes nothing.
  const auto most = std::ssize(expected);
  auto first = ask_later(*engine, {.prompt = list("input_ids.0"), .sampling = kGreedy, .max_tokens = most});
  auto second = ask_later(*engine, {.prompt = list("input_ids.1"), .sampling = kGreedy, .max_tokens = most});
  EXPECT_EQ(first.get().tokens, expected);
  second.get();
}

INSTANTIATE_TEST_SUITE_P(Goldens, PublishedCheckpoint, testing::Values("tiny-hqwen3-gka", "tiny-hqwen3-gdn"),
                         [](const auto& name) { return std::string(name.param).substr(sizeof("tiny-hqwen3")); });

}  // namespace
}  // namespace gka::infer::test
