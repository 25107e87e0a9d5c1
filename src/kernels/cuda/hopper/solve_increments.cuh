// On trial (`increments`): the solve of solve.cuh with no residuals and no rounded iterates, as exact in plain steps as
// that one is in refined chunks. A step adds δ_i to ξ and takes H̃δ_i from what is left:
//
//   δ_i = m_i δ_{i-1} + s_i (g − aξ),   ξ ← ξ + δ_i,   g ← g − H̃δ_i,   at first ξ = δ_0 = s_0 b, g = b − H̃δ_0.
//
// Why this is exact although products have float16 operands: δ_i *is* a float16. ξ adds up the very numbers that were
// multiplied, so g is b − H̃ξ whatever was rounded on the way to δ_i; that only makes another, as good, δ_i. Where an
// iterate is the operand, its rounding is as large as the iterate, which across the keys is 1/a times what is read.
// Here it is as large as a step, and no error at all.
//
// - What is rounded besides are the masked scores. What a score loses is added to that of the next step, so that the
//   sum of all lacks what the last one lost. The mask is float32.
// - Where steps end before they converge (chunks that solve.cuh gives a residual before every step) the next step comes
//   too late, and ξ depends on the weights themselves: there scores have two parts, and m and s are not rounded.
// - g is the accumulator of all products: it is divided by t before the state's and multiplied by it after them. It has
//   the pace c in it, as t and the mask have (schedule.h): g = c (b − H̃ξ), ca and s_i/c are what is multiplied with.
// - δ is kept negative, so that products add to g, and packed: two of them are one multiplication. ξ takes it in while
//   products are under way.
// - H itself stays rounded, as in solve.cuh.
//
// With `conjugate` on trial, steps that would converge are those of conjugate gradients (ConjugateSolver).
#pragma once

#include "kernels/cuda/hopper/solve.cuh"

namespace gka::kernels::cuda::hopper {

__device__ __forceinline__ std::uint32_t both_halves(float x) { return pack_half(x, x); }

/// m as the solve's threads hold scores, in float32: of eight columns at a time this thread's four numbers. Rows of
/// warp w see 16 (w + 1) columns, so that of 8 × 4 such groups 20 are there.
struct ExactMask {
  static constexpr int kGroups = 20, kBytes = kGroups * 32 * static_cast<int>(sizeof(float4));
  float4* of_lane;
  int groups;

  __device__ __forceinline__ explicit ExactMask(char* room) {
    const int warp = thread() / 32;
    of_lane = reinterpret_cast<float4*>(room) + warp * (warp + 1) * 32 + lane();
    groups = 2 * (warp + 1);
  }
  __device__ __forceinline__ void fill(const SystemRows& rows) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= groups) break;
      const float2 upper = mask_at(rows.row, rows.column, rows.from, 4 * i);
      const float2 lower = mask_at(rows.row, rows.column, rows.from, 4 * i + 2);
      of_lane[i * 32] = {upper.x, upper.y, lower.x, lower.y};
    }
  }
  __device__ __forceinline__ float4 group(int i) const { return i < groups ? of_lane[i * 32] : float4{0, 0, 0, 0}; }
};

/// Two states, keys, right-hand side and rows of a system, whose own mask is not asked for, and the exact one.
template <int D>
struct IncrementsLayout {
  static constexpr int kKeys = 2 * kStateRoom<D>, kRhs = kKeys + SystemLayout<D>::kMask;
  static constexpr int kRest = SystemLayout<D>::kBytes - SystemLayout<D>::kRhs;
  static constexpr int kRows = kRhs + SystemLayout<D>::kRows - SystemLayout<D>::kRhs, kMask = kRhs + kRest;
  static constexpr int kBytes = 1024 + kMask + ExactMask::kBytes;
};

