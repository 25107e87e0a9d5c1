// What a mixer is built from: plain structs, one per kind of mixer, with the published defaults.
//
// `fields` names every choice once: reading and writing JSON, --help and error messages go through it. A visitor takes
// (name, field), where a field is bool, int64, double or an enum with a table of names (gka::name_of, gka::parse_name).
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>

#include "gka/types.h"

namespace gka::layers {

/// The write weight in H and U, where β = sigmoid(b_proj x): β as in the paper, or (β + 1e-6)² as in published
/// checkpoints, which scale both k and v.
enum class BetaWeight : std::uint8_t { published, paper };
inline constexpr std::array<NameTable<BetaWeight>, 2> kBetaWeightNames{{
    {"published", BetaWeight::published},
    {"paper", BetaWeight::paper},
}};
constexpr const auto& names_of(BetaWeight) { return kBetaWeightNames; }

/// What linear attention does to q and k.
enum class FeatureMap : std::uint8_t { elementwise_product, elu, relu, identity };
inline constexpr std::array<NameTable<FeatureMap>, 4> kFeatureMapNames{{
    {"elementwise_product", FeatureMap::elementwise_product},  // two learned maps, multiplied
    {"elu", FeatureMap::elu},                                  // elu(x) + 1
    {"relu", FeatureMap::relu},
    {"identity", FeatureMap::identity},
}};
constexpr const auto& names_of(FeatureMap) { return kFeatureMapNames; }

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

/// Gated DeltaNet (`gdn_config`). Heads as for GKA. As a rival of its own it is published with expand_v = 2.
struct GdnConfig {
  bool use_gate = true;
  bool use_short_conv = true;     // false: SiLU alone
  bool allow_neg_eigval = false;  // β in (0, 2)
  std::int64_t conv_size = 4;
  bool conv_bias = false;
  double norm_eps = 1e-5;
  std::int64_t kv_proj_rank = 0;
  bool kv_learnable_residual = false;
  std::int64_t num_q_heads = 0;  // 0: the attention's
  std::int64_t num_k_heads = 0;
  std::int64_t num_v_heads = 0;
  std::int64_t head_dim = 0;  // 0: the model's
  double expand_k = 1.0;
  double expand_v = 1.0;

  template <typename Self, typename Visit>
  static void fields(Self& c, Visit&& visit) {
    visit("use_gate", c.use_gate);
    visit("use_short_conv", c.use_short_conv);
    visit("allow_neg_eigval", c.allow_neg_eigval);
    visit("conv_size", c.conv_size);
    visit("conv_bias", c.conv_bias);
    visit("norm_eps", c.norm_eps);
    visit("kv_proj_rank", c.kv_proj_rank);
    visit("kv_learnable_residual", c.kv_learnable_residual);
    visit("num_q_heads", c.num_q_heads);
    visit("num_k_heads", c.num_k_heads);
    visit("num_v_heads", c.num_v_heads);
    visit("head_dim", c.head_dim);
    visit("expand_k", c.expand_k);
    visit("expand_v", c.expand_v);
  }
};

/// DeltaNet (`deltanet_config`).
struct DeltaNetConfig {
  std::int64_t num_heads = 0;  // 0: the attention's
  std::int64_t head_dim = 0;   // 0: the model's
  double expand_k = 1.0;
  double expand_v = 1.0;
  std::int64_t conv_size = 4;  // 0: SiLU alone
  bool use_gate = false;
  bool allow_neg_eigval = false;
  double norm_eps = 1e-5;

  template <typename Self, typename Visit>
  static void fields(Self& c, Visit&& visit) {
    visit("num_heads", c.num_heads);
    visit("head_dim", c.head_dim);
    visit("expand_k", c.expand_k);
    visit("expand_v", c.expand_v);
    visit("conv_size", c.conv_size);
    visit("use_gate", c.use_gate);
    visit("allow_neg_eigval", c.allow_neg_eigval);
    visit("norm_eps", c.norm_eps);
  }
};

/// Kimi Delta Attention (`kda_config`).
struct KdaConfig {
  std::int64_t num_heads = 0;  // 0: the attention's
  std::int64_t head_dim = 0;   // 0: the model's
  double expand_v = 1.0;
  std::int64_t conv_size = 4;  // 0: SiLU alone
  bool allow_neg_eigval = false;
  double norm_eps = 1e-5;

