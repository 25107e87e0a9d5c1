// The Gated KalmaNet block: unit-length queries and keys, gates β, γ and α, the memory operator, a gated norm.
//
// With sketching the solve runs in d learned dimensions: Ĥ holds P k, x = Pᵀ solve(Ĥ + λ̂I, P q), and U keeps all of D.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "gka/gka.h"
#include "layers/functions.h"
#include "layers/head_sizes.h"
#include "layers/memory.h"
#include "layers/mixers.h"
#include "layers/projection.h"
#include "ops/block.h"
#include "ops/recompute.h"
#include "ops/sketch.h"

namespace gka::layers {
namespace {

HeadSizes sizes_of(const GkaConfig& c, const MixerConfig& config) {
  const auto s = grouped_heads(c, config);
  head_size("a key", s.key_dim);
  head_size("a value", s.value_dim);
  if (c.sketch_dim > s.key_dim) {
    throw std::invalid_argument("sketch_dim is " + std::to_string(c.sketch_dim) + ", more than the " +
                                std::to_string(s.key_dim) + " dimensions of a key; it must be smaller, or 0 for none.");
  }
  return s;
}

struct Gates {
  at::Tensor log_decay, beta, alpha;
};

class Gka final : public Mixer {
 public:
  Gka(const MixerConfig& config, const Scope& scope)
      : config_(config.gka),
        sizes_(sizes_of(config.gka, config)),
        room_(scope, rows_together(), config.hidden_size),
        query_(make_query("q", sizes_.q_heads, config_.use_q_conv, config, scope)),
        key_(make_query("k", sizes_.k_heads, config_.use_k_conv, config, scope)),
        value_("v",
               {.heads = sizes_.v_heads,
                .head_dim = sizes_.value_dim,
                .conv_size = config_.use_v_conv ? config_.conv_size : 0,
                .without_conv = Activation::none},
               config, scope, room_.take(sizes_.v_heads * sizes_.value_dim)),
        expand_k_("k", expansion(sizes_.k_heads, sizes_.key_dim), config, scope),
        expand_v_("v", expansion(sizes_.v_heads, sizes_.value_dim), config, scope),
        output_({.heads = sizes_.heads,
                 .head_dim = sizes_.value_dim,
                 .gate = config_.use_gate,
                 .eps = config_.norm_eps,
                 .gate_room = room_.take(config_.use_gate ? sizes_.heads * sizes_.value_dim : 0)},
                config, scope) {
    const auto hidden = config.hidden_size, heads = sizes_.heads, gates = gate_count();
    if (gates > 0) gate_weights_ = room_.take(gates * heads);
    if (gates > 0 && !gate_weights_.defined()) gate_weights_ = scope.matrix_room({gates * heads, hidden});
    std::int64_t gate = 0;
    const auto next = [&] { return gate_weights_.narrow(0, heads * gate++, heads); };
    if (config_.use_forgetting_gate) {
      decay_proj_ = projection_weight("a_proj", heads, hidden, config, scope, next());
      decay_ = decay_parameters(heads, scope);
    }
    if (config_.use_beta_gate) {
      beta_ = projection_weight("b_proj", heads, hidden, config, scope, next());
      beta_bias_ = projection_bias("b_proj", heads, scope);
    }
    if (config_.use_alpha_connection) {
      alpha_ = projection_weight("alpha_proj", heads, hidden, config, scope, next());
      alpha_bias_ = projection_bias("alpha_proj", heads, scope);
    }
    if (config_.sketch_dim > 0) {
      sketch_ =
          scope.add("sketch", {heads, config_.sketch_dim, sizes_.key_dim}, init::orthonormal_rows(), WeightDecay::no);
    }
    scale_ = config_.gla_rescale ? 1.0 / std::sqrt(static_cast<double>(sizes_.key_dim)) : 1.0;
  }

  std::vector<StateField> state_fields(at::ScalarType dtype) const override {
    std::vector<StateField> fields;
    query_.add_fields(fields, dtype);
    key_.add_fields(fields, dtype);
    value_.add_fields(fields, dtype);
    if (config_.num_iter > 0) {
      const auto size = or_else(config_.sketch_dim, sizes_.key_dim);
      fields.push_back(memory_field(sizes_.heads, size, size, dtype));
      fields.back().name = "h";
    }
    fields.push_back(memory_field(sizes_.heads, sizes_.key_dim, sizes_.value_dim, dtype));
    fields.back().name = "u";
    return fields;
  }

  bool takes_stream() const override { return true; }

