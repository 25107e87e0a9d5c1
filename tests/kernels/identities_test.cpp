// Where the layer comes from, as equalities in float64: the Kalman filter, ridge regression, the sister layers, and the
// paper's lemmas about Chebyshev's weights.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/expect.h"
#include "kernels/reference/gradients.h"
#include "kernels/reference/kalman.h"

namespace gka::kernels::test {
namespace {

using reference::add;
using reference::Correction;
using reference::dot;
using reference::Dynamics;
using reference::Filter;
using reference::FrozenFilter;
using reference::LeastSquares;
using reference::Matrix;
using reference::Measurement;
using reference::Memory;
using reference::scaled;
using reference::Settings;
using reference::Vector;

Vector row(const Array& array, std::int64_t token) {
  Vector result;
  for (std::int64_t i = 0; i < array.shape()[3]; ++i) result.push_back(array.at(0, token, 0, i));
  return result;
}

Matrix random_matrix(std::int64_t rows, std::int64_t columns, std::uint64_t seed) {
  const Case c({.tokens = rows, .heads = 1, .key_dim = 1, .value_dim = columns, .seed = seed});
  Matrix result(rows, columns);
  result.data = c.v.values();
  return result;
}

Matrix inverse(const Matrix& m) {
  Matrix result(m.rows, m.columns);
  for (std::int64_t j = 0; j < m.columns; ++j) {
    Vector unit(static_cast<std::size_t>(m.rows), 0.0);
    unit[static_cast<std::size_t>(j)] = 1.0;
    const Vector column = reference::factor_and_solve(m, unit);
    for (std::int64_t i = 0; i < m.rows; ++i) result(i, j) = column[static_cast<std::size_t>(i)];
  }
  return result;
}

/// Column j of the answer to m X = b for all columns of b.
Matrix solve_columns(const Matrix& m, const Matrix& b) { return multiply(inverse(m), b); }

void expect_equal(const Matrix& got, const Matrix& want, double tolerance, const std::string& what) {
  EXPECT_LE(relative_error(got.data, want.data), tolerance) << what;
}

// ---- the Kalman filter ----------------------------------------------------------------------------------------------

/// One token of a random linear Gaussian model.
struct ModelToken {
  Dynamics dynamics{};
  Measurement measurement{};
};

std::vector<ModelToken> random_model(std::int64_t tokens, std::int64_t dim, std::int64_t channels) {
  const Case c({.tokens = tokens, .heads = 1, .key_dim = dim, .value_dim = channels});
  std::vector<ModelToken> model;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto seed = static_cast<std::uint64_t>(100 * t);
    Matrix transition = random_matrix(dim, dim, seed + 1);
    scale(transition, 0.5);
    const Matrix root = random_matrix(dim, dim, seed + 2);
    Matrix noise = multiply(root, transposed(root));
    add(noise, 0.2, reference::identity(dim));
    model.push_back({.dynamics = {transition, random_matrix(dim, channels, seed + 3), noise},
                     .measurement = {row(c.k, t), row(c.v, t), 0.3 + c.beta.at(0, t, 0, 0)}});
  }
  return model;
}

/// Adds weight · (Σ_blocks coefficientᵀ s_block − target)² to the normal equations of all states s_0 … s_T at once:
/// for D rows at a time, (J s − b)ᵀ W (J s − b) with J = [left at block i, right at block j].
void add_term(Matrix& normal, Matrix& rhs, std::int64_t block, const Matrix& jacobian, const Matrix& weight,
              const Matrix& target) {
  const Matrix weighted = multiply(transposed(jacobian), weight);
  const Matrix square = multiply(weighted, jacobian);
  const Matrix linear = multiply(weighted, target);
  for (std::int64_t i = 0; i < square.rows; ++i) {
    for (std::int64_t j = 0; j < square.columns; ++j) normal(block + i, block + j) += square(i, j);
    for (std::int64_t j = 0; j < linear.columns; ++j) rhs(block + i, j) += linear(i, j);
  }
}

TEST(KalmanFilter, IsTheMostProbableStateGivenAllMeasurements) {
  constexpr std::int64_t tokens = 6, dim = 3, channels = 2;
  constexpr double sigma = 1.7;
  const auto model = random_model(tokens, dim, channels);
  Filter filter = reference::prior(dim, channels, sigma);

  // −2 log p of all states at once is a quadratic form; its minimum is the estimate, its inverse Hessian the
  // covariance.
  const std::int64_t size = (tokens + 1) * dim;
  Matrix normal(size, size);
  Matrix rhs(size, channels);
  add_term(normal, rhs, 0, reference::identity(dim), reference::identity(dim, 1.0 / sigma), Matrix(dim, channels));
  for (std::int64_t t = 1; t <= tokens; ++t) {
    const auto& [dynamics, measurement] = model[static_cast<std::size_t>(t - 1)];
    Matrix transition(dim, 2 * dim);  // s_t − A s_{t-1}
    Matrix key(1, dim);
    Matrix value(1, channels);
    for (std::int64_t i = 0; i < dim; ++i) {
      for (std::int64_t j = 0; j < dim; ++j) transition(i, j) = -dynamics.transition(i, j);
      transition(i, dim + i) = 1.0;
      key(0, i) = measurement.key[static_cast<std::size_t>(i)];
    }
    value.data = measurement.value;
    add_term(normal, rhs, (t - 1) * dim, transition, inverse(dynamics.process_noise), dynamics.input);
    add_term(normal, rhs, t * dim, key, reference::identity(1, 1.0 / measurement.noise), value);

    kalman_step(filter, dynamics, measurement);

    const std::int64_t known = (t + 1) * dim;  // the states up to t
    Matrix normal_so_far(known, known);
    Matrix rhs_so_far(known, channels);
    for (std::int64_t i = 0; i < known; ++i) {
      for (std::int64_t j = 0; j < known; ++j) normal_so_far(i, j) = normal(i, j);
      for (std::int64_t j = 0; j < channels; ++j) rhs_so_far(i, j) = rhs(i, j);
    }
    const Matrix states = solve_columns(normal_so_far, rhs_so_far);
    const Matrix covariances = inverse(normal_so_far);
    Matrix estimate(dim, channels);
    Matrix covariance(dim, dim);
    for (std::int64_t i = 0; i < dim; ++i) {
      for (std::int64_t j = 0; j < channels; ++j) estimate(i, j) = states(t * dim + i, j);
      for (std::int64_t j = 0; j < dim; ++j) covariance(i, j) = covariances(t * dim + i, t * dim + j);
    }
    expect_equal(filter.estimate, estimate, 1e-11, "estimate at token " + std::to_string(t));
    expect_equal(filter.covariance, covariance, 1e-11, "covariance at token " + std::to_string(t));
  }
}

TEST(KalmanFilter, GainIsTheCorrectedCovarianceTimesTheKeyOverTheNoise) {
  const auto model = random_model(5, 4, 2);
  Filter filter = reference::prior(4, 2, 0.8);
  for (const auto& [dynamics, measurement] : model) {
    Filter predicted = filter;
    predict(predicted, dynamics);
    const Correction got = kalman_step(filter, dynamics, measurement);
    const Vector gain = scaled(multiply(filter.covariance, measurement.key), 1.0 / measurement.noise);
    EXPECT_LE(relative_error(got.gain, gain), 1e-12);
    Vector innovation = measurement.value;
    add(innovation, -1.0, multiply_transposed(predicted.estimate, measurement.key));
    EXPECT_LE(relative_error(got.innovation, innovation), 1e-14);
  }
}

// ---- recursive least squares ----------------------------------------------------------------------------------------

/// Σ_i w_i k_i k_iᵀ + λI and Σ_i w_i k_i v_iᵀ over tokens 0 … t, each token weighing what its decay has left of it.
struct Past {
  Matrix hessian{};
  Matrix moments{};
};

Past whole_past(const Case& c, std::int64_t t, double ridge) {
  Past past{.hessian = reference::identity(c.spec().key_dim, ridge),
            .moments = Matrix(c.spec().key_dim, c.spec().value_dim)};
  for (std::int64_t i = 0; i <= t; ++i) {
    double weight = c.beta.at(0, i, 0, 0);
    for (std::int64_t l = i + 1; c.log_decay && l <= t; ++l) weight *= std::exp(c.log_decay.at(0, l, 0, 0));
    add_outer(past.hessian, weight, row(c.k, i), row(c.k, i));
    add_outer(past.moments, weight, row(c.k, i), row(c.v, i));
  }
  return past;
}

CaseSpec identity_spec(bool decay) {
  return {.tokens = 30, .heads = 1, .key_dim = 7, .value_dim = 5, .log_decay = decay, .alpha = false, .skip = 0.1};
}

TEST(SteadyStateFilter, IsRidgeRegressionOverTheWholePastAtEveryToken) {
  const Case c(identity_spec(false));
  LeastSquares filter(7, 5, 0.4);
  for (std::int64_t t = 0; t < 30; ++t) {
    filter.step(row(c.k, t), row(c.v, t), c.beta.at(0, t, 0, 0));
    const Past past = whole_past(c, t, 0.4);
    expect_equal(filter.filter.estimate, solve_columns(past.hessian, past.moments), 1e-12, "estimate");
    expect_equal(filter.filter.covariance, inverse(past.hessian), 1e-12, "inverse Hessian");
  }
}

TEST(SteadyStateFilter, IsTheGeneralFilterOfAStateThatStandsStill) {
  CaseSpec spec = identity_spec(false);
  spec.skip = 0.0;  // a weight of 0 is a noise without bound
  const Case c(spec);
  LeastSquares least_squares(7, 5, 0.4);
  Filter general = reference::prior(7, 5, 1.0 / 0.4);
  const Dynamics still{.transition = reference::identity(7), .process_noise = Matrix(7, 7)};
  for (std::int64_t t = 0; t < 30; ++t) {
    const double eta = c.beta.at(0, t, 0, 0);
    // The update as the paper prints it, with S transposed: S − (S k − v) kᵀΦ / (1/η + kᵀΦk).
    const Matrix before = least_squares.filter.estimate;
    const Vector spread = multiply(least_squares.filter.covariance, row(c.k, t));
    Vector miss = multiply_transposed(before, row(c.k, t));
    add(miss, -1.0, row(c.v, t));
    Matrix printed = before;
    add_outer(printed, -1.0 / (1.0 / eta + dot(row(c.k, t), spread)), spread, miss);

    least_squares.step(row(c.k, t), row(c.v, t), eta);
    kalman_step(general, still, {row(c.k, t), row(c.v, t), 1.0 / eta});
    expect_equal(least_squares.filter.estimate, printed, 1e-13, "the printed update");
    expect_equal(least_squares.filter.estimate, general.estimate, 1e-13, "estimate");
    expect_equal(least_squares.filter.covariance, general.covariance, 1e-13, "covariance");
  }
}

/// o_t of the operator with an exact solve and a constant ridge, which may differ by token.
Vector gated_kalmanet_output(Memory& memory, const Case& c, std::int64_t t, double ridge, double* variance) {
  const Settings settings{.options = {.ridge = ridge, .solver = Solver::exact, .ridge_mode = RidgeMode::constant}};
  reference::Token token{.q = row(c.q, t), .k = row(c.k, t), .v = row(c.v, t), .beta = c.beta.at(0, t, 0, 0)};
  if (c.log_decay) token.decay = std::exp(c.log_decay.at(0, t, 0, 0));
  remember(memory, token, settings.options);
  const Vector x = answer(regression(memory.h, settings), token.q, settings.options);
  *variance = dot(token.q, x);
  return multiply_transposed(memory.u, x);
}

TEST(GatedKalmaNet, WithAnExactSolveAndAConstantRidgeIsTheSteadyStateFilter) {
  CaseSpec spec = identity_spec(false);
  spec.options = {.ridge = 0.4, .solver = Solver::exact, .ridge_mode = RidgeMode::constant};
  const Case c(spec);
  const OwnedOutputs out = c.outputs();
  reference::forward(c.problem(), out.pointers());
  LeastSquares filter(7, 5, 0.4);
  for (std::int64_t t = 0; t < 30; ++t) {
    filter.step(row(c.k, t), row(c.v, t), c.beta.at(0, t, 0, 0));
    const Vector q = row(c.q, t);
    EXPECT_LE(relative_error(row(out.o, t), multiply_transposed(filter.filter.estimate, q)), 1e-12) << t;
    // q·x is the variance of what the filter would answer.
    EXPECT_NEAR(out.variance.at(0, t, 0, 0), dot(q, multiply(filter.filter.covariance, q)), 1e-12) << t;
  }
}

TEST(GatedKalmaNet, WithDecayIsTheFadingFilterWhoseRidgeFadesToo) {
  const Case c(identity_spec(true));
  LeastSquares filter(7, 5, 0.4);
  Memory memory{.h = Matrix(7, 7), .u = Matrix(7, 5)};
  double zeta = 1.0;
  for (std::int64_t t = 0; t < 30; ++t) {
    const double decay = std::exp(c.log_decay.at(0, t, 0, 0));
    zeta *= decay;
    filter.step(row(c.k, t), row(c.v, t), c.beta.at(0, t, 0, 0), decay);
    double variance = 0.0;
    const Vector o = gated_kalmanet_output(memory, c, t, zeta * 0.4, &variance);
    const Vector q = row(c.q, t);
    EXPECT_LE(relative_error(o, multiply_transposed(filter.filter.estimate, q)), 1e-11) << t;
    EXPECT_NEAR(variance, dot(q, multiply(filter.filter.covariance, q)), 1e-11 * variance) << t;
    const Past past = whole_past(c, t, zeta * 0.4);
    expect_equal(filter.filter.estimate, solve_columns(past.hessian, past.moments), 1e-11, "estimate");
  }
}

TEST(GatedKalmaNet, IsItsTwoHalvesOneAfterTheOther) {
  CaseSpec spec{.tokens = 20, .key_dim = 6, .value_dim = 4, .alpha = false, .h0 = true, .u0 = true};
  spec.options.scale = 0.6;
  const Case whole(spec);
  const OwnedOutputs both = whole.outputs();
  reference::forward(whole.problem(), both.pointers());

  Problem solve = whole.problem();
  solve.options.part = Part::solve;
  OwnedOutputs x = whole.outputs();
  x.o = Array(DType::float64, whole.q.shape());
  reference::forward(solve, x.pointers());
  Problem recall = whole.problem();
  recall.options.part = Part::memory;
  recall.q = x.o.view();
  const OwnedOutputs o = whole.outputs();
  reference::forward(recall, o.pointers());

  expect_close(o.o, both.o, 1e-13, "scale · Uᵀx");
  expect_close(x.h, both.h, 0.0, "h");
  expect_close(o.u, both.u, 0.0, "u");
}

// ---- the sister layers ----------------------------------------------------------------------------------------------

/// S ← (I − β k kᵀ) diag(decay) S + β k vᵀ, the recurrence the delta-rule layers publish.
void delta_rule(Matrix& memory, const Vector& decay, double beta, const Vector& k, const Vector& v) {
  for (std::int64_t i = 0; i < memory.rows; ++i)
    for (std::int64_t j = 0; j < memory.columns; ++j) memory(i, j) *= decay[static_cast<std::size_t>(i)];
  const Vector recalled = multiply_transposed(memory, k);
  add_outer(memory, -beta, k, recalled);
  add_outer(memory, beta, k, v);
}

class SisterLayer : public ::testing::TestWithParam<FrozenFilter> {};

TEST_P(SisterLayer, IsTheFilterWithItsCovarianceHeldAtTheIdentity) {
  const Case c({.tokens = 25, .heads = 1, .key_dim = 6, .value_dim = 4});
  const Matrix channel_decay = random_matrix(25, 6, 77);
  Matrix filtered(6, 4);
  Matrix published(6, 4);
  for (std::int64_t t = 0; t < 25; ++t) {
    Vector decay(6, 1.0);
    for (std::int64_t i = 0; i < 6; ++i) {
      double& own = decay[static_cast<std::size_t>(i)];
      if (GetParam() == FrozenFilter::gated_delta_net) own = std::exp(c.log_decay.at(0, t, 0, 0));
      if (GetParam() == FrozenFilter::kimi_delta_attention) own = std::exp(-std::abs(channel_decay(t, i)));
    }
    const double beta = c.beta.at(0, t, 0, 0);
    frozen_step(GetParam(), filtered, decay, {row(c.k, t), row(c.v, t), noise_of(GetParam(), decay, beta)});
    delta_rule(published, decay, beta, row(c.k, t), row(c.v, t));
    expect_equal(filtered, published, 1e-13, "memory at token " + std::to_string(t));
  }
}

TEST_P(SisterLayer, WritesAsStronglyAsItsNoiseSays) {
  const Vector decay(3, GetParam() == FrozenFilter::delta_net ? 1.0 : 0.6);
  const double r = 0.9;
  const double beta =
      GetParam() == FrozenFilter::gated_delta_net ? 1.0 / (1.0 + r / (0.6 * 0.6 + 1.0)) : 1.0 / (1.0 + r);
  EXPECT_NEAR(noise_of(GetParam(), decay, beta), r, 1e-14);
  Matrix memory(3, 1);
  const Correction got = frozen_step(GetParam(), memory, decay, {{0.6, 0.0, 0.8}, {2.0}, r});
  EXPECT_LE(relative_error(got.gain, {0.6 * beta, 0.0, 0.8 * beta}), 1e-14);
}

INSTANTIATE_TEST_SUITE_P(Reference, SisterLayer,
                         ::testing::Values(FrozenFilter::delta_net, FrozenFilter::gated_delta_net,
                                           FrozenFilter::kimi_delta_attention),
                         [](const auto& layer) {
                           for (const auto& [name, entry] : reference::kFrozenFilterNames) {
                             if (entry == layer.param) return std::string(name);
                           }
                           return std::string("unknown");
                         });

// ---- the spectrum and the weights -----------------------------------------------------------------------------------

/// The eigenvalues of a symmetric matrix by Jacobi rotations.
Vector eigenvalues(Matrix m) {
  for (int sweep = 0; sweep < 30; ++sweep) {
    for (std::int64_t p = 0; p < m.rows; ++p) {
      for (std::int64_t q = p + 1; q < m.rows; ++q) {
        if (m(p, q) == 0.0) continue;
        const double angle = 0.5 * std::atan2(2.0 * m(p, q), m(q, q) - m(p, p));
        const double c = std::cos(angle), s = std::sin(angle);
        for (std::int64_t i = 0; i < m.rows; ++i) {
          const double left = m(i, p), right = m(i, q);
          m(i, p) = c * left - s * right;
          m(i, q) = s * left + c * right;
        }
        for (std::int64_t i = 0; i < m.rows; ++i) {
          const double upper = m(p, i), lower = m(q, i);
          m(p, i) = c * upper - s * lower;
          m(q, i) = s * upper + c * lower;
        }
      }
    }
  }
  Vector result;
  for (std::int64_t i = 0; i < m.rows; ++i) result.push_back(m(i, i));
  return result;
}

TEST(AdaptiveRidge, BoundsTheConditionOfEveryToken) {
  for (const double a : {0.005, 0.02, 0.3}) {
    for (const Keys keys : {Keys::spread, Keys::silu}) {
      const Case c({.tokens = 12, .heads = 1, .key_dim = 6, .strongest_decay = 3.0, .keys = keys});
      Memory memory{.h = Matrix(6, 6), .u = Matrix(6, 6)};
      for (std::int64_t t = 0; t < 12; ++t) {
        const reference::Token token{.q = row(c.q, t),
                                     .k = row(c.k, t),
                                     .v = row(c.v, t),
                                     .decay = std::exp(c.log_decay.at(0, t, 0, 0)),
                                     .beta = c.beta.at(0, t, 0, 0)};
        remember(memory, token, {});
        const auto r = reference::regression(memory.h, {.options = {.ridge = a}});
        Matrix dense = r.system.matrix;
        add(dense, a, reference::identity(6));
        const Vector spectrum = eigenvalues(dense);
        const auto [least, most] = std::minmax_element(spectrum.begin(), spectrum.end());
        EXPECT_GE(*least, r.system.lower - 1e-14);
        EXPECT_LE(*most, r.system.upper + 1e-14);
        EXPECT_LE(*most / *least, (1.0 + a) / a * (1.0 + 1e-12));
        if (t == 0) {  // one key: the bound is met, so it is the best one
          EXPECT_NEAR(*most / *least, (1.0 + a) / a, 1e-9);
        }
      }
    }
  }
}

TEST(ChebyshevWeights, DecreaseToTheirFixedPointAtTheRateOfTheLemma) {
  for (const double kappa : {1.5, 10.0, 51.0, 1000.0}) {
    const double rho = (kappa - 1.0) / (kappa + 1.0);
    const double fixed = 2.0 * (1.0 - std::sqrt(1.0 - rho * rho)) / (rho * rho);
    const double rate = rho * (std::sqrt(kappa) - 1.0) / (std::sqrt(kappa) + 1.0);
    EXPECT_NEAR(rate, 1.0 - std::sqrt(1.0 - rho * rho), 1e-14);
    EXPECT_NEAR(fixed, 4.0 / (4.0 - rho * rho * fixed), 1e-12);
    EXPECT_GT(fixed, 1.0);

    const Vector weights = reference::chebyshev_weights(rho, 60);
    ASSERT_EQ(weights.size(), 61u);
    EXPECT_EQ(weights[0], 2.0);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      EXPECT_GE(weights[i], fixed - 1e-14);
      EXPECT_LE(weights[i] - fixed, std::pow(rate, i) * (2.0 - fixed) + 1e-14);
      EXPECT_GE(4.0 - rho * rho * weights[i], 2.0);
      EXPECT_LE(4.0 - rho * rho * weights[i], 4.0);
      if (i > 0) {
        EXPECT_LE(weights[i], weights[i - 1] + 1e-15);
      }
    }
  }
}

}  // namespace
}  // namespace gka::kernels::test