  template <typename Self, typename Visit>
  static void fields(Self& c, Visit&& visit) {
    visit("num_heads", c.num_heads);
    visit("head_dim", c.head_dim);
    visit("expand_v", c.expand_v);
    visit("conv_size", c.conv_size);
    visit("allow_neg_eigval", c.allow_neg_eigval);
    visit("norm_eps", c.norm_eps);
  }
};

/// MesaNet (`mesa_config`).
struct MesaConfig {
  std::int64_t num_heads = 0;  // 0: the attention's
  std::int64_t head_dim = 0;   // 0: the model's
  std::int64_t conv_size = 4;  // of q and k; 0: SiLU alone
  bool use_gate = false;
  double lambda_lower_bound = 0.25;
  std::int64_t num_iter = 30;
  double norm_eps = 1e-5;

  template <typename Self, typename Visit>
  static void fields(Self& c, Visit&& visit) {
    visit("num_heads", c.num_heads);
    visit("head_dim", c.head_dim);
    visit("conv_size", c.conv_size);
    visit("use_gate", c.use_gate);
    visit("lambda_lower_bound", c.lambda_lower_bound);
    visit("num_iter", c.num_iter);
    visit("norm_eps", c.norm_eps);
  }
};

/// Gated linear attention (`gla_config`). Its widths are shares of the model's.
struct GlaConfig {
  std::int64_t num_heads = 4;  // 0: the attention's
  double expand_k = 0.5;       // keys of all heads together, of hidden_size
  double expand_v = 1.0;
  std::int64_t conv_size = 0;
  bool use_gate = true;
  std::int64_t gate_low_rank_dim = 16;
  double gate_logit_normalizer = 16.0;
  double norm_eps = 1e-5;

  template <typename Self, typename Visit>
  static void fields(Self& c, Visit&& visit) {
    visit("num_heads", c.num_heads);
    visit("expand_k", c.expand_k);
    visit("expand_v", c.expand_v);
    visit("conv_size", c.conv_size);
    visit("use_gate", c.use_gate);
    visit("gate_low_rank_dim", c.gate_low_rank_dim);
    visit("gate_logit_normalizer", c.gate_logit_normalizer);
    visit("norm_eps", c.norm_eps);
  }
};

/// RetNet's multi-scale retention (`retnet_config`). Its widths are shares of the model's.
struct RetNetConfig {
  std::int64_t num_heads = 0;  // 0: the attention's
  double expand_k = 1.0;
  double expand_v = 2.0;
  bool use_gate = true;
  double rope_theta = 10000.0;
  double norm_eps = 1e-5;

  template <typename Self, typename Visit>
  static void fields(Self& c, Visit&& visit) {
    visit("num_heads", c.num_heads);
    visit("expand_k", c.expand_k);
    visit("expand_v", c.expand_v);
    visit("use_gate", c.use_gate);
    visit("rope_theta", c.rope_theta);
    visit("norm_eps", c.norm_eps);
  }
};

/// Linear attention (`linear_attn_config`). Its widths are shares of the model's.
struct LinearAttentionConfig {
  std::int64_t num_heads = 0;  // 0: the attention's
  double expand_k = 1.0;
  double expand_v = 1.0;
  FeatureMap feature_map = FeatureMap::elementwise_product;
  double norm_eps = 1e-5;

  template <typename Self, typename Visit>
  static void fields(Self& c, Visit&& visit) {
    visit("num_heads", c.num_heads);
    visit("expand_k", c.expand_k);
    visit("expand_v", c.expand_v);
    visit("feature_map", c.feature_map);
    visit("norm_eps", c.norm_eps);
  }
};

/// Mamba2 (`mamba2_config`).
struct Mamba2Config {
  double expand = 2.0;
  std::int64_t head_dim = 64;
  std::int64_t state_size = 128;
  std::int64_t n_groups = 1;
  std::int64_t conv_size = 4;
  bool conv_bias = true;
  double norm_eps = 1e-5;

