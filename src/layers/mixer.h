// What mixes tokens in a block: attention and every memory behind one interface.
//
// In training `forward` sees whole sequences; in inference it takes in a prompt and hands out the state, and `step`
// then adds one token to each of any set of sequences whose states lie in one pool, in place.
//
// Activations have the type of x (parameters are cast to it where they differ, so float32 parameters under a bfloat16
// stream are master weights); gates, norms and memories compute in float32, all of it in float64 for float64 x.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "layers/sequences.h"
#include "ops/linear.h"

namespace gka::layers {

/// What a mixer remembers of some sequences: its tensors, each [slots, …], in the order of Mixer::state_fields.
struct State {
  std::vector<at::Tensor> tensors;
};

/// One tensor of a state.
struct StateField {
  std::string name;
  std::vector<std::int64_t> shape;  // of one slot; of a cache: of one token
  at::ScalarType dtype = at::kFloat;
  /// 0: the size is fixed. Otherwise a cache [slots, capacity, shape…] of at most so many tokens; position p lies at
  /// p mod max_tokens.
  std::int64_t max_tokens = 0;
};
inline constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();
inline constexpr std::int64_t kPageTokens = 64;

struct StateOptions {
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;  // of the activations; memories are float32 or float64 regardless
  std::int64_t capacity = 0;          // tokens a cache has room for; memories of fixed size ignore it
  /// > 0: caches without a bound are so many pages for all slots together, [pages, kPageTokens, …]; see Inference.
  std::int64_t pages = 0;
  bool int8_pages = false;  // those pages hold bytes (kernels/int8_pages.h)
};

/// A field as pages keep it: without a bound, and `int8`, as bytes.
StateField in_pages(StateField field, bool int8);

struct Rotations;  // rotary.h

/// What inference may ask of a call beyond its tokens.
struct Inference {
  /// Caches without a bound lie in pages: int64 [sequences, pages each] on the device; page i of a sequence holds its
  /// tokens from i · kPageTokens on. Such a tensor of the state is the pool of pages, changed in place by `forward`
  /// too, which then gives an undefined tensor for it. In a state that comes with it, an undefined tensor remembers
  /// nothing.
  at::Tensor pages{};
  /// Where a sequence's first pages are gone, page i holds its tokens from `dropped` + i · kPageTokens on, and
  /// attention sees no others; rotary positions are counted from its first token ever all the same. For `forward` the
  /// tokens that are gone, of each sequence, on the host; for a step where in its pages each new token goes, int64 [B]
  /// on the device. Empty and undefined: every page is there, and a token's place is its position.
  std::vector<std::int64_t> dropped{};
  at::Tensor places{};
  /// GKA's solver steps: for all sequences; and in a step, int32 [B] on the device, for each.
  std::optional<std::int64_t> iterations{};
  at::Tensor iterations_each{};
  /// Gets from every GKA layer, in turn, how much of each token's query the past explains: 1 − λ q·x/‖q‖², the mean
  /// over heads, [B,T] or in a step [B]. Costs a second solve.
  std::vector<at::Tensor>* certainty = nullptr;
  /// In a step of a mixer that takes the stream: x is the block's residual stream. The mixer norms it where it projects
  /// it, and what it returns is x plus its answer.
  ops::InputNorm norm{};
  /// Of attention's positions, for all layers of one call; the decoder sees to it.
  std::shared_ptr<Rotations> rotations{};
};

struct MixerOutput {
  at::Tensor y;  // [B,T,C]
  State state;   // of all sequences, in order; empty unless wanted
};

/// What a mixer's parts see of one call of `forward` or `step`. Parts run in the order of the state's fields, and each
/// takes its tensor of the state in turn.
class Call {
 public:
  /// A call of `forward`.
  Call(const Sequences& sequences, const State* in, bool want_state, const Inference& inference = {})
      : sequences_(&sequences), in_(in), want_state_(want_state), inference_(inference) {}
  /// A call of `step`.
  Call(const State& pool, const at::Tensor& slots, const at::Tensor& positions, const Inference& inference = {})
      : in_(&pool), slots_(slots), positions_(positions), inference_(inference) {}

