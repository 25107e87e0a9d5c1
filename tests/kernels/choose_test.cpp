// Which path takes a call on a GPU, decided without one.
#include "kernels/cuda/choose.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "kernels/cuda/saved.h"
#include "kernels/cuda/trial.h"

namespace gka::kernels::cuda {
namespace {

constexpr Offer kHopperCard{.capability = 90, .hopper_built = true};

/// What training calls with: 16 bits, the defaults, 128 channels.
Problem usual() {
  Problem p{.key_dim = 128, .value_dim = 128};
  p.q.dtype = DType::bfloat16;
  return p;
}
Gradients usual_gradients() {
  Gradients g;
  for (View* view : {&g.d_o, &g.d_q, &g.d_k, &g.d_v}) view->dtype = DType::bfloat16;
  return g;
}

template <typename Results>
Choice choose_on(const Problem& p, const Results& results, const Offer& offer = kHopperCard,
                 Asked asked = Asked::nothing) {
  return choose_path(hopper::why_not(p, results), offer, asked);
}

TEST(Choice, HopperTakesTheUsualCallBothWays) {
  EXPECT_EQ(choose_on(usual(), Outputs{}).path, Path::hopper);
  EXPECT_EQ(choose_on(usual(), usual_gradients()).path, Path::hopper);
  EXPECT_STREQ(choose_on(usual(), Outputs{}).why, "");
}

TEST(Choice, AHeadIsPaddedToTheSmallestSizeThatHoldsKeysAndValues) {
  EXPECT_EQ(hopper::size_for(32, 32), 64);
  EXPECT_EQ(hopper::size_for(64, 64), 64);
  EXPECT_EQ(hopper::size_for(64, 68), 128);
  EXPECT_EQ(hopper::size_for(68, 64), 128);
  EXPECT_EQ(hopper::size_for(64, 256), 128);  // two blocks of values
}

TEST(Choice, WhatHopperDoesNotCarryIsThePlainPathsAndSaysWhy) {
  const std::vector<std::function<void(Problem&)>> changes = {
      [](Problem& p) { p.q.dtype = DType::float32; },
      [](Problem& p) { p.q.dtype = DType::float64; },
      [](Problem& p) { p.options.part = Part::memory; },
      [](Problem& p) { p.options.solver = Solver::exact; },
      [](Problem& p) { p.options.gradient = Gradient::unrolled; },
      [](Problem& p) { p.options.decay_keys = false; },
      [](Problem& p) { p.key_dim = 257; },
      [](Problem& p) { p.options.iterations = hopper::kMostSteps + 1; },
      [](Problem& p) { p.options.ridge = 0.004; },
      [](Problem& p) { p.options.chunk = 32; },
  };
  for (const auto& change : changes) {
    Problem p = usual();
    change(p);
    EXPECT_EQ(choose_on(p, Outputs{}).path, Path::plain);
    EXPECT_EQ(choose_on(p, usual_gradients()).path, Path::plain);
    EXPECT_TRUE(std::string(choose_on(p, Outputs{}).why).starts_with("the Hopper kernels "));
  }
}

TEST(Choice, FewIterationsAndSmallRidgesAreHoppers) {
  for (const bool refine : {false, true}) {
    Problem p = usual();
    p.options.iterations = 3;
    p.options.ridge = 0.005;
    p.options.refine = refine;
    EXPECT_EQ(choose_on(p, Outputs{}).path, Path::hopper);
    EXPECT_EQ(choose_on(p, usual_gradients()).path, Path::hopper);
  }
}

TEST(Choice, AConstantRidgeIsHoppersUnlessItIsSmallOrADiagonalOrTakesManyIterations) {
  Problem p = usual();
  p.options.ridge_mode = RidgeMode::constant;
  p.options.ridge = 0.25;
  EXPECT_EQ(choose_on(p, Outputs{}).path, Path::hopper);
  EXPECT_EQ(choose_on(p, usual_gradients()).path, Path::hopper);
  const double diagonal[128] = {};
  const std::vector<std::function<void(Problem&)>> changes = {
      [&](Problem& of) { of.options.ridge_diagonal = diagonal; },
      [](Problem& of) { of.options.ridge = 0.019; },
      [](Problem& of) { of.options.iterations = 31; },
  };
  for (const auto& change : changes) {
    Problem other = p;
    change(other);
    EXPECT_EQ(choose_on(other, Outputs{}).path, Path::plain);
    EXPECT_TRUE(std::string(choose_on(other, Outputs{}).why).starts_with("the Hopper kernels "));
  }
}

TEST(Choice, WideHeadsAreHoppersBothWays) {
  Problem p = usual();
  p.key_dim = p.value_dim = 256;
  EXPECT_EQ(choose_on(p, Outputs{}).path, Path::hopper);
  EXPECT_EQ(choose_on(p, usual_gradients()).path, Path::hopper);
  EXPECT_FALSE(hopper::keeps_tiles(p));  // either backward pass follows
  const std::vector<std::function<void(Problem&)>> changes = {
      [](Problem& of) { of.key_dim = 257; },
      [](Problem& of) { of.options.part = Part::solve; },
      [](Problem& of) { of.options.ridge_mode = RidgeMode::constant; },
  };
  for (const auto& change : changes) {
    Problem other = p;
    change(other);
    EXPECT_EQ(choose_on(other, Outputs{}).path, Path::plain);
    EXPECT_EQ(choose_on(other, usual_gradients()).path, Path::plain);
  }
}

TEST(Choice, WideHeadsBackwardComeInMultiplesOfFourChannels) {
  Problem p = usual();
  p.key_dim = 200;
  p.value_dim = 136;
  EXPECT_EQ(choose_on(p, usual_gradients()).path, Path::hopper);
  p.value_dim = 300;  // two blocks of 256
  EXPECT_EQ(choose_on(p, usual_gradients()).path, Path::hopper);
  p.key_dim = 202;
  EXPECT_EQ(choose_on(p, Outputs{}).path, Path::hopper);
  EXPECT_EQ(choose_on(p, usual_gradients()).path, Path::plain);
  EXPECT_TRUE(std::string(choose_on(p, usual_gradients()).why).starts_with("the Hopper kernels' backward pass "));
}

TEST(Choice, TheKeysPartIsHoppersWithTheAdaptiveRidge) {
  Problem p = usual();
  p.options.part = Part::solve;
  p.key_dim = 32;
  p.value_dim = 1;  // means nothing
  EXPECT_EQ(choose_on(p, Outputs{}).path, Path::hopper);
  EXPECT_EQ(choose_on(p, usual_gradients()).path, Path::hopper);
  EXPECT_FALSE(hopper::keeps_tiles(p));
  p.options.ridge_mode = RidgeMode::constant;
  p.options.ridge = 0.25;
  EXPECT_EQ(choose_on(p, Outputs{}).path, Path::plain);
  EXPECT_EQ(choose_on(p, usual_gradients()).path, Path::plain);
}

TEST(Choice, AReportAndFloat64OutputsAreThePlainPaths) {
  double norm = 0;
  EXPECT_EQ(choose_on(usual(), Outputs{.report = {.norm = &norm}}).path, Path::plain);
  EXPECT_EQ(choose_on(usual(), Outputs{.report = {.certainty = &norm}}).path, Path::hopper);
  Outputs wide;
  wide.o.dtype = DType::float64;
  EXPECT_EQ(choose_on(usual(), wide).path, Path::plain);
}

TEST(Choice, ABackwardPassMayBeAnotherPathsThanItsForwardPass) {
  Problem odd = usual();
  odd.value_dim = 130;
  EXPECT_EQ(choose_on(odd, Outputs{}).path, Path::hopper);
  EXPECT_EQ(choose_on(odd, usual_gradients()).path, Path::plain);
  Problem wide = usual();
  wide.value_dim = 256;  // block after block of 128
  EXPECT_EQ(choose_on(wide, usual_gradients()).path, Path::hopper);
  Gradients other = usual_gradients();
  other.d_o.dtype = DType::float32;
  EXPECT_EQ(choose_on(usual(), other).path, Path::plain);
  other = usual_gradients();
  other.d_k.dtype = DType::float64;
  EXPECT_EQ(choose_on(usual(), other).path, Path::plain);
}

TEST(Choice, TheCardAndTheEnvironmentDecideFirst) {
  EXPECT_EQ(choose_on(usual(), Outputs{}, {.capability = 0, .hopper_built = true}).path, Path::none);
  EXPECT_EQ(choose_on(usual(), Outputs{}, {.capability = 75, .hopper_built = true}).path, Path::none);
  for (const int other : {80, 86, 89, 100, 103, 120, 121}) {
    const Choice choice = choose_on(usual(), Outputs{}, {.capability = other, .hopper_built = true});
    EXPECT_EQ(choice.path, Path::plain) << other;
    EXPECT_STREQ(choice.why, "they need a card of compute capability 9.0") << other;
  }
  EXPECT_EQ(choose_on(usual(), Outputs{}, {.capability = 90, .hopper_built = false}).path, Path::plain);
  EXPECT_EQ(choose_on(usual(), Outputs{}, kHopperCard, Asked::plain).path, Path::plain);
  EXPECT_EQ(choose_on(usual(), Outputs{}, kHopperCard, Asked::hopper).path, Path::hopper);
  EXPECT_THROW(choose_on(usual(), Outputs{}, {.capability = 80, .hopper_built = true}, Asked::hopper),
               std::invalid_argument);
}

TEST(Choice, GkaGpuTakesTwoNames) {
  EXPECT_EQ(parse_asked(nullptr), Asked::nothing);
  EXPECT_EQ(parse_asked(""), Asked::nothing);
  EXPECT_EQ(parse_asked("plain"), Asked::plain);
  EXPECT_EQ(parse_asked("hopper"), Asked::hopper);
  EXPECT_THROW(parse_asked("abacus"), std::invalid_argument);
}

TEST(Choice, AKernelOnTrialRunsOnlyWhereItIsNamed) {
  EXPECT_FALSE(names_trial("", Trial::crowd_step));
  EXPECT_TRUE(names_trial("all", Trial::crowd_step));
  for (const auto& [name, trial] : kTrials) {
    for (const auto& [other, entry] : kTrials) EXPECT_EQ(names_trial(name, entry), entry == trial) << other;
  }
  EXPECT_THROW(names_trial("crowd_step,nonsense", Trial::crowd_step), std::invalid_argument);
}

}  // namespace
}  // namespace gka::kernels::cuda
