// Small models of any pattern, and what tests compare.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randint.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "layers/kinds.h"
#include "models/decoder.h"

namespace gka::models::test {

inline ModelConfig tiny_config(const std::string& pattern, bool tied = false) {
  return parse_training_config(
      {
          {"vocab_size", 61},
          {"hidden_size", 32},
          {"intermediate_size", 40},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"head_dim", 8},
          {"sliding_window", 5},
          {"tie_word_embeddings", tied},
          {"initializer_range", 0.2},
          {"hybrid_override_pattern", pattern},
          {"mamba2_config", {{"head_dim", 16}, {"state_size", 8}}},
      },
      "a test");
}

inline Decoder tiny_model(const ModelConfig& config, at::ScalarType dtype = at::kDouble, std::uint64_t seed = 1) {
  return Decoder(config, {.dtype = dtype, .generator = at::detail::createCPUGenerator(seed), .requires_grad = true});
}

inline at::Tensor random_ids(at::IntArrayRef shape, std::uint64_t seed = 7) {
  return at::randint(0, 61, shape, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kLong));
}

/// ‖a − b‖/‖b‖
inline double error_of(const at::Tensor& a, const at::Tensor& b) {
  const auto wide = [](const at::Tensor& tensor) { return tensor.detach().to(at::kDouble); };
  return ((wide(a) - wide(b)).norm() / wide(b).norm()).item<double>();
}

/// The token of every kind of mixer.
inline constexpr auto kEveryKind = [] {
  std::array<const char*, layers::kKindNames.size()> tokens{};
  std::ranges::transform(layers::kKindNames, tokens.begin(), [](const auto& kind) { return kind.token.data(); });
  return tokens;
}();

}  // namespace gka::models::test
