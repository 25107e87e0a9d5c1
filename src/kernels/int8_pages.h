// A page of keys, or of values, as bytes: 64 tokens of some heads, each token's numbers of a head with a scale of their
// own, the largest of them ±127. Head by head, so that what one head is asked for lies together:
//
//   for each head: int8 [64 tokens, head_dim], then float32 [64 tokens]
//
// A page has as many bytes as [64, heads, head_dim + 4] int8, which is the shape it has among torch's tensors.
#pragma once

#include <cstdint>

namespace gka::kernels {

inline constexpr std::int64_t kInt8PageTokens = 64, kInt8ScaleBytes = 4;
inline constexpr float kInt8Most = 127;
/// A scale below this has no inverse worth the name: its numbers are zeros.
inline constexpr float kInt8LeastScale = 0x1p-126f;

constexpr std::int64_t int8_page_head_bytes(std::int64_t head_dim) {
  return kInt8PageTokens * (head_dim + kInt8ScaleBytes);
}

}  // namespace gka::kernels