/// Masked scores in two float16 parts.
__device__ __forceinline__ void mask_in_parts(const float (&scores)[32], const ExactMask& mask,
                                              std::uint32_t (&masked)[16], std::uint32_t (&rest)[16]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 m = mask.group(i);
    const auto round = [&](int at, float first_m, float second_m) {
      const float first = first_m * scores[2 * at], second = second_m * scores[2 * at + 1];
      masked[at] = pack_half(first, second);
      rest[at] = pack_half_rest(first, second, masked[at]);
    };
    round(2 * i, m.x, m.y);
    round(2 * i + 1, m.z, m.w);
  }
}

/// One chunk's solve, of which a thread holds two rows.
template <int D>
struct IncrementSolver {
  static constexpr int kBlock = kBlockColumns<D>;
  static constexpr bool kTakesRhsRoom = false;
  const char *h, *k;
  ExactMask mask;
  uint4* room;  // of this thread's numbers of the right-hand side
  float t[2];
  float inverse_t[2];
  float xi[D / 2], g[D / 2];
  std::uint32_t delta[D / 4];  // −δ
  std::uint32_t lost[16];      // by the masked scores so far, as bfloat16

  __device__ __forceinline__ float (&answers()) [D / 2] { return xi; }

  /// ξ = 0 and δ_0 = start · b, b(n): numbers n and n + 1 of this thread's part.
  template <typename Weight, typename Rhs>
  __device__ __forceinline__ void begin(const Weight& start, const Weight& pace, Rhs&& b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) inverse_t[i] = 1 / t[i];
#pragma unroll
    for (int n = 0; n < D / 2; n += 2) {
      const float2 at = b(n);
      const float down = -of_row(start, n / 2 % 2), by = of_row(pace, n / 2 % 2);
      delta[n / 2] = pack_half(down * at.x, down * at.y);
      g[n] = by * at.x, g[n + 1] = by * at.y;
      xi[n] = xi[n + 1] = 0;
    }
#pragma unroll
    for (std::uint32_t& of : lost) of = 0;
  }

  __device__ __forceinline__ void take_in_delta() {
#pragma unroll
    for (int n = 0; n < D / 4; ++n) {
      const float2 down = unpack_half(delta[n]);
      xi[2 * n] -= down.x, xi[2 * n + 1] -= down.y;
    }
  }

  /// Masked scores in float16, with what those before them lost and `lost` what they lose.
  __device__ __forceinline__ void mask_scores(const float (&scores)[32], std::uint32_t (&masked)[16]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 m = mask.group(i);
      const auto round = [&](int at, float first_m, float second_m) {
        const float first = first_m * scores[2 * at] + low(lost[at]);
        const float second = second_m * scores[2 * at + 1] + high(lost[at]);
        masked[at] = pack_half(first, second);
        const float2 kept = unpack_half(masked[at]);
        lost[at] = pack(first - kept.x, second - kept.y);
      };
      round(2 * i, m.x, m.y);
      round(2 * i + 1, m.z, m.w);
    }
  }
  /// The δ that follows, in float32 up to the last rounding.
  template <typename Weight>
  __device__ __forceinline__ void next_delta_exactly(const Weight& m, const Weight& s, const Weight& ridge) {
#pragma unroll
    for (int n = 0; n < D / 4; ++n) {
      const float of_delta = of_row(m, n % 2), of_rest = of_row(s, n % 2), of = of_row(ridge, n % 2);
      const float2 down = unpack_half(delta[n]);
      delta[n] = pack_half(of_delta * down.x + of_rest * (of * xi[2 * n] - g[2 * n]),
                           of_delta * down.y + of_rest * (of * xi[2 * n + 1] - g[2 * n + 1]));
    }
  }

  /// ξ and g with δ, and the δ that follows it: m times it and s (of g's scale) times what is left. `ridge`: ca.
  template <bool kToTheEnd, typename Weight>
  __device__ __forceinline__ void step(const Weight& m, const Weight& s, const Weight& ridge) {
    const std::uint64_t keys = descriptor<kBlock>(k, kChunk), state = descriptor<kBlock>(h, D);
#pragma unroll
    for (int n = 0; n < D / 2; ++n) g[n] *= inverse_t[n / 2 % 2];
    float scores[32];
    hold(g);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      mma<false, true>(scores, delta + 4 * i, k_major_step<kBlock>(keys, i, kChunk), i > 0);
    }
    wgmma_commit();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) mma<false, true>(g, delta + 4 * i, k_major_step<kBlock>(state, i, D));
    wgmma_commit();
    take_in_delta();
    wgmma_wait<1>();
    hold(scores);
    std::uint32_t masked[16], rest[kToTheEnd ? 16 : 1];
    if constexpr (kToTheEnd) {
      mask_in_parts(scores, mask, masked, rest);
    } else {
      mask_scores(scores, masked);
    }
    wgmma_wait<0>();
    hold(g);
