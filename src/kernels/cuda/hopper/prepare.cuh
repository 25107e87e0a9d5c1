// What the solve of a chunk begins with, so that the solve itself is nothing but products: a *package* of the keys as
// float16 tile, the mask m_cj and the right-hand side in the order in which the threads of the solve hold accumulators,
// and a few numbers for every token, of which some are for the answers. It takes a norm ‖H_c‖_F for every token, and
// with the norms the decision whether the chunk has to be refined. Nothing here depends on anything but the chunk, and
// there is room for four blocks on a multiprocessor, where the solve has room for two: what waits for memory and
// barriers waits here.
#pragma once

#include "kernels/cuda/hopper/schedule.h"
#include "kernels/cuda/hopper/states.cuh"

namespace gka::kernels::cuda::hopper {

/// What is solved, and where the answer goes.
struct SolveCall {
  View rhs{};                // bfloat16 or float16 as k, or float32
  float* x = nullptr;        // [batch, tokens, heads, D], contiguous; null: not wanted
  double* norm = nullptr;    // [batch, tokens, heads]: ‖H_t‖_F, found here, or read
  bool norms_given = false;  // read
  bool normalise = false;    // x itself; else x̃ = ‖H‖_F x, which stays in range where ‖H‖_F does not
  // With kReads, where b is q: z = q + α (x − q) as float16 in accumulator order, each row divided by a power of two,
  // and behind it, of refined chunks, what float16 lost.
  uint4* z = nullptr;        // [slots, heads, 2, D/16, threads]
  float* z_scale = nullptr;  // [slots, heads, 64]
};

inline constexpr int kBadToken = 1, kForgetsAll = 2;

/// Of each token, for the solve.
struct alignas(16) ChunkRows {
  float t[kTokens];       // of the state
  float factor[kTokens];  // of the answer. 0: nothing remembered; NaN: lost
  float inverse_norm[kTokens];
  float alpha[kTokens];
  float row[kTokens];                // G_c − log f_c: m_cj = exp(row + column) for from_c ≤ j ≤ c
  alignas(8) float column[kTokens];  // log β_j − G_j, both G since the last γ = 0
  float unscale[kTokens];            // what the right-hand side was divided by
  int from[kTokens];
  // For the answers: M_jc β_j k_j = exp(since_c + reading_j) of the scaled key.
  float since[kTokens];
  alignas(8) float reading[kTokens];
  float zeta[kTokens];
  int flags[kTokens];  // kBadToken: its key or its gates are not numbers; kForgetsAll: γ = 0
  Stretch chunk;       // no tokens: a slot without a chunk
  int refined;         // whether the chunk is refined
  int unused;
};

/// Where the parts of a package lie, in bytes.
template <int D>
struct Package {
  static constexpr int kMask = kTokens * D * 2, kRhs = kMask + kTokens * kTokens * 2, kRows = kRhs + kTokens * D * 2;
  static constexpr int kBytes = kRows + static_cast<int>(sizeof(ChunkRows));
  static_assert(kBytes % 16 == 0);
};

/// Per token, in shared memory.
struct PrepareRows {
  Gates gates;
  alignas(8) float column[kTokens];  // as in ChunkRows
  float row[kTokens];
  double largest[kTokens];  // scratch of the norms
  double step[kTokens];
  float diagonal[kTokens], product[kTokens], sign[kTokens];
  float inverse_norm[kTokens];
  int exponent[kTokens];  // of the keys' scales
  std::uint64_t arrived;
  double log_eta;
};

/// |k_j|² of the scaled keys.
template <int D>
__device__ __forceinline__ void square_keys(PrepareRows& s, const char* k, float (&gram)[32]) {
  const std::uint64_t keys = descriptor(k, kTokens * 128);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    mma<false, false, true>(gram, k_major_step(keys, i, kTokens), k_major_step(keys, i, kTokens), i > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold(gram);
  each_pair(gram, [&](int row, int column, float& a, float& b) {
    if (column == row) s.diagonal[row] = a;
    if (column + 1 == row) s.diagonal[row] = b;
  });
}

/// log ‖H_c‖_F for token c = thread / 2 (both threads), from
///   ‖H_c‖² = ζ_c² η² + Σ_{j≤c} M_jc² ε_j,
///   ε_c = 2 β_c (ζ_c η k_cᵀ(H_0/η)k_c + Σ_{j<c} M_jc β_j (k_jᵀk_c)²) + (β_c k_cᵀk_c)²
/// with the largest term of every sum factored out.
template <int D>
__device__ __forceinline__ double find_norms(PrepareRows& s, const char* h, const char* k, double log_eta) {
  const std::uint64_t keys = descriptor(k, kTokens * 128);
  float gram[32];
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    mma<false, false, true>(gram, k_major_step(keys, i, kTokens), k_major_step(keys, i, kTokens), i > 0);
  }
  wgmma_commit();
  // The largest log β_j − G_j over the tokens before c.
  const int c = thread();
  const auto larger = [](double a, double b) { return most(a, b); };
  const double up_to = scan(c < kTokens ? s.gates.log_beta[c] - s.gates.g[c] : 0, s.gates.carry, larger);
  if (c == 0) s.largest[0] = log_eta;
  if (c + 1 < kTokens) s.largest[c + 1] = most(up_to, log_eta);
  sync();
  float product[2] = {0, 0};
  const float from_state[2] = {expf(static_cast<float>(log_eta - s.largest[own_row()])),
                               expf(static_cast<float>(log_eta - s.largest[own_row() + 8]))};
  const int row = opaque(own_row()), first_column = opaque(own_column());
#pragma unroll
  for (int half = 0; half < D / 64; ++half) {
    const std::uint64_t state = descriptor(h + half * 64 * 128, D * 128);
    float hk[32];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      mma<false, false, true>(hk, k_major_step(keys, i, kTokens), k_major_step(state, i, D), i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    hold(gram);
    hold(hk);
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const char* at = k + unit_at(row + (i & 2) * 4, 8 * half + i / 4, kTokens) + first_column * 2;
      const float2 key = unpack_half(*reinterpret_cast<const std::uint32_t*>(at));
      product[i / 2 % 2] += hk[i] * key.x + hk[i + 1] * key.y;
    }
  }
  product[0] *= from_state[0], product[1] *= from_state[1];
  const auto reference = [&](int row) {
    return static_cast<float>(s.largest[row] + (s.gates.g[row] - static_cast<double>(s.gates.since[row])));
  };
  const float references[2] = {reference(own_row()), reference(own_row() + 8)};
  const int begins[2] = {s.gates.from[own_row()], s.gates.from[own_row() + 8]};
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const int half = i / 2 % 2, here = row + 8 * half, j = i / 4 * 8 + first_column;
    const float2 column = *reinterpret_cast<const float2*>(&s.column[j]);
    const float first = __expf(column.x - references[half]) * gram[i] * gram[i];
    const float second = __expf(column.y - references[half]) * gram[i + 1] * gram[i + 1];
    product[half] += (j < here && j >= begins[half] ? first : 0) + (j + 1 < here && j + 1 >= begins[half] ? second : 0);
    if (j == here) s.diagonal[here] = gram[i];
    if (j + 1 == here) s.diagonal[here] = gram[i + 1];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    product[i] = add_quad(product[i]);
    if (lane() % 4 == 0) s.product[own_row() + 8 * i] = product[i];
  }
  sync();
  // ½ log |ε_c| − G_c and its sign.
  double step = kLogZero;
  if (c < kTokens) {
    const float x = s.product[c];
    const auto log_or_nothing = [](float value) { return value > 0 ? static_cast<double>(logf(value)) : kLogZero; };
    const double cross = s.gates.log_beta[c] + s.gates.g[c] + s.largest[c] + log_or_nothing(2 * fabsf(x));
    const double own = 2 * (s.gates.log_beta[c] + log_or_nothing(s.diagonal[c]));
    const double top = most(cross, own);
    const float value = copysignf(expf(static_cast<float>(cross - top)), x) + expf(static_cast<float>(own - top));
    s.sign[c] = copysignf(1, value);
    step = (top + log_or_nothing(fabsf(value))) / 2 - s.gates.g[c];
  }
  const double reach = most(scan(step, s.gates.carry, larger), log_eta);
  sync();  // everybody has read the columns' largest
  if (c < kTokens) s.largest[c] = reach, s.step[c] = step;
  sync();
  const int token = c / 2;
  const double top = s.largest[token];
  float square = c % 2 == 0 ? expf(2 * static_cast<float>(log_eta - top)) : 0;
#pragma unroll 8
  for (int j = c % 2; j <= token; j += 2) square += s.sign[j] * __expf(2 * static_cast<float>(s.step[j] - top));
  square += __shfl_xor_sync(0xffffffffu, square, 1);
  return square > 0 ? s.gates.g[token] + top + static_cast<double>(logf(square)) / 2 : kLogZero;
}