  double flops(std::int64_t) const override {
    const double remembered = memory_flops(sizes_.heads, sizes_.key_dim, sizes_.value_dim, MemoryRule::add);
    if (config_.num_iter == 0) return remembered;
    return remembered + solve_flops(sizes_.heads, or_else(config_.sketch_dim, sizes_.key_dim), config_.num_iter,
                                    config_.gradient == Gradient::unrolled);
  }

 protected:
  at::Tensor mix(const at::Tensor& x, Call& call) const override {
    const auto gate_weights = weights_of_gates();
    std::vector<at::Tensor> others;
    if (output_.gate_weight().defined()) others.push_back(output_.gate_weight());
    if (gate_weights.defined()) others.push_back(gate_weights);
    if (may_step_at_once(x, call)) {
      const auto normed = step_at_once(x, others, call);
      if (normed.defined()) return output_.project_normed(normed, call.stream(x));
    }
    auto parts = project_heads(x, {&query_, &key_, &value_}, others, call);
    auto q = parts.heads[0], k = parts.heads[1];
    const auto v = for_heads(expand_v_, parts.heads[2]);
    q = repeat_heads(q, sizes_.heads);
    k = for_heads(expand_k_, k);
    // Heads that are not mere copies have their length only now.
    if (!expand_k_.copies()) k = unit_norm(k, L2Norm::divide);
    auto o = answer(q, k, v, gate_weights.defined() ? gates(parts.others.back()) : Gates{}, call);
    if (!parts.remade.empty()) o = ops::forget(o, std::move(parts.remade));
    return output_.finish(o, output_.gate_weight().defined() ? parts.others.front() : at::Tensor(), parts.room,
                          call.stream(x));
  }

 private:
  /// The operator reads heads that others share where they are; the sketch and the memory without a solve want copies.
  at::Tensor for_heads(const HeadExpansion& expand, const at::Tensor& x) const {
    const bool shares = config_.num_iter > 0 && !sketch_.defined() && expand.copies();
    return shares ? x : expand.forward(x);
  }

  std::int64_t gate_count() const {
    return std::int64_t{config_.use_forgetting_gate} + config_.use_beta_gate + config_.use_alpha_connection;
  }
  /// Of all matrices that the input is multiplied with, in the order in which `mix` names them.
  std::int64_t rows_together() const {
    const auto& s = sizes_;
    const auto gates = (config_.use_gate ? s.heads * s.value_dim : 0) + gate_count() * s.heads;
    return (s.q_heads + s.k_heads) * s.key_dim + s.v_heads * s.value_dim + gates;
  }

  HeadProjection make_query(std::string_view name, std::int64_t heads, bool conv, const MixerConfig& config,
                            const Scope& scope) {
    const bool grows = name == "k" && config_.kv_proj_rank > 0 && heads < sizes_.heads;
    return {name,
            {.heads = heads,
             .head_dim = sizes_.key_dim,
             .conv_size = conv ? config_.conv_size : 0,
             .without_conv = Activation::none,
             .norm = grows ? L2Norm::none : L2Norm::divide},
            config,
            scope,
            room_.take(heads * sizes_.key_dim)};
  }

  HeadExpansion::Options expansion(std::int64_t from, std::int64_t head_dim) const {
    return {.from = from,
            .to = sizes_.heads,
            .head_dim = head_dim,
            .rank = config_.kv_proj_rank,
            .learnable_residual = config_.kv_learnable_residual};
  }

  /// One matrix for all gates: each by itself would read all of x for a few columns. The weights lie one below the
  /// other, so that it is there already; only where they learn is it joined, for their gradients to find them.
  at::Tensor weights_of_gates() const {
    std::vector<at::Tensor> weights;
    for (const auto& weight : {decay_proj_, beta_, alpha_}) {
      if (weight.defined()) weights.push_back(weight);
    }
    return weights.empty() || !is_learning(weights.front()) ? gate_weights_ : at::cat(weights);
  }

  struct GateKinds {
    std::vector<GateKind> kinds;
    std::vector<at::Tensor Gates::*> places;

