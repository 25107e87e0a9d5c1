// The Hopper kernels' own sources on the host, with as many threads as on a card (cuda_with_threads).
#define cuda cuda_with_threads
#include "kernels/cuda/hopper/backward.cu"
#include "kernels/cuda/hopper/backward_wide.cu"
#include "kernels/cuda/hopper/forward.cu"

namespace gka::kernels::cuda::hopper {
/// Blocks of value channels are for the card alone.
void backward_in_blocks(const Problem&, const Saved&, const Gradients&, const Device&) {
  throw std::logic_error("the host has no backward pass in blocks of values");
}
}  // namespace gka::kernels::cuda::hopper
#undef cuda

#include "kernels/cuda_on_host/scratch.h"
#include "kernels/cuda_support.h"

namespace gka::kernels::test {

std::size_t HopperOnHost::forward(const Problem& problem, const Outputs& outputs) {
  return with_scratch<cuda_with_threads::Device>(
      [&](const auto& device) { cuda_with_threads::hopper::forward(problem, outputs, device); });
}
std::size_t HopperOnHost::backward(const Problem& problem, const Saved& saved, const Gradients& gradients) {
  return with_scratch<cuda_with_threads::Device>(
      [&](const auto& device) { cuda_with_threads::hopper::backward(problem, saved, gradients, device); });
}

}  // namespace gka::kernels::test
