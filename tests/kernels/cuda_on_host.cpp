// The CUDA kernels' own sources on the host (cuda_on_host/kernels/cuda/device.cuh comes first on this file's include
// path), under another name, because the real ones may be in the same program.
#define cuda cuda_on_host
#include "kernels/cuda/backward.cu"
#include "kernels/cuda/forward.cu"
#include "kernels/cuda/step.cu"
#undef cuda

#include "kernels/cuda_on_host/scratch.h"
#include "kernels/cuda_support.h"

namespace gka::kernels::test {

using cuda_on_host::Device;

void CudaOnHost::forward(const Problem& problem, const Outputs& outputs) {
  with_scratch<Device>([&](const Device& device) { cuda_on_host::plain::forward(problem, outputs, device); });
}
void CudaOnHost::backward(const Problem& problem, const Saved& saved, const Gradients& gradients) {
  with_scratch<Device>([&](const Device& device) { cuda_on_host::plain::backward(problem, saved, gradients, device); });
}
void CudaOnHost::step(const Step& step) {
  with_scratch<Device>([&](const Device& device) { cuda_on_host::step(step, device); });
}

}  // namespace gka::kernels::test
