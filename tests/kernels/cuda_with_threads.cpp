// The CUDA kernels that need many threads, on the host (see cuda_with_threads/kernels/cuda/device.cuh).
#define cuda cuda_with_threads
#include "kernels/cuda/step_registers.cu"
#undef cuda

#include "kernels/cuda_support.h"

namespace gka::kernels::test {

bool CudaWithThreads::step(const Step& step) { return cuda_with_threads::step_in_registers(step, {}); }

}  // namespace gka::kernels::test
