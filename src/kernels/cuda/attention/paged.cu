// It costs what reading the keys and values costs. head_dim / 8 lanes read a token's row together, 16 bytes each; such
// a group of lanes, a walker, takes kChunk tokens at a time, has its own maximum, sum and answers, and knows nothing of
// the others until the end, when a block adds up its walkers in shared memory.
#include "kernels/cuda/attention/paged.h"

#include <math.h>

#include "kernels/cuda/device.cuh"

namespace gka::kernels::cuda {
namespace paged {

inline constexpr int kBlock = 128;
inline constexpr int kChunk = 4;     // tokens whose rows are under way at once
inline constexpr int kTogether = 8;  // numbers that a lane reads at a time
inline constexpr float kNone = -1e30f;
inline constexpr float kLog2E = 1.4426950408889634f;

struct alignas(16) Packed {
  std::uint32_t words[kTogether / 2];
};

struct Numbers {
  float x[kTogether];
};

__device__ __forceinline__ Packed read(const void* data, std::int64_t at) {
  return *reinterpret_cast<const Packed*>(static_cast<const std::uint16_t*>(data) + at);
}
__device__ __forceinline__ void write(void* data, std::int64_t at, const Packed& value) {
  *reinterpret_cast<Packed*>(static_cast<std::uint16_t*>(data) + at) = value;
}
__device__ __forceinline__ Numbers widen(const Packed& packed) {
  Numbers n;
#pragma unroll
  for (int i = 0; i < kTogether / 2; ++i) {
    n.x[2 * i] = bits_to_float(packed.words[i] << 16);
    n.x[2 * i + 1] = bits_to_float(packed.words[i] & 0xffff0000u);
  }
  return n;
}

/// What is left of walkers or splits: the answers are sums of 2^(score − most) v, not yet divided by `sum`.
template <int kHeads>
struct Found {
  float most[kHeads], sum[kHeads];
  Numbers answer[kHeads];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      most[h] = kNone;
      sum[h] = 0;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) answer[h].x[i] = 0;
    }
  }
};

/// Tokens first … first + kChunk − 1, those from `end` on left out.
template <int kRowLanes, int kHeads>
__device__ __forceinline__ void look(const Numbers (&q)[kHeads], const Packed (&keys)[kChunk],
                                     const Packed (&values)[kChunk], std::int64_t first, std::int64_t end,
                                     Found<kHeads>& found) {
  float scores[kHeads][kChunk];
#pragma unroll
  for (int j = 0; j < kChunk; ++j) {
    const Numbers key = widen(keys[j]);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float dot = 0;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) dot += q[h].x[i] * key.x[i];
#pragma unroll
      for (int apart = kRowLanes / 2; apart > 0; apart /= 2) dot += from_lane(dot, apart);
      scores[h][j] = first + j < end ? dot : kNone;
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    float most = found.most[h];
#pragma unroll
    for (int j = 0; j < kChunk; ++j) most = fmaxf(most, scores[h][j]);
    const float shrunk = exp2f(found.most[h] - most);
    found.most[h] = most;
    found.sum[h] *= shrunk;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) found.answer[h].x[i] *= shrunk;
  }
#pragma unroll
  for (int j = 0; j < kChunk; ++j) {
    const Numbers value = widen(values[j]);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float weight = first + j < end ? exp2f(scores[h][j] - found.most[h]) : 0;
      found.sum[h] += weight;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) found.answer[h].x[i] += weight * value.x[i];
    }
  }
}

/// Of a split of one head: kept for the second kernel.
struct Part {
  float most, sum;
};

template <int kRowLanes, int kHeads>
struct Shared {
  static constexpr int kWalkers = kBlock / kRowLanes, kDim = kRowLanes * kTogether;
  Part parts[kWalkers][kHeads];
  float answers[kWalkers][kHeads][kDim];
};

