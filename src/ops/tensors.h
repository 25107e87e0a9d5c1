// Tensors as the kernels see them: pointers, contiguous channels, integers where the kernel runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdlib>
#include <string_view>

namespace gka::ops {

inline void make_channels_contiguous(at::Tensor& tensor) {
  if (!tensor.defined() || tensor.dim() == 0 || tensor.stride(-1) == 1 || tensor.size(-1) <= 1) return;
  tensor = tensor.contiguous();
}

/// nullptr where there is nothing: kernels take that as left out.
inline void* pointer(const at::Tensor& tensor) {
  return tensor.defined() && tensor.numel() > 0 ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
}

/// On the device of the call: there a kernel reads them, and nobody waits for them.
inline at::Tensor integers(const at::Tensor& tensor, c10::Device device, at::ScalarType type = at::kLong) {
  return tensor.defined() ? tensor.to(device, type).contiguous() : tensor;
}

// A look at values on a GPU makes the CPU wait for it, so there it is done on request only.
inline bool values_are_checked(c10::Device device) {
  if (device.is_cpu()) return true;
  const char* wanted = std::getenv("GKA_CHECK");
  return wanted != nullptr && std::string_view(wanted) == "1";
}

}  // namespace gka::ops
