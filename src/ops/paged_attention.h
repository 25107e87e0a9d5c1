// Attention of one token of each sequence over pages of keys and values, on a GPU.
#pragma once

#include <ATen/core/Tensor.h>

namespace gka::ops {

/// Whether there is a kernel: q [B,heads,D] against pools [pages, 64, kv heads, D], or of bytes (int8_pages.h).
bool has_paged_attention(const at::Tensor& q, const at::Tensor& keys);

/// o [B,heads,D]. k and v [B,kv heads,D], of the token at `positions` (int64 [B], counted from the first token of its
/// first page), are written to the pools; `pages` is int64 [B, pages of each]. No gradient.
at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& keys,
                           const at::Tensor& values, const at::Tensor& pages, const at::Tensor& positions);

}  // namespace gka::ops
