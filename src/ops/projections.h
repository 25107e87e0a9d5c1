// A mixer's projections of its input as one matrix product in training on a GPU, and its gradient in one tensor.
//
// The product's columns are inputs of several functions, and two nodes of the autograd graph write its gradient: the
// projections' own, and that of the gated norm, whose gate is some of the columns. They share a GradientRoom, and its
// order is this: the norm uses what the projections gave, so in every backward pass that reaches both the norm comes
// first. It opens a room and writes its columns; the projections take the room of the same pass, fill in the other
// columns and close it. A room from another pass (one that ended before it reached the projections) is never taken.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <array>
#include <cstdint>
#include <vector>

#include "gka/block.h"
#include "gka/types.h"
#include "ops/recompute.h"

namespace gka::ops {

class GradientRoom final : public torch::CustomClassHolder {
 public:
  explicit GradientRoom(std::array<std::int64_t, 3> shape) : shape_(shape) {}

  /// A tensor of the product's shape.
  at::Tensor make(const at::TensorOptions& options) const;
  /// Opens the room for this backward pass: the place that `of`, columns of the product, has in the gradient.
  at::Tensor open(const at::Tensor& of);
  /// All of the gradient, with what has been written in this backward pass.
  at::Tensor take(const at::TensorOptions& options);

 private:
  std::array<std::int64_t, 3> shape_;
  at::Tensor all_;  // between the two nodes
  int pass_ = -1;   // to which it belongs
};

/// One of the heads' projections: x Wᵀ, a short convolution with SiLU, and unit length.
struct ConvolvedHeads {
  at::Tensor weight, conv;
  L2Norm norm = L2Norm::none;
  std::int64_t head_dim = 0;
};

struct ConvolvedProjections {
  std::vector<at::Tensor> heads;   // [B,T,channels], convolved
  std::vector<at::Tensor> others;  // columns of the product
  std::vector<Remade> remade;      // the heads, to be made again from their columns
  c10::intrusive_ptr<GradientRoom> room;
};
/// x [B,T,C]: whole sequences that begin here. With gradients for x and all weights.
ConvolvedProjections project_convolved(const at::Tensor& x, const std::vector<ConvolvedHeads>& heads,
                                       const std::vector<at::Tensor>& others);

/// gated_rms_norm(o, gate, norm) weightᵀ, [B,T,C], whose gate is columns of the product with that room. With gradients.
at::Tensor gated_output(const at::Tensor& o, const at::Tensor& gate, const at::Tensor& norm, const at::Tensor& weight,
                        const GatedRmsNormOptions& options, const c10::intrusive_ptr<GradientRoom>& room);

}  // namespace gka::ops
