// The solve: (H_c + λ_c I) x_c = b_c for the 64 tokens of a chunk by one warpgroup, for any right-hand side b (queries
// in the forward pass, gradients in the backward pass). With f = ‖H_c‖_F, H̃ = H_c/f and H_0/η the chunk's first state
// (‖H_0‖_F = η),
//
//   H̃ ξ = t_c (H_0/η) ξ + Σ_{j≤c} m_cj k_j (k_jᵀ ξ),   t_c = ζ_c η/f_c,   m_cj = M_jc β_j/f_c.
//
// One step is three products: scores ξK, then ξ(H_0/η) into the accumulator of the next iterate, then the masked scores
// times K on top. What is not obvious:
//
// - Operands are float16, three bits more than bf16: rows of b and keys are scaled by powers of two, H by its norm,
//   and the recurrence keeps its numbers near 1, so that nothing leaves float16's range.
// - Iterates stay in registers; rounded to float16 they are the next A operand. The accumulator that receives
//   ξ_i is the one that held ξ_{i-2}: it is divided by t before the state product and multiplied by t after it,
//   with everything else that is added: t costs nothing, and three iterates never live at once.
// - Iterates are kept as u_i = ξ_i/g_i with g_i = −(c_i/c) g_{i-1}: products have the same factor in every step.
// - Where few keys make up H (strong decay, the start of a sequence) its null space dominates x, and rounding
//   there shows in the few directions that are read. Chunks with such tokens (`spread_asked` of chunk_system.cuh) get
//   the whole budget of iterations and, twice on the way (before every step where they are too few to converge), the
//   residual b − (H̃ + a)ξ with iterates and scores in two float16 parts; the *same* Chebyshev recurrence then goes on
//   for the error: e_i = ξ_i − ξ_n obeys it with the residual of ξ_n as right-hand side, e_n = 0 and e_{n-1} = ξ_{n-1}
//   − ξ_n. Nothing is lost by starting anew, and its first step needs no product. (On trial, other steps begin there
//   with e_{n-1} = 0: `StepsAlongKeys` of schedule.h.) H itself stays rounded: that is a
//   perturbation, the same forward and backward, of 2⁻¹² beside its norm.
// - Everything that has a scale (f, η, ζ, β) lives in logarithms until it is a ratio.
#pragma once

#include "kernels/cuda/hopper/chunk_system.cuh"

namespace gka::kernels::cuda::hopper {

/// A buffer of the solve has a state, and then x.
template <int D>
inline constexpr int kStateRoom = (D < kChunk ? kChunk : D) * D * 2;
template <int D>
inline constexpr int kSolveBytes = 1024 + 2 * kStateRoom<D> + SystemLayout<D>::kBytes;

/// What a block parks in global memory (where it stays in the second-level cache), in numbers of 16 bytes.
template <int D>
inline constexpr int kParked = 5 * kChunk * D / 8;

/// body(both at once, i, offset, is there, is the second there) for each pair of x.
template <int D, typename Body>
__device__ __forceinline__ void each_of_x(const Problem& p, const Stretch& chunk, std::int64_t head, Body&& body) {
  const std::int64_t first = ((chunk.batch * p.tokens + chunk.begin) * p.heads + head) * p.key_dim;
  each_place<D>(first, p.heads * p.key_dim, static_cast<int>(chunk.length), static_cast<int>(p.key_dim),
                p.key_dim % 2 == 0, body);
}

/// x as SolveCall::tiles has it, of a chunk of `length` tokens.
template <int D>
__device__ __forceinline__ void store_tile(char* tile, float* down, const float (&x)[D / 2], int length) {
  constexpr std::uint32_t kLeast = 0x08000000u, kMost = 0x76000000u;  // powers of two whose inverse is a usual number
  float up[2];
  bool fine[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    std::uint32_t top = 0;
#pragma unroll
    for (int n = 2 * i; n < D / 2; n += 4) {
      top = max(top, max(float_to_bits(x[n]) & 0x7fffffffu, float_to_bits(x[n + 1]) & 0x7fffffffu));
    }
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = max(top, __shfl_xor_sync(0xffffffffu, top, 2)) & 0x7f800000u;
    const bool there = own_row() + 8 * i < length, usual = there && top >= kLeast && top <= kMost;
    up[i] = usual ? bits_to_float(0x7f000000u - top) : 1;
    fine[i] = there && top <= kMost;
    if (lane() % 4 == 0) down[own_row() + 8 * i] = usual ? bits_to_float(top) : fine[i] || !there ? 1 : NAN;
  }
  const int matrix = lane() / 8, row = thread() / 32 * 16 + matrix % 2 * 8 + lane() % 8;
#pragma unroll
  for (int n = 0; n < D / 2; n += 8) {
    std::uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      words[w] = fine[w % 2] ? pack_half(x[n + 2 * w] * up[w % 2], x[n + 2 * w + 1] * up[w % 2]) : 0;
    }
    const int at = unit_at<kBlockColumns<D>>(row, n / 4 + matrix / 2, kChunk);
    store_matrices(shared_address(tile + at), words[0], words[1], words[2], words[3]);
  }
}

