// chunk_wy with decays per channel: P_ti = scale · Σ_c q_tc M_tic k_ic, and with k in q's place T.
//
// Pairs of tokens in one span have an exponential for each channel. Pairs of two spans are products of matrices, rows
// with the later tokens decayed from a border between the spans, columns with the earlier ones decayed up to it. Halves
// of the chunk meet at its middle, the spans of a half at the half's: so a span has tiles of its own start and end, and
// only the rows of the last and the columns of the first span are needed as seen from the middle as well (`far`).
#include "kernels/cuda/memory/channels.cuh"
#include "kernels/cuda/memory/wy.cuh"

namespace gka::kernels::cuda::memory {
namespace wy_channels {  // named, so that a test can have all passes in one file

using wy::kBlock;
using wy::kTriangle;
using wy::kValues;

/// Two blocks share a multiprocessor.
template <int kKeys>
struct Shared {
  static constexpr int kWide = kKeys + kPad;
  alignas(16) Bits k[kChunk][kWide];  // then decayed to their span's end
  union {
    alignas(16) Bits q[kChunk][kWide];           // then scale · q, decayed from their span's start
    alignas(16) Bits v[kChunk][kValues + kPad];  // once q is done with
  };
  union {
    alignas(16) float sums[kChunk][kWide];
    struct {  // once the tiles are made
      alignas(16) Bits from_span[kChunk][kWide], from_start[kChunk][kWide];
    } keys;  // decayed from the start of their span, of the chunk
  };
  union {
    struct {
      alignas(16) Bits q[kSpan][kWide], keys[kSpan][kWide], k[kSpan][kWide];
    } far;
    alignas(16) float t[kChunk][kTriangle];
    alignas(16) Bits w[kChunk][kWide];  // once T is rounded
  };
  union {
    alignas(16) float a[kChunk][kTriangle];
    struct {  // once T is made
      alignas(16) Bits values[kChunk][kSquare];
    } weighted;
  };
  // Of every span: the sums' last row, and what a channel keeps in it, before it and after it.
  alignas(16) float total[kSpans][kKeys], within[kSpans][kKeys], before[kSpans][kKeys], after[kSpans][kKeys];
  float beta[kChunk];
};
static_assert(sizeof(Shared<128>) <= 113 * 1024);

/// The running sums and β.
template <int kKeys>
__device__ __forceinline__ void load_gates(Shared<kKeys>& s, const ChunkedMemory& m, const Chunk& chunk,
                                           std::int64_t head) {
  for (int n = thread(); n < kSpans * kKeys; n += kBlock) {
    const int span = n / kKeys, c = n % kKeys;
    const float* from = m.log_decay + ((chunk.first + span * kSpan) * m.heads + head) * m.key_dim + c;
    float x[kSpan];
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      const bool there = span * kSpan + i < chunk.tokens && c < m.key_dim;
      x[i] = there ? power_of_decay(from[i * m.heads * m.key_dim]) : 0;
    }
    sum_up(x);
#pragma unroll
    for (int i = 0; i < kSpan; ++i) s.sums[span * kSpan + i][c] = x[i];
    s.total[span][c] = x[kSpan - 1];
    s.within[span][c] = power_of_two(x[kSpan - 1]);
  }
  load_beta(s.beta, m, chunk, head);
}

/// What channels keep before and after each span, and in the whole chunk.
template <int kKeys>
__device__ __forceinline__ void join_spans(Shared<kKeys>& s, float (&whole)[kKeys]) {
  const int c = thread();
  if (c >= kKeys) return;
  float before = 1, after = 1;
#pragma unroll
  for (int n = 0; n < kSpans; ++n) {
    s.before[n][c] = before;
    s.after[kSpans - 1 - n][c] = after;
    before *= s.within[n][c];
    after *= s.within[kSpans - 1 - n][c];
  }
  whole[c] = before;
}

/// P and I − T⁻¹ where both tokens are in one span. Eight lanes share a token's channels, fours of them in turn; a warp
/// takes four tokens of a span, and then four others, so that all have 20 keys to meet.
template <int kKeys, bool kDelta>
__device__ __forceinline__ void multiply_near(Shared<kKeys>& s, Bits (&p)[kChunk][kSquare], float scale) {
  constexpr int kMine = kKeys / 8;
  const int first = warp() / 2 * kSpan, eighth = lane() % 8;
  for (int turn = 0; turn < 2; ++turn) {
    const int quarter = turn == 0 ? warp() % 2 : 3 - warp() % 2, t = first + 4 * quarter + lane() / 8;
    float q[kMine], k[kMine], here[kMine];
#pragma unroll
    for (int n = 0; n < kMine; n += 4) {
      const int c = 8 * n + 4 * eighth;
      const Four sums = four_at(&s.sums[t][c]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::uint32_t two = two_at(&s.q[t][c + j / 2 * 2]), key = two_at(&s.k[t][c + j / 2 * 2]);
        q[n + j] = j % 2 == 0 ? low_half(two) : high_half(two);
        k[n + j] = j % 2 == 0 ? low_half(key) : high_half(key);
        here[n + j] = sums.x[j];
      }
    }
    float asked[2] = {}, held[2] = {};  // of the two keys whose places are this lane's
    for (int pair = 0; pair < 2 * (quarter + 1); ++pair) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = first + 2 * pair + h;
        float q_k = 0, k_k = 0;
#pragma unroll
        for (int n = 0; n < kMine; n += 4) {
          const int c = 8 * n + 4 * eighth;
          const Four sums = four_at(&s.sums[i][c]);
          const std::uint32_t keys[2]{two_at(&s.k[i][c]), two_at(&s.k[i][c + 2])};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float key = j % 2 == 0 ? low_half(keys[j / 2]) : high_half(keys[j / 2]);
            const float faded = power_of_two(here[n + j] - sums.x[j]) * key;
            q_k += q[n + j] * faded;
            if (kDelta) k_k += k[n + j] * faded;
          }
        }
#pragma unroll
        for (int apart = 1; apart < 8; apart *= 2) {
          q_k += from_lane(q_k, apart);
          if (kDelta) k_k += from_lane(k_k, apart);
        }
        if (eighth != pair) continue;  // what is above the diagonal may be anything, and stays 0
        if (i <= t) asked[h] = q_k;
        if (i < t) held[h] = k_k;
      }
    }
    put_two(&p[t][first + 2 * eighth], scale * asked[0], scale * asked[1]);
    if constexpr (kDelta) {
      s.a[t][first + 2 * eighth] = s.beta[t] * held[0];
      s.a[t][first + 2 * eighth + 1] = s.beta[t] * held[1];
    }
  }
}

