// The small operations around the memory in a block, on raw pointers, without torch: a causal depthwise convolution
// with its activation and norm, and an RMS norm with its gate. As in kernels.h one plain struct describes a call and
// every backend takes the same struct.
//
// Arithmetic is in float32, in float64 where x is float64. The same call gives the same bits, whatever the number of
// threads. Memory, threads and errors are as in kernels.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gka/kernels.h"
#include "gka/types.h"

namespace gka::kernels {

/// y_t = norm(act(bias + Σ_j w_j ⊙ x_{t−W+1+j})), x before the first token taken from the initial state.
///
/// Views of x and y are [batch, tokens, channels]: head_stride is not read. weight is [channels, width] and bias
/// [channels]; states are [sequences, channels, width − 1], the oldest input first; all three contiguous. Any view may
/// have any dtype. cu_seqlens and sequences are those of Problem.
struct ShortConv {
  std::int64_t batch = 0;
  std::int64_t tokens = 0;
  std::int64_t channels = 0;
  std::int64_t width = 0;  // 1 to kMaxConvWidth
  std::int64_t sequences = 0;
  const std::int64_t* cu_seqlens = nullptr;

  View x{};
  View weight{};
  View bias{};           // absent: 0
  View initial_state{};  // absent: 0

  Activation activation = Activation::silu;  // none or silu
  L2Norm l2_norm = L2Norm::none;
  std::int64_t head_dim = 0;  // 1 to kMaxConvHead, a divisor of channels; read unless l2_norm is none
  double eps = 1e-6;
};

inline constexpr std::int64_t kMaxConvWidth = 8;
inline constexpr std::int64_t kMaxConvHead = 256;

struct ShortConvOutputs {
  View y{};
  View final_state{};  // optional
};

/// `d_y` and `d_final_state` (optional) come in, the rest goes out, each optional, contiguous where the input is.
struct ShortConvGradients {
  View d_y{};
  View d_final_state{};

  View d_x{};
  View d_weight{};
  View d_bias{};
  View d_initial_state{};
};

/// One token for each of `batch` sequences, x and y [batch, channels]. Slot state_indices[b] (b without indices;
/// indices are distinct) of the pool `state` [slots, channels, width − 1] is read and shifted by one input in place.
struct ShortConvStep {
  ShortConv conv{};  // tokens, sequences, cu_seqlens and initial_state are not read
  View y{};
  View state{};
  const std::int64_t* state_indices = nullptr;
};

/// y = x / √(mean(x²) + eps) ⊙ weight ⊙ act(gate) for each of batch × tokens × heads rows of `dim` channels.
struct GatedRmsNorm {
  std::int64_t batch = 0;
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t dim = 0;  // 1 to kMaxNormDim

  View x{};
  View gate{};    // absent: 1
  View weight{};  // [dim]; absent: 1
  Activation activation = Activation::silu;
  double eps = 1e-6;
};

inline constexpr std::int64_t kMaxNormDim = 8192;

struct GatedRmsNormGradients {
  View d_y{};

  View d_x{}, d_gate{}, d_weight{};  // each optional
};

namespace reference {
void short_conv(const ShortConv& conv, const ShortConvOutputs& outputs);
void short_conv_backward(const ShortConv& conv, const ShortConvGradients& gradients);
void short_conv_step(const ShortConvStep& step);
void gated_rms_norm(const GatedRmsNorm& norm, const View& y);
void gated_rms_norm_backward(const GatedRmsNorm& norm, const GatedRmsNormGradients& gradients);
}  // namespace reference

namespace cpu {
void short_conv(const ShortConv& conv, const ShortConvOutputs& outputs, const Executor& executor);
void short_conv_backward(const ShortConv& conv, const ShortConvGradients& gradients, const Executor& executor);
void short_conv_step(const ShortConvStep& step, const Executor& executor);
void gated_rms_norm(const GatedRmsNorm& norm, const View& y, const Executor& executor);
void gated_rms_norm_backward(const GatedRmsNorm& norm, const GatedRmsNormGradients& gradients,
                             const Executor& executor);
}  // namespace cpu

namespace cuda {
void short_conv(const ShortConv& conv, const ShortConvOutputs& outputs, const Device& device);
void short_conv_backward(const ShortConv& conv, const ShortConvGradients& gradients, const Device& device);
void short_conv_step(const ShortConvStep& step, const Device& device);
/// Up to kMostShortConvs of one type in one launch.
inline constexpr std::size_t kMostShortConvs = 3;
void short_conv_steps(std::span<const ShortConvStep> steps, const Device& device);
void gated_rms_norm(const GatedRmsNorm& norm, const View& y, const Device& device);
void gated_rms_norm_backward(const GatedRmsNorm& norm, const GatedRmsNormGradients& gradients, const Device& device);
}  // namespace cuda

}  // namespace gka::kernels