/// A number for each of a thread's two rows, or one for both.
struct OfRows {
  float x[2];
};
template <typename T>
__device__ __forceinline__ T of_row(T both, int) {
  return both;
}
__device__ __forceinline__ float of_row(const OfRows& each, int half) { return each.x[half]; }
__device__ __forceinline__ float negative(float both) { return -both; }
__device__ __forceinline__ OfRows negative(const OfRows& each) { return {-each.x[0], -each.x[1]}; }

/// ρ of a thread's two rows, where tokens have their own.
__device__ __forceinline__ OfRows rho_of(const SystemRows& rows, const Options& options) {
  const auto ridge = static_cast<float>(options.ridge);
  const auto of = [&](int row) { return rows.factor[row] > 0 ? fminf(ridge * rows.inverse_norm[row], 1.0f) : 1; };
  return {of(own_row()), of(own_row() + 8)};
}
/// ξ_0 over b, of two rows.
__device__ __forceinline__ OfRows starts_of(const SystemRows& rows, const Options& options) {
  const OfRows rho = rho_of(rows, options);
  return {TokenSchedule::start_of(rho.x[0]), TokenSchedule::start_of(rho.x[1])};
}
/// What Schedule and Residual have, of two rows.
struct RowPaces {
  OfRows pace, inverse_pace, ridge;

  __device__ __forceinline__ explicit RowPaces(const OfRows& rho) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pace.x[i] = TokenSchedule::pace_of(rho.x[i]);
      inverse_pace.x[i] = 1 / pace.x[i];
      ridge.x[i] = rho.x[i] * pace.x[i];
    }
  }
};
struct RowResidual {
  OfRows grown, grown_before, e_weight, r_weight;
};
/// The schedules of two rows.
struct RowSchedules {
  TokenSchedule row[2];

  __device__ __forceinline__ explicit RowSchedules(const OfRows& rho)
      : row{TokenSchedule(rho.x[0]), TokenSchedule(rho.x[1])} {}
  __device__ __forceinline__ RowResidual restart(const OfRows& rho) {
    const Residual one = row[0].restart(rho.x[0]), two = row[1].restart(rho.x[1]);
    return {.grown = {one.grown, two.grown},
            .grown_before = {one.grown_before, two.grown_before},
            .e_weight = {one.e_weight, two.e_weight},
            .r_weight = {one.r_weight, two.r_weight}};
  }
  __device__ __forceinline__ OfRows grown(const OfRows& rho) const {
    return {row[0].grown(rho.x[0]), row[1].grown(rho.x[1])};
  }
};

/// Scores times m, in float16; `mask` is this thread's part of m.
__device__ __forceinline__ void multiply_mask(const float (&scores)[32], const uint4* mask,
                                              std::uint32_t (&masked)[16]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 m = mask[i * kWarpgroup];
    const std::uint32_t words[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      masked[4 * i + w] = multiply_half(pack_half(scores[8 * i + 2 * w], scores[8 * i + 2 * w + 1]), words[w]);
    }
  }
}
/// Scores times m in two float16 parts; `exact_mask(i)`: m at score i.
template <typename Mask>
__device__ __forceinline__ void multiply_exact_mask(const float (&scores)[32], Mask&& exact_mask,
                                                    std::uint32_t (&masked)[16], std::uint32_t (&rest)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 m = exact_mask(2 * i);
    const float first = m.x * scores[2 * i], second = m.y * scores[2 * i + 1];
    masked[i] = pack_half(first, second);
    rest[i] = pack_half_rest(first, second, masked[i]);
  }
}

