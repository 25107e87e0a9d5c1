// The gradient of a solver's answer through every one of its steps: recompute the iterates, then walk back over them.
// Beside it, the paper's way for Chebyshev, which needs the last two iterates only.
#pragma once

#include "kernels/reference/solvers.h"

namespace gka::kernels::reference {

/// The gradient of a number that depends on x = solve(system, q), with respect to all that went in.
struct SystemGradient {
  Vector d_q{};
  Matrix d_matrix{};  // not symmetrised
  Vector d_ridge{};
  double d_lower = 0.0;
  double d_upper = 0.0;
};

SystemGradient unrolled(Solver solver, const System& system, const Vector& q, std::int64_t iterations,
                        const Vector& d_x);

/// How far Chebyshev can be run backwards: steps until what is left of dξ is worth less than 1% of the rounding `eps`.
std::int64_t reversible_steps(double lower, double upper, double eps);

/// Chebyshev's d_q and d_matrix from ξ_r and ξ_{r-1} alone (ξ_{-1} = 0 for r = 0), running the iteration backwards:
///
///   ξ_{i-2} = (ξ_i − A_i ξ_{i-1} − c_i q)/b_i,   A_i = ω_i I − c_i (M + diag(ridge)),   b_i = 1 − ω_i
///
/// The iterates recovered so lose digits as fast as dξ fades, so the products dξ_i ξ_{i-1}ᵀ stay good until something
/// overflows; the reversal stops before, after `reversible_steps`. The bounds count as constants here.
SystemGradient reversed_chebyshev(const System& system, const Vector& q, std::int64_t iterations, const Vector& last,
                                  const Vector& one_before, const Vector& d_x, double eps);

}  // namespace gka::kernels::reference
