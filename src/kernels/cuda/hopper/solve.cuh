// The solve: (H_c + λ_c I) x_c = b_c for the 64 tokens of a chunk by one warpgroup, for any right-hand side b (queries
// in the forward pass, gradients in the backward pass). With f = ‖H_c‖_F, H̃ = H_c/f and H_0/η the chunk's first state
// (‖H_0‖_F = η),
//
//   H̃ ξ = t_c (H_0/η) ξ + Σ_{j≤c} m_cj k_j (k_jᵀ ξ),   t_c = ζ_c η/f_c,   m_cj = M_jc β_j/f_c.
//
// One step is three products: scores ξK, then ξ(H_0/η) into the accumulator of the next iterate, then the masked scores
// times K on top. What is not obvious:
//
// - Operands are float16, three bits more than bf16: rows of b are scaled by powers of two, H by its norm, and
//   the recurrence keeps its numbers near 1, so that nothing leaves float16's range.
// - Iterates stay in registers; rounded to float16 they are the next A operand. The accumulator that receives
//   ξ_i is the one that held ξ_{i-2}: it is divided by t before the state product and multiplied by t after it,
//   with everything else that is added: t costs nothing, and three iterates never live at once.
// - Iterates are kept as u_i = ξ_i/g_i with g_i = −(c_i/c) g_{i-1}: products have the same factor in every step.
// - Where few keys make up H (strong decay, the start of a sequence) its null space dominates x, and rounding
//   there shows in the few directions that are read. So after `first` steps the residual b − (H̃ + a)ξ is
//   computed with operands in two parts (hi·hi + hi·lo + lo·hi), and the *same* Chebyshev recurrence goes on for
//   the error: e_i = ξ_i − ξ_first obeys it with the residual as right-hand side, e_first = 0 and
//   e_{first-1} = ξ_{first-1} − ξ_first. Nothing is lost by starting anew, and its first step needs no product.
// - Everything that has a scale (f, η, ζ, β) lives in logarithms until it is a ratio.
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
  uint4* z = nullptr;        // with kReads, where b is q: z = q + α (x − q) in two bf16 parts, in accumulator order:
                             // [slots, heads, 2, D/16, threads]
};

template <int D>
inline constexpr int kSolveBytes = 1024 + 2 * D * D * 2 + kTokens * D * 2 + kTokens * D * 2 + kTokens * kTokens * 2;

/// What a block parks in global memory (where it stays in the second-level cache), in numbers of 16 bytes.
template <int D>
inline constexpr int kParked = 3 * kTokens * D / 4;

/// Per token, in shared memory.
struct SolveRows {
  Gates gates;
  alignas(8) float column[kTokens];  // log β_j − G_j, both G since the last γ = 0
  float row[kTokens];                // G_c − log f_c
  double largest[kTokens];           // scratch of the norms
  double step[kTokens];
  float diagonal[kTokens], product[kTokens], sign[kTokens];
  float t[kTokens];
  float factor[kTokens];  // of the answer. 0: nothing remembered; NaN: lost
  float inverse_norm[kTokens];
  std::uint64_t arrived[2];  // barriers of the two state buffers
  // What would only occupy registers during the steps.
  Stretch chunk, next_chunk;
  std::int64_t head, next_head, next;
  double log_eta;
};

