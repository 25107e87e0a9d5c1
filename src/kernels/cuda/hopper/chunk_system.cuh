// chunk_system: what the solve of a chunk begins with, so that the solve itself is nothing but products: a *system* of
// the keys as float16 tile, the mask m_cj and the right-hand side in the order in which the threads of the solve hold
// accumulators, and a few numbers for every token, of which some are for `chunk_o`. It takes a norm ‖H_c‖_F for every
// token, and with the norms the decision whether the chunk has to be refined. Nothing here depends on anything but the
// chunk, and there is room for four blocks on a multiprocessor, where the solve has room for two: what waits for memory
// and barriers waits here.
#pragma once

#include "kernels/cuda/hopper/chunk_h.cuh"
#include "kernels/cuda/hopper/schedule.h"
#include "kernels/system_scale.h"

namespace gka::kernels::cuda::hopper {

/// What is solved, and where the answer goes.
struct SolveCall {
  View rhs{};          // bfloat16 or float16 as k, or float32
  float* x = nullptr;  // [batch, tokens, heads, D], contiguous; null: not wanted
  // With kReads, where b is q: z = q + α (x − q) as float16 in accumulator order, each row divided by a power of two,
  // and behind it, of refined chunks, what float16 lost.
  uint4* z = nullptr;           // [slots, heads, 2, D/16, threads]
  float* z_scale = nullptr;     // [slots, heads, 64]
  double* certainty = nullptr;  // as Report has it
  // Without kReads: x goes there of refined chunks only, and of the others as a float16 tile, each row divided by a
  // power of two: NaN for a row that is not finite, in place of which the tile has 0.
  char* tiles = nullptr;       // [slots, heads]
  float* tile_down = nullptr;  // [slots, heads, 64]
};

/// Per token, in shared memory.
struct SystemShared {
  ChunkGates gates;
  alignas(8) float column[kChunk];  // as in SystemRows
  float row[kChunk];
  // Of the norms: the largest log β_j − G_j before a token, or log η; the same as `column` has it; e^{log η − largest}.
  double largest[kChunk];
  float reference[kChunk], from_state[kChunk];
  alignas(8) float diagonal[kChunk];
  float product[kChunk];
  float t[kChunk];                // ζη/f, or −1 where there is no answer; with a constant ridge ρ
  float spread[kWarpgroup / 32];  // the lowest tr H/‖H‖_F of a warp's tokens
  float inverse_norm[kChunk];
  float quadratic[kChunk];   // k_cᵀ(H_0/η)k_c
  int exponent[kChunk];      // of the keys' scales
  std::uint64_t bad_keys;    // tokens whose keys are not finite
  std::uint64_t arrived[2];  // gates, H

  /// Of β for the scaled keys.
  __device__ double log_beta(int c) const { return gates.log_beta[c] + 2 * exponent[c] * kLn2; }
};

/// H_0 in shared memory: all of it, or half of a wide one's blocks of columns at a time, so that a multiprocessor has
/// room for two blocks of threads.
template <int D>
struct HeldState {
  static constexpr bool kInBlocks = kStateBlocks<D> > 1;
  static constexpr int kBlocks = kInBlocks ? kStateBlocks<D> / 2 : 1, kBytes = D * kStateColumns<D> * kBlocks * 2;
  const ChunkStates& states;
  char* h;
  std::uint64_t* arrived;
  int task = 0, phase = 0;  // phase: with blocks, which arrive more than once a chunk

