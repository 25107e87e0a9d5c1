// The one-token step at the sizes that have kernels of their own.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/backends.h"

namespace gka::kernels::test {
namespace {

struct StepCase {
  CaseSpec spec;
  std::vector<std::int64_t> slots{};       // if any: a pool of eight
  std::vector<std::int32_t> iterations{};  // if any: per sequence
};

CaseSpec spec_of(DType dtype, std::int64_t key_dim, std::int64_t value_dim, std::uint64_t seed) {
  CaseSpec spec{.dtype = dtype,
                .batch = 2,
                .tokens = 1,
                .heads = 2,
                .key_dim = key_dim,
                .value_dim = value_dim,
                .h0 = true,
                .u0 = true,
                .full_rank_h0 = true,
                .seed = seed};
  spec.float32_gates = dtype != DType::float32;
  return spec;
}

std::vector<StepCase> step_cases() {
  std::vector<StepCase> cases;
  for (const DType dtype : {DType::bfloat16, DType::float32, DType::float16}) {
    cases.push_back({.spec = spec_of(dtype, 128, 128, 1)});
  }
  cases.push_back({.spec = spec_of(DType::float32, 64, 64, 2), .slots = {5, 2}, .iterations = {7, 70}});
  cases.push_back({.spec = spec_of(DType::bfloat16, 64, 128, 3), .slots = {7, 0}});
  cases.push_back({.spec = spec_of(DType::bfloat16, 128, 64, 4), .iterations = {0, 33}});
  StepCase plain{.spec = spec_of(DType::float32, 128, 128, 5)};
  plain.spec.log_decay = plain.spec.beta = plain.spec.alpha = false;
  plain.spec.layout = Layout::padded;
  cases.push_back(plain);
  StepCase forgets{.spec = spec_of(DType::float32, 64, 64, 6)};
  forgets.spec.forget = 0.5;
  forgets.spec.skip = 0.5;
  forgets.spec.options = {.scale = 0.3, .ridge = 0.1, .decay_keys = false};
  cases.push_back(forgets);
  return cases;
}

struct Stepped {
  Array o, h, u, certainty;
  std::vector<NamedArray> named() const { return {{"o", &o}, {"h", &h}, {"u", &u}, {"certainty", &certainty}}; }
};

void clear(Stepped& stepped) {
  for (Array* state : {&stepped.h, &stepped.u})
    std::memset(state->data(), 0, static_cast<std::size_t>(state->size()) * 4);
}

/// The token of a case as a step; `change` may do something to the state before.
template <typename Run, typename Change>
Stepped run_step(const StepCase& c, const Case& inputs, Run&& run, Change&& change) {
  const std::int64_t pool = c.slots.empty() ? c.spec.batch : 8;
  Stepped result{.o = inputs.outputs().o,
                 .h = Array(DType::float32, {pool, c.spec.heads, c.spec.key_dim, c.spec.key_dim}),
                 .u = Array(DType::float32, {pool, c.spec.heads, c.spec.key_dim, c.spec.value_dim}),
                 .certainty = Array(DType::float64, {c.spec.batch, 1, c.spec.heads, 1})};
  clear(result);
  for (std::int64_t b = 0; b < c.spec.batch; ++b) {
    const std::int64_t slot = c.slots.empty() ? b : c.slots[static_cast<std::size_t>(b)];
    copy_slice(inputs.h0, 0, b, 1, result.h, slot);
    copy_slice(inputs.u0, 0, b, 1, result.u, slot);
  }
  change(result);
  Step step = step_at(inputs.problem(), 0, result.o.view(), result.h.data(), result.u.data());
  if (!c.slots.empty()) step.state_indices = c.slots.data();
  if (!c.iterations.empty()) step.iterations = c.iterations.data();
  step.certainty = static_cast<double*>(result.certainty.data());
  run(step);
  return result;
}

void with_threads(const Step& step) { ASSERT_TRUE(CudaWithThreads::step(step)); }

class Steps : public OnEveryBackend {};

constexpr Backend kWithThreads = {.name = "cuda_with_threads",
                                  .forward = nullptr,
                                  .backward = nullptr,
                                  .step = with_threads,
                                  .short_conv = nullptr,
                                  .short_conv_backward = nullptr,
                                  .short_conv_step = nullptr,
                                  .gated_rms_norm = nullptr,
                                  .gated_rms_norm_backward = nullptr};

TEST_P(Steps, MatchTheReferenceAtTheSizesOfDecoding) {
  for (const StepCase& c : step_cases()) {
    const Case inputs(c.spec);
    const auto nothing = [](Stepped&) {};
    const Stepped want = run_step(c, inputs, reference::step, nothing);
    const Stepped got = run_step(c, inputs, GetParam().step, nothing);
    const double rounding = c.spec.dtype == DType::float32 ? 2e-5 : c.spec.dtype == DType::float16 ? 5e-4 : 2e-3;
    expect_close(got.o, want.o, rounding, "o of " + inputs.describe());
    expect_close(got.h, want.h, 1e-6, "h of " + inputs.describe());
    expect_close(got.u, want.u, 1e-6, "u of " + inputs.describe());
    expect_close(got.certainty, want.certainty, 2e-5, "certainty of " + inputs.describe());
  }
}

/// A solve does not see scale, whether or not squares of float32 do.
TEST_P(Steps, AnswerFromFadedAndFromEnormousMemories) {
  const StepCase c{.spec = spec_of(DType::float32, 128, 128, 8)};
  Case inputs(c.spec);
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t head = 0; head < 2; ++head) inputs.beta.set(b, 0, head, 0, 0);
  }
  for (const float scale : {1e-25f, 1e20f}) {
    const auto fade = [&](Stepped& s) {
      for (Array* state : {&s.h, &s.u}) {
        auto* numbers = static_cast<float*>(state->data());
        for (std::int64_t i = 0; i < state->size(); ++i) numbers[i] *= scale;
      }
    };
    expect_close(run_step(c, inputs, GetParam().step, fade).o, run_step(c, inputs, reference::step, fade).o, 5e-5, "o");
  }
}

TEST_P(Steps, AnEmptyMemoryAnswersFromTheTokenAloneAndANaNStaysInItsHead) {
  const StepCase c{.spec = spec_of(DType::float32, 64, 128, 9)};
  const Case inputs(c.spec);
  const auto spoil = [](Stepped& s) { s.h.set(0, 1, 3, 4, std::numeric_limits<double>::quiet_NaN()); };
  expect_close(run_step(c, inputs, GetParam().step, clear).o, run_step(c, inputs, reference::step, clear).o, 2e-4, "o");
  const Stepped clean = run_step(c, inputs, GetParam().step, [](Stepped&) {});
  const Stepped spoilt = run_step(c, inputs, GetParam().step, spoil);
  for (std::int64_t j = 0; j < 128; ++j) {
    EXPECT_TRUE(std::isnan(spoilt.o.at(0, 0, 1, j)));
    EXPECT_EQ(spoilt.o.at(0, 0, 0, j), clean.o.at(0, 0, 0, j));
    EXPECT_EQ(spoilt.o.at(1, 0, 1, j), clean.o.at(1, 0, 1, j));
  }
}

INSTANTIATE_TEST_SUITE_P(, Steps, fast_backends_without_tensor_cores(), backend_name);
INSTANTIATE_TEST_SUITE_P(Registers, Steps, testing::Values(kWithThreads), backend_name);

}  // namespace
}  // namespace gka::kernels::test