/// log ‖H_c‖_F for token c = thread / 2 (both threads), from
///   ‖H_c‖² = ζ_c² η² + Σ_{j≤c} M_jc² ε_j,
///   ε_c = 2 β_c (ζ_c η k_cᵀ(H_0/η)k_c + Σ_{j<c} M_jc β_j (k_jᵀk_c)²) + (β_c k_cᵀk_c)²
/// with the largest term of every sum factored out. `hk` and `gram` are accumulators that are free.
template <int D>
__device__ __forceinline__ double find_norms(SolveRows& s, const char* h, const char* k, double log_eta,
                                             float (&hk)[D / 2], float (&gram)[32]) {
  const std::uint64_t keys = descriptor(k, kTokens * 128), state = descriptor(h, D * 128);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    mma<false, false, true>(gram, k_major_step(keys, i, kTokens), k_major_step(keys, i, kTokens), i > 0);
    mma<false, false, true>(hk, k_major_step(keys, i, kTokens), k_major_step(state, i, D), i > 0);
  }
  wgmma_commit();
  // The largest log β_j − G_j over the tokens before c.
  const int c = thread();
  const auto larger = [](double a, double b) { return most(a, b); };
  const double up_to = scan(c < kTokens ? s.gates.log_beta[c] - s.gates.g[c] : 0, s.gates.carry, larger);
  if (c == 0) s.largest[0] = log_eta;
  if (c + 1 < kTokens) s.largest[c + 1] = most(up_to, log_eta);
  sync();
  wgmma_wait<0>();
  hold(hk);
  hold(gram);
  float product[2] = {0, 0};
  const float from_state[2] = {expf(static_cast<float>(log_eta - s.largest[own_row()])),
                               expf(static_cast<float>(log_eta - s.largest[own_row() + 8]))};
  const int row = opaque(own_row()), first_column = opaque(own_column());
