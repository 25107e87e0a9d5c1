// What of a chunk knows nothing of the state: P, and with the delta rule T, w and T β v (left in u); without it β v.
//
// A block of eight warps takes one head of one chunk; wy.cuh has the inverse.
#include "kernels/cuda/memory/wy.cuh"

namespace gka::kernels::cuda::memory {
namespace wy {  // named, so that a test can have all passes in one file

inline constexpr double kForgotten = -1e5;  // log decays below are this one: e^x is 0 long before

/// Small enough that three blocks share a multiprocessor: most of the time goes into waiting for one step of T or
/// another.
template <int kKeys>
struct Shared {
  alignas(16) Bits k[kChunk][kKeys + kPad];
  union {
    alignas(16) Bits q[kChunk][kKeys + kPad];
    alignas(16) Bits v[kChunk][kValues + kPad];  // once q is done with
  };
  union {
    alignas(16) float t[kChunk][kTriangle];
    alignas(16) Bits w[kChunk][kKeys + kPad];  // once T is rounded
  };
  union {
    alignas(16) float a[kChunk][kTriangle];
    struct {  // once T is made
      alignas(16) Bits keys[kChunk][kSquare], values[kChunk][kSquare];
    } weighted;
  };
  double parts[2][kChunk];
  TwoFloats sums[kChunk];
  float from_start[kChunk], beta[kChunk];
};

/// G and β. Sums in float64, by eights: a thread adds up those before it in its eight, then the eights before.
template <int kKeys>
__device__ __forceinline__ void load_gates(Shared<kKeys>& s, const ChunkedMemory& m, const Chunk& chunk,
                                           std::int64_t head, TwoFloats (&kept)[kChunk]) {
  load_beta(s.beta, m, chunk, head);
  const int t = thread();
  if (t < kChunk) {
    const bool there = t < chunk.tokens && m.log_decay != nullptr;
    const double g = there ? static_cast<double>(m.log_decay[(chunk.first + t) * m.heads + head]) : 0;
    s.parts[0][t] = g > kForgotten ? g : kForgotten;
  }
  sync();
  if (t < kChunk) {
    double sum = 0;
    for (int i = t / 8 * 8; i <= t; ++i) sum += s.parts[0][i];
    s.parts[1][t] = sum;
  }
  sync();
  if (t < kChunk) {
    double sum = s.parts[1][t];
    for (int i = 7; i < t / 8 * 8; i += 8) sum += s.parts[1][i];
    const auto high = static_cast<float>(sum);
    s.sums[t] = {high, static_cast<float>(sum - static_cast<double>(high))};
    s.from_start[t] = decay_from_start(s.sums[t]);
    kept[t] = s.sums[t];
  }
}

/// T, its columns weighted by β and by β e^G, and T itself where it is kept.
template <int kKeys>
__device__ __forceinline__ void round_inverse(Shared<kKeys>& s, Bits* kept) {
  const int c = thread() % (kChunk / 2) * 2;
  const float b0 = s.beta[c], b1 = s.beta[c + 1], d0 = s.from_start[c], d1 = s.from_start[c + 1];
#pragma unroll
  for (int i = 0; i < kChunk; i += kBlock / (kChunk / 2)) {
    const int r = thread() / (kChunk / 2) + i;
    const float t0 = s.t[r][c], t1 = s.t[r][c + 1];
    const float first = c <= r ? t0 : 0, second = c + 1 <= r ? t1 : 0;
    put_two(&s.weighted.values[r][c], b0 * first, b1 * second);
    put_two(&s.weighted.keys[r][c], b0 * d0 * first, b1 * d1 * second);
    if (kept != nullptr) put_two(kept + r * kChunk + c, first, second);
  }
  sync();
}

/// scale · M ∘ q kᵀ of the warp's rows and columns into P.
template <int kAcross, int kKeys>
__device__ __forceinline__ void write_p(Sums<kAcross>& sums, const Shared<kKeys>& s, Bits (&p)[kChunk][kSquare],
                                        float scale, int rows, int columns) {
  sums.each([&](int i, int n, float first, float second) {
    const int t = rows + Sums<kAcross>::row(i), c = columns + Sums<kAcross>::column(n);
    const float one = scale * decay_between(s.sums[t], s.sums[c]) * first;
    const float two = scale * decay_between(s.sums[t], s.sums[c + 1]) * second;
    put_two(&p[t][c], c <= t ? one : 0, c + 1 <= t ? two : 0);
  });
}

/// With the delta rule half of the warps have k kᵀ and half q kᵀ; without it all share q kᵀ.
template <int kKeys, bool kDelta>
__device__ __forceinline__ void multiply_keys(Shared<kKeys>& s, Bits (&p)[kChunk][kSquare], float scale) {
  const int rows = warp() % 4 * 16, half = warp() / 4;
  if constexpr (kDelta) {
    Sums<8> sums;
    sums.clear();
    const auto& left = half == 0 ? s.k : s.q;
    sums.template multiply<kKeys, Lies::straight, Lies::turned>(left[rows], kKeys + kPad, s.k[0], kKeys + kPad);
    if (half == 1) {
      write_p(sums, s, p, scale, rows, 0);
    } else {
      sums.each([&](int i, int n, float first, float second) {
        const int t = rows + Sums<8>::row(i), c = Sums<8>::column(n);
        const float one = s.beta[t] * decay_between(s.sums[t], s.sums[c]) * first;
        const float two = s.beta[t] * decay_between(s.sums[t], s.sums[c + 1]) * second;
        s.a[t][c] = c < t ? one : 0;
        s.a[t][c + 1] = c + 1 < t ? two : 0;
      });
    }
  } else {
    Sums<4> sums;
    sums.clear();
    sums.template multiply<kKeys, Lies::straight, Lies::turned>(s.q[rows], kKeys + kPad, s.k[half * 32], kKeys + kPad);
    write_p(sums, s, p, scale, rows, half * 32);
  }
  sync();
}

template <int kKeys, bool kDelta>
__global__ void __launch_bounds__(kBlock, 3)
    chunk_wy(const __grid_constant__ ChunkedMemory m, const __grid_constant__ ChunkedMemorySaved saved) {
  auto& s = *reinterpret_cast<Shared<kKeys>*>(shared_memory());
  const Task task = own_task(m);
  const auto [slot, head, place, chunk] = task;
  if (chunk.tokens == 0) return;
  fetch_queries_and_keys<kBlock, kKeys>(s, m, task);
  auto& tiles = *tiles_at<kKeys, kDelta, Decay::per_head>(m, saved, slot, head);
  load_gates(s, m, chunk, head, tiles.sums);
  wait_for_copies();
  sync();
  write_tile(tiles.q, s.q);
  write_tile(tiles.k, s.k);
  multiply_keys<kKeys, kDelta>(s, tiles.p, m.scale);
  if (m.has_own_u()) fetch<kBlock, kValues>(s.v[0], m.v, chunk, head, static_cast<int>(m.value_dim));
  if constexpr (kDelta) {
    invert_diagonal(s);
    sync();
    join<16>(s);
    join<32>(s);
    round_inverse(s, saved.t != nullptr ? t_of(saved, task) : nullptr);
    Sums<kKeys / 16> w;
    w.clear();
    const int rows = warp() % 4 * 16, columns = warp() / 4 * (kKeys / 2);
    w.template multiply<kChunk, Lies::straight, Lies::straight>(s.weighted.keys[rows], kSquare, &s.k[0][columns],
                                                                kKeys + kPad);
    w.put(&s.w[rows][columns], kKeys + kPad);
    sync();
    write_tile(tiles.w, s.w);
  }
  if (m.has_own_u()) write_values<kDelta>(s, m, chunk, head, static_cast<Bits*>(saved.u));
}

}  // namespace wy

void run_chunk_wy(const ChunkedMemory& m, const ChunkedMemorySaved& saved, const Device& device) {
  with_shape(m, [&]<int kKeys, bool kDelta>() {
    launch_blocks_of<wy::kBlock>(wy::chunk_wy<kKeys, kDelta>, m.slots() * m.heads, shared_bytes<wy::Shared<kKeys>>(),
                                 device.stream, m, saved);
  });
}

}  // namespace gka::kernels::cuda::memory
