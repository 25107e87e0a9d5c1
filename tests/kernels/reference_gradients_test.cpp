// The reference's gradients against central differences of what it computes, and its two kinds of gradient against
// each other.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/expect.h"
#include "kernels/reference/gradients.h"
#include "kernels/reference/unrolled.h"

namespace gka::kernels::test {
namespace {

using reference::dot;
using reference::Matrix;
using reference::Regression;
using reference::Settings;
using reference::System;
using reference::SystemGradient;
using reference::Vector;

constexpr double kNudge = 1e-5;

// ---- the whole operator ---------------------------------------------------------------------------------------------

double weighted_sum(const Array& values, const Array& weights) {
  if (!values || !weights) return 0.0;
  const auto a = values.values();
  const auto b = weights.values();
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Σ o·do + Σ h·dh + Σ u·du.
double loss(const Case& c) {
  const OwnedOutputs out = c.outputs();
  reference::forward(c.problem(), out.pointers());
  return weighted_sum(out.o, c.d_o) + weighted_sum(out.h, c.d_h) + weighted_sum(out.u, c.d_u);
}

/// The gradient of the loss by one input, each element nudged up and down.
Array differences(Case& c, Array& input) {
  const auto& shape = input.shape();
  Array result(DType::float64, shape);
  for (std::int64_t i = 0; i < shape[0]; ++i)
    for (std::int64_t j = 0; j < shape[1]; ++j)
      for (std::int64_t k = 0; k < shape[2]; ++k)
        for (std::int64_t l = 0; l < shape[3]; ++l) {
          const double value = input.at(i, j, k, l);
          input.set(i, j, k, l, value + kNudge);
          const double above = loss(c);
          input.set(i, j, k, l, value - kNudge);
          const double below = loss(c);
          input.set(i, j, k, l, value);
          result.set(i, j, k, l, (above - below) / (2.0 * kNudge));
        }
  return result;
}

void expect_gradients_match_differences(const CaseSpec& spec, double tolerance = 1e-6) {
  Case c(spec);
  const OwnedGradients got = c.gradients();
  reference::backward(c.problem(), got.pointers());
  const std::tuple<const char*, Array*, const Array*> inputs[] = {
      {"d_q", &c.q, &got.d_q},          {"d_k", &c.k, &got.d_k},
      {"d_v", &c.v, &got.d_v},          {"d_log_decay", &c.log_decay, &got.d_log_decay},
      {"d_beta", &c.beta, &got.d_beta}, {"d_alpha", &c.alpha, &got.d_alpha},
      {"d_h0", &c.h0, &got.d_h0},       {"d_u0", &c.u0, &got.d_u0},
  };
  for (const auto& [name, input, gradient] : inputs) {
    if (*input) expect_close(*gradient, differences(c, *input), tolerance, std::string(name) + " of " + c.describe());
  }
  for (std::size_t i = 0; i < c.ridge_diagonal.size(); ++i) {
    const double value = c.ridge_diagonal[i];
    c.ridge_diagonal[i] = value + kNudge;
    const double above = loss(c);
    c.ridge_diagonal[i] = value - kNudge;
    const double below = loss(c);
    c.ridge_diagonal[i] = value;
    EXPECT_NEAR(got.d_ridge_diagonal.at(0, 0, 0, static_cast<std::int64_t>(i)), (above - below) / (2.0 * kNudge), 1e-6)
        << "d_ridge_diagonal " << i << " of " << c.describe();
  }
}

/// A case small enough for differences, with everything that has a gradient in it.
CaseSpec small_spec(const Options& options) {
  CaseSpec spec{
      .tokens = 5, .heads = 1, .key_dim = 4, .value_dim = 3, .h0 = true, .u0 = true, .d_h = true, .d_u = true};
  spec.asymmetric_h0 = spec.full_rank_h0 = true;
  spec.options = options;
  spec.options.gradient = Gradient::unrolled;
  return spec;
}

class UnrolledGradient : public ::testing::TestWithParam<Solver> {};

TEST_P(UnrolledGradient, IsTheGradientOfTheOutput) {
  for (const RidgeMode mode : {RidgeMode::adaptive, RidgeMode::constant}) {
    for (const std::int64_t iterations : {0, 1, 2, 7}) {
      const double ridge = mode == RidgeMode::adaptive ? 0.1 : 0.7;
      expect_gradients_match_differences(small_spec(
          {.scale = 0.7, .ridge = ridge, .iterations = iterations, .solver = GetParam(), .ridge_mode = mode}));
    }
  }
}

TEST_P(UnrolledGradient, IsTheGradientOfTheSolutionAlone) {
  expect_gradients_match_differences(
      small_spec({.part = Part::solve, .ridge = 0.1, .iterations = 3, .solver = GetParam()}));
}

TEST_P(UnrolledGradient, LeavesKeysUndecayedWhereTheForwardPassDoes) {
  expect_gradients_match_differences(
      small_spec({.ridge = 0.1, .iterations = 4, .solver = GetParam(), .decay_keys = false}));
}

TEST_P(UnrolledGradient, NeedsNoGatesAndNoStates) {
  CaseSpec spec = small_spec({.ridge = 0.2, .iterations = 5, .solver = GetParam()});
  spec.log_decay = spec.beta = spec.alpha = spec.h0 = spec.u0 = spec.d_h = spec.d_u = false;
  expect_gradients_match_differences(spec);
}

INSTANTIATE_TEST_SUITE_P(Reference, UnrolledGradient,
                         ::testing::Values(Solver::chebyshev, Solver::conjugate_gradient, Solver::gradient_descent,
                                           Solver::nesterov, Solver::exact),
                         [](const auto& solver) { return std::string(name_of(solver.param)); });

TEST(ReferenceGradient, GoesThroughADiagonalRidge) {
  for (const Solver solver : {Solver::conjugate_gradient, Solver::exact}) {
    for (const std::int64_t iterations : {1, 3}) {
      CaseSpec spec = small_spec({.iterations = iterations, .solver = solver, .ridge_mode = RidgeMode::constant});
      spec.ridge_diagonal = true;
      expect_gradients_match_differences(spec);
    }
  }
}

TEST(ReferenceGradient, OfTheLinearMemoryIsTheGradientOfItsOutput) {
  expect_gradients_match_differences(small_spec({.part = Part::memory, .scale = 1.3}));
}

TEST(ReferenceGradient, StaysTrueAfterConjugateGradientsHaveConverged) {
  for (const std::int64_t iterations : {5, 8, 30}) {
    expect_gradients_match_differences(
        small_spec({.ridge = 0.1, .iterations = iterations, .solver = Solver::conjugate_gradient}));
  }
}

TEST(ReferenceGradient, OfALongSequenceCrossesTheStatesThatAreKept) {
  CaseSpec spec = small_spec({.ridge = 0.1, .iterations = 4});
  spec.tokens = 140;  // more than two stretches between kept states
  spec.key_dim = 2;
  spec.value_dim = 1;
  spec.strongest_decay = 0.01;
  expect_gradients_match_differences(spec);
}

OwnedGradients gradients_of(CaseSpec spec, Solver solver, Gradient gradient) {
  spec.options.solver = solver;
  spec.options.gradient = gradient;
  const Case c(spec);
  OwnedGradients result = c.gradients();
  reference::backward(c.problem(), result.pointers());
  return result;
}

CaseSpec middling_spec() {
  CaseSpec spec{
      .batch = 2, .tokens = 24, .key_dim = 12, .value_dim = 10, .h0 = true, .u0 = true, .d_h = true, .d_u = true};
  spec.keys = Keys::silu;
  spec.full_rank_h0 = true;
  return spec;
}

TEST(ReferenceGradient, ImplicitAndUnrolledAgreeOnTheQuery) {
  // Lemma 2 of the paper. It holds for every solver whose answer is a polynomial of the matrix times q, at any r, and
  // so for all but conjugate gradients, whose polynomial depends on q.
  for (const Solver solver : {Solver::chebyshev, Solver::gradient_descent, Solver::nesterov, Solver::exact}) {
    for (const RidgeMode mode : {RidgeMode::adaptive, RidgeMode::constant}) {
      CaseSpec spec = middling_spec();
      spec.options.iterations = 6;
      spec.options.ridge_mode = mode;
      const auto implicit = gradients_of(spec, solver, Gradient::implicit);
      const auto unrolled = gradients_of(spec, solver, Gradient::unrolled);
      expect_close(implicit.d_q, unrolled.d_q, 1e-12, std::string(name_of(solver)));
      expect_close(implicit.d_alpha, unrolled.d_alpha, 1e-12, std::string(name_of(solver)));
    }
  }
}

TEST(ReferenceGradient, ImplicitAndUnrolledCoincideForAnExactSolve) {
  for (const bool ridge_gradient : {true, false}) {
    CaseSpec spec = middling_spec();
    spec.options.ridge_gradient = ridge_gradient;
    expect_close(gradients_of(spec, Solver::exact, Gradient::implicit),
                 gradients_of(spec, Solver::exact, Gradient::unrolled), 1e-12, describe(spec));
  }
}

TEST(ReferenceGradient, ImplicitIsCloserToTheExactOneThanUnrolled) {
  CaseSpec spec = middling_spec();
  const auto exact = gradients_of(spec, Solver::exact, Gradient::implicit);
  const auto by_implicit = gradients_of(spec, Solver::chebyshev, Gradient::implicit);
  const auto by_unrolled = gradients_of(spec, Solver::chebyshev, Gradient::unrolled);
  const auto implicit = compare(by_implicit.named(), exact.named());
  const auto unrolled = compare(by_unrolled.named(), exact.named());
  for (std::size_t i = 0; i < implicit.size(); ++i) {
    EXPECT_LE(implicit[i].error, 2e-3) << implicit[i].name;
    EXPECT_LE(implicit[i].error, unrolled[i].error * 1.0001) << implicit[i].name;
  }
}

TEST(ReferenceGradient, ConvergesToTheExactOneWithTheIterations) {
  CaseSpec spec = middling_spec();
  const auto exact = gradients_of(spec, Solver::exact, Gradient::implicit);
  spec.options.iterations = 400;
  for (const Solver solver : {Solver::chebyshev, Solver::gradient_descent, Solver::nesterov}) {
    const double tolerance = solver == Solver::gradient_descent ? 1e-5 : 1e-9;
    for (const Gradient gradient : {Gradient::implicit, Gradient::unrolled}) {
      expect_close(gradients_of(spec, solver, gradient), exact, tolerance, std::string(name_of(solver)));
    }
  }
  for (const Gradient gradient : {Gradient::implicit, Gradient::unrolled}) {
    spec.options.iterations = spec.key_dim + 2;
    expect_close(gradients_of(spec, Solver::conjugate_gradient, gradient), exact, 1e-8, "conjugate_gradient");
  }
}

TEST(ReferenceGradient, OfTheInitialKeyStateIsSymmetric) {
  CaseSpec spec = middling_spec();
  spec.asymmetric_h0 = true;
  for (const Gradient gradient : {Gradient::implicit, Gradient::unrolled}) {
    const auto got = gradients_of(spec, Solver::chebyshev, gradient);
    for (std::int64_t i = 0; i < spec.key_dim; ++i)
      for (std::int64_t j = 0; j < i; ++j) EXPECT_NEAR(got.d_h0.at(1, 0, i, j), got.d_h0.at(1, 0, j, i), 1e-12);
  }
}

// ---- one solve ------------------------------------------------------------------------------------------------------

/// A random system with room between its bounds and its spectrum.
System random_system(std::int64_t n, std::uint64_t seed) {
  const Case c({.tokens = n + 2, .heads = 1, .key_dim = n, .seed = seed});
  System system{.matrix = Matrix(n, n), .ridge = Vector(static_cast<std::size_t>(n)), .lower = 0.2, .upper = 3.4};
  for (std::int64_t t = 0; t < n + 2; ++t)
    for (std::int64_t i = 0; i < n; ++i)
      for (std::int64_t j = 0; j < n; ++j) system.matrix(i, j) += 0.5 * c.k.at(0, t, 0, i) * c.k.at(0, t, 0, j);
  for (std::size_t i = 0; i < system.ridge.size(); ++i) system.ridge[i] = 0.25 + 0.01 * static_cast<double>(i);
  return system;
}

Vector random_vector(std::int64_t n, std::uint64_t seed) {
  return Case({.tokens = 1, .heads = 1, .key_dim = n, .seed = seed}).q.values();
}

TEST(UnrolledSolve, IsTheGradientByEverythingThatWentIn) {
  constexpr std::int64_t n = 5;
  const Vector q = random_vector(n, 5);
  const Vector d_x = random_vector(n, 6);
  for (const auto& [name, solver] : kSolverNames) {
    for (const std::int64_t iterations : {0, 1, 2, 3, 6}) {
      System system = random_system(n, 4);
      const SystemGradient got = unrolled(solver, system, q, iterations, d_x);
      const auto difference = [&](double& input, const Vector& rhs) {
        const double value = input;
        input = value + kNudge;
        const double above = dot(d_x, solve(solver, system, rhs, iterations));
        input = value - kNudge;
        const double below = dot(d_x, solve(solver, system, rhs, iterations));
        input = value;
        return (above - below) / (2.0 * kNudge);
      };
      const auto what = std::string(name) + " after " + std::to_string(iterations) + " iterations";
      Vector rhs = q;
      for (std::size_t i = 0; i < n; ++i) {
        EXPECT_NEAR(got.d_q[i], difference(rhs[i], rhs), 1e-8) << "d_q of " << what;
        EXPECT_NEAR(got.d_ridge[i], difference(system.ridge[i], q), 1e-8) << "d_ridge of " << what;
      }
      if (solver != Solver::exact) {
        EXPECT_NEAR(got.d_lower, difference(system.lower, q), 1e-8) << "d_lower of " << what;
        EXPECT_NEAR(got.d_upper, difference(system.upper, q), 1e-8) << "d_upper of " << what;
      }
      for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t j = 0; j < i; ++j) {  // both triangles move: the matrix stays symmetric
          const double value = system.matrix(i, j);
          const auto moved = [&](double by) {
            system.matrix(i, j) = system.matrix(j, i) = value + by;
            return dot(d_x, solve(solver, system, q, iterations));
          };
          const double slope = (moved(kNudge) - moved(-kNudge)) / (2.0 * kNudge);
          moved(0.0);
          EXPECT_NEAR(got.d_matrix(i, j) + got.d_matrix(j, i), slope, 1e-8) << "d_matrix of " << what;
        }
      }
    }
  }
}

TEST(UnrolledSolve, TakesTheRidgeAndTheBoundsAsConstantsWhenAsked) {
  // With ridge_gradient = false the gradient is that of x(H) with f frozen where λ, L and μ use it.
  constexpr std::int64_t n = 4;
  const Vector q = random_vector(n, 8);
  const Vector d_x = random_vector(n, 9);
  for (const RidgeMode mode : {RidgeMode::adaptive, RidgeMode::constant}) {
    for (const auto& [name, solver] : kSolverNames) {
      const Options options{
          .ridge = 0.3, .iterations = 3, .solver = solver, .ridge_mode = mode, .ridge_gradient = false};
      Regression frozen = reference::regression(random_system(n, 7).matrix, {.options = options});
      const Vector x = answer(frozen, q, options);
      const auto got = unrolled_gradient(frozen, q, x, d_x, options);
      for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t j = 0; j < i; ++j) {
          const double value = frozen.system.matrix(i, j);
          const auto moved = [&](double by) {  // by in H is by/unit in the system's matrix
            frozen.system.matrix(i, j) = frozen.system.matrix(j, i) = value + by / frozen.unit;
            return dot(d_x, answer(frozen, q, options));
          };
          const double slope = (moved(kNudge) - moved(-kNudge)) / (2.0 * kNudge);
          moved(0.0);
          EXPECT_NEAR(2.0 * got.d_h(i, j), slope, 1e-8) << name << ", " << name_of(mode);
        }
      }
    }
  }
}