#pragma unroll
  for (int i = 0; i < D / 2; i += 2) {
    const char* at = k + unit_at(row + (i & 2) * 4, i / 4, kTokens) + first_column * 2;
    const auto word = *reinterpret_cast<const std::uint32_t*>(at);
    const float2 key = unpack_half(word);
    product[i / 2 % 2] += hk[i] * key.x + hk[i + 1] * key.y;
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
  for (int j = c % 2; j <= token; j += 2) square += s.sign[j] * __expf(2 * static_cast<float>(s.step[j] - top));
  square += __shfl_xor_sync(0xffffffffu, square, 1);
  return square > 0 ? s.gates.g[token] + top + static_cast<double>(logf(square)) / 2 : kLogZero;
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

/// body(both at once, i, offset, is there, is the second there) for each pair of x.
template <int D, typename Body>
__device__ __forceinline__ void each_of_x(const Problem& p, const Stretch& chunk, std::int64_t head, Body&& body) {
  const int row = opaque(own_row()), column = opaque(own_column()), dim = static_cast<int>(p.key_dim),
            length = static_cast<int>(chunk.length);
  const std::int64_t at = ((chunk.batch * p.tokens + chunk.begin + row) * p.heads + head) * dim + column;
  const std::int64_t below = 8 * p.heads * dim;
  if (length == kTokens && dim == D) {  // everything is there
#pragma unroll
    for (int i = 0; i < D / 2; i += 2) {
      body(std::true_type{}, i, at + (i & 2 ? below : 0) + i / 4 * 8, true, true);
    }
    return;
  }
  with_flag(dim % 2 == 0, [&](auto at_once) {
#pragma unroll
    for (int i = 0; i < D / 2; i += 2) {
      const bool in = row + (i & 2) * 4 < length;
      const int c = column + i / 4 * 8;
      body(at_once, i, at + (i & 2 ? below : 0) + i / 4 * 8, in && c < dim, in && c + 1 < dim);
    }
  });
}

/// One chunk's solve: what a thread keeps beside the iterates.
template <int D>
struct ChunkSolver {
  const char *h, *h_lo, *k;
  uint4* rhs;   // this thread's values of b as bf16, in accumulator order: [D/16] of 16 bytes, kWarpgroup apart
  uint4* mask;  // and of m: [4]
  float t[2], inverse_t[2];

  /// u2 ← ξ_i from u1 = ξ_{i-1} and u2 = ξ_{i-2}, all over their g.
  __device__ __forceinline__ void step(float (&u1)[D / 2], float (&u2)[D / 2], float a, float b, float q) const {
    const std::uint64_t keys = descriptor(k, kTokens * 128), state = descriptor(h, D * 128);
    std::uint32_t operand[D / 4];
#pragma unroll
    for (int i = 0; i < D / 4; ++i) operand[i] = pack_half(u1[2 * i], u1[2 * i + 1]);
    const float fill[2] = {b * inverse_t[0], b * inverse_t[1]};
#pragma unroll
    for (int i = 0; i < D / 2; ++i) u2[i] *= fill[i / 2 % 2];
    float scores[32];
    hold(u2);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < D / 16; ++s) mma<false, true>(scores, operand + 4 * s, k_major_step(keys, s, kTokens), s > 0);
    wgmma_commit();
#pragma unroll
    for (int s = 0; s < D / 16; ++s) mma<false, true>(u2, operand + 4 * s, k_major_step(state, s, D));
    wgmma_commit();
    wgmma_wait<1>();
    hold(scores);
    std::uint32_t masked[16];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 m = mask[i * kWarpgroup];
      const std::uint32_t words[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        masked[4 * i + w] =
            pack_half(scores[8 * i + 2 * w] * low(words[w]), scores[8 * i + 2 * w + 1] * high(words[w]));
      }
    }
    wgmma_wait<0>();
    hold(u2);
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const uint4 r = rhs[i * kWarpgroup];
      const std::uint32_t words[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int at = 8 * i + 2 * w;
        u2[at] = t[w % 2] * u2[at] + (a * u1[at] + q * low(words[w]));
        u2[at + 1] = t[w % 2] * u2[at + 1] + (a * u1[at + 1] + q * high(words[w]));
      }
    }
    hold(u2);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kTokens / 16; ++s) mma<true, true>(u2, masked + 4 * s, mn_major_step(keys, s));
    wgmma_commit();
    wgmma_wait<0>();
    hold(u2);
  }

  /// Steps i … last, an even number; the result is in u1 and the iterate before it in u2.
  __device__ __forceinline__ void steps(float (&u1)[D / 2], float (&u2)[D / 2], const Schedule& schedule, int i,
                                        int last) const {
#pragma unroll 1
    for (; i < last; i += 2) {
      step(u1, u2, schedule.a[i], schedule.b[i], schedule.q[i]);
      step(u2, u1, schedule.a[i + 1], schedule.b[i + 1], schedule.q[i + 1]);
    }
  }

  /// out ← H̃ u with operands in two parts; `finish(i, H_0 part)` is called for every number before the masked part is
  /// added. `exact_mask(i)`: m at score i.
  template <typename Mask, typename Finish>
  __device__ __forceinline__ void apply_exactly(const float (&u)[D / 2], float (&out)[D / 2], Mask&& exact_mask,
                                                Finish&& finish) const {
    const std::uint64_t keys = descriptor(k, kTokens * 128), state = descriptor(h, D * 128),
                        state_lo = descriptor(h_lo, D * 128);
    float scores[32];
    {
      std::uint32_t operand[D / 4];
#pragma unroll
      for (int i = 0; i < D / 4; ++i) operand[i] = pack_half(u[2 * i], u[2 * i + 1]);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < D / 16; ++s) mma<false, true>(out, operand + 4 * s, k_major_step(state, s, D), s > 0);
#pragma unroll
      for (int s = 0; s < D / 16; ++s) mma<false, true>(scores, operand + 4 * s, k_major_step(keys, s, kTokens), s > 0);
#pragma unroll
      for (int s = 0; s < D / 16; ++s) mma<false, true>(out, operand + 4 * s, k_major_step(state_lo, s, D));
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < D / 4; ++i) operand[i] = pack_half_rest(u[2 * i], u[2 * i + 1], operand[i]);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < D / 16; ++s) mma<false, true>(scores, operand + 4 * s, k_major_step(keys, s, kTokens));
#pragma unroll
      for (int s = 0; s < D / 16; ++s) mma<false, true>(out, operand + 4 * s, k_major_step(state, s, D));
      wgmma_commit();
      wgmma_wait<0>();
      hold(out);
      hold(scores);
    }
    std::uint32_t masked[16], rest[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 m = exact_mask(2 * i);
      const float first = m.x * scores[2 * i], second = m.y * scores[2 * i + 1];
      masked[i] = pack_half(first, second);
      rest[i] = pack_half_rest(first, second, masked[i]);
    }
    finish();
    hold(out);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kTokens / 16; ++s) {
      mma<true, true>(out, masked + 4 * s, mn_major_step(keys, s));
      mma<true, true>(out, rest + 4 * s, mn_major_step(keys, s));
    }
    wgmma_commit();
    wgmma_wait<0>();
    hold(out);
  }
};

