// The engine: what is remembered changes nothing, neighbours change nothing, and nothing is lost when it is full.
#include "infer/engine.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "infer/asking.h"
#include "infer/scheduler.h"

namespace gka::infer::test {
namespace {

using models::test::tiny_config;
using models::test::tiny_model;

// The models are so small that threads only wait for each other, and long where a machine has other work.
class OneThread : public testing::Environment {
 public:
  void SetUp() override { at::set_num_threads(1); }
};
const auto* const kOneThread = testing::AddGlobalTestEnvironment(new OneThread);

/// Equal in every number, and said to be read from where it should.
void expect_same(const Answer& got, const Answer& expected) {
  EXPECT_EQ(got.tokens, expected.tokens);
  EXPECT_EQ(got.logprobs, expected.logprobs);
  EXPECT_EQ(got.finish, expected.finish);
  EXPECT_EQ(got.error, expected.error);
}

/// log p of each token but the first, by the decoder itself.
std::vector<double> logprobs_by_forward(const models::Decoder& decoder, const Tokens& tokens) {
  const at::NoGradGuard no_gradient;
  const auto ids = at::tensor(tokens, at::kLong).unsqueeze(0);
  const auto hidden = decoder.forward(ids, layers::Sequences::rows(1, ids.size(1), at::kCPU)).hidden;
  const auto all = at::log_softmax(decoder.logits(hidden)[0].to(at::kDouble), 1);
  std::vector<double> logprobs;
  for (std::size_t i = 1; i < tokens.size(); ++i) {
    logprobs.push_back(all[static_cast<std::int64_t>(i) - 1][tokens[i]].item<double>());
  }
  return logprobs;
}

class EveryMixer : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Engine, EveryMixer, testing::ValuesIn(models::test::kEveryKind));

TEST_P(EveryMixer, WhatIsRememberedGivesTheBitsOfReadingAnewAroundTheGrid) {
  const auto remembering = engine_of(GetParam());
  for (const std::int64_t length : {63, 64, 65, 127, 128, 129}) {
    const Request request{
        .prompt = random_tokens(length, static_cast<std::uint64_t>(length)), .sampling = kGreedy, .max_tokens = 6};
    const auto fresh = engine_of(GetParam(), {.snapshot_bytes = -1});
    const auto cold = ask(*fresh, request);
    const auto first = ask(*remembering, request), second = ask(*remembering, request);
    expect_same(first, cold);
    expect_same(second, cold);
    EXPECT_EQ(first.usage.remembered_tokens, 0);
    EXPECT_EQ(second.usage.remembered_tokens, grid_floor(length));
    EXPECT_EQ(second.usage.why_not_more.empty(), length >= 64) << second.usage.why_not_more;
  }
}

TEST_P(EveryMixer, AnswersAndScoresAreTheDecodersOwn) {
  const auto decoder = tiny_model(tiny_config(GetParam()), at::kDouble);
  const auto engine = engine_of(tiny_config(GetParam()), {}, at::kDouble);
  const auto prompt = random_tokens(150);
  const auto answer = ask(
      *engine, {.prompt = prompt, .sampling = kGreedy, .max_tokens = 70, .top_logprobs = 2, .prompt_logprobs = true});
  const auto expected = logprobs_by_forward(decoder, joined(prompt, answer.tokens));
  ASSERT_EQ(answer.prompt.size(), prompt.size());
  ASSERT_EQ(answer.tokens.size(), 70U);
  EXPECT_TRUE(std::isnan(answer.prompt[0].logprob));
  for (std::size_t i = 1; i < expected.size() + 1; ++i) {
    const auto& event = i < prompt.size() ? answer.prompt[i] : answer.events[i - prompt.size()];
    EXPECT_NEAR(event.logprob, expected[i - 1], 1e-5) << i;
    EXPECT_GE(event.top[0].logprob, event.top[1].logprob);
    if (i >= prompt.size()) {
      EXPECT_EQ(event.top[0].token, event.token);
      EXPECT_EQ(event.top[0].logprob, event.logprob);
    }
  }
}

TEST(Engine, EditsAndForksReadFromTheLastMessageThatIsTheSame) {
  const auto engine = engine_of("GKA-*-SWA");
  const auto fresh = engine_of("GKA-*-SWA", {.snapshot_bytes = -1});
  const auto system = random_tokens(100, 1), user = random_tokens(90, 2), edited = random_tokens(95, 3);
  const auto request = [&](const Tokens& last) {
    return Request{
        .prompt = joined(system, last), .sampling = kGreedy, .max_tokens = 4, .boundaries = {std::ssize(system)}};
  };
  EXPECT_EQ(ask(*engine, request(user)).usage.remembered_tokens, 0);
  for (const auto& last : {edited, user, random_tokens(10, 4)}) {
    const auto answer = ask(*engine, request(last));
    expect_same(answer, ask(*fresh, request(last)));
    EXPECT_EQ(answer.usage.remembered_tokens, last == user ? 128 : 64);
  }
}

TEST(Engine, PromptsThatPartLeaveASnapshotWhereTheyDo) {
  const auto engine = engine_of("GKA");
  const auto begin = random_tokens(200, 1);
  const auto with = [&](std::uint64_t seed) {
    return ask(*engine, {.prompt = joined(begin, random_tokens(100, seed)), .max_tokens = 1}).usage;
  };
  with(2);
  const auto second = with(3), third = with(4);
  EXPECT_EQ(second.remembered_tokens, 0);
  EXPECT_EQ(second.why_not_more,
            "an earlier prompt begins with the same 192 tokens, but left no snapshot there; this one does");
  EXPECT_EQ(third.remembered_tokens, 192);
  EXPECT_EQ(third.why_not_more, "no earlier prompt goes on like this one after token 192");
}

TEST(Engine, SnapshotsAreCappedInBytesAndAnEvictedOneIsReadAnew) {
  const auto one = engine_of("GKA-*");
  ask(*one, {.prompt = random_tokens(64), .max_tokens = 1});
  one->drain();
  const auto bytes = one->stats().snapshot_bytes;
  ASSERT_EQ(one->stats().snapshots, 1);
  const auto engine = engine_of("GKA-*", {.snapshot_bytes = 2 * bytes});
  std::vector<Answer> first;
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    first.push_back(ask(*engine, {.prompt = random_tokens(70, seed), .sampling = kGreedy, .max_tokens = 5}));
    EXPECT_LE(engine->stats().snapshot_bytes, 2 * bytes);
  }
  const auto again = ask(*engine, {.prompt = random_tokens(70, 0), .sampling = kGreedy, .max_tokens = 5});
  expect_same(again, first[0]);
  EXPECT_EQ(again.usage.remembered_tokens, 0);
  EXPECT_NE(again.usage.why_not_more.find("had to go"), std::string::npos) << again.usage.why_not_more;
}

