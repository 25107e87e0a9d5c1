// Attention of one new token of each sequence to all tokens before it, whose keys and values lie in pages:
//
//   o = Σ_t softmax_t(scale · q·k_t) v_t        heads / kv_heads query heads share a key head
//
// The new token's key and value come along and are written to their page. A sequence's pages are split among blocks, so
// that one long sequence fills the card; what the splits found is put together by a second, small kernel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gka/kernels.h"

namespace gka::kernels::cuda {

/// All arrays are bfloat16, contiguous and aligned to 16 bytes.
struct PagedAttention {
  static constexpr std::int64_t kPage = 64;

  std::int64_t batch = 0, heads = 0, kv_heads = 0;
  std::int64_t head_dim = 0;  // 64, 128 or 256
  std::int64_t width = 0;     // pages in each row of the table
  std::int64_t splits = 1;
  float scale = 1;
  const void* q = nullptr;  // [batch, heads, head_dim]
  const void* k = nullptr;  // [batch, kv_heads, head_dim], of the new token
  const void* v = nullptr;
  void* keys = nullptr;  // [pages, kPage, kv_heads, head_dim]
  void* values = nullptr;
  const std::int64_t* pages = nullptr;      // [batch, width]
  const std::int64_t* positions = nullptr;  // [batch]: of the new token
  void* o = nullptr;                        // [batch, heads, head_dim]

  /// Query heads that one block answers.
  constexpr std::int64_t together() const {
    const auto group = heads / kv_heads;
    return group % 4 == 0 ? 4 : group % 2 == 0 ? 2 : 1;
  }
};

constexpr bool has_paged_attention(std::int64_t head_dim) {
  return head_dim == 64 || head_dim == 128 || head_dim == 256;
}

/// How many splits keep a large card busy, each of at least four pages.
constexpr std::int64_t paged_splits(const PagedAttention& a) {
  constexpr std::int64_t kBlocks = 3 * 132;
  const auto units = a.batch * a.heads / a.together();
  return std::clamp<std::int64_t>((kBlocks + units - 1) / units, 1, std::max<std::int64_t>(1, a.width / 4));
}

void paged_attention(const PagedAttention& a, const Device& device);

}  // namespace gka::kernels::cuda