  /// One thread. From a block on.
  __device__ __forceinline__ void request(int first = 0) { bulk_load(h, states.tile<D>(task, first), kBytes, arrived); }
  __device__ __forceinline__ void wait() {
    barrier_wait(arrived, phase);
    phase ^= 1;
  }
  /// Blocks from `first` on in place of those that are there. A barrier.
  __device__ __forceinline__ void exchange(int first) {
    sync();
    if (thread() == 0) request(first);
    wait();
  }
};

/// A sum of e^{2·top}-sized terms: top and the sum over e^{2·top}.
struct Scaled {
  double top;
  float sum;
};
__device__ __forceinline__ Scaled operator+(const Scaled& a, const Scaled& b) {
  const auto shrink = [](double by) { return __expf(2 * static_cast<float>(by)); };
  const double top = max(a.top, b.top);
  return {top, a.sum * shrink(a.top - top) + b.sum * shrink(b.top - top)};
}
__device__ __forceinline__ double larger(double a, double b) { return max(a, b); }

__device__ __forceinline__ double shuffled(double value, int from) { return __shfl_sync(0xffffffffu, value, from); }
__device__ __forceinline__ Scaled shuffled(const Scaled& value, int from) {
  return {shuffled(value.top, from), __shfl_sync(0xffffffffu, value.sum, from)};
}

/// For thread c < 64, whose warp has 32 tokens: what `join` makes of term(0) … term(c). No barrier: the second warp
/// goes through the first one's tokens too.
template <typename Term, typename Join>
__device__ __forceinline__ auto join_up_to(int c, Term&& term, Join&& join) {
  auto value = term(c);
#pragma unroll
  for (int reach = 1; reach < 32; reach *= 2) {
    const auto other = shuffled(value, lane() - reach);
    if (lane() >= reach) value = join(other, value);
  }
  if (c < 32) return value;
  auto first = term(c - 32);
#pragma unroll
  for (int reach = 16; reach > 0; reach /= 2) first = join(first, shuffled(first, lane() ^ reach));
  return join(first, value);
}

/// `product` and `diagonal` of every token, for keys k_c less what they have of a common direction, share(c): a row of
/// tokens here is a row of the warp that has its `quadratic`.
template <int D, typename Share>
__device__ __forceinline__ void add_pairs(SystemShared& s, const char* k, Share&& share) {
  constexpr int kBlock = kBlockColumns<D>;
  const std::uint64_t keys = descriptor<kBlock>(k, kChunk);
  const int row = opaque(own_row()), first_column = opaque(own_column());
  float gram[32];
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    const std::uint64_t step = k_major_step<kBlock>(keys, i, kChunk);
    mma<false, false, true>(gram, step, step, i > 0);
  }
  wgmma_commit();
  const float references[2] = {s.reference[own_row()], s.reference[own_row() + 8]};
  const float shares[2] = {share(own_row()), share(own_row() + 8)};
  const int begins[2] = {s.gates.from[own_row()], s.gates.from[own_row() + 8]};
  float sums[2] = {0, 0};
  wgmma_wait<0>();
  hold(gram);
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const int half = i / 2 % 2, here = row + 8 * half, j = i / 4 * 8 + first_column;
    const float2 column = *reinterpret_cast<const float2*>(&s.column[j]);
    const float a = gram[i] - shares[half] * share(j), b = gram[i + 1] - shares[half] * share(j + 1);
    const float first = __expf(column.x - references[half]) * a * a;
    const float second = __expf(column.y - references[half]) * b * b;
    sums[half] += (j < here && j >= begins[half] ? first : 0) + (j + 1 < here && j + 1 >= begins[half] ? second : 0);
    if (j == here) s.diagonal[here] = a;
    if (j + 1 == here) s.diagonal[here] = b;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int here = own_row() + 8 * i;
    sums[i] = add_quad(sums[i]);
    __syncwarp();
    if (lane() % 4 == 0) s.product[here] = s.quadratic[here] * s.from_state[here] + sums[i];
  }
}