/// u2 ← ξ_i but for the masked scores, from u2 = what the state's product was added to and u1 = ξ_{i-1}. `rhs`: this
/// thread's values of b.
template <int D, typename Weight, typename Rhs, typename T>
__device__ __forceinline__ void add_iterate(float (&u2)[D / 2], const float (&u1)[D / 2], const Rhs& rhs,
                                            const Weight& a, const Weight& q, T&& t_at) {
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    const uint4 r = rhs[i * kWarpgroup];
    const std::uint32_t words[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int at = 8 * i + 2 * w;
      const float2 b_at = unpack_half(words[w]);
      const float of_u = of_row(a, w % 2), of_b = of_row(q, w % 2);
      u2[at] = t_at(at) * u2[at] + (of_u * u1[at] + of_b * b_at.x);
      u2[at + 1] = t_at(at) * u2[at + 1] + (of_u * u1[at + 1] + of_b * b_at.y);
    }
  }
}

/// One chunk's solve: what a thread keeps beside the iterates.
template <int D>
struct ChunkSolver {
  static constexpr int kBlock = kBlockColumns<D>;
  const char *h, *k;
  uint4* rhs;   // this thread's values of b in accumulator order: [D/16] of 16 bytes, kWarpgroup apart
  uint4* mask;  // and of m: [4]
  float t[2], inverse_t[2];

  __device__ __forceinline__ float t_at(int n) const { return t[n / 2 % 2]; }

  /// u2 ← ξ_i from u1 = ξ_{i-1} and u2 = ξ_{i-2}, all over their g.
  template <typename Weight>
  __device__ __forceinline__ void step(float (&u1)[D / 2], float (&u2)[D / 2], Weight a, Weight b, Weight q) const {
    const std::uint64_t keys = descriptor<kBlock>(k, kChunk), state = descriptor<kBlock>(h, D);
    std::uint32_t operand[D / 4];
#pragma unroll
    for (int i = 0; i < D / 4; ++i) operand[i] = pack_half(u1[2 * i], u1[2 * i + 1]);
    const float fill[2] = {of_row(b, 0) * inverse_t[0], of_row(b, 1) * inverse_t[1]};
#pragma unroll
    for (int i = 0; i < D / 2; ++i) u2[i] *= fill[i / 2 % 2];
    float scores[32];
    hold(u2);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < D / 16; ++s) {
      mma<false, true>(scores, operand + 4 * s, k_major_step<kBlock>(keys, s, kChunk), s > 0);
    }
    wgmma_commit();
#pragma unroll
    for (int s = 0; s < D / 16; ++s) mma<false, true>(u2, operand + 4 * s, k_major_step<kBlock>(state, s, D));
    wgmma_commit();
    wgmma_wait<1>();
    hold(scores);
    std::uint32_t masked[16];
    multiply_mask(scores, mask, masked);
    wgmma_wait<0>();
    hold(u2);
    add_iterate<D>(u2, u1, rhs, a, q, [&](int n) { return t_at(n); });
    hold(u2);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kChunk / 16; ++s) mma<true, true>(u2, masked + 4 * s, mn_major_step<kBlock>(keys, s));
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

  /// The same where tokens have schedules of their own; step 0 makes ξ_0.
  __device__ __forceinline__ void steps(float (&u1)[D / 2], float (&u2)[D / 2], RowSchedules& schedules, int i,
                                        int last, const SystemRows& rows, const Options& options) const {
    TokenSchedule(&row)[2] = schedules.row;
    const auto take = [&](float (&now)[D / 2], float (&next)[D / 2], const OfRows& q) {
      step(now, next, OfRows{row[0].a, row[1].a}, OfRows{row[0].b, row[1].b}, q);
    };
    const auto next_weights = [&] { return OfRows{row[0].next_weight(), row[1].next_weight()}; };
#pragma unroll 1
    for (; i < last; i += 2) {
      take(u1, u2, i == 0 ? starts_of(rows, options) : next_weights());
      take(u2, u1, next_weights());
    }
  }

  /// out ← H̃ u with u and the scores in two parts; `finish()` is called before the masked part is added.
  template <typename Mask, typename Finish>
  __device__ __forceinline__ void apply_exactly(const float (&u)[D / 2], float (&out)[D / 2], Mask&& exact_mask,
                                                Finish&& finish) const {
    const std::uint64_t keys = descriptor<kBlock>(k, kChunk), state = descriptor<kBlock>(h, D);
    float scores[32];
    {
      std::uint32_t operand[D / 4];
#pragma unroll
      for (int i = 0; i < D / 4; ++i) operand[i] = pack_half(u[2 * i], u[2 * i + 1]);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < D / 16; ++s) mma<false, true>(out, operand + 4 * s, k_major_step<kBlock>(state, s, D), s > 0);
#pragma unroll
      for (int s = 0; s < D / 16; ++s) {
        mma<false, true>(scores, operand + 4 * s, k_major_step<kBlock>(keys, s, kChunk), s > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < D / 4; ++i) operand[i] = pack_half_rest(u[2 * i], u[2 * i + 1], operand[i]);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < D / 16; ++s) mma<false, true>(scores, operand + 4 * s, k_major_step<kBlock>(keys, s, kChunk));
#pragma unroll
      for (int s = 0; s < D / 16; ++s) mma<false, true>(out, operand + 4 * s, k_major_step<kBlock>(state, s, D));
      wgmma_commit();
      wgmma_wait<0>();
      hold(out);
      hold(scores);
    }
    std::uint32_t masked[16], rest[16];
    multiply_exact_mask(scores, exact_mask, masked, rest);
    finish();
    hold(out);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kChunk / 16; ++s) {
      mma<true, true>(out, masked + 4 * s, mn_major_step<kBlock>(keys, s));
      mma<true, true>(out, rest + 4 * s, mn_major_step<kBlock>(keys, s));
    }
    wgmma_commit();
    wgmma_wait<0>();
    hold(out);
  }
};