  bool is_step() const { return sequences_ == nullptr; }
  bool wants_state() const { return want_state_; }
  /// Whether no sequence has a state from before.
  bool begins() const { return in_ == nullptr; }
  const Sequences& sequences() const { return *sequences_; }
  /// In a step: which slots of the pool; undefined: all of the first ones.
  const at::Tensor& slots() const { return slots_; }
  /// int64 [B,T] or [B].
  const at::Tensor& positions() const { return is_step() ? positions_ : sequences_->positions(); }

  const Inference& inference() const { return inference_; }
  /// What the mixer's answer is to be added to (Inference::norm); undefined: nothing.
  at::Tensor stream(const at::Tensor& x) const { return inference_.norm.weight.defined() ? x : at::Tensor(); }

  /// The next tensor of the state: in a step the pool's, to be changed in place; undefined where sequences begin here.
  at::Tensor take() { return in_ != nullptr ? in_->tensors.at(next_++) : at::Tensor(); }
  /// The same tensor after the call; for `forward` alone.
  void give(const at::Tensor& state) {
    if (want_state_) out_.tensors.push_back(state);
  }
  State& out() { return out_; }

  /// In a step: what a tensor of the pool holds for the call's `batch` sequences, and new contents for them.
  at::Tensor read(const at::Tensor& pool, std::int64_t batch) const;
  void write(at::Tensor pool, const at::Tensor& values) const;

 private:
  const Sequences* sequences_ = nullptr;
  const State* in_ = nullptr;
  bool want_state_ = false;
  at::Tensor slots_, positions_;
  Inference inference_;
  std::size_t next_ = 0;
  State out_;
};

/// For counting FLOP: a product and its sum, and how often they run in training, as the backward pass of a product is
/// two products.
inline constexpr double kMultiplyAdd = 2, kWithBackward = 3;

class Mixer {
 public:
  virtual ~Mixer() = default;

  /// x [B,T,C]. `in` holds one slot per sequence (nullptr: they begin here) and is left as it was.
  MixerOutput forward(const at::Tensor& x, const Sequences& sequences, const State* in = nullptr,
                      bool want_state = false, const Inference& inference = {}) const;

  /// One token for each of B sequences: x [B,C], slots int64 [B] (distinct; undefined: sequence b is slot b), positions
  /// int64 [B] (how many tokens the sequence had before). Updates the pool in place; returns [B,C]; has no gradient.
  /// Waits for no device: that a cache has room for a position is the caller's to see to (`reserve`).
  at::Tensor step(const at::Tensor& x, const State& pool, const at::Tensor& slots, const at::Tensor& positions,
                  const Inference& inference = {}) const;

  /// Whether steps know Inference::norm.
  virtual bool takes_stream() const { return false; }

  /// The tensors of a state for activations of `dtype`.
  virtual std::vector<StateField> state_fields(at::ScalarType dtype) const = 0;

  /// FLOP per token that mixing takes, forward and backward, on average over a sequence of `tokens`, besides those of
  /// the projections (6 per parameter). Counted are the multiplications and additions of the definition, token by
  /// token; what a chunked algorithm adds to go faster is not.
  virtual double flops(std::int64_t tokens) const = 0;

  /// `slots` states that remember nothing.
  State make_state(std::int64_t slots, const StateOptions& options) const;
  /// Bytes that one sequence of so many tokens needs.
  std::int64_t state_bytes(std::int64_t tokens, at::ScalarType dtype) const;
  /// Makes slots (int64; undefined: all) forget everything, in place.
  void reset(const State& state, const at::Tensor& slots = {}) const;
  /// Gives caches room for `capacity` tokens; keeps what they hold. No effect where they have it.
  void reserve(State& state, std::int64_t capacity) const;
  /// Slots of a state as a state of their own (a copy), and back into a pool, whose slots then hold that and nothing
  /// else. A cache in the pool needs the room; one in pages (undefined in `from`) stays as it is.
  State gather(const State& pool, const at::Tensor& slots) const;
  void scatter(const State& from, const State& pool, const at::Tensor& slots) const;

 protected:
  /// Both of them: x is [B,T,C] (rows or packed, never padded) or, in a step, [B,C].
  virtual at::Tensor mix(const at::Tensor& x, Call& call) const = 0;
};

}  // namespace gka::layers
