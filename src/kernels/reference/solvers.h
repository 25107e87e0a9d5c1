// The five ways to solve (M + diag(ridge)) x = q for a symmetric positive semidefinite M, on one description of the
// system. All but the factorisation touch M only through products M ξ.
//
// Chebyshev, gradient descent and Nesterov are one loop,
//
//   ξ_{-1} = 0,  ξ_0 = c_0 q,  ξ_i = y − c_i ((M + diag(ridge)) z − q),  y = ξ_{i-1} + m_i (ξ_{i-1} − ξ_{i-2}),
//
// and differ in the table of steps c_i and momenta m_i and in where the slope is taken: z = ξ_{i-1}, or Nesterov's
// z = y. The tables come from bounds μ ≤ L on the spectrum alone.
#pragma once

#include <cstdint>
#include <vector>

#include "gka/types.h"
#include "kernels/reference/matrix.h"

namespace gka::kernels::reference {

struct System {
  Matrix matrix{};     // M
  Vector ridge{};      // added to its diagonal
  double lower = 0.0;  // μ, at most the smallest eigenvalue of M + diag(ridge)
  double upper = 0.0;  // L, at least the largest; the iterations diverge if it is too small
};

/// (M + diag(ridge)) x
Vector product_with(const System& system, const Vector& x);

/// The iterates, in order; the last one is the answer.
using Trace = std::vector<Vector>;

/// Chebyshev's weights ω_0 … ω_r: ω_0 = 2, ω_i = 4/(4 − ρ²ω_{i-1}). They decrease to ω* = 2(1 − √(1−ρ²))/ρ².
Vector chebyshev_weights(double rho, std::int64_t iterations);

struct Schedule {
  Vector step{};      // c_0 … c_r
  Vector momentum{};  // m_0 … m_r; the first is not used
  bool look_ahead = false;
};

/// The tables of chebyshev, gradient_descent or nesterov.
Schedule schedule(Solver solver, double lower, double upper, std::int64_t iterations);

/// ξ_r of the loop above; `trace` receives ξ_0 … ξ_r.
Vector iterate(const System& system, const Vector& q, const Schedule& schedule, Trace* trace = nullptr);

/// What one step of conjugate gradients starts from and computes; enough to go back through it.
struct ConjugateStep {
  Vector direction{};      // p
  Vector image{};          // (M + diag(ridge)) p
  Vector residual{};       // after the step
  double energy = 0.0;     // ‖residual‖² before the step
  double curvature = 0.0;  // pᵀ(M + diag(ridge))p
};

/// Conjugate gradients from 0. Stops early where nothing is left to do: a residual or a curvature of exactly 0.
Vector conjugate_gradient(const System& system, const Vector& q, std::int64_t iterations, Trace* trace = nullptr,
                          std::vector<ConjugateStep>* steps = nullptr);

/// The matrix written out and factorised.
Vector exact(const System& system, const Vector& q);

/// x by the solver of that name. `iterations` means nothing to `exact`.
Vector solve(Solver solver, const System& system, const Vector& q, std::int64_t iterations, Trace* trace = nullptr);

}  // namespace gka::kernels::reference