TEST(Engine, WhyNothingIsRememberedIsSaid) {
  const auto off = engine_of("GKA", {.snapshot_bytes = -1}), on = engine_of("GKA");
  const auto why = [](Engine& engine, const Request& request) { return ask(engine, request).usage.why_not_more; };
  EXPECT_EQ(why(*off, {.prompt = random_tokens(70)}), "snapshots are switched off");
  EXPECT_EQ(why(*on, {.prompt = random_tokens(7)}),
            "the prompt has 7 tokens, and prefixes are remembered in steps of 64");
  EXPECT_EQ(why(*on, {.prompt = random_tokens(70)}),
            "no earlier prompt with the same solver steps begins with the same 64 tokens");
  EXPECT_EQ(why(*on, {.prompt = random_tokens(70), .prompt_logprobs = true}),
            "prompt_logprobs asks for every token of the prompt, so all were read");
}

TEST(Engine, ARecycledSlotRemembersNothing) {
  for (const auto* pattern : {"GKA-*-M2", "SWA-GDN"}) {
    const auto engine = engine_of(pattern, {.slots = 1, .snapshot_bytes = -1});
    ask(*engine, {.prompt = random_tokens(300, 5), .max_tokens = 50});
    const Request next{.prompt = random_tokens(3, 6), .sampling = kGreedy, .max_tokens = 20};
    expect_same(ask(*engine, next), ask(*engine_of(pattern), next));
  }
}

TEST(Engine, DeterministicAnswersDoNotChangeInABitWithWhatElseRuns) {
  const EngineOptions options{.deterministic = true};
  const Request request{.prompt = random_tokens(80), .sampling = {.seed = 4}, .max_tokens = 20};
  const auto alone = ask(*engine_of("GKA-*-GDN", options), request);
  const auto engine = engine_of("GKA-*-GDN", options);
  std::vector<std::future<Answer>> others, same;
  for (std::int64_t i = 0; i < 6; ++i) {
    others.push_back(ask_later(*engine, {.prompt = random_tokens(40 + 50 * i, 9), .max_tokens = 10 + i}));
    same.push_back(ask_later(*engine, request));
  }
  for (auto& answer : same) expect_same(answer.get(), alone);
  for (auto& answer : others) EXPECT_EQ(answer.get().finish, Finish::length);
}

