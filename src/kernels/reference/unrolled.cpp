#include "kernels/reference/unrolled.h"

#include <utility>

namespace gka::kernels::reference {
namespace {

struct BoundGradient {
  double d_lower = 0.0;
  double d_upper = 0.0;
};

// Back from the tables of steps and momenta to the bounds they were made from.

/// c_i = 2ω_i/(L+μ), c_0 = 2/(L+μ), m_i = ω_i − 1, ω_i = 4/(4 − ρ²ω_{i-1}), ρ = (L−μ)/(L+μ).
BoundGradient chebyshev_bounds(double lower, double upper, const Vector& d_step, const Vector& d_momentum) {
  const double sum = upper + lower;
  const double rho = (upper - lower) / sum;
  const Vector weights = chebyshev_weights(rho, static_cast<std::int64_t>(d_step.size()) - 1);
  double d_sum = -d_step[0] * 2.0 / (sum * sum);
  double d_rho_squared = 0.0;
  double d_weight = 0.0;  // what reaches ω_i from ω_{i+1}
  for (std::size_t i = d_step.size() - 1; i >= 1; --i) {
    d_weight += d_momentum[i] + d_step[i] * 2.0 / sum;
    d_sum -= d_step[i] * 2.0 * weights[i] / (sum * sum);
    const double slope = d_weight * weights[i] * weights[i] / 4.0;
    d_rho_squared += slope * weights[i - 1];
    d_weight = slope * rho * rho;
  }
  const double d_rho = 2.0 * rho * d_rho_squared;
  return {.d_lower = d_sum - d_rho * 2.0 * upper / (sum * sum), .d_upper = d_sum + d_rho * 2.0 * lower / (sum * sum)};
}

/// c_i = 2/(L+μ).
BoundGradient gradient_descent_bounds(double lower, double upper, const Vector& d_step, const Vector&) {
  double d_sum = 0.0;
  for (const double d : d_step) d_sum -= d * 2.0 / ((upper + lower) * (upper + lower));
  return {.d_lower = d_sum, .d_upper = d_sum};
}

/// c_0 = 2/(L+μ), c_i = 4/(3L+μ), m_i = (ϱ − 2)/(ϱ + 2) with ϱ = √(3L/μ + 1), from i = 2 on.
BoundGradient nesterov_bounds(double lower, double upper, const Vector& d_step, const Vector& d_momentum) {
  const double first = -d_step[0] * 2.0 / ((upper + lower) * (upper + lower));
  double d_steps = 0.0;
  for (std::size_t i = 1; i < d_step.size(); ++i) d_steps += d_step[i];
  const double weighted = -d_steps * 4.0 / ((3.0 * upper + lower) * (3.0 * upper + lower));

  const double root = std::sqrt(3.0 * upper / lower + 1.0);
  double d_root = 0.0;
  for (std::size_t i = 2; i < d_momentum.size(); ++i) d_root += d_momentum[i] * 4.0 / ((root + 2.0) * (root + 2.0));
  const double d_kappa = d_root * 1.5 / root;
  return {.d_lower = first + weighted - d_kappa * upper / (lower * lower),
          .d_upper = first + 3.0 * weighted + d_kappa / lower};
}

BoundGradient bounds_of(Solver solver, double lower, double upper, const Vector& d_step, const Vector& d_momentum) {
  switch (solver) {
    case Solver::chebyshev: return chebyshev_bounds(lower, upper, d_step, d_momentum);
    case Solver::gradient_descent: return gradient_descent_bounds(lower, upper, d_step, d_momentum);
    case Solver::nesterov: return nesterov_bounds(lower, upper, d_step, d_momentum);
    case Solver::conjugate_gradient:
    case Solver::exact: break;  // have no bounds
  }
  return {};
}

/// M + diag(ridge) is one matrix to the solver.
void add_to_operator(SystemGradient& gradient, double c, const Vector& left, const Vector& right) {
  add_outer(gradient.d_matrix, c, left, right);
  for (std::size_t i = 0; i < left.size(); ++i) gradient.d_ridge[i] += c * left[i] * right[i];
}

SystemGradient zero_gradient(const System& system) {
  const auto n = static_cast<std::size_t>(system.matrix.rows);
  return {.d_q = Vector(n, 0.0), .d_matrix = Matrix(system.matrix.rows, system.matrix.rows), .d_ridge = Vector(n, 0.0)};
}

/// Back through ξ_i = y − c_i (A z − q), y = ξ_{i-1} + m_i (ξ_{i-1} − ξ_{i-2}), for i = r … 0.
SystemGradient unrolled_iterations(Solver solver, const System& system, const Vector& q, std::int64_t iterations,
                                   const Vector& d_x) {
  const Schedule table = schedule(solver, system.lower, system.upper, iterations);
  Trace trace;
  iterate(system, q, table, &trace);

  SystemGradient result = zero_gradient(system);
  Vector d_step(trace.size(), 0.0);
  Vector d_momentum(trace.size(), 0.0);
  Vector d_current = d_x;            // dξ_i
  Vector d_previous(q.size(), 0.0);  // dξ_{i-1}, as far as it is known
  for (std::size_t i = trace.size() - 1; i >= 1; --i) {
    const double c = table.step[i];
    const double m = table.momentum[i];
    Vector moved = trace[i - 1];  // ξ_{i-1} − ξ_{i-2}
    if (i >= 2) add(moved, -1.0, trace[i - 2]);
    Vector point = trace[i - 1];  // z
    if (table.look_ahead) add(point, m, moved);

    Vector slope = product_with(system, point);
    add(slope, -1.0, q);
    d_step[i] = -dot(d_current, slope);
    add(result.d_q, c, d_current);
    add_to_operator(result, -c, d_current, point);

    const Vector d_point = scaled(product_with(system, d_current), -c);
    Vector d_base = d_current;  // dy
    if (table.look_ahead) add(d_base, 1.0, d_point);
    d_momentum[i] = dot(d_base, moved);

    Vector d_before(q.size(), 0.0);  // dξ_{i-2}
    add(d_before, -m, d_base);
    add(d_previous, 1.0 + m, d_base);
    if (!table.look_ahead) add(d_previous, 1.0, d_point);
    d_current = std::exchange(d_previous, std::move(d_before));
  }
  d_step[0] = dot(d_current, q);
  add(result.d_q, table.step[0], d_current);

  const BoundGradient d = bounds_of(solver, system.lower, system.upper, d_step, d_momentum);
  result.d_lower = d.d_lower;
  result.d_upper = d.d_upper;
  return result;
}

/// Back through x' = x + a p, r' = r − a A p, p' = r' + b p with a = ‖r‖²/pᵀAp and b = ‖r'‖²/‖r‖².
SystemGradient unrolled_conjugate_gradient(const System& system, const Vector& q, std::int64_t iterations,
                                           const Vector& d_x) {
  std::vector<ConjugateStep> steps;
  conjugate_gradient(system, q, iterations, nullptr, &steps);

  SystemGradient result = zero_gradient(system);
  Vector d_residual(q.size(), 0.0);
  Vector d_direction(q.size(), 0.0);
  double d_energy = 0.0;
  for (std::size_t i = steps.size(); i-- > 0;) {
    const ConjugateStep& step = steps[i];
    const double length = step.energy / step.curvature;
    const double turn = dot(step.residual, step.residual) / step.energy;

    add(d_residual, 1.0, d_direction);
    const double d_turn = dot(d_direction, step.direction);
    scale(d_direction, turn);
    add(d_residual, 2.0 * (d_energy + d_turn / step.energy), step.residual);
    d_energy = -d_turn * turn / step.energy;

    const double d_length = dot(d_x, step.direction) - dot(d_residual, step.image);
    Vector d_image = scaled(d_residual, -length);
    add(d_direction, length, d_x);
    d_energy += d_length / step.curvature;
    const double d_curvature = -d_length * length / step.curvature;
    add(d_direction, d_curvature, step.image);
    add(d_image, d_curvature, step.direction);

    add_to_operator(result, 1.0, d_image, step.direction);
    add(d_direction, 1.0, product_with(system, d_image));
  }
  if (steps.empty()) return result;  // x stayed 0
  add(result.d_q, 1.0, d_residual);
  add(result.d_q, 1.0, d_direction);
  add(result.d_q, 2.0 * d_energy, q);
  return result;
}

/// There are no steps to go through: x = A⁻¹q, so dq = A⁻¹dx and dA = −dq xᵀ.
SystemGradient exact_gradient(const System& system, const Vector& q, const Vector& d_x) {
  SystemGradient result = zero_gradient(system);
  result.d_q = exact(system, d_x);
  add_to_operator(result, -1.0, result.d_q, exact(system, q));
  return result;
}

}  // namespace

SystemGradient unrolled(Solver solver, const System& system, const Vector& q, std::int64_t iterations,
                        const Vector& d_x) {
  switch (solver) {
    case Solver::exact: return exact_gradient(system, q, d_x);
    case Solver::conjugate_gradient: return unrolled_conjugate_gradient(system, q, iterations, d_x);
    case Solver::chebyshev:
    case Solver::gradient_descent:
    case Solver::nesterov: break;
  }
  return unrolled_iterations(solver, system, q, iterations, d_x);
}

std::int64_t reversible_steps(double lower, double upper, double eps) {
  const double root = std::sqrt(upper / lower);
  if (root <= 1.0) return 0;  // one step solves it, and no later one can be undone
  return static_cast<std::int64_t>(std::log(0.01 * eps) / std::log((root - 1.0) / (root + 1.0)));
}

SystemGradient reversed_chebyshev(const System& system, const Vector& q, std::int64_t iterations, const Vector& last,
                                  const Vector& one_before, const Vector& d_x, double eps) {
  const Schedule table = schedule(Solver::chebyshev, system.lower, system.upper, iterations);
  const std::int64_t stop = iterations - reversible_steps(system.lower, system.upper, eps);
  SystemGradient result = zero_gradient(system);
  Vector current = last;         // ξ_i
  Vector previous = one_before;  // ξ_{i-1}
  Vector d_current = d_x;        // dξ_i
  Vector d_next(q.size(), 0.0);  // dξ_{i+1}
  double next_momentum = 0.0;    // −b_{i+1}
  for (std::int64_t i = iterations; i >= 1; --i) {
    const double c = table.step[static_cast<std::size_t>(i)];
    const double m = table.momentum[static_cast<std::size_t>(i)];
    add(result.d_q, c, d_current);
    if (i > stop) {
      add_to_operator(result, -c, d_current, previous);
      Vector before = scaled(previous, 1.0 + m);  // A_i ξ_{i-1} + c_i q − ξ_i, over −b_i = m_i
      add(before, -c, product_with(system, previous));
      add(before, c, q);
      add(before, -1.0, current);
      for (double& value : before) value /= m;
      current = std::exchange(previous, std::move(before));
    }
    Vector d_previous = scaled(d_current, 1.0 + m);  // A_i dξ_i + b_{i+1} dξ_{i+1}
    add(d_previous, -c, product_with(system, d_current));
    add(d_previous, -next_momentum, d_next);
    next_momentum = m;
    d_next = std::exchange(d_current, std::move(d_previous));
  }
  add(result.d_q, table.step[0], d_current);
  return result;
}

}  // namespace gka::kernels::reference
