// The coefficients of the solvers that are one recurrence with fixed weights (Chebyshev, gradient descent, Nesterov),
//
//   y_i = ξ_{i-1} + m_i (ξ_{i-1} − ξ_{i-2}),   ξ_i = y_i − s_i (A z_i − b),   ξ_0 = s_0 b,   ξ_{-1} = 0
//
// for a spectrum in [ρ, top], and their derivatives by ρ. All constexpr, so that device code may call them too.
#pragma once

#include <cmath>
#include <cstdint>

#include "gka/types.h"

namespace gka::kernels {

/// s_i and m_i of one token and their derivatives by ρ.
struct Coefficients {
  double s = 0, m = 0;
  double ds = 0, dm = 0;
};

constexpr bool has_schedule(Solver solver) {
  switch (solver) {
    case Solver::chebyshev:
    case Solver::gradient_descent:
    case Solver::nesterov: return true;
    case Solver::conjugate_gradient:
    case Solver::exact: break;
  }
  return false;
}

/// The coefficients for a spectrum in [ρ, top], top = ρ + 1 (adaptive; no derivative is wanted there) or 1.
class Schedule {
 public:
  constexpr Schedule(Solver solver, double top, double rho)
      : solver_(solver), top_(top), rho_(rho), root_(std::sqrt(3 * top / rho + 1)) {}

  constexpr Coefficients start() {
    const double sum = top_ + rho_;
    omega_ = 2;
    d_omega_ = 0;
    return {.s = 2 / sum, .m = 0, .ds = -2 / (sum * sum), .dm = 0};
  }

  constexpr Coefficients step(std::int64_t i) {
    switch (solver_) {
      case Solver::chebyshev: return chebyshev();
      case Solver::gradient_descent: return start();
      case Solver::nesterov: return nesterov(i);
      case Solver::conjugate_gradient:
      case Solver::exact: break;  // have none
    }
    return {};
  }

 private:
  constexpr Coefficients chebyshev() {
    const double sum = top_ + rho_, ratio = (top_ - rho_) / sum, d_ratio = -2 * top_ / (sum * sum);
    const double below = 4 - ratio * ratio * omega_;
    const double d_below = -2 * ratio * d_ratio * omega_ - ratio * ratio * d_omega_;
    omega_ = 4 / below;
    d_omega_ = -4 * d_below / (below * below);
    return {
        .s = 2 * omega_ / sum, .m = omega_ - 1, .ds = 2 * d_omega_ / sum - 2 * omega_ / (sum * sum), .dm = d_omega_};
  }

  constexpr Coefficients nesterov(std::int64_t i) const {
    const double below = 3 * top_ + rho_, d_root = -1.5 * top_ / (rho_ * rho_ * root_);
    const double momentum = (root_ - 2) / (root_ + 2), d_momentum = 4 * d_root / ((root_ + 2) * (root_ + 2));
    return {.s = 4 / below, .m = i == 1 ? 0 : momentum, .ds = -4 / (below * below), .dm = i == 1 ? 0 : d_momentum};
  }

  Solver solver_;
  double top_, rho_;
  double root_;  // √(3κ + 1)
  double omega_ = 2, d_omega_ = 0;
};

}  // namespace gka::kernels
