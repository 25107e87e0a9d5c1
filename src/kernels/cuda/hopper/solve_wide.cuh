// The solve of wide heads, 256 channels: `solve` (solve.cuh has what is solved, and how) with two warpgroups to a
// chunk, each with 128 columns of the iterates in its registers. What is different:
//
// - A product with a state is summed over all 256 channels, of which a warpgroup has half. So both put their iterate,
//   rounded to float16, into a tile from which products take it, between two barriers of the block. Each makes all
//   scores for itself: a sixth of the products is done twice, and nobody waits for another's scores.
// - H_0 is 128 KB, so there is one buffer for it, and a block has a multiprocessor to itself. Of the right-hand side's
//   32 KB a part finds no room, and is in registers.
// - H_0 comes in blocks of 64 columns that are divided by their own norms (chunk_h.cuh): t is each block's own, and
//   rows of H_0 are what is summed over.
#pragma once

#include "kernels/cuda/hopper/solve.cuh"

namespace gka::kernels::cuda::hopper {

inline constexpr int kWideGroups = 2, kWideThreads = kWideGroups * kWarpgroup;
inline constexpr int kWideColumns = kWideSize / kWideGroups;  // of a warpgroup

/// This thread's values of b, as they lie in a system: as many as there is room for in shared memory, the rest in
/// registers.
struct OwnRhs {
  static constexpr int kUnits = kWideColumns / 16, kShared = 5;
  uint4* shared;  // [kShared], kWideThreads apart
  uint4 rest[kUnits - kShared];

  __device__ __forceinline__ uint4& operator[](int at) {
    const int i = at / kWarpgroup;
    return i < kShared ? shared[i * kWideThreads] : rest[i < kShared ? 0 : i - kShared];
  }
  __device__ __forceinline__ const uint4& operator[](int at) const { return const_cast<OwnRhs&>(*this)[at]; }
};

/// Shared memory: the iterate as an operand; H_0; keys and mask; rows; of the right-hand side what finds room.
struct WideLayout {
  static constexpr int kState = kChunk * kWideSize * 2, kSystem = kState + kWideSize * kWideSize * 2;
  static constexpr int kRows = kSystem + SystemLayout<kWideSize>::kRhs;
  static constexpr int kRhs = kRows + static_cast<int>(sizeof(SystemRows));
  static constexpr int kBytes = 1024 + kRhs + OwnRhs::kShared * kWideThreads * 16;
  static_assert(kBytes + 1024 <= 227 * 1024);  // with what is static
};

/// As ChunkSolver.
struct WideSolver {
  static constexpr int D = kWideSize, N = kWideColumns, kBlocks = N / kStateColumns<D>;
  char* operand;
  const char *h, *k;  // of all columns
  const uint4* mask;
  OwnRhs rhs;
  float t[kBlocks][2], inverse_t[kBlocks][2];  // by block of columns and row

  /// Which warpgroup this is, as a number of which the compiler knows that a warp's threads have the same: addresses of
  /// operands need no registers of each thread then.
  __device__ __forceinline__ static int group() { return __shfl_sync(0xffffffffu, thread() / kWarpgroup, 0); }
  __device__ __forceinline__ float t_at(int n) const { return t[n / 32][n / 2 % 2]; }

