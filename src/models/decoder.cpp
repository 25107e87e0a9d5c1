#include "models/decoder.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>

#include <stdexcept>
#include <type_traits>
#include <utility>

#include "gka/errors.h"
#include "layers/functions.h"
#include "layers/mixers.h"
#include "layers/rotary.h"
#include "models/activations.h"
#include "ops/linear.h"
#include "ops/recompute.h"
#include "ops/stored.h"

namespace gka::models {

namespace {

/// What passes through the blocks: x + change. The sum is left to the norm after it, which has to read it anyhow.
struct Stream {
  at::Tensor x, change;  // change: undefined at the start
};

}  // namespace

class Decoder::Block {
 public:
  Block(const ModelConfig& config, std::size_t place, layers::Parameters& parameters)
      : eps_(config.mixer.rms_norm_eps) {
    const auto first_parameter = parameters.all().size();
    const auto& kind = layers::mixer_kind(config.layer_types[place]);
    const auto scope = layers::Scope(parameters) / "model" / "layers" / std::to_string(place);
    name_ = scope.prefix();
    mixer_name_ = name_ + std::string(kind.prefix);
    const auto add_norm = [&](const char* name) {
      return (scope / name)
          .add("weight", {config.mixer.hidden_size}, layers::init::constant(1), layers::WeightDecay::no);
    };
    mixer_norm_ = add_norm("input_layernorm");
    mixer_ = kind.make(config.mixer, scope / kind.prefix);
    if (!kind.stands_alone || config.mlp_everywhere) {
      mlp_norm_ = add_norm("post_attention_layernorm");
      mlp_.emplace(config.mixer.hidden_size, config.intermediate_size, config.mixer.initializer_range, scope / "mlp");
    }
    for (auto i = first_parameter; i < parameters.all().size(); ++i) own_.push_back(parameters.all()[i].value);
  }

  /// Returns the stream after the block, and the mixer's state.
  std::pair<Stream, layers::State> forward(const Stream& stream, const layers::Sequences& sequences,
                                           const layers::State* state, const ForwardOptions& options) const {
    const auto& observe = options.observe;
    const auto [x, normed] = layers::add_norm(stream.x, stream.change, mixer_norm_, eps_);
    auto mixed =
        named([&] { return mixer_->forward(normed, sequences, state, options.want_state, options.inference); });
    mixed.y = forget_normed(mixed.y, normed, x, mixer_norm_);
    if (observe) observe(mixer_name_, mixed.y);
    return {add_mlp({.x = x, .change = mixed.y}, observe), std::move(mixed.state)};
  }

  at::Tensor forward_recomputed(const at::Tensor& x, const layers::Sequences& sequences) const {
    // The node in the graph may outlive the caller's sequences, not the decoder.
    const auto body = [this, sequences](const at::Tensor& input) {
      const auto after = forward({.x = input, .change = {}}, sequences, nullptr, {}).first;
      return after.x.add(after.change);
    };
    return ops::recompute(body, x, own_);
  }

  Stream step(const Stream& stream, const layers::State& pool, const at::Tensor& slots, const at::Tensor& positions,
              const layers::Inference& inference) const {
    if (!stream.change.defined() && mixer_->takes_stream() && ops::has_small_products(stream.x, {})) {
      return folded(stream.x, pool, slots, positions, inference);
    }
    const auto [x, normed] = layers::add_norm(stream.x, stream.change, mixer_norm_, eps_);
    const auto y = named([&] { return mixer_->step(normed, pool, slots, positions, inference); });
    return add_mlp({.x = x, .change = y}, {});
  }

  const layers::Mixer& mixer() const { return *mixer_; }

 private:
  /// An error inside the mixer, with its name.
  template <typename Call>
  std::invoke_result_t<Call> named(const Call& call) const {
    try {
      return call();
    } catch (const NotFiniteError& error) {
      throw LayerError(mixer_name_, error.what_without_backtrace(), /*was_not_finite=*/true);
    } catch (const c10::Error& error) {
      throw LayerError(mixer_name_, error.what_without_backtrace());
    } catch (const std::exception& error) {
      throw LayerError(mixer_name_, error.what());
    }
  }

