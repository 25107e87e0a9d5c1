// The CUDA kernels that need many threads, on the host (see cuda_with_threads/kernels/cuda/device.cuh).
#define cuda cuda_with_threads
#include "kernels/cuda/step_registers.cu"
#undef cuda

#include <utility>

#include "kernels/cuda_on_host/scratch.h"
#include "kernels/cuda_support.h"

namespace gka::kernels::test {
namespace {

/// How many threads a block had in run(device), which says whether it ran. Whoever runs next has the card as it was.
template <typename Run>
int threads_of(int multiprocessors, Run&& run) {
  auto& machine = cuda_with_threads::machine;
  const int before = std::exchange(machine.multiprocessors, multiprocessors);
  bool ran = false;
  with_scratch<cuda_with_threads::Device>([&](const auto& device) { ran = run(device); });
  machine.multiprocessors = before;
  return ran ? static_cast<int>(machine.contexts.size()) : 0;
}

}  // namespace

int CudaWithThreads::step_block(const BlockStep& b, int multiprocessors) {
  cuda_with_threads::StepBlock block{.step = b.step,
                                     .convs = {b.convs[0], b.convs[1], b.convs[2]},
                                     .gates = {.tokens = b.step.batch,
                                               .heads = static_cast<int>(b.step.heads),
                                               .count = 3,
                                               .dtype = b.projected.dtype,
                                               .projected = b.projected.data,
                                               .stride = b.projected.batch_stride},
                                     .log_decay = 1,
                                     .beta = 0,
                                     .alpha = 2,
                                     .norm = b.norm,
                                     .y = b.y};
  constexpr auto kSigmoid = cuda_with_threads::Gate::sigmoid;
  block.gates.kinds[0] = {.gate = kSigmoid, .bias = b.bias};
  block.gates.kinds[1] = {.gate = cuda_with_threads::Gate::log_decay, .bias = b.bias, .a_log = b.a_log};
  block.gates.kinds[2] = {.gate = kSigmoid, .bias = b.bias};
  return threads_of(multiprocessors, [&](const auto& device) {
    if (!cuda_with_threads::takes_step_block(block)) return false;
    cuda_with_threads::step_block(block, device);
    return true;
  });
}

int CudaWithThreads::step(const Step& step, int multiprocessors) {
  return threads_of(multiprocessors,
                    [&](const auto& device) { return cuda_with_threads::step_in_registers(step, device); });
}

}  // namespace gka::kernels::test
