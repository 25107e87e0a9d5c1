// Memories: a request that names one answers as if its tokens stood before the prompt, after a restart too.
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <vector>

#include "infer/asking.h"
#include "infer/pool.h"
#include "models/safetensors.h"
#include "models/scratch.h"

namespace gka::infer::test {
namespace {

using models::test::Scratch;

void expect_same(const Answer& got, const Answer& expected) {
  EXPECT_EQ(got.tokens, expected.tokens);
  EXPECT_EQ(got.logprobs, expected.logprobs);
}

Request after(const std::string& memory, const Tokens& prompt) {
  Request request{.prompt = prompt, .sampling = kGreedy, .max_tokens = 8};
  request.memory = memory;
  return request;
}

class EveryMemory : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Memories, EveryMemory, testing::Values("GKA-*", "SWA-GDN", "M2-KDA"));

TEST_P(EveryMemory, StandsBeforeThePromptToTheLastBitAlsoAfterARestart) {
  const Scratch folder;
  const EngineOptions options{.snapshot_bytes = -1, .memories = folder.path()};
  const auto text = random_tokens(200), prompt = random_tokens(30, 7), more = random_tokens(70, 8);
  const auto fresh = engine_of(GetParam(), {.snapshot_bytes = -1});
  const auto plain = ask(*fresh, {.prompt = joined(text, prompt), .sampling = kGreedy, .max_tokens = 8});
  const auto longer = ask(*fresh, {.prompt = joined(joined(text, more), prompt), .sampling = kGreedy, .max_tokens = 8});
  MemoryInfo memory, fork;
  {
    const auto engine = engine_of(GetParam(), options);
    memory = engine->create_memory(text, "a text");
    fork = engine->fork_memory(memory.id, more, "and more");
    EXPECT_EQ(memory.tokens, 200);
    EXPECT_EQ(fork.tokens, 270);
    EXPECT_GT(memory.state_bytes, 0);
    const auto answer = ask(*engine, after(memory.id, prompt));
    expect_same(answer, plain);
    EXPECT_EQ(answer.usage.remembered_tokens, 192);
    EXPECT_EQ(answer.usage.prompt_tokens, 230);
  }
  const auto engine = engine_of(GetParam(), options);
  ASSERT_EQ(engine->memories().size(), 2U);
  for (int i = 0; i < 2; ++i) {
    const auto answer = ask(*engine, after(memory.id, prompt));
    expect_same(answer, plain);
    EXPECT_EQ(answer.usage.remembered_tokens, 192);
  }
  expect_same(ask(*engine, after(fork.id, prompt)), longer);
  EXPECT_TRUE(engine->delete_memory(memory.id));
  EXPECT_FALSE(engine->delete_memory(memory.id));
  EXPECT_EQ(engine->memories().size(), 1U);
  EXPECT_EQ(engine_of(GetParam(), options)->memories().size(), 1U);
}

Refused::Reason reason_of(Engine& engine, const std::string& memory) {
  try {
    ask(engine, after(memory, {1}));
  } catch (const Refused& refused) {
    EXPECT_EQ(refused.field, "memory");
    return refused.reason;
  }
  ADD_FAILURE() << "it was taken";
  return Refused::Reason::stopping;
}

TEST(Memories, OfAnotherModelOrOfNoneAreRefused) {
  const Scratch folder;
  const auto memory = engine_of("GKA", {.memories = folder.path()})->create_memory(random_tokens(70), "");
  const auto other = engine_of("GDN", {.memories = folder.path()});
  EXPECT_EQ(reason_of(*other, memory.id), Refused::Reason::bad_request);
  EXPECT_EQ(reason_of(*other, "mem-0"), Refused::Reason::unknown_memory);
}

TEST(Memories, HalfAFileIsLeftOut) {
  const Scratch folder;
  std::ofstream(folder / "half.safetensors") << "not a memory";
  std::ofstream(folder / "mem-1.safetensors.writing-77") << "killed";
  EXPECT_TRUE(engine_of("GKA", {.memories = folder.path()})->memories().empty());
  EXPECT_FALSE(std::filesystem::exists(folder / "mem-1.safetensors.writing-77"));
}

TEST(Memories, ANumberThatIsNoneIsSaidInASentence) {
  const Scratch folder;
  models::Metadata metadata{{"format", "gka memory 1"}, {"id", "mem-1"}, {"name", ""}, {"model", "x"}};
  for (const auto* key : {"state_bytes", "cache_bytes", "created"}) metadata[key] = "";
  models::write_safetensors(folder / "mem-1.safetensors", {{"tokens", at::tensor({1, 2}, at::kLong)}}, metadata);
  testing::internal::CaptureStderr();
  EXPECT_TRUE(engine_of("GKA", {.memories = folder.path()})->memories().empty());
  EXPECT_NE(testing::internal::GetCapturedStderr().find("is not a memory: its state_bytes is no number"),
            std::string::npos);
}

TEST(Memories, AShortOneIsItsTokens) {
  const auto engine = engine_of("GKA-*");
  const auto memory = engine->create_memory({5, 6, 7}, "short");
  EXPECT_EQ(memory.state_bytes, 0);
  expect_same(ask(*engine, after(memory.id, {8, 9})),
              ask(*engine, {.prompt = {5, 6, 7, 8, 9}, .sampling = kGreedy, .max_tokens = 8}));
}

TEST(Memories, ThatHoldAllTheRoomMakeARequestFailAndNotWaitForEver) {
  const auto page = sequence_bytes(models::test::tiny_model(models::test::tiny_config("*"), at::kFloat), 1024).page;
  const auto engine = engine_of("*", {.context = 1024, .cache_bytes = 5 * page});
  const auto memory = engine->create_memory(random_tokens(192), "");
  EXPECT_EQ(memory.cache_bytes, 3 * page);
  const Request request{.prompt = random_tokens(150, 9), .max_tokens = 20};
  const auto answer = ask(*engine, request);
  EXPECT_EQ(answer.finish, Finish::error);
  EXPECT_EQ(answer.error, "a sequence of 170 tokens needs " + std::to_string(3 * page) +
                              " bytes of cache, and memories leave " + std::to_string(2 * page));
  EXPECT_TRUE(engine->delete_memory(memory.id));
  EXPECT_EQ(ask(*engine, request).finish, Finish::length);
}

// Solver steps of one request are its own, and so is what it remembers.
TEST(Iterations, AreMixedInOneBatchAndShareNoSnapshots) {
  auto config = models::test::tiny_config("GKA-*-GKA");
  const auto request = [](std::int64_t iterations) {
    Request made{.prompt = random_tokens(100), .sampling = kGreedy, .max_tokens = 10};
    made.iterations = iterations;
    return made;
  };
  std::vector<Answer> alone;
  for (const std::int64_t iterations : {0, 3, 30}) {
    auto other = config;
    other.mixer.gka.num_iter = iterations == 0 ? 30 : iterations;
    alone.push_back(ask(*engine_of(other, {}, at::kDouble), request(iterations)));
  }
  const auto engine = engine_of(config, {}, at::kDouble);
  std::vector<std::future<Answer>> together;
  for (const std::int64_t iterations : {0, 3, 30}) together.push_back(ask_later(*engine, request(iterations)));
  for (std::size_t i = 0; i < 3; ++i) {
    const auto answer = together[i].get();
    ASSERT_EQ(answer.tokens, alone[i].tokens) << i;
    for (std::size_t t = 0; t < answer.logprobs.size(); ++t)
      EXPECT_NEAR(answer.logprobs[t], alone[i].logprobs[t], 1e-6);
    EXPECT_EQ(answer.usage.remembered_tokens, 0);
  }
  EXPECT_NE(alone[0].logprobs, alone[2].logprobs);
  auto automatic = request(0);
  automatic.iterations.reset();
  automatic.auto_iterations = true;
  EXPECT_EQ(ask(*engine, automatic).tokens.size(), 10U);
}

TEST(Certainty, IsTheShareOfTheQueryThatThePastExplains) {
  const auto engine = engine_of("GKA-*-GKA");
  const auto plain = ask(*engine, {.prompt = random_tokens(70), .sampling = kGreedy, .max_tokens = 6});
  Request request{.prompt = random_tokens(70), .sampling = kGreedy, .max_tokens = 6, .prompt_logprobs = true};
  request.certainty = true;
  const auto answer = ask(*engine, request);
  EXPECT_EQ(answer.tokens, plain.tokens);
  for (const auto* events : {&answer.events, &answer.prompt}) {
    for (std::size_t i = events == &answer.prompt ? 1 : 0; i < events->size(); ++i) {
      const auto& event = (*events)[i];
      ASSERT_TRUE(event.certainty.has_value()) << i;
      ASSERT_EQ(event.layer_certainty.size(), 2U);
      EXPECT_GE(*event.certainty, -1e-3);
      EXPECT_LE(*event.certainty, 1 + 1e-3);
      EXPECT_NEAR(*event.certainty, (event.layer_certainty[0] + event.layer_certainty[1]) / 2, 1e-5);
    }
  }
}

}  // namespace
}  // namespace gka::infer::test
