#include "infer/stepper.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <bit>

#include "layers/functions.h"

namespace gka::infer {
namespace {

std::int64_t power_of_two(std::int64_t value) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(std::max<std::int64_t>(value, 1))));
}

/// Rows that a step is recorded with: not many sizes, and not many rows for nothing.
std::int64_t recorded_rows(std::int64_t sequences) {
  const auto most = power_of_two(sequences), apart = std::max<std::int64_t>(8, most / 8);
  return std::min(most, (sequences + apart - 1) / apart * apart);
}

std::int64_t widest(const Batch& batch) {
  std::int64_t width = 0;
  const auto& places = batch.places.empty() ? batch.positions : batch.places;
  for (const auto place : places) width = std::max(width, pages_for(place + 1));
  return width;
}

/// All that a step is given, as one array, so that one copy brings it to the device: ids, slots, positions and (where
/// sequences have their own) iterations and places of every row, then each row's pages.
at::Tensor packed(const Batch& batch, const Pool& pool, std::int64_t rows, std::int64_t width) {
  std::vector<std::int64_t> all;
  const auto add = [&](const std::vector<std::int64_t>& values, std::int64_t spare) {
    all.insert(all.end(), values.begin(), values.end());
    all.insert(all.end(), static_cast<std::size_t>(rows) - values.size(), spare);
  };
  add(batch.ids, 0);
  add(batch.slots, pool.spare_slot());
  add(batch.positions, 0);
  if (!batch.iterations.empty()) add(batch.iterations, 0);
  if (!batch.places.empty()) add(batch.places, 0);
  if (pool.pages_needed()) {
    for (std::int64_t row = 0; row < rows; ++row) {
      // Beyond a sequence's own pages its first: any page will do, for nothing in it is looked at.
      const auto* own = row < batch.size() ? batch.pages[static_cast<std::size_t>(row)] : nullptr;
      for (std::int64_t i = 0; i < width; ++i) {
        all.push_back(own == nullptr         ? pool.spare_page()
                      : i < std::ssize(*own) ? (*own)[static_cast<std::size_t>(i)]
                                             : own->front());
      }
    }
  }
  return at::tensor(all, at::kLong);
}

}  // namespace

Stepper::Stepper(const models::Decoder& decoder, const Pool& pool, bool record) : decoder_(decoder), pool_(pool) {
  if (record && Recorder::serves(decoder.device())) recorder_ = std::make_unique<Recorder>(decoder.device());
}

Stepped Stepper::step(const Batch& batch, const at::Tensor& ids) {
  const at::NoGradGuard no_gradient;
  if (recorder_ && !batch.one_iterations) return {.logits = recorded(batch, ids), .certainty = {}};
  Stepped result;
  layers::Inference more;
  auto inputs = inputs_of(batch, batch.size(), widest(batch));
  if (ids.defined()) inputs.ids = ids;
  if (batch.certainty) more.certainty = &result.certainty;
  if (batch.one_iterations) {
    if (!batch.iterations.empty()) more.iterations = batch.iterations.front();
    inputs.iterations = at::Tensor();
  }
  result.logits = run(inputs, more);
  return result;
}

Stepper::Inputs Stepper::inputs_of(const Batch& batch, std::int64_t rows, std::int64_t width) const {
  const auto all = layers::upload(packed(batch, pool_, rows, width), decoder_.device());
  const auto row = [&](std::int64_t i) { return all.narrow(0, i * rows, rows); };
  Inputs inputs{.ids = row(0), .slots = row(1), .positions = row(2), .places = {}, .pages = {}, .iterations = {}};
  if (!batch.iterations.empty()) inputs.iterations = row(3);
  if (!batch.places.empty()) inputs.places = row(batch.iterations.empty() ? 3 : 4);
  if (pool_.pages_needed()) {
    inputs.pages = all.narrow(0, all.size(0) - rows * width, rows * width).view({rows, width});
  }
  return inputs;
}

at::Tensor Stepper::run(const Inputs& inputs, const layers::Inference& more) const {
  auto inference = more;
  inference.pages = inputs.pages;
  inference.places = inputs.places;
  if (inputs.iterations.defined()) inference.iterations_each = inputs.iterations.to(at::kInt);
  return decoder_.logits(decoder_.step(inputs.ids, pool_.state(), inputs.slots, inputs.positions, inference));
}

at::Tensor Stepper::recorded(const Batch& batch, const at::Tensor& ids) {
  const auto rows = recorded_rows(batch.size());
  const auto width = pool_.pages_needed() ? power_of_two(widest(batch)) : 0;
  auto& recording = recordings_[{rows, width, !batch.places.empty(), !batch.iterations.empty()}];
  auto& held = recording.inputs;
  const auto begin_with = [&](const at::Tensor& tokens) {
    if (tokens.defined()) held.ids.narrow(0, 0, batch.size()).copy_(tokens);
  };
  if (!held.ids.defined()) {
    held = inputs_of(batch, rows, width);
    begin_with(ids);
    recording.logits = run(held, {});
    return recording.logits.narrow(0, 0, batch.size());
  }
  const auto fresh = packed(batch, pool_, rows, width);
  held.ids.as_strided({fresh.numel()}, {1}, 0).copy_(fresh.pin_memory(), /*non_blocking=*/true);
  begin_with(ids);
  if (!recording.play) {
    recording.play = recorder_->record([&] { recording.logits = run(held, {}); });
  }
  recording.play();
  return recording.logits.narrow(0, 0, batch.size());
}

}  // namespace gka::infer