/// A thread's numbers in global memory, in accumulator order, kWarpgroup apart: ξ at the last residual, then the
/// iterate before less that, then the right-hand side that was given.
template <int D>
struct Parked {
  float4 *x, *before;
  uint4* rhs;

  __device__ __forceinline__ explicit Parked(float4* of_group, int own = thread())
      : x(of_group + own), before(x + D / 8 * kWarpgroup), rhs(reinterpret_cast<uint4*>(before + D / 8 * kWarpgroup)) {}
};

/// ξ_0 = start · b in u1, nothing in u2; of refined chunks b is needed again.
template <int D, typename Rhs, typename Weight>
__device__ __forceinline__ void start_iterates(float (&u1)[D / 2], float (&u2)[D / 2], const Rhs& rhs, Weight start,
                                               bool refined, const Parked<D>& parked) {
#pragma unroll
  for (int n = 0; n < D / 2; n += 8) {
    const uint4 words = rhs[n / 8 * kWarpgroup];
    const float2 b[4] = {unpack_half(words.x), unpack_half(words.y), unpack_half(words.z), unpack_half(words.w)};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float by = of_row(start, w % 2);
      u1[n + 2 * w] = by * b[w].x, u1[n + 2 * w + 1] = by * b[w].y;
    }
    if (refined) parked.rhs[n / 8 * kWarpgroup] = words;
  }
#pragma unroll
  for (int n = 0; n < D / 2; ++n) u2[n] = 0;
}

/// m is times the pace of L = 1: for a schedule with another.
__device__ __forceinline__ void speed_up(uint4* mask, const Schedule& schedule) {
  const std::uint32_t faster = pack_half(schedule.faster, schedule.faster);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const uint4 m = mask[n * kWarpgroup];
    mask[n * kWarpgroup] = {multiply_half(m.x, faster), multiply_half(m.y, faster), multiply_half(m.z, faster),
                            multiply_half(m.w, faster)};
  }
  publish();  // a bulk copy will write there
}

/// Adds what the stage has come to to ξ, in u1, and parks it and the iterate before.
template <int D, typename At>
__device__ __forceinline__ void park_iterates(float (&u1)[D / 2], float (&u2)[D / 2], const At& at, int stage,
                                              const Parked<D>& parked) {
#pragma unroll
  for (int n = 0; n < D / 2; n += 4) {
    float now[4], before[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      now[e] = of_row(at.grown, e / 2) * u1[n + e];
      before[e] = of_row(at.grown_before, e / 2) * u2[n + e] - now[e];
    }
    parked.before[n / 4 * kWarpgroup] = {before[0], before[1], before[2], before[3]};
    if (stage > 0) {
      const float4 then = parked.x[n / 4 * kWarpgroup];
      now[0] += then.x, now[1] += then.y, now[2] += then.z, now[3] += then.w;
    }
    parked.x[n / 4 * kWarpgroup] = {now[0], now[1], now[2], now[3]};
#pragma unroll
    for (int e = 0; e < 4; ++e) u1[n + e] = now[e];
  }
}

