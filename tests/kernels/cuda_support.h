// The CUDA kernels as the tests call them: with host pointers, on a GPU or (their sources compiled as C++) without one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "gka/kernels.h"

namespace gka::kernels {  // of gka/block_kernels.h
struct ShortConv;
struct ShortConvOutputs;
struct ShortConvGradients;
struct ShortConvStep;
struct GatedRmsNorm;
struct GatedRmsNormGradients;
}  // namespace gka::kernels

namespace gka::kernels::test {

/// On the GPU: arrays are copied there and back around each call.
struct CudaDevice {
  /// Why it cannot run here; empty: it can.
  static std::string missing();
  static std::string missing_hopper();
  /// Whether the Hopper kernels take inputs of this type.
  static bool hopper_takes(DType dtype);
  /// Throws where it would be the plain path that answers.
  static void hopper_forward(const Problem& problem, const Outputs& outputs);
  static void forward(const Problem& problem, const Outputs& outputs);
  static void backward(const Problem& problem, const Saved& saved, const Gradients& gradients);
  static void step(const Step& step);
  static void short_conv(const ShortConv& conv, const ShortConvOutputs& outputs);
  static void short_conv_backward(const ShortConv& conv, const ShortConvGradients& gradients);
  static void short_conv_step(const ShortConvStep& step);
  static void gated_rms_norm(const GatedRmsNorm& norm, const View& y);
  static void gated_rms_norm_backward(const GatedRmsNorm& norm, const GatedRmsNormGradients& gradients);
};

/// The same sources on the host, one thread per block.
struct CudaOnHost {
  static void forward(const Problem& problem, const Outputs& outputs);
  static void backward(const Problem& problem, const Saved& saved, const Gradients& gradients);
  static void step(const Step& step);
  static void short_conv(const ShortConv& conv, const ShortConvOutputs& outputs);
  static void short_conv_backward(const ShortConv& conv, const ShortConvGradients& gradients);
  static void short_conv_step(const ShortConvStep& step);
  static void gated_rms_norm(const GatedRmsNorm& norm, const View& y);
  static void gated_rms_norm_backward(const GatedRmsNorm& norm, const GatedRmsNormGradients& gradients);
  /// Writes y once more.
  static void gated_rms_norm_backward(const GatedRmsNorm& norm, const GatedRmsNormGradients& gradients, const View& y);
};

/// The Hopper kernels' sources on the host, with as many threads as on a card; returned is how many bytes of scratch a
/// call asked for.
struct HopperOnHost {
  static std::size_t forward(const Problem& problem, const Outputs& outputs);
  /// For up to 128 value channels.
  static std::size_t backward(const Problem& problem, const Saved& saved, const Gradients& gradients);
};

/// A token of a GKA block between its projections. Gates: β, the log of γ and α, `bias` [heads] for each.
struct BlockStep {
  const Step& step;
  const ShortConvStep* convs;  // of q, k and v
  View projected;              // [batch, 3 · heads]
  const float *bias, *a_log;
  const GatedRmsNorm& norm;
  View y;
};

/// The shapes of step_registers.cu; none: the kernel does not take the call.
enum class StepShape : std::uint8_t { none, few, lone, crowd };

/// Those that need many threads, on the host with as many.
struct CudaWithThreads {
  /// The shape that ran, on a card of so many.
  static StepShape step(const Step& step, int multiprocessors = 1);
  static StepShape step_block(const BlockStep& block, int multiprocessors = 1);
};

}  // namespace gka::kernels::test