  /// A step of few rows on a GPU: norms and sums are part of the products beside them.
  Stream folded(const at::Tensor& x, const layers::State& pool, const at::Tensor& slots, const at::Tensor& positions,
                const layers::Inference& inference) const {
    auto own = inference;
    own.norm = {.weight = mixer_norm_, .eps = eps_};
    const auto mixed = named([&] { return mixer_->step(x, pool, slots, positions, own); });
    return {.x = mlp_ ? mlp_->onto(mixed, {.weight = mlp_norm_, .eps = eps_}) : mixed, .change = {}};
  }

  Stream add_mlp(const Stream& stream, const Observer& observe) const {
    if (!mlp_) return stream;
    const auto [x, normed] = layers::add_norm(stream.x, stream.change, mlp_norm_, eps_);
    const auto y = forget_normed(mlp_->forward(normed), normed, x, mlp_norm_);
    if (observe) observe(name_ + "mlp", y);
    return {.x = x, .change = y};
  }

  /// y, computed from `normed`, of which training keeps x alone.
  at::Tensor forget_normed(const at::Tensor& y, const at::Tensor& normed, const at::Tensor& x,
                           const at::Tensor& weight) const {
    if (!at::GradMode::is_enabled()) return y;
    const auto make = [x = x.detach(), weight, eps = eps_] { return layers::add_norm(x, {}, weight, eps).normed; };
    return ops::forget(y, {{.tensor = normed, .make = make}});
  }

