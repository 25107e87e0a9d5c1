// Backward, in three passes over segments:
//
//   1. each segment by itself, in reverse, as if nothing came from later ones: the second solve, dq, dα, and the
//      segment's own part of dk, dv, dβ, dg and of the gradient of its starting state;
//   2. along each sequence, in reverse: the gradient that reaches the end of every segment,
//      G_{s-1} = (Π γ over segment s) G_s + (segment s's own part);
//   3. each segment again: what G_s adds to dk, dv, dβ and dg. It is linear in G_s and needs no solve.
//
// Keys and values that heads share get the sum of those heads' dk and dv, in the order of the heads: one worker has all
// of them, in pass 3 or in the walk, and adds them up in T.
//
// Where whole sequences keep all threads busy a worker walks a sequence from its end, and all three happen chunk by
// chunk while the chunk is at hand. The arithmetic is the same either way, to the bit.
//
// With Ḡ_i all the gradient that reaches H_i and R̄_i the same for U,
//
//   dk_i = 2β_i Ḡ_i k_i + β_i R̄_i v_i,  dv_i = β_i R̄_iᵀ k_i,  dβ_i = k_iᵀ(Ḡ_i k_i + R̄_i v_i),
//   dg_i = ⟨Ḡ_i, γ_i H_{i-1}⟩ + ⟨R̄_i, γ_i U_{i-1}⟩,
//
// and a token's own gradient is dH_c = −½ σ_c Σ (p zᵀ + z pᵀ) + φ_c H_c: one pair (y, x̃) for the implicit gradient, one
// per iteration for the unrolled; φ is what comes through the norm.
#include <memory>
#include <numeric>

#include "kernels/cpu/isa/entry.h"
#include "kernels/cpu/isa/recall.h"
#include "kernels/cpu/isa/solvers.h"
#include "kernels/cpu/isa/states.h"

namespace gka::kernels::cpu::GKA_ISA {
namespace {

/// What pass 1 leaves for pass 3 where they are apart: per segment and head dk and dv so far, chunk by chunk as lanes,
/// and dβ and dg by token.
template <typename T>
struct Halfway {
  std::int64_t k_size = 0, v_size = 0;  // of one segment
  Buffer<T> k, v;
  Buffer<double> beta, log_decay;

  void allocate(const Sizes& s, std::int64_t tasks) {
    const std::int64_t lanes = chunks_of(s) * padded<T>(s.chunk);
    k_size = lanes * s.dim;
    v_size = lanes * s.values;
    k.resize(tasks * k_size);
    v.resize(tasks * v_size);
    beta.resize(tasks * kSegment);
    log_decay.resize(tasks * kSegment);
  }

  static std::int64_t chunks_of(const Sizes& s) { return (kSegment + s.chunk - 1) / s.chunk; }
};

template <typename T>
struct Workspace {
  Sizes size;
  Chunk<T> chunk;
  Operator<T> op;
  LaneSolver<T> solver;
  Recall<T> recall;
  std::unique_ptr<StatePair<T>[]> starts;  // of the segment's chunks
  StatePair<T> g;                          // what reaches the state at the end of a chunk from its own segment,
  double fade_h = 0, fade_u = 0;           // times these
  StatePair<T> arriving;                   // what reaches the end of the segment
  Buffer<T> d_o, x, y, w, right, z;        // lanes
  Buffer<T> gk, rv, dv;                    // Ḡ_i k_i, R̄_i v_i, R̄_iᵀ k_i as lanes; then dk and dv
  Buffer<T> scores, rows, rows_too;        // for up to three terms at once
  Buffer<T> lanes_too;
  double inner_h[kMaxChunk];  // ⟨dH_c, H_c⟩
  double inner_u[kMaxChunk];  // ⟨dU_c, U_c⟩
  double phi_f2[kMaxChunk];   // φ_c ‖H_c‖²
  double d_ridge[kMaxChunk];
  double d_beta[kSegment], d_log_decay[kSegment];
  double key_reach[kSegment + 1], value_reach[kSegment + 1];  // Π γ from after a token to the segment's end
  double passed[kSegment];                                    // β k·(Ḡk + R̄v) of what arrives
  bool aside[kMaxChunk];                                      // tokens whose own gradient is not a number
  Buffer<double> d_diagonal;
  Buffer<T> shared_k, shared_v;  // dk and dv of earlier heads of a group, by token

  Workspace(const Sizes& s, const Options& options)
      : size(s), chunk(s), op(s), solver(s, options, unrolls(options)), recall(s), g(s), arriving(s) {
    const std::int64_t chunks = Halfway<T>::chunks_of(s);
    starts.reset(new StatePair<T>[chunks]);
    for (std::int64_t i = 0; i < chunks; ++i) starts[i].allocate(s);
    const std::int64_t d = static_cast<std::int64_t>(s.dim) * kMaxChunk;
    for (Buffer<T>* b : {&x, &y, &w, &right, &z, &gk, &rv}) b->resize(d);
    for (Buffer<T>* b : {&d_o, &dv}) b->resize(static_cast<std::int64_t>(std::max(s.dim, s.values)) * kMaxChunk);
    scores.resize(3 * kMaxChunk * kMaxChunk);
    for (Buffer<T>* b : {&rows, &rows_too}) {
      b->resize(static_cast<std::int64_t>(3) * kMaxChunk * std::max(chunk.ldk, chunk.ldv));
    }
    lanes_too.resize(d);
    d_diagonal.resize(s.dim);
  }