/// log ‖H_c‖_F for token c = thread < 64, from
///   ‖H_c‖² = ζ_c² η² + Σ_{j≤c} M_jc² ε_j,
///   ε_c = 2 β_c (ζ_c η k_cᵀ(H_0/η)k_c + Σ_{j<c} M_jc β_j (k_jᵀk_c)²) + (β_c k_cᵀk_c)²
/// with the largest term of every sum factored out. In two parts, with a barrier between them: the products, by all.
template <int D>
__device__ __forceinline__ void multiply_for_norms(SystemShared& s, const FirstState<D>& first, HeldState<D>& held,
                                                   const char* k, int& phase) {
  constexpr int kBlock = kBlockColumns<D>;
  const std::uint64_t keys = descriptor<kBlock>(k, kChunk);
  float product[2] = {0, 0};
  const int row = opaque(own_row()), first_column = opaque(own_column());
  constexpr bool kInBlocks = HeldState<D>::kInBlocks;
  kInBlocks ? held.wait() : barrier_wait(&s.arrived[1], phase);
#pragma unroll
  for (int half = 0; half < kColumnBlocks<D>; ++half) {
    if (kInBlocks && half == HeldState<D>::kBlocks) held.exchange(half);
    // H is symmetric: 64 of its rows are as good as 64 columns, unless each of those has a norm of its own.
    const int at = kInBlocks ? half % HeldState<D>::kBlocks * D : half * 64;
    const std::uint64_t state = descriptor<kBlock>(held.h + at * 128, D);
    float hk[kBlock / 2];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const std::uint64_t step = kInBlocks ? mn_major_step<kBlock>(state, i) : k_major_step<kBlock>(state, i, D);
      mma<false, kInBlocks, true>(hk, k_major_step<kBlock>(keys, i, kChunk), step, i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    hold(hk);
#pragma unroll
    for (int i = 0; i < kBlock / 2; i += 2) {
      const char* const of_key = k + unit_at<kBlock>(row + (i & 2) * 4, 8 * half + i / 4, kChunk) + first_column * 2;
      const float2 key = unpack_half(*reinterpret_cast<const std::uint32_t*>(of_key));
      const float sum = hk[i] * key.x + hk[i + 1] * key.y;
      product[i / 2 % 2] += kInBlocks ? first.share[half % kStateBlocks<D>] * sum : sum;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    product[i] = add_quad(product[i]);
    if (lane() % 4 == 0) s.quadratic[own_row() + 8 * i] = product[i];
  }
  add_pairs<D>(s, k, [](int) { return 0.0f; });
}

/// And the sums, by two warps.
__device__ __forceinline__ double find_log_norm(const SystemShared& s, int c, double log_eta) {
  // ½ log |ε_c| − G_c and its sign.
  const auto term = [&](int c) -> Scaled {
    const auto log_or_nothing = [](float value) { return value > 0 ? static_cast<double>(logf(value)) : kLogZero; };
    const double log_beta = s.log_beta(c);
    const double cross = log_beta + s.gates.g[c] + s.largest[c] + log_or_nothing(2 * fabsf(s.product[c]));
    const double own = 2 * (log_beta + log_or_nothing(s.diagonal[c]));
    const double top = max(cross, own);
    const float value =
        copysignf(expf(static_cast<float>(cross - top)), s.product[c]) + expf(static_cast<float>(own - top));
    return {(top + log_or_nothing(fabsf(value))) / 2 - s.gates.g[c], copysignf(1, value)};
  };
  const Scaled all = join_up_to(c, term, [](const Scaled& a, const Scaled& b) { return a + b; }) + Scaled{log_eta, 1};
  return all.sum > 0 ? s.gates.g[c] + all.top + static_cast<double>(logf(all.sum)) / 2 : kLogZero;
}

/// e^x for what float32's exponents do not hold.
__device__ __forceinline__ double exp_of(double x) {
  const double whole = rint(min(max(x, -700.0), 700.0) * 1.44269504088896341);
  const auto rest = static_cast<float>(x - whole * kLn2);
  return static_cast<double>(expf(rest)) * __hiloint2double((1023 + static_cast<int>(whole)) << 20, 0);
}

/// More than tr H/‖H‖_F can be.
inline constexpr float kWide = 100;

/// tr H / ‖H‖_F of the token this thread is asked about, where H_0 has trace `trace`: eight threads are asked about
/// every fourth token, between which only three keys are written. kWide: there is nothing to solve; 0: no number.
__device__ __forceinline__ float spread_asked(const SystemShared& s, float trace, int length) {
  constexpr int kParts = kWarpgroup / kAsked;
  const int c = asked_token(thread() / kParts, length);
  const float since = s.gates.since[c];
  float sum = thread() % kParts == 0 ? trace * __expf(static_cast<float>(s.gates.g[c])) : 0;
  for (int j = s.gates.from[c] + thread() % kParts; j <= c; j += kParts) {
    sum += s.diagonal[j] * __expf(since + s.column[j]);
  }
#pragma unroll
  for (int reach = kParts / 2; reach > 0; reach /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, reach);
  const float inverse = s.inverse_norm[c], spread = sum * inverse;
  return !(inverse > 0) ? kWide : spread >= 0 ? spread : 0;
}

/// What the token that a thread is asked about wants.
struct Asked {
  float least;  // tr H/‖H‖_F below which the chunk is refined
  bool refined, everywhere;
};
/// With a constant ridge, where the token has tr H/‖H‖_F = spread, as `spread_asked` has found it.
__device__ __forceinline__ Asked asked_beside_ridge(const Options& options, const SystemShared& s, float spread,
                                                    int length) {
  const int c = asked_token(thread() / (kWarpgroup / kAsked), length);
  const float ridge = static_cast<float>(options.ridge) * s.inverse_norm[c];
  if (!options.refine || options.iterations == 0 || !(ridge > 0)) return {0, false, false};
  const Refined how = refined_for(ridge, spread, options.iterations);
  const bool always = ridge < static_cast<float>(kSmallestRidge);
  return {always ? 2 * kWide : static_cast<float>(kAmple) / ridge, how != kNot, how == kEverywhere};
}

/// What is known of the keys' common direction u, |u| = 1, in shared memory.
template <int D>
struct Direction {
  static constexpr int kParts = 2 * kWarpgroup / D;
  static constexpr int kRoom = kStateBlocks<D> > 1 ? 3 : kParts;
  float u[D];
  // Sums of some of the keys; then (H_0/η) u, and k_c·u of every token; u times the norms of H's blocks of columns.
  float room[kRoom][D];
  float sums[3][kWarpgroup / 32];  // of warps: |Σk|², uᵀ(H_0/η)u, |(H_0/η)u|²

  /// Over the block. A barrier.
  __device__ __forceinline__ float sum(int of, float value) {
#pragma unroll
    for (int reach = 16; reach > 0; reach /= 2) value += __shfl_xor_sync(0xffffffffu, value, reach);
    if (lane() == 0) sums[of][thread() / 32] = value;
    sync();
    return (sums[of][0] + sums[of][1]) + (sums[of][2] + sums[of][3]);
  }
};

/// Row `row` of a tile of `rows` rows times a vector.
template <int D>
__device__ __forceinline__ float row_times(const char* tile, int rows, int row, const float (&by)[D]) {
  float sums[2] = {0, 0};
#pragma unroll 4
  for (int unit = 0; unit < D / 8; ++unit) {
    const uint4 words = *reinterpret_cast<const uint4*>(tile + unit_at<kBlockColumns<D>>(row, unit, rows));
    const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 pair = unpack_half(word[w]), at = *reinterpret_cast<const float2*>(&by[8 * unit + 2 * w]);
      sums[w % 2] += pair.x * at.x + pair.y * at.y;
    }
  }
  return sums[0] + sums[1];
}

/// Keys of trained models share a direction: ‖H‖_F is then that direction's, and tr H/‖H‖_F is small however many keys
/// there are. So where it is, the same is asked of PHP, P = 1 − uuᵀ with u along the sum of the chunk's keys: whatever
/// u is, PHP has as many keys as its trace over its norm says. Overwrites the norms; barriers of the block.
template <int D>
__device__ __forceinline__ bool needs_refining_beside_outlier(SystemShared& s, Direction<D>& along,
                                                              const FirstState<D>& first, HeldState<D>& held,
                                                              const char* k, double log_eta, int length, float least) {
  // A thread is a channel, if there is one for it, or two channels.
  constexpr int kChannels = D > kWarpgroup ? D / kWarpgroup : 1;
  const float eta = first.norm, trace = first.trace;
  // What is left of ‖H_0‖² is a difference of numbers of order 1 with eleven bits: less than this is not seen.
  constexpr float kLeastRest = 2e-3f;
  constexpr int kParts = Direction<D>::kParts, kRows = kChunk / kParts;
  const int t = thread();
  const bool channel = t < D;
  {
    const int pair = t % (D / 2), part = t / (D / 2);
    float2 sum{0, 0};
#pragma unroll 8
    for (int row = part * kRows; row < (part + 1) * kRows; ++row) {
      const char* at = k + unit_at<kBlockColumns<D>>(row, pair / 4, kChunk) + pair % 4 * 4;
      const float2 key = unpack_half(*reinterpret_cast<const std::uint32_t*>(at));
      sum.x += key.x, sum.y += key.y;
    }
    *reinterpret_cast<float2*>(&along.room[part][2 * pair]) = sum;
  }
  sync();
  float total[kChannels] = {}, u[kChannels], hu[kChannels];
  const auto dot = [](const float (&a)[kChannels], const float (&b)[kChannels]) {
    float sum = a[0] * b[0];
#pragma unroll
    for (int n = 1; n < kChannels; ++n) sum += a[n] * b[n];
    return sum;
  };
#pragma unroll
  for (int n = 0; n < kChannels; ++n) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) total[n] += channel ? along.room[part][t + n * kWarpgroup] : 0;
  }
  const float square = along.sum(0, dot(total, total));
