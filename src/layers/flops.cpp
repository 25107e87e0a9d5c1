#include "layers/flops.h"

#include <algorithm>

#include "layers/mixers.h"

namespace gka::layers {
namespace {

/// A product and its sum. The backward pass of a product is two products.
constexpr double kMultiplyAdd = 2, kWithBackward = 3;

/// Tokens that a token of a causal sequence sees on average, of which each is a product with q and one with its value.
double attention(const MixerConfig& config, double tokens, double window) {
  const double reach = std::min(window, tokens);
  const double seen = reach * (1 - (reach - 1) / (2 * tokens));
  return kWithBackward * 2 * kMultiplyAdd * seen * static_cast<double>(config.num_attention_heads * config.head_dim);
}

/// Every number of H takes part in the write, the norm, and each step of the solver, which runs once forward and once
/// backward (with the gradient unrolled, as any product).
double solve(double numbers, std::int64_t iterations, bool unrolled) {
  const double each = unrolled ? kWithBackward : 2;
  return kMultiplyAdd * numbers * (2 * kWithBackward + each * static_cast<double>(iterations));
}

double numbers_of(const StateField& field) {
  double numbers = 1;
  for (const auto size : field.shape) numbers *= static_cast<double>(size);
  return numbers;
}

bool corrects(std::string_view token) { return token == "DN" || token == "GDN" || token == "KDA"; }

}  // namespace

double mixing_flops(std::string_view token, const MixerConfig& config, std::int64_t tokens) {
  const auto length = static_cast<double>(tokens);
  if (token == "*") return attention(config, length, length);
  if (token == "SWA") return attention(config, length, static_cast<double>(config.sliding_window));

  Parameters nothing({.device = at::kMeta});
  const auto fields = mixer_kind(token).make(config, Scope(nothing))->state_fields(at::kFloat);
  double flops = 0;
  for (const auto& field : fields) {
    if (field.name == "h") {
      flops += token == "GKA" ? solve(numbers_of(field), config.gka.num_iter, config.gka.gradient == Gradient::unrolled)
                              : solve(numbers_of(field), config.mesa.num_iter, false);
    } else if (field.name == "u" || field.name == "memory") {
      // A write and an answer; the delta rules ask the memory before they write as well.
      flops += kWithBackward * (corrects(token) ? 3 : 2) * kMultiplyAdd * numbers_of(field);
    }
  }
  return flops;
}

}  // namespace gka::layers
