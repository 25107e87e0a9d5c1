// bwd_inputs with decays per channel. With E = scale · tril(do uᵀ) and F = −tril(z uᵀ, −1), without decays:
//
//   dq_tc = scale · e^{G_tc} (do Sᵀ)_tc + Σ_i E_ti M_tic k_ic               dv = β z
//   r_tc  = −e^{G_tc} (z Sᵀ)_tc + Σ_i F_ti M_tic k_ic                       dβ = z·v + k·r
//   dk_tc = β_t r_tc + e^{G_Cc − G_tc} (u Dᵀ)_tc + Σ_{l≥t} M_ltc (E_lt q_lc + F_lt β_l k_lc)
//
// Between spans these are Horner's rule from span to span: what a later span has from all before it is
// x ← (x faded by a span) + E · (that span's keys, decayed to its end), a product of matrices, and likewise from behind
// for what an earlier span has from all after it. Inside a span a thread has a channel and goes through the pairs.
//
// dg_l sums over pairs with l between them, W_ti = (E_ti q_t + β_t F_ti k_t) M_ti k_i for t ≥ l > i, over the states'
// share of t ≥ l and of i < l, and e^{G_C} ⟨D, S⟩, each per channel. Of a pair of spans that meet at a border (as in
// chunk_wy_channels.cu) l is on one side of it: left of it, all later tokens count and the earlier ones before l; right
// of it the other way round. So there are only sums of what is there, no differences.
#include "kernels/cuda/memory/channels.cuh"
#include "kernels/cuda/memory/inputs.cuh"

