// Where the layer comes from: the Kalman filter of a linear Gaussian model whose state is a memory,
//
//   s_t = A_t s_{t-1} + B_t u_t + w_t,  w_t ~ N(0, Q_t)         v_t = k_tᵀ s_t + noise of variance r_t
//
// with one state per value channel, all sharing A, Q, r and the keys, and so one covariance: the estimate is a D×V
// matrix whose columns are the channels. Three filters, from general to frozen:
//
//   the general one             optimal whatever the dynamics; the prior is N(0, σI)
//   recursive least squares     a state that does not move: ridge regression over the whole past, at every t
//   covariance held at I        DeltaNet, Gated DeltaNet and Kimi Delta Attention
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>

#include "kernels/reference/matrix.h"

namespace gka::kernels::reference {

struct Filter {
  Matrix estimate{};    // ŝ_t, D×V
  Matrix covariance{};  // Σ_t, D×D
};

/// ŝ_0 = 0, Σ_0 = σI.
Filter prior(std::int64_t key_dim, std::int64_t value_dim, double sigma);

struct Dynamics {
  Matrix transition{};     // A_t, D×D
  Matrix input{};          // B_t u_t, D×V; empty for none
  Matrix process_noise{};  // Q_t, D×D
};

struct Measurement {
  Vector key{};
  Vector value{};
  double noise = 1.0;  // r_t
};

struct Correction {
  Vector gain{};        // G_t
  Vector innovation{};  // v_t − k_tᵀ(A_t ŝ_{t-1} + B_t u_t)
};

/// ŝ ← A ŝ + B u, Σ ← A Σ Aᵀ + Q.
void predict(Filter& filter, const Dynamics& dynamics);

/// G = Σk/(kᵀΣk + r), ŝ ← ŝ + G (v − kᵀŝ), Σ ← (I − G kᵀ) Σ, from the predicted ŝ and Σ.
Correction correct(Filter& filter, const Measurement& measurement);

/// One token of the general filter.
Correction kalman_step(Filter& filter, const Dynamics& dynamics, const Measurement& measurement);

/// Ridge regression, min λ‖S‖² + Σ η_i ‖Sᵀk_i − v_i‖², one token at a time: S is `estimate` and Φ, the inverse of the
/// Hessian, `covariance`. With decay γ < 1 all that came before weighs γ times as much, the ridge included: it fades to
/// λ Π γ_i. A weight η of 0 leaves the memory as it is.
struct LeastSquares {
  Filter filter{};

  LeastSquares(std::int64_t key_dim, std::int64_t value_dim, double ridge);
  void step(const Vector& key, const Vector& value, double weight, double decay = 1.0);
};

/// Sister layers, as the filter that forgets what it knew about its own error: Σ_{t-1} = I at every step. They differ
/// in the process noise they assume beside the decay A_t = diag(decay).
enum class FrozenFilter : std::uint8_t {
  delta_net,             // A = I, Q = 0:             β = 1/(1 + r)
  gated_delta_net,       // A = αI, Q = I:            β = 1/(1 + r/(α² + 1))
  kimi_delta_attention,  // A = diag(α), Q = I − AAᵀ: β = 1/(1 + r); the predicted covariance is I
};

inline constexpr std::array<std::pair<std::string_view, FrozenFilter>, 3> kFrozenFilterNames{{
    {"delta_net", FrozenFilter::delta_net},
    {"gated_delta_net", FrozenFilter::gated_delta_net},
    {"kimi_delta_attention", FrozenFilter::kimi_delta_attention},
}};

/// The measurement noise r that makes a write strength β in (0, 1], for keys of norm 1. `decay` is per key channel (all
/// equal for gated_delta_net, ones for delta_net).
double noise_of(FrozenFilter layer, const Vector& decay, double beta);

/// One token: `memory` (D×V) is decayed and corrected. It is asked with memoryᵀ q.
Correction frozen_step(FrozenFilter layer, Matrix& memory, const Vector& decay, const Measurement& measurement);

}  // namespace gka::kernels::reference
