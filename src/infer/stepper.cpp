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

std::int64_t widest(const Batch& batch) {
  std::int64_t width = 0;
  for (const auto position : batch.positions) width = std::max(width, pages_for(position + 1));
  return width;
}

}  // namespace

Stepper::Stepper(const models::Decoder& decoder, const Pool& pool, bool record) : decoder_(decoder), pool_(pool) {
  if (record && Recorder::serves(decoder.device())) recorder_ = std::make_unique<Recorder>(decoder.device());
}

Stepped Stepper::step(const Batch& batch) {
  const at::NoGradGuard no_gradient;
  if (recorder_ && !batch.one_iterations) return {.logits = recorded(batch), .certainty = {}};
  Stepped result;
  layers::Inference more;
  auto inputs = inputs_of(batch, batch.size(), widest(batch));
  if (batch.certainty) more.certainty = &result.certainty;
  if (batch.one_iterations) {
    if (!batch.iterations.empty()) more.iterations = batch.iterations.front();
    inputs.iterations = at::Tensor();
  }
  result.logits = run(inputs, more);
  return result;
}

Stepper::Inputs Stepper::inputs_of(const Batch& batch, std::int64_t rows, std::int64_t width) const {
  auto padded = [&](std::vector<std::int64_t> values, std::int64_t spare, at::ScalarType type) {
    values.resize(static_cast<std::size_t>(rows), spare);
    return layers::upload(at::tensor(values, at::kLong).to(type), decoder_.device());
  };
  Inputs inputs{.ids = padded(batch.ids, 0, at::kLong),
                .slots = padded(batch.slots, pool_.spare_slot(), at::kLong),
                .positions = padded(batch.positions, 0, at::kLong),
                .pages = {},
                .iterations = {}};
  if (!batch.iterations.empty()) inputs.iterations = padded(batch.iterations, 0, at::kInt);
  if (pool_.pages_needed()) {
    std::vector<std::int64_t> table;
    for (std::int64_t row = 0; row < rows; ++row) {
      // Beyond a sequence's own pages its first: any page will do, for nothing in it is looked at.
      const auto* own = row < batch.size() ? batch.pages[static_cast<std::size_t>(row)] : nullptr;
      for (std::int64_t i = 0; i < width; ++i) {
        table.push_back(own == nullptr         ? pool_.spare_page()
                        : i < std::ssize(*own) ? (*own)[static_cast<std::size_t>(i)]
                                               : own->front());
      }
    }
    inputs.pages = layers::upload(at::tensor(table, at::kLong).view({rows, width}), decoder_.device());
  }
  return inputs;
}

at::Tensor Stepper::run(const Inputs& inputs, const layers::Inference& more) const {
  auto inference = more;
  inference.pages = inputs.pages;
  inference.iterations_each = inputs.iterations;
  return decoder_.logits(decoder_.step(inputs.ids, pool_.state(), inputs.slots, inputs.positions, inference));
}

at::Tensor Stepper::recorded(const Batch& batch) {
  const auto rows = power_of_two(batch.size());
  const auto width = pool_.pages_needed() ? power_of_two(widest(batch)) : 0;
  const auto fresh = inputs_of(batch, rows, width);
  auto& recording = recordings_[{rows, width, !batch.iterations.empty()}];
  auto& held = recording.inputs;
  if (!held.ids.defined()) {
    held = fresh;
    recording.logits = run(held, {});
    return recording.logits.narrow(0, 0, batch.size());
  }
  const auto copy = [](at::Tensor to, const at::Tensor& from) {
    if (to.defined()) to.copy_(from, /*non_blocking=*/true);
  };
  copy(held.ids, fresh.ids);
  copy(held.slots, fresh.slots);
  copy(held.positions, fresh.positions);
  copy(held.pages, fresh.pages);
  copy(held.iterations, fresh.iterations);
  if (!recording.play) {
    recording.play = recorder_->record([&] { recording.logits = run(held, {}); });
  }
  recording.play();
  return recording.logits.narrow(0, 0, batch.size());
}

}  // namespace gka::infer