namespace gka::kernels::cuda::memory {
namespace inputs_channels {  // named, so that a test can have all passes in one file

using inputs::Block;
using inputs::kBlock;
using inputs::kParts;
using inputs::kRowsAtOnce;
using inputs::kValues;
using inputs::part;
using inputs::part_row;
using inputs::put_row_sums;

template <int kKeys>
using Products = inputs::Products<kKeys, Decay::per_channel>;

/// Once the values are through.
template <int kKeys>
struct After {
  static constexpr int kWide = kKeys + kPad;
  alignas(16) float sums[kChunk][kWide];
  union {
    struct {  // q and β k, decayed from their span's start; k, decayed to its end
      alignas(16) Bits q[kChunk][kWide], keys[kChunk][kWide], k[kChunk][kWide];
    } tiles;
    struct {  // dq and r over the decay from the span's start, the rest of dk over that to its end; of other spans
      alignas(16) float d_q[kChunk][kWide], r[kChunk][kWide], d_k[kChunk][kWide];
    } others;
  };
  alignas(16) float e[kSpans][kSpan][kSpan], f[kSpans][kSpan][kSpan];  // E and F of pairs in a span
  float within[kSpans][kKeys];                                         // what a channel keeps in a span
  // The sums of W over a span's tokens and S, as if S stood at the span's start, or D at its end; over the last span
  // and all before the one before it, over the first and all behind the one after it; and ⟨D, S⟩.
  float found[kSpans][kKeys], left[kSpans][kKeys], last_found[kKeys], first_left[kKeys], states[kKeys];
};

template <int kKeys>
struct Shared {
  alignas(16) Bits q[kChunk][kKeys + kPad], k[kChunk][kKeys + kPad];
  union {
    struct {
      alignas(16) Bits t[kChunk][kSquare], z[kChunk][kSquare];
    };
    struct {  // E and F of pairs of two spans
      alignas(16) Bits e[kChunk][kSquare], f[kChunk][kSquare];
    } pairs;
  };
  union {
    Block<kKeys> blocks[2];
    After<kKeys> after;
  };
  float z_v[kParts][kChunk], k_r[kKeys / kLanes][kChunk];
  float beta[kChunk];
};

/// Starts a copy of the chunk's log decays, rows of kKeys.
template <int kKeys>
__device__ __forceinline__ void fetch_decays(float* to, const ChunkedMemory& m, const Chunk& chunk, std::int64_t head) {
  constexpr int kFours = kKeys / 4;
  const float* from = m.log_decay + (chunk.first * m.heads + head) * m.key_dim;
#pragma unroll
  for (int i = 0; i < kChunk; i += kBlock / kFours) {
    const int t = i + thread() / kFours, c = thread() % kFours * 4;
    const bool there = t < chunk.tokens && c < m.key_dim;
    copy_async_or_zero<16>(to + t * kKeys + c, from + (there ? t * m.heads * m.key_dim + c : 0), there);
  }
  end_group();
}

/// The running sums out of the log decays, which lie where `after` will be, E and F, and ⟨D, S⟩.
template <int kKeys, bool kDelta>
__device__ __forceinline__ void begin_after(Shared<kKeys>& s, const float* log_decay, Products<kKeys>& p, float scale) {
  auto& a = s.after;
  const int own = thread() / kKeys, c = thread() % kKeys;  // of kSpans spans
  float x[kSpan];
  if (own < kSpans) {
#pragma unroll
    for (int i = 0; i < kSpan; ++i) x[i] = power_of_decay(log_decay[(own * kSpan + i) * kKeys + c]);
    sum_up(x);
  }
#pragma unroll
  for (float& sum : p.states) {
#pragma unroll
    for (int apart = 1; apart < kValues / 8; apart *= 2) sum += from_lane(sum, apart);
  }
  sync();
  if (own < kSpans) {
#pragma unroll
    for (int i = 0; i < kSpan; ++i) a.sums[own * kSpan + i][c] = x[i];
    a.within[own][c] = power_of_two(x[kSpan - 1]);
  }
  if (thread() % (kValues / 8) == 0) {
#pragma unroll
    for (int i = 0; i < kKeys / kRowsAtOnce; ++i) a.states[thread() / (kValues / 8) + i * kRowsAtOnce] = p.states[i];
  }
  const int rows = part_row(), columns = part() * kSpan;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = p.out_u.row(i), o = p.out_u.column(n);
      const float e[2]{scale * p.out_u.x[n][2 * i], scale * p.out_u.x[n][2 * i + 1]};
      const float f[2]{-p.z_u.x[n][2 * i], -p.z_u.x[n][2 * i + 1]};
      if (rows == columns) {
        a.e[rows / kSpan][t][o] = e[0], a.e[rows / kSpan][t][o + 1] = e[1];
        if (kDelta) a.f[rows / kSpan][t][o] = f[0], a.f[rows / kSpan][t][o + 1] = f[1];
      } else if (rows > columns) {
        put_two(&s.pairs.e[rows + t][columns + o], e[0], e[1]);
        if (kDelta) put_two(&s.pairs.f[rows + t][columns + o], f[0], f[1]);
      }
    }
  }
  put_row_sums(s.z_v, p.z_v);
  sync();
}

template <int kKeys, bool kDelta>
__device__ __forceinline__ void make_tiles(Shared<kKeys>& s) {
  auto& a = s.after;
  constexpr int kVectors = kKeys / 8;
#pragma unroll
  for (int n = 0; n < kChunk; n += kBlock / kVectors) {
    const int t = n + thread() / kVectors, c = thread() % kVectors * 8, last = t / kSpan * kSpan + kSpan - 1;
    const Eight sums = eight_at(&a.sums[t][c]), total = eight_at(&a.sums[last][c]);
    const Vector q = vector_at(&s.q[t][c]), k = vector_at(&s.k[t][c]);
    const float beta = s.beta[t];
    float here[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) here[j] = power_of_two(sums.x[j]);
    put_weighted(&a.tiles.q[t][c], q, [&](int j) { return here[j]; });
    if (kDelta) put_weighted(&a.tiles.keys[t][c], k, [&](int j) { return beta * here[j]; });
    put_weighted(&a.tiles.k[t][c], k, [&](int j) { return power_of_two(total.x[j] - sums.x[j]); });
  }
  sync();
}

/// Each column by what its channel keeps in a span, from the warp's first column on.
template <int kAcross>
__device__ __forceinline__ void fade(Sums<kAcross>& sums, const float* within) {
#pragma unroll
  for (int n = 0; n < kAcross; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float keeps = within[sums.column(n) + j];
      sums.x[n][j] *= keeps;
      sums.x[n][2 + j] *= keeps;
    }
  }
}

