#include "kernels/reference/solvers.h"

#include <stdexcept>
#include <utility>

namespace gka::kernels::reference {
namespace {

Schedule chebyshev_schedule(double lower, double upper, std::int64_t iterations) {
  const Vector weights = chebyshev_weights((upper - lower) / (upper + lower), iterations);
  Schedule table{.step = {2.0 / (upper + lower)}, .momentum = {0.0}};  // c_0 is without ω_0
  for (std::size_t i = 1; i < weights.size(); ++i) {
    table.step.push_back(2.0 * weights[i] / (upper + lower));
    table.momentum.push_back(weights[i] - 1.0);
  }
  return table;
}

Schedule gradient_descent_schedule(double lower, double upper, std::int64_t iterations) {
  const auto size = static_cast<std::size_t>(iterations + 1);
  return {.step = Vector(size, 2.0 / (upper + lower)), .momentum = Vector(size, 0.0)};
}

/// The best constant step and momentum for quadratics. The first step has no momentum: nothing has moved yet.
Schedule nesterov_schedule(double lower, double upper, std::int64_t iterations) {
  const auto size = static_cast<std::size_t>(iterations + 1);
  const double root = std::sqrt(3.0 * upper / lower + 1.0);
  Schedule table{.step = Vector(size, 4.0 / (3.0 * upper + lower)),
                 .momentum = Vector(size, (root - 2.0) / (root + 2.0)),
                 .look_ahead = true};
  table.step[0] = 2.0 / (upper + lower);
  if (iterations >= 1) table.momentum[1] = 0.0;
  return table;
}

}  // namespace

Vector product_with(const System& system, const Vector& x) {
  Vector result = multiply_transposed(system.matrix, x);
  for (std::size_t i = 0; i < x.size(); ++i) result[i] += system.ridge[i] * x[i];
  return result;
}

Vector chebyshev_weights(double rho, std::int64_t iterations) {
  Vector weights{2.0};
  for (std::int64_t i = 1; i <= iterations; ++i) weights.push_back(4.0 / (4.0 - rho * rho * weights.back()));
  return weights;
}

Schedule schedule(Solver solver, double lower, double upper, std::int64_t iterations) {
  switch (solver) {
    case Solver::chebyshev: return chebyshev_schedule(lower, upper, iterations);
    case Solver::gradient_descent: return gradient_descent_schedule(lower, upper, iterations);
    case Solver::nesterov: return nesterov_schedule(lower, upper, iterations);
    case Solver::conjugate_gradient:
    case Solver::exact: break;
  }
  throw std::invalid_argument("solver " + std::string(name_of(solver)) + " has no schedule of steps");
}

Vector iterate(const System& system, const Vector& q, const Schedule& schedule, Trace* trace) {
  Vector previous(q.size(), 0.0);                // ξ_{i-2}
  Vector current = scaled(q, schedule.step[0]);  // ξ_{i-1}
  if (trace) trace->push_back(current);
  for (std::size_t i = 1; i < schedule.step.size(); ++i) {
    Vector next = current;
    add(next, schedule.momentum[i], current);
    add(next, -schedule.momentum[i], previous);
    const Vector image = product_with(system, schedule.look_ahead ? next : current);
    add(next, -schedule.step[i], image);
    add(next, schedule.step[i], q);
    previous = std::exchange(current, std::move(next));
    if (trace) trace->push_back(current);
  }
  return current;
}

Vector conjugate_gradient(const System& system, const Vector& q, std::int64_t iterations, Trace* trace,
                          std::vector<ConjugateStep>* steps) {
  Vector x(q.size(), 0.0);
  Vector residual = q;
  Vector direction = q;
  double energy = dot(residual, residual);
  for (std::int64_t i = 0; i < iterations && energy != 0.0; ++i) {
    const Vector image = product_with(system, direction);
    const double curvature = dot(direction, image);
    if (curvature == 0.0) break;
    const double length = energy / curvature;
    add(x, length, direction);
    add(residual, -length, image);
    const double next_energy = dot(residual, residual);
    if (steps) steps->push_back({direction, image, residual, energy, curvature});
    scale(direction, next_energy / energy);
    add(direction, 1.0, residual);
    energy = next_energy;
    if (trace) trace->push_back(x);
  }
  return x;
}

Vector exact(const System& system, const Vector& q) {
  Matrix m = system.matrix;
  for (std::int64_t i = 0; i < m.rows; ++i) m(i, i) += system.ridge[static_cast<std::size_t>(i)];
  return factor_and_solve(std::move(m), q);
}

Vector solve(Solver solver, const System& system, const Vector& q, std::int64_t iterations, Trace* trace) {
  switch (solver) {
    case Solver::conjugate_gradient: return conjugate_gradient(system, q, iterations, trace);
    case Solver::exact: {
      Vector x = exact(system, q);
      if (trace) trace->push_back(x);
      return x;
    }
    case Solver::chebyshev:
    case Solver::gradient_descent:
    case Solver::nesterov: break;
  }
  return iterate(system, q, schedule(solver, system.lower, system.upper, iterations), trace);
}

}  // namespace gka::kernels::reference
