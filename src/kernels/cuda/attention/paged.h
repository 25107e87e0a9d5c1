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
#include "kernels/int8_pages.h"

namespace gka::kernels::cuda {

/// All arrays are bfloat16, contiguous and aligned to 16 bytes; the pages may hold bytes instead (int8_pages.h).
struct PagedAttention {
  static constexpr std::int64_t kPage = kInt8PageTokens;

  std::int64_t batch = 0, heads = 0, kv_heads = 0;
  std::int64_t head_dim = 0;  // 64, 128 or 256
  std::int64_t width = 0;     // pages in each row of the table
  std::int64_t splits = 1;
  bool int8 = false;  // the pages
  float scale = 1;
  const void* q = nullptr;  // [batch, heads, head_dim]
  const void* k = nullptr;  // [batch, kv_heads, head_dim], of the new token
  const void* v = nullptr;
  void* keys = nullptr;  // [pages, kPage, kv_heads, head_dim]
  void* values = nullptr;
  const std::int64_t* pages = nullptr;      // [batch, width]
  const std::int64_t* positions = nullptr;  // [batch]: of the new token
  void* o = nullptr;                        // [batch, heads, head_dim]

  /// Blocks that a multiprocessor holds at once.
  static constexpr std::int64_t resident(bool bytes) { return bytes ? 4 : 3; }

  /// Query heads that one block answers: as many of those that share a key head as divide them evenly.
  static constexpr std::int64_t kMostTogether = 8;
  constexpr std::int64_t together() const {
    const auto group = heads / kv_heads;
    auto count = std::min(group, kMostTogether);
    while (group % count != 0) --count;
    return count;
  }
};

constexpr bool has_paged_attention(std::int64_t head_dim) {
  return head_dim == 64 || head_dim == 128 || head_dim == 256;
}

/// Of pages that hold numbers: how many a block has under way at once, and what they take of its shared memory.
constexpr int paged_stages(std::int64_t head_dim) { return head_dim <= 64 ? 4 : 2; }
constexpr std::int64_t paged_shared_bytes(std::int64_t head_dim) {
  constexpr int kPad = 8, kBytes = 2;  // of a row; of a number
  return 2 * paged_stages(head_dim) * PagedAttention::kPage * (head_dim + kPad) * kBytes;
}
/// Whether a device's blocks have so much: heads of 256 take 132 KiB, and cards of compute capability 8.6, 8.9 and 12.0
/// have 99.
bool has_room_for_pages(std::int64_t head_dim, int device);

/// How many splits keep a large card busy, each of at least four pages: the fewest with which the last blocks, too, run
/// with most of the card at work.
constexpr std::int64_t paged_splits(const PagedAttention& a) {
  const std::int64_t at_once = PagedAttention::resident(a.int8) * 132;
  constexpr double kBusy = 0.95;
  const auto units = a.batch * a.heads / a.together(), most = std::max<std::int64_t>(1, a.width / 4);
  std::int64_t best = 1;
  double busiest = 0;
  for (std::int64_t splits = 1; splits <= std::min<std::int64_t>(most, at_once); ++splits) {
    const auto blocks = units * splits, rounds = (blocks + at_once - 1) / at_once;
    const double busy = static_cast<double>(blocks) / static_cast<double>(rounds * at_once);
    if (busy > busiest) {
      busiest = busy;
      best = splits;
    }
    if (busiest >= kBusy) break;
  }
  return best;
}

void paged_attention(const PagedAttention& a, const Device& device);

}  // namespace gka::kernels::cuda
