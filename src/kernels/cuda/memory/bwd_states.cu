// Walks the gradient of the state back through the chunks of a sequence. With D the gradient of the state behind a
// chunk,
//
//   du = Pᵀ do + e^{G_C − G} ∘ (k D),     D ← e^{G_C} D + (scale · e^G ∘ q)ᵀ do − wᵀ du
//
// Leaves du, D behind every chunk, and at the sequence's start d_initial.
#include "kernels/cuda/memory/passes.h"
#include "kernels/cuda/memory/walk.cuh"

namespace gka::kernels::cuda::memory {
namespace back {  // named, so that a test can have all passes in one file

template <int kKeys, bool kDelta, Decay kDecay>
struct Shared {
  Stage<kKeys, kDelta, kDecay> stages[kStages];
  alignas(16) std::uint64_t barriers[kStages];
  alignas(16) Bits slope[kKeys][kRow];                                             // D
  alignas(16) Bits d_u[kChunk][kRow], d_u_minus[kChunk][kRow], d_o[kChunk][kRow];  // du; −du; scale · e^G do
};

/// du, and do as D wants it.
template <int kKeys, bool kDelta, Decay kDecay>
__device__ __forceinline__ void slopes_of_values(Shared<kKeys, kDelta, kDecay>& s,
                                                 const Stage<kKeys, kDelta, kDecay>& stage, float scale) {
  const int rows = part_row(), columns = part_column();
  Sums<2> d_u;
  d_u.clear();
  d_u.template multiply<kKeys, Lies::straight, Lies::straight>(stage.k[rows], kKeys + kPad, &s.slope[0][columns], kRow);
  if constexpr (kDecay == Decay::per_head) {
    const TwoFloats last = stage.sums[kChunk - 1];
    d_u.scale(decay_between(last, stage.sums[rows + d_u.row(0)]), decay_between(last, stage.sums[rows + d_u.row(1)]));
  }
  d_u.template multiply<kChunk, Lies::turned, Lies::straight>(&stage.p[0][rows], kSquare, &stage.rows[0][columns],
                                                              kRow);
  float from_start[2] = {};
  if constexpr (kDecay == Decay::per_head) {
    from_start[0] = scale * decay_from_start(stage.sums[rows + d_u.row(0)]);
    from_start[1] = scale * decay_from_start(stage.sums[rows + d_u.row(1)]);
  }
  d_u.each([&](int i, int n, float first, float second) {
    const int t = rows + d_u.row(i), c = columns + d_u.column(n);
    put_two(&s.d_u[t][c], first, second);
    if (kDelta) put_two(&s.d_u_minus[t][c], -first, -second);
    if constexpr (kDecay == Decay::per_head) {
      const std::uint32_t two = two_at(&stage.rows[t][c]);
      put_two(&s.d_o[t][c], from_start[i] * low_half(two), from_start[i] * high_half(two));
    }
  });
}

template <int kKeys, bool kDelta, Decay kDecay>
__global__ void __launch_bounds__(kWalkers, 1)
    bwd_states(const __grid_constant__ ChunkedMemory m, const __grid_constant__ ChunkedMemorySaved saved,
               const __grid_constant__ ChunkedMemoryGradients to) {
  auto& s = *reinterpret_cast<Shared<kKeys, kDelta, kDecay>*>(shared_memory());
  const Walk walk(m);
  const int chunks = walk.chunks();
  using P = Part<kKeys>;

  Fetcher<kKeys, kDelta, kDecay, -1> fetcher(m, saved, to.d_o, walk, s.barriers);
  make_barriers(s.barriers, kStages);
  sync();
  for (int n = 0; n < kStages - 1; ++n) fetcher.next(s.stages);
  Sums<P::kAcross> slope;
  each_state(slope, P::row(), walk.first_column + P::column(), m, [&](std::int64_t at, bool there, float& x) {
    x = there && to.d_final != nullptr ? to.d_final[walk.state + at] : 0;
  });
  slope.put(&s.slope[P::row()][P::column()], kRow);

  for (int n = 0; n < chunks; ++n) {
    const Chunk chunk = walk.chunk(chunks - 1 - n);
    const auto& stage = s.stages[fetcher.wait()];
    sync();
    fetcher.next(s.stages);
    keep_state<kKeys>(s.slope, m, chunk, walk, to.d_states);
    slopes_of_values(s, stage, m.scale);
    sync();
    keep_rows(s.d_u, m, chunk, walk, to.d_u);
    fade_state<kKeys>(slope, stage);
    const auto& d_o = kDecay == Decay::per_head ? s.d_o : stage.rows;
    slope.template multiply<kChunk, Lies::turned, Lies::straight>(&stage.q[0][P::row()], kKeys + kPad,
                                                                  &d_o[0][P::column()], kRow);
    if constexpr (kDelta) {
      slope.template multiply<kChunk, Lies::turned, Lies::straight>(&stage.w[0][P::row()], kKeys + kPad,
                                                                    &s.d_u_minus[0][P::column()], kRow);
    }
    slope.put(&s.slope[P::row()][P::column()], kRow);
  }
  if (to.d_initial != nullptr) {
    each_state(slope, P::row(), walk.first_column + P::column(), m, [&](std::int64_t at, bool there, float& x) {
      if (there) to.d_initial[walk.state + at] = x;
    });
  }
}

}  // namespace back

void run_bwd_states(const ChunkedMemory& m, const ChunkedMemorySaved& saved, const ChunkedMemoryGradients& gradients,
                    const Device& device) {
  with_shape_and_decay(m, [&]<int kKeys, bool kDelta, Decay kDecay>() {
    launch_blocks_of<kWalkers>(back::bwd_states<kKeys, kDelta, kDecay>, walks(m),
                               shared_bytes<back::Shared<kKeys, kDelta, kDecay>>(), device.stream, m, saved, gradients);
  });
}

}  // namespace gka::kernels::cuda::memory
