// Memories of which attention keeps the last tokens only. What an answer behind one is, float64 says in
// tests/python/test_kept_memories.py; here it has the same bits however it comes about, and what was dropped is gone.
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <future>
#include <string>
#include <vector>

#include "infer/asking.h"
#include "infer/pool.h"
#include "models/safetensors.h"
#include "models/scratch.h"

namespace gka::infer::test {
namespace {

using models::test::Scratch;
using models::test::tiny_config;
using models::test::tiny_model;

void expect_same(const Answer& got, const Answer& expected) {
  EXPECT_EQ(got.error, "");
  EXPECT_EQ(got.tokens, expected.tokens);
  EXPECT_EQ(got.logprobs, expected.logprobs);
}

Request after(const std::string& memory, const Tokens& prompt, std::int64_t most = 8) {
  Request request{.prompt = prompt, .sampling = kGreedy, .max_tokens = most};
  request.memory = memory;
  return request;
}

/// The same request, but every token is read: the memory's whole text with all of its cache, and then without.
Request read_anew(Request request) {
  request.prompt_logprobs = true;
  return request;
}

std::int64_t page_of(const std::string& pattern, bool int8 = false) {
  return sequence_bytes(tiny_model(tiny_config(pattern), at::kFloat), 1024, int8).page;
}

EngineOptions kept_in(const Scratch& folder) {
  EngineOptions options{.snapshot_bytes = -1};
  options.memories = folder.path();
  return options;
}

TEST(KeptMemories, OfEveryMixerAnswerAsIfTheyWereReadNowAroundTheGrid) {
  for (const std::string other : models::test::kEveryKind) {
    SCOPED_TRACE(other);
    const auto pattern = other + "-*";
    const auto engine = engine_of(pattern), plain = engine_of(pattern, {.snapshot_bytes = -1});
    const auto page = page_of(pattern);
    for (const auto& [tokens, keep, kept] : std::vector<std::array<std::int64_t, 3>>{
             {128, 64, 64}, {129, 64, 65}, {191, 64, 127}, {192, 0, 0}, {200, 0, 8}, {200, 9, 72}, {256, 65, 128}}) {
      SCOPED_TRACE(tokens);
      const auto text = random_tokens(tokens), prompt = random_tokens(70, 7);
      const auto memory = engine->create_memory(text, "", keep);
      EXPECT_EQ(memory.tokens, tokens);
      EXPECT_EQ(memory.kept_tokens, kept);
      EXPECT_EQ(memory.cache_bytes, kept / kGrid * page);
      const auto request = after(memory.id, prompt);
      const auto anew = ask(*engine, read_anew(request)), answer = ask(*engine, request);
      expect_same(answer, anew);
      EXPECT_EQ(answer.usage.remembered_tokens, grid_floor(tokens));
      EXPECT_EQ(answer.usage.kept_tokens, kept);
      EXPECT_EQ(answer.usage.prompt_tokens, tokens + 70);
      expect_same(ask(*engine, request), answer);  // now from behind the prompt
      const auto whole = ask(*plain, {.prompt = joined(text, prompt), .sampling = kGreedy, .max_tokens = 8});
      EXPECT_NE(answer.logprobs, whole.logprobs);  // it has forgotten something
      EXPECT_TRUE(engine->delete_memory(memory.id));
    }
  }
}

TEST(KeptMemories, ThatKeepAllAreMemoriesLikeOthers) {
  const auto engine = engine_of("GKA-*");
  const auto text = random_tokens(200), prompt = random_tokens(30, 7);
  const auto whole = ask(*engine, {.prompt = joined(text, prompt), .sampling = kGreedy, .max_tokens = 8});
  for (const std::int64_t keep : {137, 200, 1 << 30}) {
    const auto memory = engine->create_memory(text, "", keep);
    EXPECT_EQ(memory.kept_tokens, 200);
    EXPECT_EQ(memory.cache_bytes, 3 * page_of("GKA-*"));
    expect_same(ask(*engine, after(memory.id, prompt)), whole);
  }
}

TEST(KeptMemories, AndPlainPromptsShareNothingBeyondTheCut) {
  const auto text = random_tokens(200), prompt = random_tokens(30, 7);
  const Request whole{.prompt = joined(text, prompt), .sampling = kGreedy, .max_tokens = 8};
  const auto plain = ask(*engine_of("GKA-*"), whole);
  const auto engine = engine_of("GKA-*");
  const auto memory = engine->create_memory(text, "", 64);
  const auto kept = ask(*engine, after(memory.id, prompt));
  EXPECT_NE(kept.logprobs, plain.logprobs);
  for (int i = 0; i < 2; ++i) {  // the second finds what the first left
    const auto again = ask(*engine, whole);
    expect_same(again, plain);
    EXPECT_EQ(again.usage.remembered_tokens, i == 0 ? 0 : 192);
    expect_same(ask(*engine, after(memory.id, prompt)), kept);
  }
  // A text that others have read is not read again for it, nor for a memory that keeps another part.
  const auto more = engine->create_memory(text, "", 100);
  EXPECT_EQ(more.kept_tokens, 136);
  expect_same(ask(*engine, after(more.id, prompt)), ask(*engine, read_anew(after(more.id, prompt))));
  expect_same(ask(*engine, after(memory.id, prompt)), kept);
  expect_same(ask(*engine, whole), plain);
}

// It would hold pages that the cut lets go.
TEST(KeptMemories, LeaveNoSnapshotBeforeTheCut) {
  const auto engine = engine_of("GKA-*");
  const auto text = random_tokens(300), start = Tokens(text.begin(), text.begin() + 128);
  const auto asked = [&](std::uint64_t seed) {
    return ask(*engine, {.prompt = joined(start, random_tokens(100, seed)), .sampling = kGreedy, .max_tokens = 1});
  };
  EXPECT_EQ(asked(20).usage.remembered_tokens, 0);
  engine->create_memory(text, "", 64);  // the same 128 tokens, of which the first prompt left no snapshot
  EXPECT_EQ(asked(21).usage.remembered_tokens, 0);
  EXPECT_EQ(asked(22).usage.remembered_tokens, 128);
}

TEST(KeptMemories, AreTheSameAfterARestartInForksAndOnARecycledSlot) {
  for (const bool int8 : {false, true}) {
    for (const std::string pattern : {"*", "GKA-*", "SWA-*-GDN"}) {
      SCOPED_TRACE(pattern + (int8 ? " in bytes" : ""));
      const Scratch folder;
      auto options = kept_in(folder);
      options.slots = 1;
      if (int8) options.kv_cache_dtype = "int8";
      const auto prompt = random_tokens(30, 7);
      std::vector<MemoryInfo> memories;
      std::vector<Answer> answers;
      {
        const auto engine = engine_of(pattern, options);
        const auto add = [&](const MemoryInfo& memory) {
          memories.push_back(memory);
          answers.push_back(ask(*engine, after(memory.id, prompt)));
          expect_same(ask(*engine, read_anew(after(memory.id, prompt))), answers.back());
        };
        add(engine->create_memory(random_tokens(300), "", 100));
        EXPECT_EQ(memories[0].kept_tokens, 108);
        add(engine->fork_memory(memories[0].id, random_tokens(90, 8), ""));
        EXPECT_EQ(memories[1].kept_tokens, 198);  // what was kept, and all that came
        add(engine->fork_memory(memories[1].id, random_tokens(20, 9), "", 64));
        EXPECT_EQ(memories[2].kept_tokens, 90);
        add(engine->fork_memory(memories[2].id, {1, 2, 3}, "", 0));  // cut twice at one place
        EXPECT_EQ(memories[3].kept_tokens, 29);
        add(engine->fork_memory(memories[0].id, {}, "", 1000));  // what is gone does not come back
        EXPECT_EQ(memories[4].kept_tokens, 108);
        expect_same(answers[4], answers[0]);
        for (std::size_t i = 0; i < memories.size(); ++i)
          expect_same(ask(*engine, after(memories[i].id, prompt)), answers[i]);
      }
      const auto engine = engine_of(pattern, options);
      const auto listed = engine->memories();
      ASSERT_EQ(listed.size(), memories.size());
      for (std::size_t i = memories.size(); i-- > 0;) {
        const auto same = std::ranges::find(listed, memories[i].id, &MemoryInfo::id);
        ASSERT_NE(same, listed.end());
        EXPECT_EQ(same->kept_tokens, memories[i].kept_tokens);
        EXPECT_EQ(same->cache_bytes, memories[i].cache_bytes);
        const auto answer = ask(*engine, after(memories[i].id, prompt));
        expect_same(answer, answers[i]);
        EXPECT_EQ(answer.usage.remembered_tokens, grid_floor(memories[i].tokens));
        expect_same(ask(*engine, read_anew(after(memories[i].id, prompt))), answers[i]);
      }
      const auto fork = engine->fork_memory(memories[1].id, random_tokens(20, 9), "", 64);
      expect_same(ask(*engine, after(fork.id, prompt)), answers[2]);
    }
  }
}

TEST(KeptMemories, StayWhenSnapshotsBehindThemHaveToGo) {
  const auto engine = engine_of("GKA-*", {.snapshot_bytes = 40'000});
  const auto memory = engine->create_memory(random_tokens(200), "", 64);
  const auto prompt = random_tokens(100, 7);
  const auto first = ask(*engine, after(memory.id, prompt));
  for (std::uint64_t seed = 20; seed < 40; ++seed) ask(*engine, after(memory.id, random_tokens(130, seed), 1));
  const auto again = ask(*engine, after(memory.id, prompt));
  expect_same(again, first);
  EXPECT_EQ(again.usage.remembered_tokens, 192);
  EXPECT_LE(engine->stats().snapshot_bytes, 40'000 + memory.state_bytes);
}

TEST(KeptMemories, GiveThePagesBackToThePoolAndARequestSetsAsideNoMore) {
  const auto page = page_of("*");
  const auto engine = engine_of("*", {.context = 2048, .snapshot_bytes = -1, .cache_bytes = 10 * page});
  const auto memory = engine->create_memory(random_tokens(600), "", 64);  // nine pages while it is read
  EXPECT_EQ(memory.kept_tokens, 88);
  EXPECT_EQ(memory.cache_bytes, page);
  // 18 pages with all of the text: of them eight are gone, one is kept, and nine are its own.
  const auto prompt = random_tokens(538, 7);
  const auto answer = ask(*engine, after(memory.id, prompt, 14));
  EXPECT_EQ(answer.error, "");
  EXPECT_EQ(answer.usage.prompt_tokens, 1138);
  try {
    ask(*engine, after(memory.id, prompt, 15));
    ADD_FAILURE() << "eleven pages in a pool of ten";
  } catch (const Refused& refused) {
    EXPECT_EQ(refused.reason, Refused::Reason::too_long);
    EXPECT_EQ(refused.message, "a sequence of 1153 tokens needs " + std::to_string(11 * page) +
                                   " bytes of cache, and there are " + std::to_string(10 * page));
  }
  // To read it again takes nine pages, and a page is held by what is remembered of it.
  EXPECT_EQ(ask(*engine, read_anew(after(memory.id, {1, 2, 3}, 14))).error, "");
  const Request all{.prompt = random_tokens(630, 8), .sampling = kGreedy, .max_tokens = 10};
  EXPECT_EQ(ask(*engine, all).error, "a sequence of 640 tokens needs " + std::to_string(10 * page) +
                                         " bytes of cache, and memories leave " + std::to_string(9 * page));
  EXPECT_TRUE(engine->delete_memory(memory.id));
  EXPECT_EQ(ask(*engine, all).error, "");
  engine->drain();
  EXPECT_EQ(engine->stats().cache_bytes_in_use, 0);
}

TEST(KeptMemories, WaitForRoomLikeOthersAndOneThatIsGoneIsReadAgain) {
  const auto page = page_of("GKA-*");
  const Scratch folder;
  auto options = kept_in(folder);
  const auto text = random_tokens(600), prompt = random_tokens(30, 7);
  std::string id;
  Answer expected;
  {
    const auto engine = engine_of("GKA-*", options);
    id = engine->create_memory(text, "", 64).id;
    expected = ask(*engine, after(id, prompt));
  }
  options.context = 1024;
  options.cache_bytes = 10 * page;
  const auto engine = engine_of("GKA-*", options);
  std::vector<std::future<Answer>> answers;
  for (int i = 0; i < 12; ++i) {
    answers.push_back(ask_later(*engine, {.prompt = random_tokens(150, 9), .sampling = kGreedy, .max_tokens = 20}));
    answers.push_back(ask_later(*engine, after(id, prompt)));
  }
  EXPECT_TRUE(engine->delete_memory(id));  // those that wait have its tokens, and know what was kept
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const auto answer = answers[i].get();
    EXPECT_EQ(answer.finish, Finish::length) << answer.error;
    if (i % 2 == 1) {
      EXPECT_EQ(answer.tokens, expected.tokens);
    }
  }
  engine->drain();
  EXPECT_EQ(engine->stats().cache_bytes_in_use, 0);
}

TEST(KeptMemories, OfModelsWithoutAttentionHaveNothingToDrop) {
  const auto engine = engine_of("GKA-SWA");
  const auto text = random_tokens(200), prompt = random_tokens(30, 7);
  const auto memory = engine->create_memory(text, "", 64);
  EXPECT_EQ(memory.cache_bytes, 0);
  EXPECT_EQ(memory.kept_tokens, 200);
  expect_same(ask(*engine, after(memory.id, prompt)),
              ask(*engine, {.prompt = joined(text, prompt), .sampling = kGreedy, .max_tokens = 8}));
}

TEST(KeptMemories, OfFewerThanNoTokensAreRefused) {
  for (const auto* pattern : {"*", "GKA"}) {
    try {
      engine_of(pattern)->create_memory(random_tokens(100), "", -1);
      ADD_FAILURE() << "it was taken";
    } catch (const Refused& refused) {
      EXPECT_EQ(refused.field, "keep_tokens");
      EXPECT_EQ(refused.message, "keep_tokens must be 0 or more, and is -1");
    }
  }
}

// Requests with other solver steps read the text with them, and then forget the same part.
TEST(KeptMemories, AreReadAgainForOtherSolverSteps) {
  const auto engine = engine_of("GKA-*");
  const auto memory = engine->create_memory(random_tokens(300), "", 64);
  auto request = after(memory.id, random_tokens(100, 7));
  request.iterations = 3;
  const auto first = ask(*engine, request), second = ask(*engine, request);
  EXPECT_EQ(first.usage.remembered_tokens, 0);
  EXPECT_EQ(second.usage.remembered_tokens, 384);
  expect_same(second, first);
  expect_same(ask(*engine, read_anew(request)), first);
}

// In one batch some know places of their own in their pages, and solver steps.
TEST(KeptMemories, StepBesideOthersInOneBatch) {
  const auto config = tiny_config("GKA-*-GKA");
  const auto prompt = random_tokens(40, 7);
  const auto requests = [&](const std::string& id) {
    std::vector<Request> made{after(id, prompt, 40), after(id, prompt, 40), after("", random_tokens(90), 40)};
    made[1].iterations = made[2].iterations = 5;
    made.push_back(made[0]);
    made.push_back(made[1]);
    made[3].certainty = made[4].certainty = true;
    return made;
  };
  const auto alone = engine_of(config, {}, at::kDouble), together = engine_of(config, {}, at::kDouble);
  const auto text = random_tokens(200);
  const auto expected = requests(alone->create_memory(text, "", 30).id);
  const auto asked = requests(together->create_memory(text, "", 30).id);
  std::vector<std::future<Answer>> answers;
  for (const auto& request : asked) answers.push_back(ask_later(*together, request));
  for (std::size_t i = 0; i < asked.size(); ++i) {
    const auto got = answers[i].get(), want = ask(*alone, expected[i]);
    ASSERT_EQ(got.tokens, want.tokens) << i;
    for (std::size_t t = 0; t < got.logprobs.size(); ++t) EXPECT_NEAR(got.logprobs[t], want.logprobs[t], 1e-6) << i;
  }
}

TEST(KeptMemories, OnTheDiskHoldWhatIsKeptAndOneOfOtherPagesIsReadAgain) {
  const Scratch folder, others;
  const auto text = random_tokens(600), prompt = random_tokens(30, 7);
  const auto bytes_of_file = [](const Scratch& of, const MemoryInfo& memory) {
    return static_cast<std::int64_t>(std::filesystem::file_size(of / (memory.id + ".safetensors")));
  };
  const auto engine = engine_of("GKA-*", kept_in(folder));
  const auto whole = engine->create_memory(text, ""), kept = engine->create_memory(text, "", 64);
  EXPECT_EQ(whole.cache_bytes - kept.cache_bytes, 8 * page_of("GKA-*"));
  EXPECT_NEAR(bytes_of_file(folder, whole) - bytes_of_file(folder, kept), whole.cache_bytes - kept.cache_bytes, 512);
  auto in_bytes = kept_in(folder);
  in_bytes.kv_cache_dtype = "int8";
  const auto rounded = engine_of("GKA-*", in_bytes);
  const auto answer = ask(*rounded, after(kept.id, prompt));
  EXPECT_EQ(answer.usage.remembered_tokens, 0);
  expect_same(answer, ask(*rounded, after(rounded->create_memory(text, "", 64).id, prompt)));
}

TEST(KeptMemories, WithCutsThatAreNoneAreLeftOutWithASentence) {
  const Scratch folder;
  engine_of("GKA-*", kept_in(folder))->create_memory(random_tokens(200), "", 64);
  const auto file = *std::filesystem::directory_iterator(folder.path());
  models::Tensors tensors;
  models::Metadata metadata;
  {
    const models::SafetensorsFile stored(file.path());
    metadata = stored.metadata();
    for (const auto* name : {"tokens", "hidden"}) tensors.emplace(name, stored.tensor(name).clone());
  }
  EXPECT_EQ(metadata.at("format"), "gka memory 2");
  const std::vector<Tokens> wrongs{{192, 100}, {64, 128},           {256, 64},          {192, 0},
                                   {192},      {192, 64, 128, 128}, {192, 128, 192, 64}};
  for (const auto& wrong : wrongs) {
    tensors.insert_or_assign("cuts", at::tensor(wrong, at::kLong));
    models::write_safetensors(file.path(), tensors, metadata);
    testing::internal::CaptureStderr();
    EXPECT_TRUE(engine_of("GKA-*", kept_in(folder))->memories().empty());
    EXPECT_NE(testing::internal::GetCapturedStderr().find("its cuts are not on its grid of tokens"), std::string::npos);
  }
}

}  // namespace
}  // namespace gka::infer::test
