// Sequences cut, packed, strided and stepped through: the same tokens give the same answers however they are handed in.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "kernels/backends.h"

namespace gka::kernels::test {
namespace {

/// Tokens begin … of row `row` of an array by token, as an array of its own.
Array tokens_of(const Array& array, std::int64_t row, std::int64_t begin, std::int64_t length) {
  if (!array) return {};
  Array own(DType::float64, {1, array.shape()[1], array.shape()[2], array.shape()[3]});
  copy_slice(array, 0, row, 1, own, 0);
  Array result(DType::float64, {1, length, array.shape()[2], array.shape()[3]});
  copy_slice(own, 1, begin, length, result, 0);
  return result;
}

Array state_of(const Array& array, std::int64_t n) {
  if (!array) return {};
  Array result(DType::float64, {1, array.shape()[1], array.shape()[2], array.shape()[3]});
  copy_slice(array, 0, n, 1, result, 0);
  return result;
}

void expect_same_tokens(const Array& part, const Array& whole, std::int64_t row, std::int64_t begin, double tolerance,
                        const std::string& what) {
  ASSERT_EQ(static_cast<bool>(part), static_cast<bool>(whole)) << what;
  if (part) expect_close(part, tokens_of(whole, row, begin, part.shape()[1]), tolerance, what);
}

constexpr std::array kGradientsByToken{&OwnedGradients::d_q,         &OwnedGradients::d_k,    &OwnedGradients::d_v,
                                       &OwnedGradients::d_log_decay, &OwnedGradients::d_beta, &OwnedGradients::d_alpha};

CaseSpec sequence_spec() {
  CaseSpec spec{.tokens = 20, .key_dim = 7, .value_dim = 5, .h0 = true, .u0 = true, .d_h = true, .d_u = true};
  spec.skip = spec.keep = 0.1;
  return spec;
}

class Sequences : public OnEveryBackend {
 protected:
  /// Sequence n of a case, alone.
  void expect_alone(const Case& together, const OwnedOutputs& out, const OwnedGradients& grad, std::int64_t n,
                    std::int64_t row, std::int64_t begin, std::int64_t length) const {
    const Case alone = slice(together, n, 0, length);
    const OwnedOutputs own = forward(alone);
    const OwnedGradients own_grad = backward(alone);
    expect_same_tokens(own.o, out.o, row, begin, 0.0, "o");
    if (out.x) expect_same_tokens(own.x, out.x, row, begin, 0.0, "x");
    expect_close(own.h, state_of(out.h, n), 0.0, "h");
    expect_close(own.u, state_of(out.u, n), 0.0, "u");
    for (const auto member : kGradientsByToken) {
      expect_same_tokens(own_grad.*member, grad.*member, row, begin, 0.0, "a gradient");
    }
    expect_close(own_grad.d_h0, state_of(grad.d_h0, n), 0.0, "d_h0");
    expect_close(own_grad.d_u0, state_of(grad.d_u0, n), 0.0, "d_u0");
  }
};

INSTANTIATE_TEST_SUITE_P(, Sequences, testing::ValuesIn(kBackends), backend_name);

TEST_P(Sequences, OneCallIsTwoCallsJoinedByTheState) {
  for (const Part part : {Part::both, Part::solve, Part::memory}) {
    for (const std::int64_t cut : {0, 1, 13, 20}) {
      CaseSpec spec = suited(sequence_spec());
      spec.options.part = part;
      if (!carries(spec.options)) continue;
      const Case whole(spec);
      Case first = slice(whole, 0, 0, cut);
      Case second = slice(whole, 0, cut, 20 - cut);

      const OwnedOutputs out = forward(whole);
      const OwnedOutputs out_first = forward(first);
      if (second.h0) copy_slice(out_first.h, 0, 0, 1, second.h0, 0);
      if (second.u0) copy_slice(out_first.u, 0, 0, 1, second.u0, 0);
      const OwnedOutputs out_second = forward(second);
      expect_same_tokens(out_first.o, out.o, 0, 0, within(1e-13), "o before the cut");
      expect_same_tokens(out_second.o, out.o, 0, cut, within(1e-13), "o after the cut");
      if (out.h) expect_close(out_second.h, out.h, states_within(1e-13), "h");
      if (out.u) expect_close(out_second.u, out.u, states_within(1e-13), "u");

      const OwnedGradients grad = backward(whole);
      const OwnedGradients grad_second = backward(second);
      if (first.d_h) copy_slice(grad_second.d_h0, 0, 0, 1, first.d_h, 0);
      if (first.d_u) copy_slice(grad_second.d_u0, 0, 0, 1, first.d_u, 0);
      const OwnedGradients grad_first = backward(first);
      for (const auto member : kGradientsByToken) {
        expect_same_tokens(grad_first.*member, grad.*member, 0, 0, gradients_within(1e-12),
                           "a gradient before the cut");
        expect_same_tokens(grad_second.*member, grad.*member, 0, cut, gradients_within(1e-12),
                           "a gradient after the cut");
      }
      if (grad.d_h0) expect_close(grad_first.d_h0, grad.d_h0, gradients_within(1e-12), "d_h0");
      if (grad.d_u0) expect_close(grad_first.d_u0, grad.d_u0, gradients_within(1e-12), "d_u0");
    }
  }
}

TEST_P(Sequences, PackedIsOneByOne) {
  CaseSpec spec = suited(sequence_spec());
  spec.lengths = {3, 0, 9, 1, 0, 7};
  const Case packed(spec);
  const OwnedOutputs out = forward(packed);
  const OwnedGradients grad = backward(packed);
  for (std::size_t n = 0; n < spec.lengths.size(); ++n) {
    const auto index = static_cast<std::int64_t>(n);
    expect_alone(packed, out, grad, index, 0, packed.cu_seqlens[n], spec.lengths[n]);
  }
}

TEST_P(Sequences, ABatchIsOneByOne) {
  CaseSpec spec = suited(sequence_spec());
  spec.batch = 3;
  const Case batch(spec);
  const OwnedOutputs out = forward(batch);
  const OwnedGradients grad = backward(batch);
  for (std::int64_t row = 0; row < 3; ++row) expect_alone(batch, out, grad, row, row, 0, spec.tokens);
}

TEST_P(Sequences, StepsAfterAPrefillAreALongerPrefill) {
  constexpr std::int64_t prefill = 12;
  CaseSpec spec = suited(sequence_spec());
  spec.batch = 2;
  const Case whole(spec);
  const OwnedOutputs want = forward(whole);

  CaseSpec part = spec;
  part.tokens = prefill;
  Case first(part);
  for (const auto member : Case::kByToken) copy_slice(whole.*member, 1, 0, prefill, first.*member, 0);
  for (const auto member : Case::kByState) copy_slice(whole.*member, 0, 0, 2, first.*member, 0);
  const OwnedOutputs state = forward(first);
  const OwnedOutputs stepped = whole.outputs();
  for (std::int64_t t = prefill; t < spec.tokens; ++t) {
    take_step(step_at(whole.problem(), t, stepped.o.view(), state.h.data(), state.u.data()));
  }
  for (std::int64_t row = 0; row < 2; ++row) {
    expect_close(tokens_of(stepped.o, row, prefill, 8), tokens_of(want.o, row, prefill, 8), within(1e-13), "o");
  }
  expect_close(state.h, want.h, states_within(1e-13), "h");
  expect_close(state.u, want.u, states_within(1e-13), "u");
}

TEST_P(Sequences, AStepUsesTheSlotsAndTheIterationsItIsGiven) {
  if (GetParam().tensor_cores) GTEST_SKIP() << "no steps of its own, and 20 iterations at least";
  CaseSpec spec = sequence_spec();
  spec.batch = 2;
  spec.tokens = 1;
  const Case c(spec);
  Array h(DType::float64, {5, spec.heads, spec.key_dim, spec.key_dim});
  Array u(DType::float64, {5, spec.heads, spec.key_dim, spec.value_dim});
  const std::int64_t slots[] = {3, 1};
  const std::int32_t iterations[] = {2, 9};
  for (std::int64_t b = 0; b < 2; ++b) {
    copy_slice(c.h0, 0, b, 1, h, slots[b]);
    copy_slice(c.u0, 0, b, 1, u, slots[b]);
  }
  const OwnedOutputs got = c.outputs();
  Step step = step_at(c.problem(), 0, got.o.view(), h.data(), u.data());
  step.state_indices = slots;
  step.iterations = iterations;
  take_step(step);

  for (std::int64_t b = 0; b < 2; ++b) {
    CaseSpec own = spec;
    own.options.iterations = iterations[b];
    const Case with_iterations(own);
    const OwnedOutputs want = forward(with_iterations);
    expect_close(tokens_of(got.o, b, 0, 1), tokens_of(want.o, b, 0, 1), 1e-14, "o");
    expect_close(state_of(h, slots[b]), state_of(want.h, b), 1e-14, "h");
    expect_close(state_of(u, slots[b]), state_of(want.u, b), 1e-14, "u");
  }
  for (const std::int64_t untouched : {0, 2, 4}) {
    for (const double value : state_of(h, untouched).values()) EXPECT_TRUE(std::isnan(value));
    for (const double value : state_of(u, untouched).values()) EXPECT_TRUE(std::isnan(value));
  }
}

TEST_P(Sequences, TheLayoutInMemoryDoesNotMatter) {
  CaseSpec spec = suited(sequence_spec());
  spec.batch = 2;
  const Case contiguous(spec);
  for (const Layout layout : {Layout::padded, Layout::heads_first}) {
    spec.layout = layout;
    const Case strided(spec);
    expect_close(forward(strided), forward(contiguous), 0.0, strided.describe());
    expect_close(backward(strided), backward(contiguous), 0.0, strided.describe());
  }
}

TEST_P(Sequences, AbsentGatesAreOpenGates) {
  CaseSpec spec = suited(sequence_spec());
  spec.log_decay = spec.beta = spec.alpha = false;
  const Case absent(spec);
  spec.log_decay = spec.beta = spec.alpha = true;
  Case open(spec);
  for (const auto member : Case::kByToken) {
    if (absent.*member) copy_slice(absent.*member, 1, 0, spec.tokens, open.*member, 0);
  }
  for (const auto member : Case::kByState) copy_slice(absent.*member, 0, 0, 1, open.*member, 0);
  for (std::int64_t t = 0; t < spec.tokens; ++t)
    for (std::int64_t head = 0; head < spec.heads; ++head) {
      open.log_decay.set(0, t, head, 0, 0.0);
      open.beta.set(0, t, head, 0, 1.0);
      open.alpha.set(0, t, head, 0, 1.0);
    }
  expect_close(forward(absent), forward(open), 0.0, "outputs");
  const OwnedGradients got = backward(absent);
  const OwnedGradients want = backward(open);
  for (const auto member : {&OwnedGradients::d_q, &OwnedGradients::d_k, &OwnedGradients::d_v, &OwnedGradients::d_h0,
                            &OwnedGradients::d_u0}) {
    expect_close(got.*member, want.*member, 0.0, "a gradient");
  }
}

TEST_P(Sequences, LowPrecisionIsFloat64OnTheRoundedInputs) {
  constexpr std::pair<DType, double> kRounding[] = {
      {DType::float32, 6e-8}, {DType::bfloat16, 4e-3}, {DType::float16, 5e-4}};
  if (GetParam().tensor_cores) GTEST_SKIP() << "16-bit types alone, which the random cases compare with the reference";
  const double arithmetic = is_reference() ? 1e-15 : 1e-6;  // the others compute in float32
  for (const auto& [dtype, of_type] : kRounding) {
    const double rounding = of_type + arithmetic;
    CaseSpec spec = sequence_spec();
    spec.dtype = dtype;
    const Case narrow(spec);
    spec.dtype = DType::float64;
    Case wide(spec);
    for (const auto member : Case::kByToken) copy_slice(narrow.*member, 1, 0, spec.tokens, wide.*member, 0);
    for (const auto member : Case::kByState) copy_slice(narrow.*member, 0, 0, 1, wide.*member, 0);
    const OwnedOutputs want = forward(wide);
    expect_close(forward(narrow).o, want.o, rounding, "o in its own type");
    const OwnedOutputs unrounded = forward(narrow, DType::float64);
    expect_close(unrounded.o, want.o, arithmetic, "o in float64");
    expect_close(unrounded.h, want.h, 6e-8 + arithmetic, "h");  // float32 states
    expect_close(backward(narrow).d_k, backward(wide).d_k, rounding, "d_k in its own type");
  }
}

TEST_P(Sequences, RandomCasesGiveFiniteResultsInEveryArray) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    CaseSpec spec = random_spec(seed);
    if (spec.key_dim * spec.tokens > 2000) continue;  // the small ones will do
    spec = suited(spec);
    if (!carries(spec.options)) continue;
    const Case c(spec);
    // wide types throughout: float16 gradients may overflow where the memory has faded
    const DType wide = GetParam().tensor_cores ? DType::float32 : DType::float64;
    const OwnedOutputs out = forward(c, wide);
    const OwnedGradients grad = backward(c, c.gradients(wide));
    for (const auto& named : {out.named(), grad.named()}) {
      for (const auto& [name, array] : named) {
        const auto values = array->values();
        EXPECT_TRUE(std::all_of(values.begin(), values.end(), [](double value) { return std::isfinite(value); }))
            << name << " of " << c.describe();
        EXPECT_TRUE(array->gaps_intact()) << name << " of " << c.describe();
      }
    }
  }
}

}  // namespace
}  // namespace gka::kernels::test
