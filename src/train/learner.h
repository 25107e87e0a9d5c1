// One step of training: a batch in parts through the model and back, the gradient clipped, AdamW. `gka train` and
// `gka bench train` share it, so what is measured is what trains.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>

#include "data/source.h"
#include "infer/recording.h"
#include "models/decoder.h"
#include "train/adamw.h"
#include "train/config.h"
#include "train/device.h"

namespace gka::train {

class Learner {
 public:
  /// Seeds all of torch, and draws the weights from the numbers of `source`: a CPU's are the same everywhere, the
  /// device's own come a hundred times as fast, which a benchmark of billions of weights takes.
  Learner(const Config& config, const Compute& compute, at::Device source = at::kCPU);

  models::Decoder& decoder() { return decoder_; }
  const models::Decoder& decoder() const { return decoder_; }
  AdamW& optimiser() { return optimiser_; }
  const AdamW& optimiser() const { return optimiser_; }

  layers::Sequences sequences_of(const data::Batch& batch) const;
  models::ForwardOptions forward_options() const;
  models::Loss loss(const data::Batch& batch, const models::LossOptions& options) const;

  /// Replaces the gradients by those of the mean loss over the targets of all parts, which it returns: a scalar on the
  /// device.
  at::Tensor backward(std::span<const data::Batch> parts);
  /// Clips and updates. Returns `loss` and the gradient's length before clipping, float64 [2] on the device, which
  /// nobody has waited for yet.
  at::Tensor update(const at::Tensor& loss, double learning_rate);

  /// Whether `play` takes the batch: recording was asked for, and it comes on a device and in a form that can be.
  bool plays(std::span<const data::Batch> parts) const;
  /// Backward and update as one, from a recording from the second batch of a shape on. Returns what `update` does.
  at::Tensor play(const data::Batch& batch, double learning_rate);

 private:
  /// A step for one shape of batch, on memory of its own.
  struct Recorded {
    at::Tensor inputs, targets;  // as the latest batch has them
    at::Tensor measured;
    std::function<void()> run;  // empty until recorded
  };
  at::Tensor step_on(const Recorded& recorded);
  /// Where that fails, a warning says so and steps are launched as ever.
  void record(Recorded& recorded);
  const layers::Sequences& rows_of(const at::Tensor& inputs) const;

  Compute compute_;
  bool recompute_;
  models::Decoder decoder_;
  AdamW optimiser_;
  /// By rows and tokens: batches come in few shapes, and laying one out takes a GPU longer than a small model's step.
  mutable std::map<std::pair<std::int64_t, std::int64_t>, layers::Sequences> layouts_;

  std::unique_ptr<infer::Recorder> recorder_;  // none where nothing is recorded
  bool unrecordable_ = false;
  at::Tensor rate_;                                           // the learning rate on the device
  std::map<std::array<std::int64_t, 3>, Recorded> recorded_;  // by rows, tokens and targets
};

}  // namespace gka::train
