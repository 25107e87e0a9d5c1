// Memories that only add: gated linear attention, RetNet and linear attention.
#pragma once

#include <array>
#include <cstdint>

#include "gka/types.h"
#include "layers/making.h"

namespace gka::layers {

/// What linear attention does to q and k.
enum class FeatureMap : std::uint8_t { elementwise_product, elu, relu, identity };
inline constexpr std::array<NameTable<FeatureMap>, 4> kFeatureMapNames{{
    {"elementwise_product", FeatureMap::elementwise_product},  // two learned maps, multiplied
    {"elu", FeatureMap::elu},                                  // elu(x) + 1
    {"relu", FeatureMap::relu},
    {"identity", FeatureMap::identity},
}};
constexpr const auto& names_of(FeatureMap) { return kFeatureMapNames; }

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

MakeMixer make_gla;
MakeMixer make_retnet;
MakeMixer make_linear_attention;

}  // namespace gka::layers
