// bwd_carry: what arrives at the end of every chunk from all later ones, along each sequence in reverse.
#pragma once

#include "kernels/cuda/hopper/bwd_shared.cuh"

namespace gka::kernels::cuda::hopper::bwd {

/// One of the two gradients that are carried.
template <int D>
struct CarriedGradient {
  States<D> parts;
  float* down;         // of what arrives
  const float* start;  // [sequences, heads, rows, columns]: the final state's gradient, or null
  float* last;         // the first state's, or null
  int rows, columns;
  GivenStates<D> states;           // H or U
  float* inner;                    // [tasks, kPartials<D>]: parts of the inner products of these and what arrives
  const float* of_h = nullptr;     // with kKeys: these times H belong to the parts
  const float* largest = nullptr;  // of `start`
};

/// The largest number of each state, NaN if there is one that is not finite.
static __global__ void __launch_bounds__(kTileThreads) find_largest(std::int64_t size, const float* states, float* to) {
  auto& parts = *reinterpret_cast<float (*)[4]>(tile_memory());
  std::uint32_t top = 0;
  for (std::int64_t i = tile_thread(); i < size; i += kTileThreads) {
    top = max(top, size_bits(states[block() * size + i]));
  }
  top = most_of_threads(top, reinterpret_cast<std::uint32_t*>(parts));
  if (tile_thread() == 0) to[block()] = usable(top) ? bits_to_float(top) : bits_to_float(0x7fc00000u);
}

/// Chunks that are on their way to a block of `bwd_carry` at a time.
inline constexpr int kCarryAhead = 12;
/// What of them a block has: sixteen bytes of an own part and of a state for each thread.
struct CarryShared {
  Unit own[kCarryAhead][kTileThreads], states[kCarryAhead][kTileThreads];
};

/// Blocks for the numbers of a state.
template <int D>
inline constexpr int kCarryBlocksOf = kStateNumbers<D> / 8 / kTileThreads;

/// arriving_{s-1} = ζ_s arriving_s + part_s, in place; eight numbers a thread. Every thread knows how large the numbers
/// of a tile can be at most, so all scale it alike. Tiles come through shared memory, where a thread reads only what it
/// asked for itself; of the numbers that belong to chunks a lane has those of one chunk in kLanes. kKeys: for H, whose
/// gradient is symmetric. One loop and what it needs: a pipeline that is read from its head to its end.
template <int D, bool kKeys>
__device__ __forceinline__ void carry_numbers(const Problem& p, const Plan& plan, const float* zetas,
                                              const CarriedGradient<D>& c, std::int64_t which) {
  constexpr int kOwn = 8;
  constexpr std::int64_t kBlocks = kCarryBlocksOf<D>;
  constexpr int kColumns = kBlockColumns<D>;
  auto& memory = *reinterpret_cast<CarryShared*>(tile_memory());
  const std::int64_t head = which / kBlocks % p.heads, n = which / kBlocks / p.heads, state_at = n * p.heads + head;
  const int e = (static_cast<int>(which % kBlocks) * kTileThreads + tile_thread()) * kOwn;
  const int row = e / kColumns % D;
  const int column = e / kColumns / D * kColumns + ((e % kColumns / 8) ^ (kColumns == 64 ? row % 8 : row / 2 % 4)) * 8;
  const auto inside = [&](int i) { return row < c.rows && column + i < c.columns; };
  const std::int64_t at = state_at * c.rows * c.columns + static_cast<std::int64_t>(row) * c.columns + column;

  const bool twice = D == 128 && kKeys && row < 64 && column >= 64;  // stands for its mirror image too

  const std::int64_t segments = plan.begin[n + 1] - plan.begin[n];
  const int count =
      segments == 0 ? 0
                    : static_cast<int>(2 * segments) - (plan.segments[plan.begin[n + 1] - 1].length > kChunk ? 0 : 1);
  const std::int64_t last_task = (2 * plan.begin[n] + count - 1) * p.heads + head;
  const auto task_of = [&](int back) { return last_task - back * p.heads; };
  const auto request = [&](int back, int place) {
    if (back < count) {
      copy_async(&memory.own[place][tile_thread()], c.parts.tile(task_of(back)) + e, true);
      copy_async(&memory.states[place][tile_thread()], c.states.tile(task_of(back)) + e, true);
    }
    end_group();
  };
  for (int a = 0; a < kCarryAhead; ++a) request(a, a);
  struct Numbers {
    float zeta, down, top, of_h, share;
  };
  const auto numbers_of = [&](int back) -> Numbers {
    if (back >= count) return {};
    const std::int64_t task = task_of(back);
    Numbers of{zetas[task], c.parts.down[task * kSlices<D>], c.parts.top[task * kSlices<D>], kKeys ? c.of_h[task] : 0,
               1};
    if constexpr (kInSlices<D>) {  // a block has numbers of one slice and of one block of columns
      of.share = c.states.share[task * kStateBlocks<D> + column / kStateColumns<D>];
      of.down = c.parts.down[task * kSlices<D> + row / kChunk];
      std::uint32_t top = 0;
      for (int slice = 0; slice < kSlices<D>; ++slice) {
        top = max(top, float_to_bits(c.parts.top[task * kSlices<D> + slice]) & 0x7fffffffu);
      }
      of.top = bits_to_float(top);
      if (!finite(of.top)) of.down = of.top;
    }
    return of;
  };
  const int lane = tile_thread() % kLanes;
  Numbers here{}, next = numbers_of(lane);

  Eight state{};
  float bound = 0;
  if (c.start != nullptr) {
    bound = c.largest[state_at];
    for (int i = 0; i < kOwn; ++i) {
      if (!inside(i)) continue;
      state.x[i] = c.start[at + i];
      if (kKeys) state.x[i] = (state.x[i] + c.start[(state_at * c.rows + column + i) * c.columns + row]) / 2;
    }
  }
  int place = 0;
#pragma unroll 2
  for (int back = 0; back < count; ++back) {
    if (back % kLanes == 0) {
      here = next;
      next = numbers_of(back + kLanes + lane);
    }
    const auto number = [&](float own) { return of_lane(own, back % kLanes); };
    const float zeta = number(here.zeta), part_down = number(here.down);
    const std::int64_t task = task_of(back);
    wait_for_groups_but<kCarryAhead - 1>();
    const Eight own = unpack<DType::float16>(memory.own[place][tile_thread()]),
                h = unpack<DType::float16>(memory.states[place][tile_thread()]);
    const bool fine = finite(bound);
    const Scale scale = scale_of(float_to_bits(bound));
    *reinterpret_cast<Unit*>(c.parts.tile(task) + e) = fine ? pack_eight(state, scale.up) : Unit{};
    if (e == 0) c.down[task] = fine ? scale.down : bits_to_float(0x7fc00000u);
    float inner = 0;
    const float own_share = kInSlices<D> ? number(here.share) : 1;
    const float of_h = kKeys ? number(here.of_h) : 0, own_of_h = kInSlices<D> ? of_h * own_share : of_h;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      inner += state.x[i] * h.x[i];
      state.x[i] = faded(state.x[i], zeta) + own.x[i] * part_down;
      if constexpr (kKeys) state.x[i] += h.x[i] * own_of_h;
    }
    request(back + kCarryAhead, place);
    place = place + 1 == kCarryAhead ? 0 : place + 1;
    inner = sum_lanes(inner);
    if (twice) inner *= 2;
    if constexpr (kInSlices<D>) inner *= own_share;
    if (e % (kOwn * kLanes) == 0) c.inner[task * kPartials<D> + e / (kOwn * kLanes)] = inner;
    bound = faded(bound, zeta) + number(here.top);
    if constexpr (kKeys) bound += bits_to_float(size_bits(of_h));
  }
  if (c.last == nullptr) return;
  for (int i = 0; i < kOwn; ++i) {
    if (inside(i)) c.last[at + i] = state.x[i];
  }
}

