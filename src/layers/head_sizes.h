// The heads of a layer whose queries, keys and values may have different numbers of them: Gated KalmaNet's and Gated
// DeltaNet's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "base/limits.h"
#include "layers/config.h"
#include "layers/projection.h"

namespace gka::layers {

/// Of keys or values, as the memories that solve take them; throws one sentence where it is none.
inline std::int64_t head_size(const char* name, std::int64_t size) {
  if (size >= 1 && size <= kLargestDim) return size;
  throw std::invalid_argument(std::string(name) + " of a head has " + std::to_string(size) +
                              " channels; the memory takes 1 to " + std::to_string(kLargestDim) + ".");
}

struct HeadSizes {
  std::int64_t q_heads = 0, k_heads = 0, v_heads = 0;
  std::int64_t heads = 0;  // the most of them, which the others are copied or expanded to
  std::int64_t key_dim = 0, value_dim = 0;
};

/// `c` are the choices of a kind that has them.
template <typename Choices>
HeadSizes grouped_heads(const Choices& c, const MixerConfig& config) {
  const auto head_dim = or_else(c.head_dim, config.head_dim);
  HeadSizes s{.q_heads = or_else(c.num_q_heads, config.num_attention_heads),
              .k_heads = or_else(c.num_k_heads, config.num_key_value_heads),
              .v_heads = or_else(c.num_v_heads, config.num_key_value_heads),
              .key_dim = whole(c.expand_k, head_dim, "expand_k"),
              .value_dim = whole(c.expand_v, head_dim, "expand_v")};
  s.heads = std::max({s.q_heads, s.k_heads, s.v_heads});
  if (s.heads % s.q_heads != 0) {
    throw std::invalid_argument("num_q_heads is " + std::to_string(s.q_heads) + ", which does not divide the " +
                                std::to_string(s.heads) + " heads of the layer.");
  }
  return s;
}

}  // namespace gka::layers
