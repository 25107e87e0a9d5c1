#include "layers/mixer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "ops/int8_pages.h"

namespace gka::layers {
namespace {

std::vector<std::int64_t> shape_of(const StateField& field, std::int64_t slots, std::int64_t capacity,
                                   std::int64_t pages = 0) {
  if (pages > 0 && field.max_tokens == kUnbounded) return shape_of(field, pages, kPageTokens);
  std::vector<std::int64_t> shape{slots};
  if (field.max_tokens > 0) shape.push_back(std::min(capacity, field.max_tokens));
  shape.insert(shape.end(), field.shape.begin(), field.shape.end());
  return shape;
}

void check_input(const at::Tensor& x, const Sequences& sequences) {
  if (x.dim() != 3 || x.size(0) != sequences.batch() || x.size(1) != sequences.tokens()) {
    throw std::invalid_argument("x must be [" + std::to_string(sequences.batch()) + ", " +
                                std::to_string(sequences.tokens()) +
                                ", hidden size], as the sequences that come with it say.");
  }
}

}  // namespace

StateField in_pages(StateField field, bool int8) {
  if (!int8 || field.max_tokens != kUnbounded) return field;
  field.shape = ops::int8_token_shape(std::move(field.shape));
  field.dtype = at::kChar;
  return field;
}

at::Tensor Call::read(const at::Tensor& pool, std::int64_t batch) const {
  return slots_.defined() ? pool.index_select(0, slots_) : pool.narrow(0, 0, batch);
}

void Call::write(at::Tensor pool, const at::Tensor& values) const {
  if (slots_.defined()) {
    pool.index_copy_(0, slots_, values);
  } else {
    pool.narrow(0, 0, values.size(0)).copy_(values);
  }
}

MixerOutput Mixer::forward(const at::Tensor& x, const Sequences& sequences, const State* in, bool want_state,
                           const Inference& inference) const {
  check_input(x, sequences);
  if (!sequences.is_padded()) {
    Call call(sequences, in, want_state, inference);
    at::Tensor y = mix(x, call);
    return {.y = std::move(y), .state = std::move(call.out())};
  }
  const auto& kept = sequences.kept();
  const auto flat = x.flatten(0, 1);
  MixerOutput dense = forward(flat.index_select(0, kept).unsqueeze(0), sequences.dense(), in, want_state, inference);
  dense.y = at::zeros(flat.sizes(), flat.options()).index_copy(0, kept, dense.y.squeeze(0)).view(x.sizes());
  return dense;
}

at::Tensor Mixer::step(const at::Tensor& x, const State& pool, const at::Tensor& slots, const at::Tensor& positions,
                       const Inference& inference) const {
  const at::NoGradGuard no_grad;
  Call call(pool, slots, positions, inference);
  return mix(x, call);
}

State Mixer::make_state(std::int64_t slots, const StateOptions& options) const {
  State state;
  for (const auto& own : state_fields(options.dtype)) {
    const auto field = in_pages(own, options.int8_pages && options.pages > 0);
    state.tensors.push_back(at::zeros(shape_of(field, slots, options.capacity, options.pages),
                                      at::TensorOptions().device(options.device).dtype(field.dtype)));
  }
  return state;
}

std::int64_t Mixer::state_bytes(std::int64_t tokens, at::ScalarType dtype) const {
  std::int64_t bytes = 0;
  for (const auto& field : state_fields(dtype)) {
    std::int64_t numbers = 1;
    for (const auto size : shape_of(field, 1, tokens)) numbers *= size;
    bytes += numbers * static_cast<std::int64_t>(c10::elementSize(field.dtype));
  }
  return bytes;
}

void Mixer::reset(const State& state, const at::Tensor& slots) const {
  const at::NoGradGuard no_grad;
  for (at::Tensor tensor : state.tensors) {
    if (slots.defined()) {
      tensor.index_fill_(0, slots, 0);
    } else {
      tensor.zero_();
    }
  }
}

void Mixer::reserve(State& state, std::int64_t capacity) const {
  const at::NoGradGuard no_grad;
  const auto fields = state_fields(at::kFloat);
  for (std::size_t i = 0; i < fields.size(); ++i) {
    auto& tensor = state.tensors[i];
    if (fields[i].max_tokens == 0) continue;
    const auto shape = shape_of(fields[i], tensor.size(0), capacity);
    if (tensor.size(1) >= shape[1]) continue;
    at::Tensor larger = at::zeros(shape, tensor.options());
    larger.narrow(1, 0, tensor.size(1)).copy_(tensor);
    tensor = larger;
  }
}

State Mixer::gather(const State& pool, const at::Tensor& slots) const {
  State state;
  for (const auto& tensor : pool.tensors) state.tensors.push_back(tensor.index_select(0, slots));
  return state;
}

void Mixer::scatter(const State& from, const State& pool, const at::Tensor& slots) const {
  const at::NoGradGuard no_grad;
  const auto fields = state_fields(at::kFloat);
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const auto& source = from.tensors[i];
    at::Tensor target = pool.tensors[i];
    if (!source.defined()) continue;
    if (fields[i].max_tokens > 0) {
      if (source.size(1) > target.size(1)) {
        throw std::invalid_argument("The pool's cache has room for " + std::to_string(target.size(1)) +
                                    " tokens and the state holds " + std::to_string(source.size(1)) +
                                    "; reserve more first.");
      }
      target.narrow(1, source.size(1), target.size(1) - source.size(1)).index_fill_(0, slots, 0);
      target = target.narrow(1, 0, source.size(1));
    }
    target.index_copy_(0, slots, source.to(target.scalar_type()));
  }
}

}  // namespace gka::layers
