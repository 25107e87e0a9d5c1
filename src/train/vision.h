// Training and evaluation of models for images, behind `gka vision`. A run's folder is like that of `gka train`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/fields.h"
#include "models/vision.h"
#include "train/images.h"
#include "train/trainer.h"

namespace gka::train {

/// What a run keeps in train.json.
struct VisionSettings {
  models::LaterOptions model{};  // the configuration itself
  std::string data;              // a folder with train.safetensors and test.safetensors
  std::optional<double> epochs{};
  std::optional<std::int64_t> steps{};  // instead of epochs
  std::int64_t batch = 128;
  double learning_rate = 5e-4;
  double weight_decay = 0.05;
  double warmup = 0.05;  // fraction of the steps
  double label_smoothing = 0.1;
  std::string augment = "flip,crop";
  std::int64_t seed = 0;
  std::string device, dtype;          // empty: as the machine suggests
  std::int64_t eval_every = 0;        // steps; 0: an epoch
  std::int64_t checkpoint_every = 0;  // steps; 0: an epoch
  std::int64_t keep = 2;              // checkpoints

  template <typename Self, typename Visit>
  static void fields(Self& c, Visit&& visit) {
    visit("model", c.model);
    visit("data", c.data);
    visit("epochs", c.epochs);
    visit("steps", c.steps);
    visit("batch", c.batch);
    visit("learning_rate", c.learning_rate);
    visit("weight_decay", c.weight_decay);
    visit("warmup", c.warmup);
    visit("label_smoothing", c.label_smoothing);
    visit("augment", c.augment);
    visit("seed", c.seed);
    visit("device", c.device);
    visit("dtype", c.dtype);
    visit("eval_every", c.eval_every);
    visit("checkpoint_every", c.checkpoint_every);
    visit("keep", c.keep);
  }
};

/// Checks everything but what the data has to say; errors name the key, which is the option's name too.
VisionSettings parse_vision_settings(const Json& settings, const std::string& where);
/// Of the run in a folder; throws one sentence where there is none, or one of a language model.
Json read_vision_settings(const std::filesystem::path& run);

/// Trains into `run` until the steps are done or a signal asks to stop. What goes wrong is thrown as one sentence,
/// after a note of it in the run's folder.
Outcome train_vision(const VisionSettings& settings, const std::filesystem::path& run, Start start);

/// How well a model knows the classes of images.
struct VisionScores {
  std::int64_t images = 0;
  double loss = 0;                         // cross entropy, the mean
  std::int64_t right = 0, among_five = 0;  // the likeliest is the label; one of the five likeliest is
  std::vector<std::int64_t> of_class{}, right_of_class{};

  double top1() const { return share(right); }
  double top5() const { return share(among_five); }
  double share(std::int64_t count) const { return static_cast<double>(count) / static_cast<double>(images); }
  /// Of a share of so many images.
  static double standard_error(double share, std::int64_t images);
};

struct VisionEvaluation {
  std::int64_t batch = 256;
  std::optional<at::ScalarType> dtype{};                      // of the activations
  std::function<void(const at::Tensor& logits)> on_logits{};  // of each batch, float32 on the CPU
  std::function<bool(std::int64_t images)> on_progress{};     // false: stop here
};
VisionScores evaluate_vision(const models::VisionModel& model, const ImageSet& set, const VisionEvaluation& options);

}  // namespace gka::train