template <int D, DType kType, bool kReads>
__global__ void __launch_bounds__(kWarpgroup, 2)
    solve(const __grid_constant__ Problem p, Plan plan, KeyStates states, const __grid_constant__ SolveCall call,
          const __grid_constant__ Schedule schedule, float4* parked, bool whole_k, bool rhs_pairs) {
  __shared__ SolveRows s;
  char* const tiles = aligned_tiles();
  constexpr int kState = D * D * 2;
  char* buffer[2] = {tiles, tiles + kState};
  char* const k = tiles + 2 * kState;
  auto* const rhs = reinterpret_cast<uint4*>(k + kTokens * D * 2) + thread();
  auto* const mask = reinterpret_cast<uint4*>(k + 2 * kTokens * D * 2) + thread();
  // This thread's numbers in accumulator order: ξ_first, then ξ_{first-1} − ξ_first, then b where it is float32.
  parked += block() * kParked<D> + thread();
  float4* const parked_rest = parked + D / 8 * kWarpgroup;
  float4* const parked_rhs = parked_rest + D / 8 * kWarpgroup;
  const std::int64_t tasks = 2 * plan.count(p) * p.heads;
  const int dim = static_cast<int>(p.key_dim);
  const auto next_task = [&](std::int64_t after) {
    do after += blocks();
    while (after < tasks && tokens_of(plan, after / p.heads).length <= 0);
    return after;
  };
  const auto request = [&](std::int64_t task, int part, int which) {
    const __half* from = states.tile(task / p.heads, p.heads, task % p.heads, D) + part * D * D;
    bulk_load(buffer[which], from, kState, &s.arrived[which]);
  };
  if (thread() == 0) {
    barrier_init(&s.arrived[0]);
    barrier_init(&s.arrived[1]);
    barrier_fence();
  }
  sync();
  // The first part of a state lies in buffer `turn`, the second in the other; where the second lay, the next chunk's
  // first part goes as soon as the residual is known.
  int turn = 0, phase[2] = {0, 0};
  std::int64_t task = next_task(static_cast<std::int64_t>(block()) - blocks());
  if (task < tasks && thread() == 0) {
    request(task, 0, 0);
    if (schedule.refined) request(task, 1, 1);
  }
  // What a chunk needs first is fetched while the one before it is being finished.
  TokenRows<D> keys;
  GateOfToken gate;
  float eta = 0;
  const auto fetch_next = [&](std::int64_t of) {
    if (of >= tasks) return;
    keys.fetch(p.k, s.next_chunk, s.next_head, dim, 0, whole_k);
    gate = fetch_gates(p, s.next_chunk, s.next_head);
    eta = states.norm[of];
  };
  if (thread() == 96 && task < tasks) s.next_chunk = tokens_of(plan, task / p.heads), s.next_head = task % p.heads;
  sync();
  fetch_next(task);
  while (task < tasks) {
    sync();
    if (thread() == 96) {
      s.chunk = s.next_chunk, s.head = s.next_head;
      s.next = next_task(task);
      if (s.next < tasks) s.next_chunk = tokens_of(plan, s.next / p.heads), s.next_head = s.next % p.heads;
    }
    set_gates(s.gates, gate);
    keys.template check<kType>(s.gates);
    keys.template store_half<kType>(k);
    publish();
    sync();
    find_lost(s.gates, eta != eta);
    if (thread() == 0) s.log_eta = eta > 0 ? static_cast<double>(logf(eta)) : kLogZero;
    sync();
    ChunkSolver<D> solver{.h = buffer[turn], .h_lo = buffer[1 - turn], .k = k, .rhs = rhs, .mask = mask};
    barrier_wait(&s.arrived[turn], phase[turn]);
    phase[turn] ^= 1;

    float u1[D / 2], u2[D / 2];
    {  // Norms, and with them everything per row.
      float gram[32];
      const int token = thread() / 2, len = static_cast<int>(s.chunk.length);
      const std::int64_t at = (s.chunk.batch * p.tokens + s.chunk.begin + token) * p.heads + s.head;
      const double log_eta = s.log_eta;
      double log_norm;
      if (thread() < kTokens) {
        s.column[thread()] = static_cast<float>(s.gates.log_beta[thread()]) - s.gates.since[thread()];
      }
      if (call.norms_given) {
        const double norm = token < len ? call.norm[at] : 0;
        log_norm = norm > 0 && finite(norm) ? log(norm) : kLogZero;
      } else {
        log_norm = find_norms<D>(s, buffer[turn], k, log_eta, u1, gram);
      }
      const bool lost = s.gates.lost[token] != 0;
      const bool live = token < len && !lost && log_norm > kVanished;
      const double reach = s.gates.g[token];
      if (thread() % 2 == 0) {
        s.row[token] = live ? s.gates.since[token] - static_cast<float>(log_norm) + logf(schedule.pace)
                            : static_cast<float>(kLogZero);
        // Below 1e-12 the state is nothing beside what the chunk itself has written.
        s.t[token] =
            schedule.pace * (live ? most(expf(static_cast<float>(reach + log_eta - log_norm)), 1e-12f) : 1e-12f);
        const float inverse = live ? static_cast<float>(exp(-log_norm)) : 0;
        s.inverse_norm[token] = inverse;
        s.factor[token] = live ? (call.normalise ? inverse : 1) : lost ? bits_to_float(0x7fc00000u) : 0;
        if (!call.norms_given && token < len) call.norm[at] = lost ? not_a_number() : exp(log_norm);
      }
      sync();
    }
    const auto exact_mask = [&](int i) -> float2 {
      const int row = opaque(own_row()) + (i & 2) * 4, j = i / 4 * 8 + opaque(own_column());
      const float by = s.row[row];
      const int from = s.gates.from[row];
      const float2 column = *reinterpret_cast<const float2*>(&s.column[j]);
      const float first = __expf(by + column.x), second = __expf(by + column.y);
      return {j >= from && j <= row ? first : 0, j + 1 >= from && j + 1 <= row ? second : 0};
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      std::uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 m = exact_mask(8 * i + 2 * w);
        words[w] = pack(m.x, m.y);
      }
      mask[i * kWarpgroup] = {words[0], words[1], words[2], words[3]};
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      solver.t[i] = s.t[own_row() + 8 * i];
      solver.inverse_t[i] = 1 / solver.t[i];
    }
    const auto start_from = [&](int i, const float2& b) { u1[i] = b.x, u1[i + 1] = b.y; };
    with_rhs<kType>(call.rhs, [&](auto type) {
      each_of_rhs<D, decltype(type)::type>(call.rhs, s.chunk, s.head, dim, rhs_pairs, start_from);
    });
    // Rows are scaled by powers of two, so that float16 holds the iterates: their largest number is then between 1
    // and 2.
    float unscale[2];
    {
      float top[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < D / 2; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], fabsf(u1[i]));
      float scale[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 1));
        top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 2));
        const std::uint32_t exponent = float_to_bits(top[i]) & 0x7f800000u;
        const bool usual = exponent > 0x08000000u && exponent < 0x77000000u;
        unscale[i] = (usual ? bits_to_float(exponent) : 1) / schedule.headroom;
        scale[i] = (usual ? bits_to_float(0x7f000000u - exponent) : 1) * schedule.headroom;
      }
