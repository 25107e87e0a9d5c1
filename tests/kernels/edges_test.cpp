// Edges that have an answer: an empty memory, nothing written, everything forgotten, no iterations, no tokens, a memory
// that has faded to almost nothing, and a NaN that stays where it is.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/backends.h"

namespace gka::kernels::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

void fill(Array& array, double value) {
  const auto& shape = array.shape();
  for (std::int64_t i = 0; i < shape[0]; ++i)
    for (std::int64_t j = 0; j < shape[1]; ++j)
      for (std::int64_t k = 0; k < shape[2]; ++k)
        for (std::int64_t l = 0; l < shape[3]; ++l) array.set(i, j, k, l, value);
}

void expect_all(const Array& array, double value, const std::string& what) {
  for (const double got : array.values()) ASSERT_EQ(got, value) << what;
}

template <typename Body>
void for_each_solver_and_gradient(Body body) {
  for (const auto& [solver_name, solver] : kSolverNames) {
    for (const auto& [gradient_name, gradient] : kGradientNames) body(solver, gradient);
  }
}

class Edges : public OnEveryBackend {};

INSTANTIATE_TEST_SUITE_P(, Edges, testing::ValuesIn(kBackends), backend_name);

TEST_P(Edges, AZeroMemoryAnswersZero) {
  for_each_solver_and_gradient([&](Solver solver, Gradient gradient) {
    CaseSpec spec{.skip = 1.0};
    spec.options.solver = solver;
    spec.options.gradient = gradient;
    if (!carries(spec.options)) return;
    const Case c(suited(spec));
    const OwnedOutputs out = forward(c);
    for (const auto& [name, array] :
         {NamedArray{"o", &out.o}, NamedArray{"x", &out.x}, NamedArray{"norm", &out.norm}}) {
      if (*array) expect_all(*array, 0.0, name);
    }
    const OwnedGradients got = backward(c);
    for (const auto& [name, array] : got.named()) {
      if (std::string(name) == "d_beta") {
        for (const double value : array->values()) EXPECT_TRUE(std::isfinite(value));
      } else {
        expect_all(*array, 0.0, name);
      }
    }
  });
}

TEST_P(Edges, AZeroMemoryOfKeysLeavesThePathAroundTheSolve) {
  CaseSpec spec = suited({.tokens = 3, .heads = 1, .log_decay = false, .u0 = true, .skip = 1.0});
  spec.options.scale = 0.5;
  const Case c(spec);
  const OwnedOutputs out = forward(c);
  const OwnedGradients got = backward(c);
  for (std::int64_t t = 0; t < 3; ++t) {
    const double alpha = c.alpha.at(0, t, 0, 0);
    for (std::int64_t j = 0; j < spec.value_dim; ++j) {
      double recalled = 0.0;
      for (std::int64_t i = 0; i < spec.key_dim; ++i) recalled += c.u0.at(0, 0, i, j) * c.q.at(0, t, 0, i);
      EXPECT_NEAR(out.o.at(0, t, 0, j), 0.5 * (1.0 - alpha) * recalled, within(1e-14));
    }
    for (std::int64_t i = 0; i < spec.key_dim; ++i) {
      double along = 0.0;
      for (std::int64_t j = 0; j < spec.value_dim; ++j) along += c.u0.at(0, 0, i, j) * c.d_o.at(0, t, 0, j);
      EXPECT_NEAR(got.d_q.at(0, t, 0, i), 0.5 * (1.0 - alpha) * along, within(1e-14));
    }
  }
}

TEST_P(Edges, AZeroMemoryWithAConstantRidgeAnswersTheQueryOverTheRidge) {
  for_each_solver_and_gradient([&](Solver solver, Gradient gradient) {
    CaseSpec spec{.skip = 1.0};
    spec.options = {.part = Part::solve, .ridge = 0.25, .solver = solver, .gradient = gradient};
    spec.options.ridge_mode = RidgeMode::constant;
    if (!carries(spec.options)) return;
    const Case c(spec);
    auto want = c.q.values();
    for (double& value : want) value *= 4.0;
    EXPECT_LE(relative_error(forward(c).o.values(), want), 1e-14) << c.describe();
    const OwnedGradients got = backward(c);
    for (const auto& [name, array] : got.named()) {
      for (const double value : array->values()) ASSERT_TRUE(std::isfinite(value)) << name << " of " << c.describe();
    }
  });
}

