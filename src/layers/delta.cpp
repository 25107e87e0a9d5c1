// The delta rules: DeltaNet, Gated DeltaNet and Kimi Delta Attention. Each writes β (v − Sᵀk), what the memory does not
// already answer; they differ in how it fades: not at all, per head, per key channel.
#include <array>
#include <cmath>

#include "layers/functions.h"
#include "layers/head_sizes.h"
#include "layers/memory.h"
#include "layers/mixers.h"
#include "layers/projection.h"

namespace gka::layers {
namespace {

double key_scale(std::int64_t key_dim) { return 1.0 / std::sqrt(static_cast<double>(key_dim)); }

/// β = sigmoid(projection), twice that where the memory may also flip sign along k.
at::Tensor write_strength(const at::Tensor& x, const at::Tensor& weight, bool allow_neg_eigval) {
  const auto beta = sigmoid_gate(project(x, weight), {}, weight);
  return allow_neg_eigval ? beta * 2 : beta;
}

/// What the three have in common: q, k, v, the rule and the output.
class DeltaMixer : public Mixer {
 public:
  struct Options {
    HeadSizes sizes{};
    std::int64_t conv_size = 0;
    bool conv_bias = false;
    bool allow_neg_eigval = false;
    std::int64_t kv_proj_rank = 0;
    bool kv_learnable_residual = false;
    HeadOutput::Options output{};
  };

  DeltaMixer(const Options& options, const MixerConfig& config, const Scope& scope)
      : options_(options),
        query_("q", head_options(options.sizes.q_heads, options.sizes.key_dim, L2Norm::rsqrt), config, scope),
        key_("k", head_options(options.sizes.k_heads, options.sizes.key_dim, key_norm()), config, scope),
        value_("v", head_options(options.sizes.v_heads, options.sizes.value_dim, L2Norm::none), config, scope),
        expand_k_("k", expansion(options.sizes.k_heads, options.sizes.key_dim), config, scope),
        expand_v_("v", expansion(options.sizes.v_heads, options.sizes.value_dim), config, scope),
        beta_(projection_weight("b_proj", options.sizes.heads, config.hidden_size, config, scope)),
        output_(options.output, config, scope) {}

  std::vector<StateField> state_fields(at::ScalarType dtype) const override {
    std::vector<StateField> fields;
    query_.add_fields(fields, dtype);
    key_.add_fields(fields, dtype);
    value_.add_fields(fields, dtype);
    fields.push_back(memory_field(options_.sizes.heads, options_.sizes.key_dim, options_.sizes.value_dim, dtype));
    return fields;
  }

  double flops(std::int64_t) const override {
    const auto& sizes = options_.sizes;
    return memory_flops(sizes.heads, sizes.key_dim, sizes.value_dim, MemoryRule::delta);
  }

 protected:
  at::Tensor mix(const at::Tensor& x, Call& call) const override {
    const auto q = query_.forward(x, call);
    const auto k = key_.forward(x, call);
    const auto v = expand_v_.forward(value_.forward(x, call));
    const auto keys = expand_k_.forward(k);
    const auto o = remember({.q = repeat_heads(q, options_.sizes.heads),
                             .k = expand_k_.copies() ? keys : unit_norm(keys, L2Norm::rsqrt),
                             .v = v,
                             .log_decay = decay(x),
                             .beta = write_strength(x, beta_, options_.allow_neg_eigval),
                             .scale = key_scale(options_.sizes.key_dim)},
                            MemoryRule::delta, call);
    return output_.forward(o, x);
  }

  /// log γ, per head or per channel; undefined: none.
  virtual at::Tensor decay(const at::Tensor&) const { return {}; }

 private:
  L2Norm key_norm() const {
    const bool grows = options_.kv_proj_rank > 0 && options_.sizes.k_heads < options_.sizes.heads;
    return grows ? L2Norm::none : L2Norm::rsqrt;
  }
  HeadProjectionOptions head_options(std::int64_t heads, std::int64_t head_dim, L2Norm norm) const {
    return {.heads = heads,
            .head_dim = head_dim,
            .conv_size = options_.conv_size,
            .conv_bias = options_.conv_bias,
            .norm = norm};
  }
  HeadExpansion::Options expansion(std::int64_t from, std::int64_t head_dim) const {
    return {.from = from,
            .to = options_.sizes.heads,
            .head_dim = head_dim,
            .rank = options_.kv_proj_rank,
            .learnable_residual = options_.kv_learnable_residual};
  }