/// The sums of value(n, row, j) over the warp's 16 tokens, for each of its columns.
template <int kAcross, typename Value>
__device__ __forceinline__ void sum_tokens(float* to, bool writes, Value&& value) {
#pragma unroll
  for (int n = 0; n < kAcross; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum = value(n, 0, j) + value(n, 1, j);
#pragma unroll
      for (int apart = 4; apart < kLanes; apart *= 2) sum += from_lane(sum, apart);
      if (writes && lane() < 4) to[Sums<kAcross>::column(n) + j] = sum;
    }
  }
}

__device__ __forceinline__ float half_of(std::uint32_t two, int j) { return j == 0 ? low_half(two) : high_half(two); }

/// What the warp's span has from the states and from all other spans, for a quarter of the channels.
template <int kKeys, bool kDelta>
__device__ __forceinline__ void meet_spans(Shared<kKeys>& s, Products<kKeys>& p, float scale) {
  constexpr int kAcross = kKeys / 32, kWide = kKeys + kPad;
  auto& a = s.after;
  const int rows = part_row(), span = rows / kSpan, columns = part() * (kKeys / 4);
  const auto at = [&](const Bits(&tile)[kChunk][kWide], int n, int i) {
    return two_at(&tile[rows + Sums<2>::row(i)][columns + Sums<2>::column(n)]);
  };
  const auto found = [&](int n, int i, int j) {
    const float out = half_of(at(a.tiles.q, n, i), j) * p.out_s.x[n][2 * i + j];
    return kDelta ? out + half_of(at(a.tiles.keys, n, i), j) * p.z_s.x[n][2 * i + j] : out;
  };
  const auto left = [&](int n, int i, int j) { return half_of(at(a.tiles.k, n, i), j) * p.u_d.x[n][2 * i + j]; };
#pragma unroll
  for (int n = 0; n < kAcross; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p.out_s.x[n][i] *= scale;
      p.z_s.x[n][i] = -p.z_s.x[n][i];
    }
  }
  sum_tokens<kAcross>(&a.found[span][columns], true, found);
  sum_tokens<kAcross>(&a.left[span][columns], true, left);
#pragma unroll
  for (int step = 0; step < kSpans - 1; ++step) {
    const int other = step < span ? step : kSpans - 1 - (step - span), first = other * kSpan;
    const float* within = &a.within[other][columns];
    if (step < span) {
      fade(p.out_s, within);
      if (kDelta) fade(p.z_s, within);
      if (step == 2) sum_tokens<kAcross>(&a.last_found[columns], true, found);
      p.out_s.template multiply<kSpan, Lies::straight, Lies::straight>(&s.pairs.e[rows][first], kSquare,
                                                                       &a.tiles.k[first][columns], kWide);
      if constexpr (kDelta) {
        p.z_s.template multiply<kSpan, Lies::straight, Lies::straight>(&s.pairs.f[rows][first], kSquare,
                                                                       &a.tiles.k[first][columns], kWide);
      }
    } else {
      fade(p.u_d, within);
      if (step == 2) sum_tokens<kAcross>(&a.first_left[columns], span == 0, left);
      p.u_d.template multiply<kSpan, Lies::turned, Lies::straight>(&s.pairs.e[first][rows], kSquare,
                                                                   &a.tiles.q[first][columns], kWide);
      if constexpr (kDelta) {
        p.u_d.template multiply<kSpan, Lies::turned, Lies::straight>(&s.pairs.f[first][rows], kSquare,
                                                                     &a.tiles.keys[first][columns], kWide);
      }
    }
  }
  sync();  // the tiles are through
  const auto keep = [&](Sums<kAcross>& sums, float (&to)[kChunk][kWide]) {
    sums.each([&](int i, int n, float first, float second) {
      float* place = &to[rows + sums.row(i)][columns + sums.column(n)];
      place[0] = first, place[1] = second;
    });
  };
  keep(p.out_s, a.others.d_q);
  if (kDelta) keep(p.z_s, a.others.r);
  keep(p.u_d, a.others.d_k);
  sync();
}