TEST(Engine, EqualGreedyRequestsAtOnceGiveOneAnswer) {
  const auto engine = engine_of("GKA-*-GDN");
  const Request request{.prompt = random_tokens(130), .sampling = kGreedy, .max_tokens = 24, .prompt_logprobs = true};
  const auto alone = ask(*engine, request);
  std::vector<std::future<Answer>> same;
  for (int i = 0; i < 12; ++i) same.push_back(ask_later(*engine, request));
  for (auto& later : same) {
    const auto answer = later.get();
    EXPECT_EQ(answer.tokens, alone.tokens);
    for (std::size_t i = 1; i < alone.prompt.size(); ++i) EXPECT_EQ(answer.prompt[i].logprob, alone.prompt[i].logprob);
  }
}

TEST(Engine, AFullPoolQueuesAndWhatCanNeverFitIsRefused) {
  const auto page = sequence_bytes(tiny_model(tiny_config("GKA-*"), at::kFloat), 1024).page;
  const auto engine = engine_of("GKA-*", {.slots = 3, .context = 1024, .cache_bytes = 5 * page});
  EXPECT_EQ(engine->stats().cache_bytes, 5 * page);
  std::vector<std::future<Answer>> answers;
  for (std::uint64_t i = 0; i < 12; ++i) {
    answers.push_back(
        ask_later(*engine, {.prompt = random_tokens(70 + 10 * static_cast<std::int64_t>(i), i), .max_tokens = 20}));
  }
  for (auto& answer : answers) EXPECT_EQ(answer.get().tokens.size(), 20U);
  try {
    ask(*engine, {.prompt = random_tokens(300), .max_tokens = 60});
    FAIL() << "six pages in a pool of five";
  } catch (const Refused& refused) {
    EXPECT_EQ(refused.reason, Refused::Reason::too_long);
    EXPECT_EQ(refused.message, "a sequence of 360 tokens needs " + std::to_string(6 * page) +
                                   " bytes of cache, and there are " + std::to_string(5 * page));
  }
  engine->drain();
  EXPECT_EQ(engine->stats().slots_in_use, 0);
  EXPECT_EQ(engine->stats().running, 0);
}

TEST(Engine, AQueueThatIsFullAndAnEngineThatStopsSayNo) {
  const auto engine = engine_of("GKA", {.slots = 1, .queue = 2});
  std::vector<std::future<Answer>> answers;
  std::optional<Refused::Reason> reason;
  for (int i = 0; i < 20 && !reason; ++i) {
    try {
      answers.push_back(ask_later(*engine, {.prompt = random_tokens(5), .max_tokens = 200}));
    } catch (const Refused& refused) {
      reason = refused.reason;
    }
  }
  EXPECT_EQ(reason, Refused::Reason::queue_full);
  std::thread drains([&] { engine->drain(); });
  for (auto& answer : answers) EXPECT_EQ(answer.get().tokens.size(), 200U);
  drains.join();
  try {
    ask(*engine, {.prompt = {1}});
    FAIL() << "it was drained";
  } catch (const Refused& refused) {
    EXPECT_EQ(refused.reason, Refused::Reason::stopping);
  }
}

TEST(Engine, WhoIsToldOfItsEndMayCallTheEngineAlsoWhileItGoes) {
  auto engine = engine_of("GKA");
  std::optional<Refused::Reason> reason;
  std::promise<void> begun;
  bool first = true;
  engine->submit({.prompt = {1}, .max_tokens = 1'000'000},
                 {.on_token =
                      [&](const TokenEvent&) {
                        if (std::exchange(first, false)) begun.set_value();
                      },
                  .on_end =
                      [&, asked = engine.get()](Finish, const Usage&, const std::string&) {
                        asked->cancel(1);
                        EXPECT_EQ(asked->stats().waiting, 0);
                        try {
                          asked->submit({.prompt = {1}}, {});
                        } catch (const Refused& refused) {
                          reason = refused.reason;
                        }
                      }});
  begun.get_future().wait();
  engine.reset();
  EXPECT_EQ(reason, Refused::Reason::stopping);
}

