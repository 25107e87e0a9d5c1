// Reading the values' memory: o_c = s U_cᵀ z_c with z = q + α(x − q), and its transpose for the backward pass. U is
// divided and z multiplied by τ = 1/σ, so that neither leaves its range when the memory has faded to 1e-30:
//
//   o_c = s (σU_c)ᵀ z̃_c,   z̃ = α x̃ + (1 − α) τ q
//
// Where there was no solve (the memory alone, or a token with nothing to solve) σ = 1 here and z̃ = (1 − α) q, or q.
#pragma once

#include "kernels/cpu/isa/operator.h"

namespace gka::kernels::cpu::GKA_ISA {

template <typename T>
struct Recall {
  Buffer<T> z;            // z̃ as lanes [D × lanes]
  Buffer<T> mask;         // [len × lanes]: M_jc β_j σ_c for j ≤ c
  Buffer<T> scores;       // scratch
  Buffer<T> state_scale;  // [lanes]: σ_c ζ_c
  double sigma[kMaxChunk];
  bool lost[kMaxChunk];  // tokens whose answer is not a number
  T solved[kMaxChunk];   // the weight of x̃ and of q in z̃
  T direct[kMaxChunk];

  explicit Recall(const Sizes& s)
      : z(static_cast<std::int64_t>(s.dim) * kMaxChunk),
        mask(kMaxChunk * kMaxChunk),
        scores(kMaxChunk * kMaxChunk),
        state_scale(kMaxChunk) {}

  void set(const Problem& p, const Chunk<T>& t, const Operator<T>* op) {
    const Decay& decay = t.values_decay();
    t.find_lost(t.bad_value, decay, false, lost);
    for (int c = 0; op != nullptr && c < t.len; ++c) lost[c] |= op->lost[c];
    for (int c = 0; c < t.lanes; ++c) {
      const bool real = c < t.len, live = real && op != nullptr && op->live(c);
      const double alpha = real && p.options.part == Part::both ? t.alpha[c] : 0;
      sigma[c] = live ? op->sigma[c] : 1;
      solved[c] = live ? static_cast<T>(alpha) : T{0};
      direct[c] = real ? static_cast<T>((1 - alpha) / sigma[c]) : T{0};
    }
    set_weights<T>(decay, t.beta, sigma, t.len, t.lanes, mask, state_scale);
  }

  /// z̃ from q and x̃ (null: no solve).
  void mix(const Chunk<T>& t, const T* x) {
    for (int c = 0; c < t.lanes; c += kLanes<T>) {
      const Vec<T> of_x = load(solved + c), of_q = load(direct + c);
      for (int i = 0; i < t.size.dim; ++i) {
        const int at = i * t.lanes + c;
        // A weight of 0 leaves its term out altogether: x̃ may be NaN where there was nothing to solve.
        const Vec<T> from_q = of_q == 0 ? Vec<T>{} : of_q * load(t.q + at);
        const Vec<T> from_x = x == nullptr ? Vec<T>{} : of_x == 0 ? Vec<T>{} : of_x * load(x + at);
        store(z + at, from_x + from_q);
      }
    }
  }

  /// o ← scale · (σU_c)ᵀ z̃_c, as lanes [V × lanes].
  void read(const Chunk<T>& t, const T* u, int ldu, double scale, T* o) {
    const int lanes = t.lanes;
    gemm<T>(t.len, lanes, t.size.dim, {t.kt, 1, lanes}, z, lanes, scores, lanes);
    apply_mask(t);
    gemm<T>(t.size.values, lanes, t.size.dim, {u, 1, ldu}, z, lanes, o, lanes);
    scale_lanes(o, t.size.values, lanes, state_scale);
    add_gemm<T>(t.size.values, lanes, t.len, {t.v, 1, t.ldv}, scores, lanes, o, lanes);
    if (scale != 1) {
      for (int i = 0; i < t.size.values * lanes; ++i) o[i] *= static_cast<T>(scale);
    }
  }

  /// w ← σU_c g_c for g as lanes [V × lanes]: what o's gradient means for z. raw[c][j] ← g_c · v_j.
  void transpose(const Chunk<T>& t, const T* u, int ldu, const T* g, T* w, T* raw) {
    const int lanes = t.lanes;
    gemm<T>(t.len, lanes, t.size.values, {t.vt, 1, lanes}, g, lanes, scores, lanes);
    to_rows<T>(scores, lanes, t.len, t.len, raw, lanes);
    apply_mask(t);
    gemm<T>(t.size.dim, lanes, t.size.values, {u, ldu, 1}, g, lanes, w, lanes);
    scale_lanes(w, t.size.dim, lanes, state_scale);
    add_gemm<T>(t.size.dim, lanes, t.len, {t.k, 1, t.ldk}, scores, lanes, w, lanes);
  }

  void apply_mask(const Chunk<T>& t) {
    for (int i = 0; i < t.len * t.lanes; i += kLanes<T>) {
      const Vec<T> by = load(mask + i);
      store(scores + i, by == 0 ? Vec<T>{} : load(scores + i) * by);
    }
  }

  /// A factor of 0 clears, also what is not finite.
  static void scale_lanes(T* values, int rows, int lanes, const T* factor) {
    for (int c = 0; c < lanes; c += kLanes<T>) {
      const Vec<T> by = load(factor + c);
      for (int i = 0; i < rows; ++i) {
        T* at = values + i * lanes + c;
        store(at, by == 0 ? Vec<T>{} : load(at) * by);
      }
    }
  }
};

}  // namespace gka::kernels::cpu::GKA_ISA
