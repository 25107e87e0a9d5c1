// Walks the states through the chunks of a sequence, and answers on the way: u, o, and S before each chunk and at the
// end.
#include "kernels/cuda/memory/passes.h"
#include "kernels/cuda/memory/walk.cuh"

namespace gka::kernels::cuda::memory {
namespace forth {  // named, so that a test can have all passes in one file

template <int kKeys, bool kDelta, Decay kDecay>
struct Shared {
  Stage<kKeys, kDelta, kDecay> stages[kStages];
  alignas(16) std::uint64_t barriers[kStages];
  alignas(16) Bits state[kKeys][kRow];
  alignas(16) Bits u[kChunk][kRow], u_faded[kChunk][kRow];  // u, and decayed to the chunk's end
};

/// u = T β v − w S, and what the queries find in S.
template <int kKeys, bool kDelta, Decay kDecay>
__device__ __forceinline__ void read_state(Shared<kKeys, kDelta, kDecay>& s, const Stage<kKeys, kDelta, kDecay>& stage,
                                           Sums<2>& answers) {
  const int rows = part_row(), columns = part_column();
  answers.clear();
  Sums<2> held;
  held.clear();
  if constexpr (kDelta) {
    multiply_two<kKeys>(answers, held, stage.q[rows], stage.w[rows], kKeys + kPad, &s.state[0][columns], kRow);
  } else {
    answers.template multiply<kKeys, Lies::straight, Lies::straight>(stage.q[rows], kKeys + kPad, &s.state[0][columns],
                                                                     kRow);
  }
  float fade[2] = {};
  if constexpr (kDecay == Decay::per_head) {
    const TwoFloats last = stage.sums[kChunk - 1];
    fade[0] = decay_between(last, stage.sums[rows + held.row(0)]);
    fade[1] = decay_between(last, stage.sums[rows + held.row(1)]);
  }
  held.each([&](int i, int n, float first, float second) {
    const int t = rows + held.row(i), c = columns + held.column(n);
    const std::uint32_t two = two_at(&stage.rows[t][c]);
    first = low_half(two) - first;
    second = high_half(two) - second;
    put_two(&s.u[t][c], first, second);
    if (kDecay == Decay::per_head) put_two(&s.u_faded[t][c], fade[i] * first, fade[i] * second);
  });
}

/// What the queries find in this chunk's values, added to what they found in S: o.
template <int kKeys, bool kDelta, Decay kDecay>
__device__ __forceinline__ void answer(const Shared<kKeys, kDelta, kDecay>& s,
                                       const Stage<kKeys, kDelta, kDecay>& stage, Sums<2>& answers,
                                       const ChunkedMemory& m, const Chunk& chunk, const Walk& walk, Bits* o) {
  const int rows = part_row(), columns = part_column();
  if constexpr (kDecay == Decay::per_head) {
    answers.scale(m.scale * decay_from_start(stage.sums[rows + answers.row(0)]),
                  m.scale * decay_from_start(stage.sums[rows + answers.row(1)]));
  }
  answers.template multiply<kChunk, Lies::straight, Lies::straight>(stage.p[rows], kSquare, &s.u[0][columns], kRow);
  answers.each([&](int i, int n, float first, float second) {
    const int t = rows + answers.row(i);
    const std::int64_t c = walk.first_column + columns + answers.column(n);
    if (t >= chunk.tokens || c >= m.value_dim) return;
    put_two(o + ((chunk.first + t) * m.heads + walk.head) * m.value_dim + c, first, second);
  });
}

template <int kKeys, bool kDelta, Decay kDecay>
__global__ void __launch_bounds__(kWalkers, 1)
    chunk_states(const __grid_constant__ ChunkedMemory m, const __grid_constant__ ChunkedMemorySaved saved,
                 const __grid_constant__ ChunkedMemoryOutputs out) {
  auto& s = *reinterpret_cast<Shared<kKeys, kDelta, kDecay>*>(shared_memory());
  const Walk walk(m);
  const MemoryRows u = m.has_own_u() ? MemoryRows{saved.u, m.heads * m.value_dim, m.value_dim} : m.v;
  const bool keeps = saved.states != nullptr;
  using P = Part<kKeys>;

  Fetcher<kKeys, kDelta, kDecay, 1> fetcher(m, saved, u, walk, s.barriers);
  make_barriers(s.barriers, kStages);
  sync();
  for (int n = 0; n < kStages - 1; ++n) fetcher.next(s.stages);
  Sums<P::kAcross> state;
  each_state(state, P::row(), walk.first_column + P::column(), m, [&](std::int64_t at, bool there, float& x) {
    x = there && m.initial != nullptr ? m.initial[walk.state + at] : 0;
  });
  state.put(&s.state[P::row()][P::column()], kRow);

  const int chunks = walk.chunks();
  for (int n = 0; n < chunks; ++n) {
    const Chunk chunk = walk.chunk(n);
    const auto& stage = s.stages[fetcher.wait()];
    sync();
    fetcher.next(s.stages);
    if (keeps) keep_state<kKeys>(s.state, m, chunk, walk, saved.states);
    Sums<2> answers;
    read_state(s, stage, answers);
    sync();
    answer(s, stage, answers, m, chunk, walk, static_cast<Bits*>(out.o));
    if (kDelta && keeps) keep_rows(s.u, m, chunk, walk, saved.u);
    fade_state<kKeys>(state, stage);
    const auto& u_at_end = kDecay == Decay::per_head ? s.u_faded : s.u;
    state.template multiply<kChunk, Lies::turned, Lies::straight>(&stage.k[0][P::row()], kKeys + kPad,
                                                                  &u_at_end[0][P::column()], kRow);
    state.put(&s.state[P::row()][P::column()], kRow);
  }
  if (out.final != nullptr) {
    each_state(state, P::row(), walk.first_column + P::column(), m, [&](std::int64_t at, bool there, float& x) {
      if (there) out.final[walk.state + at] = x;
    });
  }
}

}  // namespace forth

void run_chunk_states(const ChunkedMemory& m, const ChunkedMemorySaved& saved, const ChunkedMemoryOutputs& out,
                      const Device& device) {
  with_shape_and_decay(m, [&]<int kKeys, bool kDelta, Decay kDecay>() {
    launch_blocks_of<kWalkers>(forth::chunk_states<kKeys, kDelta, kDecay>, walks(m),
                               shared_bytes<forth::Shared<kKeys, kDelta, kDecay>>(), device.stream, m, saved, out);
  });
}

}  // namespace gka::kernels::cuda::memory