#pragma unroll
  for (int n = 0; n < kChannels; ++n) {
    const int at = t + n * kWarpgroup;
    u[n] = square > 1e-12f ? total[n] * rsqrtf(square) : 0;
    if (channel) along.u[at] = u[n];
    if constexpr (kStateBlocks<D> > 1) {
      constexpr int kBlocks = kStateBlocks<D> / kChannels;  // of a warpgroup's channels, in order
      float share = first.share[kBlocks * n];
#pragma unroll
      for (int b = 1; b < kBlocks; ++b) share = t / kStateColumns<D> == b ? first.share[kBlocks * n + b] : share;
      along.room[2][at] = u[n] * share;
    }
  }
  sync();
  if constexpr (HeldState<D>::kInBlocks) {
    constexpr int kHeld = HeldState<D>::kBlocks * kStateColumns<D>;
    const auto times_held = [&](int column, int row) {
      return row_times<kHeld>(held.h, D, row, *reinterpret_cast<const float (*)[kHeld]>(&along.room[2][column]));
    };
#pragma unroll
    for (int n = 0; n < kChannels; ++n) hu[n] = times_held(D - kHeld, t + n * kWarpgroup);  // the last that came
    held.exchange(0);
#pragma unroll
    for (int n = 0; n < kChannels; ++n) hu[n] += times_held(0, t + n * kWarpgroup);
  } else {
#pragma unroll
    for (int n = 0; n < kChannels; ++n) hu[n] = channel ? row_times<D>(held.h, D, t + n * kWarpgroup, along.u) : 0;
  }
  float (&of_h)[D] = along.room[0];
  float* const shares = along.room[1];  // and in more, where a token has no channel
#pragma unroll
  for (int n = 0; n < kChannels; ++n) {
    if (channel) of_h[t + n * kWarpgroup] = hu[n];
  }
  if (t < kChunk) shares[t] = row_times<D>(k, kChunk, t, along.u);
  const float uhu = along.sum(1, dot(u, hu)), hu2 = along.sum(2, dot(hu, hu));
  if (t < kChunk) {
    const float share = shares[t];
    s.quadratic[t] += share * (share * uhu - 2 * row_times<D>(k, kChunk, t, of_h));
  }
  const float rest = 1 - 2 * hu2 + uhu * uhu;
  const bool seen = !(eta > 0) || rest > kLeastRest;
  sync();
  add_pairs<D>(s, k, [&](int c) { return shares[c]; });
  sync();
  if (t < kChunk) {  // whole warps
    const double log_rest = eta > 0 ? log_eta + static_cast<double>(logf(fmaxf(rest, kLeastRest))) / 2 : kLogZero;
    const double log_norm = find_log_norm(s, t, log_rest);
    const float inverse = log_norm > kVanished ? static_cast<float>(exp_of(-log_norm)) : 1e-30f;
    if (s.inverse_norm[t] > 0) s.inverse_norm[t] = inverse;
  }
  sync();
  return !seen || spread_asked(s, trace - uhu * eta, length) < least;
}

