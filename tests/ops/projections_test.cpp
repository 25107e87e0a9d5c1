// All of a mixer's projections in one product, against one operator each: the outputs and every gradient.
#include "ops/projections.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <vector>

#include "gka/block.h"
#include "ops/linear.h"

namespace gka::ops {
namespace {

constexpr std::int64_t kHeads = 2, kHeadDim = 3, kChannels = kHeads * kHeadDim, kWidth = 8;

at::Tensor leaf(at::IntArrayRef shape) { return at::randn(shape, at::kDouble).set_requires_grad(true); }

double error(const at::Tensor& got, const at::Tensor& want) {
  return (got - want).norm().item<double>() / want.norm().item<double>();
}

/// Two convolved projections, a gate of the norm's, one more projection, and the projection behind the norm.
struct Case {
  at::Tensor x = leaf({2, 5, kWidth}), key = leaf({kChannels, kWidth}), key_conv = leaf({kChannels, 1, 4}),
             value = leaf({kChannels, kWidth}), value_conv = leaf({kChannels, 1, 4}), gate = leaf({kChannels, kWidth}),
             other = leaf({4, kWidth}), norm = leaf({kHeadDim}), outward = leaf({7, kChannels});
  std::vector<at::Tensor> leaves() const { return {x, key, key_conv, value, value_conv, gate, other, norm, outward}; }
};

struct Outputs {
  at::Tensor key, value, gate, other, answer;
  std::vector<at::Tensor> all() const { return {key, other, answer}; }
};

at::Tensor by_head(const at::Tensor& t) { return t.unflatten(-1, {kHeads, kHeadDim}); }

Outputs together(const Case& c) {
  const auto parts =
      project_convolved(c.x,
                        {{.weight = c.key, .conv = c.key_conv, .norm = L2Norm::divide, .head_dim = kHeadDim},
                         {.weight = c.value, .conv = c.value_conv, .norm = L2Norm::none, .head_dim = kHeadDim}},
                        {c.gate, c.other});
  return {.key = parts.heads[0],
          .value = parts.heads[1],
          .gate = parts.others[0],
          .other = parts.others[1],
          .answer = gated_output(by_head(parts.heads[1]), by_head(parts.others[0]), c.norm, c.outward, {}, parts.room)};
}

Outputs one_by_one(const Case& c) {
  const auto key = short_conv(at::linear(c.x, c.key), c.key_conv, {.l2_norm = L2Norm::divide, .head_dim = kHeadDim}).y;
  const auto value = short_conv(at::linear(c.x, c.value), c.value_conv).y;
  const auto gate = at::linear(c.x, c.gate);
  return {.key = key,
          .value = value,
          .gate = gate,
          .other = at::linear(c.x, c.other),
          .answer = at::linear(gated_rms_norm(by_head(value), by_head(gate), c.norm).flatten(-2), c.outward)};
}

std::vector<at::Tensor> gradients(const Outputs& outputs, const Case& c, const std::vector<at::Tensor>& slopes) {
  return torch::autograd::grad(outputs.all(), c.leaves(), slopes, /*retain_graph=*/true);
}

std::vector<at::Tensor> slopes_for(const Outputs& outputs) {
  std::vector<at::Tensor> slopes;
  for (const auto& output : outputs.all()) slopes.push_back(at::randn(output.sizes(), at::kDouble));
  return slopes;
}

TEST(Projections, InOneProductGiveWhatEachGivesByItself) {
  const Case c;
  const auto got = together(c), want = one_by_one(c);
  EXPECT_LT(error(got.value, want.value), 1e-13);
  EXPECT_LT(error(got.gate, want.gate), 1e-13);
  for (std::size_t i = 0; i < got.all().size(); ++i) EXPECT_LT(error(got.all()[i], want.all()[i]), 1e-13) << i;
  const auto slopes = slopes_for(want);
  const auto expected = gradients(want, c, slopes);
  for (const char* pass : {"first", "second"}) {
    const auto found = gradients(got, c, slopes);
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_LT(error(found[i], expected[i]), 1e-12) << pass << " " << i;
  }
}

TEST(Projections, AnotherUseOfTheGateAddsToItsGradient) {
  const Case c;
  const auto loss = [](const Outputs& o) { return o.answer.square().sum() + o.gate.exp().sum(); };
  const auto got = torch::autograd::grad({loss(together(c))}, {c.x, c.gate});
  const auto want = torch::autograd::grad({loss(one_by_one(c))}, {c.x, c.gate});
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_LT(error(got[i], want[i]), 1e-12) << i;
}

TEST(Projections, ABackwardPassThatEndsAtTheGateIsNotMixedUpWithTheNext) {
  const Case c;
  const auto got = together(c), want = one_by_one(c);
  const auto slopes = slopes_for(want);
  // It writes to the room and never reaches the node that takes it.
  const auto to_gate = torch::autograd::grad({got.answer}, {got.gate}, {slopes[2]}, /*retain_graph=*/true)[0];
  const auto before = to_gate.clone();
  const auto found = gradients(got, c, slopes), expected = gradients(want, c, slopes);
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_LT(error(found[i], expected[i]), 1e-12) << i;
  EXPECT_TRUE(at::equal(to_gate, before)) << "the gradient that was handed out has changed";
}

TEST(AsOne, AreRowsOfTheSameMemoryOneBelowTheOtherAndNothingElse) {
  const auto room = at::randn({12, kWidth});
  const auto top = room.narrow(0, 0, 5), middle = room.narrow(0, 5, 4), last = room.narrow(0, 9, 3);
  EXPECT_TRUE(at::equal(as_one({top, middle, last}), room));
  EXPECT_TRUE(at::equal(as_one({middle, last}), room.narrow(0, 5, 7)));
  EXPECT_EQ(as_one({top, middle, last}).const_data_ptr(), room.const_data_ptr());
  EXPECT_FALSE(as_one({middle, top}).defined());
  EXPECT_FALSE(as_one({top, last}).defined());
  EXPECT_FALSE(as_one({top, middle.clone()}).defined());
  EXPECT_FALSE(as_one({room.narrow(1, 0, 4), room.narrow(1, 4, 4)}).defined());
}

TEST(Projections, OnAGpuTheNormIsMadeAgainToTheBit) {
  if (!at::hasCUDA() || at::getNumGPUs() == 0) GTEST_SKIP() << "torch sees no GPU";
  const auto numbers = [](at::IntArrayRef shape, at::ScalarType type) {
    return at::randn(shape, at::TensorOptions(at::kCUDA).dtype(type)).set_requires_grad(true);
  };
  const auto product = numbers({2, 100, 8 * 128 + 24}, at::kBFloat16), o = numbers({2, 100, 8, 128}, at::kBFloat16);
  const auto norm = numbers({128}, at::kFloat), weight = numbers({256, 8 * 128}, at::kFloat);
  const auto gate = product.narrow(-1, 24, 8 * 128).unflatten(-1, {8, 128});
  const auto room = c10::make_intrusive<GradientRoom>(std::array<std::int64_t, 3>{2, 100, 8 * 128 + 24});
  const auto y = gated_output(o, gate, norm, weight, {}, room);
  const auto slope = at::randn(y.sizes(), y.options().requires_grad(false));
  const auto found = torch::autograd::grad({y}, {weight}, {slope})[0];
  const auto normed = gated_rms_norm(o, gate, norm).detach().flatten(-2).flatten(0, -2);
  EXPECT_TRUE(at::equal(found, at::mm(slope.flatten(0, -2).t(), normed, at::kFloat)));
}

}  // namespace
}  // namespace gka::ops
