// What attention over pages has in common whatever the pages hold: which pages a block looks at, and how answers of
// warps, and then of splits, become one. Each is a sum of 2^(score − most) v, not yet divided by the sum of weights, so
// two of them are added once both have the same `most`.
#pragma once

#include <math.h>

#include "kernels/cuda/attention/paged.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/memory/mma.cuh"

namespace gka::kernels::cuda::paged {

using memory::Bits;

inline constexpr int kTile = 16;  // tokens that a warp takes at a time
inline constexpr int kWarps = PagedAttention::kPage / kTile, kBlock = kWarps * kLanes;
inline constexpr int kHeads = PagedAttention::kMostTogether;
inline constexpr float kNone = -1e30f;
inline constexpr float kLog2E = 1.4426950408889634f;

/// Of a split of one head.
struct Part {
  float most, sum;
};

/// What the warps of a block found.
template <int kDim>
struct Ends {
  Part parts[kWarps][kHeads];
  float answers[kWarps][kHeads][kDim];
};

/// What a block has to look at.
struct Stretch {
  std::int64_t b, head, kv_head;
  std::int64_t position, first_page, pages;  // pages: how many

  __device__ static __forceinline__ Stretch of(const PagedAttention& a, std::int64_t together) {
    const std::int64_t split = block() % a.splits, unit = block() / a.splits;
    const std::int64_t units = a.heads / together;
    Stretch s;
    s.b = unit / units;
    s.head = unit % units * together;
    s.kv_head = s.head / (a.heads / a.kv_heads);
    s.position = a.positions[s.b];
    const std::int64_t all = s.position / PagedAttention::kPage + 1, each = (all + a.splits - 1) / a.splits;
    s.first_page = split * each;
    const std::int64_t left = all - s.first_page;
    s.pages = left < each ? left : each;
    return s;
  }
};

/// The warps' answers added up: the block's, or where it has but a part of the tokens, its part of it.
template <int kDim>
__device__ __forceinline__ void add_up(const PagedAttention& a, const Stretch& s, const Ends<kDim>& ends,
                                       std::int64_t together, float* answers, Part* parts) {
  const std::int64_t split = block() % a.splits;
  for (int i = thread(); i < together * kDim; i += kBlock) {
    const int h = i / kDim, d = i % kDim;
    float most = kNone, sum = 0, answer = 0;
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, ends.parts[w][h].most);
    for (int w = 0; w < kWarps; ++w) {
      const float weight = exp2f(ends.parts[w][h].most - most);
      sum += weight * ends.parts[w][h].sum;
      answer += weight * ends.answers[w][h][d];
    }
    const std::int64_t of_head = s.b * a.heads + s.head + h;
    if (a.splits == 1) {
      static_cast<Bits*>(a.o)[of_head * kDim + d] = static_cast<Bits>(two_bfloat16(answer / sum, 0));
      continue;
    }
    answers[(of_head * a.splits + split) * kDim + d] = answer;
    if (d == 0) parts[of_head * a.splits + split] = {most, sum};
  }
}

/// Where splits leave what they found; nothing where there is one.
struct Scratch {
  float* answers = nullptr;
  Part* parts = nullptr;

  static Scratch of(const PagedAttention& a, const Device& device) {
    if (a.splits <= 1) return {};
    const auto places = static_cast<std::size_t>(a.batch * a.heads * a.splits);
    return {
        .answers = static_cast<float*>(device.allocate(places * static_cast<std::size_t>(a.head_dim) * sizeof(float))),
        .parts = static_cast<Part*>(device.allocate(places * sizeof(Part)))};
  }
};

/// Adds up the splits, where there are several.
void put_splits_together(const PagedAttention& a, const Scratch& scratch, const Device& device);

/// The same call over pages of bytes.
void attend_bytes(const PagedAttention& a, const Device& device);

}  // namespace gka::kernels::cuda::paged