  double eps_;
  std::string name_, mixer_name_;
  at::Tensor mixer_norm_, mlp_norm_;
  std::unique_ptr<layers::Mixer> mixer_;
  std::optional<layers::SwiGlu> mlp_;
  std::vector<at::Tensor> own_;
};

namespace {

void check_ids(const at::Tensor& ids, std::int64_t vocabulary) {
  if (!ids.is_cpu() || ids.numel() == 0) return;
  const auto lowest = ids.min().item<std::int64_t>();
  const auto highest = ids.max().item<std::int64_t>();
  if (lowest >= 0 && highest < vocabulary) return;
  throw std::invalid_argument("the token " + std::to_string(lowest < 0 ? lowest : highest) +
                              " is outside the vocabulary of " + std::to_string(vocabulary) + " tokens");
}

/// The quick matrix products of a GPU take outputs by eights. An embedding of another size, which may be a head too,
/// lies in a room with some rows more.
constexpr std::int64_t kOutputs = 8;
std::int64_t with_room(std::int64_t tokens) { return (tokens + kOutputs - 1) / kOutputs * kOutputs; }

at::Tensor room_for(const ModelConfig& config, const layers::Parameters& parameters) {
  const auto& options = parameters.options();
  const auto tokens = config.vocab_size, rows = with_room(tokens);
  if (!options.device.is_cuda() || options.requires_grad || rows == tokens) return {};
  const auto room = parameters.matrix_room({rows, config.mixer.hidden_size});
  room.narrow(0, tokens, rows - tokens).zero_();
  return room.narrow(0, 0, tokens);
}

/// A matrix and the rows behind it, where there are any.
at::Tensor with_rows_behind(const at::Tensor& matrix) {
  const auto rows = with_room(matrix.size(0));
  const auto bytes = (matrix.storage_offset() + rows * matrix.size(1)) * static_cast<std::int64_t>(matrix.itemsize());
  if (!matrix.is_cuda() || !matrix.is_contiguous() || static_cast<std::int64_t>(matrix.storage().nbytes()) < bytes) {
    return matrix;
  }
  return matrix.as_strided({rows, matrix.size(1)}, matrix.strides());
}

}  // namespace

Decoder::Decoder(ModelConfig config, layers::ParameterOptions options)
    : config_(std::move(config)), parameters_(std::make_unique<layers::Parameters>(std::move(options))) {
  const auto root = layers::Scope(*parameters_);
  const auto normal = layers::init::normal(config_.mixer.initializer_range);
  embedding_ = (root / "model" / "embed_tokens")
                   .add_matrix("weight", {config_.vocab_size, config_.mixer.hidden_size}, normal,
                               room_for(config_, *parameters_));
  blocks_.reserve(config_.layer_types.size());
  for (std::size_t i = 0; i < config_.layer_types.size(); ++i) blocks_.emplace_back(config_, i, *parameters_);
  norm_ = (root / "model" / "norm")
              .add("weight", {config_.mixer.hidden_size}, layers::init::constant(1), layers::WeightDecay::no);
  if (!config_.tie_word_embeddings) {
    head_ = (root / "lm_head")
                .add_matrix("weight", {config_.vocab_size, config_.mixer.hidden_size}, normal,
                            room_for(config_, *parameters_));
  }
}

Decoder::~Decoder() = default;
Decoder::Decoder(Decoder&&) noexcept = default;
Decoder& Decoder::operator=(Decoder&&) noexcept = default;

at::Tensor Decoder::embed(const at::Tensor& ids, at::ScalarType dtype) const {
  check_ids(ids, config_.vocab_size);
  const auto places = layers::upload(ids, device());
  if (!ops::is_int8(embedding_)) return at::embedding(embedding_, places).to(dtype);
  const auto rows = ops::dense(embedding_.index_select(0, places.flatten()), config_.mixer.hidden_size, dtype);
  return rows.unflatten(0, places.sizes());
}

ForwardResult Decoder::forward(const at::Tensor& ids, const layers::Sequences& sequences,
                               const ForwardOptions& options) const {
  const bool states = options.state != nullptr || options.want_state;
  if (options.recompute && states) {
    throw std::invalid_argument("a forward pass that recomputes its blocks takes no states and returns none");
  }
  if (options.state != nullptr && options.state->blocks.size() != blocks_.size()) {
    throw std::invalid_argument("the state is of " + std::to_string(options.state->blocks.size()) +
                                " blocks and the model has " + std::to_string(blocks_.size()));
  }
  const auto& observe = options.observe;
  auto of_blocks = options;
  of_blocks.inference.rotations = std::make_shared<layers::Rotations>();
  ForwardResult result;
  Stream stream{.x = embed(ids, options.dtype.value_or(activations_of(parameters_->options()))), .change = {}};
  if (observe) observe("model.embed_tokens", stream.x);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    if (options.recompute) {
      stream.x = blocks_[i].forward_recomputed(stream.x, sequences);
      continue;
    }
    const auto* before = options.state != nullptr ? &options.state->blocks[i] : nullptr;
    auto [after, state] = blocks_[i].forward(stream, sequences, before, of_blocks);
    stream = std::move(after);
    if (options.want_state) result.state.blocks.push_back(std::move(state));
  }
  result.hidden = layers::add_norm(stream.x, stream.change, norm_, config_.mixer.rms_norm_eps).normed;
  if (observe) observe("model.norm", result.hidden);
  return result;
}

at::Tensor Decoder::logits(const at::Tensor& hidden) const {
  if (ops::is_learning(head())) return layers::project(hidden, head());
  return layers::project(hidden, with_rows_behind(head())).narrow(-1, 0, config_.vocab_size);
}

Loss Decoder::loss(const at::Tensor& hidden, const at::Tensor& labels, const LossOptions& options) const {
  return sliced_cross_entropy(hidden, head_for(hidden), labels, options);
}

Loss Decoder::loss_at(const at::Tensor& hidden, const at::Tensor& targets, const LossOptions& options) const {
  return sliced_cross_entropy_at(hidden.flatten(0, -2), head_for(hidden), targets, options);
}

