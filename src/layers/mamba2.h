// Mamba2.
#pragma once

#include <cstdint>

#include "layers/making.h"

namespace gka::layers {

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

MakeMixer make_mamba2;

}  // namespace gka::layers
