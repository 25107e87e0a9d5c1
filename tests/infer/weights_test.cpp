// Weights as they are stored: the same model in float32, bfloat16 and int8.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <string>
#include <vector>

#include "infer/asking.h"
#include "models/checkpoint.h"
#include "models/scratch.h"

namespace gka::infer::test {
namespace {

using models::test::Scratch;
using models::test::tiny_config;
using models::test::tiny_model;

std::string every_kind() {
  std::string pattern;
  for (const char* kind : models::test::kEveryKind) pattern += (pattern.empty() ? "" : "-") + std::string(kind);
  return pattern;
}

std::unique_ptr<Engine> engine_in(const Scratch& folder, const std::string& weights) {
  return Engine::load(folder.path(), {.device = "cpu", .weights = weights});
}

std::vector<double> scores(const Scratch& folder, const std::string& weights) {
  std::vector<double> all;
  const auto answer =
      ask(*engine_in(folder, weights), {.prompt = random_tokens(100), .max_tokens = 0, .prompt_logprobs = true});
  for (std::size_t i = 1; i < answer.prompt.size(); ++i) all.push_back(answer.prompt[i].logprob);
  return all;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(a[i] - b[i]));
  return largest;
}

/// What 8 bits and a scale for each 64 numbers of a row leave of a matrix.
at::Tensor rounded(const at::Tensor& matrix) {
  const auto groups = matrix.detach().split(64, 1);
  std::vector<at::Tensor> parts;
  for (const auto& group : groups) {
    const auto scale = group.abs().amax(1, true) / 127;
    parts.push_back((group / scale).round() * scale);
  }
  return at::cat(parts, 1);
}

class EveryTying : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(StoredModel, EveryTying, testing::Bool());

TEST_P(EveryTying, ScoresAreThoseOfItsNumbersInFloat32) {
  const auto config = tiny_config(every_kind(), GetParam());
  const Scratch narrow;
  models::save_model(tiny_model(config, at::kFloat), narrow.path(), {.dtype = at::kBFloat16});
  EXPECT_LT(largest_difference(scores(narrow, ""), scores(narrow, "float32")), 2e-4);
  EXPECT_EQ(scores(narrow, ""), scores(narrow, "bfloat16"));

  const at::NoGradGuard no_gradient;
  const Scratch before, after;
  auto model = tiny_model(config, at::kFloat);
  models::save_model(model, before.path());
  for (const auto& parameter : model.parameters().all()) {
    if (parameter.shape.size() == 2) at::Tensor(parameter.value).copy_(rounded(parameter.value));
  }
  models::save_model(model, after.path());
  EXPECT_LT(largest_difference(scores(before, "int8"), scores(after, "float32")), 2e-4);
  EXPECT_GT(largest_difference(scores(before, "int8"), scores(before, "float32")), 1e-3);
}

TEST_P(EveryTying, StoredAsInt8HasTheBitsOfInt8MadeAtLoadAndIsHalfTheBytes) {
  const auto config = tiny_config(every_kind(), GetParam());
  const Scratch wide, narrow, again;
  models::save_model(tiny_model(config, at::kFloat), wide.path());
  models::save_model(models::load_model(wide.path()), narrow.path(), {.int8 = true});
  EXPECT_EQ(scores(narrow, ""), scores(wide, "int8"));
  EXPECT_EQ(scores(narrow, "int8"), scores(wide, "int8"));
  EXPECT_LT(largest_difference(scores(narrow, "float32"), scores(wide, "int8")), 2e-4);

  const auto mapped = models::load_model(narrow.path(), {.dtype = at::kFloat, .weights = models::WeightsAs::stored});
  const auto& embedding = mapped.parameters().find("model.embed_tokens.weight")->value;
  EXPECT_EQ(embedding.scalar_type(), at::kChar);
  EXPECT_FALSE(embedding.storage().allocator());  // the file's own pages
  // What it stands for, as numbers: training and Python read it so, and writing it again changes nothing.
  models::save_model(models::load_model(narrow.path(), {.dtype = at::kFloat}), again.path(), {.int8 = true});
  EXPECT_EQ(scores(again, ""), scores(narrow, ""));
}

/// A folder with a model in bfloat16.
class StoredModel : public testing::Test {
 protected:
  StoredModel() {
    models::save_model(tiny_model(tiny_config("*-GKA"), at::kFloat), folder_.path(), {.dtype = at::kBFloat16});
  }
  Scratch folder_;
};

TEST_F(StoredModel, IsTheFilesOwnPagesAndNoCopy) {
  const auto mapped = models::load_model(folder_.path(), {.dtype = at::kFloat, .weights = models::WeightsAs::stored});
  const auto find = [&](const char* name) { return mapped.parameters().find(name)->value; };
  EXPECT_EQ(find("model.embed_tokens.weight").scalar_type(), at::kBFloat16);
  EXPECT_EQ(find("model.layers.0.self_attn.q_proj.weight").scalar_type(), at::kBFloat16);
  EXPECT_EQ(find("model.norm.weight").scalar_type(), at::kFloat);
  EXPECT_FALSE(find("model.layers.0.self_attn.q_proj.weight").storage().allocator());  // nobody allocated it
  EXPECT_EQ(mapped.parameters().count(), models::count_parameters(mapped.config()));
}

class EveryStoredMixer : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(StoredModel, EveryStoredMixer,
                         testing::Values("*", "SWA", "GKA", "M2", "MESA", "GLA", "RET", "LA", "DN", "GDN", "KDA"));

TEST_P(EveryStoredMixer, AnswersInABatchWithTheBitsItHasAlone) {
  const Scratch folder;
  const auto config = tiny_config(GetParam());
  models::save_model(tiny_model(config, at::kFloat), folder.path());
  for (const char* weights : {"bfloat16", "int8"}) {
    const Request request{.prompt = random_tokens(80), .sampling = {.seed = 4}, .max_tokens = 20};
    const auto alone = ask(*engine_in(folder, weights), request);
    const auto busy = engine_in(folder, weights);
    std::vector<std::future<Answer>> others, same;
    for (std::int64_t i = 0; i < 6; ++i) {
      others.push_back(ask_later(*busy, {.prompt = random_tokens(40 + 50 * i, 9), .max_tokens = 10 + i}));
      same.push_back(ask_later(*busy, request));
    }
    for (auto& later : same) {
      const auto answer = later.get();
      EXPECT_EQ(answer.tokens, alone.tokens) << weights;
      EXPECT_EQ(answer.logprobs, alone.logprobs) << weights;
    }
    for (auto& answer : others) EXPECT_EQ(answer.get().finish, Finish::length);
  }
}

TEST_F(StoredModel, AnUnknownKindOfWeightsIsRefused) {
  try {
    engine_in(folder_, "int4");
    FAIL() << "int4 was taken";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "weights takes one of stored, float32, bfloat16, int8, and got 'int4'");
  }
}

}  // namespace
}  // namespace gka::infer::test