/// The tiles for pairs of spans, in the place of q, k and the sums; and for the walks.
template <int kKeys, bool kDelta>
__device__ __forceinline__ void make_tiles(Shared<kKeys>& s, ChunkTiles<kKeys, kDelta, Decay::per_channel>& tiles,
                                           float scale) {
  constexpr int kVectors = kKeys / 8, kAtOnce = kBlock / kVectors, kMine = kChunk / kAtOnce;
  const int c = thread() % kVectors * 8, first = thread() / kVectors;
  Eight held[kMine];  // with the delta rule keys take the sums' place
#pragma unroll
  for (int n = 0; n < kMine && kDelta; ++n) held[n] = eight_at(&s.sums[first + n * kAtOnce][c]);
  sync();
#pragma unroll(kDelta ? kMine : 1)
  for (int n = 0; n < kMine; ++n) {
    const int t = first + n * kAtOnce, span = t / kSpan, row = t % kSpan;
    const Eight sums = kDelta ? held[n] : eight_at(&s.sums[t][c]);
    const Eight total = eight_at(&s.total[span][c]), before = eight_at(&s.before[span][c]);
    const Eight after = eight_at(&s.after[span][c]);
    const Vector q = vector_at(&s.q[t][c]), k = vector_at(&s.k[t][c]);
    float here[8], to_end[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      here[j] = power_of_two(sums.x[j]);
      to_end[j] = power_of_two(total.x[j] - sums.x[j]);
    }
    put_weighted(&s.q[t][c], q, [&](int j) { return scale * here[j]; });
    put_weighted(&s.k[t][c], k, [&](int j) { return to_end[j]; });
    put_weighted(&tiles.q[t][c], q, [&](int j) { return scale * here[j] * before.x[j]; });
    put_weighted(&tiles.k[t][c], k, [&](int j) { return to_end[j] * after.x[j]; });
    if constexpr (kDelta) {
      put_weighted(&s.keys.from_span[t][c], k, [&](int j) { return here[j]; });
      put_weighted(&s.keys.from_start[t][c], k, [&](int j) { return here[j] * before.x[j]; });
    }
    if (span == 0) put_weighted(&s.far.k[row][c], k, [&](int j) { return to_end[j] * s.within[1][c + j]; });
    if (span == 3) {
      put_weighted(&s.far.q[row][c], q, [&](int j) { return scale * here[j] * s.within[2][c + j]; });
      if (kDelta) put_weighted(&s.far.keys[row][c], k, [&](int j) { return here[j] * s.within[2][c + j]; });
    }
  }
  sync();
}

