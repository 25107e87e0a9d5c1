// A model for images, MambaVision's shape with any mixer: a stem of two convolutions, levels of which each has half the
// resolution and twice the width of the one before, a last norm, the average over positions, a linear head.
//
//   conv     x += γ · norm(conv(gelu(norm(conv(x)))))
//   mixer    the map is cut into windows, whose pixels are tokens in raster order:
//            x += γ₁ · mixer(norm(x));  x += γ₂ · mlp(norm(x))
//
// The first half of a level's blocks has the configuration's mixer, the rest attention in both directions. A memory
// reads the tokens of a window as one sequence, from its upper left corner on.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "layers/parameters.h"
#include "models/vision_config.h"

namespace gka::models {

struct VisionCall {
  /// Norms take the statistics of the batch and note them for later, and whole branches are dropped by chance; else
  /// norms take what was noted, and nothing is dropped.
  bool training = false;
  std::optional<at::ScalarType> dtype{};  // of the activations; else the parameters'
};

class VisionModel {
 public:
  /// With a generator in `options` the weights are drawn, else they are to be loaded; on at::kMeta nothing is
  /// allocated.
  explicit VisionModel(VisionConfig config, layers::ParameterOptions options = {});
  ~VisionModel();
  VisionModel(VisionModel&&) noexcept;
  VisionModel& operator=(VisionModel&&) noexcept;

  const VisionConfig& config() const { return config_; }
  layers::Parameters& parameters() { return *parameters_; }
  const layers::Parameters& parameters() const { return *parameters_; }
  /// What norms have noted: float32 (float64 in a model of that), without gradient.
  const layers::Parameters& buffers() const { return *buffers_; }
  at::Device device() const { return parameters_->options().device; }

  /// Pixels from 0 to 255 [B,H,W,C], of any type and on any device, to logits [B,classes] in float32 or better. What a
  /// mixer throws comes as a LayerError.
  at::Tensor forward(const at::Tensor& images, const VisionCall& call = {}) const;

 private:
  class Level;

  at::Tensor pixels(const at::Tensor& images, at::ScalarType dtype) const;

  VisionConfig config_;
  std::unique_ptr<layers::Parameters> parameters_, buffers_;
  struct Ends;
  std::unique_ptr<Ends> ends_;  // stem, last norm and head
  std::vector<Level> levels_;
};

/// [B,C,H,W] as the tokens of its windows, [B · windows, window², C]; what a window has beyond the map is zero.
at::Tensor to_windows(const at::Tensor& map, std::int64_t window);
/// The map of that height and width again.
at::Tensor from_windows(const at::Tensor& tokens, std::int64_t window, std::int64_t height, std::int64_t width);

/// How many numbers a model of that configuration learns, without allocating them.
std::int64_t count_parameters(const VisionConfig& config);

/// config.json and model.safetensors, which has the norms' statistics as well. Makes the folder where there is none.
void save_vision(const VisionModel& model, const std::filesystem::path& folder);

/// Throws one sentence where the folder is not there, or is no model for images.
VisionConfig load_vision_config(const std::filesystem::path& folder);
/// `parameters` is float32, or float64.
VisionModel load_vision(const std::filesystem::path& folder, at::Device device = at::kCPU,
                        at::ScalarType parameters = at::kFloat);
/// Puts the weights of a folder into a model of the same configuration.
void load_vision_weights(VisionModel& model, const std::filesystem::path& folder);

}  // namespace gka::models
