// One decoder for every mixture of mixers: embedding, blocks, norm, head. A block is
//
//   x += mixer(norm(x));  x += mlp(norm(x))
//
// and the pattern picks the mixer; a mixer published without an MLP beside it (Mamba2) has none, nor its norm.
//
// Activations have the type asked for, which may differ from the parameters': float32 parameters under bfloat16
// activations are master weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "layers/mixer.h"
#include "layers/parameters.h"
#include "layers/sequences.h"
#include "models/config.h"
#include "models/loss.h"

namespace gka::models {

/// What every block remembers of some sequences.
struct DecoderState {
  std::vector<layers::State> blocks;
};

/// Sees what each part puts out: "model.embed_tokens", "model.layers.3.gka", "model.layers.3.mlp", "model.norm".
using Observer = std::function<void(const std::string& name, const at::Tensor& output)>;

/// What went wrong inside a layer, and in which: "model.layers.3.gka".
struct LayerError : std::runtime_error {
  LayerError(const std::string& layer_name, const std::string& what, bool was_not_finite = false)
      : std::runtime_error(layer_name + ": " + what), layer(layer_name), not_finite(was_not_finite) {}
  std::string layer;
  bool not_finite;  // an operator met a NaN or an infinity (gka::NotFiniteError)
};

struct ForwardOptions {
  const DecoderState* state = nullptr;  // one slot per sequence; nullptr: they begin here
  bool want_state = false;
  /// Activation checkpointing: blocks are computed again in the backward pass. Not together with states.
  bool recompute = false;
  std::optional<at::ScalarType> dtype{};  // of the activations; else the parameters'
  layers::Inference inference{};
  Observer observe{};
};

struct ForwardResult {
  at::Tensor hidden;   // [B,T,C], after the last norm
  DecoderState state;  // empty unless wanted
};

class Decoder {
 public:
  /// With a generator in `options` the weights are drawn, else they are to be loaded; on at::kMeta nothing is
  /// allocated.
  explicit Decoder(ModelConfig config, layers::ParameterOptions options = {});
  ~Decoder();
  Decoder(Decoder&&) noexcept;
  Decoder& operator=(Decoder&&) noexcept;

  const ModelConfig& config() const { return config_; }
  layers::Parameters& parameters() { return *parameters_; }
  const layers::Parameters& parameters() const { return *parameters_; }
  at::Device device() const { return parameters_->options().device; }

  /// ids: integers [B,T], rows, packed or padded as `sequences` says. On the CPU a token outside the vocabulary throws;
  /// what a layer throws comes as a LayerError (operators refuse NaN in their gates there).
  ForwardResult forward(const at::Tensor& ids, const layers::Sequences& sequences,
                        const ForwardOptions& options = {}) const;

  /// [..., V] from what `forward` or `step` returned.
  at::Tensor logits(const at::Tensor& hidden) const;
  /// Without the logits of all tokens at once; labels [B,T] are already shifted: labels[t] follows ids[t].
  Loss loss(const at::Tensor& hidden, const at::Tensor& labels, const LossOptions& options = {}) const;

  /// The same with the tokens that have a label already picked (`pick_targets`), on the model's device.
  Loss loss_at(const at::Tensor& hidden, const at::Tensor& targets, const LossOptions& options = {}) const;

  /// log p(label) at each token, with labels likewise. No gradient.
  at::Tensor log_probabilities(const at::Tensor& hidden, const at::Tensor& labels) const;

  /// One token for each of B sequences: ids [B], slots int64 [B] (distinct; undefined: sequence b is slot b), positions
  /// int64 [B]: how many tokens it had before. Updates the pool in place; returns hidden [B,C]; has no gradient.
  at::Tensor step(const at::Tensor& ids, const DecoderState& pool, const at::Tensor& slots, const at::Tensor& positions,
                  const layers::Inference& inference = {}) const;

  // Pools of states: every block's at once, as layers::Mixer has them for one.
  DecoderState make_state(std::int64_t slots, const layers::StateOptions& options) const;
  std::int64_t state_bytes(std::int64_t tokens, at::ScalarType dtype) const;
  void reset(const DecoderState& state, const at::Tensor& slots = {}) const;
  void reserve(DecoderState& state, std::int64_t capacity) const;
  DecoderState gather(const DecoderState& pool, const at::Tensor& slots) const;
  void scatter(const DecoderState& from, const DecoderState& pool, const at::Tensor& slots) const;
  /// The tensors of every block's state, for activations of `dtype`, with pages of bytes or of numbers.
  std::vector<std::vector<layers::StateField>> state_fields(at::ScalarType dtype, bool int8_pages = false) const;

 private:
  class Block;

  at::Tensor embed(const at::Tensor& ids, at::ScalarType dtype) const;
  at::Tensor head_for(const at::Tensor& hidden) const;
  const at::Tensor& head() const { return head_.defined() ? head_ : embedding_; }

  ModelConfig config_;
  std::unique_ptr<layers::Parameters> parameters_;
  at::Tensor embedding_, norm_, head_;  // head_ is undefined where it is the embedding
  std::vector<Block> blocks_;
};

/// By name, the first parameter that has a NaN or an infinity, else the first part whose output has one on these
/// tokens; nothing where all is finite.
std::optional<std::string> first_not_finite(const Decoder& decoder, const at::Tensor& ids,
                                            const layers::Sequences& sequences, const ForwardOptions& options = {});

/// How many numbers a model of that configuration has, without allocating them.
std::int64_t count_parameters(const ModelConfig& config);

}  // namespace gka::models
