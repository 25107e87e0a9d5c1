// Attention over pages of bytes. Nothing goes by way of shared memory: a lane reads 16 bytes at a time of just those
// tokens and channels that it will hand to the tensor cores. What the cores call a column of depth may be any channel
// as long as both sides agree, and a lane's own are neighbours in memory:
//
//   scores = k qᵀ    rows: 16 tokens, columns: the query heads. Lane l has tokens l / 4 and 8 + l / 4, 16 channels each
//   answers = vᵀ w   rows: channels, columns: the heads. Lane l has channels of its own (a share l / 4 of all) of
//   tokens
//                    2 (l % 4), the one after it, and those eight further on; weights are transposed to match
//
// Bytes become bfloat16, which holds them exactly, by moving them under the digits of 128: x = (128 + its lower seven
// bits) − (128, or 256 where the eighth is set). A token's scales multiply its score and its weight, in float32; a
// weight takes two bfloat16, the second what rounding left.
//
// A warp asks for its next 16 keys once those it has are multiplied, and looks at values in the meantime; and so with
// values. What it has found is scaled anew only where a score lies far above those before it.
#include "kernels/cuda/attention/paged.cuh"

namespace gka::kernels::cuda::paged {
namespace {

/// Weights are at most 2 to this power.
constexpr float kSlack = 8;

/// So many words, read at once.
template <int kCount>
struct alignas(4 * kCount) Words {
  std::uint32_t of[kCount];
};
template <int kCount>
__device__ __forceinline__ Words<kCount> read_words(const void* from) {
  return *static_cast<const Words<kCount>*>(from);
}
/// Bytes 2 kHalf and 2 kHalf + 1 of a word, as two bfloat16.
template <int kHalf>
__device__ __forceinline__ std::uint32_t two_of(std::uint32_t bytes) {
  const std::uint32_t placed = pick_bytes<kHalf == 0 ? 0x4140 : 0x4342>(bytes, 0x43434343u);
  return fma_two_bfloat16(placed & 0xff7fff7fu, 0x3f803f80u, (placed & 0xff80ff80u) ^ 0x80008000u);
}

/// Where 16 tokens of one head begin.
struct Place {
  const char* numbers;
  const float* scales;

  template <int kDim>
  __device__ static __forceinline__ Place of(const void* pool, const PagedAttention& a, const Stretch& s,
                                             std::int64_t page) {
    const char* head = static_cast<const char*>(pool) + (page * a.kv_heads + s.kv_head) * int8_page_head_bytes(kDim);
    return {.numbers = head + warp() * kTile * kDim,
            .scales = reinterpret_cast<const float*>(head + PagedAttention::kPage * kDim) + warp() * kTile};
  }
};

/// The scales of tokens lane / 4 and 8 + lane / 4, whose scores and weights a lane has.
struct Scales {
  float of[2];
  __device__ __forceinline__ void read(const float* scales) {
#pragma unroll
    for (int n = 0; n < 2; ++n) of[n] = scales[8 * n + lane() / 4];
  }
};

template <int kDim>
struct Keys {
  static constexpr int kBlocks = kDim / 64;  // of channels that four lanes read at once
  Words<4> words[2][kBlocks];                // of tokens lane / 4 and 8 + lane / 4
  Scales scales;

  __device__ __forceinline__ void read(const Place& place) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const char* token = place.numbers + (8 * n + lane() / 4) * kDim + lane() % 4 * 16;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) words[n][i] = read_words<4>(token + 64 * i);
    }
    scales.read(place.scales);
  }
};

template <int kDim>
struct Values {
  static constexpr int kOwn = kDim / 8;  // channels of a lane
  static constexpr int kAtOnce = kOwn < 16 ? kOwn / 4 : 4, kReads = kOwn / 4 / kAtOnce;
  Words<kAtOnce> words[4][kReads];  // of tokens 2 (lane % 4), the next, and those eight further on
  Scales scales;

  __device__ __forceinline__ void read(const Place& place) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const char* token = place.numbers + (t / 2 * 8 + lane() % 4 * 2 + t % 2) * kDim + lane() / 4 * kOwn;
#pragma unroll
      for (int i = 0; i < kReads; ++i) words[t][i] = read_words<kAtOnce>(token + 4 * kAtOnce * i);
    }
    scales.read(place.scales);
  }
  __device__ __forceinline__ std::uint32_t word(int token, int i) const {
    return words[token][i / kAtOnce].of[i % kAtOnce];
  }
};

