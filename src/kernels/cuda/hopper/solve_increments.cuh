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

/// One chunk's solve, of which a thread holds two rows.
template <int D>
struct IncrementSolver {
  static constexpr int kBlock = kBlockColumns<D>;
  const char *h, *k;
  ExactMask mask;
  float t[2], inverse_t[2];
  float xi[D / 2], g[D / 2];
  std::uint32_t delta[D / 4];  // −δ
  std::uint32_t lost[16];      // by the masked scores so far, as bfloat16

  /// ξ = 0 and δ_0 = start · b, b(n): numbers n and n + 1 of this thread's part.
  template <typename Weight, typename Rhs>
  __device__ __forceinline__ void begin(const Weight& start, const Weight& pace, Rhs&& b) {
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
  /// In two parts.
  __device__ __forceinline__ void mask_scores(const float (&scores)[32], std::uint32_t (&masked)[16],
                                              std::uint32_t (&rest)[16]) const {
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
      mask_scores(scores, masked, rest);
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
  __device__ __forceinline__ void steps(const Increments& of, float ridge) {
#pragma unroll 1
    for (int i = 1; i <= of.last; ++i) step<kToTheEnd>(of.m[i], of.s[i], ridge);
    take_in_delta();
  }
  /// The same where tokens have schedules of their own.
  template <bool kToTheEnd>
  __device__ __forceinline__ void steps(RowSchedules& of, const OfRows& ridge, int last) {
#pragma unroll 1
    for (int i = 1; i <= last; ++i) {
      const TokenWeights one = of.row[0].next_increment(), two = of.row[1].next_increment();
      step<kToTheEnd>(OfRows{one.m, two.m}, OfRows{one.s, two.s}, ridge);
    }
    take_in_delta();
  }
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
template <int D, DType kType, bool kReads, bool kConstant>
__global__ void __launch_bounds__(kWarpgroup, by_size<D>(4, 3, 2))
    solve_increments(const __grid_constant__ Problem p, Plan plan, ChunkStates states,
                     const __grid_constant__ SolveCall call, const __grid_constant__ IncrementSchedules schedules,
                     const char* systems, bool rhs_pairs) {
  using Layout = IncrementsLayout<D>;
  __shared__ std::uint64_t arrived[4];  // barriers: of the two state buffers, of keys, of the rest
  char* const tiles = aligned_tiles();
  constexpr int kState = D * D * 2, kRoom = kStateRoom<D>;
  auto* const rhs = reinterpret_cast<const uint4*>(tiles + Layout::kRhs) + thread();
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
    IncrementSolver<D> solver{
        .h = tiles + turn * kRoom, .k = tiles + Layout::kKeys, .mask = ExactMask(tiles + Layout::kMask)};
    barrier_wait(&arrived[3], phase_system);
    const bool empty = rows.chunk.length <= 0, refined = !empty && rows.refined != 0;
    const std::int64_t head = task % p.heads;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      solver.t[i] = rows.t[own_row() + 8 * i];
      solver.inverse_t[i] = 1 / solver.t[i];
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
    const auto solve_by = [&](auto to_the_end) {
      constexpr bool kToTheEnd = decltype(to_the_end)::value;
      if constexpr (kConstant) {
        RowSchedules of_rows(rho_of(rows, p.options));
        const RowPaces paces(rho_of(rows, p.options));
        const int last = refined ? static_cast<int>(p.options.iterations) : rows.schedule;
        solver.template steps<kToTheEnd>(of_rows, paces.ridge, last);
      } else {
        solver.template steps<kToTheEnd>(schedules.of[which], schedules.ridge);
      }
    };
    if (refined && rows.refined == kEverywhere) {
      solve_by(std::true_type{});
    } else if (!empty) {
      solve_by(std::false_type{});
    }
    const std::int64_t next = task + blocks();
    sync();  // nobody reads the keys any more
    if (thread() == 0 && next < tasks) request_keys(next);
    const float unscale[2] = {rows.unscale[own_row()], rows.unscale[own_row() + 8]};
    float (&x)[D / 2] = solver.xi;
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
          write_certainty<D>(x, rows, rhs, rho_of(rows, p.options), to, p.heads);
        } else {
          write_certainty<D>(x, rows, rhs, p.options.ridge, to, p.heads);
        }
      }
      float top[2] = {0, 0};
      mix_with_query<D>(x, top, unscale, rows, rhs);
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