/// The same as multiply_near for the six pairs of spans, a warp each; the last two warps repeat one.
template <int kKeys, bool kDelta>
__device__ __forceinline__ void multiply_spans(Shared<kKeys>& s, Bits (&p)[kChunk][kSquare]) {
  constexpr int kWide = kKeys + kPad;
  const int pair = warp() < 6 ? warp() : 5;
  const int later = pair < 2 ? 2 : pair == 4 ? 1 : 3, earlier = pair == 5 ? 2 : pair == 1 || pair == 3 ? 1 : 0;
  const bool far_row = later == 3 && earlier < 2, far_column = earlier == 0 && later > 1;
  const Bits* columns = far_column ? s.far.k[0] : s.k[earlier * kSpan];
  Sums<2> q_k, k_k;
  q_k.clear();
  q_k.template multiply<kKeys, Lies::straight, Lies::turned>(far_row ? s.far.q[0] : s.q[later * kSpan], kWide, columns,
                                                             kWide);
  if constexpr (kDelta) {
    k_k.clear();
    k_k.template multiply<kKeys, Lies::straight, Lies::turned>(
        far_row ? s.far.keys[0] : s.keys.from_span[later * kSpan], kWide, columns, kWide);
  }
  if (warp() < 6) {
    q_k.each([&](int i, int n, float first, float second) {
      put_two(&p[later * kSpan + q_k.row(i)][earlier * kSpan + q_k.column(n)], first, second);
      put_two(&p[earlier * kSpan + q_k.row(i)][later * kSpan + q_k.column(n)], 0, 0);
    });
    if constexpr (kDelta) {
      k_k.each([&](int i, int n, float first, float second) {
        const int t = later * kSpan + k_k.row(i), c = earlier * kSpan + k_k.column(n);
        s.a[t][c] = s.beta[t] * first;
        s.a[t][c + 1] = s.beta[t] * second;
      });
    }
  }
  sync();
}

/// T, its columns weighted by β, and T itself where it is kept.
template <int kKeys>
__device__ __forceinline__ void round_inverse(Shared<kKeys>& s, Bits* kept) {
  const int c = thread() % (kChunk / 2) * 2;
  const float b0 = s.beta[c], b1 = s.beta[c + 1];
#pragma unroll
  for (int i = 0; i < kChunk; i += kBlock / (kChunk / 2)) {
    const int r = thread() / (kChunk / 2) + i;
    const float t0 = s.t[r][c], t1 = s.t[r][c + 1];
    const float first = c <= r ? t0 : 0, second = c + 1 <= r ? t1 : 0;
    put_two(&s.weighted.values[r][c], b0 * first, b1 * second);
    if (kept != nullptr) put_two(kept + r * kChunk + c, first, second);
  }
  sync();
}

template <int kKeys, bool kDelta>
__global__ void __launch_bounds__(kBlock, 2)
    chunk_wy_channels(const __grid_constant__ ChunkedMemory m, const __grid_constant__ ChunkedMemorySaved saved) {
  auto& s = *reinterpret_cast<Shared<kKeys>*>(shared_memory());
  const Task task = own_task(m);
  const auto [slot, head, place, chunk] = task;
  if (chunk.tokens == 0) return;
  fetch_queries_and_keys<kBlock, kKeys>(s, m, task);
  auto& tiles = *tiles_at<kKeys, kDelta, Decay::per_channel>(m, saved, slot, head);
  load_gates(s, m, chunk, head);
  wait_for_copies();
  sync();
  join_spans(s, tiles.fade);
  multiply_near<kKeys, kDelta>(s, tiles.p, m.scale);
  make_tiles<kKeys, kDelta>(s, tiles, m.scale);
  multiply_spans<kKeys, kDelta>(s, tiles.p);
  if (m.has_own_u()) fetch<kBlock, kValues>(s.v[0], m.v, chunk, head, static_cast<int>(m.value_dim));
  if constexpr (kDelta) {
    wy::invert_diagonal(s);
    sync();
    wy::join<16>(s);
    wy::join<32>(s);
    round_inverse(s, saved.t != nullptr ? t_of(saved, task) : nullptr);
    Sums<kKeys / 16> w;
    w.clear();
    const int rows = warp() % 4 * 16, columns = warp() / 4 * (kKeys / 2);
    w.template multiply<kChunk, Lies::straight, Lies::straight>(s.weighted.values[rows], kSquare,
                                                                &s.keys.from_start[0][columns], kKeys + kPad);
    w.put(&s.w[rows][columns], kKeys + kPad);
    sync();
    wy::write_tile(tiles.w, s.w);
  }
  if (m.has_own_u()) wy::write_values<kDelta>(s, m, chunk, head, static_cast<Bits*>(saved.u));
}

}  // namespace wy_channels

void run_chunk_wy_channels(const ChunkedMemory& m, const ChunkedMemorySaved& saved, const Device& device) {
  with_shape(m, [&]<int kKeys, bool kDelta>() {
    launch_blocks_of<wy_channels::kBlock>(wy_channels::chunk_wy_channels<kKeys, kDelta>, m.slots() * m.heads,
                                          shared_bytes<wy_channels::Shared<kKeys>>(), device.stream, m, saved);
  });
}

}  // namespace gka::kernels::cuda::memory
