// The scale σ by which a token's system is divided, and the gradient that goes through it: rules on which the CPU and
// the CUDA kernels agree. All constexpr, so that device code may call them too.
//
// (H + λI) x = q is solved as (σH + ρ) x̃ = q, x = σ x̃:
//
//   adaptive ridge:  σ = 1/‖H‖_F,        ρ = a          spectrum in [a, 1 + a] for every token
//   constant ridge:  σ = 1/(‖H‖_F + λ),  ρ = σλ         spectrum in [ρ, 1]
//   diagonal ridge:  σ = 1,              ρ_i = Λ_i      (conjugate gradients and exact solves only)
//
// A token with nothing remembered (‖H‖_F = 0, adaptive) has σ = 0 and the answer 0.
#pragma once

#include <limits>

#include "gka/kernels.h"

namespace gka::kernels {

struct SystemScale {
  double sigma = 0;  // 0: nothing to solve
  double rho = 1;    // of what is not solved only some number
};

/// `norm` is ‖H‖_F, `reach` what of the chunk's first state is left, `largest` the largest number of the arithmetic:
/// a memory below the inverse of that has itself underflowed, and nothing is remembered. `lost`: H is not finite.
constexpr SystemScale system_scale(const Options& options, double norm, double reach, double largest, bool lost) {
  const bool diagonal = options.ridge_diagonal != nullptr, constant = options.ridge_mode == RidgeMode::constant;
  const bool finite = norm - norm == 0;
  double sigma = diagonal ? 1 : constant ? 1 / (norm + options.ridge) : norm > 0 ? 1 / norm : 0;
  if (lost || !finite || !(sigma < std::numeric_limits<double>::max()) || sigma * reach > largest) sigma = 0;
  return {.sigma = sigma,
          .rho = diagonal || (constant && sigma == 0) ? 1
                 : constant                           ? options.ridge * sigma
                                                      : options.ridge};
}

/// How much of a query q lies in what was written: qᵀHx = ‖q‖² − q·Λx, over ‖q‖², where q·Λx = q·ρx̃. Nothing, where
/// nothing is remembered.
constexpr double certainty_of(double sigma, double q_rho_x, double q_squared) {
  return sigma == 0 ? 0 : q_squared > 0 ? 1 - q_rho_x / q_squared : 1;
}

/// What a report says of a token is made of, channel by channel: q, x̃, what (σH x̃ − q) has there, and ρ there.
struct ReportSums {
  double with_ridge = 0, without = 0;  // squares of the residuals
  double variance = 0, unexplained = 0, squares = 0, mean_ridge = 0;

  constexpr void add(double q, double x, double plain, double ridge, double sigma, int dim) {
    const double full = plain + ridge * x;
    with_ridge += full * full;
    without += plain * plain;
    variance += q * x * sigma;
    unexplained += q * ridge * x;
    squares += q * q;
    mean_ridge += ridge / dim;
  }
  /// λ; of a diagonal its mean.
  constexpr double ridge(const Options& options, double norm) const {
    return options.ridge_mode == RidgeMode::adaptive ? options.ridge * norm
           : options.ridge_diagonal != nullptr       ? mean_ridge
                                                     : options.ridge;
  }
};

/// The upper end of the spectrum of σH + ρ; its lower end is ρ.
constexpr double spectrum_top(bool adaptive, double rho) { return adaptive ? 1 + rho : 1; }

/// Whether the gradient goes through every iteration. An exact solve has none.
constexpr bool unrolls(const Options& options) {
  return options.gradient == Gradient::unrolled && options.solver != Solver::exact;
}

/// σ dL/dσ of a token. `dots` is x̃·σdx (unrolled) or x̃·y, `inner` ⟨dL/d(σH), σH⟩, `d_rho` dL/dρ through the schedule.
constexpr double gradient_through_scale(const Options& options, double dots, double inner, double rho, double d_rho) {
  const bool adaptive = options.ridge_mode == RidgeMode::adaptive;
  if (!unrolls(options)) return adaptive ? options.ridge * dots : 0;
  if (adaptive) return dots + inner;
  // Conjugate gradients have no bounds on the spectrum that would depend on σ.
  return options.solver != Solver::conjugate_gradient ? dots + inner + rho * d_rho : 0;
}

/// ‖H‖_F dL/d‖H‖_F of that: σ = 1/f or 1/(f + λ), so dσ/df = −σ².
constexpr double gradient_of_norm(const Options& options, double through_scale, const SystemScale& s, double norm) {
  const bool counts = options.ridge_gradient && s.sigma > 0 && norm > 0;
  return counts ? -through_scale * (s.sigma * norm) : 0;
}

}  // namespace gka::kernels
