// The CUDA kernels of the block's small operations on the host, as cuda_on_host.cpp has those of the operator.
#define cuda cuda_on_host
#include "kernels/cuda/gated_rms_norm.cu"
#include "kernels/cuda/short_conv.cu"
#undef cuda

#include "kernels/cuda_on_host/scratch.h"
#include "kernels/cuda_support.h"

namespace gka::kernels::test {

using cuda_on_host::Device;

void CudaOnHost::short_conv(const ShortConv& conv, const ShortConvOutputs& outputs) {
  with_scratch<Device>([&](const Device& device) { cuda_on_host::short_conv(conv, outputs, device); });
}
void CudaOnHost::short_conv_backward(const ShortConv& conv, const ShortConvGradients& gradients) {
  with_scratch<Device>([&](const Device& device) { cuda_on_host::short_conv_backward(conv, gradients, device); });
}
void CudaOnHost::short_conv_step(const ShortConvStep& step) {
  with_scratch<Device>([&](const Device& device) { cuda_on_host::short_conv_step(step, device); });
}
void CudaOnHost::gated_rms_norm(const GatedRmsNorm& norm, const View& y) {
  with_scratch<Device>([&](const Device& device) { cuda_on_host::gated_rms_norm(norm, y, device); });
}
void CudaOnHost::gated_rms_norm_backward(const GatedRmsNorm& norm, const GatedRmsNormGradients& gradients) {
  with_scratch<Device>([&](const Device& device) { cuda_on_host::gated_rms_norm_backward(norm, gradients, device); });
}
void CudaOnHost::gated_rms_norm_backward(const GatedRmsNorm& norm, const GatedRmsNormGradients& gradients,
                                         const View& y) {
  with_scratch<Device>(
      [&](const Device& device) { cuda_on_host::gated_rms_norm_backward(norm, gradients, y, device); });
}

}  // namespace gka::kernels::test
