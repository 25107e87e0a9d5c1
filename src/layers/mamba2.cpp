// Mamba2: S ← e^{ΔA} S + Δ B xᵀ, y = Cᵀ S + D x. In the terms of the other memories B is the key, C the query, x the
// value, Δ the write weight. The norm comes after the gate, over all heads of a group at once.
#include <ATen/ops/arange.h>

#include <vector>

#include "layers/functions.h"
#include "layers/memory.h"
#include "layers/mixers.h"
#include "layers/projection.h"
#include "ops/gated_skip.h"
#include "ops/recompute.h"

namespace gka::layers {
namespace {

/// A = 1, 2, …, heads.
Init a_log_counting() {
  return [](at::Tensor& t, const at::Generator&) { t.copy_(at::arange(1, t.size(0) + 1, t.options()).log()); };
}

class Mamba2 final : public Mixer {
 public:
  Mamba2(const Mamba2Config& c, const MixerConfig& config, const Scope& scope)
      : config_(c),
        inner_(whole(c.expand, config.hidden_size, "expand")),
        heads_(divided(inner_, c.head_dim, "heads of Mamba2")) {
    divided(heads_, c.n_groups, "heads per group");
    const auto mixed = inner_ + 2 * c.n_groups * c.state_size;
    in_ = projection_weight("in_proj", inner_ + mixed + heads_, config.hidden_size, config, scope);
    conv_ = ShortConv("conv1d", mixed, c.conv_size, c.conv_bias, config, scope);
    decay_ = {.a_log = scope.add("A_log", {heads_}, a_log_counting(), WeightDecay::no),
              .dt_bias = scope.add("dt_bias", {heads_}, dt_bias_log_uniform(), WeightDecay::no)};
    skip_ = scope.add("D", {heads_}, init::constant(1), WeightDecay::no);
    norm_ = norm_weight("norm", inner_, scope);
    out_ = projection_weight("out_proj", config.hidden_size, inner_, config, scope);
  }

  std::vector<StateField> state_fields(at::ScalarType dtype) const override {
    std::vector<StateField> fields;
    conv_.add_fields(fields, dtype);
    fields.push_back(memory_field(heads_, config_.state_size, config_.head_dim, dtype));
    return fields;
  }

  double flops(std::int64_t) const override {
    return memory_flops(heads_, config_.state_size, config_.head_dim, MemoryRule::add);
  }

 protected:
  at::Tensor mix(const at::Tensor& x, Call& call) const override {
    const auto projected = project(x, in_);
    return project(holds_little(projected, call) ? recomputed(projected, call) : remembered(projected, call), out_);
  }

 private:
  /// In training on a GPU the projections alone are kept for the backward pass, a sixth of all that is computed from
  /// them: the model is twice as wide here as elsewhere, and twice as many blocks are a model of the same size.
  bool holds_little(const at::Tensor& projected, const Call& call) const {
    return projected.is_cuda() && !call.is_step() && call.begins() && !call.wants_state();
  }
  at::Tensor recomputed(const at::Tensor& projected, const Call& call) const {
    std::vector<at::Tensor> parameters{conv_.weight(), decay_.a_log, decay_.dt_bias, skip_, norm_};
    if (conv_.has_bias()) parameters.push_back(conv_.bias());
    // The node in the graph may outlive the call and the layer.
    const auto body = [own = *this, sequences = call.sequences()](const at::Tensor& input) {
      Call again(sequences, nullptr, /*want_state=*/false);
      return own.remembered(input, again);
    };
    return ops::recompute(body, projected, parameters);
  }

  /// Everything between the two projections.
  at::Tensor remembered(const at::Tensor& projected, Call& call) const {
    const auto states = config_.n_groups * config_.state_size;
    const auto parts = projected.split_with_sizes({inner_, inner_ + 2 * states, heads_}, -1);
    const auto mixed = conv_.forward(parts[1], call).split_with_sizes({inner_, states, states}, -1);
    const auto v = mixed[0].unflatten(-1, {heads_, config_.head_dim});
    const auto delta = softplus_gate(parts[2], decay_.dt_bias, decay_.a_log);
    const auto y = remember({.q = per_head(mixed[2]),
                             .k = per_head(mixed[1]),
                             .v = v,
                             .log_decay = -decay_.a_log.to(delta.scalar_type()).exp() * delta,
                             .beta = delta},
                            MemoryRule::add, call);
    return gated_norm(y, v, parts[0]);
  }

  /// Keys of all heads of a group. Heads of one group share their numbers in memory.
  at::Tensor per_head(const at::Tensor& keys) const {
    const auto groups = keys.unflatten(-1, {config_.n_groups, config_.state_size});
    if (config_.n_groups > 1) return repeat_heads(groups, heads_);
    auto shape = groups.sizes().vec();
    shape.end()[-2] = heads_;
    return groups.expand(shape);
  }

  /// norm((y + D x) · SiLU(z)), each group by itself.
  at::Tensor gated_norm(const at::Tensor& y, const at::Tensor& v, const at::Tensor& z) const {
    const auto gated = ops::has_gated_skip(y, v, z) ? ops::gated_skip(y, v, z, skip_) : gate_skipped(y, v, z);
    if (config_.n_groups == 1) return rms_norm(gated, norm_, config_.norm_eps);
    const auto normed = rms_norm(gated.unflatten(-1, {config_.n_groups, -1}), {}, config_.norm_eps).flatten(-2);
    return normed * norm_.to(normed.scalar_type());
  }

  at::Tensor gate_skipped(const at::Tensor& y, const at::Tensor& v, const at::Tensor& z) const {
    const auto skipped = accumulate(y) + accumulate(v) * skip_.to(accumulation_type(v)).unsqueeze(-1);
    return (skipped.flatten(-2) * silu(accumulate(z), skip_)).to(y.scalar_type());
  }

  Mamba2Config config_;
  std::int64_t inner_, heads_;
  at::Tensor in_, skip_, norm_, out_;
  ShortConv conv_;
  DecayParameters decay_;
};

}  // namespace

std::unique_ptr<Mixer> make_mamba2(const MixerConfig& config, const Scope& scope) {
  return std::make_unique<Mamba2>(config.mamba2, config, scope);
}

}  // namespace gka::layers