/// Which schedule a chunk takes whose tokens all have tr H/‖H‖_F ≥ spread.
__device__ __forceinline__ int schedule_for(const Schedules& schedules, float spread) {
  int schedule = 0;
#pragma unroll
  for (int i = kReaches - 1; i >= 0; --i) {
    if (i < schedules.reaches && spread >= schedules.spread[i]) schedule = kFirstReach + i;
  }
  return schedule;
}
/// m at the pair of scores i of an accumulator.
__device__ __forceinline__ float2 mask_at(const float* rows, const float* columns, const int* froms, int i) {
  const int row = opaque(own_row()) + (i & 2) * 4, j = i / 4 * 8 + opaque(own_column());
  const float by = rows[row];
  const int from = froms[row];
  const float2 column = *reinterpret_cast<const float2*>(&columns[j]);
  const float first = __expf(by + column.x), second = __expf(by + column.y);
  return {j >= from && j <= row ? first : 0, j + 1 >= from && j + 1 <= row ? second : 0};
}

/// Asks the second-level cache for the queries of a chunk.
__device__ __forceinline__ void prefetch_queries(const View& q, const Stretch& chunk, std::int64_t head, int dim) {
  const int lines = (dim * 2 + 127) / 128;
  for (int i = thread(); i < chunk.length * lines; i += kWarpgroup) {
    const auto* row = static_cast<const char*>(q.data) + offset(q, chunk.batch, chunk.begin + i / lines, head) * 2;
    ask_for(row + i % lines * 128);
  }
}

/// body(both at once, i, offset, is there, is the second there) for each pair this thread holds of a 64×D accumulator
/// of which `length` rows and `dim` columns are in memory, the first row at `base`.
template <int D, typename Body>
__device__ __forceinline__ void each_place(std::int64_t base, std::int64_t stride, int length, int dim, bool pairs,
                                           Body&& body) {
  const int row = opaque(own_row()), column = opaque(own_column());
  const std::int64_t at = base + row * stride + column, below = 8 * stride;
  if (pairs && length == kChunk && dim == D) {  // everything is there
#pragma unroll
    for (int i = 0; i < D / 2; i += 2) {
      body(std::true_type{}, i, at + (i & 2 ? below : 0) + i / 4 * 8, true, true);
    }
    return;
  }
  with_flag(pairs, [&](auto at_once) {
#pragma unroll
    for (int i = 0; i < D / 2; i += 2) {
      const bool in = row + (i & 2) * 4 < length;
      const int c = column + i / 4 * 8;
      body(at_once, i, at + (i & 2 ? below : 0) + i / 4 * 8, in && c < dim, in && c + 1 < dim);
    }
  });
}
/// body(i, pair) for each pair of a right-hand side in float32; 0 where there is no token or channel.
template <int D, typename Body>
__device__ __forceinline__ void each_of_rhs(const View& rhs, const Stretch& chunk, std::int64_t head, int dim,
                                            bool pairs, Body&& body) {
  each_place<D>(offset(rhs, chunk.batch, chunk.begin, head), rhs.token_stride, static_cast<int>(chunk.length), dim,
                pairs, [&](auto at_once, int i, std::int64_t at, bool one, bool two) {
                  body(i, read_pair<decltype(at_once)::value>(rhs.data, at, one, two));
                });
}
/// The power of two below the largest of a row's numbers (of which each thread of a quad has its own largest), and its
/// inverse: what makes them fit float16.
struct RowScale {
  float scale, unscale;
};
__device__ __forceinline__ RowScale scale_of(float top) {
  top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
  top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
  const std::uint32_t exponent = float_to_bits(top) & 0x7f800000u;
  const bool usual = exponent > 0x08000000u && exponent < 0x77000000u;
  return {.scale = usual ? bits_to_float(0x7f000000u - exponent) : 1, .unscale = usual ? bits_to_float(exponent) : 1};
}

/// The rows of queries, scaled by powers of two so that float16 holds the iterates: their largest number is then
/// between 1 and 2, times what the iterates need as headroom. In accumulator order.
template <int D, DType kType>
struct ScaledRows {
  std::uint32_t words[D / 4];
  float unscale[2];

