// The five solvers: each gets to the exact answer, at the speed its theory promises.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/case.h"
#include "kernels/reference/recurrence.h"

namespace gka::kernels::test {
namespace {

using reference::Matrix;
using reference::Regression;
using reference::Trace;
using reference::Vector;

constexpr std::int64_t kDim = 24;
constexpr double kRidge = 0.05;

/// The system of a memory that has seen 40 tokens whose keys share a direction.
Regression memory_system() {
  const Case c({.tokens = 40, .heads = 1, .key_dim = kDim, .keys = Keys::silu});
  Matrix h(kDim, kDim);
  for (std::int64_t t = 0; t < 40; ++t)
    for (std::int64_t i = 0; i < kDim; ++i)
      for (std::int64_t j = 0; j < kDim; ++j) h(i, j) += c.k.at(0, t, 0, i) * c.k.at(0, t, 0, j);
  return reference::regression(h, {.options = {.ridge = kRidge}});
}

Vector query() { return Case({.tokens = 1, .heads = 1, .key_dim = kDim, .seed = 3}).q.values(); }

class EverySolver : public ::testing::TestWithParam<Solver> {};

TEST_P(EverySolver, ReachesTheExactAnswer) {
  const Regression r = memory_system();
  const std::int64_t iterations = GetParam() == Solver::conjugate_gradient ? kDim + 4 : 400;
  EXPECT_LE(relative_error(solve(GetParam(), r.system, query(), iterations), exact(r.system, query())), 1e-11);
}

TEST_P(EverySolver, TracesItsIterates) {
  const Regression r = memory_system();
  for (const std::int64_t iterations : {1, 4}) {
    Trace trace;
    const Vector x = solve(GetParam(), r.system, query(), iterations, &trace);
    ASSERT_FALSE(trace.empty());
    EXPECT_EQ(trace.back(), x);
    for (std::size_t i = 0; GetParam() != Solver::exact && i < trace.size(); ++i) {
      // The i-th iterate is what fewer iterations would have answered. Conjugate gradients trace from the first step.
      const std::int64_t fewer = static_cast<std::int64_t>(i) + (GetParam() == Solver::conjugate_gradient ? 1 : 0);
      EXPECT_EQ(trace[i], solve(GetParam(), r.system, query(), fewer));
    }
  }
}

TEST_P(EverySolver, AnswersZeroWithZero) {
  const Regression r = memory_system();
  EXPECT_EQ(solve(GetParam(), r.system, Vector(kDim, 0.0), 10), Vector(kDim, 0.0));
}

TEST_P(EverySolver, SolvesAMultipleOfTheIdentityAtOnce) {
  // L = μ: no division by zero in the schedules, no 0/0 after the residual has become 0.
  Regression r = reference::regression(Matrix(4, 4), {.options = {.ridge = 0.5, .ridge_mode = RidgeMode::constant}});
  const Vector q{1.0, -2.0, 0.5, 3.0};
  for (const std::int64_t iterations : {1, 2, 30}) {
    EXPECT_LE(relative_error(solve(GetParam(), r.system, q, iterations), {2.0, -4.0, 1.0, 6.0}), 1e-15);
  }
}

INSTANTIATE_TEST_SUITE_P(Reference, EverySolver,
                         ::testing::Values(Solver::chebyshev, Solver::conjugate_gradient, Solver::gradient_descent,
                                           Solver::nesterov, Solver::exact),
                         [](const auto& solver) { return std::string(name_of(solver.param)); });

TEST(ReferenceSolvers, WithoutIterationsGiveTheirStart) {
  const Regression r = memory_system();
  const Vector start = reference::scaled(query(), 2.0 / (1.0 + 2.0 * kRidge));
  for (const Solver solver : {Solver::chebyshev, Solver::gradient_descent, Solver::nesterov}) {
    EXPECT_EQ(solve(solver, r.system, query(), 0), start) << name_of(solver);
  }
  EXPECT_EQ(solve(Solver::conjugate_gradient, r.system, query(), 0), Vector(kDim, 0.0));
}

double error_after(Solver solver, std::int64_t iterations) {
  const Regression r = memory_system();
  return relative_error(solve(solver, r.system, query(), iterations), exact(r.system, query()));
}

TEST(ReferenceSolvers, ChebyshevKeepsItsBound) {
  // ξ_r is the best polynomial of degree r for the whole interval: ‖ξ_r − x‖ ≤ ‖x‖ / T_{r+1}(1/ρ).
  const double rho = 1.0 / (1.0 + 2.0 * kRidge);
  for (const std::int64_t iterations : {0, 1, 5, 20, 40}) {
    const double bound = 1.0 / std::cosh(static_cast<double>(iterations + 1) * std::acosh(1.0 / rho));
    EXPECT_LE(error_after(Solver::chebyshev, iterations), bound * (1.0 + 1e-9)) << iterations;
  }
}

TEST(ReferenceSolvers, GradientDescentKeepsItsBound) {
  const double rho = 1.0 / (1.0 + 2.0 * kRidge);
  for (const std::int64_t iterations : {0, 1, 5, 20, 40}) {
    EXPECT_LE(error_after(Solver::gradient_descent, iterations), std::pow(rho, iterations + 1) * (1.0 + 1e-9));
  }
}

TEST(ReferenceSolvers, RankAsTheoryRanksThem) {
  EXPECT_LT(error_after(Solver::conjugate_gradient, 12), error_after(Solver::chebyshev, 12));
  EXPECT_LT(error_after(Solver::chebyshev, 30), error_after(Solver::nesterov, 30));
  EXPECT_LT(error_after(Solver::nesterov, 30), error_after(Solver::gradient_descent, 30));
}

TEST(ReferenceSolvers, ReportTheirResiduals) {
  CaseSpec spec{.tokens = 12, .heads = 2, .key_dim = 9, .h0 = true};
  spec.options.iterations = 6;
  for (const bool diagonal : {false, true}) {
    spec.ridge_diagonal = diagonal;
    spec.options.ridge_mode = diagonal ? RidgeMode::constant : RidgeMode::adaptive;
    spec.options.solver = diagonal ? Solver::conjugate_gradient : Solver::chebyshev;
    const Case c(spec);
    const OwnedOutputs out = c.outputs();
    reference::forward(c.problem(), out.pointers());
    for (std::int64_t head = 0; head < spec.heads; ++head) {
      const std::int64_t t = spec.tokens - 1;  // the token whose H is the final state
      double square = 0.0, residual = 0.0, true_residual = 0.0, variance = 0.0, ridge = 0.0;
      double unexplained = 0.0, length = 0.0;
      for (std::int64_t i = 0; i < spec.key_dim; ++i) {
        for (std::int64_t j = 0; j < spec.key_dim; ++j) square += std::pow(out.h.at(0, head, i, j), 2);
      }
      for (std::int64_t i = 0; i < spec.key_dim; ++i) {
        const double x = out.x.at(0, t, head, i);
        const double own = diagonal ? c.ridge_diagonal[static_cast<std::size_t>(head * spec.key_dim + i)]
                                    : spec.options.ridge * std::sqrt(square);
        double miss = -c.q.at(0, t, head, i);
        for (std::int64_t j = 0; j < spec.key_dim; ++j) miss += out.h.at(0, head, i, j) * out.x.at(0, t, head, j);
        true_residual += miss * miss;
        residual += std::pow(miss + own * x, 2);
        variance += c.q.at(0, t, head, i) * x;
        ridge += own / static_cast<double>(spec.key_dim);
        unexplained += c.q.at(0, t, head, i) * own * x;
        length += std::pow(c.q.at(0, t, head, i), 2);
      }
      EXPECT_NEAR(out.norm.at(0, t, head, 0), std::sqrt(square), 1e-12);
      EXPECT_NEAR(out.ridge.at(0, t, head, 0), ridge, 1e-12);
      EXPECT_NEAR(out.residual.at(0, t, head, 0), std::sqrt(residual), 1e-12);
      EXPECT_NEAR(out.true_residual.at(0, t, head, 0), std::sqrt(true_residual), 1e-12);
      EXPECT_NEAR(out.variance.at(0, t, head, 0), variance, 1e-12);
      EXPECT_NEAR(out.certainty.at(0, t, head, 0), 1 - unexplained / length, 1e-12);
    }
  }
}

}  // namespace
}  // namespace gka::kernels::test