TEST(Engine, ARequestThatMakesNoSenseIsRefusedWithItsField) {
  const auto engine = engine_of("*");
  const auto field = [&](const std::function<void(Request&)>& change) {
    Request request{.prompt = {1}};
    change(request);
    try {
      ask(*engine, request);
    } catch (const Refused& refused) {
      return refused.field;
    }
    return std::string("none");
  };
  EXPECT_EQ(field([](Request& r) { r.prompt = {}; }), "prompt");
  EXPECT_EQ(field([](Request& r) { r.prompt = {1, 61}; }), "prompt");
  EXPECT_EQ(field([](Request& r) { r.sampling.temperature = -1; }), "temperature");
  EXPECT_EQ(field([](Request& r) { r.sampling.top_p = 0; }), "top_p");
  EXPECT_EQ(field([](Request& r) { r.sampling.top_k = -1; }), "top_k");
  EXPECT_EQ(field([](Request& r) { r.sampling.min_p = 2; }), "min_p");
  EXPECT_EQ(field([](Request& r) { r.sampling.repetition_penalty = 0; }), "repetition_penalty");
  EXPECT_EQ(field([](Request& r) { r.sampling.frequency_penalty = NAN; }), "frequency_penalty");
  EXPECT_EQ(field([](Request& r) { r.sampling.logit_bias = {{61, 1.0F}}; }), "logit_bias");
  EXPECT_EQ(field([](Request& r) { r.max_tokens = -1; }), "max_tokens");
  EXPECT_EQ(field([](Request& r) { r.min_tokens = 17; }), "min_tokens");
  EXPECT_EQ(field([](Request& r) { r.stop_tokens = {-1}; }), "stop_tokens");
  EXPECT_EQ(field([](Request& r) { r.top_logprobs = -1; }), "top_logprobs");
  EXPECT_EQ(field([](Request& r) { r.iterations = 3; }), "iterations");
  EXPECT_EQ(field([](Request& r) { r.boundaries = {2}; }), "boundaries");
  EXPECT_EQ(field([](Request&) {}), "none");
}

// Steps one at a time, without the engine's thread.
class Stepping : public testing::Test {
 protected:
  Stepping() : decoder_(tiny_model(tiny_config("GKA-*"), at::kFloat)) {}

  Scheduler make(std::int64_t step_tokens, bool ahead = false) {
    return Scheduler(decoder_, {.pool = {.slots = 4, .pages = 4096, .context = 100'000},
                                .step_tokens = step_tokens,
                                .snapshot_bytes = 1 << 20,
                                .ahead = ahead});
  }
  /// Counts its tokens into `count`.
  std::unique_ptr<Sequence> sequence(RequestId id, const Tokens& prompt, std::int64_t& count,
                                     std::int64_t max_tokens = 100) {
    auto made = std::make_unique<Sequence>();
    made->id = id;
    made->request = {.prompt = prompt, .max_tokens = max_tokens};
    made->tokens = prompt;
    made->prompt = std::ssize(prompt);
    made->iterations = decoder_.config().mixer.gka.num_iter;
    made->sink.on_token = [&count](const TokenEvent&) { ++count; };
    return made;
  }

  models::Decoder decoder_;
};

TEST_F(Stepping, AShortPromptDoesNotWaitBehindALongOne) {
  auto scheduler = make(128);
  std::int64_t of_long = 0, of_short = 0;
  scheduler.add(sequence(1, random_tokens(64 * 16), of_long));
  for (int i = 0; i < 3; ++i) scheduler.step();
  scheduler.add(sequence(2, random_tokens(60, 8), of_short));
  scheduler.step();
  scheduler.step();
  EXPECT_GE(of_short, 1);
  EXPECT_EQ(of_long, 0);
  // Nor does the long one starve behind short ones that never end.
  for (RequestId id = 3; of_long == 0 && id < 400; ++id) {
    scheduler.add(sequence(id, random_tokens(128, id), of_short, 1));
    scheduler.step();
  }
  EXPECT_GE(of_long, 1);
}

TEST_F(Stepping, EveryRunningSequenceGetsOneTokenAStepWhateverIsRead) {
  auto scheduler = make(64);
  std::int64_t running = 0, reading = 0;
  scheduler.add(sequence(1, random_tokens(10), running));
  scheduler.step();
  scheduler.add(sequence(2, random_tokens(64 * 20, 2), reading));
  for (std::int64_t step = 1; step <= 10; ++step) {
    EXPECT_EQ(running, step);
    scheduler.step();
  }
  EXPECT_EQ(reading, 0);
}

TEST_F(Stepping, ACancelledSequenceGivesItsSlotAndPagesBackAtOnce) {
  auto scheduler = make(128);
  std::int64_t count = 0;
  scheduler.add(sequence(1, random_tokens(1000), count));
  scheduler.add(sequence(2, random_tokens(5), count));
  scheduler.step();
  EXPECT_EQ(scheduler.stats().slots_in_use, 2);
  EXPECT_GT(scheduler.stats().cache_bytes_in_use, 0);
  scheduler.cancel(1);
  scheduler.cancel(2);
  EXPECT_EQ(scheduler.stats().slots_in_use, 0);
  EXPECT_EQ(scheduler.stats().cache_bytes_in_use, 0);
  EXPECT_TRUE(scheduler.idle());
}

/// Tokens of sequences that come, end by a token or by their length, are cancelled and make others wait for a slot.
std::map<RequestId, Tokens> a_busy_hour(Scheduler& scheduler,
                                        const std::function<std::unique_ptr<Sequence>(RequestId)>& make) {
  std::map<RequestId, Tokens> answers;
  const auto add = [&](RequestId id, const std::function<void(Request&)>& change) {
    auto one = make(id);
    one->request.max_tokens = 20 + 7 * static_cast<std::int64_t>(id);
    one->request.sampling = {.temperature = 1, .seed = static_cast<std::uint64_t>(id)};
    change(one->request);
    one->sink.on_token = [&answers, id](const TokenEvent& event) { answers[id].push_back(event.token); };
    scheduler.add(std::move(one));
  };
  add(1, [](Request& r) { r.stop_tokens = {5, 6, 7, 8, 9}; });
  add(2, [](Request& r) { r.sampling.top_p = 0.8; });
  for (int i = 0; i < 9; ++i) scheduler.step();
  add(3, [](Request& r) { r.sampling.repetition_penalty = 1.3; });
  add(4, [](Request& r) { r.min_tokens = 12, r.stop_tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}; });
  add(5, [](Request& r) { r.sampling.temperature = 0; });
  add(6, [](Request&) {});
  for (int i = 0; i < 9; ++i) scheduler.step();
  scheduler.cancel(6);
  answers.erase(6);  // how far it came is not asked
  add(7, [](Request& r) { r.iterations = 3; });
  while (!scheduler.idle()) scheduler.step();
  return answers;
}