  /// As they come, on their way from memory.
  __device__ __forceinline__ void fetch(const View& view, const Stretch& chunk, std::int64_t head, int dim,
                                        bool pairs) {
    each_place<D>(offset(view, chunk.batch, chunk.begin, head), view.token_stride, static_cast<int>(chunk.length), dim,
                  pairs, [&](auto at_once, int i, std::int64_t at, bool one, bool two) {
                    words[i / 2] = read_word<decltype(at_once)::value>(view.data, at, one, two);
                  });
  }
  /// headroom(half): of either row.
  template <typename Headroom>
  __device__ __forceinline__ void scale(Headroom&& headroom) {
    unsigned top[2] = {0, 0};  // numbers without their signs are ordered as their bits are
#pragma unroll
    for (int i = 0; i < D / 4; ++i) top[i % 2] = __vmaxu2(top[i % 2], words[i] & 0x7fff7fffu);
    float by[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 both = to_floats<kType>(top[i]);
      const RowScale row = scale_of(fmaxf(both.x, both.y));
      by[i] = row.scale * headroom(i);
      unscale[i] = row.unscale / headroom(i);
    }
#pragma unroll
    for (int i = 0; i < D / 4; ++i) {
      const float2 pair = to_floats<kType>(words[i]);
      words[i] = pack_half(pair.x * by[i % 2], pair.y * by[i % 2]);
    }
  }
};

template <int D>
inline constexpr int kSystemBytes = 1024 + kChunk * D * 2 + HeldState<D>::kBytes;

/// What the sums over pairs of tokens are divided by, in logarithms, at token c and (from what is written up to c) at
/// the one after it.
__device__ __forceinline__ void set_references(SystemShared& s, int c, double log_eta) {
  const double up_to = join_up_to(c, [&](int c) { return s.log_beta(c) - s.gates.g[c]; }, larger);
  const auto set_largest = [&](int c, double is) {
    s.largest[c] = is;
    s.reference[c] = static_cast<float>(is + (s.gates.g[c] - static_cast<double>(s.gates.since[c])));
    s.from_state[c] = expf(static_cast<float>(log_eta - is));
  };
  if (c == 0) set_largest(0, log_eta);
  if (c + 1 < kChunk) set_largest(c + 1, max(up_to, log_eta));
  s.column[c] = static_cast<float>(s.log_beta(c)) - s.gates.since[c];
}

/// ‖H_c‖_F of token c, and what of the solve follows from it.
__device__ __forceinline__ void leave_norm(const Problem& p, const Stretch& chunk, int head, int c, double log_eta,
                                           std::uint64_t lost, float pace, double* norm, SystemShared& s,
                                           SystemRows* rows) {
  const int len = static_cast<int>(chunk.length);
  const double log_norm = find_log_norm(s, c, log_eta);
  const bool is_lost = (lost >> c & 1) != 0, live = c < len && !is_lost && log_norm > kVanished;
  const float row = live ? s.gates.since[c] - static_cast<float>(log_norm) + logf(pace) : static_cast<float>(kLogZero);
  const float inverse = live ? static_cast<float>(exp_of(-log_norm)) : 0;
  s.row[c] = rows->row[c] = row;
  s.inverse_norm[c] = rows->inverse_norm[c] = inverse;
  // Below 1e-12 the state is nothing beside what the chunk itself has written.
  const double left = s.gates.g[c] + log_eta - log_norm;
  const float t = live ? max(expf(static_cast<float>(left)), 1e-12f) : 1e-12f;
  rows->t[c] = pace * t;
  s.t[c] = live ? t : -1;
  rows->factor[c] = live ? 1 : is_lost ? bits_to_float(0x7fc00000u) : 0;
  if (c < len) {
    const std::int64_t at = (chunk.batch * p.tokens + chunk.begin + c) * p.heads + head;
    norm[at] = is_lost ? not_a_number() : log_norm < -700 ? 0 : exp_of(log_norm);
  }
}

/// The same with a constant ridge, where the system is divided by ‖H_c‖_F + λ and every token has a pace of its own. A
/// token with nothing remembered has an answer too.
__device__ __forceinline__ void leave_norm_beside_ridge(const Problem& p, const Stretch& chunk, int head, int c,
                                                        double log_eta, std::uint64_t lost, double* norm,
                                                        SystemShared& s, SystemRows* rows) {
  const int len = static_cast<int>(chunk.length);
  const double log_norm = find_log_norm(s, c, log_eta), of_h = log_norm < -700 ? 0 : exp_of(log_norm);
  const bool is_lost = (lost >> c & 1) != 0;
  const SystemScale scale = system_scale(p.options, of_h, 1, 1e38, is_lost);
  const bool live = c < len && scale.sigma > 0;
  const auto rho = static_cast<float>(live ? scale.rho : 1);
  const float pace = TokenSchedule::pace_of(rho);
  const double log_sigma = live ? static_cast<double>(logf(static_cast<float>(scale.sigma))) : 0;
  s.row[c] = rows->row[c] =
      live ? s.gates.since[c] + static_cast<float>(log_sigma) + logf(pace) : static_cast<float>(kLogZero);
  rows->inverse_norm[c] = live ? static_cast<float>(scale.sigma) : 0;
  s.inverse_norm[c] = live && log_norm > kVanished ? static_cast<float>(exp_of(-log_norm)) : 0;
  const float t = live ? max(expf(static_cast<float>(s.gates.g[c] + log_eta + log_sigma)), 1e-12f) : 1e-12f;
  rows->t[c] = pace * t;
  s.t[c] = live ? rho : 1;
  rows->factor[c] = live ? 1 : is_lost ? bits_to_float(0x7fc00000u) : 0;
  if (c < len) {
    const std::int64_t at = (chunk.batch * p.tokens + chunk.begin + c) * p.heads + head;
    norm[at] = is_lost ? not_a_number() : of_h;
  }
}

