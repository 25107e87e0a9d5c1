// What the mixers of a model are built from: what they share, and each kind's own choices, which stand in its header
// (making.h says how).
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>

#include "gka/types.h"
#include "layers/attention.h"
#include "layers/delta.h"
#include "layers/gka.h"
#include "layers/linear_attention.h"
#include "layers/mamba2.h"
#include "layers/mesanet.h"

namespace gka::layers {

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