    /// Which kind is there; −1: none.
    int find(at::Tensor Gates::* place) const {
      const auto found = std::ranges::find(places, place);
      return found != places.end() ? static_cast<int>(found - places.begin()) : -1;
    }
  };
  GateKinds gate_kinds() const {
    GateKinds gates;
    const auto add = [&](at::Tensor Gates::* place, GateKind kind) {
      gates.places.push_back(place);
      gates.kinds.push_back(std::move(kind));
    };
    if (decay_proj_.defined()) {
      add(&Gates::log_decay, {.gate = Gate::log_decay, .bias = decay_.dt_bias, .a_log = decay_.a_log});
    }
    if (beta_.defined()) {
      const bool published = config_.beta_weight == BetaWeight::published;
      add(&Gates::beta, {.gate = published ? Gate::squared_sigmoid : Gate::sigmoid, .bias = beta_bias_, .a_log = {}});
    }
    if (alpha_.defined()) add(&Gates::alpha, {.gate = Gate::sigmoid, .bias = alpha_bias_, .a_log = {}});
    return gates;
  }

  Gates gates(const at::Tensor& projected) const {
    const auto gates = gate_kinds();
    const auto values = open_gates(projected, gates.kinds);
    Gates g;
    for (std::size_t i = 0; i < values.size(); ++i) g.*gates.places[i] = values[i];
    return g;
  }

  /// Whether one kernel may do all that a step has between its projections; that kernel has the last word.
  bool may_step_at_once(const at::Tensor& x, const Call& call) const {
    if (!call.is_step() || !x.is_cuda() || at::GradMode::is_enabled() || config_.num_iter == 0 || sketch_.defined()) {
      return false;
    }
    const bool every_head =
        (sizes_.q_heads == sizes_.heads && sizes_.k_heads == sizes_.heads && sizes_.v_heads == sizes_.heads) ||
        (expand_k_.copies() && expand_v_.copies());
    const bool sizes =
        (sizes_.key_dim == 64 || sizes_.key_dim == 128) && (sizes_.value_dim == 64 || sizes_.value_dim == 128);
    return every_head && sizes && query_.conv() && key_.conv() && value_.conv() && gate_weights_.defined() &&
           config_.solver_type == Solver::chebyshev && config_.ridge_mode == RidgeMode::adaptive;
  }

  /// The norm's answer; undefined where the kernel declines, and then the call is as it was.
  at::Tensor step_at_once(const at::Tensor& x, const std::vector<at::Tensor>& others, Call& call) const {
    std::vector<at::Tensor> weights{query_.weight(), key_.weight(), value_.weight()};
    weights.insert(weights.end(), others.begin(), others.end());
    const auto parts = project_all(x, weights, call.inference().norm);
    Call own = call;
    ops::BlockStepCall step;
    const HeadProjection* const heads[] = {&query_, &key_, &value_};
    for (std::size_t i = 0; i < 3; ++i) {
      const auto& options = heads[i]->options();
      step.convs.push_back(heads[i]->conv().step_call(parts[i], own, options.norm, options.head_dim));
    }
    const auto gates = gate_kinds();
    step.projected = parts.back();
    step.kinds = gates.kinds;
    step.log_decay = gates.find(&Gates::log_decay);
    step.beta = gates.find(&Gates::beta);
    step.alpha = gates.find(&Gates::alpha);

    const auto& inference = call.inference();
    ops::MemoryCall& memory = step.memory;
    memory.h = own.take();
    memory.u = own.take();
    memory.state_indices = call.slots();
    memory.scale = scale_;
    memory.ridge = config_.ridge_strength;
    memory.iterations = inference.iterations.value_or(config_.num_iter);
    memory.iterations_per_sequence = inference.iterations_each;
    memory.solver = config_.solver_type;
    memory.ridge_mode = config_.ridge_mode;
    memory.decay_keys = config_.use_forgetting_gate_kk;
    if (inference.certainty != nullptr) {
      memory.certainty = at::empty({x.size(0), sizes_.heads}, x.options().dtype(at::kDouble));
    }
    step.norm = output_.norm_call(output_.gate_weight().defined() ? parts[3] : at::Tensor());
    const auto certainty = memory.certainty;
    const auto normed = ops::block_step(std::move(step));
    if (normed.defined() && certainty.defined()) inference.certainty->push_back(certainty.mean(-1));
    return normed;
  }

  at::Tensor answer(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Gates& g, Call& call) const {
    const auto ask = [&](const at::Tensor& query, const at::Tensor& key) {
      return remember({.q = query, .k = key, .v = v, .log_decay = g.log_decay, .beta = g.beta, .scale = scale_},
                      MemoryRule::add, call);
    };
    if (config_.num_iter == 0) return ask(q, k);
    if (sketch_.defined()) {
      const auto [low_q, low_k, same_q, same_k] = ops::to_sketch(q, k, sketch_);
      return ask(ops::from_sketch(same_q, sketched_solve(low_q, low_k, g, call), sketch_, g.alpha), same_k);
    }
    return call.is_step() ? one_token(q, k, v, g, call) : whole_sequences(q, k, v, g, call);
  }