template <int kRowLanes, int kHeads>
__global__ void __launch_bounds__(kBlock, 3)
    attend(const __grid_constant__ PagedAttention a, float* answers, Part* parts) {
  using Own = Shared<kRowLanes, kHeads>;
  constexpr int kWalkers = Own::kWalkers, kDim = Own::kDim;
  auto& shared = *reinterpret_cast<Own*>(shared_memory());
  const std::int64_t split = block() % a.splits, unit = block() / a.splits;  // unit: of [batch, heads / kHeads]
  const std::int64_t units = a.heads / kHeads, b = unit / units, head = unit % units * kHeads;
  const std::int64_t kv_head = head / (a.heads / a.kv_heads);
  const std::int64_t position = a.positions[b], stretch = (a.width + a.splits - 1) / a.splits * PagedAttention::kPage;
  const std::int64_t begin = split * stretch, stop = begin + stretch;
  const std::int64_t end = stop < position + 1 ? stop : position + 1;
  const int walker = thread() / kRowLanes, column = thread() % kRowLanes * kTogether;
  const std::int64_t fresh = (b * a.kv_heads + kv_head) * kDim + column, row = a.kv_heads * kDim;

  Numbers q[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    q[h] = widen(read(a.q, (b * a.heads + head + h) * kDim + column));
#pragma unroll
    for (int i = 0; i < kTogether; ++i) q[h].x[i] *= a.scale * kLog2E;
  }
  Found<kHeads> found;
  found.clear();
  for (std::int64_t base = begin; base < end; base += kWalkers * kChunk) {
    const std::int64_t first = base + walker * kChunk;
    const std::int64_t page = first < end ? a.pages[b * a.width + first / PagedAttention::kPage] : 0;
    const std::int64_t at =
        (page * PagedAttention::kPage + first % PagedAttention::kPage) * row + kv_head * kDim + column;
    Packed keys[kChunk], values[kChunk];
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      const bool old = first + j < end && first + j != position;
      keys[j] = old ? read(a.keys, at + j * row) : Packed{};
      values[j] = old ? read(a.values, at + j * row) : Packed{};
      if (first + j != position || first + j >= end) continue;
      keys[j] = read(a.k, fresh);
      values[j] = read(a.v, fresh);
      if (head % (a.heads / a.kv_heads) != 0) continue;  // one of the blocks with this key head writes it
      write(a.keys, at + j * row, keys[j]);
      write(a.values, at + j * row, values[j]);
    }
    look<kRowLanes, kHeads>(q, keys, values, first, end, found);
  }

#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (column == 0) shared.parts[walker][h] = {found.most[h], found.sum[h]};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) shared.answers[walker][h][column + i] = found.answer[h].x[i];
  }
  sync();
  for (int i = thread(); i < kHeads * kDim; i += kBlock) {
    const int h = i / kDim, d = i % kDim;
    float most = kNone, sum = 0, answer = 0;
    for (int w = 0; w < kWalkers; ++w) most = fmaxf(most, shared.parts[w][h].most);
    for (int w = 0; w < kWalkers; ++w) {
      const float weight = exp2f(shared.parts[w][h].most - most);
      sum += weight * shared.parts[w][h].sum;
      answer += weight * shared.answers[w][h][d];
    }
    const std::int64_t of_head = b * a.heads + head + h;
    if (a.splits == 1) {
      static_cast<std::uint16_t*>(a.o)[of_head * kDim + d] = static_cast<std::uint16_t>(two_bfloat16(answer / sum, 0));
      continue;
    }
    answers[(of_head * a.splits + split) * kDim + d] = answer;
    if (d == 0) parts[of_head * a.splits + split] = {most, sum};
  }
}

__global__ void __launch_bounds__(kBlock)
    put_together(const __grid_constant__ PagedAttention a, const float* answers, const Part* parts) {
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
    static_cast<std::uint16_t*>(a.o)[of_head * a.head_dim + d] =
        static_cast<std::uint16_t>(two_bfloat16(answer / sum, 0));
  }
}

template <int kRowLanes, int kHeads>
void run(const PagedAttention& a, const Device& device) {
  const std::int64_t blocks = a.batch * a.heads / kHeads * a.splits, places = a.batch * a.heads * a.splits;
  float* answers = nullptr;
  Part* parts = nullptr;
  if (a.splits > 1) {
    answers = static_cast<float*>(device.allocate(static_cast<std::size_t>(places * a.head_dim) * sizeof(float)));
    parts = static_cast<Part*>(device.allocate(static_cast<std::size_t>(places) * sizeof(Part)));
  }
  launch_blocks_of<kBlock>(attend<kRowLanes, kHeads>, blocks, static_cast<int>(sizeof(Shared<kRowLanes, kHeads>)),
                           device.stream, a, answers, parts);
  if (a.splits > 1) launch_blocks_of<kBlock>(put_together, a.batch * a.heads, 0, device.stream, a, answers, parts);
}

template <int kRowLanes>
void run_for(const PagedAttention& a, const Device& device) {
  switch (a.together()) {
    case 4: return run<kRowLanes, 4>(a, device);
    case 2: return run<kRowLanes, 2>(a, device);
    default: return run<kRowLanes, 1>(a, device);
  }
}

}  // namespace paged

void paged_attention(const PagedAttention& a, const Device& device) {
  const CurrentDevice current(device.index);
  switch (a.head_dim) {
    case 64: return paged::run_for<8>(a, device);
    case 128: return paged::run_for<16>(a, device);
    default: return paged::run_for<32>(a, device);
  }
}

}  // namespace gka::kernels::cuda