/// The newest token's numbers, rounded, to their page; by a whole warp.
template <int kDim>
__device__ __forceinline__ void write_newest(const PagedAttention& a, const Stretch& s, const void* fresh, void* pool,
                                             std::int64_t page) {
  constexpr int kOwn = kDim / kLanes;
  const Bits* from = static_cast<const Bits*>(fresh) + (s.b * a.kv_heads + s.kv_head) * kDim + lane() * kOwn;
  float numbers[kOwn];
  std::uint32_t most = 0;  // as bits, where a NaN is more than any number
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(from[i]) << 16, size = bits & 0x7fffffffu;
    numbers[i] = bits_to_float(bits);
    most = size > most ? size : most;
  }
#pragma unroll
  for (int apart = kLanes / 2; apart > 0; apart /= 2) {
    const std::uint32_t other = from_lane(most, apart);
    most = other > most ? other : most;
  }
  const float scale = bits_to_float(most) / kInt8Most, by = scale >= kInt8LeastScale ? 1 / scale : 0;
  char* head = static_cast<char*>(pool) + (page * a.kv_heads + s.kv_head) * int8_page_head_bytes(kDim);
  const auto token = static_cast<int>(s.position % PagedAttention::kPage);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const float rounded = fminf(fmaxf(rintf(numbers[i] * by), -kInt8Most), kInt8Most);
    head[token * kDim + lane() * kOwn + i] = static_cast<char>(static_cast<int>(rounded));
  }
  if (lane() == 0) reinterpret_cast<float*>(head + PagedAttention::kPage * kDim)[token] = scale;
}

/// A warp's answers: a lane has, of heads 2 (lane % 4) and the next, its own channels in pairs: two of the first, then
/// two of the second channel.
template <int kDim>
struct Heard {
  float most[2] = {kNone, kNone}, sum[2] = {};  // of the two heads; sum: of the lane's own tokens
  float answers[kDim / 16][4] = {};

  /// k qᵀ in units of log 2, of tokens that are there: of token lane / 4 for both heads, and of the one eight further.
  __device__ __forceinline__ void score(float (&scores)[4], const std::uint32_t (&q)[kDim / 16][2],
                                        const Keys<kDim>& keys, float scale, int seen) const {
    float sums[2][4] = {};
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      const std::uint32_t one = keys.words[0][d / 4].of[d % 4], other = keys.words[1][d / 4].of[d % 4];
      const std::uint32_t rows[4] = {two_of<0>(one), two_of<0>(other), two_of<1>(one), two_of<1>(other)};
      memory::multiply_add(sums[d % 2], rows, q[d][0], q[d][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool there = i / 2 * 8 + lane() / 4 < seen;
      scores[i] = there ? (sums[0][i] + sums[1][i]) * (keys.scales.of[i / 2] * scale) : kNone;
    }
  }

  /// Scores become weights; what was found before shrinks where they are much larger.
  __device__ __forceinline__ void weigh(float (&scores)[4], int seen) {
    bool far = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) far = far || scores[i] > most[i % 2] + kSlack;
    if (any_lane(far)) rescale(scores);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[i] = i / 2 * 8 + lane() / 4 < seen ? power_of_two(scores[i] - most[i % 2]) : 0;
      sum[i % 2] += scores[i];
    }
  }

  __device__ __forceinline__ void rescale(const float (&scores)[4]) {
    float shrunk[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float highest = fmaxf(most[h], fmaxf(scores[h], scores[2 + h]));
#pragma unroll
      for (int apart = 4; apart < kLanes; apart *= 2) highest = fmaxf(highest, from_lane(highest, apart));
      shrunk[h] = exp2f(most[h] - highest);
      most[h] = highest;
      sum[h] *= shrunk[h];
    }
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) answers[j][i] *= shrunk[i % 2];
    }
  }

  __device__ __forceinline__ void add(const float (&weights)[4], const Values<kDim>& values) {
    std::uint32_t first[2], rest[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float scaled[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) scaled[h] = weights[2 * n + h] > 0 ? weights[2 * n + h] * values.scales.of[n] : 0;
      const std::uint32_t rounded = two_bfloat16(scaled[0], scaled[1]);
      first[n] = memory::transposed(rounded);
      rest[n] = memory::transposed(
          two_bfloat16(scaled[0] - memory::low_half(rounded), scaled[1] - memory::high_half(rounded)));
    }
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j) {  // channels 2 j and 2 j + 1 of the lane's own
      std::uint32_t rows[4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const std::uint32_t one = values.word(2 * n, j / 2), next = values.word(2 * n + 1, j / 2);
        const std::uint32_t both = j % 2 == 0 ? pick_bytes<0x5140>(one, next) : pick_bytes<0x7362>(one, next);
        rows[2 * n] = two_of<0>(both);
        rows[2 * n + 1] = two_of<1>(both);
      }
      memory::multiply_add(answers[j], rows, first[0], first[1]);
      memory::multiply_add(answers[j], rows, rest[0], rest[1]);
    }
  }

  __device__ __forceinline__ void leave(Ends<kDim>& ends) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int apart = 4; apart < kLanes; apart *= 2) sum[h] += from_lane(sum[h], apart);
      if (lane() < 4) ends.parts[warp()][2 * lane() + h] = {most[h], sum[h]};
    }
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ends.answers[warp()][lane() % 4 * 2 + i % 2][lane() / 4 * Values<kDim>::kOwn + 2 * j + i / 2] = answers[j][i];
      }
    }
  }
};

