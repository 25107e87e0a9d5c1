// Memories that only add: linear attention, RetNet, gated linear attention (which fades per key channel).
#include <ATen/ops/elu.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/tensor.h>

#include <cmath>
#include <stdexcept>

#include "layers/functions.h"
#include "layers/memory.h"
#include "layers/mixers.h"
#include "layers/projection.h"

namespace gka::layers {
namespace {

struct Sizes {
  std::int64_t heads, key_dim, value_dim;
};

/// Widths of all heads together as shares of the model's.
Sizes shares(std::int64_t heads, double expand_k, double expand_v, const MixerConfig& config) {
  const auto keys = whole(expand_k, config.hidden_size, "expand_k");
  const auto values = whole(expand_v, config.hidden_size, "expand_v");
  return {.heads = heads,
          .key_dim = divided(keys, heads, "keys per head"),
          .value_dim = divided(values, heads, "values per head")};
}

/// What the three have in common: projections, the memory, the output. They differ in what they do to q and k, and in
/// how they fade.
class AddMixer : public Mixer {
 public:
  AddMixer(const Sizes& sizes, std::int64_t conv_size, const HeadOutput::Options& output, const MixerConfig& config,
           const Scope& scope)
      : sizes_(sizes),
        query_("q", head_options(sizes.key_dim, conv_size), config, scope),
        key_("k", head_options(sizes.key_dim, conv_size), config, scope),
        value_("v", head_options(sizes.value_dim, conv_size), config, scope),
        output_(output, config, scope) {}

  std::vector<StateField> state_fields(at::ScalarType dtype) const override {
    std::vector<StateField> fields;
    query_.add_fields(fields, dtype);
    key_.add_fields(fields, dtype);
    value_.add_fields(fields, dtype);
    fields.push_back(memory_field(sizes_.heads, sizes_.key_dim, sizes_.value_dim, dtype));
    return fields;
  }

  double flops(std::int64_t) const override {
    return memory_flops(sizes_.heads, sizes_.key_dim, sizes_.value_dim, MemoryRule::add);
  }

 protected:
  at::Tensor mix(const at::Tensor& x, Call& call) const override {
    const auto q = map_query(query_.forward(x, call), call);
    const auto k = map_key(key_.forward(x, call), call);
    const auto v = value_.forward(x, call);
    const double scale = 1.0 / std::sqrt(static_cast<double>(sizes_.key_dim));
    const auto o = remember({.q = q, .k = k, .v = v, .log_decay = decay(x), .scale = scale}, MemoryRule::add, call);
    return output_.forward(o, x);
  }

  virtual at::Tensor map_query(const at::Tensor& q, const Call&) const { return q; }
  virtual at::Tensor map_key(const at::Tensor& k, const Call&) const { return k; }
  /// log γ for x; undefined: none.
  virtual at::Tensor decay(const at::Tensor&) const { return {}; }

 private:
  HeadProjectionOptions head_options(std::int64_t head_dim, std::int64_t conv_size) const {
    return {.heads = sizes_.heads, .head_dim = head_dim, .conv_size = conv_size, .without_conv = Activation::none};
  }

  Sizes sizes_;
  HeadProjection query_, key_, value_;
  HeadOutput output_;
};

HeadOutput::Options output_options(const Sizes& sizes, bool gate, double eps, std::string_view norm) {
  return {.heads = sizes.heads, .head_dim = sizes.value_dim, .gate = gate, .eps = eps, .norm = norm};
}

Sizes sizes_of(const RetNetConfig& c, const MixerConfig& config) {
  const auto sizes = shares(or_else(c.num_heads, config.num_attention_heads), c.expand_k, c.expand_v, config);
  divided(sizes.key_dim, 2, "rotary keys per head");
  return sizes;
}

/// Rotary queries and keys, and head h fades by 1 − 2^(−5−h) a token.
class RetNet final : public AddMixer {
 public:
  RetNet(const RetNetConfig& c, const MixerConfig& config, const Scope& scope)
      : AddMixer(
            sizes_of(c, config), 0,
            output_options(sizes_of(c, config), c.use_gate, c.norm_eps, c.use_gate ? "g_norm_swish_gate" : "g_norm"),
            config, scope),
        theta_(c.rope_theta) {
    std::vector<double> rates;
    for (std::int64_t h = 0; h < sizes_of(c, config).heads; ++h) {
      rates.push_back(std::log1p(-std::exp2(-5.0 - static_cast<double>(h))));
    }
    log_decay_ = at::tensor(rates, at::kDouble).to(scope.device());
  }

