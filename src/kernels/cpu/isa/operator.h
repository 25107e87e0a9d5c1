// The linear system of every token of a chunk, (σ_c H_c + ρ) x = b, as an operator on lanes, and the norms that fix σ
// (kernels/system_scale.h).
#pragma once

#include "kernels/cpu/isa/chunk.h"
#include "kernels/system_scale.h"

namespace gka::kernels::cpu::GKA_ISA {

template <typename T>
struct Operator {
  const Chunk<T>* chunk = nullptr;
  const T* h = nullptr;  // H_0 [D × ldh]
  int ldh = 0;
  Buffer<T> hk;           // H_0 K as lanes
  Buffer<T> gram;         // [len × lanes]: k_j · k_c
  Buffer<T> mask;         // [len × lanes]: M_jc β_j σ_c, 0 for j > c
  Buffer<T> scores;       // scratch, [len × lanes]
  Buffer<T> panels;       // H_0 and the keys as apply_columns reads them
  Buffer<T> state_scale;  // [lanes]: σ_c ζ_c
  Buffer<T> ridge_lane;   // [lanes]: ρ_c
  Buffer<T> ridge_row;    // [D]: ρ_i, with a diagonal
  bool diagonal = false;

  double norm[kMaxChunk];   // ‖H_c‖_F
  double sigma[kMaxChunk];  // 0 where there is nothing to solve
  double rho[kMaxChunk];
  double start = 0;    // ‖H_0‖_F
  double h_scale = 1;  // the same, or 1 where that is of no use as a scale

  explicit Operator(const Sizes& s)
      : hk(static_cast<std::int64_t>(s.dim) * kMaxChunk),
        gram(kMaxChunk * kMaxChunk),
        mask(kMaxChunk * kMaxChunk),
        scores(kMaxChunk * kMaxChunk),
        panels(static_cast<std::int64_t>(s.dim) * (s.dim + kMaxChunk)),
        state_scale(kMaxChunk),
        ridge_lane(kMaxChunk),
        ridge_row(s.dim) {}

  /// Whether token c has a system to solve. A memory that is not finite has none: its answer is NaN.
  bool live(int c) const { return sigma[c] > 0; }
  bool lost[kMaxChunk];

  /// `norms`, if given, are ‖H_c‖_F as an earlier pass found them, `stride` apart.
  void set(const Chunk<T>& tokens, const T* state, int ld, const Options& options, std::int64_t head,
           const double* norms = nullptr, std::int64_t stride = 0) {
    chunk = &tokens;
    h = state;
    ldh = ld;
    const int len = tokens.len, lanes = tokens.lanes, dim = tokens.size.dim;
    gemm<T>(dim, lanes, dim, {h, 1, ldh}, tokens.kt, lanes, hk, lanes);
    gemm<T>(len, lanes, dim, {tokens.kt, 1, lanes}, tokens.kt, lanes, gram, lanes);
    set_start();
    if (norms == nullptr) {
      set_norms();
    } else {
      for (int c = 0; c < len; ++c) norm[c] = norms[c * stride];
    }
    set_ridge(options, head);
    set_mask();
    set_panels();
  }

  /// Calls finish(i, c, value) with the vectors of σ H x, row i, lanes c …
  template <typename Finish>
  void apply(const T* x, Finish&& finish) {
    masked_scores(x);
    const int lanes = chunk->lanes;
    constexpr int kStep = kTileVectors * kLanes<T>;
    int c = 0;
    for (; c + kStep <= lanes; c += kStep) apply_columns<kTileVectors>(x, c, finish);
    if (c < lanes) apply_columns<1>(x, c, finish);
  }

  /// y ← σ H x.
  void apply_to(const T* x, T* y) {
    const int lanes = chunk->lanes;
    apply(x, [&](int i, int c, Vec<T> value) { store(y + static_cast<std::int64_t>(i) * lanes + c, value); });
  }

  /// The ridge at row i, lanes c.
  Vec<T> ridge(int i, int c) const { return diagonal ? broadcast(ridge_row[i]) : load(ridge_lane + c); }

 private:
  void set_start() {
    start = frobenius(h, chunk->size.dim, ldh);
    h_scale = start > 0 && std::isfinite(start) ? start : 1;
    chunk->find_lost(chunk->bad_key, *chunk->key_decay, !std::isfinite(start), lost);
  }

  /// ‖H_c‖² = γ²‖H_{c-1}‖² + 2γβ k_cᵀH_{c-1}k_c + β²‖k_c‖⁴, nothing negative, its largest term factored out.
  void set_norms() {
    const Chunk<T>& t = *chunk;
    const Decay& decay = *t.key_decay;
    T kh[kMaxChunk];
    lane_dot<T>(hk, t.kt, t.size.dim, t.lanes, kh);
    double before = start;
    for (int c = 0; c < t.len; ++c) {
      const double gamma = c == 0 ? decay.zeta[0] : decay.m[c - 1][c];
      const double reach = c == 0 ? 1 : decay.zeta[c - 1];
      double written = reach == 0 ? 0 : reach * static_cast<double>(kh[c]);
      for (int j = 0; j < c; ++j) {
        const double g = gram[j * t.lanes + c];
        written += decay.into[c - 1][j] * t.beta[j] * g * g;
      }
      const double kept = gamma == 0 ? 0 : gamma * before;
      const double added = t.beta[c] * static_cast<double>(gram[c * t.lanes + c]);
      const double top = std::max(kept, added);
      norm[c] = top;
      if (top > 0 && std::isfinite(top)) {
        const double cross = gamma == 0 ? 0 : (gamma * written / top) * (t.beta[c] / top);
        const double square = (kept / top) * (kept / top) + 2 * cross + (added / top) * (added / top);
        norm[c] = top * std::sqrt(std::max(square, 0.0));
      }
      if (lost[c]) norm[c] = std::numeric_limits<double>::quiet_NaN();
      before = norm[c];
    }
  }

