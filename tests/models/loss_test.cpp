// The loss in slices is the loss, and so are its gradients.
#include "models/loss.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "models/scratch.h"
#include "models/tiny.h"

namespace gka::models::test {
namespace {

constexpr std::int64_t kTokens = 23, kWidth = 6, kVocabulary = 17;

struct Case {
  at::Tensor hidden, weight, labels;
};

Case make_case(at::ScalarType dtype) {
  const auto generator = at::detail::createCPUGenerator(5);
  const auto draw = [&](at::IntArrayRef shape) {
    return at::randn(shape, generator, at::TensorOptions(at::kDouble)).to(dtype).set_requires_grad(true);
  };
  auto labels = at::randint(0, kVocabulary, {1, kTokens}, generator, at::TensorOptions(at::kLong));
  for (const auto place : {0, 3, 4, 22}) labels[0][place] = kIgnoredLabel;
  return {.hidden = draw({1, kTokens, kWidth}), .weight = draw({kVocabulary, kWidth}), .labels = labels};
}

at::Tensor plain_loss(const Case& c) {
  return at::cross_entropy_loss(c.hidden.matmul(c.weight.t()).flatten(0, 1), c.labels.flatten());
}

/// Loss and gradients to hidden and weight, with a factor behind the loss.
std::vector<at::Tensor> run(const Case& c, const at::Tensor& loss) {
  c.hidden.mutable_grad() = at::Tensor();
  c.weight.mutable_grad() = at::Tensor();
  (loss * 3).backward();
  return {loss.detach(), c.hidden.grad().clone(), c.weight.grad().clone()};
}

TEST(Loss, SlicesOfAnySizeGiveThePlainLossAndItsGradients) {
  const auto c = make_case(at::kDouble);
  const auto expected = run(c, plain_loss(c));
  for (const std::int64_t slice : {1, 4, 19, 100, 0}) {
    const auto got = run(c, sliced_cross_entropy(c.hidden, c.weight, c.labels, {.slice = slice}).mean);
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_LT(error_of(got[i], expected[i]), 1e-13) << slice << " " << i;
  }
}

TEST(Loss, ADivisorReplacesTheNumberOfLabels) {
  const auto c = make_case(at::kDouble);
  const auto mean = sliced_cross_entropy(c.hidden, c.weight, c.labels).mean;
  const auto divided = sliced_cross_entropy(c.hidden, c.weight, c.labels, {.divisor = 38}).mean;
  EXPECT_LT(error_of(divided * 2, mean), 1e-13);
}

TEST(Loss, PredictionsAreTheLikeliestTokensWhereThereIsALabel) {
  const auto c = make_case(at::kDouble);
  const auto loss = sliced_cross_entropy(c.hidden, c.weight, c.labels, {.slice = 5, .predict = true});
  const auto best = c.hidden.matmul(c.weight.t()).argmax(2).flatten();
  EXPECT_EQ(loss.rows.numel(), kTokens - 4);
  EXPECT_TRUE(at::equal(loss.predicted, best.index_select(0, loss.rows)));
  EXPECT_TRUE(c.labels.flatten().index_select(0, loss.rows).ge(0).all().item<bool>());
}

TEST(Loss, NoLabelsIsALossOfZeroWithoutGradient) {
  auto c = make_case(at::kFloat);
  c.labels.fill_(kIgnoredLabel);
  const auto got = run(c, sliced_cross_entropy(c.hidden, c.weight, c.labels).mean);
  for (const auto& tensor : got) EXPECT_EQ(tensor.abs().sum().item<double>(), 0);
}

TEST(Loss, BfloatActivationsUnderFloatWeightsKeepEachGradientsType) {
  const auto c = make_case(at::kFloat);
  const auto expected = run(c, plain_loss(c));
  const Case mixed{
      .hidden = c.hidden.detach().to(at::kBFloat16).set_requires_grad(true), .weight = c.weight, .labels = c.labels};
  const auto got = run(mixed, sliced_cross_entropy(mixed.hidden, mixed.weight, mixed.labels, {.slice = 7}).mean);
  EXPECT_EQ(got[0].scalar_type(), at::kFloat);
  EXPECT_EQ(got[1].scalar_type(), at::kBFloat16);
  EXPECT_EQ(got[2].scalar_type(), at::kFloat);
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_LT(error_of(got[i], expected[i]), 2e-2) << i;
}

TEST(Loss, LogProbabilitiesSumToTheLoss) {
  const auto c = make_case(at::kDouble);
  const auto each = sliced_log_probabilities(c.hidden, c.weight, c.labels, 4);
  EXPECT_EQ(each.sizes(), c.labels.sizes());
  EXPECT_EQ(each[0][3].item<double>(), 0);
  EXPECT_LT(error_of(each.sum() / -(kTokens - 4), plain_loss(c)), 1e-13);
}

TEST(Loss, ALabelOutsideTheVocabularyIsRefused) {
  auto c = make_case(at::kDouble);
  c.labels[0][1] = kVocabulary;
  EXPECT_ERROR(sliced_cross_entropy(c.hidden, c.weight, c.labels),
               "the label 17 is outside the vocabulary of 17 tokens");
  c.labels[0][1] = -1;
  EXPECT_ERROR(sliced_cross_entropy(c.hidden, c.weight, c.labels), "the label -1 is outside");
  EXPECT_ERROR(sliced_cross_entropy(c.hidden, c.weight, c.labels.flatten()), "do not fit each other");
}

}  // namespace
}  // namespace gka::models::test
