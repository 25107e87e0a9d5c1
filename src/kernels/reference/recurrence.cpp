#include "kernels/reference/recurrence.h"

#include <numeric>
#include <utility>

namespace gka::kernels::reference {
namespace {

Regression adaptive_regression(const Matrix& h, double ridge) {
  const double f = norm(h);
  Regression result{.norm = f, .ridge = ridge * f, .unit = f, .empty = f == 0.0};
  if (result.empty) return result;
  result.system = {
      .matrix = h, .ridge = Vector(static_cast<std::size_t>(h.rows), ridge), .lower = ridge, .upper = 1.0 + ridge};
  for (double& value : result.system.matrix.data) value /= f;  // 1/f may overflow where H/f does not
  return result;
}

Regression constant_regression(const Matrix& h, Vector diagonal) {
  const double f = norm(h);
  const auto [least, most] = std::minmax_element(diagonal.begin(), diagonal.end());
  Regression result{.norm = f};
  result.ridge = std::accumulate(diagonal.begin(), diagonal.end(), 0.0) / static_cast<double>(diagonal.size());
  result.system.lower = *least;
  result.system.upper = f + *most;
  result.system.matrix = h;
  result.system.ridge = std::move(diagonal);
  return result;
}

}  // namespace

double key_decay(const Token& token, const Options& options) { return options.decay_keys ? token.decay : 1.0; }

void remember(Memory& memory, const Token& token, const Options& options) {
  if (options.part != Part::memory) {
    scale(memory.h, key_decay(token, options));
    if (token.beta != 0.0) add_outer(memory.h, token.beta, token.k, token.k);
  }
  if (options.part != Part::solve) {
    scale(memory.u, token.decay);
    if (token.beta != 0.0) add_outer(memory.u, token.beta, token.k, token.v);
  }
}

Regression regression(const Matrix& h, const Settings& settings) {
  const Options& options = settings.options;
  if (options.ridge_mode == RidgeMode::adaptive) return adaptive_regression(h, options.ridge);
  if (!settings.ridge_diagonal.empty()) return constant_regression(h, settings.ridge_diagonal);
  return constant_regression(h, Vector(static_cast<std::size_t>(h.rows), options.ridge));
}

Vector answer(const Regression& regression, const Vector& q, const Options& options) {
  if (regression.empty) return Vector(q.size(), 0.0);
  Vector x = solve(options.solver, regression.system, q, options.iterations);
  for (double& value : x) value /= regression.unit;
  return x;
}

Vector mixed_query(const Token& token, const Vector& x, const Options& options) {
  if (options.part == Part::memory) return token.q;
  Vector mixed = token.q;
  for (std::size_t i = 0; i < mixed.size(); ++i) mixed[i] += token.alpha * (x[i] - token.q[i]);
  return mixed;
}

}  // namespace gka::kernels::reference
