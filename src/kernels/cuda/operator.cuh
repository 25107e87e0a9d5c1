// The linear system of every token of a chunk, (σ_c H_c + ρ) x = b, as an operator on lanes, and the norms that fix σ
// (kernels/system_scale.h).
#pragma once

#include "kernels/cuda/chunk.cuh"
#include "kernels/system_scale.h"

namespace gka::kernels::cuda {

template <typename T>
struct Operator {
  Chunk<T>* chunk;
  T* h;                                   // H_0 [D × ldh], the block's own copy
  T* hk;                                  // H_0 K as lanes
  T* gram;                                // [len × lanes]: k_j · k_c
  T* mask;                                // [len × lanes]: M_jc β_j σ_c, 0 for j > c
  T* scores;                              // scratch, [len × lanes], for whoever has scores
  T* ridge_row;                           // [D]: ρ_i, with a diagonal
  alignas(16) T state_scale[kMaxChunk];   // σ_c ζ_c
  alignas(16) T ridge_lane[kMaxChunk];    // ρ_c
  alignas(16) T key_products[kMaxChunk];  // k_cᵀ H_0 k_c
  int diagonal;

  double norm[kMaxChunk];   // ‖H_c‖_F
  double sigma[kMaxChunk];  // 0 where there is nothing to solve
  double rho[kMaxChunk];
  double step_size[kMaxChunk];  // √|ε_c|, see set_norms
  double step_sign[kMaxChunk];
  double start;    // ‖H_0‖_F
  double h_scale;  // the same, or 1 where that is of no use as a scale
  int lost[kMaxChunk];

  __host__ __device__ void allocate_hot(Arena& arena, const Sizes& s) {
    h = arena.take<T>(s.h_size());
    scores = arena.take<T>(kMaxChunk * kStride);
  }
  __host__ __device__ void allocate(Arena& arena, const Sizes& s) {
    mask = arena.take<T>(kMaxChunk * kStride);
    ridge_row = arena.take<T>(s.dim);
  }
  /// H_0 K and the Gram matrix are needed once more after the solve, or (in `room`) only while the norms are found.
  __host__ __device__ void keep_products(Arena& arena, const Sizes& s) {
    gram = arena.take<T>(kMaxChunk * kStride);
    hk = arena.take<T>(s.lanes_of_keys());
  }
  __host__ __device__ void lend_room(T* room) {
    gram = scores;
    hk = room;
  }

  /// Whether token c has a system to solve. A memory that is not finite has none: its answer is NaN.
  __device__ bool live(int c) const { return sigma[c] > 0; }

  /// `norms`, if given, are ‖H_c‖_F as an earlier pass found them, `stride` apart. h is in place already.
  __device__ __noinline__ void set(Chunk<T>& tokens, const Options& options, std::int64_t head,
                                   const double* norms = nullptr, std::int64_t stride = 0) {
    const int len = tokens.len, lanes = tokens.lanes, dim = tokens.size.dim;
    gemm<T>(dim, lanes, dim, {h, 1, tokens.size.ldh()}, tokens.kt, kStride, hk, kStride);
    gemm<T>(len, lanes, dim, {tokens.kt, 1, kStride}, tokens.kt, kStride, gram, kStride);
    const double frobenius_h = frobenius(h, tokens.size.h_size());
    alone([&] {
      chunk = &tokens;
      start = frobenius_h;
      h_scale = start > 0 && finite(start) ? start : 1;
      diagonal = options.ridge_diagonal != nullptr;
    });
    tokens.find_lost(tokens.bad_key, tokens.key_decay(), !finite(frobenius_h), lost);
    if (norms == nullptr) {
      set_norms();
    } else {
      each(len, [&](int c) { norm[c] = norms[c * stride]; });
    }
    set_ridge(options, head);
    set_mask();
  }

  /// Calls finish(i, c, value, early(i, c, width)) with the vectors of σ H x, row i, lanes c …
  template <typename Early, typename Finish>
  __device__ __forceinline__ void apply(const T* x, Early&& early, Finish&& finish) {
    if (sizeof(T) == 4 && in_shared(x) && in_shared(h) && in_shared(chunk->kt) && in_shared(scores)) {
      apply_with<true>(x, early, finish);
    } else {
      apply_with<false>(x, early, finish);
    }
  }

  /// y ← σ H x.
  __device__ __noinline__ void apply_to(const T* x, T* y) {
    apply(x, NothingEarly<T>{},
          [&](int i, int c, const auto& value, const auto&) { store(y + i * kStride + c, value); });
  }

  /// The ridge at row i, lanes c.
  template <int kWidth = kVector>
  __device__ __forceinline__ Vec<T, kWidth> ridge(int i, int c) const {
    return diagonal ? broadcast<kWidth>(ridge_row[i]) : load<kWidth>(ridge_lane + c);
  }