TEST_P(Edges, AZeroBetaWritesNothing) {
  const CaseSpec spec{.tokens = 6, .log_decay = false, .h0 = true, .u0 = true, .skip = 1.0};
  Case c(suited(spec));
  fill(c.v, kNaN);  // not even this
  const OwnedOutputs out = forward(c);
  expect_close(out.h, c.h0, 0.0, "h");
  expect_close(out.u, c.u0, 0.0, "u");
}

TEST_P(Edges, ADecayOfZeroForgetsExactly) {
  constexpr std::int64_t cut = 5;
  for (const bool poisoned : {false, true}) {
    Case whole(suited({.tokens = 11, .h0 = true, .u0 = true}));
    for (std::int64_t head = 0; head < 2; ++head) whole.log_decay.set(0, cut, head, 0, -kInfinity);
    Case rest = slice(whole, 0, cut, 6);
    fill(rest.h0, 0.0);
    fill(rest.u0, 0.0);
    if (poisoned) whole.k.set(0, 2, 0, 0, kNaN);
    const OwnedOutputs all = forward(whole);
    const OwnedOutputs after = forward(rest);
    expect_close(all.h, after.h, 0.0, "h");
    expect_close(all.u, after.u, 0.0, "u");
    for (std::int64_t t = 0; t < 6; ++t)
      for (std::int64_t j = 0; j < 6; ++j) EXPECT_EQ(all.o.at(0, cut + t, 1, j), after.o.at(0, t, 1, j));

    // Nothing that happens from the cut on depends on what came before it.
    const OwnedGradients d_all = backward(whole);
    const OwnedGradients d_after = backward(rest);
    for (std::int64_t t = 0; t < 6; ++t) {
      EXPECT_EQ(d_all.d_k.at(0, cut + t, 0, 0), d_after.d_k.at(0, t, 0, 0));
      EXPECT_EQ(d_all.d_log_decay.at(0, cut + t, 0, 0), d_after.d_log_decay.at(0, t, 0, 0));
    }
    EXPECT_EQ(d_all.d_log_decay.at(0, cut, 0, 0), 0.0);
  }
}

TEST_P(Edges, WithoutIterationsTheSolveGivesItsStart) {
  CaseSpec spec{.tokens = 4, .heads = 1};
  spec.options = {.part = Part::solve, .ridge = 0.1, .iterations = 0};
  if (!carries(spec.options)) GTEST_SKIP() << "20 iterations at least, and no solve by itself";
  const Case c(spec);
  const OwnedOutputs out = forward(c);
  for (std::int64_t t = 0; t < 4; ++t)
    for (std::int64_t i = 0; i < spec.key_dim; ++i) {
      EXPECT_NEAR(out.o.at(0, t, 0, i), 2.0 / 1.2 * c.q.at(0, t, 0, i) / out.norm.at(0, t, 0, 0), 1e-12);
    }
}

TEST_P(Edges, WithoutIterationsGradientsStillRunAlongTheSequence) {
  if (GetParam().tensor_cores) GTEST_SKIP() << "20 iterations at least";
  for_each_solver_and_gradient([&](Solver solver, Gradient gradient) {
    for (const bool ridge_gradient : {false, true}) {
      CaseSpec spec{.tokens = 300, .heads = 1, .h0 = true, .u0 = true, .d_h = true, .d_u = true};
      spec.options.solver = solver;
      spec.options.gradient = gradient;
      spec.options.ridge_gradient = ridge_gradient;
      spec.options.iterations = 0;
      if (!carries(spec.options)) return;
      const Case c(suited(spec));
      OwnedGradients want = c.gradients();
      reference::backward(c.problem(), want.pointers());
      expect_close(backward(c), want, gradients_within(1e-10), c.describe());
    }
  });
}