  void set_ridge(const Options& options, std::int64_t head) {
    const Chunk<T>& t = *chunk;
    diagonal = options.ridge_diagonal != nullptr;
    for (int i = 0; diagonal && i < t.size.dim; ++i) {
      ridge_row[i] = static_cast<T>(options.ridge_diagonal[head * t.size.dim + i]);
    }
    for (int c = 0; c < t.len; ++c) {
      const SystemScale scale = system_scale(options, norm[c], t.key_decay->zeta[c],
                                             static_cast<double>(std::numeric_limits<T>::max()), lost[c]);
      sigma[c] = scale.sigma;
      rho[c] = scale.rho;
    }
  }

  void set_mask() {
    const Chunk<T>& t = *chunk;
    for (int c = t.len; c < t.lanes; ++c) {
      sigma[c] = 0;
      rho[c] = 1;
    }
    for (int c = 0; c < t.lanes; ++c) ridge_lane[c] = static_cast<T>(rho[c]);
    set_weights<T>(*t.key_decay, t.beta, sigma, t.len, t.lanes, mask, state_scale);
  }

  /// For each row tile of a product with H: its columns of H_0, then of K, one after the other. A stream that the
  /// hardware fetches ahead, where rows of H_0 would come from the second-level cache a piece at a time.
  void set_panels() {
    const int dim = chunk->size.dim, len = chunk->len;
    T* to = panels;
    for_row_tiles(dim, [&](auto rows, int i) {
      constexpr int kRows = decltype(rows)::value;
      for (int l = 0; l < dim; ++l, to += kRows) std::memcpy(to, h + l * ldh + i, sizeof(T) * kRows);
      for (int j = 0; j < len; ++j, to += kRows) std::memcpy(to, chunk->k + j * chunk->ldk + i, sizeof(T) * kRows);
    });
  }

  /// scores[j][c] = mask[j][c] (k_j · x_c). Lanes that lie wholly before token j are neither written here nor read.
  void masked_scores(const T* x) {
    const int lanes = chunk->lanes;
    for_row_tiles(chunk->len, [&](auto rows, int j) {
      constexpr int kRows = decltype(rows)::value;
      const Left<T> keys{chunk->kt + j, 1, lanes};
      int c = j / kLanes<T> * kLanes<T>;
      if ((lanes - c) / kLanes<T> % 2 != 0) {
        scores_tile<kRows, 1>(keys, x, j, c);
        c += kLanes<T>;
      }
      for (; c < lanes; c += 2 * kLanes<T>) scores_tile<kRows, 2>(keys, x, j, c);
    });
  }

  template <int kRows, int kVectors>
  void scores_tile(Left<T> keys, const T* x, int j, int c) {
    const int lanes = chunk->lanes;
    Tile<T, kRows, kVectors> tile;
    tile.clear();
    tile.multiply(keys, x + c, lanes, 0, chunk->size.dim);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const int at = (j + i) * lanes + c + v * kLanes<T>;
        store(scores + at, tile.acc[i][v] * load(mask + at));
      }
    }
  }

  /// Lanes c … of σ H x: the state's part, scaled, plus the chunk's own tokens up to each lane.
  template <int kVectors, typename Finish>
  void apply_columns(const T* x, int c, Finish&& finish) {
    const int lanes = chunk->lanes, len = chunk->len, dim = chunk->size.dim;
    for_row_tiles(dim, [&](auto rows, int i) {
      constexpr int kRows = decltype(rows)::value;
      Tile<T, kRows, kVectors> tile;
      tile.clear();
      const T* panel = panels + i * (dim + len);
      tile.multiply({panel, 1, kRows}, x + c, lanes, 0, dim);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Vec<T> scale = load(state_scale + c + v * kLanes<T>);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) tile.acc[r][v] = scale == 0 ? Vec<T>{} : tile.acc[r][v] * scale;
      }
      const Left<T> keys{panel + dim * kRows, 1, kRows};
      tile.multiply(keys, scores + c, lanes, 0, std::min(len, c + kLanes<T>));
      if constexpr (kVectors > 1) {
        tile.template multiply<1>(keys, scores + c, lanes, std::min(len, c + kLanes<T>),
                                  std::min(len, c + 2 * kLanes<T>));
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) finish(i + r, c + v * kLanes<T>, tile.acc[r][v]);
      }
    });
  }
};

}  // namespace gka::kernels::cpu::GKA_ISA
