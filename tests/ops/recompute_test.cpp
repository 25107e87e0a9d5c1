// A body that is computed again in the backward pass, and tensors that are made again there.
#include "ops/recompute.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <stdexcept>

namespace gka::test {
namespace {

TEST(Recompute, InsideABodyThatIsComputedAgainABodyRunsOnce) {
  const at::Tensor x = at::randn({5}).set_requires_grad(true), weight = at::randn({5}).set_requires_grad(true);
  int runs = 0;
  const auto inner = [&](const at::Tensor& t) {
    ++runs;
    return (t * weight).tanh();
  };
  const auto outer = [&](const at::Tensor& t) { return ops::recompute(inner, t.square(), {weight}) * t; };
  const auto gradients = torch::autograd::grad({ops::recompute(outer, x, {weight}).sum()}, {x, weight});
  EXPECT_EQ(runs, 2);
  const auto plain = torch::autograd::grad({((x.square() * weight).tanh() * x).sum()}, {x, weight});
  EXPECT_TRUE(at::equal(gradients[0], plain[0]));
  EXPECT_TRUE(at::equal(gradients[1], plain[1]));

  // And outside, later, it is computed again as before.
  runs = 0;
  torch::autograd::grad({ops::recompute(inner, x, {weight}).sum()}, {x, weight});
  EXPECT_EQ(runs, 2);
}

/// tanh(x)², whose product keeps tanh(x) for its gradient, with tanh(x) forgotten in between.
struct Squared {
  at::Tensor x = at::randn({5}).set_requires_grad(true), inner = x.tanh(), y;
  int runs = 0;

  Squared() {
    const auto make = [this, from = x.detach()] {
      ++runs;
      return from.tanh();
    };
    y = ops::forget((inner * inner).sum(), {{.tensor = inner, .make = make}});
  }
};

TEST(Forget, WhatIsForgottenHoldsNoMemoryUntilTheBackwardPassMakesItAgain) {
  Squared squared;
  EXPECT_FALSE(squared.inner.has_storage() && squared.inner.storage().data() != nullptr);
  const auto found = torch::autograd::grad({squared.y}, {squared.x}, {}, /*retain_graph=*/true)[0];
  EXPECT_TRUE(at::equal(squared.inner, squared.x.tanh()));
  const auto inner = squared.x.tanh();
  EXPECT_TRUE(at::equal(found, torch::autograd::grad({(inner * inner).sum()}, {squared.x})[0]));
  // A second pass over the same graph finds it there.
  EXPECT_TRUE(at::equal(found, torch::autograd::grad({squared.y}, {squared.x})[0]));
  EXPECT_EQ(squared.runs, 1);
}

TEST(Forget, WithoutGradientsAndInsideABodyThatIsComputedAgainNothingIsForgotten) {
  {
    const at::NoGradGuard no_gradient;
    EXPECT_NE(Squared().inner.storage().data(), nullptr);
  }
  const at::Tensor x = at::randn({5}).set_requires_grad(true);
  int runs = 0;
  const auto body = [&](const at::Tensor& t) {
    const auto inner = t.tanh();
    const auto make = [&runs, from = t.detach()] {
      ++runs;
      return from.tanh();
    };
    return ops::forget(inner * inner, {{.tensor = inner, .make = make}});
  };
  torch::autograd::grad({ops::recompute(body, x, {}).sum()}, {x});
  EXPECT_EQ(runs, 0);
}

TEST(Forget, ATensorThatSharesItsMemoryIsRefused) {
  const at::Tensor x = at::randn({5}).set_requires_grad(true), inner = x.tanh();
  EXPECT_THROW(ops::forget(inner.sum(), {{.tensor = inner.narrow(0, 1, 3), .make = [] { return at::Tensor(); }}}),
               std::logic_error);
}

}  // namespace
}  // namespace gka::test