at::Tensor Decoder::log_probabilities(const at::Tensor& hidden, const at::Tensor& labels) const {
  return sliced_log_probabilities(hidden, head_for(hidden), labels);
}

/// As numbers, where it is stored as bytes.
at::Tensor Decoder::head_for(const at::Tensor& hidden) const {
  return ops::is_int8(head()) ? ops::dense(head(), hidden.size(-1), hidden.scalar_type()) : head();
}

at::Tensor Decoder::step(const at::Tensor& ids, const DecoderState& pool, const at::Tensor& slots,
                         const at::Tensor& positions, const layers::Inference& inference) const {
  const at::NoGradGuard no_gradient;
  auto of_blocks = inference;
  of_blocks.rotations = std::make_shared<layers::Rotations>();
  Stream stream{.x = embed(ids, activations_of(parameters_->options())), .change = {}};
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    stream = blocks_[i].step(stream, pool.blocks.at(i), slots, positions, of_blocks);
  }
  return layers::add_norm(stream.x, stream.change, norm_, config_.mixer.rms_norm_eps).normed;
}

DecoderState Decoder::make_state(std::int64_t slots, const layers::StateOptions& options) const {
  DecoderState state;
  for (const auto& block : blocks_) state.blocks.push_back(block.mixer().make_state(slots, options));
  return state;
}

std::int64_t Decoder::state_bytes(std::int64_t tokens, at::ScalarType dtype) const {
  std::int64_t bytes = 0;
  for (const auto& block : blocks_) bytes += block.mixer().state_bytes(tokens, dtype);
  return bytes;
}

void Decoder::reset(const DecoderState& state, const at::Tensor& slots) const {
  for (std::size_t i = 0; i < blocks_.size(); ++i) blocks_[i].mixer().reset(state.blocks.at(i), slots);
}

void Decoder::reserve(DecoderState& state, std::int64_t capacity) const {
  for (std::size_t i = 0; i < blocks_.size(); ++i) blocks_[i].mixer().reserve(state.blocks.at(i), capacity);
}

DecoderState Decoder::gather(const DecoderState& pool, const at::Tensor& slots) const {
  DecoderState state;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    state.blocks.push_back(blocks_[i].mixer().gather(pool.blocks.at(i), slots));
  }
  return state;
}

void Decoder::scatter(const DecoderState& from, const DecoderState& pool, const at::Tensor& slots) const {
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    blocks_[i].mixer().scatter(from.blocks.at(i), pool.blocks.at(i), slots);
  }
}

std::vector<std::vector<layers::StateField>> Decoder::state_fields(at::ScalarType dtype, bool int8_pages) const {
  std::vector<std::vector<layers::StateField>> fields;
  for (const auto& block : blocks_) {
    auto& own = fields.emplace_back(block.mixer().state_fields(dtype));
    for (auto& field : own) field = layers::in_pages(std::move(field), int8_pages);
  }
  return fields;
}

std::optional<std::string> first_not_finite(const Decoder& decoder, const at::Tensor& ids,
                                            const layers::Sequences& sequences, const ForwardOptions& options) {
  const at::NoGradGuard no_gradient;
  const auto finite = [](const at::Tensor& tensor) { return tensor.isfinite().all().item<bool>(); };
  for (const auto& parameter : decoder.parameters().all()) {
    if (!finite(parameter.value)) return parameter.name;
  }
  struct Found {
    std::string name;
  };
  auto watched = options;
  watched.recompute = false;
  watched.observe = [&](const std::string& name, const at::Tensor& output) {
    if (!finite(output)) throw Found{name};
  };
  try {
    decoder.forward(ids, sequences, watched);
  } catch (const Found& found) {
    return found.name;
  } catch (const LayerError& error) {
    return error.layer;
  }
  return std::nullopt;
}

std::int64_t count_parameters(const ModelConfig& config) {
  return Decoder(config, {.device = at::kMeta}).parameters().count();
}

}  // namespace gka::models
