// All passes of the Hopper kernels on the host, forward and backward, thread by thread, against the reference in
// float64: o within 5e-3, gradients within 1e-2, in the norm over all tokens.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cpu_support.h"
#include "kernels/cuda_support.h"
#include "kernels/expect.h"

namespace gka::kernels::test {
namespace {

/// What the Hopper kernels report is the certainty alone.
Outputs outputs_of(const OwnedOutputs& room) {
  Outputs out = room.pointers();
  out.report = {.certainty = out.report.certainty};
  return out;
}

void expect_o_and_states(const OwnedOutputs& got, const OwnedOutputs& want, const std::string& what) {
  EXPECT_LE(relative_error(got.o, want.o), 5e-3) << "o of " << what;
  for (const auto& [name, state, of] : {std::tuple{"h", &got.h, &want.h}, std::tuple{"u", &got.u, &want.u}}) {
    if (!*state) continue;
    EXPECT_LE(relative_error(*state, *of), 1e-5) << name << " of " << what;
  }
  EXPECT_TRUE(got.o.gaps_intact()) << what;
}
void expect_outputs(const OwnedOutputs& got, const OwnedOutputs& want, const std::string& what) {
  expect_o_and_states(got, want, what);
  EXPECT_LE(relative_error(got.certainty, want.certainty), 5e-3) << "certainty of " << what;
}

CaseSpec spec_with(std::int64_t dim, void (*change)(CaseSpec&)) {
  CaseSpec spec{.dtype = DType::bfloat16, .batch = 1, .tokens = 150, .heads = 1, .key_dim = dim, .value_dim = dim};
  spec.h0 = spec.u0 = spec.d_h = spec.d_u = spec.float32_gates = true;
  change(spec);
  return spec;
}

/// With room of this type for o and gradients.
void expect_close_to_reference(const CaseSpec& spec, DType results) {
  const Case c(spec);
  const OwnedOutputs want = c.outputs(DType::float64), got = c.outputs(results);
  reference::forward(c.problem(), want.pointers());
  const Outputs out = outputs_of(got);
  HopperOnHost::forward(c.problem(), out);
  expect_outputs(got, want, c.describe());
  const OwnedGradients gradients = c.gradients(DType::float64);
  const OwnedGradients found = results == spec.dtype ? c.gradients() : c.gradients(results);
  reference::backward(c.problem(), gradients.pointers());
  HopperOnHost::backward(c.problem(), out.saved, found.pointers());
  expect_close(found, gradients, 1e-2, c.describe());
}
void expect_close_to_reference(void (*change)(CaseSpec&)) {
  expect_close_to_reference(spec_with(64, change), DType::float32);
}
/// Heads of 32 channels without padding, as torch asks for them: o and gradients of the inputs' type.
void expect_narrow_close_to_reference(void (*change)(CaseSpec&)) {
  const CaseSpec spec = spec_with(32, change);
  expect_close_to_reference(spec, spec.dtype);
}

class HopperSizes : public testing::TestWithParam<bool> {
 protected:
  static void expect_matches(void (*change)(CaseSpec&)) {
    if (GetParam()) return expect_narrow_close_to_reference(change);
    expect_close_to_reference(change);
  }
};
INSTANTIATE_TEST_SUITE_P(Hopper, HopperSizes, testing::Bool(),
                         [](const auto& narrow) { return narrow.param ? "Narrow" : "Of64"; });

TEST_P(HopperSizes, MatchTheReferenceWithStatesAtBothEnds) {
  expect_matches([](CaseSpec& s) { s.heads = 2; });
}
TEST(HopperKernels, MatchTheReferenceAtTheLargeSize) {
  expect_close_to_reference([](CaseSpec& s) { s.key_dim = s.value_dim = 128; });
}
TEST_P(HopperSizes, MatchTheReferenceAtTheStartOfASequence) {
  expect_matches([](CaseSpec& s) { s.h0 = s.u0 = false; });
}
TEST_P(HopperSizes, MatchTheReferenceWhereKeysShareADirection) {
  expect_matches([](CaseSpec& s) {
    s.keys = Keys::shared;
    s.weakest_decay = s.strongest_decay = 0.01;
  });
}
TEST_P(HopperSizes, LoseNothingToStrongDecay) {
  expect_matches([](CaseSpec& s) {
    s.keys = Keys::silu;
    s.weakest_decay = 0.5;
    s.strongest_decay = 1.5;
  });
}
TEST_P(HopperSizes, TakeFewIterationsAndASmallRidge) {
  expect_matches([](CaseSpec& s) {
    s.options.iterations = 7;
    s.options.ridge = 0.01;
  });
}
TEST_P(HopperSizes, TakePlainStepsWhereRefiningIsOff) {
  expect_matches([](CaseSpec& s) {
    s.full_rank_h0 = true;
    s.weakest_decay = s.strongest_decay = 0.003;
    s.options.refine = false;
  });
}
TEST(HopperKernels, ForgetAndSkipExactly) {
  expect_close_to_reference([](CaseSpec& s) {
    s.layout = Layout::padded;
    s.asymmetric_h0 = true;
    s.forget = 0.05;
    s.skip = 0.1;
    s.key_dim = 32;
    s.value_dim = 52;
  });
}
TEST(HopperKernels, MatchTheReferenceOnPackedFloat16) {
  expect_close_to_reference([](CaseSpec& s) {
    s.dtype = DType::float16;
    s.lengths = {70, 0, 128, 1, 200};
    s.key_dim = s.value_dim = 32;
  });
}
TEST_P(HopperSizes, TakeACallWithoutGates) {
  expect_matches([](CaseSpec& s) {
    s.batch = 2;
    s.log_decay = s.beta = s.alpha = false;
    s.tokens = 100;
    s.options.scale = 0.3;
    s.options.ridge_gradient = false;
  });
}

void expect_constant_ridge(double ridge, void (*change)(CaseSpec&)) {
  static double of_all = 0;
  static void (*other)(CaseSpec&) = nullptr;
  of_all = ridge, other = change;
  expect_close_to_reference([](CaseSpec& s) {
    s.options.ridge_mode = RidgeMode::constant;
    s.options.ridge = of_all;
    other(s);
  });
}

TEST(HopperKernels, TakeAConstantRidge) {
  expect_constant_ridge(0.25, [](CaseSpec& s) { s.heads = 2; });
}
TEST(HopperKernels, TakeAConstantRidgeAtTheLargeSize) {
  expect_constant_ridge(0.25, [](CaseSpec& s) {
    s.keys = Keys::silu;
    s.key_dim = s.value_dim = 128;
  });
}
TEST(HopperKernels, TakeAConstantRidgeAtTheStartOfASequence) {
  for (const double ridge : {0.1, 3.0}) {
    expect_constant_ridge(ridge, [](CaseSpec& s) { s.h0 = s.u0 = false; });
  }
}
TEST(HopperKernels, TakeAConstantRidgeUnderStrongDecay) {
  for (const double ridge : {0.02, 0.25}) {
    expect_constant_ridge(ridge, [](CaseSpec& s) {
      s.keys = Keys::silu;
      s.weakest_decay = 0.5;
      s.strongest_decay = 1.5;
    });
  }
}
TEST(HopperKernels, TakeAConstantRidgeThatIsNothingBesideH) {
  // 300 keys that share a direction and do not fade: λ/‖H‖_F falls far below what float16 does by itself.
  expect_constant_ridge(0.02, [](CaseSpec& s) {
    s.keys = Keys::shared;
    s.log_decay = s.h0 = s.u0 = false;
    s.tokens = 300;
  });
}
TEST(HopperKernels, TakeAConstantRidgeWithFewIterations) {
  expect_constant_ridge(0.05, [](CaseSpec& s) {
    s.keys = Keys::shared;
    s.options.iterations = 7;
  });
}
TEST(HopperKernels, TakeAConstantRidgeOnPackedFloat16) {
  expect_constant_ridge(0.1, [](CaseSpec& s) {
    s.dtype = DType::float16;
    s.lengths = {70, 0, 128, 1, 90};
    s.forget = 0.05;
    s.skip = 0.1;
    s.key_dim = 32;
    s.value_dim = 52;
  });
}
TEST(HopperKernels, WithAConstantRidgeWhatWasForgottenLeavesTheQueryOverIt) {
  // Nothing is written at all: x = q/λ, and with U = 0 nothing is read; x itself is what Saved has.
  CaseSpec spec{.dtype = DType::bfloat16, .tokens = 70, .heads = 1, .key_dim = 32, .value_dim = 32};
  spec.skip = 1;
  spec.options = {.ridge = 0.5, .ridge_mode = RidgeMode::constant};
  const Case c(spec);
  const OwnedOutputs got = c.outputs(DType::float32);
  const Outputs out = outputs_of(got);
  HopperOnHost::forward(c.problem(), out);
  for (std::int64_t t = 0; t < 70; ++t) {
    for (std::int64_t e = 0; e < 32; ++e) {
      ASSERT_EQ(got.o.at(0, t, 0, e), 0);
      // x over σ, which is 1/λ.
      ASSERT_NEAR(static_cast<const float*>(out.saved.x)[t * 32 + e], c.q.at(0, t, 0, e), 1e-3);
    }
    ASSERT_NEAR(got.certainty.at(0, t, 0, 0), 0, 1e-3);
  }
}

TEST(HopperKernels, TakeTheKeysPartAlone) {
  expect_close_to_reference([](CaseSpec& s) {
    s.options.part = Part::solve;
    s.heads = 2;
    s.key_dim = 32;
    s.value_dim = 1;  // means nothing
  });
}
TEST(HopperKernels, TakeTheKeysPartAtFullSize) {
  expect_close_to_reference([](CaseSpec& s) {
    s.options.part = Part::solve;
    s.options.scale = 3;  // means nothing
    s.keys = Keys::silu;
    s.h0 = false;
  });
  expect_close_to_reference([](CaseSpec& s) {
    s.options.part = Part::solve;
    s.key_dim = 128;
  });
}
TEST(HopperKernels, TakeTheKeysPartUnderStrongDecay) {
  expect_close_to_reference([](CaseSpec& s) {
    s.options.part = Part::solve;
    s.keys = Keys::silu;
    s.weakest_decay = 0.5;
    s.strongest_decay = 1.5;
  });
}
TEST(HopperKernels, TakeTheKeysPartOfPackedFloat16) {
  expect_close_to_reference([](CaseSpec& s) {
    s.options.part = Part::solve;
    s.dtype = DType::float16;
    s.lengths = {70, 0, 128, 1, 90};
    s.forget = 0.05;
    s.skip = 0.1;
    s.key_dim = 32;
  });
}

/// A block of several tasks reuses its tiles: with one head of twelve chunks each of three blocks has four.
TEST(HopperKernels, CarryStatesAlongManyChunks) {
  for (const Part part : {Part::both, Part::solve}) {
    CaseSpec spec{.dtype = DType::bfloat16, .tokens = 12 * 64, .heads = 1, .key_dim = 32, .value_dim = 96};
    spec.weakest_decay = spec.strongest_decay = 0.002;
    spec.options.part = part;
    const Case c(spec);
    const OwnedOutputs want = c.outputs(DType::float64), got = c.outputs(DType::float32);
    reference::forward(c.problem(), want.pointers());
    HopperOnHost::forward(c.problem(), outputs_of(got));
    expect_outputs(got, want, c.describe());
  }
}

/// o of tokens that two decays of 0 part from a NaN in one of these is what it is without it.
void expect_nan_stays(std::int64_t dim, const std::vector<Array Case::*>& inputs) {
  constexpr std::int64_t kBegin = 50, kPoison = 60, kEnd = 100;
  const auto fenced = [dim] {
    Case c({.dtype = DType::bfloat16, .tokens = 130, .heads = 1, .key_dim = dim, .value_dim = dim});
    for (const std::int64_t t : {kBegin, kEnd}) c.log_decay.set(0, t, 0, 0, -std::numeric_limits<double>::infinity());
    return c;
  };
  const auto run = [](const Case& c) {
    OwnedOutputs got = c.outputs(DType::float32);
    HopperOnHost::forward(c.problem(), outputs_of(got));
    return got;
  };
  const Case clean = fenced();
  const OwnedOutputs want = run(clean);
  for (const auto input : inputs) {
    Case poisoned = fenced();
    (poisoned.*input).set(0, kPoison, 0, 0, std::numeric_limits<double>::quiet_NaN());
    const OwnedOutputs got = run(poisoned);
    bool seen = false;
    for (std::int64_t t = 0; t < 130; ++t) {
      for (std::int64_t e = 0; e < dim; ++e) {
        const double x = got.o.at(0, t, 0, e);
        if (t < kPoison || t >= kEnd) {
          ASSERT_EQ(x, want.o.at(0, t, 0, e)) << "token " << t;
        } else {
          seen |= std::isnan(x);
        }
      }
    }
    EXPECT_TRUE(seen);
  }
}
const std::vector<Array Case::*> kPoisoned = {&Case::q, &Case::k, &Case::v, &Case::beta, &Case::log_decay};
TEST(HopperKernels, ANaNStaysBetweenTwoDecaysOfZero) { expect_nan_stays(32, kPoisoned); }

// ---- Increments, on trial -------------------------------------------------------------------------------------------

std::vector<double> o_of(const CaseSpec& spec) {
  const Case c(spec);
  const OwnedOutputs got = c.outputs();
  HopperOnHost::forward(c.problem(), outputs_of(got));
  return got.o.values();
}
/// Within the bounds of all, with other bits than without the trial; o, where all steps are taken, within `o_error`.
void expect_increments_close_to_reference(const CaseSpec& spec, double o_error = 5e-3) {
  const std::vector<double> usual = o_of(spec);
  const Forced trial("GKA_TRIAL", "increments");
  EXPECT_NE(o_of(spec), usual);
  const DType results = spec.key_dim == 32 ? spec.dtype : DType::float32;
  expect_close_to_reference(spec, results);
  const Case c(spec);
  const OwnedOutputs want = c.outputs(DType::float64), got = c.outputs(DType::float32);
  reference::forward(c.problem(), want.pointers());
  HopperOnHost::forward(c.problem(), outputs_of(got));
  EXPECT_LE(relative_error(got.o, want.o), o_error) << c.describe();
}

TEST(Increments, LoseNothingToStrongDecay) {
  for (const std::int64_t dim : {32, 64, 128}) {
    expect_increments_close_to_reference(spec_with(dim, [](CaseSpec& s) {
      s.keys = Keys::silu;
      s.weakest_decay = 0.5;
      s.strongest_decay = 1.5;
    }));
  }
}
TEST(Increments, MatchTheReferenceWhereKeysShareADirection) {
  expect_increments_close_to_reference(spec_with(64, [](CaseSpec& s) {
    s.keys = Keys::shared;
    s.weakest_decay = s.strongest_decay = 0.01;
  }));
}
TEST(Increments, MatchTheReferenceAtTheStartOfASequence) {
  expect_increments_close_to_reference(spec_with(64, [](CaseSpec& s) { s.h0 = s.u0 = false; }));
}
TEST(Increments, AreNotRoundedWhereAllStepsAreTaken) {
  // All steps, and z in two parts, as the chunks are those that would be refined.
  expect_increments_close_to_reference(spec_with(64,
                                                 [](CaseSpec& s) {
                                                   s.options.iterations = 12;
                                                   s.weakest_decay = 0.1;
                                                   s.strongest_decay = 6;
                                                 }),
                                       1e-3);
  expect_increments_close_to_reference(spec_with(64,
                                                 [](CaseSpec& s) {
                                                   s.options.iterations = 7;
                                                   s.options.ridge = 0.01;
                                                 }),
                                       1e-3);
  // z in one part.
  expect_increments_close_to_reference(spec_with(64,
                                                 [](CaseSpec& s) {
                                                   s.options.refine = false;
                                                   s.weakest_decay = 0.1;
                                                   s.strongest_decay = 6;
                                                 }),
                                       2e-3);
}
TEST(Increments, ForgetAndSkipExactlyOnPackedFloat16) {
  expect_increments_close_to_reference(spec_with(64, [](CaseSpec& s) {
    s.dtype = DType::float16;
    s.lengths = {70, 0, 128, 1, 90};
    s.forget = 0.05;
    s.skip = 0.1;
    s.key_dim = 52;
    s.value_dim = 32;
  }));
}
TEST(Increments, TakeAConstantRidge) {
  for (const double ridge : {0.02, 0.25}) {
    CaseSpec spec = spec_with(64, [](CaseSpec& s) { s.keys = Keys::silu; });
    spec.options.ridge_mode = RidgeMode::constant;
    spec.options.ridge = ridge;
    expect_increments_close_to_reference(spec);
  }
}
TEST(Increments, MatchTheReferenceInTheKeysPartAlone) {
  expect_increments_close_to_reference(spec_with(64, [](CaseSpec& s) {
    s.options.part = Part::solve;
    s.h0 = false;
  }));
}
TEST(Increments, ANaNStaysBetweenTwoDecaysOfZero) {
  const Forced trial("GKA_TRIAL", "increments");
  expect_nan_stays(32, {&Case::q, &Case::k});
}

// ---- Heads of 32 channels without padding ---------------------------------------------------------------------------

TEST(NarrowHeads, ForgetAndSkipExactly) {
  expect_narrow_close_to_reference([](CaseSpec& s) {
    s.asymmetric_h0 = true;
    s.forget = 0.05;
    s.skip = 0.1;
    s.layout = Layout::heads_first;
    s.heads = 2;
  });
}
TEST(NarrowHeads, MatchTheReferenceOnPackedFloat16) {
  expect_narrow_close_to_reference([](CaseSpec& s) {
    s.dtype = DType::float16;
    s.lengths = {70, 0, 128, 1, 200};
  });
}
TEST(NarrowHeads, OfFewerChannelsThatDoNotLieAlignedArePaddedBackwardAlone) {
  expect_narrow_close_to_reference([](CaseSpec& s) {
    s.layout = Layout::padded;
    s.key_dim = 20;
    s.value_dim = 12;
  });
}
TEST(NarrowHeads, ReadWhatHeadsShare) {
  const Case c(spec_with(32, [](CaseSpec& s) {
    s.heads = 4;
    s.key_group = 2;
    s.value_group = 4;
  }));
  const OwnedOutputs want = c.outputs(DType::float64), got = c.outputs();
  reference::forward(c.problem(), want.pointers());
  HopperOnHost::forward(c.problem(), outputs_of(got));
  expect_outputs(got, want, c.describe());
}
/// A block of several tasks reuses its tiles.
TEST(NarrowHeads, CarryStatesAlongManyChunks) {
  expect_narrow_close_to_reference([](CaseSpec& s) {
    s.tokens = 12 * 64;
    s.weakest_decay = s.strongest_decay = 0.002;
  });
}
TEST(NarrowHeads, ANaNStaysBetweenTwoDecaysOfZero) { expect_nan_stays(32, kPoisoned); }

TEST(NarrowHeads, ANaNReachesNoGradientBeyondTwoDecaysOfZero) {
  constexpr std::int64_t kBegin = 50, kPoison = 60, kEnd = 100;
  const auto fenced = [] {
    Case c(spec_with(32, [](CaseSpec&) {}));
    for (const std::int64_t t : {kBegin, kEnd}) c.log_decay.set(0, t, 0, 0, -std::numeric_limits<double>::infinity());
    return c;
  };
  const auto run = [](const Case& c) {
    const OwnedOutputs kept = c.outputs();
    const Outputs out = outputs_of(kept);
    HopperOnHost::forward(c.problem(), out);
    OwnedGradients got = c.gradients();
    HopperOnHost::backward(c.problem(), out.saved, got.pointers());
    return got;
  };
  const OwnedGradients want = run(fenced());
  for (const auto input : Case::kByToken) {
    Case poisoned = fenced();
    (poisoned.*input).set(0, kPoison, 0, 0, std::numeric_limits<double>::quiet_NaN());
    const OwnedGradients got = run(poisoned);
    bool seen = false;
    for (std::size_t i = 0; i < got.named().size(); ++i) {
      const auto [name, array] = got.named()[i];
      const Array& clean = *want.named()[i].array;
      const bool tokens = clean.shape()[1] == poisoned.problem().tokens;
      for (std::int64_t t = 0; t < clean.shape()[1]; ++t) {
        for (std::int64_t e = 0; e < clean.shape()[2] * clean.shape()[3]; ++e) {
          const double x = array->at(0, t, e / clean.shape()[3], e % clean.shape()[3]);
          if (tokens && t >= kBegin && t < kEnd) {
            seen |= std::isnan(x);
          } else {
            ASSERT_EQ(x, clean.at(0, t, e / clean.shape()[3], e % clean.shape()[3])) << name << " of " << t;
          }
        }
      }
    }
    EXPECT_TRUE(seen);
  }
}

/// Channels of a head that is padded to 64, and as much to do.
constexpr std::int64_t kJustTooWide = 36;

TEST(NarrowHeads, NeedLessScratchThanPaddedOnes) {
  const auto scratch_of = [](std::int64_t channels) {
    const Case c(spec_with(channels, [](CaseSpec&) {}));
    const OwnedOutputs kept = c.outputs();
    const Outputs out = outputs_of(kept);
    const std::size_t forward = HopperOnHost::forward(c.problem(), out);
    const OwnedGradients got = c.gradients();
    return std::pair(static_cast<double>(forward),
                     static_cast<double>(HopperOnHost::backward(c.problem(), out.saved, got.pointers())));
  };
  const auto narrow = scratch_of(32), padded = scratch_of(kJustTooWide);
  EXPECT_LT(narrow.first, 0.7 * padded.first);
  EXPECT_LT(narrow.second, 0.7 * padded.second);
}

TEST(NarrowHeads, EitherBackwardPassFollowsEitherForwardPass) {
  // Narrow, padded because gradients do not lie aligned, and of the plain path: what is saved is the same.
  for (const Layout layout : {Layout::contiguous, Layout::padded}) {
    CaseSpec spec = spec_with(32, [](CaseSpec&) {});
    spec.layout = layout;
    const Case c(spec);
    const OwnedGradients want = c.gradients(DType::float64);
    reference::backward(c.problem(), want.pointers());
    for (const bool plain_first : {false, true}) {
      const OwnedOutputs kept = c.outputs();
      const Outputs out = outputs_of(kept);
      plain_first ? CudaOnHost::forward(c.problem(), out) : void(HopperOnHost::forward(c.problem(), out));
      const OwnedGradients hopper = c.gradients(), plain = c.gradients();
      HopperOnHost::backward(c.problem(), out.saved, hopper.pointers());
      expect_close(hopper, want, 1e-2, c.describe());
      CudaOnHost::backward(c.problem(), out.saved, plain.pointers());
      expect_close(plain, want, 1e-2, c.describe());
    }
  }
}

// ---- Heads of more than 128 key channels ---------------------------------------------------------------------------

/// Whose gradients are compared beside the outputs.
enum class After { nothing, own, own_and_plain };

/// Few keys make a certainty of 256 channels small, and it is a difference of numbers of order 1: it is compared as it
/// is.
void expect_wide_close_to_reference(void (*change)(CaseSpec&), After after = After::nothing) {
  const Case c(spec_with(256, change));
  const OwnedOutputs want = c.outputs(DType::float64), got = c.outputs();
  reference::forward(c.problem(), want.pointers());
  const Outputs out = outputs_of(got);
  HopperOnHost::forward(c.problem(), out);
  expect_o_and_states(got, want, c.describe());
  const std::int64_t heads = c.problem().heads;
  for (std::int64_t i = 0; i < c.problem().tokens * heads; ++i) {
    const double certainty = want.certainty.at(0, i / heads, i % heads, 0);
    ASSERT_NEAR(got.certainty.at(0, i / heads, i % heads, 0), certainty, 5e-3) << c.describe();
  }
  if (after == After::nothing) return;
  const OwnedGradients gradients = c.gradients(DType::float64), found = c.gradients();
  reference::backward(c.problem(), gradients.pointers());
  HopperOnHost::backward(c.problem(), out.saved, found.pointers());
  expect_close(found, gradients, 1e-2, c.describe());
  if (after == After::own) return;
  const OwnedGradients by_plain = c.gradients();
  CudaOnHost::backward(c.problem(), out.saved, by_plain.pointers());
  expect_close(by_plain, gradients, 1e-2, c.describe());
}

TEST(WideHeads, MatchTheReferenceAndLeaveWhatThePlainBackwardPassNeeds) {
  expect_wide_close_to_reference([](CaseSpec&) {}, After::own_and_plain);
}
TEST(WideHeads, MatchTheReferenceAtTheStartOfASequence) {
  expect_wide_close_to_reference([](CaseSpec& s) { s.h0 = s.u0 = false; });
}
TEST(WideHeads, MatchTheReferenceWhereKeysShareADirection) {
  expect_wide_close_to_reference([](CaseSpec& s) {
    s.keys = Keys::shared;
    s.weakest_decay = s.strongest_decay = 0.01;
  });
}
TEST(WideHeads, LoseNothingToStrongDecay) {
  expect_wide_close_to_reference(
      [](CaseSpec& s) {
        s.keys = Keys::silu;
        s.weakest_decay = 0.5;
        s.strongest_decay = 1.5;
      },
      After::own);
}
TEST(WideHeads, TakeFewIterationsAndASmallRidge) {
  expect_wide_close_to_reference([](CaseSpec& s) {
    s.options.iterations = 7;
    s.options.ridge = 0.01;
  });
}
TEST(WideHeads, TakePlainStepsWhereRefiningIsOff) {
  expect_wide_close_to_reference([](CaseSpec& s) {
    s.full_rank_h0 = true;
    s.weakest_decay = s.strongest_decay = 0.003;
    s.options.refine = false;
  });
}
void make_forgetful(CaseSpec& s) {
  s.layout = Layout::padded;
  s.asymmetric_h0 = true;
  s.forget = 0.05;
  s.skip = 0.1;
}
TEST(WideHeads, ForgetAndSkipExactlyWithChannelsMissing) {
  expect_wide_close_to_reference([](CaseSpec& s) {
    make_forgetful(s);
    s.key_dim = 131;
    s.value_dim = 53;
  });
}
TEST(WideHeads, ForgetAndSkipExactlyBackward) {
  expect_wide_close_to_reference(
      [](CaseSpec& s) {
        make_forgetful(s);
        s.tokens = 100;
        s.key_dim = 136;
        s.value_dim = 52;
      },
      After::own);
}
TEST(WideHeads, MatchTheReferenceOnPackedFloat16WithMoreValuesThanKeys) {
  expect_wide_close_to_reference(
      [](CaseSpec& s) {
        s.dtype = DType::float16;
        s.lengths = {70, 0, 128, 1, 40};
        s.key_dim = 200;
        s.value_dim = 232;
      },
      After::own);
}
/// From nothing, with no gradients of states: all that may be missing.
TEST(WideHeads, TakeACallWithoutGatesAndStates) {
  expect_wide_close_to_reference(
      [](CaseSpec& s) {
        s.log_decay = s.beta = s.alpha = s.h0 = s.u0 = s.d_h = s.d_u = false;
        s.tokens = 70;
        s.options.scale = 0.3;
        s.options.ridge_gradient = false;
      },
      After::own);
}
TEST(WideHeads, ReadWhatHeadsShare) {
  expect_wide_close_to_reference([](CaseSpec& s) {
    s.tokens = 70;
    s.heads = s.key_group = s.value_group = 2;
  });
}
/// A block of several tasks reuses its tiles.
TEST(WideHeads, CarryStatesAlongManyChunks) {
  expect_wide_close_to_reference([](CaseSpec& s) {
    s.tokens = 7 * 64;
    s.weakest_decay = s.strongest_decay = 0.002;
  });
}
TEST(WideHeads, ANaNStaysBetweenTwoDecaysOfZero) { expect_nan_stays(256, {&Case::k, &Case::v}); }

}  // namespace
}  // namespace gka::kernels::test