/// u2 ← −(b − (H̃ + a) u1), times pace.
template <int D, typename Solver, typename Paces>
__device__ __forceinline__ void find_residual(const Solver& solver, float (&u1)[D / 2], float (&u2)[D / 2],
                                              const Paces& schedule, const SystemRows& rows, const SolveCall& call,
                                              std::int64_t head, int dim, bool rhs_pairs, const Parked<D>& parked) {
  const auto exact_mask = [&](int n) { return mask_at(rows.row, rows.column, rows.from, n); };
  solver.apply_exactly(u1, u2, exact_mask, [&] {
    const auto by = negative(schedule.pace);
    const auto add = [&](int n, const float2& b) {
      const float t = solver.t_at(n);
      u2[n] = t * u2[n] + (of_row(schedule.ridge, n / 2 % 2) * u1[n] + of_row(by, n / 2 % 2) * b.x);
      u2[n + 1] = t * u2[n + 1] + (of_row(schedule.ridge, n / 2 % 2) * u1[n + 1] + of_row(by, n / 2 % 2) * b.y);
    };
    if (call.rhs.dtype == DType::float32) {  // as it came, not as float16
      const float scale[2] = {1 / rows.unscale[own_row()], 1 / rows.unscale[own_row() + 8]};
      each_of_rhs<D>(call.rhs, rows.chunk, head, dim, rhs_pairs,
                     [&](int n, const float2& b) { add(n, {scale[n / 2 % 2] * b.x, scale[n / 2 % 2] * b.y}); });
    } else {
#pragma unroll
      for (int n = 0; n < D / 2; n += 8) {
        const uint4 r = parked.rhs[n / 8 * kWarpgroup];
        add(n, unpack_half(r.x)), add(n + 2, unpack_half(r.y));
        add(n + 4, unpack_half(r.z)), add(n + 6, unpack_half(r.w));
      }
    }
  });
}

/// The residual becomes the right-hand side, and the step without a product the first iterate of the next stage.
template <int D, typename Paces, typename At, typename Rhs>
__device__ __forceinline__ void start_stage(float (&u1)[D / 2], float (&u2)[D / 2], const Paces& schedule, const At& at,
                                            Rhs&& rhs, const Parked<D>& parked) {
#pragma unroll
  for (int n = 0; n < D / 2; n += 8) {
    const float4 rest[2] = {parked.before[n / 4 * kWarpgroup], parked.before[(n / 4 + 1) * kWarpgroup]};
    std::uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int m = n + 2 * w;
      const float first = -of_row(schedule.inverse_pace, w % 2) * u2[m];
      const float second = -of_row(schedule.inverse_pace, w % 2) * u2[m + 1];
      const float4& e = rest[w / 2];
      u1[m] = of_row(at.e_weight, w % 2) * (w % 2 == 0 ? e.x : e.z) + of_row(at.r_weight, w % 2) * first;
      u1[m + 1] = of_row(at.e_weight, w % 2) * (w % 2 == 0 ? e.y : e.w) + of_row(at.r_weight, w % 2) * second;
      u2[m] = u2[m + 1] = 0;
      words[w] = pack_half(first, second);
    }
    rhs[n / 8 * kWarpgroup] = {words[0], words[1], words[2], words[3]};
  }
  publish();  // a bulk copy will write there
}

/// x from the last stage's iterate, in its own scale; 0 and NaN stand for tokens without an answer.
template <int D, typename Weight>
__device__ __forceinline__ void finish_x(float (&u1)[D / 2], const float (&unscale)[2], const Weight& grown_last,
                                         const SystemRows& rows, bool refined, const Parked<D>& parked) {
  float factor[2], nothing[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float by = rows.factor[own_row() + 8 * i];
    factor[i] = by > 0 ? by * unscale[i] * of_row(grown_last, i) : 0;
    nothing[i] = by > 0 ? 0 : by;
  }
  if (refined) {
    const float once = 1 / of_row(grown_last, 0), below = 1 / of_row(grown_last, 1);
#pragma unroll
    for (int n = 0; n < D / 2; n += 4) {
      const float4 then = parked.x[n / 4 * kWarpgroup];
      u1[n] += once * then.x, u1[n + 1] += once * then.y, u1[n + 2] += below * then.z, u1[n + 3] += below * then.w;
    }
  }
#pragma unroll
  for (int n = 0; n < D / 2; ++n) u1[n] = u1[n] * factor[n / 2 % 2] + nothing[n / 2 % 2];
}