  /// For up to `tokens` tokens of heads that share keys or values.
  void make_room_for_sums(const Problem& p, std::int64_t tokens) {
    if (p.key_group > 1) shared_k.resize(tokens * size.dim);
    if (p.value_group > 1) shared_v.resize(tokens * size.values);
  }
};

/// For n whole vectors: in T within a stretch of 128 numbers, in float64 from there on.
template <typename T>
double inner_product(const T* a, const T* b, std::int64_t n) {
  constexpr int kStretch = 128;
  double total = 0;
  for (std::int64_t i = 0; i < n; i += kStretch) {
    const std::int64_t end = std::min<std::int64_t>(n, i + kStretch);
    Vec<T> sum{};
    for (std::int64_t j = i; j < end; j += kLanes<T>) sum += load(a + j) * load(b + j);
    T part[kLanes<T>];
    store(part, sum);
    double stretch = 0;
    for (const T x : part) stretch += x;
    total += stretch;
  }
  return total;
}

/// scores[c][i] *= M_ic weight_c, 0 for i > c.
template <typename T>
void weigh_later(const Chunk<T>& t, const Decay& decay, const double* weight, T* scores) {
  for (int c = 0; c < t.len; ++c) {
    T* row = scores + c * t.lanes;
    const double* m = decay.into[c];
    const double by = weight[c];
    for (int i = 0; i < t.lanes; ++i) row[i] = i <= c ? row[i] * static_cast<T>(m[i] * by) : T{0};
  }
}

/// to[c] = weight_c from[c], rows of ld numbers.
template <typename T>
void weigh_rows(const T* from, const double* weight, int len, int ld, T* to) {
  for (int c = 0; c < len; ++c) {
    const T by = static_cast<T>(weight[c]);
    for (int i = 0; i < ld; ++i) to[c * ld + i] = from[c * ld + i] * by;
  }
}

/// `terms` terms Σ_{c ≥ i} (token c of rows) scores[c][i] into Ḡk, and as many Σ_c (rows_too c)(rows c)ᵀ, a symmetric
/// sum, into what reaches the chunk's start; with them `more`, if there is any.
template <typename T>
void add_terms(Workspace<T>& w, int terms, const T* more = nullptr, T more_by = 1, T more_again = 1) {
  const Chunk<T>& t = w.chunk;
  const Left<T> left{w.rows, 1, t.ldk};
  const int dim = w.size.dim, n = terms * t.len;
  add_gemm<T>(dim, t.lanes, n, left, w.scores, t.lanes, w.gk, t.lanes);
  Start<T> start = faded(w.g.h.get(), w.g.ldh, w.fade_h);
  start.ld = w.g.ldh;
  start.more = more;
  start.more_by = more_by;
  start.more_again = more_again;
  symmetric_gemm<T>(dim, n, left, w.rows_too, t.ldk, w.g.h, w.g.ldh, start);
  w.fade_h = 1;
}

/// k_i · z_c and k_i · p_c into the first two blocks of scores.
template <typename T>
void pair_scores(Workspace<T>& w, const T* p, const T* z) {
  const Chunk<T>& t = w.chunk;
  gemm<T>(t.len, t.lanes, w.size.dim, {z, 1, t.lanes}, t.kt, t.lanes, w.scores, t.lanes);
  gemm<T>(t.len, t.lanes, w.size.dim, {p, 1, t.lanes}, t.kt, t.lanes, w.scores + t.len * t.lanes, t.lanes);
}

/// dS_c = −p_c z_cᵀ as the first two terms of add_terms, from what pair_scores left.
template <typename T>
void set_pair(Workspace<T>& w, const T* p, const T* z) {
  const Chunk<T>& t = w.chunk;
  const int dim = w.size.dim, len = t.len;
  double half[kMaxChunk], carried[kMaxChunk];
  for (int c = 0; c < len; ++c) {
    half[c] = -0.5 * w.op.sigma[c];
    carried[c] = half[c] * t.key_decay->zeta[c];
  }
  weigh_later(t, *t.key_decay, half, w.scores.get());
  weigh_later(t, *t.key_decay, half, w.scores + len * t.lanes);
  T* of_p = w.rows;
  T* of_z = w.rows + len * t.ldk;
  to_rows<T>(p, t.lanes, len, dim, of_p, t.ldk);
  to_rows<T>(z, t.lanes, len, dim, of_z, t.ldk);
  weigh_rows<T>(of_z, carried, len, t.ldk, w.rows_too);
  weigh_rows<T>(of_p, carried, len, t.ldk, w.rows_too + len * t.ldk);
  if (!w.op.diagonal) return;
  for (int i = 0; i < dim; ++i) {
    for (int c = 0; c < len; ++c) w.d_diagonal[i] -= static_cast<double>(p[i * t.lanes + c]) * z[i * t.lanes + c];
  }
}

/// The same pair for itself, with S z at hand.
template <typename T>
void add_pair(Workspace<T>& w, const T* p, const T* z, const T* sz) {
  T dots[kMaxChunk];
  lane_dot<T>(p, sz, w.size.dim, w.chunk.lanes, dots);
  for (int c = 0; c < w.chunk.len; ++c) w.inner_h[c] -= dots[c];
  pair_scores(w, p, z);
  set_pair(w, p, z);
  add_terms(w, 2);
}

/// ⟨dS_c, S_c⟩ = −p_cᵀ S_c z_c from what pair_scores left: the chunk's own tokens need no products any more.
template <typename T>
void add_inner(Workspace<T>& w, const T* p, const T* z) {
  const Chunk<T>& t = w.chunk;
  const int dim = w.size.dim, lanes = t.lanes;
  gemm<T>(dim, lanes, dim, {w.op.h, 1, w.op.ldh}, z, lanes, w.lanes_too, lanes);
  T dots[kMaxChunk];
  lane_dot<T>(p, w.lanes_too, dim, lanes, dots);
  for (int c = 0; c < t.len; ++c) {
    const T scale = w.op.state_scale[c];
    const T* of_z = w.scores + c * lanes;
    const T* of_p = w.scores + (t.len + c) * lanes;
    const double* m = t.key_decay->into[c];
    double terms[kMaxChunk], own = 0;  // products and sums apart: fused or not must not depend on the place in a vector
    for (int i = 0; i <= c; ++i) terms[i] = m[i] * t.beta[i] * (static_cast<double>(of_z[i]) * of_p[i]);
    for (int i = 0; i <= c; ++i) own += terms[i];
    w.inner_h[c] -= (scale == 0 ? 0 : static_cast<double>(scale * dots[c])) + w.op.sigma[c] * own;
  }
}

/// Σ_c φ_c H_c: Q_ij = Σ_c M_ic φ_c M_jc is M_ij Q_jj for i ≤ j, so a recursion over Q_jj is all it takes. φ is of the
/// order of 1/f², which leaves the range of numbers long before the memory does: every factor 1/f is met with a weight
/// that is at most f before it is met with the other one, and Q_jj is kept times f_j². `terms` other terms wait to be
/// added with it.
template <typename T>
void add_norm_term(Workspace<T>& w, int terms) {
  const Chunk<T>& t = w.chunk;
  const Decay& decay = *t.key_decay;
  const int len = t.len, lanes = t.lanes, dim = w.size.dim;
  const double* f = w.op.norm;
  double own[kMaxChunk];  // Q_jj f_j²
  double inverse[kMaxChunk];
  bool any = false;
  for (int j = len - 1; j >= 0; --j) {
    own[j] = w.phi_f2[j];
    if (j + 1 < len && own[j + 1] != 0) {
      const double m = decay.into[j + 1][j], kept = m == 0 ? 0 : m * f[j] / f[j + 1];  // f_j may be NaN
      own[j] += kept * kept * own[j + 1];
    }
    any |= own[j] != 0;
    inverse[j] = own[j] != 0 ? 1 / f[j] : 0;
  }
  if (!any) return add_terms(w, terms);
  const double h_scale = w.op.h_scale;
  const T down = static_cast<T>(1 / h_scale);
  T from_state[kMaxChunk] = {};
  double to_start[kMaxChunk];
  for (int i = 0; i < len; ++i) {
    to_start[i] = own[i] * (decay.zeta[i] * inverse[i]) * (t.beta[i] * inverse[i]);
    from_state[i] = static_cast<T>(own[i] * (decay.zeta[i] * h_scale * inverse[i]) * inverse[i]);
  }
  for (int c = 0; c < lanes; c += kLanes<T>) {
    const Vec<T> by = load(from_state + c);
    for (int at = c; at < dim * lanes; at += lanes) {  // a weight of 0 keeps out even a NaN of H_0
      store(w.gk + at, load(w.gk + at) + (by == 0 ? Vec<T>{} : by * (load(w.op.hk + at) * down)));
    }
  }
  T* scores = w.scores + terms * len * lanes;
  for (int j = 0; j < len; ++j) {
    T* row = scores + j * lanes;
    const T* gram = w.op.gram + j * lanes;
    const double beta = t.beta[j], here = own[j] * (beta * inverse[j]), once = inverse[j];
    for (int i = 0; i < j; ++i) row[i] = static_cast<T>(here * (decay.into[j][i] * once)) * gram[i];
    for (int i = j; i < len; ++i) {
      row[i] = static_cast<T>(own[i] * (decay.m[j][i] * beta * inverse[i]) * inverse[i]) * gram[i];
    }
    std::fill(row + len, row + lanes, T{0});
  }
  std::memcpy(w.rows + terms * len * t.ldk, t.k, sizeof(T) * len * t.ldk);
  weigh_rows<T>(t.k, to_start, len, t.ldk, w.rows_too + terms * len * t.ldk);
  const T by = static_cast<T>(own[0] * (decay.zeta[0] * inverse[0]) * (decay.zeta[0] * h_scale * inverse[0]));
  add_terms(w, terms + 1, by == 0 ? nullptr : w.op.h, down, by);
}

template <typename T>
void scale_lanes_by_end(const Chunk<T>& t, const Decay& decay, T* values, int rows) {
  T factor[kMaxChunk] = {};
  for (int c = 0; c < t.len; ++c) factor[c] = static_cast<T>(decay.end(c, t.len));
  Recall<T>::scale_lanes(values, rows, t.lanes, factor);
}

/// Gk, Rv and Rᵀk for a gradient G, R of the states.
template <typename T>
void products_with(const Workspace<T>& w, const StatePair<T>& g, T* gk, T* rv, T* dv) {
  const Chunk<T>& t = w.chunk;
  const int dim = w.size.dim, values = w.size.values, lanes = t.lanes;
  if (w.size.solves) gemm<T>(dim, lanes, dim, {g.h, 1, g.ldh}, t.kt, lanes, gk, lanes);
  if (!w.size.remembers) return;
  gemm<T>(dim, lanes, values, {g.u, g.ldu, 1}, t.vt, lanes, rv, lanes);
  gemm<T>(values, lanes, dim, {g.u, 1, g.ldu}, t.kt, lanes, dv, lanes);
}

/// What reaches the end of the chunk, taken to each of its tokens, and to its start.
template <typename T>
void carry_into_chunk(Workspace<T>& w, bool nothing_yet) {
  const Chunk<T>& t = w.chunk;
  const int dim = w.size.dim, values = w.size.values, lanes = t.lanes;
  w.fade_h = nothing_yet ? 0 : t.key_decay->zeta[t.len - 1];
  w.fade_u = nothing_yet ? 0 : t.values_decay().zeta[t.len - 1];
  if (nothing_yet) {
    std::fill(w.gk.get(), w.gk + static_cast<std::int64_t>(dim) * lanes, T{0});
    std::fill(w.rv.get(), w.rv + static_cast<std::int64_t>(dim) * lanes, T{0});
    std::fill(w.dv.get(), w.dv + static_cast<std::int64_t>(values) * lanes, T{0});
    return;
  }
  products_with<T>(w, w.g, w.gk, w.rv, w.dv);
  if (w.size.solves) scale_lanes_by_end<T>(t, *t.key_decay, w.gk, dim);
  if (!w.size.remembers) return;
  scale_lanes_by_end<T>(t, t.values_decay(), w.rv, dim);
  scale_lanes_by_end<T>(t, t.values_decay(), w.dv, values);
}

/// o's gradient through U: w.w = σ_c s U_c do_c, ⟨dU_c, U_c⟩, and dU_c = s z_c do_cᵀ into R̄.
template <typename T>
void values_part(const Problem& p, Workspace<T>& w, const T* u, int ldu) {
  const Chunk<T>& t = w.chunk;
  const int dim = w.size.dim, values = w.size.values, lanes = t.lanes;
  w.recall.set(p, t, w.size.solves ? &w.op : nullptr);
  w.recall.mix(t, w.size.solves ? w.x.get() : nullptr);
  w.recall.transpose(t, u, ldu, w.d_o, w.w, w.scores);
  T dots[kMaxChunk];
  lane_dot<T>(w.recall.z, w.w, dim, lanes, dots);
  double ones[kMaxChunk], carried[kMaxChunk];
  T factor[kMaxChunk] = {};
  for (int c = 0; c < t.len; ++c) {
    w.inner_u[c] = dots[c];
    factor[c] = static_cast<T>(w.recall.sigma[c]);
    ones[c] = 1;
    carried[c] = t.values_decay().zeta[c];
  }
  std::memcpy(w.z, w.recall.z, sizeof(T) * dim * lanes);
  Recall<T>::scale_lanes(w.z, dim, lanes, factor);  // z = σ z̃
  T* of_z = w.rows;
  T* of_o = w.rows + t.len * t.ldk;
  to_rows<T>(w.z, lanes, t.len, dim, of_z, t.ldk);
  to_rows<T>(w.d_o, lanes, t.len, values, of_o, t.ldv);
  weigh_later(t, t.values_decay(), ones, w.scores.get());  // do_c · v_i
  add_gemm<T>(dim, lanes, t.len, {of_z, 1, t.ldk}, w.scores, lanes, w.rv, lanes);
  gemm<T>(t.len, lanes, dim, {w.z, 1, lanes}, t.kt, lanes, w.scores, lanes);
  weigh_later(t, t.values_decay(), ones, w.scores.get());  // z_c · k_i
  add_gemm<T>(values, lanes, t.len, {of_o, 1, t.ldv}, w.scores, lanes, w.dv, lanes);
  weigh_rows<T>(of_z, carried, t.len, t.ldk, of_z);
  gemm<T>(dim, padded<T>(values), t.len, {of_z, 1, t.ldk}, of_o, t.ldv, w.g.u, w.g.ldu,
          faded(w.g.u.get(), w.g.ldu, w.fade_u));
  w.fade_u = 1;
}

/// sum[c] gets a NaN if token c of an array of lanes has something that is not finite.
template <typename T>
void add_finiteness(const T* values, int rows, int lanes, T* sum) {
  for (int c = 0; c < lanes; c += kLanes<T>) {
    Vec<T> totals[4] = {};
    int i = 0;
    for (; i + 4 <= rows; i += 4) {
      for (int j = 0; j < 4; ++j) totals[j] += load(values + (i + j) * lanes + c) * T{0};
    }
    for (; i < rows; ++i) totals[0] += load(values + i * lanes + c) * T{0};
    store(sum + c, load(sum + c) + ((totals[0] + totals[1]) + (totals[2] + totals[3])));
  }
}

template <typename T>
void clear_lane(T* values, int rows, int lanes, int c) {
  for (int i = 0; i < rows; ++i) values[i * lanes + c] = T{0};
}

/// Tokens with a memory, a query, a solution or a gradient that is not finite take no part in products: q, x̃, do and α
/// count as 0 there (w.aside), and what depends on them is marked at the end. `lost` says which tokens those are: they
/// and all before them, back to the last γ = 0. Returns whether the chunk's start is among them.
template <typename T>
bool set_lost_aside(const Problem& p, Workspace<T>& w, const T* u, int ldu, bool* lost) {
  Chunk<T>& t = w.chunk;
  const int dim = w.size.dim, channels = w.size.remembers ? w.size.values : dim;
  std::fill(w.aside, w.aside + t.len, false);
  if (w.size.remembers) {
    const bool state_lost = !all_finite(u, dim * ldu);
    t.find_lost(t.bad_value, t.values_decay(), state_lost, w.aside);
  }
  T finite[kMaxChunk] = {};  // 0 or NaN
  add_finiteness<T>(t.q, dim, t.lanes, finite);
  add_finiteness<T>(w.d_o, channels, t.lanes, finite);
  if (w.size.solves) add_finiteness<T>(w.x, dim, t.lanes, finite);
  bool reaches = false;
  for (int c = t.len - 1; c >= 0; --c) {
    w.aside[c] |= finite[c] != 0 || !std::isfinite(t.alpha[c]) || (w.size.solves && w.op.lost[c]);
    if (w.aside[c]) {
      t.alpha[c] = 0;
      clear_lane<T>(t.q, dim, t.lanes, c);
      clear_lane<T>(w.d_o, channels, t.lanes, c);
      if (w.size.solves) clear_lane<T>(w.x, dim, t.lanes, c);
    }
    reaches |= w.aside[c];
    lost[c] = reaches;
    const bool both_forget = p.options.decay_keys || !w.size.solves;
    if (t.gamma[c] == 0 && both_forget) reaches = false;
  }
  return reaches;
}

template <typename T>
void mark_lost_gradients(Workspace<T>& w, const bool* lost, bool start_lost) {
  const Chunk<T>& t = w.chunk;
  for (int c = 0; c < t.len; ++c) {
    if (!lost[c]) continue;
    mark_lost<T>(w.gk, w.size.dim, t.lanes, c);
    mark_lost<T>(w.rv, w.size.dim, t.lanes, c);
    mark_lost<T>(w.dv, w.size.values, t.lanes, c);
    if (w.aside[c]) fill_nan(w.d_diagonal.get(), 1, w.size.dim, 0);
  }
  if (!start_lost) return;
  if (w.size.solves) fill_nan(w.g.h.get(), w.size.dim, w.size.dim, w.g.ldh);
  if (w.size.remembers) fill_nan(w.g.u.get(), w.size.dim, w.size.values, w.g.ldu);
}

/// The right-hand side of the second solve, σ dx, as lanes.
template <typename T>
void right_hand_side(Workspace<T>& w) {
  const Chunk<T>& t = w.chunk;
  const T* from = w.size.remembers ? w.w.get() : w.d_o.get();
  T factor[kMaxChunk] = {};
  for (int c = 0; c < t.len; ++c) {
    const T own = w.size.remembers ? w.recall.solved[c] : static_cast<T>(w.op.sigma[c]);
    factor[c] = w.aside[c] ? T{0} : own;
  }
  std::memcpy(w.right, from, sizeof(T) * w.size.dim * t.lanes);
  Recall<T>::scale_lanes(w.right, w.size.dim, t.lanes, factor);
}

/// y (as lanes, into w.y) and everything dH_c sends on.
template <typename T>
void solve_part(const Options& options, Workspace<T>& w) {
  const Chunk<T>& t = w.chunk;
  const int dim = w.size.dim, lanes = t.lanes;
  right_hand_side(w);
  std::fill(w.inner_h, w.inner_h + t.len, 0.0);
  std::fill(w.d_ridge, w.d_ridge + t.len, 0.0);
  T dots[kMaxChunk];
  if (unrolls(options)) {
    w.solver.solve(w.op, t.q, w.lanes_too);
    lane_dot<T>(w.lanes_too, w.right, dim, lanes, dots);
    w.solver.reverse(w.op, t.q, w.right, w.y, w.d_ridge,
                     [&](const T* p, const T* z, const T* sz) { add_pair(w, p, z, sz); });
  } else {
    w.solver.solve(w.op, w.right, w.y);
    pair_scores<T>(w, w.y, w.x);
    add_inner<T>(w, w.y, w.x);
    lane_dot<T>(w.x, w.y, dim, lanes, dots);
    set_pair<T>(w, w.y, w.x);
  }
  for (int c = 0; c < t.len; ++c) {
    const SystemScale scale{w.op.sigma[c], w.op.rho[c]};
    const double through = gradient_through_scale(options, dots[c], w.inner_h[c], scale.rho, w.d_ridge[c]);
    w.phi_f2[c] = gradient_of_norm(options, through, scale, w.op.norm[c]);
    w.inner_h[c] += w.phi_f2[c];
  }
  add_norm_term(w, unrolls(options) ? 0 : 2);
}

template <typename T>
void write_query_gradients(const Gradients& out, Workspace<T>& w, std::int64_t b, std::int64_t t0, std::int64_t head) {
  const Chunk<T>& t = w.chunk;
  const int dim = w.size.dim, lanes = t.lanes;
  if (out.d_alpha && w.size.solves && w.size.remembers) {
    T live[kMaxChunk] = {}, tau[kMaxChunk] = {}, sums[kMaxChunk];
    for (int c = 0; c < t.len; ++c) {
      live[c] = w.op.live(c) ? T{1} : T{0};
      tau[c] = static_cast<T>(1 / w.recall.sigma[c]);
    }
    for (int c = 0; c < lanes; c += kLanes<T>) {
      const Vec<T> of_x = load(live + c), of_q = load(tau + c);
      Vec<T> sum{};
      for (int at = c; at < dim * lanes; at += lanes) {
        const Vec<T> solved = of_x == 0 ? Vec<T>{} : load(w.x + at);
        sum += (solved - of_q * load(t.q + at)) * load(w.w + at);
      }
      store(sums + c, sum);
    }
    for (int c = 0; c < t.len; ++c) {
      if (w.aside[c]) fill_nan(sums + c, 1, 1, 0);
      write_row(out.d_alpha, offset(out.d_alpha, b, t0 + c, head), 1, sums + c);
    }
  }
  if (!out.d_q) return;
  for (int c = 0; c < lanes; c += kLanes<T>) {
    const Vec<T> of_w = w.size.remembers ? load(w.recall.direct + c) : Vec<T>{};
    for (int at = c; at < dim * lanes; at += lanes) {
      const Vec<T> solved = w.size.solves ? load(w.y + at) : Vec<T>{};
      store(w.lanes_too + at, solved + (of_w == 0 ? Vec<T>{} : of_w * load(w.w + at)));
    }
  }
  for (int c = 0; c < t.len; ++c) {
    if (w.aside[c]) mark_lost<T>(w.lanes_too, dim, lanes, c);
  }
  w.chunk.store_lanes(out.d_q, b, t0, head, dim, w.lanes_too);
}

/// From Ḡk, R̄v and R̄ᵀk (as lanes): k·Ḡk and k·R̄v of each token, and dk = β(2Ḡk + R̄v) and dv = βR̄ᵀk in the place of Ḡk
/// and R̄ᵀk.
template <typename T>
void token_gradients(const Workspace<T>& w, T* gk, const T* rv, T* dv, double* key_inner, double* value_inner) {
  const Chunk<T>& t = w.chunk;
  const int dim = w.size.dim, values = w.size.values, lanes = t.lanes;
  T from_h[kMaxChunk] = {}, from_u[kMaxChunk] = {}, beta[kMaxChunk] = {};
  if (w.size.solves) lane_dot<T>(t.kt, gk, dim, lanes, from_h);
  if (w.size.remembers) lane_dot<T>(t.kt, rv, dim, lanes, from_u);
  for (int c = 0; c < t.len; ++c) {
    key_inner[c] = from_h[c];
    value_inner[c] = from_u[c];
    beta[c] = static_cast<T>(t.beta[c]);
  }
  for (int c = 0; c < lanes; c += kLanes<T>) {
    const Vec<T> by = load(beta + c);
    for (int at = c; at < dim * lanes; at += lanes) {
      const Vec<T> twice = w.size.solves ? 2 * load(gk + at) : Vec<T>{};
      store(gk + at, by * (w.size.remembers ? twice + load(rv + at) : twice));
    }
  }
  if (w.size.remembers) Recall<T>::scale_lanes(dv, values, lanes, beta);
}

/// dk, dv and dβ of the chunk as far as its own segment goes, and dg by reverse running sums from the end of the chunk:
/// dg_c = ⟨Ḡ_c, H_c⟩ − β_c k_cᵀḠ_ck_c, and that is also what reaches H_{c-1} from later tokens, ⟨γ_c Ḡ_c, H_{c-1}⟩.
template <typename T>
void own_gradients(const Problem& p, Workspace<T>& w, double at_end, double* d_beta, double* d_log_decay) {
  const Chunk<T>& t = w.chunk;
  double key_inner[kMaxChunk], value_inner[kMaxChunk];
  token_gradients<T>(w, w.gk, w.rv, w.dv, key_inner, value_inner);
  const bool keys = w.size.solves && p.options.decay_keys;
  double inner = at_end;
  for (int c = t.len - 1; c >= 0; --c) {
    d_beta[c] = key_inner[c] + value_inner[c];
    if (keys) inner += w.inner_h[c] - t.beta[c] * key_inner[c];
    if (w.size.remembers) inner += w.inner_u[c] - t.beta[c] * value_inner[c];
    if (t.gamma[c] == 0) inner = 0;
    d_log_decay[c] = inner;
  }
}

/// Adds what arrives at the segment's end to dk, dv and dβ of the chunk at its token `first`.
template <typename T>
void add_arriving(const Problem& p, Workspace<T>& w, std::int64_t first) {
  const Chunk<T>& t = w.chunk;
  const int dim = w.size.dim, values = w.size.values, lanes = t.lanes;
  T* gk = w.w;  // free by now, like the other two
  T* rv = w.z;
  T* dv = w.d_o;
  products_with<T>(w, w.arriving, gk, rv, dv);
  T key_factor[kMaxChunk] = {}, value_factor[kMaxChunk] = {};
  for (int c = 0; c < t.len; ++c) {
    key_factor[c] = static_cast<T>(w.key_reach[first + c + 1]);
    value_factor[c] = static_cast<T>(w.value_reach[first + c + 1]);
  }
  if (w.size.solves) Recall<T>::scale_lanes(gk, dim, lanes, key_factor);
  if (w.size.remembers) {
    Recall<T>::scale_lanes(rv, dim, lanes, value_factor);
    Recall<T>::scale_lanes(dv, values, lanes, value_factor);
  }
  double key_inner[kMaxChunk], value_inner[kMaxChunk];
  token_gradients<T>(w, gk, rv, dv, key_inner, value_inner);
  for (int at = 0; at < dim * lanes; at += kLanes<T>) store(w.gk + at, load(w.gk + at) + load(gk + at));
  for (int at = 0; at < values * lanes; at += kLanes<T>) store(w.dv + at, load(w.dv + at) + load(dv + at));
  for (int c = 0; c < t.len; ++c) {
    w.d_beta[first + c] += key_inner[c] + value_inner[c];
    w.passed[first + c] = t.beta[c] * ((p.options.decay_keys ? key_inner[c] : 0) + value_inner[c]);
  }
}

/// How much of what arrives at the segment's end gets to each token. Returns ⟨G, H⟩ + ⟨R, U⟩ at its start.
template <typename T>
double reach_back(const Problem& p, const Segment& segment, std::int64_t head, Workspace<T>& w) {
  const std::int64_t length = segment.tokens.length, b = segment.tokens.batch, begin = segment.tokens.begin;
  w.key_reach[length] = w.value_reach[length] = 1;
  for (std::int64_t t = length - 1; t >= 0; --t) {
    const double gamma =
        p.log_decay ? std::exp(read_gate(p.log_decay, offset(p.log_decay, b, begin + t, head), 0)) : 1.0;
    w.value_reach[t] = w.value_reach[t + 1] * gamma;
    w.key_reach[t] = w.key_reach[t + 1] * (p.options.decay_keys ? gamma : 1.0);
  }
  const StatePair<T>& g = w.arriving;
  const std::int64_t dim = w.size.dim;
  double inner = 0;
  if (w.size.solves && p.options.decay_keys && w.key_reach[0] != 0) {
    inner += w.key_reach[0] * inner_product<T>(g.h, w.starts[0].h, dim * g.ldh);
  }
  if (w.size.remembers && w.value_reach[0] != 0) {
    inner += w.value_reach[0] * inner_product<T>(g.u, w.starts[0].u, dim * g.ldu);
  }
  return inner;
}

/// dg_i also gets ⟨G, (Π_{i ≤ l} γ_l) H_{i-1}⟩ from G that arrives: forwards from the segment's start nothing cancels.
template <typename T>
void pass_decay(Workspace<T>& w, std::int64_t length, double inner) {
  for (std::int64_t t = 0; t < length; ++t) {
    w.d_log_decay[t] += inner;
    inner += w.passed[t];
  }
}

/// How many neighbouring heads one task takes, so that all who share a key or a value are in it.
inline std::int64_t heads_together(const Problem& p) { return std::lcm(p.key_group, p.value_group); }

/// One array's gradient of a chunk, as lanes, to where it belongs; `sums` has a row for each token from `begin` on,
/// with what earlier heads of the group left.
template <typename T>
void write_shared(const View& out, std::int64_t group, T* sums, std::int64_t begin, std::int64_t b, std::int64_t t,
                  std::int64_t head, int n, T* lanes, Workspace<T>& w) {
  const View rows{
      .data = sums, .dtype = sizeof(T) == 8 ? DType::float64 : DType::float32, .batch_stride = 0, .token_stride = n};
  if (head % group > 0) {
    T* before = w.d_o;  // free by now
    w.chunk.load_lanes(rows, 0, t - begin, 0, n, before);
    for (int at = 0; at < n * w.chunk.lanes; at += kLanes<T>) store(lanes + at, load(before + at) + load(lanes + at));
  }
  if (head % group == group - 1) {
    w.chunk.store_lanes(out, b, t, head / group, n, lanes);
  } else {
    w.chunk.store_lanes(rows, 0, t - begin, 0, n, lanes);
  }
}

/// dk, dv of the chunk at token `first` of the segment, in their own types. The worker's sums begin at token `begin`.
template <typename T>
void write_chunk(const Problem& p, const Gradients& out, const Segment& segment, std::int64_t begin, std::int64_t head,
                 std::int64_t first, Workspace<T>& w) {
  const std::int64_t b = segment.tokens.batch, t = segment.tokens.begin + first;
  if (out.d_k) write_shared<T>(out.d_k, p.key_group, w.shared_k, begin, b, t, head, w.size.dim, w.gk, w);
  if (out.d_v && w.size.remembers) {
    write_shared<T>(out.d_v, p.value_group, w.shared_v, begin, b, t, head, w.size.values, w.dv, w);
  }
}

template <typename T>
void write_gates(const Gradients& out, const Segment& segment, std::int64_t head, const Workspace<T>& w) {
  const std::int64_t b = segment.tokens.batch, begin = segment.tokens.begin;
  for (std::int64_t t = 0; t < segment.tokens.length; ++t) {
    if (out.d_beta) write_row<double>(out.d_beta, offset(out.d_beta, b, begin + t, head), 1, w.d_beta + t);
    if (out.d_log_decay) {
      write_row<double>(out.d_log_decay, offset(out.d_log_decay, b, begin + t, head), 1, w.d_log_decay + t);
    }
  }
}

/// Whether any gradient comes from behind the segment.
inline bool anything_arrives(const Gradients& out, const Segment& segment) {
  return !segment.last || out.d_h != nullptr || out.d_u != nullptr;
}

/// The states at the start of every chunk of a segment from that of the first; returns how many chunks there are.
template <typename T>
int chunk_starts(const Problem& p, const Segment& segment, std::int64_t head, Workspace<T>& w) {
  const Sizes& s = w.size;
  int i = 0;
  const std::int64_t end = segment.tokens.begin + segment.tokens.length;
  for (std::int64_t t = segment.tokens.begin; t < end; t += s.chunk, ++i) {
    const int len = static_cast<int>(std::min<std::int64_t>(s.chunk, end - t));
    if (t + len == end) continue;
    w.chunk.prefetch(p, segment.tokens.batch, t + len, head, std::min<std::int64_t>(s.chunk, end - t - len));
    w.chunk.load(p, segment.tokens.batch, t, head, len, {.queries = false, .key_lanes = false});
    const StatePair<T>& now = w.starts[i];
    StatePair<T>& next = w.starts[i + 1];
    if (s.solves) advance_keys<T>(w.chunk, now.h, next.h, next.ldh, 0, s.dim, w.rows);
    if (s.remembers) advance_values<T>(w.chunk, now.u, next.u, next.ldu, 0, s.dim, w.rows);
  }
  return i;
}

template <typename T>
void load_gradient(const Problem& p, const Gradients& out, Workspace<T>& w, std::int64_t b, std::int64_t t,
                   std::int64_t head) {
  const int channels = w.size.remembers ? w.size.values : w.size.dim;
  w.chunk.load_lanes(out.d_o, b, t, head, channels, w.d_o);
  if (!w.size.remembers || p.options.scale == 1) return;
  for (int i = 0; i < channels * w.chunk.lanes; ++i) w.d_o[i] *= static_cast<T>(p.options.scale);
}

/// Pass 1. Calls finish(first) with dk and dv of the chunk at the segment's token `first` in w.gk and w.dv, last chunk
/// first; dβ and dg go to w.d_beta and w.d_log_decay, the segment's own part of its starting state's gradient to w.g.
/// The states at the chunks' starts are in place.
template <typename T, typename Finish>
void segment_alone(const Problem& p, const Saved& saved, const Gradients& out, const Segment& segment, int chunks,
                   std::int64_t head, Workspace<T>& w, Finish&& finish) {
  const Sizes& s = w.size;
  const View saved_x = contiguous_view<T>(p, saved.x, p.key_dim);
  std::fill(w.d_diagonal.get(), w.d_diagonal + s.dim, 0.0);
  const std::int64_t b = segment.tokens.batch, begin = segment.tokens.begin;
  for (int i = chunks - 1; i >= 0; --i) {
    const std::int64_t first = static_cast<std::int64_t>(i) * s.chunk, t = begin + first;
    const int len = static_cast<int>(std::min<std::int64_t>(s.chunk, segment.tokens.length - first));
    const bool last = i == chunks - 1;
    double at_end = 0;
    if (!last && s.solves && p.options.decay_keys) {
      at_end += inner_product<T>(w.g.h, w.starts[i + 1].h, static_cast<std::int64_t>(s.dim) * w.g.ldh);
    }
    if (!last && s.remembers) {
      at_end += inner_product<T>(w.g.u, w.starts[i + 1].u, static_cast<std::int64_t>(s.dim) * w.g.ldu);
    }
    w.chunk.load(p, b, t, head, len, {.value_lanes = true});
    load_gradient(p, out, w, b, t, head);
    if (i > 0) {
      w.chunk.prefetch(p, b, t - s.chunk, head, s.chunk);
      for (const View* view : {&p.q, &saved_x}) prefetch_rows(*view, b, t - s.chunk, head, s.chunk, s.dim);
      prefetch_rows(out.d_o, b, t - s.chunk, head, s.chunk, s.remembers ? s.values : s.dim);
    }
    if (s.solves) {
      const double* norms = saved.norm + (b * p.tokens + t) * p.heads + head;
      w.op.set(w.chunk, w.starts[i].h, w.starts[i].ldh, p.options, head, norms, p.heads);
      w.chunk.load_lanes(saved_x, b, t, head, s.dim, w.x);
    }
    bool lost[kMaxChunk];
    const bool start_lost = set_lost_aside(p, w, w.starts[i].u.get(), w.starts[i].ldu, lost);
    carry_into_chunk(w, last);
    if (s.remembers) values_part(p, w, w.starts[i].u.get(), w.starts[i].ldu);
    if (s.solves) solve_part(p.options, w);
    write_query_gradients(out, w, b, t, head);
    mark_lost_gradients(w, lost, start_lost);
    own_gradients(p, w, at_end, w.d_beta + first, w.d_log_decay + first);
    finish(first);
  }
}

/// Π γ over the tokens of a segment.
inline double decay_over(const Problem& p, const Segment& segment, std::int64_t head) {
  if (!p.log_decay) return 1;
  double sum = 0;
  for (std::int64_t t = 0; t < segment.tokens.length; ++t) {
    sum += read_gate(p.log_decay, offset(p.log_decay, segment.tokens.batch, segment.tokens.begin + t, head), 0);
  }
  return std::exp(sum);
}

/// carried ← zeta · carried + own: the gradient at a segment's end becomes that at its start.
template <typename T>
void carry_back(T* carried, const T* own, std::int64_t n, double zeta) {
  const T factor = static_cast<T>(zeta);
  for (std::int64_t i = 0; i < n; ++i) carried[i] = (zeta == 0 ? T{0} : factor * carried[i]) + own[i];
}

/// Pass 2, for one of H and U of one head: `own` becomes what arrives at each segment's end; `start` gets the rest.
template <typename T>
void carry_along(const Problem& p, const Plan& plan, std::int64_t n, std::int64_t head, bool keys,
                 const SegmentStates<T>& own, const T* final_gradient, T* start) {
  const int dim = static_cast<int>(p.key_dim), columns = static_cast<int>(keys ? p.key_dim : p.value_dim);
  const std::int64_t size = p.key_dim * columns;
  Buffer<T> carried(size), before(size);
  unpack_matrix(final_gradient, dim, columns, carried.get(), columns);
  if (keys) symmetrise(carried.get(), dim, dim);
  for (std::int64_t s = plan.begin[n + 1] - 1; s >= plan.begin[n]; --s) {
    T* part = keys ? own.h_at(s, head) : own.u_at(s, head);
    const bool fades = !keys || p.options.decay_keys;
    std::memcpy(before, carried, sizeof(T) * size);
    carry_back<T>(carried, part, size, fades ? decay_over(p, plan.segments[s], head) : 1.0);
    std::memcpy(part, before, sizeof(T) * size);
  }
  if (start == nullptr) return;
  if (keys) symmetrise(carried.get(), dim, dim);
  std::memcpy(start, carried, sizeof(T) * size);
}

template <typename T>
void carry_all(const Problem& p, const Gradients& out, const Plan& plan, const SegmentStates<T>& own,
               const Executor& executor) {
  struct None {};
  parallel_tasks(
      executor, p.sequences * p.heads * 2, [] { return std::make_unique<None>(); },
      [&](std::int64_t task, None&) {
        const bool keys = task % 2 == 0;
        if (keys ? !solves(p) : !remembers_values(p)) return;
        const std::int64_t head = task / 2 % p.heads, n = task / 2 / p.heads;
        const std::int64_t at = (n * p.heads + head) * p.key_dim * (keys ? p.key_dim : p.value_dim);
        const auto* end = static_cast<const T*>(keys ? out.d_h : out.d_u);
        auto* start = static_cast<T*>(keys ? out.d_h0 : out.d_u0);
        carry_along<T>(p, plan, n, head, keys, own, end == nullptr ? nullptr : end + at,
                       start == nullptr ? nullptr : start + at);
      });
}

/// The state where the segment begins.
template <typename T>
void load_start(const Segment& segment, const SegmentStates<T>& states, std::int64_t head, Workspace<T>& w) {
  const Sizes& s = w.size;
  StatePair<T>& to = w.starts[0];
  if (s.solves) unpack_matrix(states.h_at(segment.index, head), s.dim, s.dim, to.h.get(), to.ldh);
  if (s.remembers) unpack_matrix(states.u_at(segment.index, head), s.dim, s.values, to.u.get(), to.ldu);
}

/// Pass 3: adds what arrives at the segment's end to what pass 1 left, and writes the results.
template <typename T>
void complete_segment(const Problem& p, const Gradients& out, const Segment& segment, const SegmentStates<T>& states,
                      const SegmentStates<T>& arriving, std::int64_t head, const Halfway<T>& halfway, Workspace<T>& w) {
  const Sizes& s = w.size;
  const std::int64_t length = segment.tokens.length, task = segment.index * p.heads + head;
  std::memcpy(w.d_beta, halfway.beta + task * kSegment, sizeof(double) * length);
  std::memcpy(w.d_log_decay, halfway.log_decay + task * kSegment, sizeof(double) * length);
  const bool arrives = anything_arrives(out, segment);
  double inner = 0;
  if (arrives) {
    StatePair<T>& g = w.arriving;
    load_start(segment, states, head, w);
    if (s.solves) unpack_matrix(arriving.h_at(segment.index, head), s.dim, s.dim, g.h.get(), g.ldh);
    if (s.remembers) unpack_matrix(arriving.u_at(segment.index, head), s.dim, s.values, g.u.get(), g.ldu);
    inner = reach_back(p, segment, head, w);
  }
  for (std::int64_t first = 0; first < length; first += s.chunk) {
    const int len = static_cast<int>(std::min<std::int64_t>(s.chunk, length - first));
    w.chunk.len = len;
    w.chunk.lanes = padded<T>(len);
    const std::int64_t at = first / s.chunk * padded<T>(s.chunk);
    std::memcpy(w.gk, halfway.k + task * halfway.k_size + at * s.dim, sizeof(T) * s.dim * w.chunk.lanes);
    std::memcpy(w.dv, halfway.v + task * halfway.v_size + at * s.values, sizeof(T) * s.values * w.chunk.lanes);
    if (arrives) {
      const std::int64_t b = segment.tokens.batch, t = segment.tokens.begin + first;
      w.chunk.prefetch(p, b, t + len, head, std::min<std::int64_t>(s.chunk, length - first - len));
      w.chunk.load(p, b, t, head, len, {.queries = false, .value_lanes = true});
      add_arriving(p, w, first);
    }
    write_chunk(p, out, segment, segment.tokens.begin, head, first, w);
  }
  if (arrives) pass_decay(w, length, inner);
  write_gates(out, segment, head, w);
}

/// All segments at once, three times.
template <typename T>
void spread_segments(const Problem& p, const Saved& saved, const Gradients& out, const Plan& plan, double* diagonals,
                     const Executor& executor) {
  const Sizes sizes = sizes_of(p);
  const std::int64_t tasks = static_cast<std::int64_t>(plan.segments.size()) * p.heads;
  const SegmentStates<T> states = segment_states<T>(p, saved.h, saved.u);
  Buffer<T> own_h(sizes.solves ? tasks * p.key_dim * p.key_dim : 0);
  Buffer<T> own_u(sizes.remembers ? tasks * p.key_dim * p.value_dim : 0);
  const SegmentStates<T> own = segment_states<T>(p, own_h, own_u);
  Halfway<T> halfway;
  halfway.allocate(sizes, tasks);
  const auto workspace = [&] { return std::make_unique<Workspace<T>>(sizes, p.options); };

  parallel_tasks(executor, tasks, workspace, [&](std::int64_t task, Workspace<T>& w) {
    const Segment& segment = plan.segments[task / p.heads];
    const std::int64_t head = task % p.heads;
    load_start(segment, states, head, w);
    const int chunks = chunk_starts(p, segment, head, w);
    segment_alone(p, saved, out, segment, chunks, head, w, [&](std::int64_t first) {
      const std::int64_t at = first / sizes.chunk * padded<T>(sizes.chunk), lanes = w.chunk.lanes;
      std::memcpy(halfway.k + task * halfway.k_size + at * sizes.dim, w.gk, sizeof(T) * sizes.dim * lanes);
      std::memcpy(halfway.v + task * halfway.v_size + at * sizes.values, w.dv, sizeof(T) * sizes.values * lanes);
    });
    std::memcpy(halfway.beta + task * kSegment, w.d_beta, sizeof(double) * segment.tokens.length);
    std::memcpy(halfway.log_decay + task * kSegment, w.d_log_decay, sizeof(double) * segment.tokens.length);
    if (sizes.solves) pack_matrix<T>(w.g.h, w.g.ldh, sizes.dim, sizes.dim, own.h_at(segment.index, head));
    if (sizes.remembers) pack_matrix<T>(w.g.u, w.g.ldu, sizes.dim, sizes.values, own.u_at(segment.index, head));
    if (diagonals != nullptr) std::memcpy(diagonals + task * p.key_dim, w.d_diagonal, sizeof(double) * sizes.dim);
  });
  carry_all(p, out, plan, own, executor);
  const std::int64_t together = heads_together(p);
  const auto with_sums = [&] {
    auto w = workspace();
    w->make_room_for_sums(p, kSegment);
    return w;
  };
  parallel_tasks(executor, tasks / together, with_sums, [&](std::int64_t task, Workspace<T>& w) {
    const std::int64_t first = task * together;
    for (std::int64_t i = first; i < first + together; ++i) {
      complete_segment(p, out, plan.segments[i / p.heads], states, own, i % p.heads, halfway, w);
    }
  });
}

/// One sequence of one head from its end to its start: what arrives at a segment's end is known when it is its turn.
template <typename T>
void walk_back(const Problem& p, const Saved& saved, const Gradients& out, const Plan& plan, std::int64_t n,
               std::int64_t head, double* diagonals, Workspace<T>& w) {
  const Sizes& s = w.size;
  const SegmentStates<T> states = segment_states<T>(p, saved.h, saved.u);
  const std::int64_t begin = sequence(p, n).begin;
  StatePair<T>& g = w.arriving;
  const std::int64_t slot = n * p.heads + head, h_at = slot * p.key_dim * p.key_dim,
                     u_at = slot * p.key_dim * p.value_dim;
  if (s.solves) {
    unpack_matrix(out.d_h == nullptr ? nullptr : static_cast<const T*>(out.d_h) + h_at, s.dim, s.dim, g.h.get(), g.ldh);
    symmetrise(g.h.get(), s.dim, g.ldh);
  }
  if (s.remembers) {
    unpack_matrix(out.d_u == nullptr ? nullptr : static_cast<const T*>(out.d_u) + u_at, s.dim, s.values, g.u.get(),
                  g.ldu);
  }
  for (std::int64_t i = plan.begin[n + 1] - 1; i >= plan.begin[n]; --i) {
    const Segment& segment = plan.segments[i];
    load_start(segment, states, head, w);
    const int chunks = chunk_starts(p, segment, head, w);
    const bool arrives = anything_arrives(out, segment);
    const double inner = arrives ? reach_back(p, segment, head, w) : 0;
    segment_alone(p, saved, out, segment, chunks, head, w, [&](std::int64_t first) {
      if (arrives) add_arriving(p, w, first);
      write_chunk(p, out, segment, begin, head, first, w);
    });
    if (arrives) pass_decay(w, segment.tokens.length, inner);
    write_gates(out, segment, head, w);
    if (diagonals != nullptr) {
      std::memcpy(diagonals + (i * p.heads + head) * p.key_dim, w.d_diagonal, sizeof(double) * s.dim);
    }
    const double zeta = decay_over(p, segment, head);
    if (s.solves)
      carry_back<T>(g.h, w.g.h, static_cast<std::int64_t>(s.dim) * g.ldh, p.options.decay_keys ? zeta : 1.0);
    if (s.remembers) carry_back<T>(g.u, w.g.u, static_cast<std::int64_t>(s.dim) * g.ldu, zeta);
  }
  if (out.d_h0 != nullptr && s.solves) {
    symmetrise(g.h.get(), s.dim, g.ldh);
    pack_matrix<T>(g.h, g.ldh, s.dim, s.dim, static_cast<T*>(out.d_h0) + h_at);
  }
  if (out.d_u0 != nullptr && s.remembers) pack_matrix<T>(g.u, g.ldu, s.dim, s.values, static_cast<T*>(out.d_u0) + u_at);
}

inline std::int64_t longest_sequence(const Problem& p) {
  std::int64_t longest = 0;
  for (std::int64_t n = 0; n < p.sequences; ++n) longest = std::max(longest, sequence(p, n).length);
  return longest;
}

template <typename T>
void backward_as(const Problem& p, const Saved& saved, const Gradients& out, const Executor& executor) {
  const Plan plan = make_plan(p);
  const std::int64_t tasks = static_cast<std::int64_t>(plan.segments.size()) * p.heads;
  Buffer<double> diagonals(out.d_ridge_diagonal != nullptr ? tasks * p.key_dim : 0);
  double* const diagonals_or_none = out.d_ridge_diagonal != nullptr ? diagonals.get() : nullptr;
  const std::int64_t together = heads_together(p);
  const std::int64_t groups = p.heads / together;
  if (fills_threads(plan, groups, executor.threads) || (together > 1 && divides(plan, groups, executor.threads))) {
    const auto workspace = [&] {
      auto w = std::make_unique<Workspace<T>>(sizes_of(p), p.options);
      w->make_room_for_sums(p, longest_sequence(p));
      return w;
    };
    parallel_tasks(executor, p.sequences * p.heads / together, workspace, [&](std::int64_t task, Workspace<T>& w) {
      const std::int64_t first = task * together;
      for (std::int64_t i = first; i < first + together; ++i) {
        walk_back(p, saved, out, plan, i / p.heads, i % p.heads, diagonals_or_none, w);
      }
    });
  } else {
    spread_segments<T>(p, saved, out, plan, diagonals_or_none, executor);
  }
  if (out.d_ridge_diagonal == nullptr) return;
  std::fill(out.d_ridge_diagonal, out.d_ridge_diagonal + p.heads * p.key_dim, 0.0);
  for (std::int64_t i = 0; i < tasks * p.key_dim; ++i) {
    out.d_ridge_diagonal[i % (p.heads * p.key_dim)] += diagonals[i];
  }
}

}  // namespace

void backward(const Problem& problem, const Saved& saved, const Gradients& gradients, const Executor& executor) {
  if (state_dtype(problem) == DType::float64) {
    backward_as<double>(problem, saved, gradients, executor);
  } else {
    backward_as<float>(problem, saved, gradients, executor);
  }
}

}  // namespace gka::kernels::cpu::GKA_ISA
