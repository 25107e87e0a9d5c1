#include "models/convert.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <array>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "layers/mixers.h"
#include "models/pattern.h"

namespace gka::models {
namespace {

constexpr std::string_view kAttention = "self_attn";
constexpr std::array<std::string_view, 4> kProjections{"q_proj.weight", "k_proj.weight", "v_proj.weight",
                                                       "o_proj.weight"};

bool is_attention(const std::string& token) { return token == "*" || token == "SWA"; }

std::string layer_name(std::size_t layer) { return "model.layers." + std::to_string(layer) + "."; }

/// The same model with another pattern, its choices checked again.
ModelConfig with_pattern(const ModelConfig& config, const std::string& pattern) {
  auto changed = config;
  changed.layer_types = expand_pattern(pattern);
  if (changed.layer_types.size() != config.layer_types.size()) {
    throw std::runtime_error("the pattern '" + pattern + "' has " + std::to_string(changed.layer_types.size()) +
                             " layers, and the model " + std::to_string(config.layer_types.size()));
  }
  return parse_checkpoint_config(to_json(changed), "the converted model", [](const std::string&) {});
}

std::vector<std::size_t> changed_layers(const ModelConfig& before, const ModelConfig& after) {
  std::vector<std::size_t> changed;
  for (std::size_t i = 0; i < before.layer_types.size(); ++i) {
    const auto &old = before.layer_types[i], &now = after.layer_types[i];
    if (old == now) continue;
    if (!is_attention(old) || is_attention(now)) {
      throw std::runtime_error("layer " + std::to_string(i) + " would change from " + old + " to " + now +
                               "; only attention is replaced, and by a memory");
    }
    changed.push_back(i);
  }
  return changed;
}

/// Rows (or, of an output projection, columns) of a head for every query head from those of fewer heads.
at::Tensor for_all_heads(const at::Tensor& weight, at::IntArrayRef wanted, std::int64_t heads) {
  if (weight.sizes() == wanted) return weight;
  if (wanted.size() != 2 || weight.size(1) != wanted[1] || heads < 1 || weight.size(0) % heads != 0 ||
      wanted[0] % weight.size(0) != 0) {
    return {};
  }
  const auto copies = wanted[0] / weight.size(0);
  return weight.unflatten(0, {heads, -1}).repeat_interleave(copies, 0).flatten(0, 1);
}

void take_projection(const Decoder& source, const layers::Parameters& into, std::size_t layer, std::string_view prefix,
                     std::string_view name) {
  const auto from = layer_name(layer) + std::string(kAttention) + "." + std::string(name);
  const auto to = layer_name(layer) + std::string(prefix) + "." + std::string(name);
  const auto* old = source.parameters().find(from);
  const auto* now = into.find(to);
  if (now == nullptr)
    throw std::runtime_error("a memory without '" + to + "' cannot take over attention's projections");
  const auto weight = for_all_heads(old->value, now->value.sizes(), source.config().mixer.num_key_value_heads);
  if (!weight.defined()) {
    throw std::runtime_error("'" + to +
                             "' is of another shape than attention's: choose the memory's heads and sizes so "
                             "that its projections are the model's");
  }
  at::Tensor(now->value).copy_(weight);
}

/// So that at first every token sees itself alone.
void pass_through(const layers::Parameters& parameters, const std::string& prefix) {
  for (const auto& parameter : parameters.all()) {
    if (!parameter.name.starts_with(prefix) || !parameter.name.ends_with("_conv1d.weight")) continue;
    auto weight = at::Tensor(parameter.value);
    weight.zero_();
    weight.select(-1, weight.size(-1) - 1).fill_(1);
  }
}

}  // namespace

Decoder replace_attention(const Decoder& source, const std::string& pattern, std::uint64_t seed) {
  const at::NoGradGuard no_gradient;
  auto config = with_pattern(source.config(), pattern);
  const auto changed = changed_layers(source.config(), config);
  Decoder result(std::move(config), {.device = source.device(),
                                     .dtype = source.parameters().options().dtype,
                                     .generator = at::detail::createCPUGenerator(seed)});
  for (const auto& parameter : result.parameters().all()) {
    if (const auto* old = source.parameters().find(parameter.name)) at::Tensor(parameter.value).copy_(old->value);
  }
  for (const auto layer : changed) {
    const auto prefix = layers::mixer_kind(result.config().layer_types[layer]).prefix;
    for (const auto name : kProjections) take_projection(source, result.parameters(), layer, prefix, name);
    pass_through(result.parameters(), layer_name(layer) + std::string(prefix) + ".");
  }
  return result;
}

}  // namespace gka::models
