// AdamW against the textbook loop in float64, and what must hold whatever the numbers.
#include "train/adamw.h"

#include <ATen/ops/cos.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace gka::train {
namespace {

using layers::Parameter;
using layers::WeightDecay;

std::vector<double> values(const at::Tensor& tensor) {
  const auto flat = tensor.detach().to(at::kDouble).contiguous().flatten();
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

/// One parameter by the book.
struct Plain {
  std::vector<double> p, m, v;
  int steps = 0;

  explicit Plain(const at::Tensor& start) : p(values(start)), m(p.size()), v(p.size()) {}

  void step(const std::vector<double>& gradient, double rate, const AdamWOptions& options, double decay) {
    ++steps;
    const auto [b1, b2] = options.betas;
    for (std::size_t i = 0; i < p.size(); ++i) {
      p[i] -= rate * decay * p[i];
      m[i] = b1 * m[i] + (1 - b1) * gradient[i];
      v[i] = b2 * v[i] + (1 - b2) * gradient[i] * gradient[i];
      const double m_hat = m[i] / (1 - std::pow(b1, steps));
      const double v_hat = v[i] / (1 - std::pow(b2, steps));
      p[i] -= rate * m_hat / (std::sqrt(v_hat) + options.eps);
    }
  }
};

at::Tensor leaf(at::IntArrayRef shape, at::ScalarType dtype) {
  return at::randn(shape, at::TensorOptions(dtype)).requires_grad_(true);
}

double length_of(const std::vector<std::vector<double>>& gradients) {
  double squares = 0;
  for (const auto& gradient : gradients) {
    for (const double g : gradient) squares += g * g;
  }
  return std::sqrt(squares);
}

double farthest(const std::vector<double>& a, const std::vector<double>& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

class AdamWInType : public testing::TestWithParam<at::ScalarType> {};

TEST_P(AdamWInType, IsTheTextbookLoop) {
  const AdamWOptions options{.betas = {0.9, 0.97}, .eps = 1e-6, .weight_decay = 0.2, .clip = 1.5};
  const double tolerance = GetParam() == at::kDouble ? 1e-14 : 1e-6;
  const std::vector<Parameter> parameters{{"w", leaf({7, 5}, GetParam()), {}, WeightDecay::yes},
                                          {"norm", leaf({11}, GetParam()), {}, WeightDecay::no}};
  AdamW optimiser(parameters, options);
  std::vector<Plain> plain;
  for (const auto& parameter : parameters) plain.emplace_back(parameter.value);
  for (int step = 1; step <= 20; ++step) {
    optimiser.zero_gradients();
    std::vector<std::vector<double>> gradients;
    for (const auto& parameter : parameters) {
      // Some steps are clipped and some are not.
      const auto gradient = at::randn(parameter.value.sizes(), at::TensorOptions(GetParam())).mul(step % 3 ? 0.1 : 1.0);
      parameter.value.mutable_grad() = gradient.clone();
      gradients.push_back(values(gradient));
    }
    const double length = length_of(gradients);
    const double shortened = std::min(1.0, options.clip / (length + 1e-6));
    for (auto& gradient : gradients) {
      for (double& g : gradient) g *= shortened;
    }
    const double rate = 0.01 * step;
    EXPECT_NEAR(optimiser.step(rate).item<double>(), length, tolerance * 10);
    plain[0].step(gradients[0], rate, options, options.weight_decay);
    plain[1].step(gradients[1], rate, options, 0);
    for (int i = 0; i < 2; ++i) EXPECT_LT(farthest(values(parameters[i].value), plain[i].p), tolerance * step);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, AdamWInType, testing::Values(at::kDouble, at::kFloat));

TEST(AdamW, TakesAGradientThatIsShortEnoughAsItIs) {
  const std::vector<Parameter> parameters{{"w", at::full({4}, 1.0).requires_grad_(true), {}, WeightDecay::yes}};
  AdamW optimiser(parameters, {.clip = 2});
  parameters[0].value.mutable_grad() = at::full({4}, 0.5);
  EXPECT_DOUBLE_EQ(optimiser.step(0).item<double>(), 1);
  EXPECT_EQ(values(parameters[0].value.grad()), std::vector<double>(4, 0.5));
}

TEST(AdamW, ShortensALongGradientToTheLimit) {
  const std::vector<Parameter> parameters{{"a", at::full({9}, 1.0).requires_grad_(true), {}, WeightDecay::yes},
                                          {"b", at::full({16}, 1.0).requires_grad_(true), {}, WeightDecay::no}};
  AdamW optimiser(parameters, {.clip = 1});
  for (const auto& parameter : parameters) parameter.value.mutable_grad() = at::full(parameter.value.sizes(), 1.0);
  EXPECT_DOUBLE_EQ(optimiser.step(0).item<double>(), 5);
  EXPECT_NEAR(parameters[0].value.grad()[0].item<double>(), 0.2, 1e-6);
  EXPECT_NEAR(parameters[1].value.grad()[0].item<double>(), 0.2, 1e-6);
}

TEST(AdamW, MeasuresALengthWhoseSquareOverflows) {
  const std::vector<Parameter> parameters{{"w", at::full({4}, 1.0).requires_grad_(true), {}, WeightDecay::yes}};
  AdamW optimiser(parameters, {});
  parameters[0].value.mutable_grad() = at::full({4}, 1e30);
  EXPECT_NEAR(optimiser.step(1e-3).item<double>() / 2e30, 1, 1e-6);
}

TEST(AdamW, ChangesNothingWhereTheGradientIsNotFinite) {
  for (const double broken : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    const std::vector<Parameter> parameters{{"good", leaf({3}, at::kFloat), {}, WeightDecay::yes},
                                            {"bad", leaf({3}, at::kFloat), {}, WeightDecay::yes}};
    AdamW optimiser(parameters, {});
    const std::vector before{values(parameters[0].value), values(parameters[1].value)};
    parameters[0].value.mutable_grad() = at::full({3}, 7.0);
    parameters[1].value.mutable_grad() = at::full({3}, broken);
    EXPECT_FALSE(std::isfinite(optimiser.step(0.1).item<double>()));
    EXPECT_EQ(values(parameters[0].value), before[0]);
    EXPECT_EQ(values(parameters[1].value), before[1]);
    EXPECT_EQ(values(parameters[0].value.grad()), std::vector<double>(3, 7.0)) << "one can see which is the bad one";
  }
}

TEST(AdamW, LeavesAParameterWithoutAGradientAlone) {
  const std::vector<Parameter> parameters{{"used", leaf({3}, at::kFloat), {}, WeightDecay::yes},
                                          {"unused", leaf({3}, at::kFloat), {}, WeightDecay::yes}};
  AdamW optimiser(parameters, {});
  const auto before = values(parameters[1].value);
  parameters[0].value.mutable_grad() = at::full({3}, 1.0);
  optimiser.step(0.1);
  EXPECT_EQ(values(parameters[1].value), before);
}

TEST(AdamW, GoesOnToTheSameBitsFromItsState) {
  const auto start = at::randn({6});
  const auto train = [&](AdamW& optimiser, const Parameter& parameter, int from, int to) {
    for (int i = from; i < to; ++i) {
      parameter.value.mutable_grad() = parameter.value.detach().sin().add(i);
      optimiser.step(0.01);
    }
  };
  const std::vector<Parameter> whole{{"w", start.clone().requires_grad_(true), {}, WeightDecay::yes}};
  AdamW uninterrupted(whole, {});
  train(uninterrupted, whole[0], 0, 10);

  const std::vector<Parameter> first{{"w", start.clone().requires_grad_(true), {}, WeightDecay::yes}};
  AdamW before(first, {});
  train(before, first[0], 0, 4);
  const std::vector<Parameter> second{
      {"w", first[0].value.detach().clone().requires_grad_(true), {}, WeightDecay::yes}};
  AdamW after(second, {});
  after.load(before.state());
  train(after, second[0], 4, 10);
  EXPECT_EQ(values(second[0].value), values(whole[0].value));
}

TEST(AdamW, RefusesAnotherModelsState) {
  const std::vector<Parameter> own{{"w", leaf({3}, at::kFloat), {}, WeightDecay::yes}};
  const std::vector<Parameter> other{{"v", leaf({3}, at::kFloat), {}, WeightDecay::yes}};
  const std::vector<Parameter> wider{{"w", leaf({4}, at::kFloat), {}, WeightDecay::yes}};
  AdamW optimiser(own, {});
  EXPECT_THROW(optimiser.load(AdamW(other, {}).state()), std::runtime_error);
  EXPECT_THROW(optimiser.load(AdamW(wider, {}).state()), std::runtime_error);
}

TEST(AdamW, ARateOnTheDeviceIsTheSameRate) {
  constexpr double kRate = 0.0078125;  // float32 has it exactly
  const auto start = at::randn({5, 3});
  std::vector<at::Tensor> after;
  for (const bool on_device : {false, true}) {
    const auto weight = start.clone().requires_grad_(true);
    AdamW optimiser({{"w", weight, {}, WeightDecay::yes}}, {});
    for (int step = 0; step < 3; ++step) {
      weight.mutable_grad() = start.cos().add(step);
      const auto length = on_device ? optimiser.step(at::full({}, kRate, at::kFloat)) : optimiser.step(kRate);
      EXPECT_GT(length.item<double>(), 0);
    }
    after.push_back(weight.detach());
  }
  EXPECT_LT(farthest(values(after[0]), values(after[1])), 1e-7);
}

}  // namespace
}  // namespace gka::train
