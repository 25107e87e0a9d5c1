// The delta rules: Gated DeltaNet, DeltaNet and Kimi Delta Attention.
#pragma once

#include <cstdint>

#include "layers/making.h"

namespace gka::layers {

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

MakeMixer make_gated_deltanet;
MakeMixer make_deltanet;
MakeMixer make_kda;

}  // namespace gka::layers
