// The table of backends: which exist, what each carries, and the functions that run it. The operators look a backend
// up here and know no other way to a kernel.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "gka/info.h"
#include "gka/kernels.h"

namespace gka::ops {

struct Backend {
  std::string_view name;
  std::string_view device;  // the type of device it serves, as torch spells it; empty: never chosen
  bool built = false;

  /// Why it cannot take this call; empty: it can.
  std::string (*refuses)(const CallInfo& call) = nullptr;
  /// What `backends()` says about it on this machine.
  std::string (*detail)() = nullptr;
  /// What `choose_kernel` adds about a call it takes; absent: nothing.
  std::string (*remark)(const CallInfo& call) = nullptr;

  // `device` is where every tensor of the call lies.
  void (*forward)(const kernels::Problem&, const kernels::Outputs&, c10::Device device) = nullptr;
  void (*backward)(const kernels::Problem&, const kernels::Saved&, const kernels::Gradients&,
                   c10::Device device) = nullptr;
  void (*step)(const kernels::Step&, c10::Device device) = nullptr;
};

/// In the order of preference on each device.
std::span<const Backend> backend_table();

/// The backend `choose_kernel` names. Throws c10::NotImplementedError with its reason where there is none.
const Backend& backend_for(std::string_view op, const CallInfo& call);

/// Runs kernels on torch's threads.
const kernels::Executor& torch_executor();

/// Calls body(where) with torch's current stream on a CUDA device and scratch from torch's allocator.
void on_cuda(c10::Device device, const std::function<void(const kernels::cuda::Device& where)>& body);

}  // namespace gka::ops