  /// Own columns of what is to be the products' left operand: word(n) has numbers n and n + 1. Barriers of the block.
  template <typename Word>
  __device__ __forceinline__ void put(Word&& word) const {
    const int matrix = lane() / 8, row = opaque(thread() % kWarpgroup / 32 * 16 + matrix % 2 * 8 + lane() % 8);
    const int first = opaque(N / 8 * group() + matrix / 2);
    sync();  // no product reads what lies there any more
#pragma unroll
    for (int n = 0; n < N / 2; n += 8) {
      const int at = unit_at(row, first + n / 4, kChunk);
      store_matrices(shared_address(operand + at), word(n), word(n + 2), word(n + 4), word(n + 6));
    }
    publish();
    sync();
  }
  /// scores (+)= the operand times keys; out (+)= the operand times own columns of H_0. By blocks of 64 of what is
  /// summed over, in a loop: unrolled, the addresses of 32 steps would be kept in registers.
  __device__ __forceinline__ void multiply_keys(float (&scores)[32], bool add) const {
    const std::uint64_t left = descriptor(operand, kChunk), keys = descriptor(k, kChunk);
#pragma unroll 1
    for (int s = 0; s < D / 16; s += 4) {
      const std::uint64_t block = k_major_step(0, s, kChunk);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint64_t step = block + k_major_step(0, i, kChunk);
        mma<false, false, true>(scores, left + step, keys + step, add || s + i > 0);
      }
    }
  }
  __device__ __forceinline__ void multiply_state(float (&out)[N / 2], bool add) const {
    const std::uint64_t left = descriptor(operand, kChunk), state = descriptor(h + group() * N * D * 2, D);
#pragma unroll 1
    for (int s = 0; s < D / 16; s += 4) {
      const std::uint64_t left_block = k_major_step(left, s, kChunk), block = mn_major_step(state, s);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        mma<false, true, true>(out, k_major_step(left_block, i, kChunk), mn_major_step(block, i), add || s + i > 0);
      }
    }
  }
  __device__ __forceinline__ std::uint64_t own_keys() const { return descriptor(k + group() * N * kChunk * 2, kChunk); }

  __device__ __forceinline__ void step(float (&u1)[N / 2], float (&u2)[N / 2], float a, float b, float q) const {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) u2[i] *= b * inverse_t[i / 32][i / 2 % 2];
    put([&](int n) { return pack_half(u1[n], u1[n + 1]); });
    float scores[32];
    hold(u2);
    wgmma_fence();
    multiply_keys(scores, false);
    wgmma_commit();
    multiply_state(u2, true);
    wgmma_commit();
    wgmma_wait<1>();
    hold(scores);
    std::uint32_t masked[16];
    multiply_mask(scores, mask, masked);
    wgmma_wait<0>();
    hold(u2);
    add_iterate<N>(u2, u1, rhs, a, q, [&](int n) { return t_at(n); });
    hold(u2);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kChunk / 16; ++s) mma<true, true>(u2, masked + 4 * s, mn_major_step(own_keys(), s));
    wgmma_commit();
    wgmma_wait<0>();
    hold(u2);
  }

  __device__ __forceinline__ void steps(float (&u1)[N / 2], float (&u2)[N / 2], const Schedule& schedule, int i,
                                        int last) const {
#pragma unroll 1
    for (; i < last; i += 2) {
      step(u1, u2, schedule.a[i], schedule.b[i], schedule.q[i]);
      step(u2, u1, schedule.a[i + 1], schedule.b[i + 1], schedule.q[i + 1]);
    }
  }

  template <typename Mask, typename Finish>
  __device__ __forceinline__ void apply_exactly(const float (&u)[N / 2], float (&out)[N / 2], Mask&& exact_mask,
                                                Finish&& finish) const {
    float scores[32];
    const auto word = [&](int n) { return pack_half(u[n], u[n + 1]); };
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      put([&](int n) { return part == 0 ? word(n) : pack_half_rest(u[n], u[n + 1], word(n)); });
      wgmma_fence();
      multiply_state(out, part > 0);
      multiply_keys(scores, part > 0);
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
      mma<true, true>(out, masked + 4 * s, mn_major_step(own_keys(), s));
      mma<true, true>(out, rest + 4 * s, mn_major_step(own_keys(), s));
    }
    wgmma_commit();
    wgmma_wait<0>();
    hold(out);
  }
};

