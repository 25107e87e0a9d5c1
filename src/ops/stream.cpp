// Where the CUDA kernels run: the stream torch is on, with torch's memory. c10's device-guard interface hands out the
// stream whatever torch was built with, so this file needs no CUDA header and is the same for a CPU-only torch.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <vector>

#include "ops/backends.h"

namespace gka::ops {

void on_cuda(c10::Device device, const std::function<void(const kernels::cuda::Device& where)>& body) {
  const c10::DeviceGuard guard(device);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  // Released when the work is queued, not when it is done: the allocator hands memory out again in the stream's order.
  std::vector<at::Tensor> scratch;
  body({.index = device.index(), .stream = stream.native_handle(), .allocate = [&](std::size_t bytes) {
          scratch.push_back(at::empty({static_cast<std::int64_t>(bytes)}, at::device(device).dtype(at::kByte)));
          return scratch.back().data_ptr();
        }});
}

}  // namespace gka::ops
