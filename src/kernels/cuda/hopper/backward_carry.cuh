// carry_back: what arrives at the end of every chunk from all later ones, along each sequence in reverse.
#pragma once

#include "kernels/cuda/hopper/backward_shared.cuh"

namespace gka::kernels::cuda::hopper::passes {

/// One of the two gradients that are carried.
struct CarryBack {
  States parts;
  float* down;         // of what arrives
  const float* start;  // [sequences, heads, rows, columns]: the final state's gradient, or null
  float* last;         // the first state's, or null
  int rows, columns;
  GivenStates states;              // H or U
  float* inner;                    // [tasks, kPartials]: parts of the inner products of these and what arrives
  const float* of_h = nullptr;     // with kKeys: these times H belong to the parts
  const float* largest = nullptr;  // of `start`
};

/// The largest number of each state, NaN if there is one that is not finite.
static __global__ void __launch_bounds__(kTileThreads) find_largest(std::int64_t size, const float* states, float* to) {
  auto& parts = *reinterpret_cast<float (*)[4]>(tile_memory());
  std::uint32_t top = 0;
  for (std::int64_t i = tile_thread(); i < size; i += kTileThreads) {
    top = most(top, size_bits(states[block() * size + i]));
  }
  top = most_of_threads(top, reinterpret_cast<std::uint32_t*>(parts));
  if (tile_thread() == 0) to[block()] = usable(top) ? bits_to_float(top) : bits_to_float(0x7fc00000u);
}

/// arriving_{s-1} = ζ_s arriving_s + part_s, in place; eight numbers a thread. Every thread knows how large the numbers
/// of a tile can be at most, so all scale it alike. kKeys: for H, whose gradient is symmetric.
template <bool kKeys>
__global__ void __launch_bounds__(kTileThreads)
    carry_back(const __grid_constant__ Problem p, Plan plan, const float* zetas, const __grid_constant__ CarryBack c) {
  constexpr int kAhead = 8, kOwn = 8;
  constexpr std::int64_t kBlocks = kStateNumbers / kOwn / kTileThreads;
  const std::int64_t head = block() / kBlocks % p.heads, n = block() / kBlocks / p.heads, state_at = n * p.heads + head;
  const int e = (static_cast<int>(block() % kBlocks) * kTileThreads + tile_thread()) * kOwn;
  const int row = e / 64 % kWidth, column = e / 64 / kWidth * 64 + ((e % 64 / 8) ^ (row % 8)) * 8;
  const auto inside = [&](int i) { return row < c.rows && column + i < c.columns; };
  const std::int64_t at = state_at * c.rows * c.columns + static_cast<std::int64_t>(row) * c.columns + column;

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
  const std::int64_t segments = plan.begin[n + 1] - plan.begin[n];
  const std::int64_t count =
      segments == 0 ? 0 : 2 * segments - (plan.segments[plan.begin[n + 1] - 1].length > kChunk ? 0 : 1);
  const std::int64_t last_task = (2 * plan.begin[n] + count - 1) * p.heads + head;
  struct Part {
    Unit own, h;
    float zeta, down, top, of_h;
  };
  const auto load = [&](std::int64_t back) {
    const std::int64_t task = last_task - back * p.heads;
    return Part{*reinterpret_cast<const Unit*>(c.parts.tile(task) + e),
                read_unit(c.states.tile(task) + e),
                zetas[task],
                c.parts.down[task],
                c.parts.top[task],
                kKeys ? c.of_h[task] : 0};
  };
  Part ahead[kAhead];
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    if (a < count) ahead[a] = load(a);
  }
  for (std::int64_t base = 0; base < count; base += kAhead) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (base + a >= count) continue;
      const std::int64_t task = last_task - (base + a) * p.heads;
      const bool fine = finite(bound);
      const Scale scale = scale_of(float_to_bits(bound));
      *reinterpret_cast<Unit*>(c.parts.tile(task) + e) = fine ? pack_eight(state, scale.up) : Unit{};
      if (e == 0) c.down[task] = fine ? scale.down : bits_to_float(0x7fc00000u);
      const Part part = ahead[a];
      const Eight own = unpack<DType::float16>(part.own), h = unpack<DType::float16>(part.h);
      float inner = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        inner += state.x[i] * h.x[i];
        state.x[i] = faded(state.x[i], part.zeta) + own.x[i] * part.down;
        if constexpr (kKeys) state.x[i] += h.x[i] * part.of_h;
      }
      inner = sum_lanes(inner);
      if (e % (kOwn * kLanes) == 0) c.inner[task * kPartials + e / (kOwn * kLanes)] = inner;
      bound = faded(bound, part.zeta) + part.top;
      if constexpr (kKeys) bound += bits_to_float(size_bits(part.of_h));
      if (base + a + kAhead < count) ahead[a] = load(base + a + kAhead);
    }
  }
  if (c.last == nullptr) return;
  for (int i = 0; i < kOwn; ++i) {
    if (inside(i)) c.last[at + i] = state.x[i];
  }
}

/// d_h0 is symmetric: rounding made it so only nearly.
static __global__ void __launch_bounds__(kTileThreads) make_symmetric(std::int64_t matrices, int dim, float* h) {
  const std::int64_t pairs = static_cast<std::int64_t>(dim) * dim;
  for (std::int64_t i = block() * kTileThreads + tile_thread(); i < matrices * pairs; i += blocks() * kTileThreads) {
    const std::int64_t row = i % pairs / dim, column = i % dim;
    if (row >= column) continue;
    float* m = h + i / pairs * pairs;
    m[row * dim + column] = m[column * dim + row] = (m[row * dim + column] + m[column * dim + row]) / 2;
  }
}

}  // namespace gka::kernels::cuda::hopper::passes
