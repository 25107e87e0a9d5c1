#include "infer/pool.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "models/activations.h"

namespace gka::infer {
namespace {

constexpr std::int64_t kFirstSlots = 8, kFirstPages = 64;

bool is_paged(const layers::StateField& field) { return field.max_tokens == layers::kUnbounded; }

at::ScalarType type_of(const models::Decoder& decoder) {
  return models::activations_of(decoder.parameters().options());
}

at::Tensor longer(const at::Tensor& tensor, std::int64_t size) {
  auto shape = tensor.sizes().vec();
  shape[0] = size;
  at::Tensor larger = at::zeros(shape, tensor.options());
  larger.narrow(0, 0, tensor.size(0)).copy_(tensor);
  return larger;
}

}  // namespace

SequenceBytes sequence_bytes(const models::Decoder& decoder, std::int64_t context, bool int8_pages) {
  SequenceBytes bytes;
  for (const auto& block : decoder.state_fields(type_of(decoder), int8_pages)) {
    for (const auto& field : block) {
      auto numbers = static_cast<std::int64_t>(c10::elementSize(field.dtype));
      for (const auto size : field.shape) numbers *= size;
      if (is_paged(field)) {
        bytes.page += numbers * kGrid;
      } else {
        bytes.state += numbers * (field.max_tokens > 0 ? std::min(context, field.max_tokens) : 1);
      }
    }
  }
  return bytes;
}

std::int64_t bytes_of(const models::DecoderState& state) {
  std::int64_t bytes = 0;
  for (const auto& block : state.blocks) {
    for (const auto& tensor : block.tensors) bytes += tensor.defined() ? static_cast<std::int64_t>(tensor.nbytes()) : 0;
  }
  return bytes;
}

Pool::Pool(const models::Decoder& decoder, const Limits& limits)
    : decoder_(decoder), limits_(limits), fields_(decoder.state_fields(type_of(decoder), limits.int8_pages)) {
  const auto bytes = sequence_bytes(decoder, limits.context, limits.int8_pages);
  page_bytes_ = bytes.page;
  state_bytes_ = bytes.state;
  if (!pages_needed()) limits_.pages = 0;
  made_slots_ = limits_.grows ? std::min(kFirstSlots, limits_.slots) : limits_.slots;
  made_pages_ = limits_.grows ? std::min(kFirstPages, limits_.pages) : limits_.pages;
  const std::int64_t spare = limits_.grows ? 0 : 1;
  state_ = decoder.make_state(made_slots_ + spare,
                              {.device = decoder.device(),
                               .dtype = type_of(decoder),
                               .capacity = limits_.context,
                               .pages = pages_needed() ? std::max<std::int64_t>(1, made_pages_ + spare) : 0,
                               .int8_pages = limits_.int8_pages});
  // The lowest are taken first.
  for (auto slot = made_slots_; slot-- > 0;) free_slots_.push_back(slot);
  for (auto page = made_pages_; page-- > 0;) free_pages_.push_back(page);
  holders_.resize(static_cast<std::size_t>(made_pages_), 0);
}

std::optional<std::int64_t> Pool::take_slot() {
  if (free_slots_.empty() && made_slots_ < limits_.slots) grow(std::min(2 * made_slots_, limits_.slots), made_pages_);
  if (free_slots_.empty()) return std::nullopt;
  const auto slot = free_slots_.back();
  free_slots_.pop_back();
  return slot;
}

std::optional<Pages> Pool::take_pages(std::int64_t count) {
  if (!pages_needed()) return Pages{};
  if (count > pages_free()) return std::nullopt;
  while (std::ssize(free_pages_) < count) grow(made_slots_, std::min(2 * made_pages_, limits_.pages));
  Pages pages(free_pages_.end() - count, free_pages_.end());
  free_pages_.resize(free_pages_.size() - static_cast<std::size_t>(count));
  std::ranges::reverse(pages);
  for (const auto page : pages) holders_[static_cast<std::size_t>(page)] = 1;
  pages_in_use_ += count;
  return pages;
}

void Pool::release(std::int64_t page) {
  if (--holders_[static_cast<std::size_t>(page)] > 0) return;
  free_pages_.push_back(page);
  --pages_in_use_;
}

void Pool::grow(std::int64_t slots, std::int64_t pages) {
  const at::NoGradGuard no_gradient;
  for (std::size_t b = 0; b < fields_.size(); ++b) {
    for (std::size_t f = 0; f < fields_[b].size(); ++f) {
      auto& tensor = state_.blocks[b].tensors[f];
      const auto size = is_paged(fields_[b][f]) ? pages : slots;
      if (size > tensor.size(0)) tensor = longer(tensor, size);
    }
  }
  for (auto slot = slots; slot-- > made_slots_;) free_slots_.insert(free_slots_.begin(), slot);
  for (auto page = pages; page-- > made_pages_;) free_pages_.insert(free_pages_.begin(), page);
  made_slots_ = slots;
  made_pages_ = pages;
  holders_.resize(static_cast<std::size_t>(pages), 0);
}

std::optional<models::DecoderState> Pool::with_pages(const models::DecoderState* sequence) const {
  if (sequence == nullptr && !pages_needed()) return std::nullopt;
  models::DecoderState joined;
  joined.blocks.resize(fields_.size());
  for (std::size_t b = 0; b < fields_.size(); ++b) {
    for (std::size_t f = 0; f < fields_[b].size(); ++f) {
      at::Tensor tensor;
      if (is_paged(fields_[b][f])) {
        tensor = state_.blocks[b].tensors[f];
      } else if (sequence != nullptr) {
        tensor = sequence->blocks[b].tensors[f];
      }
      joined.blocks[b].tensors.push_back(std::move(tensor));
    }
  }
  return joined;
}

template <typename Visit>
void Pool::each_paged(const Visit& visit) const {
  for (std::size_t b = 0; b < fields_.size(); ++b) {
    for (std::size_t f = 0; f < fields_[b].size(); ++f) {
      if (is_paged(fields_[b][f])) visit(state_.blocks[b].tensors[f]);
    }
  }
}

std::vector<at::Tensor> Pool::read_pages(const Pages& pages) const {
  std::vector<at::Tensor> contents;
  const auto places = at::tensor(pages, at::kLong).to(decoder_.device());
  each_paged([&](const at::Tensor& pool) { contents.push_back(pool.index_select(0, places).flatten(0, 1)); });
  return contents;
}

void Pool::write_pages(const Pages& pages, const std::vector<at::Tensor>& contents) const {
  const at::NoGradGuard no_gradient;
  const auto places = at::tensor(pages, at::kLong).to(decoder_.device());
  std::size_t next = 0;
  each_paged([&](at::Tensor pool) {
    pool.index_copy_(0, places, contents.at(next++).to(pool.device()).unflatten(0, {-1, kGrid}).to(pool.scalar_type()));
  });
}

}  // namespace gka::infer