#pragma unroll
    for (int n = 0; n < D / 2; ++n) g[n] *= t[n / 2 % 2];
    hold(g);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      mma<true, true>(g, masked + 4 * i, mn_major_step<kBlock>(keys, i));
      if constexpr (kToTheEnd) mma<true, true>(g, rest + 4 * i, mn_major_step<kBlock>(keys, i));
    }
    wgmma_commit();
    if constexpr (kToTheEnd) {
      wgmma_wait<0>();
      hold(g);
      next_delta_exactly(m, s, ridge);
    } else {
      const std::uint32_t both_m[2] = {both_halves(of_row(m, 0)), both_halves(of_row(m, 1))};
      const std::uint32_t both_s[2] = {both_halves(of_row(s, 0)), both_halves(of_row(s, 1))};
#pragma unroll
      for (int n = 0; n < D / 4; ++n) delta[n] = multiply_half(delta[n], both_m[n % 2]);
      wgmma_wait<0>();
      hold(g);
#pragma unroll
      for (int n = 0; n < D / 4; ++n) {
        const float of = of_row(ridge, n % 2);
        const std::uint32_t left = pack_half(of * xi[2 * n] - g[2 * n], of * xi[2 * n + 1] - g[2 * n + 1]);
        delta[n] = multiply_add_half(both_s[n % 2], left, delta[n]);
      }
    }
  }

  template <bool kToTheEnd>
  __device__ __forceinline__ void steps_of(const Increments& of, float ridge) {
#pragma unroll 1
    for (int i = 1; i <= of.last; ++i) step<kToTheEnd>(of.m[i], of.s[i], ridge);
    take_in_delta();
  }
  __device__ __forceinline__ void steps(const Increments& of, float ridge, bool to_the_end) {
    to_the_end ? steps_of<true>(of, ridge) : steps_of<false>(of, ridge);
  }
  /// The same where tokens have schedules of their own.
  template <bool kToTheEnd>
  __device__ __forceinline__ void steps_of(const OfRows& rho, int last) {
    RowSchedules of(rho);
    const RowPaces paces(rho);
#pragma unroll 1
    for (int i = 1; i <= last; ++i) {
      const TokenWeights one = of.row[0].next_increment(), two = of.row[1].next_increment();
      step<kToTheEnd>(OfRows{one.m, two.m}, OfRows{one.s, two.s}, paces.ridge);
    }
    take_in_delta();
  }
  __device__ __forceinline__ void steps(const OfRows& rho, int last, bool to_the_end) {
    to_the_end ? steps_of<true>(rho, last) : steps_of<false>(rho, last);
  }
};