TEST_P(Edges, WithoutTokensTheStatesAreHandedThrough) {
  for (const std::vector<std::int64_t>& lengths : {std::vector<std::int64_t>{}, std::vector<std::int64_t>{0, 0, 0}}) {
    CaseSpec spec{.batch = 2, .tokens = 0, .lengths = lengths, .h0 = true, .u0 = true, .d_h = true, .d_u = true};
    const Case c(suited(spec));
    const OwnedOutputs out = forward(c);
    EXPECT_EQ(out.o.size(), 0);
    expect_close(out.h, c.h0, 0.0, "h");
    expect_close(out.u, c.u0, 0.0, "u");
    const OwnedGradients got = backward(c);
    expect_close(got.d_u0, c.d_u, 0.0, "d_u0");
    for (std::int64_t n = 0; n < c.problem().sequences; ++n)
      for (std::int64_t i = 0; i < spec.key_dim; ++i)
        for (std::int64_t j = 0; j < spec.key_dim; ++j) {
          EXPECT_NEAR(got.d_h0.at(n, 1, i, j), 0.5 * (c.d_h.at(n, 1, i, j) + c.d_h.at(n, 1, j, i)), states_within(0));
        }
  }
}

TEST_P(Edges, AnAsymmetricStateCountsAsItsSymmetricPart) {
  Case c(suited({.h0 = true, .asymmetric_h0 = true}));
  const OwnedOutputs asymmetric = forward(c);
  Array symmetric = c.h0;
  for (std::int64_t head = 0; head < 2; ++head)
    for (std::int64_t i = 0; i < 8; ++i)
      for (std::int64_t j = 0; j < 8; ++j) {
        symmetric.set(0, head, i, j, 0.5 * (c.h0.at(0, head, i, j) + c.h0.at(0, head, j, i)));
      }
  EXPECT_GT(relative_error(c.h0, symmetric), 0.01);
  for (std::int64_t head = 0; head < 2; ++head) {
    for (std::int64_t i = 0; i < 8; ++i)
      for (std::int64_t j = 0; j < 8; ++j) c.h0.set(0, head, i, j, symmetric.at(0, head, i, j));
  }
  expect_close(forward(c), asymmetric, within(1e-15), c.describe());
}

TEST_P(Edges, AFadedMemoryAnswersAsAFreshOne) {
  // The solve does not see scale, and U fades with H: 150 tokens of γ = e⁻⁴ leave f ≈ 1e-260 and the same answer.
  if (GetParam().tensor_cores) GTEST_SKIP() << "float32 ends at 1e-38";
  CaseSpec spec{.tokens = 160, .heads = 1, .skip = 1.0};
  spec.alpha = false;
  Case c(spec);
  for (std::int64_t t = 0; t < 160; ++t) {
    c.log_decay.set(0, t, 0, 0, t < 10 ? -0.1 : -4.0);
    c.beta.set(0, t, 0, 0, t < 10 ? 0.5 : 0.0);
    for (std::int64_t i = 0; i < spec.key_dim; ++i) c.q.set(0, t, 0, i, c.q.at(0, 0, 0, i));
  }
  const OwnedOutputs out = forward(c);
  EXPECT_LT(out.norm.at(0, 159, 0, 0), 1e-250);
  for (std::int64_t j = 0; j < spec.value_dim; ++j) {
    EXPECT_NEAR(out.o.at(0, 159, 0, j), out.o.at(0, 9, 0, j), 1e-11);
  }
  const OwnedGradients got = backward(c);
  for (const auto& [name, array] : got.named()) {
    for (const double value : array->values()) ASSERT_TRUE(std::isfinite(value)) << name;
  }
}