 protected:
  at::Tensor map_query(const at::Tensor& q, const Call& call) const override {
    return rotate(q, rotation(call.positions(), q.size(-1), theta_, q.scalar_type()));
  }
  at::Tensor map_key(const at::Tensor& k, const Call& call) const override { return map_query(k, call); }
  at::Tensor decay(const at::Tensor& x) const override {
    auto shape = x.sizes().vec();
    shape.back() = log_decay_.size(0);
    return log_decay_.to(accumulation_type(x)).expand(shape);
  }

 private:
  double theta_;
  at::Tensor log_decay_;  // [heads], float64
};

Sizes sizes_of(const LinearAttentionConfig& c, const MixerConfig& config) {
  return shares(or_else(c.num_heads, config.num_attention_heads), c.expand_k, c.expand_v, config);
}

/// A feature map of one head's vectors; the learned one multiplies two affine maps.
class Features {
 public:
  Features(FeatureMap map, std::string_view name, std::int64_t size, const MixerConfig& config, const Scope& scope)
      : map_(map) {
    if (map != FeatureMap::elementwise_product) return;
    const auto inner = scope / name;
    first_ = projection_weight("layer1", size, size, config, inner);
    first_bias_ = projection_bias("layer1", size, inner);
    second_ = projection_weight("layer2", size, size, config, inner);
    second_bias_ = projection_bias("layer2", size, inner);
  }

  at::Tensor forward(const at::Tensor& x) const {
    switch (map_) {
      case FeatureMap::elementwise_product: return project(x, first_, first_bias_) * project(x, second_, second_bias_);
      case FeatureMap::elu: return at::elu(x) + 1;
      case FeatureMap::relu: return at::relu(x);
      case FeatureMap::identity: return x;
    }
    throw std::logic_error("a feature map that is none of the table's");
  }

 private:
  FeatureMap map_;
  at::Tensor first_, first_bias_, second_, second_bias_;
};

class LinearAttention final : public AddMixer {
 public:
  LinearAttention(const LinearAttentionConfig& c, const MixerConfig& config, const Scope& scope)
      : AddMixer(sizes_of(c, config), 0, output_options(sizes_of(c, config), false, c.norm_eps, "norm"), config, scope),
        query_map_(c.feature_map, "feature_map_q", sizes_of(c, config).key_dim, config, scope),
        key_map_(c.feature_map, "feature_map_k", sizes_of(c, config).key_dim, config, scope) {}

 protected:
  at::Tensor map_query(const at::Tensor& q, const Call&) const override { return query_map_.forward(q); }
  at::Tensor map_key(const at::Tensor& k, const Call&) const override { return key_map_.forward(k); }

 private:
  Features query_map_, key_map_;
};

Sizes sizes_of(const GlaConfig& c, const MixerConfig& config) {
  return shares(or_else(c.num_heads, config.num_attention_heads), c.expand_k, c.expand_v, config);
}

/// log γ = log sigmoid(low-rank projection) / 16, per key channel.
class Gla final : public AddMixer {
 public:
  Gla(const GlaConfig& c, const MixerConfig& config, const Scope& scope)
      : AddMixer(
            sizes_of(c, config), c.conv_size,
            output_options(sizes_of(c, config), c.use_gate, c.norm_eps, c.use_gate ? "g_norm_swish_gate" : "g_norm"),
            config, scope),
        config_(c),
        key_dim_(sizes_of(c, config).key_dim) {
    const auto channels = sizes_of(c, config).heads * key_dim_;
    down_ = projection_weight("gk_proj.0", c.gate_low_rank_dim, config.hidden_size, config, scope);
    up_ = projection_weight("gk_proj.1", channels, c.gate_low_rank_dim, config, scope);
    bias_ = projection_bias("gk_proj.1", channels, scope);
  }

 protected:
  at::Tensor decay(const at::Tensor& x) const override {
    // What is computed again in the backward pass may outlive the layer.
    const auto of_projected = [divisor = config_.gate_logit_normalizer, width = key_dim_](const at::Tensor& projected) {
      return (at::log_sigmoid(accumulate(projected)) / divisor).unflatten(-1, {-1, width});
    };
    return wide_gate(of_projected, project(project(x, down_), up_, bias_), {});
  }

 private:
  GlaConfig config_;
  std::int64_t key_dim_;
  at::Tensor down_, up_, bias_;
};

}  // namespace

std::unique_ptr<Mixer> make_retnet(const MixerConfig& config, const Scope& scope) {
  return std::make_unique<RetNet>(config.retnet, config, scope);
}

std::unique_ptr<Mixer> make_linear_attention(const MixerConfig& config, const Scope& scope) {
  return std::make_unique<LinearAttention>(config.linear_attention, config, scope);
}

std::unique_ptr<Mixer> make_gla(const MixerConfig& config, const Scope& scope) {
  return std::make_unique<Gla>(config.gla, config, scope);
}

}  // namespace gka::layers