/// body(at, half, q): the numbers `at` and `at + 1` of this thread's part of the queries, which are of its row `half`.
template <int D, typename Body>
__device__ __forceinline__ void each_of_query(const uint4* query, Body&& body) {
#pragma unroll
  for (int n = 0; n < D / 2; n += 8) {
    const uint4 words = query[n / 8 * kWarpgroup];
    const std::uint32_t of_q[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) body(n + 2 * w, w % 2, unpack_half(of_q[w]));
  }
}

/// What a row comes to where a warpgroup has all of it.
struct WholeRow {
  __device__ __forceinline__ float operator()(int, float value) const { return value; }
};

/// 1 − q·ρx̃/‖q‖² of this thread's rows, `to` those of the chunk's tokens, `heads` apart. sum(row, …): over all who have
/// a part of the row.
template <int D, typename Weight, typename Sum = WholeRow>
__device__ __forceinline__ void write_certainty(const float (&u1)[D / 2], const SystemRows& rows, const uint4* query,
                                                Weight ridge, double* to, std::int64_t heads, Sum&& sum = {}) {
  float dots[2] = {0, 0}, squares[2] = {0, 0};
  each_of_query<D>(query, [&](int at, int half, float2 q) {
    dots[half] += q.x * u1[at] + q.y * u1[at + 1];
    squares[half] += q.x * q.x + q.y * q.y;
  });
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int c = own_row() + 8 * i;
    const float by = rows.factor[c], dot = sum(c, add_quad(dots[i]));
    const float square = sum(c, add_quad(squares[i])) * rows.unscale[c];
    if (lane() % 4 == 0 && c < rows.chunk.length) {
      to[c * heads] =
          by != by ? by : certainty_of(by, of_row(ridge, i) * static_cast<double>(dot), static_cast<double>(square));
    }
  }
}

/// z = q + α (x − q) in place of x; `top` gets the largest number of this thread's part of either row.
template <int D>
__device__ __forceinline__ void mix_with_query(float (&u1)[D / 2], float (&top)[2], const float (&unscale)[2],
                                               const SystemRows& rows, const uint4* query) {
  const float mix[2] = {rows.alpha[own_row()], rows.alpha[own_row() + 8]};
  const float by[2] = {mix[0] * rows.inverse_norm[own_row()], mix[1] * rows.inverse_norm[own_row() + 8]};
  const float rest[2] = {(1 - mix[0]) * unscale[0], (1 - mix[1]) * unscale[1]};
  each_of_query<D>(query, [&](int at, int half, float2 q) {
    u1[at] = rest[half] * q.x + by[half] * u1[at];
    u1[at + 1] = rest[half] * q.y + by[half] * u1[at + 1];
    top[half] = fmaxf(top[half], fmaxf(fabsf(u1[at]), fabsf(u1[at + 1])));
  });
}

/// z as `chunk_o` reads it: D of its kWhole columns, from `first` on.
template <int D, int kWhole = D>
__device__ __forceinline__ void store_z(const float (&u1)[D / 2], const float (&top)[2], bool refined,
                                        const SolveCall& call, std::int64_t task, int first = 0, int own = thread()) {
  float scale[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const RowScale row = scale_of(top[i]);
    scale[i] = row.scale;
    if (lane() % 4 == 0) call.z_scale[task * kChunk + own_row() + 8 * i] = row.unscale;
  }
  uint4* const z = call.z + task * (kWhole / 8) * kWarpgroup + first / 16 * kWarpgroup + own;
#pragma unroll
  for (int n = 0; n < D / 2; n += 8) {
    std::uint32_t words[4], rest_words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float a = u1[n + 2 * w] * scale[w % 2], b = u1[n + 2 * w + 1] * scale[w % 2];
      words[w] = pack_half(a, b);
      rest_words[w] = pack_half_rest(a, b, words[w]);
    }
    z[n / 8 * kWarpgroup] = {words[0], words[1], words[2], words[3]};
    if (refined) {
      z[(n / 8 + kWhole / 16) * kWarpgroup] = {rest_words[0], rest_words[1], rest_words[2], rest_words[3]};
    }
  }
}