  template <typename Self, typename Visit>
  static void fields(Self& c, Visit&& visit) {
    visit("expand", c.expand);
    visit("head_dim", c.head_dim);
    visit("state_size", c.state_size);
    visit("n_groups", c.n_groups);
    visit("conv_size", c.conv_size);
    visit("conv_bias", c.conv_bias);
    visit("norm_eps", c.norm_eps);
  }
};

/// Softmax attention, full and sliding (`attention_config`). As published it has no convolution; with one it sees a
/// token's neighbours before it compares them, as the other layers do.
struct AttentionConfig {
  std::int64_t conv_size = 0;  // of q, k and v; 0: none
  bool qk_norm = true;         // Llama and Qwen2 have none
  bool qkv_bias = false;       // Qwen2: q, k and v have a bias and the output has none

  template <typename Self, typename Visit>
  static void fields(Self& c, Visit&& visit) {
    visit("conv_size", c.conv_size);
    visit("qk_norm", c.qk_norm);
    visit("qkv_bias", c.qkv_bias);
  }
};

/// How the frequencies of the rotary embedding are changed for texts longer than those a model was first trained on.
enum class RopeType : std::uint8_t { plain, linear, llama3, yarn };
inline constexpr std::array<NameTable<RopeType>, 4> kRopeTypeNames{{
    {"default", RopeType::plain},
    {"linear", RopeType::linear},
    {"llama3", RopeType::llama3},
    {"yarn", RopeType::yarn},
}};
constexpr const auto& names_of(RopeType) { return kRopeTypeNames; }

/// `rope_parameters` beside `rope_theta`. Each type reads some of the numbers; 0 is for those a file leaves out.
struct RopeConfig {
  RopeType rope_type = RopeType::plain;
  double factor = 0.0;                                   // longer by so much
  std::int64_t original_max_position_embeddings = 0;     // than this
  double low_freq_factor = 0.0, high_freq_factor = 0.0;  // llama3
  double beta_fast = 0.0, beta_slow = 0.0;               // yarn
  double attention_factor = 0.0, mscale = 0.0, mscale_all_dim = 0.0;
  bool truncate = true;

  template <typename Self, typename Visit>
  static void fields(Self& c, Visit&& visit) {
    visit("rope_type", c.rope_type);
    visit("factor", c.factor);
    visit("original_max_position_embeddings", c.original_max_position_embeddings);
    visit("low_freq_factor", c.low_freq_factor);
    visit("high_freq_factor", c.high_freq_factor);
    visit("beta_fast", c.beta_fast);
    visit("beta_slow", c.beta_slow);
    visit("attention_factor", c.attention_factor);
    visit("mscale", c.mscale);
    visit("mscale_all_dim", c.mscale_all_dim);
    visit("truncate", c.truncate);
  }
};

/// What all mixers of a model share, and each kind's own choices.
struct MixerConfig {
  std::int64_t hidden_size = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::int64_t head_dim = 0;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  RopeConfig rope{};
  std::int64_t sliding_window = 0;  // of SWA: how many tokens a token sees, itself included
  bool attention_bias = false;
  double initializer_range = 0.02;      // projections: normal with this deviation
  double conv_initializer_range = 0.0;  // convolutions: likewise; 0: uniform within ±width^−½

  AttentionConfig attention{};
  GkaConfig gka{};
  GdnConfig gdn{};
  DeltaNetConfig deltanet{};
  KdaConfig kda{};
  MesaConfig mesa{};
  GlaConfig gla{};
  RetNetConfig retnet{};
  LinearAttentionConfig linear_attention{};
  Mamba2Config mamba2{};
};

/// The groups of a model's configuration file that hold a mixer's choices: visit(key, config.*member).
template <typename Self, typename Visit>
void visit_groups(Self& c, Visit&& visit) {
  visit("attention_config", c.attention);
  visit("gka_config", c.gka);
  visit("gdn_config", c.gdn);
  visit("deltanet_config", c.deltanet);
  visit("kda_config", c.kda);
  visit("mesa_config", c.mesa);
  visit("gla_config", c.gla);
  visit("retnet_config", c.retnet);
  visit("linear_attn_config", c.linear_attention);
  visit("mamba2_config", c.mamba2);
}

}  // namespace gka::layers
