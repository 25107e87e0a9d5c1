// The backward pass of one head over one sequence, token by token. What is particular to this operator is the gradient
// through the solve; it comes in two kinds, implicit (solve once more) and unrolled (through every iteration). The
// rest is the recurrence walked backwards, with
//
//   Ḡ_i = Σ_{t≥i} (Π_{i<l≤t} γ_l) dH_t    and    R̄_i the same for U,
//
// all the gradient that reaches H_i and U_i.
#pragma once

#include <functional>
#include <vector>

#include "kernels/reference/recurrence.h"

namespace gka::kernels::reference {

/// Through x_t = solve(H_t + λ_t I, q_t), given dx_t.
struct SolveGradient {
  Vector d_q{};      // y_t
  Matrix d_h{};      // dH_t, symmetric
  Vector d_ridge{};  // by channel, for a λ that is a diagonal
};

/// y = solve(H + λI, dx), dH = −½(y xᵀ + x yᵀ) − a (xᵀy) H/f; the last term if λ is adaptive and differentiated.
SolveGradient implicit_gradient(const Regression& regression, const Vector& x, const Vector& d_x,
                                const Options& options);

/// The gradient of what the solver computed, through all its steps and, if asked, through f in λ, L and μ.
SolveGradient unrolled_gradient(const Regression& regression, const Vector& q, const Vector& x, const Vector& d_x,
                                const Options& options);

struct TokenGradient {
  Vector d_q{}, d_k{}, d_v{};
  double d_log_decay = 0.0;
  double d_beta = 0.0;
  double d_alpha = 0.0;
};

struct SequenceGradient {
  std::vector<TokenGradient> tokens{};
  Memory d_initial{};  // d_initial.h is symmetric
  Vector d_ridge{};    // summed over the tokens
};

/// `d_o[t]` comes in for every token (dx_t with Part::solve) and `d_final` for the last state.
SequenceGradient sequence_gradient(const std::vector<Token>& tokens, const Memory& initial, const Settings& settings,
                                   const std::vector<Vector>& d_o, const Memory& d_final);

}  // namespace gka::kernels::reference
