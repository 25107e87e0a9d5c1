// A body that is computed again in the backward pass.
#include "ops/recompute.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

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

}  // namespace
}  // namespace gka::test
