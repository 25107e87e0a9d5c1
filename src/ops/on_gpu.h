// How an operation below autograd reaches a CUDA kernel that only a build with CUDA has.
#pragma once

#include <ATen/core/Tensor.h>

#include <stdexcept>

#include "ops/backends.h"

namespace gka::ops {

#ifdef GKA_HAS_CUDA
inline constexpr bool kHasCuda = true;
#else
inline constexpr bool kHasCuda = false;
#endif

/// body(device), which is to be a generic lambda: where there are no CUDA kernels it is never compiled.
template <typename Body>
void on_gpu(const at::Tensor& tensor, Body&& body) {
  if constexpr (kHasCuda) {
    on_cuda(tensor.device(), body);
  } else {
    throw std::logic_error("an operation of the GPU's was called on " + tensor.device().str() +
                           ", where there is none");
  }
}

}  // namespace gka::ops
