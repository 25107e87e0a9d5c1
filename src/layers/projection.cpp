#include "layers/projection.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/einsum.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "gka/block.h"
#include "gka/block_kernels.h"
#include "layers/functions.h"
#include "ops/block.h"
#include "ops/fused.h"

namespace gka::layers {
namespace {

std::string join(std::string_view name, std::string_view suffix) { return std::string(name) + std::string(suffix); }

Init conv_init(std::int64_t width, const MixerConfig& config) {
  if (config.conv_initializer_range > 0) return init::normal(config.conv_initializer_range);
  const double bound = 1.0 / std::sqrt(static_cast<double>(width));
  return init::uniform(-bound, bound);
}

/// [to, from] with each row a one: head h takes head h / (to / from).
Init copies_of_heads(std::int64_t from, std::int64_t to) {
  return [from, to](at::Tensor& t, const at::Generator&) {
    t.zero_();
    for (std::int64_t h = 0; h < to; ++h) t[h][h / (to / from)].fill_(1.0);
  };
}

bool can_share(const at::Tensor& x, const std::vector<const HeadProjection*>& heads, const Call& call) {
  if (call.is_step() || !call.begins() || call.wants_state() || call.sequences().cu_seqlens().defined()) return false;
  return ops::has_fused(x) && std::ranges::all_of(heads, [](const HeadProjection* head) {
           return head->conv() && !head->conv().has_bias() && is_learning(head->weight());
         });
}

Projected share(const at::Tensor& x, const std::vector<const HeadProjection*>& heads,
                const std::vector<at::Tensor>& others) {
  std::vector<ops::ConvolvedHeads> shared;
  for (const auto* head : heads) {
    shared.push_back({.weight = head->weight(),
                      .conv = head->conv().weight(),
                      .norm = head->options().norm,
                      .head_dim = head->options().head_dim});
  }
  auto parts = ops::project_convolved(x, shared, others);
  Projected result{
      .heads = {}, .others = std::move(parts.others), .remade = std::move(parts.remade), .room = std::move(parts.room)};
  for (std::size_t i = 0; i < heads.size(); ++i) {
    const auto& options = heads[i]->options();
    result.heads.push_back(parts.heads[i].unflatten(-1, {options.heads, options.head_dim}));
  }
  return result;
}

/// Convolutions of sequences that begin in this call, in training.
std::vector<ops::Remade> remade_heads(const std::vector<at::Tensor>& made, const std::vector<at::Tensor>& projected,
                                      const std::vector<const HeadProjection*>& heads, const Call& call) {
  std::vector<ops::Remade> remade;
  if (call.is_step() || !call.begins() || !at::GradMode::is_enabled()) return remade;
  for (std::size_t i = 0; i < heads.size(); ++i) {
    const auto& options = heads[i]->options();
    if (!heads[i]->conv()) continue;
    remade.push_back(heads[i]->conv().remade(made[i], projected[i], call, options.norm, options.head_dim));
  }
  return remade;
}

/// In a step on a GPU, all convolutions of a block in one launch.
bool can_step_together(const at::Tensor& x, const std::vector<const HeadProjection*>& heads, const Call& call) {
  return call.is_step() && x.is_cuda() && !at::GradMode::is_enabled() && heads.size() > 1 &&
         std::ranges::all_of(heads, [](const HeadProjection* head) { return static_cast<bool>(head->conv()); });
}
std::vector<at::Tensor> step_together(const std::vector<at::Tensor>& projected,
                                      const std::vector<const HeadProjection*>& heads, Call& call) {
  std::vector<ops::ConvCall> steps;
  for (std::size_t i = 0; i < heads.size(); ++i) {
    const auto& options = heads[i]->options();
    steps.push_back(heads[i]->conv().step_call(projected[i], call, options.norm, options.head_dim));
  }
  auto results = ops::short_conv_steps(std::move(steps));
  for (std::size_t i = 0; i < heads.size(); ++i) {
    results[i] = results[i].unflatten(-1, {heads[i]->options().heads, heads[i]->options().head_dim});
  }
  return results;
}

}  // namespace

Projected project_heads(const at::Tensor& x, const std::vector<const HeadProjection*>& heads,
                        const std::vector<at::Tensor>& others, Call& call) {
  if (can_share(x, heads, call)) return share(x, heads, others);
  std::vector<at::Tensor> weights;
  for (const auto* head : heads) weights.push_back(head->weight());
  weights.insert(weights.end(), others.begin(), others.end());
  const auto parts = project_all(x, weights, call.inference().norm);
  Projected result;
  if (can_step_together(x, heads, call)) {
    result.heads = step_together(parts, heads, call);
  } else {
    for (std::size_t i = 0; i < heads.size(); ++i) result.heads.push_back(heads[i]->finish(parts[i], call));
    result.remade = remade_heads(result.heads, parts, heads, call);
  }
  result.others.assign(parts.begin() + static_cast<std::ptrdiff_t>(heads.size()), parts.end());
  return result;
}

at::Tensor projection_weight(std::string_view name, std::int64_t out, std::int64_t in, const MixerConfig& config,
                             const Scope& scope, const at::Tensor& room) {
  return scope.add_matrix(join(name, ".weight"), {out, in}, init::normal(config.initializer_range), room);
}

at::Tensor projection_bias(std::string_view name, std::int64_t out, const Scope& scope) {
  return scope.add(join(name, ".bias"), {out}, init::constant(0), WeightDecay::no);
}

at::Tensor norm_weight(std::string_view name, std::int64_t size, const Scope& scope) {
  return scope.add(join(name, ".weight"), {size}, init::constant(1), WeightDecay::no);
}

ShortConv::ShortConv(std::string_view name, std::int64_t channels, std::int64_t width, bool bias,
                     const MixerConfig& config, const Scope& scope)
    : name_(name) {
  weight_ = scope.add(join(name, ".weight"), {channels, 1, width}, conv_init(width, config));
  if (bias) bias_ = projection_bias(name, channels, scope);
}

at::Tensor ShortConv::forward(const at::Tensor& x, Call& call, L2Norm norm, std::int64_t head_dim) const {
  if (call.is_step()) {
    return short_conv_step(
        x, weight_,
        {.bias = bias_, .l2_norm = norm, .head_dim = head_dim, .state = call.take(), .state_indices = call.slots()});
  }
  const auto result = short_conv(x, weight_,
                                 {.bias = bias_,
                                  .l2_norm = norm,
                                  .head_dim = head_dim,
                                  .initial_state = call.take(),
                                  .output_final_state = call.wants_state(),
                                  .cu_seqlens = call.sequences().cu_seqlens()});
  call.give(result.final_state);
  return result.y;
}

ops::Remade ShortConv::remade(const at::Tensor& y, const at::Tensor& x, const Call& call, L2Norm norm,
                              std::int64_t head_dim) const {
  const auto make = [x = x.detach(), weight = weight_, bias = bias_, norm, head_dim,
                     cu_seqlens = call.sequences().cu_seqlens()] {
    return short_conv(x, weight, {.bias = bias, .l2_norm = norm, .head_dim = head_dim, .cu_seqlens = cu_seqlens}).y;
  };
  return {.tensor = y, .make = make};
}

ops::ConvCall ShortConv::step_call(const at::Tensor& x, Call& call, L2Norm norm, std::int64_t head_dim) const {
  ops::ConvCall step;
  step.x = x;
  step.weight = weight_;
  step.bias = bias_;
  step.l2_norm = norm;
  step.head_dim = head_dim;
  step.state = call.take();
  step.state_indices = call.slots();
  return step;
}

void ShortConv::add_fields(std::vector<StateField>& fields, at::ScalarType dtype) const {
  if (*this) fields.push_back({.name = name_, .shape = {weight_.size(0), weight_.size(2) - 1}, .dtype = dtype});
}

HeadProjection::HeadProjection(std::string_view name, const HeadProjectionOptions& options, const MixerConfig& config,
                               const Scope& scope, const at::Tensor& room)
    : options_(options) {
  const auto channels = options.heads * options.head_dim;
  weight_ = projection_weight(join(name, "_proj"), channels, config.hidden_size, config, scope, room);
  if (options.conv_size > 0) {
    if (options.norm != L2Norm::none && options.head_dim > kernels::kMaxConvHead) {
      throw std::invalid_argument("a head of '" + std::string(name) + "' has " + std::to_string(options.head_dim) +
                                  " channels; behind a short convolution it takes 1 to " +
                                  std::to_string(kernels::kMaxConvHead) + ".");
    }
    conv_ = ShortConv(join(name, "_conv1d"), channels, options.conv_size, options.conv_bias, config, scope);
  }
}

at::Tensor HeadProjection::forward(const at::Tensor& x, Call& call) const { return finish(project(x, weight_), call); }

at::Tensor HeadProjection::finish(const at::Tensor& projected, Call& call) const {
  const auto heads = [&](const at::Tensor& y) { return y.unflatten(-1, {options_.heads, options_.head_dim}); };
  if (conv_) return heads(conv_.forward(projected, call, options_.norm, options_.head_dim));
  return unit_norm(heads(activated(projected, options_.without_conv)), options_.norm);
}

at::Tensor DecayParameters::operator()(const at::Tensor& projected) const {
  return log_decay(projected, a_log, dt_bias);
}

DecayParameters decay_parameters(std::int64_t heads, const Scope& scope) {
  return {.a_log = scope.add("A_log", {heads}, a_log_uniform(0, 16), WeightDecay::no),
          .dt_bias = scope.add("dt_bias", {heads}, dt_bias_log_uniform(), WeightDecay::no)};
}

Init a_log_uniform(double low, double high) {
  // Above 0 even where the draw is 0: its logarithm must be finite.
  return [low, high](at::Tensor& t, const at::Generator& g) { t.uniform_(low, high, g).clamp_min_(1e-6).log_(); };
}

Init dt_bias_log_uniform() {
  return [](at::Tensor& t, const at::Generator& g) {
    const auto dt = t.uniform_(std::log(0.001), std::log(0.1), g).exp();
    t.copy_(dt + (-dt).expm1().neg().log());  // softplus of it is dt
  };
}

HeadExpansion::HeadExpansion(std::string_view name, const Options& options, const MixerConfig& config,
                             const Scope& scope)
    : to_(options.to) {
  if (options.from == 0 || options.to % options.from != 0) {
    throw std::invalid_argument(std::to_string(options.from) + " heads cannot serve " + std::to_string(options.to) +
                                ": the larger number of heads must be a multiple of the smaller.");
  }
  if (options.rank == 0 || options.from == options.to) return;
  const auto low = scope / join("proj_", name);
  down_ = projection_weight("linearA", options.rank, options.from * options.head_dim, config, low);
  up_ = low.add_matrix("linearB.weight", {options.to * options.head_dim, options.rank}, init::constant(0));
  if (options.learnable_residual) {
    mixture_ = scope.add(join(name, "_rep"), {options.to, options.from}, copies_of_heads(options.from, options.to));
  }
}

at::Tensor HeadExpansion::forward(const at::Tensor& x) const {
  const auto repeated =
      mixture_.defined() ? at::einsum("eh,...hd->...ed", {mixture_.to(x.scalar_type()), x}) : repeat_heads(x, to_);
  if (copies()) return repeated;
  return repeated + project(silu(project(x.flatten(-2), down_), down_), up_).unflatten(-1, {to_, x.size(-1)});
}

HeadOutput::HeadOutput(const Options& options, const MixerConfig& config, const Scope& scope) : options_(options) {
  const auto channels = options.heads * options.head_dim;
  if (options.gate && options.gate_rank > 0) {
    gate_ = projection_weight("g_proj.0", options.gate_rank, config.hidden_size, config, scope);
    gate_up_ = projection_weight("g_proj.1", channels, options.gate_rank, config, scope);
    gate_bias_ = projection_bias("g_proj.1", channels, scope);
  } else if (options.gate) {
    gate_ = projection_weight("g_proj", channels, config.hidden_size, config, scope, options.gate_room);
  }
  norm_ = norm_weight(options.norm, options.head_dim, scope);
  out_ = projection_weight("o_proj", config.hidden_size, channels, config, scope);
}

at::Tensor HeadOutput::forward(const at::Tensor& o, const at::Tensor& x) const {
  at::Tensor gate;
  if (gate_.defined()) {
    gate = project(x, gate_);
    if (gate_up_.defined()) gate = project(gate, gate_up_, gate_bias_);
  }
  return finish(o, gate);
}

ops::NormCall HeadOutput::norm_call(const at::Tensor& gate) const {
  ops::NormCall norm;
  if (gate.defined()) norm.gate = gate.unflatten(-1, {options_.heads, options_.head_dim});
  norm.weight = norm_;
  norm.activation = options_.activation;
  norm.eps = options_.eps;
  return norm;
}

at::Tensor HeadOutput::project_normed(const at::Tensor& normed, const at::Tensor& stream) const {
  return stream.defined() ? project_onto(stream, normed.flatten(-2), out_) : project(normed.flatten(-2), out_);
}

at::Tensor HeadOutput::finish(const at::Tensor& o, const at::Tensor& gate,
                              const c10::intrusive_ptr<ops::GradientRoom>& room, const at::Tensor& stream) const {
  const auto by_head = gate.defined() ? gate.unflatten(-1, {options_.heads, options_.head_dim}) : gate;
  const GatedRmsNormOptions options{.activation = options_.activation, .eps = options_.eps};
  if (room && gate.defined() && is_learning(norm_)) {
    return ops::gated_output(o, by_head, norm_, out_, options, room);
  }
  const auto normed = gated_rms_norm(o, by_head, norm_, options);
  const auto y = project_normed(normed, stream);
  if (!at::GradMode::is_enabled()) return y;
  const auto make = [o = o.detach(), gate = gate.defined() ? by_head.detach() : gate, weight = norm_, options] {
    return gated_rms_norm(o, gate, weight, options);
  };
  return ops::forget(y, {{.tensor = normed, .make = make}});
}

std::int64_t whole(double share, std::int64_t size, std::string_view what) {
  const double exact = share * static_cast<double>(size);
  const auto rounded = static_cast<std::int64_t>(std::llround(exact));
  if (std::abs(exact - static_cast<double>(rounded)) > 1e-6 || rounded < 1) {
    throw std::invalid_argument(std::string(what) + " is " + std::to_string(share) + ", which of " +
                                std::to_string(size) + " is not a whole number of at least 1.");
  }
  return rounded;
}

std::int64_t divided(std::int64_t size, std::int64_t parts, std::string_view what) {
  if (parts < 1 || size < 1 || size % parts != 0) {
    throw std::invalid_argument(std::string(what) + ": " + std::to_string(size) + " cannot be divided into " +
                                std::to_string(parts) + " equal parts.");
  }
  return size / parts;
}

}  // namespace gka::layers