#pragma unroll
      for (int i = 0; i < D / 2; ++i) u1[i] *= scale[i / 2 % 2];
    }
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      rhs[i * kWarpgroup] = {pack(u1[8 * i], u1[8 * i + 1]), pack(u1[8 * i + 2], u1[8 * i + 3]),
                             pack(u1[8 * i + 4], u1[8 * i + 5]), pack(u1[8 * i + 6], u1[8 * i + 7])};
    }
    if constexpr (kReads) {
      auto* const q = reinterpret_cast<uint4*>(parked_rhs);
#pragma unroll
      for (int n = 0; n < D / 16; ++n) q[n * kWarpgroup] = rhs[n * kWarpgroup];
    } else if (schedule.refined && call.rhs.dtype == DType::float32) {
#pragma unroll
      for (int n = 0; n < D / 2; n += 4) parked_rhs[n / 4 * kWarpgroup] = {u1[n], u1[n + 1], u1[n + 2], u1[n + 3]};
    }
    // Before an odd number of steps comes one that makes ξ_0 out of nothing.
    int i = schedule.first % 2 == 0 ? 1 : 0, last = schedule.first;
#pragma unroll
    for (int n = 0; n < D / 2; ++n) {
      u1[n] = i == 0 ? 0 : schedule.start * u1[n];
      u2[n] = 0;
    }