TEST_P(Edges, AStateFadesByTheProductOfItsDecays) {
  // In float32 e⁻⁴⁸ has all its digits, and so has what it scales; no single chunk may round it away.
  CaseSpec spec{.dtype = DType::float32, .tokens = 64, .heads = 1, .h0 = true, .u0 = true, .skip = 1.0};
  Case c(suited(spec));
  for (std::int64_t t = 0; t < 64; ++t) c.log_decay.set(0, t, 0, 0, t < 32 ? -1.5 : 0.0);
  const OwnedOutputs out = forward(c);
  for (const auto& [got, start] : {std::pair{&out.h, &c.h0}, std::pair{&out.u, &c.u0}}) {
    auto want = start->values();
    for (double& value : want) value *= std::exp(-48.0);
    EXPECT_LE(relative_error(got->values(), want), 1e-5);
  }
}

TEST_P(Edges, ANaNStaysInItsHeadItsSequenceAndItsFuture) {
  CaseSpec spec = suited({.lengths = {5, 7, 4}, .h0 = true, .u0 = true, .d_h = true, .d_u = true});
  for (const Gradient gradient : {Gradient::implicit, Gradient::unrolled}) {
    spec.options.gradient = gradient;
    if (!carries(spec.options)) continue;
    const Case clean(spec);
    Case poisoned(spec);
    poisoned.k.set(0, 8, 1, 0, kNaN);  // token 3 of sequence 1, head 1
    const OwnedOutputs want = forward(clean);
    const OwnedOutputs got = forward(poisoned);
    const OwnedGradients d_want = backward(clean);
    const OwnedGradients d_got = backward(poisoned);
    for (std::int64_t t = 0; t < 16; ++t)
      for (std::int64_t head = 0; head < 2; ++head) {
        const bool same_sequence = head == 1 && t >= 5 && t < 12;
        for (std::int64_t j = 0; j < spec.value_dim; ++j) {
          if (!same_sequence || t < 8) {
            EXPECT_EQ(got.o.at(0, t, head, j), want.o.at(0, t, head, j));
          } else {
            EXPECT_TRUE(std::isnan(got.o.at(0, t, head, j)));
          }
          if (!same_sequence) {
            EXPECT_EQ(d_got.d_v.at(0, t, head, j), d_want.d_v.at(0, t, head, j));
          }
        }
        for (std::int64_t i = 0; i < spec.key_dim; ++i) {
          if (!same_sequence || t < 8) {
            EXPECT_EQ(d_got.d_q.at(0, t, head, i), d_want.d_q.at(0, t, head, i));
          }
        }
      }
  }
}

/// Tokens first … last of both must have the same bits.
void expect_same_tokens(const Array& got, const Array& want, std::int64_t first, std::int64_t last,
                        const std::string& what) {
  for (std::int64_t t = first; t < last; ++t)
    for (std::int64_t i = 0; i < want.shape()[3]; ++i)
      ASSERT_EQ(got.at(0, t, 0, i), want.at(0, t, 0, i)) << what << " of token " << t;
}

struct Fence {
  std::int64_t tokens, chunk;
  std::int64_t begin, poison, end;  // γ = 0 at begin and end
};

// All within one chunk, each in a chunk of its own, each in a segment of its own.
constexpr std::array kFences{Fence{16, 0, 5, 8, 11}, Fence{16, 3, 4, 8, 13}, Fence{300, 0, 100, 140, 270}};

struct Poison {
  const char* name;
  Array Case::* input;
};

constexpr std::array kPoisons{Poison{"q", &Case::q},       Poison{"k", &Case::k},         Poison{"v", &Case::v},
                              Poison{"beta", &Case::beta}, Poison{"alpha", &Case::alpha}, Poison{"d_o", &Case::d_o}};

/// Every kind of system a backend solves.
std::vector<CaseSpec> every_system() {
  std::vector<CaseSpec> specs;
  for_each_solver_and_gradient([&](Solver solver, Gradient gradient) {
    for (const RidgeMode mode : {RidgeMode::adaptive, RidgeMode::constant}) {
      for (const bool diagonal : {false, true}) {
        const bool takes = solver == Solver::conjugate_gradient || solver == Solver::exact;
        if (diagonal && (mode == RidgeMode::adaptive || !takes)) continue;
        CaseSpec spec{.heads = 1, .h0 = true, .u0 = true, .d_h = true, .d_u = true, .ridge_diagonal = diagonal};
        spec.options.solver = solver;
        spec.options.gradient = gradient;
        spec.options.ridge_mode = mode;
        spec.options.iterations = 6;
        specs.push_back(spec);
      }
    }
  });
  return specs;
}

