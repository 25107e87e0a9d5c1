#include "ops/fused.h"

#include "kernels/cuda/fused.h"
#include "ops/on_gpu.h"

namespace gka::ops {

static_assert(kFusedMultiple == kernels::cuda::kFusedVector);

bool is_aligned(const at::Tensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

bool has_kernels(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return kHasCuda && tensor.is_cuda() && (type == at::kBFloat16 || type == at::kHalf || type == at::kFloat) &&
         tensor.numel() > 0;
}

bool has_fused(const at::Tensor& tensor) {
  return has_kernels(tensor) && tensor.is_contiguous() && tensor.size(-1) % kFusedMultiple == 0 && is_aligned(tensor);
}

}  // namespace gka::ops