#pragma unroll 1
    while (true) {
      solver.steps(u1, u2, schedule, i, last);
      if (last == schedule.last) break;
      i = schedule.first + 2;
      last = schedule.last;
      barrier_wait(&s.arrived[1 - turn], phase[1 - turn]);
      phase[1 - turn] ^= 1;
      const float grown = schedule.grown_first, before = schedule.grown_before;
#pragma unroll
      for (int n = 0; n < D / 2; n += 4) {
        const float4 now{grown * u1[n], grown * u1[n + 1], grown * u1[n + 2], grown * u1[n + 3]};
        parked[n / 4 * kWarpgroup] = now;
        parked_rest[n / 4 * kWarpgroup] = {before * u2[n] - now.x, before * u2[n + 1] - now.y,
                                           before * u2[n + 2] - now.z, before * u2[n + 3] - now.w};
      }
      // u2 becomes −residual/g.
      solver.apply_exactly(u1, u2, exact_mask, [&] {
        const float by = -schedule.inverse_grown_first;
        const bool wide = call.rhs.dtype == DType::float32;
#pragma unroll
        for (int n = 0; n < D / 2; n += 8) {
          const uint4 r = rhs[n / 8 * kWarpgroup];
          float4 b[2] = {{low(r.x), high(r.x), low(r.y), high(r.y)}, {low(r.z), high(r.z), low(r.w), high(r.w)}};
          if (wide) b[0] = parked_rhs[n / 4 * kWarpgroup], b[1] = parked_rhs[(n / 4 + 1) * kWarpgroup];
#pragma unroll
          for (int w = 0; w < 2; ++w) {
            const int at = n + 4 * w;
            u2[at] = solver.t[0] * u2[at] + (schedule.ridge * u1[at] + by * b[w].x);
            u2[at + 1] = solver.t[0] * u2[at + 1] + (schedule.ridge * u1[at + 1] + by * b[w].y);
            u2[at + 2] = solver.t[1] * u2[at + 2] + (schedule.ridge * u1[at + 2] + by * b[w].z);
            u2[at + 3] = solver.t[1] * u2[at + 3] + (schedule.ridge * u1[at + 3] + by * b[w].w);
          }
        }
      });
      sync();  // nobody reads the second part any more
      if (thread() == 0 && s.next < tasks) request(s.next, 0, 1 - turn);
#pragma unroll
      for (int n = 0; n < D / 2; n += 8) {
        const float4 rest[2] = {parked_rest[n / 4 * kWarpgroup], parked_rest[(n / 4 + 1) * kWarpgroup]};
        std::uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int at = n + 2 * w;
          const float first = schedule.residual * u2[at], second = schedule.residual * u2[at + 1];
          const float4& e = rest[w / 2];
          u1[at] = schedule.e_weight * (w % 2 == 0 ? e.x : e.z) + schedule.r_weight * first;
          u1[at + 1] = schedule.e_weight * (w % 2 == 0 ? e.y : e.w) + schedule.r_weight * second;
          u2[at] = u2[at + 1] = 0;
          words[w] = pack(first, second);
        }
        rhs[n / 8 * kWarpgroup] = {words[0], words[1], words[2], words[3]};
      }
    }
    if (!schedule.refined && thread() == 0 && s.next < tasks) request(s.next, 0, 1 - turn);
    sync();  // nobody reads the first part or the keys any more
    if (thread() == 0 && schedule.refined && s.next < tasks) request(s.next, 1, turn);
    fetch_next(s.next);
    const float grown = schedule.refined ? schedule.grown_last : schedule.grown_first;
    const float factor[2] = {s.factor[own_row()] * unscale[0], s.factor[own_row() + 8] * unscale[1]};
    if (schedule.refined) {
#pragma unroll
      for (int n = 0; n < D / 2; n += 4) {
        const float4 then = parked[n / 4 * kWarpgroup];
        u1[n] = grown * u1[n] + then.x, u1[n + 1] = grown * u1[n + 1] + then.y;
        u1[n + 2] = grown * u1[n + 2] + then.z, u1[n + 3] = grown * u1[n + 3] + then.w;
      }
    } else {
#pragma unroll
      for (int n = 0; n < D / 2; ++n) u1[n] *= grown;
    }