 private:
  /// ‖H_c‖² = γ²‖H_{c-1}‖² + ε_c with ε_c = 2γβ k_cᵀH_{c-1}k_c + β²‖k_c‖⁴, that is ζ_c²‖H_0‖² + Σ_j M_jc² ε_j; sums of
  /// squares with their largest term factored out, because the squares leave the range of numbers first.
  __device__ void set_norms() {
    const Chunk<T>& t = *chunk;
    const Decay& decay = t.key_decay();
    lane_dot<T>(hk, t.kt, t.size.dim, t.lanes, key_products);
    const auto add = [](double a, double b) { return a + b; };
    double* written = norm;  // and then the largest term
    fold_earlier(
        t.len,
        [&](int c, int j) {
          const double g = gram[j * kStride + c];
          return j < c ? decay.m(j, c - 1) * t.beta[j] * g * g : 0;
        },
        add, written);
    each(t.len, [&](int c) {
      const double gamma = decay.gamma[c], reach = c == 0 ? 1 : decay.zeta[c - 1];
      const double before = written[c] + (reach == 0 ? 0 : reach * static_cast<double>(key_products[c]));
      const double added = t.beta[c] * static_cast<double>(gram[c * kStride + c]);
      const double cross = gamma == 0 ? 0 : sqrt(t.beta[c]) * sqrt(2 * gamma * (before < 0 ? -before : before));
      const double top = max(added, cross), a = added / top, b = cross / top;
      const double square = top > 0 ? a * a + (before < 0 ? -b * b : b * b) : 0;
      step_size[c] = top * sqrt(square < 0 ? -square : square);
      step_sign[c] = square < 0 ? -1 : 1;
    });
    const auto from_state = [&](int c) { return decay.zeta[c] == 0 ? 0 : decay.zeta[c] * start; };
    const auto from_token = [&](int c, int j) {
      const double by = decay.m(j, c);
      return by == 0 ? 0 : by * step_size[j];
    };
    fold_earlier(t.len, from_token, [](double a, double b) { return max(a, b); }, norm);
    const auto inverse = [&](int c) {  // of the largest term, where there is one
      const double top = norm[c];
      return !(top > 0) || !finite(top) ? 0 : top < 0x1p-1000 ? 0x1p+1000 : 1 / top;
    };
    each(t.len, [&](int c) {
      norm[c] = max(max(0.0, from_state(c)), norm[c]);
      rho[c] = inverse(c);
    });
    double* squares = sigma;
    fold_earlier(
        t.len,
        [&](int c, int j) {
          const double ratio = from_token(c, j) * rho[c];
          return step_sign[j] * ratio * ratio;
        },
        add, squares);
    each(t.len, [&](int c) {
      const double top = norm[c], ratio = from_state(c) * rho[c], square = squares[c] + ratio * ratio;
      norm[c] = lost[c]       ? not_a_number()
                : finite(top) ? sqrt(square > 0 ? square : 0) / (rho[c] > 0 ? rho[c] : 1)
                              : top;
    });
  }

  __device__ void set_ridge(const Options& options, std::int64_t head) {
    const Chunk<T>& t = *chunk;
    if (diagonal) {
      each(t.size.dim, [&](int i) { ridge_row[i] = static_cast<T>(options.ridge_diagonal[head * t.size.dim + i]); });
    }
    each(kMaxChunk, [&](int c) {
      state_scale[c] = T{0};
      ridge_lane[c] = T{1};
      if (c >= t.len) return;
      const SystemScale scale = system_scale(options, norm[c], t.key_decay().zeta[c],
                                             static_cast<double>(std::numeric_limits<T>::max()), lost[c] != 0);
      sigma[c] = scale.sigma;
      rho[c] = scale.rho;
      state_scale[c] = static_cast<T>(scale.sigma * t.key_decay().zeta[c]);
      ridge_lane[c] = static_cast<T>(rho[c]);
    });
  }

  __device__ void set_mask() {
    const Chunk<T>& t = *chunk;
    move(
        t.len * kMaxChunk,
        [&](int at) {
          const int j = at / kMaxChunk, c = at % kMaxChunk;
          return c >= j && c < t.len ? static_cast<T>(t.key_decay().m(j, c) * t.beta[j] * sigma[c]) : T{0};
        },
        [&](int at, T value) { mask[at / kMaxChunk * kStride + at % kMaxChunk] = value; });
  }

  template <bool kShared, typename Early, typename Finish>
  __device__ __forceinline__ void apply_with(const T* x, Early&& early, Finish&& finish) {
    const Chunk<T>& t = *chunk;
    chunk_product<T, kShared>(t.size.dim, t.lanes, t.size.dim, {h, 1, t.size.ldh()}, x, state_scale,
                              {t.len, {t.kt, 1, kStride}, mask, scores, {t.kt, kStride, 1}}, early, finish);
  }
};

}  // namespace gka::kernels::cuda
