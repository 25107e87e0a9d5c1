// It costs what reading the keys and values costs, as long as enough of them are under way. A warp takes 16 tokens at a
// time, its own sixteenths of every page: their rows come by asynchronous copies, a tile ahead of the one it works on,
// and q kᵀ and the sum of values are products on tensor cores, whose rows are the query heads that share the key head.
// Those are at most eight of a tile's sixteen rows; the other eight take what rounding the weights to bfloat16 left of
// them, so that the sums are as good as with weights of twice the digits, at no cost. A warp has its own maximum, sum
// and answers, and knows nothing of the others until the end, when a block adds up its warps in shared memory.
#include "kernels/cuda/attention/paged.cuh"

namespace gka::kernels::cuda {
namespace paged {

inline constexpr int kTogether = 8;  // numbers that a lane copies at a time

template <int kDim>
struct Tiles {
  static constexpr int kStages = paged_stages(kDim);
  static constexpr int kRow = kDim + memory::kPad;
  struct Stage {
    Bits keys[kTile][kRow], values[kTile][kRow];
  };
  Stage stages[kWarps][kStages];
};
template <int kDim>
union Shared {
  Tiles<kDim> tiles;
  Ends<kDim> ends;
};
static_assert(sizeof(Shared<64>) == paged_shared_bytes(64) && sizeof(Shared<128>) == paged_shared_bytes(128) &&
              sizeof(Shared<256>) == paged_shared_bytes(256));

/// A warp's copies of its tokens of one page: those before the sequence's newest, whose rows are zeros.
template <int kDim>
__device__ __forceinline__ void fetch(const PagedAttention& a, const Stretch& s, std::int64_t page, std::int64_t place,
                                      typename Tiles<kDim>::Stage& stage) {
  constexpr int kRowLanes = kDim / kTogether, kAtOnce = kLanes / kRowLanes;
  const std::int64_t row = a.kv_heads * kDim;
  const int column = lane() % kRowLanes * kTogether;
#pragma unroll
  for (int i = 0; i < kTile; i += kAtOnce) {
    const int token = i + lane() / kRowLanes, in_page = warp() * kTile + token;
    const bool there = page * PagedAttention::kPage + in_page < s.position;
    const std::int64_t at = (place * PagedAttention::kPage + in_page) * row + s.kv_head * kDim + column;
    copy_async_or_zero<16>(&stage.keys[token][column], static_cast<const Bits*>(a.keys) + at, there);
    copy_async_or_zero<16>(&stage.values[token][column], static_cast<const Bits*>(a.values) + at, there);
  }
}

/// The newest token's key and value, into the tile and to their page.
template <int kDim>
__device__ __forceinline__ void add_newest(const PagedAttention& a, const Stretch& s, std::int64_t place,
                                           typename Tiles<kDim>::Stage& stage) {
  const int token = static_cast<int>(s.position % kTile);
  const bool writes = s.head % (a.heads / a.kv_heads) == 0;  // one of the blocks with this key head
  const std::int64_t fresh = (s.b * a.kv_heads + s.kv_head) * kDim;
  const std::int64_t at =
      ((place * PagedAttention::kPage + s.position % PagedAttention::kPage) * a.kv_heads + s.kv_head) * kDim;
  for (int d = lane(); d < kDim; d += kLanes) {
    const Bits key = static_cast<const Bits*>(a.k)[fresh + d], value = static_cast<const Bits*>(a.v)[fresh + d];
    stage.keys[token][d] = key;
    stage.values[token][d] = value;
    if (!writes) continue;
    static_cast<Bits*>(a.keys)[at + d] = key;
    static_cast<Bits*>(a.values)[at + d] = value;
  }
}

/// A warp's answers. A lane has, of head lane / 4, two neighbouring dimensions of every eight; `rest` beside `answer`
/// is the part of the weights that bfloat16 does not hold.
template <int kDim>
struct Found {
  float most = kNone, sum = 0;  // sum: of the lane's own tokens
  float answers[kDim / 8][4] = {};

  __device__ __forceinline__ void look(const std::uint32_t (&q)[kDim / 16][4], const typename Tiles<kDim>::Stage& stage,
                                       float scale, std::int64_t seen) {
    float scores[kTile / 8][4] = {};
    const int block = lane() / 8, row = lane() % 8;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      std::uint32_t k[4];
      memory::load_blocks<false>(k, &stage.keys[block / 2 * 8 + row][16 * d + block % 2 * 8]);
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) memory::multiply_add(scores[n], q[d], k[2 * n], k[2 * n + 1]);
    }
    float highest = most;
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scores[n][i] = 8 * n + lane() % 4 * 2 + i < seen ? scores[n][i] * scale : kNone;
        highest = fmaxf(highest, scores[n][i]);
      }
    }
    highest = fmaxf(highest, from_lane(highest, 1));
    highest = fmaxf(highest, from_lane(highest, 2));
    const float shrunk = exp2f(most - highest);
    most = highest;
    sum *= shrunk;
    std::uint32_t weights[4];
#pragma unroll
    for (int n = 0; n < kTile / 8; ++n) {
      float weight[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weight[i] = 8 * n + lane() % 4 * 2 + i < seen ? exp2f(scores[n][i] - most) : 0;
        sum += weight[i];
      }
      const std::uint32_t most_of = two_bfloat16(weight[0], weight[1]);
      weights[2 * n] = most_of;
      weights[2 * n + 1] = two_bfloat16(weight[0] - memory::low_half(most_of), weight[1] - memory::high_half(most_of));
    }
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      std::uint32_t v[4];
      memory::load_blocks<true>(v, &stage.values[block % 2 * 8 + row][16 * d + block / 2 * 8]);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float (&answer)[4] = answers[2 * d + n];