template <int kDim>
__global__ void __launch_bounds__(kBlock, kDim <= 128 ? PagedAttention::resident(true) : 2)
    attend_to_bytes(const __grid_constant__ PagedAttention a, std::int64_t together, float* answers, Part* parts) {
  auto& ends = *reinterpret_cast<Ends<kDim>*>(shared_memory());
  let_next_start();
  const Stretch s = Stretch::of(a, together);
  const std::int64_t* places = a.pages + s.b * a.width + s.first_page;
  // The last page of all may end before this warp's tokens, or among them.
  const int in_last = static_cast<int>(s.position % PagedAttention::kPage) - warp() * kTile;
  const bool has_last = s.pages > 0 && s.first_page + s.pages == s.position / PagedAttention::kPage + 1;
  const int count = static_cast<int>(s.pages) - (has_last && in_last < 0 ? 1 : 0);
  const bool has_newest = has_last && in_last >= 0 && in_last < kTile;

  Keys<kDim> keys;
  Values<kDim> values;
  const bool waits = has_newest && count == 1;
  if (count > 0 && !waits) {
    keys.read(Place::of<kDim>(a.keys, a, s, places[0]));
    values.read(Place::of<kDim>(a.values, a, s, places[0]));
  }
  std::int64_t next = count > 1 ? places[1] : 0;
  wait_for_earlier();
  if (has_newest) {
    write_newest<kDim>(a, s, a.k, a.keys, places[count - 1]);
    write_newest<kDim>(a, s, a.v, a.values, places[count - 1]);
    sync_warp();
  }
  if (waits) {
    keys.read(Place::of<kDim>(a.keys, a, s, places[0]));
    values.read(Place::of<kDim>(a.values, a, s, places[0]));
  }

  std::uint32_t q[kDim / 16][2] = {};
  if (lane() / 4 < together) {
    const Bits* own = static_cast<const Bits*>(a.q) + (s.b * a.heads + s.head + lane() / 4) * kDim + lane() % 4 * 16;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      const auto two = read_words<2>(own + d / 4 * 64 + d % 4 * 4);
      q[d][0] = two.of[0];
      q[d][1] = two.of[1];
    }
  }
  Heard<kDim> heard;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int seen = has_newest && i + 1 == count ? in_last + 1 : kTile;
    const std::int64_t page = next;
    float scores[4];
    heard.score(scores, q, keys, a.scale * kLog2E, seen);
    if (i + 1 < count) keys.read(Place::of<kDim>(a.keys, a, s, page));
    if (i + 2 < count) next = places[i + 2];
    heard.weigh(scores, seen);
    heard.add(scores, values);
    if (i + 1 < count) values.read(Place::of<kDim>(a.values, a, s, page));
  }
  heard.leave(ends);
  sync();
  add_up<kDim>(a, s, ends, together, answers, parts);
}

template <int kDim>
void start(const PagedAttention& a, const Device& device) {
  const auto scratch = Scratch::of(a, device);
  launch_early<kBlock>(attend_to_bytes<kDim>, a.batch * a.heads / a.together() * a.splits,
                       static_cast<int>(sizeof(Ends<kDim>)), device.index, device.stream, a, a.together(),
                       scratch.answers, scratch.parts);
  put_splits_together(a, scratch, device);
}

}  // namespace

void attend_bytes(const PagedAttention& a, const Device& device) {
  switch (a.head_dim) {
    case 64: return start<64>(a, device);
    case 128: return start<128>(a, device);
    default: return start<256>(a, device);
  }
}

}  // namespace gka::kernels::cuda::paged