  Options options_;
  HeadProjection query_, key_, value_;
  HeadExpansion expand_k_, expand_v_;
  at::Tensor beta_;
  HeadOutput output_;
};

HeadSizes equal_heads(std::int64_t heads, std::int64_t key_dim, std::int64_t value_dim) {
  return {
      .q_heads = heads, .k_heads = heads, .v_heads = heads, .heads = heads, .key_dim = key_dim, .value_dim = value_dim};
}

DeltaMixer::Options deltanet_options(const MixerConfig& config) {
  const auto& c = config.deltanet;
  const auto head_dim = or_else(c.head_dim, config.head_dim);
  const auto sizes = equal_heads(or_else(c.num_heads, config.num_attention_heads),
                                 whole(c.expand_k, head_dim, "expand_k"), whole(c.expand_v, head_dim, "expand_v"));
  return {.sizes = sizes,
          .conv_size = c.conv_size,
          .allow_neg_eigval = c.allow_neg_eigval,
          .output = {.heads = sizes.heads, .head_dim = sizes.value_dim, .gate = c.use_gate, .eps = c.norm_eps}};
}

DeltaMixer::Options gdn_options(const MixerConfig& config) {
  const auto& c = config.gdn;
  const auto sizes = grouped_heads(c, config);
  return {.sizes = sizes,
          .conv_size = c.use_short_conv ? c.conv_size : 0,
          .conv_bias = c.conv_bias,
          .allow_neg_eigval = c.allow_neg_eigval,
          .kv_proj_rank = c.kv_proj_rank,
          .kv_learnable_residual = c.kv_learnable_residual,
          .output = {.heads = sizes.heads, .head_dim = sizes.value_dim, .gate = c.use_gate, .eps = c.norm_eps}};
}

class GatedDeltaNet final : public DeltaMixer {
 public:
  GatedDeltaNet(const Options& options, const MixerConfig& config, const Scope& scope)
      : DeltaMixer(options, config, scope),
        decay_proj_(projection_weight("gk_proj", options.sizes.heads, config.hidden_size, config, scope)),
        decay_(decay_parameters(options.sizes.heads, scope)) {}

 protected:
  at::Tensor decay(const at::Tensor& x) const override { return decay_(project(x, decay_proj_)); }

 private:
  at::Tensor decay_proj_;
  DecayParameters decay_;
};

DeltaMixer::Options kda_options(const MixerConfig& config) {
  const auto& c = config.kda;
  const auto head_dim = or_else(c.head_dim, config.head_dim);
  const auto sizes =
      equal_heads(or_else(c.num_heads, config.num_attention_heads), head_dim, whole(c.expand_v, head_dim, "expand_v"));
  return {.sizes = sizes,
          .conv_size = c.conv_size,
          .allow_neg_eigval = c.allow_neg_eigval,
          .output = {.heads = sizes.heads,
                     .head_dim = sizes.value_dim,
                     .eps = c.norm_eps,
                     .activation = Activation::sigmoid,
                     .gate_rank = sizes.value_dim}};
}

class KimiDeltaAttention final : public DeltaMixer {
 public:
  KimiDeltaAttention(const Options& options, const MixerConfig& config, const Scope& scope)
      : DeltaMixer(options, config, scope), heads_(options.sizes.heads), key_dim_(options.sizes.key_dim) {
    const auto rank = options.sizes.value_dim, channels = heads_ * key_dim_;
    down_ = projection_weight("f_proj.0", rank, config.hidden_size, config, scope);
    up_ = projection_weight("f_proj.1", channels, rank, config, scope);
    decay_ = {.a_log = scope.add("A_log", {heads_}, a_log_uniform(1, 16), WeightDecay::no),
              .dt_bias = scope.add("dt_bias", {channels}, init::constant(0), WeightDecay::no)};
  }

 protected:
  at::Tensor decay(const at::Tensor& x) const override {
    // What is computed again in the backward pass may outlive the layer.
    const auto of_projected = [own = decay_, shape = std::array{heads_, key_dim_}](const at::Tensor& projected) {
      const auto heads = [&](const at::Tensor& t) { return t.unflatten(-1, shape); };
      return log_decay(heads(projected), own.a_log.unsqueeze(-1), heads(own.dt_bias));
    };
    return wide_gate(of_projected, project(project(x, down_), up_), {decay_.a_log, decay_.dt_bias});
  }

 private:
  std::int64_t heads_, key_dim_;
  at::Tensor down_, up_;
  DecayParameters decay_;
};

}  // namespace

std::unique_ptr<Mixer> make_deltanet(const MixerConfig& config, const Scope& scope) {
  return std::make_unique<DeltaMixer>(deltanet_options(config), config, scope);
}

std::unique_ptr<Mixer> make_gated_deltanet(const MixerConfig& config, const Scope& scope) {
  return std::make_unique<GatedDeltaNet>(gdn_options(config), config, scope);
}

std::unique_ptr<Mixer> make_kda(const MixerConfig& config, const Scope& scope) {
  return std::make_unique<KimiDeltaAttention>(kda_options(config), config, scope);
}

}  // namespace gka::layers