/// What of dg is the same for all tokens of a span: pairs with one token, or S, before and one, or D, behind it.
template <int kKeys>
__device__ __forceinline__ float across(const After<kKeys>& a, int span, int c) {
  float sum = 0, before = 1, after = 1;  // what is kept from the chunk's start to span n, from span o to the end
#pragma unroll
  for (int n = 0; n < kSpans; ++n) {
    const int o = kSpans - 1 - n;
    if (n > span) sum += n == 3 && span == 2 ? a.last_found[c] : before * a.found[n][c];
    if (o < span) sum += o == 0 && span == 1 ? a.first_left[c] : after * a.left[o][c];
    before *= a.within[n][c];
    after *= a.within[o][c];
  }
  return sum + before * a.states[c];
}

/// Adds the pairs of a span: a thread a channel of a span. dq, dk and dg take the place of q, k and the sums.
template <int kKeys, bool kDelta>
__device__ __forceinline__ void add_pairs(Shared<kKeys>& s) {
  auto& a = s.after;
  const int span = thread() / kKeys, c = thread() % kKeys, first = span * kSpan;
  float x[kSpan], k[kSpan], d_k[kSpan], d_g[kSpan];
  float earlier = across(a, span, c);
#pragma unroll
  for (int i = 0; i < kSpan; ++i) {
    x[i] = a.sums[first + i][c];
    k[i] = low_half(s.k[first + i][c]);
  }
#pragma unroll
  for (int i = 0; i < kSpan; ++i) {
    d_k[i] = power_of_two(x[kSpan - 1] - x[i]) * a.others.d_k[first + i][c];
    d_g[i] = earlier;
    earlier += k[i] * d_k[i];
  }
  float later = 0;
#pragma unroll
  for (int t = kSpan - 1; t >= 0; --t) {
    const float here = power_of_two(x[t]), q = low_half(s.q[first + t][c]), key = s.beta[first + t] * k[t];
    float d_q = here * a.others.d_q[first + t][c], r = kDelta ? here * a.others.r[first + t][c] : 0;
    later += q * d_q + key * r;
    d_g[t] += later;
    float pairs = 0;
#pragma unroll
    for (int four = 0; four <= t; four += 4) {
      const Four e = four_at(&a.e[span][t][four]);
      Four f{};
      if (kDelta) f = four_at(&a.f[span][t][four]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = four + j;
        if (i < t) {
          const float keeps = power_of_two(x[t] - x[i]), e_faded = keeps * e.x[j], f_faded = keeps * f.x[j];
          const float both = e_faded * q + (kDelta ? f_faded * key : 0);
          d_q += e_faded * k[i];
          if (kDelta) r += f_faded * k[i];
          d_k[i] += both;
          pairs += both * k[i];
          d_g[i + 1] += pairs;
        } else if (i == t) {
          d_q += e.x[j] * k[t];
          d_k[t] += e.x[j] * q;
        }
      }
    }
    if constexpr (kDelta) {
      d_k[t] += s.beta[first + t] * r;
      const float sum = sum_lanes(k[t] * r);
      if (lane() == 0) s.k_r[c / kLanes][first + t] = sum;
    }
    s.q[first + t][c] = static_cast<Bits>(two_bfloat16(d_q, 0));
  }
#pragma unroll
  for (int i = 0; i < kSpan; ++i) {
    s.k[first + i][c] = static_cast<Bits>(two_bfloat16(d_k[i], 0));
    a.sums[first + i][c] = d_g[i];
  }
}

template <typename T>
struct alignas(16) Sixteen {  // bytes
  T x[16 / sizeof(T)];
};

/// A tile's rows into a [tokens, heads, K] array.
template <int kThreads, int kKeys, typename T>
__device__ __forceinline__ void write_keys(const T (&from)[kChunk][kKeys + kPad], void* to, const ChunkedMemory& m,
                                           const Chunk& chunk, std::int64_t head) {
  constexpr int kEach = 16 / sizeof(T), kVectors = kKeys / kEach;
  const int c = thread() % kVectors * kEach;
  if (to == nullptr || c >= m.key_dim) return;
  T* first = static_cast<T*>(to) + (chunk.first * m.heads + head) * m.key_dim + c;
#pragma unroll
  for (int t = thread() / kVectors; t < chunk.tokens; t += kThreads / kVectors) {
    *reinterpret_cast<Sixteen<T>*>(first + t * m.heads * m.key_dim) = *reinterpret_cast<const Sixteen<T>*>(from[t] + c);
  }
}