/// The schedule of a chunk, or those of a thread's two rows; and below what of it a chunk's solve asks for.
template <bool kConstant>
__device__ __forceinline__ decltype(auto) schedule_of(const Schedule& of_chunk, const SystemRows& rows,
                                                      const Options& options) {
  if constexpr (kConstant) {
    return RowSchedules(rho_of(rows, options));
  } else {
    return (of_chunk);
  }
}
template <bool kConstant>
__device__ __forceinline__ decltype(auto) paces_of(const Schedule& of_chunk, const SystemRows& rows,
                                                   const Options& options) {
  if constexpr (kConstant) {
    return RowPaces(rho_of(rows, options));
  } else {
    return (of_chunk);
  }
}
/// The weights behind the residual that ends a stage.
template <bool kConstant, typename Of>
__device__ __forceinline__ decltype(auto) restart_of(Of& schedule, const Stages& stages, int stage,
                                                     const SystemRows& rows, const Options& options) {
  if constexpr (kConstant) {
    return schedule.restart(rho_of(rows, options));
  } else {
    return (stages.residual[stage]);
  }
}

/// Longer than most: which buffer may be asked for again follows from the order of its barriers, which one has to see
/// together.
template <int D, DType kType, bool kReads, bool kConstant>
__global__ void __launch_bounds__(kWarpgroup, by_size<D>(4, 3, 2))
    solve(const __grid_constant__ Problem p, Plan plan, ChunkStates states, const __grid_constant__ SolveCall call,
          const __grid_constant__ Schedules schedules, const char* systems, float4* parked, bool rhs_pairs) {
  __shared__ std::uint64_t arrived[4];  // barriers: of the two state buffers, of keys and mask, of the rest
  char* const tiles = aligned_tiles();
  constexpr int kState = D * D * 2, kRoom = kStateRoom<D>;
  char* const k = tiles + 2 * kRoom;
  auto* const mask = reinterpret_cast<uint4*>(k + SystemLayout<D>::kMask) + thread();
  auto* const rhs = reinterpret_cast<uint4*>(k + SystemLayout<D>::kRhs) + thread();
  const auto& rows = *reinterpret_cast<const SystemRows*>(k + SystemLayout<D>::kRows);
  const Parked<D> own(parked + block() * kParked<D>);
  const std::int64_t tasks = 2 * plan.count(p) * p.heads;
  const auto request_state = [&](std::int64_t of, int which) {
    bulk_load(tiles + which * kRoom, states.tile<D>(of), kState, &arrived[which]);
  };
  const auto request_keys = [&](std::int64_t of) {
    bulk_load(k, systems + of * SystemLayout<D>::kBytes, SystemLayout<D>::kRhs, &arrived[2]);
  };
  const auto request_rows = [&](std::int64_t of) {
    constexpr int kFrom = SystemLayout<D>::kRhs;
    bulk_load(k + kFrom, systems + of * SystemLayout<D>::kBytes + kFrom, SystemLayout<D>::kBytes - kFrom, &arrived[3]);
  };
  std::int64_t task = block();
  if (thread() == 0) {
    for (std::uint64_t& barrier : arrived) barrier_init(&barrier);
    barrier_fence();
    if (task < tasks) request_state(task, 0), request_keys(task), request_rows(task);
  }
  sync();
  // A chunk's state lies in buffer `turn`; the next one's is asked for when a chunk begins, keys and mask when its
  // products are done, right-hand side and rows when its answer has been made: each after a barrier behind which
  // every thread has seen what lay there arrive, and nobody reads it any more.
  int turn = 0, phase[2] = {0, 0}, phase_system = 0;
  while (task < tasks) {
    if (thread() == 0 && task + blocks() < tasks) {
      if constexpr (!kReads) bulk_store_wait();  // of the tile that was put together there
      request_state(task + blocks(), 1 - turn);
    }
    ChunkSolver<D> solver{.h = tiles + turn * kRoom, .k = k, .rhs = rhs, .mask = mask};
    barrier_wait(&arrived[3], phase_system);
    const bool empty = rows.chunk.length <= 0, refined = !empty && rows.refined != 0;
    const int which = refined ? rows.refined : empty || kConstant ? 0 : rows.schedule;
    auto&& schedule = schedule_of<kConstant>(schedules.of[which], rows, p.options);
    const Stages& stages = schedules.stages[which == kEverywhere ? 1 : 0];
    int last = refined ? stages.last[0] : kConstant ? rows.schedule : schedules.of[which].last;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      solver.t[i] = rows.t[own_row() + 8 * i] * (kConstant ? 1 : schedules.of[which].faster);
      solver.inverse_t[i] = 1 / solver.t[i];
    }
    // Before an odd number of steps comes one that makes ξ_0 out of nothing.
    int i = last % 2 == 0 ? 1 : 0, stage = 0;
    float u1[D / 2], u2[D / 2];
    if constexpr (kConstant) {
      start_iterates<D>(u1, u2, rhs, i == 0 ? OfRows{} : starts_of(rows, p.options), refined, own);
    } else {
      const float start = i == 0 ? 0 : schedule.start;
      start_iterates<D>(u1, u2, rhs, start, refined, own);
    }
    barrier_wait(&arrived[2], phase_system);
    phase_system ^= 1;
    if (!kConstant && which >= kFirstReach) speed_up(mask, schedules.of[which]);
    barrier_wait(&arrived[turn], phase[turn]);
    phase[turn] ^= 1;
#pragma unroll 1
    while (!empty) {
      if constexpr (kConstant) {
        solver.steps(u1, u2, schedule, i, last, rows, p.options);
      } else {
        solver.steps(u1, u2, schedule, i, last);
      }
      if (!refined || stage == stages.count - 1) break;
      auto&& at = restart_of<kConstant>(schedule, stages, stage, rows, p.options);
      i = last + 2;
      park_iterates<D>(u1, u2, at, stage, own);
      last = stages.last[++stage];
      find_residual<D>(solver, u1, u2, paces_of<kConstant>(schedules.of[which], rows, p.options), rows, call,
                       task % p.heads, static_cast<int>(p.key_dim), rhs_pairs, own);
      start_stage<D>(u1, u2, paces_of<kConstant>(schedules.of[which], rows, p.options), at, rhs, own);
    }
    const std::int64_t next = task + blocks();
    sync();  // nobody reads the keys any more
    if (thread() == 0 && next < tasks) request_keys(next);
    const float unscale[2] = {rows.unscale[own_row()], rows.unscale[own_row() + 8]};
    if constexpr (kConstant) {
      finish_x<D>(u1, unscale, schedule.grown(rho_of(rows, p.options)), rows, refined, own);
    } else {
      finish_x<D>(u1, unscale, schedule.grown_last, rows, refined, own);
    }
    if (kReads ? call.x != nullptr : refined) {
      each_of_x<D>(p, rows.chunk, task % p.heads, [&](auto pairs, int n, std::int64_t at, bool one, bool two) {
        if (one) store_pair<decltype(pairs)::value>(call.x + at, u1[n], u1[n + 1], two);
      });
    }
    if constexpr (kReads) {
      if (call.certainty != nullptr && !empty) {
        const std::int64_t first = (rows.chunk.batch * p.tokens + rows.chunk.begin) * p.heads + task % p.heads;
        double* const to = call.certainty + first;
        if constexpr (kConstant) {
          write_certainty<D>(u1, rows, refined ? own.rhs : rhs, rho_of(rows, p.options), to, p.heads);
        } else {
          write_certainty<D>(u1, rows, refined ? own.rhs : rhs, p.options.ridge, to, p.heads);
        }
      }
      float top[2] = {0, 0};
      mix_with_query<D>(u1, top, unscale, rows, refined ? own.rhs : rhs);
      sync();  // nobody reads the rows any more
      if (thread() == 0 && next < tasks) request_rows(next);
      store_z<D>(u1, top, refined, call, task);
    } else {
      const bool tiled = !empty && !refined;
      char* const tile = tiles + turn * kRoom;  // its last product is behind a barrier
      if (tiled) {
        store_tile<D>(tile, call.tile_down + task * kChunk, u1, static_cast<int>(rows.chunk.length));
        publish();
      }
      sync();  // nobody reads the rows any more
      if (thread() == 0 && next < tasks) request_rows(next);
      if (thread() == 0 && tiled) bulk_store(call.tiles + task * kChunk * D * 2, tile, kChunk * D * 2);
    }
    task = next;
    turn = 1 - turn;
  }
  if (!kReads && thread() == 0) bulk_store_finish();
}

}  // namespace gka::kernels::cuda::hopper