/// Conjugate gradients by the same trick: p is a float16, so that what g loses is what ξ gains. A step has a length for
/// each row, found from its products, so nothing is known of a spectrum but its lower end; where few keys are left, and
/// behind right-hand sides that lie along the keys, half as many steps do.
///
///   α = |r|²/(p·A p),  ξ ← ξ + αp,  g ← g − αH̃p,  r = g − aξ,  β = |r|²/|r before|²,  p ← r + βp,  p = r = b at first.
///
/// - p has lost some of its conjugacy to rounding, which costs steps and no exactness. The first p is b itself, as
///   queries are float16 numbers: where few keys are left, what lies across them is then solved by that step alone.
/// - Scores' losses cannot be handed on here, as α is not known before them. Where few keys are left they show in steps
///   that are long, which are the first: of chunks that solve.cuh refines `kExactSteps` have scores in two parts.
/// - A row whose residual is nothing takes no more steps, as its β would be noise; and one whose residual is small none
///   beyond `least`. So its bits do not depend on how long other rows go on. NaN is nothing.
/// - With 128 channels half of ξ lies in shared memory, where this thread's part of the right-hand side came.
template <int D>
struct ConjugateSolver {
  static constexpr int kBlock = kBlockColumns<D>, kExactSteps = 3;
  static constexpr bool kTakesRhsRoom = D > kSmallSize;
  static constexpr int kHeld = kTakesRhsRoom ? D / 4 : D / 2;
  const char *h, *k;
  ExactMask mask;
  uint4* room;
  const float* t;  // of the rows
  float xi[kHeld], g[D / 2];
  std::uint32_t p[D / 4];
  float square[2];  // |r|²
  bool goes_on[2];

  __device__ __forceinline__ float4* parked(int n) const {
    return reinterpret_cast<float4*>(room) + (n - kHeld) / 4 * kWarpgroup;
  }

  template <typename Weight, typename Rhs>
  __device__ __forceinline__ void begin(const Weight&, const Weight&, Rhs&& b) {
    square[0] = square[1] = 0;
#pragma unroll
    for (int n = 0; n < D / 2; n += 2) {
      const float2 at = b(n);
      g[n] = at.x, g[n + 1] = at.y;
      p[n / 2] = pack_half(g[n], g[n + 1]);
      square[n / 2 % 2] += g[n] * g[n] + g[n + 1] * g[n + 1];
    }
#pragma unroll
    for (int n = 0; n < kHeld; ++n) xi[n] = 0;
#pragma unroll
    for (int n = kHeld; n < D / 2; n += 4) *parked(n) = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) square[i] = add_quad(square[i]), goes_on[i] = true;
  }

  /// Products come times the pace.
  template <bool kTwoParts>
  __device__ __forceinline__ void step(const ConjugateLimits& limits) {
    const std::uint64_t keys = descriptor<kBlock>(k, kChunk), state = descriptor<kBlock>(h, D);
    float scores[32], w[D / 2];  // w: cH̃p
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      mma<false, true>(scores, p + 4 * i, k_major_step<kBlock>(keys, i, kChunk), i > 0);
    }
    wgmma_commit();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) mma<false, true>(w, p + 4 * i, k_major_step<kBlock>(state, i, D), i > 0);
    wgmma_commit();
    float below[2] = {0, 0};  // p·A p, of which p·ap is found here
#pragma unroll
    for (int n = 0; n < D / 4; ++n) {
      const float2 at = unpack_half(p[n]);
      below[n % 2] += at.x * at.x + at.y * at.y;
    }
    wgmma_wait<1>();
    hold(scores);
    std::uint32_t masked[16], rest[kTwoParts ? 16 : 1];
    if constexpr (kTwoParts) {
      mask_in_parts(scores, mask, masked, rest);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 m = mask.group(i);
        masked[2 * i] = pack_half(m.x * scores[4 * i], m.y * scores[4 * i + 1]);
        masked[2 * i + 1] = pack_half(m.z * scores[4 * i + 2], m.w * scores[4 * i + 3]);
      }
    }
    wgmma_wait<0>();
    hold(w);
    const float own_t[2] = {t[own_row()], t[own_row() + 8]};
