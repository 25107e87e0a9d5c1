// Keys and values in pages of bytes (kernels/int8_pages.h), by torch's operators: what prompts and the CPU use.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace gka::ops {

inline bool is_int8_pages(const at::Tensor& pool) { return pool.scalar_type() == at::kChar; }

/// Of a token, among a page's: numbers become bytes, with a scale beside them.
std::vector<std::int64_t> int8_token_shape(std::vector<std::int64_t> shape);

/// Rounds fresh [T, heads, D] into the pool [pages, 64, heads, D + 4]: token i into page pages[i], at `tokens[i]` of it
/// (int64 [T]). No gradient.
void write_int8_pages(const at::Tensor& pool, const at::Tensor& pages, const at::Tensor& tokens,
                      const at::Tensor& fresh);

/// What the tokens of these pages (int64 [N]) stand for: [64 N, heads, D] of `type`.
at::Tensor read_int8_pages(const at::Tensor& pool, const at::Tensor& pages, at::ScalarType type);

}  // namespace gka::ops