#pragma unroll
    for (int n = 0; n < D / 2; ++n) {
      const float by = factor[n / 2 % 2];  // 0 and NaN stand for tokens without an answer
      u1[n] = by > 0 ? u1[n] * by : by;
    }
    if (call.x != nullptr) {
      each_of_x<D>(p, s.chunk, s.head, [&](auto pairs, int n, std::int64_t at, bool one, bool two) {
        if (one) store_pair<decltype(pairs)::value>(call.x + at, u1[n], u1[n + 1], two);
      });
    }
    if constexpr (kReads) {
      const float mix[2] = {s.gates.alpha[own_row()], s.gates.alpha[own_row() + 8]};
      const float by[2] = {mix[0] * s.inverse_norm[own_row()], mix[1] * s.inverse_norm[own_row() + 8]};
      const float rest[2] = {(1 - mix[0]) * unscale[0], (1 - mix[1]) * unscale[1]};
      const auto* const q = reinterpret_cast<const uint4*>(parked_rhs);
      uint4* const z = call.z + task * (D / 8) * kWarpgroup + thread();
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        const uint4 words = q[n * kWarpgroup];
        const std::uint32_t of_q[4] = {words.x, words.y, words.z, words.w};
        std::uint32_t hi[4], lo[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int at = 8 * n + 2 * w, half = w % 2;
          const float a = rest[half] * low(of_q[w]) + by[half] * u1[at];
          const float b = rest[half] * high(of_q[w]) + by[half] * u1[at + 1];
          hi[w] = pack(a, b);
          lo[w] = pack_rest(a, b, hi[w]);
        }
        z[n * kWarpgroup] = {hi[0], hi[1], hi[2], hi[3]};
        z[(n + D / 16) * kWarpgroup] = {lo[0], lo[1], lo[2], lo[3]};
      }
    }
    task = s.next;
    sync();  // nobody reads the rows any more
    turn = 1 - turn;
  }
}

}  // namespace gka::kernels::cuda::hopper
