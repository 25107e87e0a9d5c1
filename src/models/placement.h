// Where and in what a model computes, by the names that options use. `what` is the option's own name, for the sentence
// about a wrong one.
#pragma once

#include <ATen/Context.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "models/dtypes.h"

namespace gka::models {

/// "": the first GPU, as training chooses, or the CPU where there is none.
inline at::Device device_named(const std::string& what, const std::string& name) {
  if (name.empty()) return at::hasCUDA() && at::getNumGPUs() > 0 ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  std::optional<at::Device> device;
  try {
    device.emplace(name);
  } catch (const c10::Error&) {
    device.reset();
  }
  if (!device || !(device->is_cpu() || device->is_cuda())) {
    throw std::runtime_error(what + " takes cpu, cuda or cuda:N, and got '" + name + "'");
  }
  if (device->is_cuda() && !at::hasCUDA()) {
    throw std::runtime_error(what + " is " + name +
                             ", and there is no CUDA here: torch was built without it or sees no GPU");
  }
  // Streams and graphs ask for a number.
  return device->is_cuda() && !device->has_index() ? at::Device(at::kCUDA, 0) : *device;
}

/// "": float32 on the CPU, elsewhere nothing, which is the checkpoint's own.
inline std::optional<at::ScalarType> dtype_on(const std::string& what, const std::string& name, at::Device device) {
  if (name.empty()) return device.is_cpu() ? std::optional(at::kFloat) : std::nullopt;
  if (const auto dtype = dtype_named(name)) return dtype;
  throw std::runtime_error(what + " takes one of " + list_dtypes() + ", and got '" + name + "'");
}

}  // namespace gka::models
