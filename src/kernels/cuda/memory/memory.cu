#include "kernels/cuda/memory/memory.h"

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/memory/passes.h"

namespace gka::kernels::cuda {

void chunked_memory(const ChunkedMemory& m, const ChunkedMemorySaved& saved, const ChunkedMemoryOutputs& out,
                    const Device& device) {
  const CurrentDevice current(device.index);
  (m.per_channel ? memory::run_chunk_wy_channels : memory::run_chunk_wy)(m, saved, device);
  memory::run_chunk_states(m, saved, out, device);
}

void chunked_memory_backward(const ChunkedMemory& m, const ChunkedMemorySaved& saved,
                             const ChunkedMemoryGradients& gradients, const Device& device) {
  const CurrentDevice current(device.index);
  memory::run_bwd_states(m, saved, gradients, device);
  (m.per_channel ? memory::run_bwd_inputs_channels : memory::run_bwd_inputs)(m, saved, gradients, device);
}

}  // namespace gka::kernels::cuda