/// Whether some token of the chunk has tr H / ‖H‖_F < least, where H_0 has trace `trace`: asked of every fourth token,
/// between which only three keys are written. The same for the whole block; a barrier.
__device__ __forceinline__ bool needs_refining(const PrepareRows& s, float trace, int length, float least) {
  constexpr int kAsked = 16, kParts = kWarpgroup / kAsked;
  const int c = most((thread() / kParts + 1) * length / kAsked - 1, 0);
  const float since = s.gates.since[c];
  float sum = thread() % kParts == 0 ? trace * __expf(static_cast<float>(s.gates.g[c])) : 0;
  for (int j = s.gates.from[c] + thread() % kParts; j <= c; j += kParts) {
    sum += s.diagonal[j] * __expf(since + s.column[j]);
  }
#pragma unroll
  for (int reach = kParts / 2; reach > 0; reach /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, reach);
  const float inverse = s.inverse_norm[c];  // 0: there is nothing to solve
  return __syncthreads_or(inverse > 0 && !(sum * inverse >= least)) != 0;
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

/// Asks the second-level cache for the right-hand side of a chunk.
__device__ __forceinline__ void prefetch_rhs(const View& rhs, const Stretch& chunk, std::int64_t head, int dim) {
  const int bytes = rhs.dtype == DType::float32 ? 4 : 2, lines = (dim * bytes + 127) / 128;
  for (int i = thread(); i < chunk.length * lines; i += kWarpgroup) {
    const auto* row =
        static_cast<const char*>(rhs.data) + offset(rhs, chunk.batch, chunk.begin + i / lines, head) * bytes;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row + i % lines * 128));
  }
}

