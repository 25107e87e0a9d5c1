// Attention's caches as bytes: rounded once, when a token enters its page, and from then on the same for everybody.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "infer/asking.h"
#include "infer/pool.h"
#include "models/scratch.h"
#include "ops/int8_pages.h"

namespace gka::infer::test {
namespace {

using models::test::Scratch;
using models::test::tiny_config;
using models::test::tiny_model;

EngineOptions with_bytes(EngineOptions options = {}) {
  options.kv_cache_dtype = "int8";
  return options;
}

void expect_same(const Answer& got, const Answer& expected) {
  EXPECT_EQ(got.tokens, expected.tokens);
  EXPECT_EQ(got.logprobs, expected.logprobs);
}

TEST(Int8Cache, HoldsEveryNumberToHalfAStepOfItsTokensOwnScaleWhateverThePage) {
  const auto pool = at::zeros({5, kGrid, 3, 8 + 4}, at::kChar);
  auto fresh = at::randn({70, 3, 8}, at::detail::createCPUGenerator(5)) *
               at::arange(-35, 35, at::kFloat).exp2().view({70, 1, 1});  // from 3e-11 to 2e10
  fresh[7].zero_();
  const auto tokens = at::arange(70, at::kLong) + 20;
  const auto table = at::tensor({4, 1}, at::kLong);
  ops::write_int8_pages(pool, table.index_select(0, tokens.div(kGrid, "floor")), tokens.remainder(kGrid), fresh);
  const auto read = ops::read_int8_pages(pool, table, at::kDouble);
  ASSERT_EQ(read.sizes(), at::IntArrayRef({2 * kGrid, 3, 8}));
  const auto off = (read.narrow(0, 20, 70) - fresh).abs();
  EXPECT_TRUE(off.le(fresh.abs().amax(-1, true) * (0.501 / 127)).all().item<bool>());
  EXPECT_EQ(read.narrow(0, 0, 20).abs().sum().item<double>(), 0);  // and nothing else was written
  EXPECT_EQ(read.narrow(0, 90, 38).abs().sum().item<double>(), 0);
  EXPECT_EQ(ops::read_int8_pages(pool, at::tensor({0, 2, 3}, at::kLong), at::kFloat).abs().sum().item<float>(), 0);
}

TEST(Int8Cache, ANumberThatIsNoneStaysNone) {
  const auto pool = at::zeros({1, kGrid, 1, 8 + 4}, at::kChar);
  const auto at_0 = at::zeros({1}, at::kLong);
  ops::write_int8_pages(pool, at_0, at_0, at::full({1, 1, 8}, std::nan("")));
  EXPECT_TRUE(ops::read_int8_pages(pool, at_0, at::kFloat)[0].isnan().all().item<bool>());
}

TEST(Int8Cache, WhatIsRememberedGivesTheBitsOfReadingAnewAroundTheGrid) {
  for (const std::string pattern : {"*", "GKA-*"}) {
    const auto remembering = engine_of(pattern, with_bytes());
    for (const std::int64_t length : {63, 64, 129}) {
      const Request request{
          .prompt = random_tokens(length, static_cast<std::uint64_t>(length)), .sampling = kGreedy, .max_tokens = 6};
      const auto cold = ask(*engine_of(pattern, with_bytes({.snapshot_bytes = -1})), request);
      expect_same(ask(*remembering, request), cold);
      const auto again = ask(*remembering, request);
      expect_same(again, cold);
      EXPECT_EQ(again.usage.remembered_tokens, grid_floor(length));
    }
  }
}

// Steps and prompts see the same rounded keys: a token is as likely when it is drawn as when it is read.
TEST(Int8Cache, AnAnswerIsAsLikelyWhenItIsReadAgain) {
  const auto engine = engine_of(tiny_config("*-GKA-*"), with_bytes(), at::kDouble);
  const auto prompt = random_tokens(100);
  const auto answer = ask(*engine, {.prompt = prompt, .sampling = kGreedy, .max_tokens = 60});
  const auto read =
      ask(*engine,
          {.prompt = joined(prompt, answer.tokens), .sampling = kGreedy, .max_tokens = 0, .prompt_logprobs = true});
  const auto plain =
      ask(*engine_of(tiny_config("*-GKA-*"), {}, at::kDouble),
          {.prompt = joined(prompt, answer.tokens), .sampling = kGreedy, .max_tokens = 0, .prompt_logprobs = true});
  double largest = 0;
  for (std::size_t i = 0; i < answer.tokens.size(); ++i) {
    EXPECT_NEAR(read.prompt[prompt.size() + i].logprob, answer.logprobs[i], 1e-5) << i;
    largest = std::max(largest, std::abs(double{plain.prompt[prompt.size() + i].logprob} - answer.logprobs[i]));
  }
  EXPECT_GT(largest, 0);  // it is rounded, and not by much
  EXPECT_LT(largest, 0.1);
}

TEST(Int8Cache, IsCountedInItsOwnBytes) {
  const auto decoder = tiny_model(tiny_config("*-GKA-*"), at::kFloat);
  const auto numbers = sequence_bytes(decoder, 1024), bytes = sequence_bytes(decoder, 1024, true);
  EXPECT_EQ(numbers.page, 2 * 2 * kGrid * 2 * 8 * 4);  // layers, keys and values, tokens, heads of 8
  EXPECT_EQ(bytes.page, 2 * 2 * kGrid * 2 * (8 + 4));
  EXPECT_EQ(bytes.state, numbers.state);
  const auto engine = engine_of("*-GKA-*", with_bytes({.context = 1024, .cache_bytes = 5 * bytes.page}));
  EXPECT_EQ(engine->stats().cache_bytes, 5 * bytes.page);
  EXPECT_EQ(engine->create_memory(random_tokens(192), "").cache_bytes, 3 * bytes.page);
}

TEST(Int8Cache, AMemoryComesBackToTheBitAndOneOfOtherPagesIsReadAgain) {
  const Scratch folder;
  EngineOptions kept{.snapshot_bytes = -1};
  kept.memories = folder.path();
  const auto text = random_tokens(200), prompt = random_tokens(30, 7);
  const auto asked = [&](const std::string& id) {
    Request request{.prompt = prompt, .sampling = kGreedy, .max_tokens = 8};
    request.memory = id;
    return request;
  };
  const Request whole{.prompt = joined(text, prompt), .sampling = kGreedy, .max_tokens = 8};
  const auto id = engine_of("GKA-*", with_bytes(kept))->create_memory(text, "").id;
  const auto back = ask(*engine_of("GKA-*", with_bytes(kept)), asked(id));
  expect_same(back, ask(*engine_of("GKA-*", with_bytes()), whole));
  EXPECT_EQ(back.usage.remembered_tokens, 192);
  const auto otherwise = ask(*engine_of("GKA-*", kept), asked(id));
  expect_same(otherwise, ask(*engine_of("GKA-*"), whole));
  EXPECT_EQ(otherwise.usage.remembered_tokens, 0);
}

TEST(Int8Cache, ATypeThatNobodyKnowsIsSaidInASentence) {
  EngineOptions options;
  options.kv_cache_dtype = "fp8";
  try {
    engine_of("*", options);
    ADD_FAILURE() << "it was taken";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "kv_cache_dtype takes auto (the activations' type) or int8, and got 'fp8'");
  }
}

}  // namespace
}  // namespace gka::infer::test
