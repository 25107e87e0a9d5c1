// Softmax attention, full and over a sliding window.
#pragma once

#include <cstdint>

#include "layers/making.h"

namespace gka::layers {

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

MakeMixer make_attention;
MakeMixer make_sliding_window_attention;

}  // namespace gka::layers
