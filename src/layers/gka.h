// Gated KalmaNet.
#pragma once

#include <array>
#include <cstdint>

#include "gka/types.h"
#include "layers/making.h"

namespace gka::layers {

/// The write weight in H and U, where β = sigmoid(b_proj x): β as in the paper, or (β + 1e-6)² as in published
/// checkpoints, which scale both k and v.
enum class BetaWeight : std::uint8_t { published, paper };
inline constexpr std::array<NameTable<BetaWeight>, 2> kBetaWeightNames{{
    {"published", BetaWeight::published},
    {"paper", BetaWeight::paper},
}};
constexpr const auto& names_of(BetaWeight) { return kBetaWeightNames; }

/// Gated KalmaNet (`gka_config`). Heads are those of the attention, key and value heads shared in groups likewise.
struct GkaConfig {
  std::int64_t num_iter = 30;  // 0: no solve, q itself asks the memory
  double ridge_strength = 0.02;
  Solver solver_type = Solver::chebyshev;
  RidgeMode ridge_mode = RidgeMode::adaptive;  // constant: λ = ridge_strength
  Gradient gradient = Gradient::implicit;
  bool bp_lambda = true;  // false: no gradient through λ

  bool use_alpha_connection = true;
  bool use_beta_gate = true;
  BetaWeight beta_weight = BetaWeight::published;
  bool use_forgetting_gate = true;
  bool use_forgetting_gate_kk = true;  // false: H is not decayed
  bool use_gate = true;                // the output's
  bool gla_rescale = true;             // answers scaled by (size of a key)^−½

  std::int64_t conv_size = 4;  // 0: no convolution at all
  bool use_q_conv = true;      // false: the projection as it is
  bool use_k_conv = true;
  bool use_v_conv = true;
  double norm_eps = 1e-6;

  std::int64_t kv_proj_rank = 0;       // > 0: grouped keys and values get a low-rank part per query head
  bool kv_learnable_residual = false;  // with it: the repetition of key/value heads is a learned matrix

  std::int64_t num_q_heads = 0;  // 0: the attention's
  std::int64_t num_k_heads = 0;
  std::int64_t num_v_heads = 0;
  std::int64_t head_dim = 0;  // 0: the model's
  double expand_k = 1.0;
  double expand_v = 1.0;
  std::int64_t sketch_dim = 0;  // > 0: the solve runs in so many learned dimensions

  template <typename Self, typename Visit>
  static void fields(Self& c, Visit&& visit) {
    visit("num_iter", c.num_iter);
    visit("ridge_strength", c.ridge_strength);
    visit("solver_type", c.solver_type);
    visit("ridge_mode", c.ridge_mode);
    visit("gradient", c.gradient);
    visit("bp_lambda", c.bp_lambda);
    visit("use_alpha_connection", c.use_alpha_connection);
    visit("use_beta_gate", c.use_beta_gate);
    visit("beta_weight", c.beta_weight);
    visit("use_forgetting_gate", c.use_forgetting_gate);
    visit("use_forgetting_gate_kk", c.use_forgetting_gate_kk);
    visit("use_gate", c.use_gate);
    visit("gla_rescale", c.gla_rescale);
    visit("conv_size", c.conv_size);
    visit("use_q_conv", c.use_q_conv);
    visit("use_k_conv", c.use_k_conv);
    visit("use_v_conv", c.use_v_conv);
    visit("norm_eps", c.norm_eps);
    visit("kv_proj_rank", c.kv_proj_rank);
    visit("kv_learnable_residual", c.kv_learnable_residual);
    visit("num_q_heads", c.num_q_heads);
    visit("num_k_heads", c.num_k_heads);
    visit("num_v_heads", c.num_v_heads);
    visit("head_dim", c.head_dim);
    visit("expand_k", c.expand_k);
    visit("expand_v", c.expand_v);
    visit("sketch_dim", c.sketch_dim);
  }
};

MakeMixer make_gka;

}  // namespace gka::layers