  at::Tensor whole_sequences(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Gates& g,
                             Call& call) const {
    const auto h = call.take();
    const Options options{.scale = scale_,
                          .ridge = config_.ridge_strength,
                          .iterations = call.inference().iterations.value_or(config_.num_iter),
                          .solver = config_.solver_type,
                          .gradient = config_.gradient,
                          .ridge_mode = config_.ridge_mode,
                          .ridge_gradient = config_.bp_lambda,
                          .decay_keys = config_.use_forgetting_gate_kk,
                          .initial_state = {.h = h, .u = call.take()},
                          .output_final_state = call.wants_state(),
                          .cu_seqlens = call.sequences().cu_seqlens()};
    const auto give = [&](const at::Tensor& o, const gka::State& state) {
      call.give(state.h);
      call.give(state.u);
      return o;
    };
    if (auto* certainty = call.inference().certainty; certainty != nullptr) {
      const auto result = gated_kalmanet_certainty(q, k, v, g.log_decay, g.beta, g.alpha, options);
      certainty->push_back(result.certainty.mean(-1));
      return give(result.o, result.final_state);
    }
    const auto result = gated_kalmanet(q, k, v, g.log_decay, g.beta, g.alpha, options);
    return give(result.o, result.final_state);
  }

  at::Tensor one_token(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Gates& g,
                       Call& call) const {
    const auto h = call.take(), u = call.take();
    const auto& inference = call.inference();
    std::variant<std::int64_t, at::Tensor> iterations = inference.iterations.value_or(config_.num_iter);
    if (inference.iterations_each.defined()) iterations = inference.iterations_each;
    const auto certainty = inference.certainty != nullptr
                               ? at::empty({q.size(0), q.size(1)}, q.options().dtype(at::kDouble))
                               : at::Tensor();
    const auto o = gated_kalmanet_step(q, k, v, g.log_decay, g.beta, g.alpha,
                                       {.state = {.h = h, .u = u},
                                        .state_indices = call.slots(),
                                        .scale = scale_,
                                        .ridge = config_.ridge_strength,
                                        .iterations = iterations,
                                        .solver = config_.solver_type,
                                        .ridge_mode = config_.ridge_mode,
                                        .decay_keys = config_.use_forgetting_gate_kk,
                                        .certainty = certainty});
    if (certainty.defined()) inference.certainty->push_back(certainty.mean(-1));
    return o;
  }

  /// solve(Ĥ + λ̂I, P q), of P q and P k. There is no step of the solve alone: one token is a sequence of one.
  at::Tensor sketched_solve(const at::Tensor& q, const at::Tensor& k, const Gates& g, Call& call) const {
    const auto token = [&](const at::Tensor& t) { return call.is_step() && t.defined() ? t.unsqueeze(1) : t; };
    const auto fading = config_.use_forgetting_gate_kk ? g.log_decay : at::Tensor();

    const at::Tensor pool = call.take();
    const auto result = ridge_solve(token(q), token(k), token(fading), token(g.beta),
                                    {.ridge = config_.ridge_strength,
                                     .iterations = call.inference().iterations.value_or(config_.num_iter),
                                     .solver = config_.solver_type,
                                     .gradient = config_.gradient,
                                     .ridge_mode = config_.ridge_mode,
                                     .ridge_gradient = config_.bp_lambda,
                                     .initial_state = call.is_step() ? call.read(pool, q.size(0)) : pool,
                                     .output_final_state = call.wants_state() || call.is_step(),
                                     .cu_seqlens = call.is_step() ? at::Tensor() : call.sequences().cu_seqlens()});
    if (call.is_step()) {
      call.write(pool, result.final_state);
    } else {
      call.give(result.final_state);
    }
    return call.is_step() ? result.x.squeeze(1) : result.x;
  }

  GkaConfig config_;
  HeadSizes sizes_;
  SharedRoom room_;
  HeadProjection query_, key_, value_;
  HeadExpansion expand_k_, expand_v_;
  HeadOutput output_;
  at::Tensor gate_weights_;  // of decay_proj_, beta_ and alpha_, those that there are
  at::Tensor decay_proj_, beta_, beta_bias_, alpha_, alpha_bias_, sketch_;
  DecayParameters decay_;
  double scale_ = 1.0;
};

}  // namespace

std::unique_ptr<Mixer> make_gka(const MixerConfig& config, const Scope& scope) {
  return std::make_unique<Gka>(config, scope);
}

}  // namespace gka::layers
