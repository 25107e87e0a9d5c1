// MesaNet.
#pragma once

#include <cstdint>

#include "layers/making.h"

namespace gka::layers {

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

MakeMixer make_mesanet;

}  // namespace gka::layers