#pragma unroll
        for (int i = 0; i < 4; ++i) answer[i] *= shrunk;
        memory::multiply_add(answer, weights, v[2 * n], v[2 * n + 1]);
      }
    }
  }
};

template <int kDim>
__global__ void __launch_bounds__(kBlock, kDim <= 128 ? 3 : 1)
    attend(const __grid_constant__ PagedAttention a, std::int64_t together, float* answers, Part* parts) {
  constexpr int kStages = Tiles<kDim>::kStages;
  auto& shared = *reinterpret_cast<Shared<kDim>*>(shared_memory());
  auto& stages = shared.tiles.stages[warp()];
  let_next_start();
  const Stretch s = Stretch::of(a, together);
  const std::int64_t* places = a.pages + s.b * a.width + s.first_page;
  // Of page i of the stretch, the warp's tokens up to the newest.
  const auto seen_of = [&](std::int64_t i) {
    return s.position + 1 - ((s.first_page + i) * PagedAttention::kPage + warp() * kTile);
  };
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    if (i < s.pages) fetch<kDim>(a, s, s.first_page + i, places[i], stages[i]);
    end_group();
  }
  std::int64_t ahead = kStages < s.pages ? places[kStages] : 0;
  wait_for_earlier();

  std::uint32_t q[kDim / 16][4] = {};
  if (lane() / 4 < together) {
    const Bits* own = static_cast<const Bits*>(a.q) + (s.b * a.heads + s.head + lane() / 4) * kDim + lane() % 4 * 2;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      q[d][0] = *reinterpret_cast<const std::uint32_t*>(own + 16 * d);
      q[d][2] = *reinterpret_cast<const std::uint32_t*>(own + 16 * d + 8);
    }
  }
  Found<kDim> found;
  int stage = 0;
  for (std::int64_t i = 0; i < s.pages; ++i) {
    wait_for_groups_but<kStages - 1>();
    sync_warp();
    const std::int64_t seen = seen_of(i);
    if (seen > 0 && seen <= kTile) {
      add_newest<kDim>(a, s, places[i], stages[stage]);
      sync_warp();
    }
    if (seen > 0) found.look(q, stages[stage], a.scale * kLog2E, seen);
    sync_warp();
    if (i + kStages < s.pages) {
      fetch<kDim>(a, s, s.first_page + i + kStages, ahead, stages[stage]);
      if (i + kStages + 1 < s.pages) ahead = places[i + kStages + 1];
    }
    end_group();
    stage = stage + 1 < kStages ? stage + 1 : 0;
  }
  found.sum += from_lane(found.sum, 1);
  found.sum += from_lane(found.sum, 2);
  wait_for_copies();
  sync();

  auto& ends = shared.ends;
  const int own_head = lane() / 4;
  if (lane() % 4 == 0) ends.parts[warp()][own_head] = {found.most, found.sum};
#pragma unroll
  for (int d = 0; d < kDim / 8; ++d) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ends.answers[warp()][own_head][8 * d + lane() % 4 * 2 + i] = found.answers[d][i] + found.answers[d][2 + i];
    }
  }
  sync();
  add_up<kDim>(a, s, ends, together, answers, parts);
}

__global__ void __launch_bounds__(kBlock)
    put_together(const __grid_constant__ PagedAttention a, const float* answers, const Part* parts) {
  let_next_start();
  wait_for_earlier();
  const std::int64_t of_head = block();
  const Part* own = parts + of_head * a.splits;
  float most = kNone, sum = 0;
  for (std::int64_t s = 0; s < a.splits; ++s) most = fmaxf(most, own[s].most);
  for (std::int64_t s = 0; s < a.splits; ++s) sum += exp2f(own[s].most - most) * own[s].sum;
  for (std::int64_t d = thread(); d < a.head_dim; d += kBlock) {
    float answer = 0;
    for (std::int64_t s = 0; s < a.splits; ++s) {
      if (own[s].sum > 0) answer += exp2f(own[s].most - most) * answers[(of_head * a.splits + s) * a.head_dim + d];
    }
    static_cast<Bits*>(a.o)[of_head * a.head_dim + d] = static_cast<Bits>(two_bfloat16(answer / sum, 0));
  }
}

template <int kDim>
void attend_numbers(const PagedAttention& a, const Device& device) {
  const auto scratch = Scratch::of(a, device);
  launch_early<kBlock>(attend<kDim>, a.batch * a.heads / a.together() * a.splits,
                       static_cast<int>(sizeof(Shared<kDim>)), device.index, device.stream, a, a.together(),
                       scratch.answers, scratch.parts);
  put_splits_together(a, scratch, device);
}

void put_splits_together(const PagedAttention& a, const Scratch& scratch, const Device& device) {
  if (a.splits == 1) return;
  launch_early<kBlock>(put_together, a.batch * a.heads, 0, device.index, device.stream, a,
                       static_cast<const float*>(scratch.answers), static_cast<const Part*>(scratch.parts));
}

}  // namespace paged

bool has_room_for_pages(std::int64_t head_dim, int device) {
  return shared_memory_per_block(device) >= paged_shared_bytes(head_dim);
}

void paged_attention(const PagedAttention& a, const Device& device) {
  const CurrentDevice current(device.index);
  if (a.int8) return paged::attend_bytes(a, device);
  switch (a.head_dim) {
    case 64: return paged::attend_numbers<64>(a, device);
    case 128: return paged::attend_numbers<128>(a, device);
    default: return paged::attend_numbers<256>(a, device);
  }
}

}  // namespace gka::kernels::cuda
