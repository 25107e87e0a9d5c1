// The recurrence, one token of one head at a time, in the paper's order:
//
//   H_t = γ_t H_{t-1} + β_t k_t k_tᵀ      U_t = γ_t U_{t-1} + β_t k_t v_tᵀ      λ_t = a ‖H_t‖_F
//   x_t = solve(H_t + λ_t I, q_t)         o_t = s U_tᵀ (q_t + α_t (x_t − q_t))
//
// With an adaptive ridge the solver sees H_t/‖H_t‖_F + aI, whose spectrum lies in [a, 1+a] whatever the token: the same
// table of steps serves all of them, and a memory that has faded to 1e-30 is solved as well as a fresh one.
#pragma once

#include "gka/kernels.h"
#include "kernels/reference/solvers.h"

namespace gka::kernels::reference {

struct Token {
  Vector q{}, k{}, v{};
  double decay = 1.0;  // γ
  double beta = 1.0;
  double alpha = 1.0;
};

struct Memory {
  Matrix h{};  // D×D, symmetric; empty with Part::memory
  Matrix u{};  // D×V; empty with Part::solve
};

/// One head's choices. `ridge_diagonal` is the head's own row, empty if λ is one number.
struct Settings {
  Options options{};
  Vector ridge_diagonal{};
};

/// γ as H sees it: 1 if the keys are not to fade.
double key_decay(const Token& token, const Options& options);

/// The lines for H_t and U_t.
void remember(Memory& memory, const Token& token, const Options& options);

/// (H_t + λ_t I) x = q_t as the solver sees it: the system of x̃ = unit · x.
struct Regression {
  System system{};
  double norm = 0.0;   // f = ‖H_t‖_F
  double ridge = 0.0;  // λ_t; with a diagonal its mean
  double unit = 1.0;   // f if the ridge is adaptive, else 1
  bool empty = false;  // nothing is remembered and λ_t is 0: the answer is 0
};

Regression regression(const Matrix& h, const Settings& settings);

/// x_t. Also what the implicit gradient solves again with another right-hand side.
Vector answer(const Regression& regression, const Vector& q, const Options& options);

/// q_t + α_t (x_t − q_t), or q_t without a solve: what U_t is asked with.
Vector mixed_query(const Token& token, const Vector& x, const Options& options);

}  // namespace gka::kernels::reference