#pragma unroll
    for (int n = 0; n < D / 2; ++n) w[n] *= own_t[n / 2 % 2];
    hold(w);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      mma<true, true>(w, masked + 4 * i, mn_major_step<kBlock>(keys, i));
      if constexpr (kTwoParts) mma<true, true>(w, rest + 4 * i, mn_major_step<kBlock>(keys, i));
    }
    wgmma_commit();
    below[0] *= limits.ridge, below[1] *= limits.ridge;
    wgmma_wait<0>();
    hold(w);
    advance(w, below, limits);
  }

  /// From w and this thread's part of p·ap on.
  __device__ __forceinline__ void advance(float (&w)[D / 2], float (&below)[2], const ConjugateLimits& limits) {
    float of_w[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < D / 4; ++n) {
      const float2 at = unpack_half(p[n]);
      of_w[n % 2] += at.x * w[2 * n] + at.y * w[2 * n + 1];
    }
    float alpha[2], before[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      below[i] = add_quad(below[i] + limits.inverse_pace * of_w[i]);
      alpha[i] = goes_on[i] && below[i] > 1e-30f ? square[i] / below[i] : 0;
      of_w[i] = alpha[i] * limits.inverse_pace;
      before[i] = square[i], square[i] = 0;
    }
#pragma unroll
    for (int n = 0; n < D / 2; n += 4) {
      const float2 upper = unpack_half(p[n / 2]), lower = unpack_half(p[n / 2 + 1]);
      float at[4] = {alpha[0] * upper.x, alpha[0] * upper.y, alpha[1] * lower.x, alpha[1] * lower.y};
      if constexpr (kTakesRhsRoom) {
        if (n >= kHeld) {
          float4* const then = parked(n);
          at[0] += then->x, at[1] += then->y, at[2] += then->z, at[3] += then->w;
          *then = {at[0], at[1], at[2], at[3]};
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (n < kHeld) at[e] = xi[n + e] += at[e];
        g[n + e] -= of_w[e / 2] * w[n + e];
        w[n + e] = g[n + e] - limits.ridge * at[e];
        square[e / 2] += w[n + e] * w[n + e];
      }
    }
    std::uint32_t beta[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      square[i] = add_quad(square[i]);
      beta[i] = both_halves(before[i] > 0 ? fminf(square[i] / before[i], limits.largest_beta) : 0);
    }
#pragma unroll
    for (int n = 0; n < D / 4; ++n) {
      p[n] = multiply_add_half(beta[n % 2], p[n], pack_half(w[2 * n], w[2 * n + 1]));
    }
  }

  /// Whether there is a row that takes step i.
  __device__ __forceinline__ bool go_on(const ConjugateLimits& limits, int i, const float (&whole)[2]) {
    const float enough = i < limits.least ? limits.nothing : limits.enough;
#pragma unroll
    for (int row = 0; row < 2; ++row) goes_on[row] = goes_on[row] && square[row] > enough * whole[row];
    return __syncthreads_or(goes_on[0] || goes_on[1]) != 0;
  }

  __device__ __forceinline__ void steps(const ConjugateLimits& limits, bool refined) {
    const float whole[2] = {square[0], square[1]};
    int i = 0;
#pragma unroll 1
    for (; refined && i < kExactSteps && go_on(limits, i, whole); ++i) step<true>(limits);
#pragma unroll 1
    for (; i < limits.most && go_on(limits, i, whole); ++i) step<false>(limits);
    gather();
  }

  /// ξ in place of g, NaN where b has one.
  __device__ __forceinline__ void gather() {
    const float nothing[2] = {square[0] - square[0], square[1] - square[1]};
#pragma unroll
    for (int n = 0; n < kHeld; ++n) g[n] = xi[n] + nothing[n / 2 % 2];
#pragma unroll
    for (int n = kHeld; n < D / 2; n += 4) {
      const float4 at = *parked(n);
      g[n] = at.x + nothing[0], g[n + 1] = at.y + nothing[0], g[n + 2] = at.z + nothing[1],
      g[n + 3] = at.w + nothing[1];
    }
  }
  __device__ __forceinline__ float (&answers()) [D / 2] { return g; }
};