/// What `solve` and `chunk_o` know of token j besides.
__device__ __forceinline__ void leave_gates(const Problem& p, const Stretch& chunk, int head, int j, std::uint64_t bad,
                                            const SystemShared& s, SystemRows* rows) {
  const int len = static_cast<int>(chunk.length);
  const float since = s.gates.since[j];
  const std::int64_t at = offset(p.alpha, chunk.batch, chunk.begin + j, head);
  rows->alpha[j] = p.alpha.data == nullptr ? 1 : j < len ? read<float>(p.alpha, at) : 0;
  rows->column[j] = s.column[j];
  rows->from[j] = s.gates.from[j];
  rows->since[j] = since;
  rows->reading[j] = static_cast<float>(s.gates.log_beta[j] + s.exponent[j] * kLn2) - since;
  rows->zeta[j] = __expf(static_cast<float>(s.gates.g[j]));
  rows->flags[j] = ((bad >> j & 1) != 0 ? kBadToken : 0) | ((s.gates.forgets >> j & 1) != 0 ? kForgetsAll : 0);
}

/// The mask, in the order in which the solve's threads hold scores; the lowest tr H/‖H‖_F of a warp's tokens, by which
/// the schedule is chosen.
__device__ __forceinline__ void leave_mask(SystemShared& s, float pace, float eta, float trace, uint4* mask) {
  float own_trace[2] = {0, 0};  // times pace
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t of_mask[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 m = mask_at(s.row, s.column, s.gates.from, 8 * i + 2 * w);
      const float2 square = *reinterpret_cast<const float2*>(&s.diagonal[(2 * i + w / 2) * 8 + opaque(own_column())]);
      own_trace[w % 2] += m.x * square.x + m.y * square.y;
      of_mask[w] = pack_half(m.x, m.y);
    }
    mask[i * kWarpgroup] = {of_mask[0], of_mask[1], of_mask[2], of_mask[3]};
  }
  float lowest = kWide;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float t = s.t[own_row() + 8 * i], own = add_quad(own_trace[i]) / pace;
    const float spread = t * (eta > 0 ? trace / eta : 0) + own;
    if (t >= 0) lowest = spread >= 0 ? fminf(lowest, spread) : 0;  // NaN too
  }
  lowest = bits_to_float(__reduce_min_sync(0xffffffffu, float_to_bits(lowest)));
  if (lane() == 0) s.spread[thread() / 32] = lowest;
}

/// The mask alone.
__device__ __forceinline__ void leave_mask(const SystemShared& s, uint4* mask) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t of_mask[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 m = mask_at(s.row, s.column, s.gates.from, 8 * i + 2 * w);
      of_mask[w] = pack_half(m.x, m.y);
    }
    mask[i * kWarpgroup] = {of_mask[0], of_mask[1], of_mask[2], of_mask[3]};
  }
}

/// The lowest of a number of which threads have their own, as `leave_mask` leaves the lowest spread.
__device__ __forceinline__ void leave_smallest(SystemShared& s, float own) {
  const float lowest = bits_to_float(__reduce_min_sync(0xffffffffu, float_to_bits(own)));
  if (lane() == 0) s.spread[thread() / 32] = lowest;
}

/// The right-hand side, in that order.
template <int D, DType kType>
__device__ __forceinline__ void leave_rhs(const ScaledRows<D, kType>& b, SystemRows* rows, uint4* rhs) {
  if (lane() % 4 == 0) rows->unscale[own_row()] = b.unscale[0], rows->unscale[own_row() + 8] = b.unscale[1];
#pragma unroll
  for (int n = 0; n < D / 16; ++n) {
    rhs[n * kWarpgroup] = {b.words[4 * n], b.words[4 * n + 1], b.words[4 * n + 2], b.words[4 * n + 3]};
  }
}

