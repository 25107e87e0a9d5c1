// Reading the values' memory: o_c = s U_cᵀ z_c with z = q + α(x − q), and its transpose for the backward pass. U is
// divided and z multiplied by τ = 1/σ, so that neither leaves its range when the memory has faded to 1e-30:
//
//   o_c = s (σU_c)ᵀ z̃_c,   z̃ = α x̃ + (1 − α) τ q
//
// Where there was no solve (the memory alone, or a token with nothing to solve) σ = 1 here and z̃ = (1 − α) q, or q.
#pragma once

#include "kernels/cuda/operator.cuh"

namespace gka::kernels::cuda {

template <typename T>
struct Recall {
  T* z;       // z̃ as lanes [D × lanes]; the caller says where
  T* mask;    // [len × lanes]: M_jc β_j σ_c for j ≤ c
  T* scores;  // scratch
  double sigma[kMaxChunk];
  int lost[kMaxChunk];              // tokens whose answer is not a number
  alignas(16) T solved[kMaxChunk];  // the weight of x̃ and of q in z̃
  alignas(16) T direct[kMaxChunk];
  alignas(16) T state_scale[kMaxChunk];  // σ_c ζ_c

  __host__ __device__ void allocate(Arena& arena, T* room_for_scores) {
    mask = arena.take<T>(kMaxChunk * kStride);
    scores = room_for_scores;
  }

  /// op: null where there is no solve. z̃ will lie in `room`.
  __device__ __noinline__ void set(const Problem& p, Chunk<T>& t, const Operator<T>* op, T* room) {
    const Decay& decay = t.values_decay();
    alone([&] { z = room; });
    t.find_lost(t.bad_value, decay, false, lost);
    each(t.lanes, [&](int c) {
      const bool real = c < t.len, live = real && op != nullptr && op->live(c);
      const double alpha = real && p.options.part == Part::both ? t.alpha[c] : 0;
      if (real && op != nullptr) lost[c] |= op->lost[c];
      sigma[c] = live ? op->sigma[c] : 1;
      solved[c] = live ? static_cast<T>(alpha) : T{0};
      direct[c] = real ? static_cast<T>((1 - alpha) / sigma[c]) : T{0};
      state_scale[c] = real ? static_cast<T>(sigma[c] * decay.zeta[c]) : T{0};
    });
    move(
        t.len * kMaxChunk,
        [&](int at) {
          const int j = at / kMaxChunk, c = at % kMaxChunk;
          return c >= j && c < t.len ? static_cast<T>(decay.m(j, c) * t.beta[j] * sigma[c]) : T{0};
        },
        [&](int at, T value) { mask[at / kMaxChunk * kStride + at % kMaxChunk] = value; });
  }

  /// z̃ from q and x̃ (null: no solve). A weight of 0 leaves its term out altogether: x̃ may be NaN where there was
  /// nothing to solve.
  __device__ __noinline__ void mix(const Chunk<T>& t, const T* x) {
    each_vector(t.size.dim, t.lanes, [&](int, int c, int at) {
      const Vec<T> from_x = x != nullptr ? masked(load(x + at), load(solved + c)) : Vec<T>{};
      store(z + at, from_x + masked(load(t.q + at), load(direct + c)));
    });
  }

  /// o ← scale · (σU_c)ᵀ z̃_c, as lanes [V × lanes].
  __device__ void read(const Chunk<T>& t, const T* u, double scale, T* o) {
    const Sizes& s = t.size;
    product(s.values, s.dim, t, {u, 1, s.ldu()}, z, {t.kt, 1, kStride}, {t.v, 1, s.ldv()}, static_cast<T>(scale), o);
  }

  /// w ← σU_c g_c for g as lanes [V × lanes]: what o's gradient means for z.
  __device__ void transpose(const Chunk<T>& t, const T* u, const T* g, T* w) {
    const Sizes& s = t.size;
    product(s.dim, s.values, t, {u, s.ldu(), 1}, g, {t.v, s.ldv(), 1}, {t.k, 1, s.ldk()}, T{1}, w);
  }

 private:
  __device__ __noinline__ void product(int m, int k, const Chunk<T>& t, Left<T> state, const T* x, Left<T> keys,
                                       Left<T> tokens, T scale, T* out) {
    chunk_product<T, false>(m, t.lanes, k, state, x, state_scale, {t.len, keys, mask, scores, tokens},
                            NothingEarly<T>{}, [&](int i, int c, auto value, const auto&) {
                              for (T& number : value.x) number *= scale;
                              store(out + i * kStride + c, value);
                            });
  }
};

}  // namespace gka::kernels::cuda