TEST_P(Edges, ANaNStaysBetweenTwoDecaysOfZero) {
  for (CaseSpec spec : every_system()) {
    if (!carries(spec.options)) continue;
    for (const Fence& fence : kFences) {
      spec.tokens = fence.tokens;
      spec.options.chunk = fence.chunk;
      spec = suited(spec);
      Case clean(spec);
      for (const std::int64_t cut : {fence.begin, fence.end}) clean.log_decay.set(0, cut, 0, 0, -kInfinity);
      const OwnedOutputs want = forward(clean);
      const OwnedGradients d_want = backward(clean);
      for (const auto& [name, input] : kPoisons) {
        Case poisoned(spec);
        for (const std::int64_t cut : {fence.begin, fence.end}) poisoned.log_decay.set(0, cut, 0, 0, -kInfinity);
        (poisoned.*input).set(0, fence.poison, 0, 0, kNaN);
        const OwnedOutputs got = forward(poisoned);
        const OwnedGradients d_got = backward(poisoned);
        const std::string what = std::string("NaN in ") + name + ", " + clean.describe() + ": ";
        expect_close(got.h, want.h, 0.0, what + "h");
        expect_close(got.u, want.u, 0.0, what + "u");
        expect_same_tokens(got.o, want.o, 0, fence.poison, what + "o");
        expect_same_tokens(got.o, want.o, fence.end, fence.tokens, what + "o");
        expect_close(d_got.d_h0, d_want.d_h0, 0.0, what + "d_h0");
        expect_close(d_got.d_u0, d_want.d_u0, 0.0, what + "d_u0");
        const auto d_arrays = d_got.named(), d_wanted = d_want.named();
        for (std::size_t i = 0; i < d_arrays.size(); ++i) {
          if (d_arrays[i].array->shape()[1] != fence.tokens) continue;  // a state's, or the ridge's
          expect_same_tokens(*d_arrays[i].array, *d_wanted[i].array, 0, fence.begin, what + d_arrays[i].name);
          expect_same_tokens(*d_arrays[i].array, *d_wanted[i].array, fence.end, fence.tokens, what + d_arrays[i].name);
        }
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Edges, ADecayOfZeroForgetsANaNState) {
  for (CaseSpec spec : every_system()) {
    if (!carries(spec.options)) continue;
    for (const Fence& fence : kFences) {
      spec.tokens = fence.tokens;
      spec.options.chunk = fence.chunk;
      spec = suited(spec);
      Case clean(spec);
      Case poisoned(spec);
      for (Case* c : {&clean, &poisoned}) c->log_decay.set(0, fence.begin, 0, 0, -kInfinity);
      poisoned.h0.set(0, 0, 1, 1, kNaN);
      poisoned.u0.set(0, 0, 1, 1, kNaN);
      const OwnedOutputs want = forward(clean);
      const OwnedOutputs got = forward(poisoned);
      const OwnedGradients d_want = backward(clean);
      const OwnedGradients d_got = backward(poisoned);
      const std::string what = clean.describe() + ": ";
      expect_close(got.h, want.h, 0.0, what + "h");
      expect_close(got.u, want.u, 0.0, what + "u");
      expect_same_tokens(got.o, want.o, fence.begin, fence.tokens, what + "o");
      EXPECT_TRUE(std::isnan(got.o.at(0, fence.begin - 1, 0, 0))) << what;
      const auto d_arrays = d_got.named(), d_wanted = d_want.named();
      for (std::size_t i = 0; i < d_arrays.size(); ++i) {
        if (d_arrays[i].array->shape()[1] != fence.tokens) continue;
        expect_same_tokens(*d_arrays[i].array, *d_wanted[i].array, fence.begin, fence.tokens, what + d_arrays[i].name);
      }
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace gka::kernels::test
