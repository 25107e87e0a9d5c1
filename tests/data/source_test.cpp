// Sources from their JSON: batches as tensors, positions, and what is said about mistakes.
#include "data/source.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "support.h"

namespace gka::data {
namespace {

using Json = nlohmann::ordered_json;
using Sources = InFolder;

bool same(const Batch& a, const Batch& b) {
  const bool packed = a.cu_seqlens.defined();
  return a.inputs.equal(b.inputs) && a.targets.equal(b.targets) && packed == b.cu_seqlens.defined() &&
         (!packed || a.cu_seqlens.equal(b.cu_seqlens));
}

std::vector<std::int64_t> numbers(const at::Tensor& tensor) {
  const auto wide = tensor.to(at::kLong).contiguous();
  return {wide.data_ptr<std::int64_t>(), wide.data_ptr<std::int64_t>() + wide.numel()};
}

Json mqar() {
  return {{"kind", "task"},
          {"task", "mqar"},
          {"vocab_size", 128},
          {"sizes", {{{"tokens", 32}, {"pairs", 4}}, {{"tokens", 64}, {"pairs", 8}, {"weight", 2}}}}};
}

TEST_F(Sources, continue_from_a_position_as_if_never_interrupted) {
  const Json tokens{{"kind", "tokens"}, {"files", {write_counting("a.tokens", 500)}}, {"packed", true}};
  const Json mixed{{"kind", "mixture"}, {"sources", {mqar(), tokens}}};
  for (const auto& config : {mqar(), tokens, mixed}) {
    const auto whole = open_source(config), resumed = open_source(config);
    std::vector<Batch> batches;
    for (int i = 0; i < 12; ++i) batches.push_back(whole->next(4, 16));
    EXPECT_EQ(whole->position(), 48);
    resumed->seek(28);
    for (std::size_t i = 7; i < 12; ++i) EXPECT_TRUE(same(resumed->next(4, 16), batches[i])) << i;
  }
}

TEST_F(Sources, of_tasks_have_one_size_per_batch_and_other_sequences_for_evaluation) {
  const auto train = open_source(mqar()), eval = open_source(mqar(), Split::eval);
  const auto batch = train->next(3, 999);
  EXPECT_TRUE(batch.inputs.size(1) == 32 || batch.inputs.size(1) == 64);
  EXPECT_EQ(batch.inputs.sizes(), batch.targets.sizes());
  EXPECT_FALSE(batch.cu_seqlens.defined());
  EXPECT_FALSE(same(batch, eval->next(3, 999)));
  EXPECT_EQ(train->vocab_size(), 128);
  EXPECT_EQ(train->longest(999), 64);
  EXPECT_EQ(train->epoch(999), 0);
}

TEST_F(Sources, that_are_packed_start_anew_with_every_document) {
  const auto file = write("a.tokens", {{1, 2}, {3}, {4, 5, 6}});  // 1 2 E | 3 E | 4 5 6 E
  const Json config{{"kind", "tokens"}, {"files", {file}}, {"packed", true}, {"shuffle", false}};
  const auto batch = open_source(config)->next(2, 4);
  EXPECT_EQ(numbers(batch.inputs), (std::vector<std::int64_t>{1, 2, 256, 3, 256, 4, 5, 6}));
  EXPECT_EQ(numbers(batch.targets), (std::vector<std::int64_t>{2, 256, -100, 256, -100, 5, 6, 256}));
  EXPECT_EQ(numbers(batch.cu_seqlens), (std::vector<std::int64_t>{0, 3, 4, 5, 8}));
  EXPECT_EQ(batch.inputs.sizes(), (std::vector<std::int64_t>{1, 8}));
}

TEST_F(Sources, that_are_not_packed_run_on) {
  const auto file = write("a.tokens", {{1, 2}, {3}, {4, 5, 6}});
  const Json config{{"kind", "tokens"}, {"files", {file}}, {"shuffle", false}};
  const auto batch = open_source(config)->next(2, 4);
  EXPECT_EQ(numbers(batch.targets), (std::vector<std::int64_t>{2, 256, 3, 256, 4, 5, 6, 256}));
  EXPECT_EQ(batch.inputs.sizes(), (std::vector<std::int64_t>{2, 4}));
}

TEST_F(Sources, are_scored_by_their_answers) {
  const auto source = open_source(mqar());
  const auto batch = source->next(5, 0);
  EXPECT_EQ(accuracy(batch.targets, batch.targets).exact_match(), 1);
  EXPECT_EQ(accuracy(at::full_like(batch.targets, 1), batch.targets).exact_match(), 0);
  const auto answers = batch.targets.masked_select(batch.targets.ne(kIgnoredLabel));
  const auto scored = accuracy(answers, batch.targets);
  EXPECT_EQ(scored.exact_match(), 1);
  EXPECT_EQ(scored.answers, answers.numel());
  EXPECT_EQ(scored.sequences, 5);
}

TEST_F(Sources, that_are_mixed_hand_out_whole_batches_of_each_by_weight_and_none_twice) {
  const Json text{{"kind", "tokens"}, {"files", {write_counting("a.tokens", 500)}}, {"weight", 3}, {"shuffle", false}};
  const Json config{{"kind", "mixture"}, {"seed", 7}, {"sources", {text, mqar()}}};
  Json own = text;
  own.erase("weight");
  const auto mixed = open_source(config), tokens = open_source(own);
  Json seeded = mqar();
  seeded["seed"] = 7;
  const auto task = open_source(seeded);
  int of_text = 0;
  for (int i = 0; i < 4096; ++i) {
    const auto batch = mixed->next(2, 16);
    const bool is_text = batch.inputs.size(1) == 16;
    of_text += is_text;
    EXPECT_TRUE(same(batch, (is_text ? *tokens : *task).next(2, 16))) << i;
  }
  EXPECT_EQ(of_text, 3 * 4096 / 4);
  EXPECT_EQ(mixed->epoch(16), 0);
  EXPECT_EQ(mixed->longest(16), 64);
  EXPECT_EQ(mixed->vocab_size(), std::max<std::int64_t>(128, tokens->vocab_size()));
  EXPECT_TRUE(has(mixed->describe(), "mixture: 75% tokens: 1 file")) << mixed->describe();
}

TEST_F(Sources, name_what_is_wrong_with_their_configuration) {
  const auto open = [](const char* text) { return complaint([&] { open_source(Json::parse(text)); }); };
  EXPECT_TRUE(has(open("{}"), "a source is an object with a kind"));
  EXPECT_TRUE(has(open(R"({"kind": "token"})"), R"(kind takes "tokens", "task" or "mixture", and is "token")"));
  EXPECT_TRUE(has(open(R"({"kind": "tokens", "file": []})"), "did you mean 'files'?"));
  EXPECT_TRUE(has(open(R"({"kind": "tokens"})"), "files is empty"));
  EXPECT_TRUE(has(open(R"({"kind": "tokens", "files": ["/nowhere"]})"), "/nowhere: No such file"));
  EXPECT_TRUE(has(open(R"({"kind": "task"})"), "needs task"));
  EXPECT_TRUE(has(open(R"({"kind": "mixture"})"), "sources is empty"));
  EXPECT_TRUE(has(open(R"({"kind": "mixture", "sources": [{"weight": 0}]})"), "takes a number above 0, and is 0"));
  EXPECT_TRUE(has(open(R"({"kind": "mixture", "sources": [{"kind": "task", "task": "mqra"}]})"), "mean 'mqar'?"));
  EXPECT_TRUE(has(open(R"({"kind": "task", "task": "mqar", "pair": 3})"), "did you mean 'pairs'?"));
  EXPECT_TRUE(has(open(R"({"kind": "task", "task": "copy", "pairs": 3})"), "'pairs' of task copy is unknown"));
  EXPECT_TRUE(has(open(R"({"kind": "task", "task": "mqar", "filler": "ones"})"), "takes one of zeros, random"));
  EXPECT_TRUE(has(open(R"({"kind": "task", "task": "mqar", "sizes": [{"weigth": 3}]})"), "did you mean 'weight'?"));
  EXPECT_TRUE(has(open(R"({"kind": "task", "task": "mqar", "pairs": 40})"), "need at least 160"));
  EXPECT_TRUE(has(open(R"({"kind": "task", "task": "mqar", "pairs": "x"})"), "takes a whole number"));
}

}  // namespace
}  // namespace gka::data