/// Blocks for the gradients of U and H of a sequence's head: of H's, where it has 128 rows, all but the second quarter.
template <int D>
inline constexpr int kCarryLeftOut = D == 128 ? kCarryBlocksOf<D> / 4 : 0;
template <int D>
inline constexpr int kCarryBlocks = 2 * kCarryBlocksOf<D> - kCarryLeftOut<D>;

/// The same for H alone.
template <int D>
inline constexpr int kCarryBlocksOfKeys = kCarryBlocks<D> - kCarryBlocksOf<D>;

/// Both gradients, in turn; without values H's alone.
template <int D, bool kValues>
static __global__ void __launch_bounds__(kTileThreads, 4)
    bwd_carry(const __grid_constant__ Problem p, Plan plan, const float* zetas,
              const __grid_constant__ CarriedGradient<D> of_u, const __grid_constant__ CarriedGradient<D> of_h) {
  constexpr int kAll = kCarryBlocksOf<D>;
  constexpr int kBlocks = kValues ? kCarryBlocks<D> : kCarryBlocksOfKeys<D>;
  const std::int64_t state = block() / kBlocks;
  const int part = static_cast<int>(block() % kBlocks), of_keys = part - (kValues ? kAll : 0);
  if (of_keys < 0) {
    carry_numbers<D, false>(p, plan, zetas, of_u, state * kAll + part);
  } else {
    carry_numbers<D, true>(p, plan, zetas, of_h, state * kAll + of_keys + (of_keys < kAll / 4 ? 0 : kCarryLeftOut<D>));
  }
}

/// d_h0 is symmetric: a quarter of 128 rows is missing, and rounding made the rest so only nearly.
static __global__ void __launch_bounds__(kTileThreads) make_symmetric(std::int64_t matrices, int dim, float* h) {
  const std::int64_t pairs = static_cast<std::int64_t>(dim) * dim;
  for (std::int64_t i = block() * kTileThreads + tile_thread(); i < matrices * pairs; i += blocks() * kTileThreads) {
    const std::int64_t row = i % pairs / dim, column = i % dim;
    if (row >= column) continue;
    float* m = h + i / pairs * pairs;
    const bool both = row / 64 == column / 64;
    const float upper = m[row * dim + column], lower = both ? m[column * dim + row] : upper;
    m[row * dim + column] = m[column * dim + row] = (upper + lower) / 2;
  }
}

}  // namespace gka::kernels::cuda::hopper::bwd
