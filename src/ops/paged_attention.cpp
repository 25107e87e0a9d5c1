#include "ops/paged_attention.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <cmath>

#include "kernels/cuda/attention/paged.h"
#include "ops/fused.h"
#include "ops/int8_pages.h"
#include "ops/on_gpu.h"

namespace gka::ops {
namespace {

bool has_room(const at::Tensor& q) {
  bool room = false;
  on_gpu(q, [&](const auto& device) { room = kernels::cuda::has_room_for_pages(q.size(-1), device.index); });
  return room;
}

}  // namespace

bool has_paged_attention(const at::Tensor& q, const at::Tensor& keys) {
  const auto type = keys.scalar_type();
  return kHasCuda && q.is_cuda() && !at::GradMode::is_enabled() && q.scalar_type() == at::kBFloat16 &&
         q.is_contiguous() && (type == at::kBFloat16 || type == at::kChar) && keys.is_contiguous() &&
         is_aligned(keys) && keys.size(1) == kernels::cuda::PagedAttention::kPage && q.numel() > 0 &&
         kernels::cuda::has_paged_attention(q.size(-1)) && (type == at::kChar || has_room(q));
}

at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& keys,
                           const at::Tensor& values, const at::Tensor& pages, const at::Tensor& positions) {
  const auto own_q = q.contiguous(), own_k = k.contiguous(), own_v = v.contiguous();
  const auto table = pages.contiguous(), places = positions.contiguous();
  const auto o = at::empty_like(own_q);
  kernels::cuda::PagedAttention call{.batch = q.size(0),
                                     .heads = q.size(1),
                                     .kv_heads = k.size(1),
                                     .head_dim = q.size(2),
                                     .width = pages.size(1),
                                     .int8 = is_int8_pages(keys),
                                     .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(q.size(2)))),
                                     .q = own_q.const_data_ptr(),
                                     .k = own_k.const_data_ptr(),
                                     .v = own_v.const_data_ptr(),
                                     .keys = keys.data_ptr(),
                                     .values = values.data_ptr(),
                                     .pages = table.const_data_ptr<std::int64_t>(),
                                     .positions = places.const_data_ptr<std::int64_t>(),
                                     .o = o.data_ptr()};
  call.splits = kernels::cuda::paged_splits(call);
  on_gpu(q, [&](const auto& device) { kernels::cuda::paged_attention(call, device); });
  return o;
}

}  // namespace gka::ops
