#include "ops/sample.h"

#include <ATen/ops/empty_like.h>

#include "kernels/cuda/sample.h"
#include "ops/checks.h"
#include "ops/on_gpu.h"

namespace gka::ops {

bool has_sample(const at::Tensor& logits) {
  return kHasCuda && logits.is_cuda() && logits.scalar_type() != at::kDouble && logits.dim() == 2 &&
         logits.stride(1) == 1 && logits.size(1) > 0 && logits.size(1) <= kernels::cuda::Sample::kMostTokens;
}

at::Tensor sample(const at::Tensor& logits, const at::Tensor& how) {
  const at::Tensor drawn = at::empty_like(how);
  on_gpu(logits, [&](const auto& device) {
    kernels::cuda::sample({.rows = logits.size(0),
                           .tokens = logits.size(1),
                           .stride = logits.stride(0),
                           .dtype = kernel_dtype(logits.scalar_type()),
                           .logits = logits.const_data_ptr(),
                           .how = how.const_data_ptr<double>(),
                           .drawn = drawn.data_ptr<double>()},
                          device);
  });
  return drawn;
}

}  // namespace gka::ops