/// The answers ξ times what they were divided by; 0 and NaN stand for tokens without one.
template <int D>
__device__ __forceinline__ void scale_answers(float (&xi)[D / 2], const float (&unscale)[2], const SystemRows& rows) {
  float factor[2], nothing[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float by = rows.factor[own_row() + 8 * i];
    factor[i] = by > 0 ? by * unscale[i] : 0;
    nothing[i] = by > 0 ? 0 : by;
  }
#pragma unroll
  for (int n = 0; n < D / 2; ++n) xi[n] = xi[n] * factor[n / 2 % 2] + nothing[n / 2 % 2];
}

/// Longer than most, as `solve` is and for the same reason: the order of its barriers.
template <int D, DType kType, bool kReads, bool kConstant, bool kConjugate>
__global__ void __launch_bounds__(kWarpgroup, by_size<D>(4, 3, 2))
    solve_increments(const __grid_constant__ Problem p, Plan plan, ChunkStates states,
                     const __grid_constant__ SolveCall call, const __grid_constant__ IncrementSchedules schedules,
                     const char* systems, bool rhs_pairs) {
  using Layout = IncrementsLayout<D>;
  using Solver = std::conditional_t<kConjugate, ConjugateSolver<D>, IncrementSolver<D>>;
  static_assert(!(kConjugate && kConstant));
  __shared__ std::uint64_t arrived[4];  // barriers: of the two state buffers, of keys, of the rest
  char* const tiles = aligned_tiles();
  constexpr int kState = D * D * 2, kRoom = kStateRoom<D>;
  auto* const rhs = reinterpret_cast<uint4*>(tiles + Layout::kRhs) + thread();
  const auto& rows = *reinterpret_cast<const SystemRows*>(tiles + Layout::kRows);
  const std::int64_t tasks = 2 * plan.count(p) * p.heads;
  const auto request_state = [&](std::int64_t of, int which) {
    bulk_load(tiles + which * kRoom, states.tile<D>(of), kState, &arrived[which]);
  };
  const auto request_keys = [&](std::int64_t of) {
    bulk_load(tiles + Layout::kKeys, systems + of * SystemLayout<D>::kBytes, SystemLayout<D>::kMask, &arrived[2]);
  };
  const auto request_rows = [&](std::int64_t of) {
    bulk_load(tiles + Layout::kRhs, systems + of * SystemLayout<D>::kBytes + SystemLayout<D>::kRhs, Layout::kRest,
              &arrived[3]);
  };
  std::int64_t task = block();
  if (thread() == 0) {
    for (std::uint64_t& barrier : arrived) barrier_init(&barrier);
    barrier_fence();
    if (task < tasks) request_state(task, 0), request_keys(task), request_rows(task);
  }
  sync();
  // A chunk's state lies in buffer `turn`; the next one's is asked for when a chunk begins, keys when its products are
  // done, right-hand side and rows when its answer has been made: each after a barrier behind which every thread has
  // seen what lay there arrive, and nobody reads it any more. The mask is every thread's own.
  int turn = 0, phase[2] = {0, 0}, phase_system = 0;
  while (task < tasks) {
    if (thread() == 0 && task + blocks() < tasks) {
      if constexpr (!kReads) bulk_store_wait();  // of the tile that was put together there
      request_state(task + blocks(), 1 - turn);
    }
    Solver solver{
        .h = tiles + turn * kRoom, .k = tiles + Layout::kKeys, .mask = ExactMask(tiles + Layout::kMask), .room = rhs};
    barrier_wait(&arrived[3], phase_system);
    const bool empty = rows.chunk.length <= 0, refined = !empty && rows.refined != 0;
    const std::int64_t head = task % p.heads;
    if constexpr (kConjugate) {
      solver.t = rows.t;
    } else {
      solver.t[0] = rows.t[own_row()], solver.t[1] = rows.t[own_row() + 8];
    }
    const auto begin = [&](const auto& start, const auto& pace) {
      if (!kReads && refined && call.rhs.dtype == DType::float32) {  // as it came, not as float16
        const float scale[2] = {1 / rows.unscale[own_row()], 1 / rows.unscale[own_row() + 8]};
        float b[D / 2];
        each_of_rhs<D>(
            call.rhs, rows.chunk, head, static_cast<int>(p.key_dim), rhs_pairs,
            [&](int n, const float2& at) { b[n] = scale[n / 2 % 2] * at.x, b[n + 1] = scale[n / 2 % 2] * at.y; });
        solver.begin(start, pace, [&](int n) { return float2{b[n], b[n + 1]}; });
      } else {
        solver.begin(start, pace, [&](int n) {
          const uint4 words = rhs[n / 8 * kWarpgroup];
          const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
          return unpack_half(word[n / 2 % 4]);
        });
      }
    };
    if (!empty) solver.mask.fill(rows);
    const int which = refined ? rows.refined : empty || kConstant ? 0 : rows.schedule;
    if constexpr (kConstant) {
      const RowPaces paces(rho_of(rows, p.options));
      begin(starts_of(rows, p.options), paces.pace);
    } else {
      begin(schedules.of[which].start, schedules.pace);
    }
    barrier_wait(&arrived[2], phase_system);
    phase_system ^= 1;
    barrier_wait(&arrived[turn], phase[turn]);
    phase[turn] ^= 1;
    const int last = refined ? static_cast<int>(p.options.iterations) : rows.schedule;
    const bool to_the_end = refined && rows.refined == kEverywhere;
    if constexpr (kConjugate) {
      if (!empty) solver.steps(schedules.conjugate, refined);
    } else if constexpr (kConstant) {
      if (!empty) solver.steps(rho_of(rows, p.options), last, to_the_end);
    } else {
      if (!empty) solver.steps(schedules.of[which], schedules.ridge, to_the_end);
    }
    const std::int64_t next = task + blocks();
    if constexpr (Solver::kTakesRhsRoom) publish();  // a bulk copy will write there
    sync();                                          // nobody reads the keys any more
    if (thread() == 0 && next < tasks) request_keys(next);
    const float unscale[2] = {rows.unscale[own_row()], rows.unscale[own_row() + 8]};
    float (&x)[D / 2] = solver.answers();
    // The right-hand side, where it is still.
    const uint4* b = rhs;
    if constexpr (Solver::kTakesRhsRoom) {
      const char* const system = systems + task * SystemLayout<D>::kBytes;
      b = reinterpret_cast<const uint4*>(system + SystemLayout<D>::kRhs) + thread();
    }
    scale_answers<D>(x, unscale, rows);
    if (kReads ? call.x != nullptr : refined) {
      each_of_x<D>(p, rows.chunk, head, [&](auto pairs, int n, std::int64_t at, bool one, bool two) {
        if (one) store_pair<decltype(pairs)::value>(call.x + at, x[n], x[n + 1], two);
      });
    }
    if constexpr (kReads) {
      if (call.certainty != nullptr && !empty) {
        const std::int64_t first = (rows.chunk.batch * p.tokens + rows.chunk.begin) * p.heads + head;
        double* const to = call.certainty + first;
        if constexpr (kConstant) {
          write_certainty<D>(x, rows, b, rho_of(rows, p.options), to, p.heads);
        } else {
          write_certainty<D>(x, rows, b, p.options.ridge, to, p.heads);
        }
      }
      float top[2] = {0, 0};
      mix_with_query<D>(x, top, unscale, rows, b);
      sync();  // nobody reads the rows any more
      if (thread() == 0 && next < tasks) request_rows(next);
      store_z<D>(x, top, refined, call, task);
    } else {
      const bool tiled = !empty && !refined;
      char* const tile = tiles + turn * kRoom;  // its last product is behind a barrier
      if (tiled) {
        store_tile<D>(tile, call.tile_down + task * kChunk, x, static_cast<int>(rows.chunk.length));
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
