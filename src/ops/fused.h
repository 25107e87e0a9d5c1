// A decoder's operations besides the memories have fused kernels for tensors on a GPU (swiglu, add_norm, gates, rotary,
// cross_entropy). Elsewhere torch's own operations do: ask first.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gka::ops {

/// Whether there are kernels for the tensor's device and type.
bool has_kernels(const at::Tensor& tensor);

/// The same, and its memory suits them: contiguous, aligned, its last dimension a multiple of kFusedMultiple.
bool has_fused(const at::Tensor& tensor);
inline constexpr std::int64_t kFusedMultiple = 8;

/// Whether it begins where a kernel can read several numbers at a time.
bool is_aligned(const at::Tensor& tensor);

}  // namespace gka::ops
