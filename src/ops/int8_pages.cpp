#include "ops/int8_pages.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "kernels/int8_pages.h"

namespace gka::ops {
namespace {

/// A pool of pages as what lies in it: bytes [pages, heads, 64, D] and scales [pages, heads, 64], both views.
struct Parts {
  at::Tensor numbers, scales;

  static Parts of(const at::Tensor& pool) {
    constexpr auto kTokens = kernels::kInt8PageTokens, kScale = kernels::kInt8ScaleBytes;
    const auto heads = pool.size(2), dim = pool.size(3) - kScale;
    const auto by_head = pool.view({pool.size(0), heads, kernels::int8_page_head_bytes(dim)});
    return {.numbers = by_head.narrow(2, 0, kTokens * dim).unflatten(2, {kTokens, dim}),
            .scales = by_head.narrow(2, kTokens * dim, kTokens * kScale).view(at::kFloat)};
  }
};

}  // namespace

std::vector<std::int64_t> int8_token_shape(std::vector<std::int64_t> shape) {
  shape.back() += kernels::kInt8ScaleBytes;
  return shape;
}

void write_int8_pages(const at::Tensor& pool, const at::Tensor& pages, const at::Tensor& tokens,
                      const at::Tensor& fresh) {
  const at::NoGradGuard no_gradient;
  const auto wide = fresh.to(at::kFloat);
  const auto scales = wide.abs().amax(-1).div_(kernels::kInt8Most);
  const auto by = at::where(scales.ge(kernels::kInt8LeastScale), scales.reciprocal(), at::zeros_like(scales));
  const auto numbers = wide.mul(by.unsqueeze(-1)).round_().clamp_(-kernels::kInt8Most, kernels::kInt8Most);
  const auto parts = Parts::of(pool);
  parts.numbers.transpose(1, 2).index_put_({pages, tokens}, numbers.to(at::kChar));
  parts.scales.transpose(1, 2).index_put_({pages, tokens}, scales);
}

at::Tensor read_int8_pages(const at::Tensor& pool, const at::Tensor& pages, at::ScalarType type) {
  const at::NoGradGuard no_gradient;
  const auto parts = Parts::of(pool.index_select(0, pages));
  const auto whole = parts.numbers.to(at::kFloat).mul_(parts.scales.unsqueeze(-1));
  return whole.transpose(1, 2).to(type).contiguous().flatten(0, 1);
}

}  // namespace gka::ops
