// What mixes the tokens of a window in a model for images: a memory of layers/, which reads them in order; attention in
// both directions; and MambaVision's mixer, a selective scan beside a branch without one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "layers/parameters.h"
#include "layers/sequences.h"
#include "models/vision_config.h"

namespace gka::models {

class WindowMixer {
 public:
  virtual ~WindowMixer() = default;
  /// x [windows, tokens, C]; `sequences` has a row for each window.
  virtual at::Tensor forward(const at::Tensor& x, const layers::Sequences& sequences) const = 0;
};

/// The mixer of a block, its parameters below `scope`.
std::unique_ptr<WindowMixer> make_window_mixer(const VisionConfig& config, std::size_t level, std::int64_t block,
                                               const layers::Scope& scope);

/// A matrix [out, in] with a bias, drawn as MambaVision draws them: normal with deviation 0.02, biases zero.
struct Affine {
  Affine() = default;
  Affine(std::int64_t out, std::int64_t in, const layers::Scope& scope);
  at::Tensor forward(const at::Tensor& x) const;

  at::Tensor weight, bias;
};

}  // namespace gka::models