template <int kKeys, bool kDelta>
__device__ __forceinline__ void write_d_beta(const Shared<kKeys>& s, const ChunkedMemory& m, float* d_beta,
                                             const Chunk& chunk, std::int64_t head) {
  const int t = thread();
  if (t >= chunk.tokens || d_beta == nullptr) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kParts; ++i) sum += s.z_v[i][t];
#pragma unroll
  for (int i = 0; i < kKeys / kLanes && kDelta; ++i) sum += s.k_r[i][t];
  d_beta[(chunk.first + t) * m.heads + head] = sum;
}

template <int kKeys, bool kDelta>
__global__ void __launch_bounds__(kBlock, 1)
    bwd_inputs_channels(const __grid_constant__ ChunkedMemory m, const __grid_constant__ ChunkedMemorySaved saved,
                        const __grid_constant__ ChunkedMemoryGradients to) {
  auto& s = *reinterpret_cast<Shared<kKeys>*>(shared_memory());
  const Task task = own_task(m);
  const auto [slot, head, place, chunk] = task;
  if (chunk.tokens == 0) return;
  inputs::fetch_keys<kKeys, kDelta>(s, m, saved, task);
  inputs::fetch_block(s.blocks[0], m, saved, to, chunk, head, 0);
  load_beta(s.beta, m, chunk, head);

  Products<kKeys> products;
  products.clear();
  const auto values = static_cast<int>(m.value_dim);
  const float* log_decay = nullptr;
  for (int from = 0, n = 0; from < values; from += kValues, ++n) {
    const auto& b = s.blocks[n % 2];
    auto& next = s.blocks[(n + 1) % 2];
    if (from + kValues < values) {
      inputs::fetch_block(next, m, saved, to, chunk, head, from + kValues);
    } else {
      fetch_decays<kKeys>(reinterpret_cast<float*>(&next), m, chunk, head);
      log_decay = reinterpret_cast<const float*>(&next);
    }
    wait_for_groups_but<1>();
    sync();
    inputs::slopes_of_values<kDelta>(s, b, products, m, chunk, head, from, static_cast<Bits*>(to.d_v));
    sync();
    inputs::add_block<kDelta>(s, b, products);
    sync();
  }
  wait_for_copies();
  sync();
  begin_after<kKeys, kDelta>(s, log_decay, products, m.scale);
  make_tiles<kKeys, kDelta>(s);
  meet_spans<kKeys, kDelta>(s, products, m.scale);
  constexpr int kBusy = kSpans * kKeys;
  if (thread() < kBusy) add_pairs<kKeys, kDelta>(s);
  sync();
  if (thread() >= kBusy) return;
  write_keys<kBusy, kKeys>(s.q, to.d_q, m, chunk, head);
  write_keys<kBusy, kKeys>(s.k, to.d_k, m, chunk, head);
  write_keys<kBusy, kKeys>(s.after.sums, to.d_log_decay, m, chunk, head);
  write_d_beta<kKeys, kDelta>(s, m, to.d_beta, chunk, head);
}

}  // namespace inputs_channels

void run_bwd_inputs_channels(const ChunkedMemory& m, const ChunkedMemorySaved& saved,
                             const ChunkedMemoryGradients& gradients, const Device& device) {
  with_shape(m, [&]<int kKeys, bool kDelta>() {
    launch_blocks_of<inputs_channels::kBlock>(inputs_channels::bwd_inputs_channels<kKeys, kDelta>, m.slots() * m.heads,
                                              shared_bytes<inputs_channels::Shared<kKeys>>(), device.stream, m, saved,
                                              gradients);
  });
}

}  // namespace gka::kernels::cuda::memory
