// The CUDA kernels that need many threads, on the host (see cuda_with_threads/kernels/cuda/device.cuh).
#define cuda cuda_with_threads
#include "kernels/cuda/step_registers.cu"
#undef cuda

#include <algorithm>
#include <utility>

#include "kernels/cuda_on_host/scratch.h"
#include "kernels/cuda_support.h"

namespace gka::kernels::test {
namespace {

/// What a block did in run(device), which says whether it ran: a crowd's has half as many threads, a lone head's half
/// of its threads meet by themselves. Whoever runs next has the card as it was.
template <typename Run>
StepShape shape_of(int multiprocessors, Run&& run) {
  auto& machine = cuda_with_threads::machine;
  std::ranges::fill(machine.sharing, 0);
  const int before = std::exchange(machine.multiprocessors, multiprocessors);
  bool ran = false;
  with_scratch<cuda_with_threads::Device>([&](const auto& device) { ran = run(device); });
  machine.multiprocessors = before;
  if (!ran) return StepShape::none;
  if (machine.contexts.size() == 128) return StepShape::crowd;
  return std::ranges::count(machine.sharing, 128) > 0 ? StepShape::lone : StepShape::few;
}

}  // namespace

StepShape CudaWithThreads::step_block(const BlockStep& b, int multiprocessors) {
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
  return shape_of(multiprocessors, [&](const auto& device) {
    if (!cuda_with_threads::takes_step_block(block)) return false;
    cuda_with_threads::step_block(block, device);
    return true;
  });
}

StepShape CudaWithThreads::step(const Step& step, int multiprocessors) {
  return shape_of(multiprocessors,
                  [&](const auto& device) { return cuda_with_threads::step_in_registers(step, device); });
}

}  // namespace gka::kernels::test
