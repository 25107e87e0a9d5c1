// The kernels of each type of device. The operators reach a kernel through `backend_for` and know no other way; which
// path a call takes on a GPU is the kernels' own choice (kernels::cuda::choose), and `choose_kernel` tells it.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <string_view>

#include "gka/info.h"
#include "gka/kernels.h"

namespace gka::ops {

/// `device` is where every tensor of the call lies.
struct Backend {
  void (*forward)(const kernels::Problem&, const kernels::Outputs&, c10::Device device) = nullptr;
  void (*backward)(const kernels::Problem&, const kernels::Saved&, const kernels::Gradients&,
                   c10::Device device) = nullptr;
  void (*step)(const kernels::Step&, c10::Device device) = nullptr;
};

/// That of a device's type. Throws c10::NotImplementedError where this build has none.
const Backend& backend_for(std::string_view op, c10::Device device);

/// Runs kernels on torch's threads.
const kernels::Executor& torch_executor();

/// Calls body(where) with torch's current stream on a CUDA device and scratch from torch's allocator.
void on_cuda(c10::Device device, const std::function<void(const kernels::cuda::Device& where)>& body);

}  // namespace gka::ops
