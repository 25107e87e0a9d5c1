#include "train/learner.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <c10/util/Exception.h>

#include <algorithm>

#include "layers/functions.h"
#include "train/random_state.h"

namespace gka::train {
namespace {

models::Decoder draw_model(const Config& config, const Compute& compute, at::Device source) {
  seed_torch(compute.device, config.seed);
  seed_torch(at::kCPU, config.seed);
  const auto generator = seed_torch(source, config.seed);
  return models::Decoder(
      models::parse_training_config(config.model, "model"),
      {.device = compute.device, .dtype = compute.parameters, .generator = generator, .requires_grad = true});
}

/// Recordings that are kept: data that never comes in the same shape twice must not fill the memory with them.
constexpr std::size_t kMostShapes = 32;

std::int64_t count_targets(std::span<const data::Batch> parts) {
  std::int64_t targets = 0;
  for (const auto& part : parts) targets += part.targets.ne(kIgnoredLabel).sum().item<std::int64_t>();
  return targets;
}

}  // namespace

Learner::Learner(const Config& config, const Compute& compute, at::Device source)
    : compute_(compute),
      recompute_(config.checkpoint_activations),
      decoder_(draw_model(config, compute, source)),
      optimiser_(decoder_.parameters().all(),
                 {.betas = config.betas, .eps = config.eps, .weight_decay = config.weight_decay, .clip = config.clip}) {
  if (!config.cuda_graph || !infer::Recorder::serves(compute.device)) return;
  recorder_ = std::make_unique<infer::Recorder>(compute.device);
  rate_ = at::zeros({}, at::TensorOptions(at::kFloat).device(compute.device));
}

models::ForwardOptions Learner::forward_options() const {
  models::ForwardOptions options;
  options.recompute = recompute_;
  options.dtype = compute_.activations;
  return options;
}

layers::Sequences Learner::sequences_of(const data::Batch& batch) const {
  if (batch.cu_seqlens.defined()) return layers::Sequences::packed(batch.cu_seqlens, compute_.device);
  return rows_of(batch.inputs);
}

const layers::Sequences& Learner::rows_of(const at::Tensor& inputs) const {
  const auto rows = inputs.size(0), tokens = inputs.size(1);
  const auto [place, missing] = layouts_.try_emplace({rows, tokens});
  if (missing) place->second = layers::Sequences::rows(rows, tokens, compute_.device);
  return place->second;
}

models::Loss Learner::loss(const data::Batch& batch, const models::LossOptions& options) const {
  const auto output = decoder_.forward(batch.inputs, sequences_of(batch), forward_options());
  return decoder_.loss(output.hidden, batch.targets, options);
}

at::Tensor Learner::backward(std::span<const data::Batch> parts) {
  optimiser_.zero_gradients();
  // However a batch is cut, every target counts the same.
  const auto targets = static_cast<double>(std::max<std::int64_t>(1, count_targets(parts)));
  at::Tensor total;
  for (const auto& part : parts) {
    const auto mean = loss(part, {.divisor = targets}).mean;
    mean.backward();
    total = total.defined() ? total.add(mean.detach()) : mean.detach();
  }
  return total;
}

at::Tensor Learner::update(const at::Tensor& loss, double learning_rate) {
  const auto length = optimiser_.step(learning_rate);
  return at::stack({loss.to(at::kDouble), length});
}

bool Learner::plays(std::span<const data::Batch> parts) const {
  return recorder_ && parts.size() == 1 && !parts[0].cu_seqlens.defined();
}

at::Tensor Learner::step_on(const Recorded& recorded) {
  optimiser_.zero_gradients();
  const auto hidden = decoder_.forward(recorded.inputs, rows_of(recorded.inputs), forward_options()).hidden;
  const auto targets = static_cast<double>(std::max<std::int64_t>(1, recorded.targets.size(1)));
  const auto loss = decoder_.loss_at(hidden, recorded.targets, {.divisor = targets}).mean;
  loss.backward();
  return at::stack({loss.detach().to(at::kDouble), optimiser_.step(rate_)});
}

at::Tensor Learner::play(const data::Batch& batch, double learning_rate) {
  const auto targets = models::pick_targets(batch.targets);
  const std::array shape{batch.inputs.size(0), batch.inputs.size(1), targets.size(1)};
  const bool kept = recorded_.contains(shape) || recorded_.size() < kMostShapes;
  Recorded passing;
  auto& recorded = kept ? recorded_[shape] : passing;
  rate_.fill_(learning_rate);
  const bool first = !recorded.inputs.defined();
  const auto place = [&](at::Tensor& there, const at::Tensor& here) {
    if (first) {
      there = layers::upload(here, compute_.device);
    } else {
      there.copy_(here.pin_memory(), /*non_blocking=*/true);
    }
  };
  place(recorded.inputs, batch.inputs);
  place(recorded.targets, targets);
  if (first || unrecordable_) return step_on(recorded);
  if (!recorded.run) record(recorded);
  if (unrecordable_) return step_on(recorded);
  recorded.run();
  return recorded.measured;
}

void Learner::record(Recorded& recorded) try {
  recorded.run = recorder_->record([&] { recorded.measured = step_on(recorded); });
} catch (const c10::Error& error) {
  unrecordable_ = true;
  TORCH_WARN("this model's step cannot be recorded, and is launched anew each time: ", error.what_without_backtrace());
}

}  // namespace gka::train