template <int D, DType kType, bool kConstant>
__global__ void __launch_bounds__(kWarpgroup, by_size<D>(5, 5, 4, 2))
    chunk_system(const __grid_constant__ Problem p, Plan plan, const ChunkGates* gates, ChunkStates states,
                 double* norm, const __grid_constant__ Schedules schedules, char* systems, bool whole_k, bool q_pairs) {
  __shared__ SystemShared s;
  __shared__ Direction<D> along;
  char *const k = aligned_tiles(), *const h = k + kChunk * D * 2;
  const int dim = static_cast<int>(p.key_dim);
  const float pace = schedules.of[0].pace, headroom = schedules.of[0].headroom;
  if (thread() == 0) {
    for (std::uint64_t& barrier : s.arrived) barrier_init(&barrier);
    barrier_fence();
    s.bad_keys = 0;
  }
  sync();
  int phase = 0;
  HeldState<D> held{.states = states, .h = h, .arrived = &s.arrived[1]};
  const int heads = heads_of(p), tasks = chunk_tasks(p, plan);
  for (int task = own_block(); task < tasks; task += all_blocks()) {
    const Stretch chunk = tokens_of(plan, task / heads);
    const int head = task % heads;
    const int len = static_cast<int>(chunk.length), c = thread();
    char* const system = systems + static_cast<std::int64_t>(task) * SystemLayout<D>::kBytes;
    auto* const rows = reinterpret_cast<SystemRows*>(system + SystemLayout<D>::kRows);
    if (c == 0) rows->chunk = chunk;
    if (len <= 0) continue;
    held.task = task;
    if (c == 0) {
      bulk_load(&s.gates, gates + task, sizeof(ChunkGates), &s.arrived[0]);
      held.request();
    }
    const FirstState<D> first(states, task);
    const float eta = first.norm, trace = first.trace;
    const double log_eta = eta > 0 ? static_cast<double>(logf(eta)) : kLogZero;
    {
      TokenRows<D> keys;
      keys.fetch(p.k, chunk, key_head(p, head), dim, 0, whole_k);
      prefetch_queries(p.q, chunk, head, dim);
      const unsigned bad = keys.template clear_bad<kType>();
      keys.template store_half<kType>(k, s.exponent);
      barrier_wait(&s.arrived[0], phase);
      for (int i = 0; i < TokenRows<D>::kOwn && bad != 0; ++i) {
        const int row = TokenRows<D>::row(i);
        if ((bad >> i & 1) == 0 || s.gates.log_beta[row] <= kLogZero) continue;
        atomicOr(reinterpret_cast<unsigned long long*>(&s.bad_keys), 1ull << row);
      }
    }
    publish();
    sync();
    if (c == 0) bulk_store(system, k, kChunk * D * 2);
    const std::uint64_t bad = s.gates.bad | s.bad_keys, lost = lost_tokens(s.gates.forgets, bad, eta != eta);
    if (c < kChunk) set_references(s, c, log_eta);
    sync();
    multiply_for_norms<D>(s, first, held, k, phase);
    phase ^= 1;
    sync();
    ScaledRows<D, kType> b;
    b.fetch(p.q, chunk, head, dim, q_pairs);
    if (c < kChunk) {
      if constexpr (kConstant) {
        leave_norm_beside_ridge(p, chunk, head, c, log_eta, lost, norm, s, rows);
      } else {
        leave_norm(p, chunk, head, c, log_eta, lost, pace, norm, s, rows);
      }
    } else {
      leave_gates(p, chunk, head, c - kChunk, bad, s, rows);
    }
    sync();
    const float asked = schedules.may_refine ? spread_asked(s, trace, len) : kWide;
    const Asked own =
        kConstant ? asked_beside_ridge(p.options, s, asked, len)
                  : Asked{schedules.least_spread, asked < schedules.least_spread, asked < schedules.least_for_two};
    auto* const mask = reinterpret_cast<uint4*>(system + SystemLayout<D>::kMask) + thread();
    if constexpr (kConstant) {
      leave_mask(s, mask);
      leave_smallest(s, s.t[c % kChunk]);
      b.scale([&](int half) { return token_headroom(s.t[own_row() + 8 * half]); });
    } else {
      leave_mask(s, pace, eta, trace, mask);
      b.scale([&](int) { return headroom; });
    }
    leave_rhs<D, kType>(b, rows, reinterpret_cast<uint4*>(system + SystemLayout<D>::kRhs) + thread());
    if (c == 0) bulk_store_wait();
    int refined = __syncthreads_or(own.refined) != 0 ? kTwice : kNot;
    if (refined != kNot) {
      const bool few = needs_refining_beside_outlier(s, along, first, held, k, log_eta, len, own.least);
      const bool any = __syncthreads_or(few) != 0, everywhere = __syncthreads_or(own.everywhere) != 0;
      refined = !any ? kNot : everywhere ? kEverywhere : kTwice;
      if (c == 0 && !any) states.ample[task] = 1;
    }  // and nobody reads the rows and tiles any more
    if (c == 0) {
      const float lowest = fminf(fminf(s.spread[0], s.spread[1]), fminf(s.spread[2], s.spread[3]));
      rows->refined = refined;
      rows->schedule =
          kConstant ? token_steps(lowest, p.options.iterations, p.options.refine) : schedule_for(schedules, lowest);
      s.bad_keys = 0;
    }
  }
  if (thread() == 0) bulk_store_finish();
}

}  // namespace gka::kernels::cuda::hopper