TEST(ReversedChebyshev, AgreesWithRecomputingTheIterates) {
  // From the last two iterates alone, over ridges where the reversed iterates themselves are long lost.
  constexpr std::int64_t n = 16;
  const Vector q = random_vector(n, 2);
  const Vector d_x = random_vector(n, 3);
  for (const double ridge : {0.005, 0.02, 0.1, 0.25, 1.0}) {
    for (const std::int64_t iterations : {0, 1, 2, 30, 600}) {
      const Matrix h = random_system(n, 1).matrix;
      const Regression r = reference::regression(h, {.options = {.ridge = ridge}});
      reference::Trace trace;
      const Vector last = solve(Solver::chebyshev, r.system, q, iterations, &trace);
      const Vector before = iterations > 0 ? trace[trace.size() - 2] : Vector(n, 0.0);
      const auto want = unrolled(Solver::chebyshev, r.system, q, iterations, d_x);
      const auto got =
          reversed_chebyshev(r.system, q, iterations, last, before, d_x, std::numeric_limits<double>::epsilon());
      const auto what = "ridge " + std::to_string(ridge) + ", " + std::to_string(iterations) + " iterations";
      EXPECT_LE(relative_error(got.d_q, want.d_q), 1e-12) << what;
      EXPECT_LE(relative_error(got.d_matrix.data, want.d_matrix.data), 1e-9) << what;
    }
  }
}

TEST(ReversedChebyshev, StopsLaterForAWorseCondition) {
  const double eps = std::numeric_limits<double>::epsilon();
  EXPECT_LT(reference::reversible_steps(0.25, 1.25, eps), reference::reversible_steps(0.02, 1.02, eps));
  EXPECT_LT(reference::reversible_steps(0.02, 1.02, 1e-7), reference::reversible_steps(0.02, 1.02, eps));
  EXPECT_EQ(reference::reversible_steps(1.0, 1.0, eps), 0);
}

}  // namespace
}  // namespace gka::kernels::test