TEST_F(Stepping, WhoFailsToTakeATokenEndsThatSequenceAlone) {
  for (const bool ahead : {false, true}) {
    auto scheduler = make(128, ahead);
    std::int64_t good = 0, bad = 0;
    std::string why;
    scheduler.add(sequence(1, random_tokens(5), good, 20));
    auto failing = sequence(2, random_tokens(9), bad, 20);
    failing->sink.on_token = [&bad](const TokenEvent&) {
      if (++bad == 7) throw std::runtime_error("its line is cut");
    };
    failing->sink.on_end = [&why](Finish, const Usage&, const std::string& error) { why = error; };
    scheduler.add(std::move(failing));
    while (!scheduler.idle()) scheduler.step();
    EXPECT_EQ(good, 20);
    EXPECT_EQ(bad, 7);
    EXPECT_EQ(why, "its line is cut");
    EXPECT_EQ(scheduler.stats().slots_in_use, 0);
  }
}

TEST_F(Stepping, WhoFailsToHearOfItsEndDisturbsNobody) {
  auto scheduler = make(128);
  std::int64_t good = 0, bad = 0;
  scheduler.add(sequence(1, random_tokens(5), good, 20));
  for (const RequestId id : {2, 3}) {
    auto failing = sequence(id, random_tokens(9), bad, 7);
    failing->sink.on_end = [](Finish, const Usage&, const std::string&) {
      throw std::runtime_error("nobody is there");
    };
    scheduler.add(std::move(failing));
  }
  for (int i = 0; i < 3; ++i) scheduler.step();
  scheduler.cancel(3);
  while (!scheduler.idle()) scheduler.step();
  EXPECT_EQ(good, 20);
  EXPECT_EQ(scheduler.stats().slots_in_use, 0);
}

TEST_F(Stepping, AStepBegunBeforeItsTokensAreSeenChangesNoAnswer) {
  std::int64_t count = 0;
  const auto one = [&](RequestId id) {
    return sequence(id, random_tokens(5 + 30 * static_cast<std::int64_t>(id), static_cast<std::uint64_t>(id)), count);
  };
  auto waits = make(4096), goes_on = make(4096, /*ahead=*/true);
  const auto expected = a_busy_hour(waits, one), answers = a_busy_hour(goes_on, one);
  EXPECT_EQ(answers, expected);
  EXPECT_EQ(expected.size(), 6U);
  for (const RequestId id : {2, 3, 5, 7}) EXPECT_EQ(std::ssize(expected.at(id)), 20 + 7 * static_cast<int>(id));
  EXPECT_LT(std::ssize(expected.at(1)), 27);  // a stop token came, which nobody knew before
  EXPECT_EQ(goes_on.stats().slots_in_use, 0);
  EXPECT_EQ(goes_on.stats().cache_bytes_in_use, waits.stats().cache_bytes_in_use);
  EXPECT_LT(goes_on.stats().steps, waits.stats().steps + 10);
}

}  // namespace
}  // namespace gka::infer::test
