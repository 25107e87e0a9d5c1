#include "infer/recording.h"

#ifdef GKA_CUDA_GRAPHS
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>
#else
#include <stdexcept>
#endif

namespace gka::infer {

#ifdef GKA_CUDA_GRAPHS

struct Recorder::Parts {
  explicit Parts(at::Device device) : on(device), stream(own_stream(device)) {}

  static c10::Stream own_stream(at::Device device) {
    const c10::impl::VirtualGuardImpl backend(device.type());
    backend.synchronizeDevice(device.index());  // what was begun on the default stream
    // Such runs are many to a machine: one that waits for its step must not keep a core from the others.
    C10_CUDA_CHECK(cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync));
    return backend.getStreamFromGlobalPool(device, /*isHighPriority=*/false);
  }

  at::Device on;
  c10::StreamGuard stream;
  // One for all recordings: they run one at a time, and what one needs only meanwhile another may use as well.
  at::cuda::MempoolId_t memory = at::cuda::graph_pool_handle();
};

bool Recorder::serves(at::Device device) { return device.is_cuda(); }

Recorder::Recorder(at::Device device) : parts_(std::make_unique<Parts>(device)) {}
Recorder::~Recorder() = default;

std::function<void()> Recorder::record(const std::function<void()>& work) {
  c10::impl::VirtualGuardImpl(parts_->on.type()).synchronizeDevice(parts_->on.index());
  const auto graph = std::make_shared<at::cuda::CUDAGraph>();
  graph->capture_begin(parts_->memory);
  try {
    work();
  } catch (...) {
    try {
      graph->capture_end();
    } catch (const std::exception&) {  // it is broken; the first error says why
    }
    throw;
  }
  graph->capture_end();
  return [graph] { graph->replay(); };
}

std::int64_t free_memory(at::Device device) {
  const c10::DeviceGuard guard(device);
  std::size_t free = 0, all = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &all));
  return static_cast<std::int64_t>(free);
}

#else

struct Recorder::Parts {};

bool Recorder::serves(at::Device) { return false; }
Recorder::Recorder(at::Device) { throw std::logic_error("this build records nothing: it has no CUDA"); }
Recorder::~Recorder() = default;
std::function<void()> Recorder::record(const std::function<void()>& work) { return work; }
std::int64_t free_memory(at::Device) { return std::int64_t{8} << 30; }

#endif

}  // namespace gka::infer