/// `solve` for an adaptive ridge; without kReads x is left as float32 of every chunk. `parked`: kParked<kWideColumns>
/// for each warpgroup. As long as `solve`, for the same reason.
template <bool kReads>
__global__ void __launch_bounds__(kWideThreads, 1)
    solve_wide(const __grid_constant__ Problem p, Plan plan, ChunkStates states, const __grid_constant__ SolveCall call,
               const __grid_constant__ Schedules schedules, const char* systems, float4* parked) {
  constexpr int D = kWideSize, N = kWideColumns;
  using Layout = SystemLayout<D>;
  __shared__ std::uint64_t arrived[3];  // barriers: of H_0, of keys and mask, of the rows
  __shared__ float parts[kWideGroups][kChunk];
  char *const tiles = aligned_tiles(), *const h = tiles + WideLayout::kState, *const k = tiles + WideLayout::kSystem;
  const int group = WideSolver::group(), in_group = thread() % kWarpgroup, first = group * N;
  SolveCall own_columns = call;  // of which find_residual reads the right-hand side
  if constexpr (!kReads) own_columns.rhs.data = static_cast<float*>(call.rhs.data) + first;
  auto* const mask = reinterpret_cast<uint4*>(k + Layout::kMask) + in_group;
  const auto& rows = *reinterpret_cast<const SystemRows*>(tiles + WideLayout::kRows);
  auto* const rhs = reinterpret_cast<uint4*>(tiles + WideLayout::kRhs) + thread();
  const Parked<N> own(parked + (block() * kWideGroups + group) * kParked<N>, in_group);
  const std::int64_t tasks = 2 * plan.count(p) * p.heads;
  const auto request_state = [&](std::int64_t of) { bulk_load(h, states.tile<D>(of), D * D * 2, &arrived[0]); };
  const auto request_keys = [&](std::int64_t of) {
    bulk_load(k, systems + of * Layout::kBytes, Layout::kRhs, &arrived[1]);
  };
  const auto request_rows = [&](std::int64_t of) {
    bulk_load(tiles + WideLayout::kRows, systems + of * Layout::kBytes + Layout::kRows, sizeof(SystemRows),
              &arrived[2]);
  };
  // Of this thread's parts of two rows, what both warpgroups have of a row.
  const auto put_part = [&](int row, float value) {
    if (lane() % 4 == 0) parts[group][row] = value;
  };
  const auto sum = [&](int row, float value) {
    put_part(row, value);
    sync();
    const float both = parts[0][row] + parts[1][row];
    sync();
    return both;
  };
  std::int64_t task = block();
  if (thread() == 0) {
    for (std::uint64_t& barrier : arrived) barrier_init(&barrier);
    barrier_fence();
    if (task < tasks) request_state(task), request_keys(task), request_rows(task);
  }
  sync();
  int phase = 0;
  while (task < tasks) {
    const auto* const query = reinterpret_cast<const uint4*>(systems + task * Layout::kBytes + Layout::kRhs) +
                              first / 16 * kWarpgroup + in_group;
    WideSolver solver{.operand = tiles, .h = h, .k = k, .mask = mask, .rhs = {.shared = rhs}};
#pragma unroll
    for (int n = 0; n < N / 16; ++n) solver.rhs[n * kWarpgroup] = query[n * kWarpgroup];
    const FirstState<D> state(states, task);
    barrier_wait(&arrived[2], phase);
    const bool empty = rows.chunk.length <= 0, refined = !empty && rows.refined != 0;
    const int which = refined ? rows.refined : empty ? 0 : rows.schedule;
    const Schedule& schedule = schedules.of[which];
    const Stages& stages = schedules.stages[which == kEverywhere ? 1 : 0];
    int last = refined ? stages.last[0] : schedule.last;
#pragma unroll
    for (int b = 0; b < WideSolver::kBlocks; ++b) {
      const float share = fmaxf(group == 0 ? state.share[b] : state.share[WideSolver::kBlocks + b], 1e-12f);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Where the state is nothing (`leave_norm`), it is so whatever it was: a lost one must not show in a bit.
        const float t = rows.t[own_row() + 8 * i] * schedule.faster;
        solver.t[b][i] = t > 1e-11f ? t * share : t;
        solver.inverse_t[b][i] = 1 / solver.t[b][i];
      }
    }
    int i = last % 2 == 0 ? 1 : 0, stage = 0;
    float u1[N / 2], u2[N / 2];
    const float start = i == 0 ? 0 : schedule.start;
    start_iterates<N>(u1, u2, solver.rhs, start, refined, own);
    barrier_wait(&arrived[1], phase);
    if (which >= kFirstReach && group == 0) speed_up(mask, schedule);  // both read it, behind a step's barriers
    barrier_wait(&arrived[0], phase);
    phase ^= 1;
#pragma unroll 1
    while (!empty) {
      solver.steps(u1, u2, schedule, i, last);
      if (!refined || stage == stages.count - 1) break;
      const Residual& at = stages.residual[stage];
      i = last + 2;
      park_iterates<N>(u1, u2, at, stage, own);
      last = stages.last[++stage];
      find_residual<N>(solver, u1, u2, schedule, rows, own_columns, task % p.heads, static_cast<int>(p.key_dim) - first,
                       false, own);
      start_stage<N>(u1, u2, schedule, at, solver.rhs, own);
    }
    const std::int64_t next = task + blocks();
    sync();  // nobody reads state, keys and mask any more
    if (thread() == 0 && next < tasks) request_state(next), request_keys(next);
    const float unscale[2] = {rows.unscale[own_row()], rows.unscale[own_row() + 8]};
    finish_x<N>(u1, unscale, schedule.grown_last, rows, refined, own);
    const std::int64_t token = (rows.chunk.batch * p.tokens + rows.chunk.begin) * p.heads + task % p.heads;
    if (call.x != nullptr) {
      const int left = min(static_cast<int>(p.key_dim) - first, N);
      each_place<N>(token * p.key_dim + first, p.heads * p.key_dim, static_cast<int>(rows.chunk.length), left,
                    p.key_dim % 2 == 0, [&](auto pairs, int n, std::int64_t at, bool one, bool two) {
                      if (one) store_pair<decltype(pairs)::value>(call.x + at, u1[n], u1[n + 1], two);
                    });
    }
    if constexpr (kReads) {
      if (call.certainty != nullptr && !empty) {
        write_certainty<N>(u1, rows, query, p.options.ridge, call.certainty + token, p.heads, sum);
      }
      float top[2] = {0, 0};
      mix_with_query<N>(u1, top, unscale, rows, query);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        top[n] = fmaxf(top[n], __shfl_xor_sync(0xffffffffu, top[n], 1));
        put_part(own_row() + 8 * n, fmaxf(top[n], __shfl_xor_sync(0xffffffffu, top[n], 2)));
      }
      sync();  // nobody reads the rows any more
      if (thread() == 0 && next < tasks) request_rows(next);
#pragma unroll
      for (int n = 0; n < 2; ++n) top[n] = fmaxf(parts[0][own_row() + 8 * n], parts[1][own_row() + 8 * n]);
      store_z<N, D>(u1, top, refined, call, task, first, in_group);
    } else {
      sync();  // nobody reads the rows any more
      if (thread() == 0 && next < tasks) request_rows(next);
    }
    task = next;
  }
}

}  // namespace gka::kernels::cuda::hopper