/// Calls body with the type of a right-hand side: float32, or that of the keys.
template <DType kType, typename Body>
__device__ __forceinline__ void with_rhs(const View& rhs, Body&& body) {
  if (rhs.dtype == DType::float32) {
    body(Storage<DType::float32>{});
  } else {
    body(Storage<kType>{});
  }
}

/// body(i, pair) for each pair this thread holds of a 64×D accumulator; 0 where there is no token or channel.
template <int D, DType kType, typename Body>
__device__ __forceinline__ void each_of_rhs(const View& rhs, const Stretch& chunk, std::int64_t head, int dim,
                                            bool pairs, Body&& body) {
  const int row = opaque(own_row()), column = opaque(own_column()), length = static_cast<int>(chunk.length);
  const std::int64_t at = offset(rhs, chunk.batch, chunk.begin + row, head) + column, below = 8 * rhs.token_stride;
  if (pairs && length == kTokens && dim == D) {  // everything is there
#pragma unroll
    for (int i = 0; i < D / 2; i += 2) {
      body(i, read_pair<kType, true>(rhs.data, at + (i & 2 ? below : 0) + i / 4 * 8, true, true));
    }
    return;
  }
  with_flag(pairs, [&](auto at_once) {
#pragma unroll
    for (int i = 0; i < D / 2; i += 2) {
      const bool in = row + (i & 2) * 4 < length;
      const int c = column + i / 4 * 8;
      const std::int64_t here = at + (i & 2 ? below : 0) + i / 4 * 8;
      body(i, read_pair<kType, decltype(at_once)::value>(rhs.data, here, in && c < dim, in && c + 1 < dim));
    }
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

template <int D>
inline constexpr int kPrepareBytes = 1024 + kTokens * D * 2 + D * D * 2;

template <int D, DType kType>
__global__ void __launch_bounds__(kWarpgroup, 4)
    prepare(const __grid_constant__ Problem p, Plan plan, KeyStates states, const __grid_constant__ SolveCall call,
            const __grid_constant__ Schedules schedules, char* packages, bool whole_k, bool rhs_pairs) {
  __shared__ PrepareRows s;
  char *const k = aligned_tiles(), *const h = k + kTokens * D * 2;
  const int dim = static_cast<int>(p.key_dim);
  const float pace = schedules.of[0].pace, headroom = schedules.of[0].headroom;
  if (thread() == 0) {
    barrier_init(&s.arrived);
    barrier_fence();
  }
  sync();
  int phase = 0;
  for (std::int64_t task = block(); task < 2 * plan.count(p) * p.heads; task += blocks()) {
    const Stretch chunk = tokens_of(plan, task / p.heads);
    const std::int64_t head = task % p.heads;
    const int len = static_cast<int>(chunk.length), token = thread() / 2;
    char* const package = packages + task * Package<D>::kBytes;
    auto* const rows = reinterpret_cast<ChunkRows*>(package + Package<D>::kRows);
    if (thread() == 0) rows->chunk = chunk;
    if (len <= 0) continue;
    if (thread() == 0 && !call.norms_given) bulk_load(h, states.tile(task, D), D * D * 2, &s.arrived);
    const float eta = states.norm[task], trace = states.trace[task];
    {
      TokenRows<D> keys;
      keys.fetch(p.k, chunk, head, dim, 0, whole_k);
      prefetch_rhs(call.rhs, chunk, head, dim);
      set_gates(s.gates, fetch_gates(p, chunk, head));
      keys.template check<kType>(s.gates);
      keys.template store_half<kType>(k, s.exponent);
    }
    publish();
    sync();
    if (thread() == 0) bulk_store(package, k, kTokens * D * 2);
    find_lost(s.gates, eta != eta);
    if (thread() == 0) s.log_eta = eta > 0 ? static_cast<double>(logf(eta)) : kLogZero;
    if (thread() < kTokens) {  // from here on β belongs to the scaled keys
      s.gates.log_beta[thread()] += 2 * s.exponent[thread()] * 0.693147180559945309;
      s.column[thread()] = static_cast<float>(s.gates.log_beta[thread()]) - s.gates.since[thread()];
    }
    sync();
    const std::int64_t at = (chunk.batch * p.tokens + chunk.begin + token) * p.heads + head;
    const double log_eta = s.log_eta;
    double log_norm;
    if (call.norms_given) {
      const double norm = token < len ? call.norm[at] : 0;
      log_norm = norm > 0 && finite(norm) ? log(norm) : kLogZero;
      float gram[32];
      square_keys<D>(s, k, gram);
    } else {
      barrier_wait(&s.arrived, phase);
      phase ^= 1;
      log_norm = find_norms<D>(s, h, k, log_eta);
    }
    if (thread() % 2 == 0) {
      const bool lost = s.gates.lost[token] != 0, live = token < len && !lost && log_norm > kVanished;
      const float row =
          live ? s.gates.since[token] - static_cast<float>(log_norm) + logf(pace) : static_cast<float>(kLogZero);
      const float inverse = live ? static_cast<float>(exp(-log_norm)) : 0;
      s.row[token] = rows->row[token] = row;
      s.inverse_norm[token] = rows->inverse_norm[token] = inverse;
      // Below 1e-12 the state is nothing beside what the chunk itself has written.
      const double left = s.gates.g[token] + log_eta - log_norm;
      rows->t[token] = pace * (live ? most(expf(static_cast<float>(left)), 1e-12f) : 1e-12f);
      rows->factor[token] = live ? (call.normalise ? inverse : 1) : lost ? bits_to_float(0x7fc00000u) : 0;
      if (!call.norms_given && token < len) call.norm[at] = lost ? not_a_number() : exp(log_norm);
    } else {
      rows->alpha[token] = s.gates.alpha[token];
      rows->column[token] = s.column[token];
      rows->from[token] = s.gates.from[token];
      const float since = s.gates.since[token];
      const double log_scale = s.exponent[token] * 0.693147180559945309;
      rows->since[token] = since;
      rows->reading[token] = static_cast<float>(s.gates.log_beta[token] - log_scale) - since;
      rows->zeta[token] = __expf(static_cast<float>(s.gates.g[token]));
      const bool forgets = (s.gates.forgets[token / 32] >> token % 32 & 1) != 0;
      rows->flags[token] = (s.gates.bad[token] != 0 ? kBadToken : 0) | (forgets ? kForgetsAll : 0);
    }
    sync();
    const bool refined = schedules.may_refine && needs_refining(s, trace, len, schedules.least_spread);
    if (thread() == 0) rows->refined = refined;
    auto* const mask = reinterpret_cast<uint4*>(package + Package<D>::kMask) + thread();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      std::uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 m = mask_at(s.row, s.column, s.gates.from, 8 * i + 2 * w);
        words[w] = pack_half(m.x, m.y);
      }
      mask[i * kWarpgroup] = {words[0], words[1], words[2], words[3]};
    }
    // Rows are scaled by powers of two, so that float16 holds the iterates: their largest number is then between 1
    // and 2, times what the iterates need as headroom.
    float b[D / 2], top[2] = {0, 0}, scale[2];
    with_rhs<kType>(call.rhs, [&](auto type) {
      each_of_rhs<D, decltype(type)::type>(call.rhs, chunk, head, dim, rhs_pairs,
                                           [&](int i, const float2& pair) { b[i] = pair.x, b[i + 1] = pair.y; });
    });
#pragma unroll
    for (int i = 0; i < D / 2; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], fabsf(b[i]));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const RowScale row = scale_of(top[i]);
      scale[i] = row.scale * headroom;
      if (lane() % 4 == 0) rows->unscale[own_row() + 8 * i] = row.unscale / headroom;
    }
    auto* const rhs = reinterpret_cast<uint4*>(package + Package<D>::kRhs) + thread();
#pragma unroll
    for (int n = 0; n < D / 2; n += 8) {
      std::uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = pack_half(b[n + 2 * w] * scale[w % 2], b[n + 2 * w + 1] * scale[w % 2]);
      }
      rhs[n / 8 * kWarpgroup] = {words[0], words[1], words[2], words[3]};
    }
    if (thread() == 0) bulk_store_wait();
    sync();  // nobody reads the rows and tiles any more
  }
  if (thread() == 0) bulk_store_finish();
}

}  // namespace gka::kernels::cuda::hopper
