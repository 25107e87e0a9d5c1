// Backward, in three passes over segments:
//
//   1. each segment by itself, in reverse, as if nothing came from later ones: the second solve, dq, dα, and the
//      segment's own part of dk, dv, dβ, dg and of the gradient of its starting state;
//   2. along each sequence, in reverse: the gradient that reaches the end of every segment,
//      G_{s-1} = (Π γ over segment s) G_s + (segment s's own part);
//   3. each segment again: what G_s adds to dk, dv, dβ and dg. It is linear in G_s and needs no solve.
//
// With Ḡ_i all the gradient that reaches H_i and R̄_i the same for U,
//
//   dk_i = 2β_i Ḡ_i k_i + β_i R̄_i v_i,  dv_i = β_i R̄_iᵀ k_i,  dβ_i = k_iᵀ(Ḡ_i k_i + R̄_i v_i),
//   dg_i = ⟨Ḡ_i, γ_i H_{i-1}⟩ + ⟨R̄_i, γ_i U_{i-1}⟩,
//
// and a token's own gradient is dH_c = −½ σ_c Σ (p zᵀ + z pᵀ) + φ_c H_c: one pair (y, x̃) for the implicit gradient, one
// per iteration for the unrolled; φ is what comes through the norm.
#include <memory>

#include "kernels/cpu/isa/entry.h"
#include "kernels/cpu/isa/recall.h"
#include "kernels/cpu/isa/solvers.h"
#include "kernels/cpu/isa/states.h"

namespace gka::kernels::cpu::GKA_ISA {
namespace {

/// Per-token sums that pass 1 starts and pass 3 completes, in the accumulation type whatever the outputs' type is.
template <typename T>
struct Sums {
  Buffer<T> k, v;
  Buffer<double> beta, log_decay;
  View k_view, v_view;

  explicit Sums(const Problem& p) {
    const std::int64_t tokens = p.batch * p.tokens * p.heads;
    k.resize(tokens * p.key_dim);
    k_view = view_of(p, k.get(), p.key_dim);
    if (remembers_values(p)) {
      v.resize(tokens * p.value_dim);
      v_view = view_of(p, v.get(), p.value_dim);
    }
    beta.resize(tokens);
    log_decay.resize(tokens);
  }

  static View view_of(const Problem& p, T* data, std::int64_t channels) {
    return {.data = data,
            .dtype = sizeof(T) == 8 ? DType::float64 : DType::float32,
            .batch_stride = p.tokens * p.heads * channels,
            .token_stride = p.heads * channels,
            .head_stride = channels};
  }
};

template <typename T>
struct Workspace {
  Sizes size;
  Chunk<T> chunk;
  Operator<T> op;
  LaneSolver<T> solver;
  Recall<T> recall;
  std::unique_ptr<StatePair<T>[]> starts;  // of the segment's chunks
  StatePair<T> g;                          // what reaches the state at the end of a chunk
  Buffer<T> d_o, x, y, w, right, z;        // lanes
  Buffer<T> gk, rv, dv;                    // Ḡ_i k_i, R̄_i v_i, R̄_iᵀ k_i as lanes
  Buffer<T> scores, rows, rows_too, lanes_too;
  double inner_h[kMaxChunk];  // ⟨dH_c, H_c⟩
  double inner_u[kMaxChunk];  // ⟨dU_c, U_c⟩
  double phi_f2[kMaxChunk];   // φ_c ‖H_c‖²
  double d_ridge[kMaxChunk];
  Buffer<double> d_diagonal;

  Workspace(const Sizes& s, const Options& options)
      : size(s), chunk(s), op(s), solver(s, options, unrolls(options)), recall(s), g(s) {
    starts.reset(new StatePair<T>[kSegment / s.chunk + 2]);
    for (std::int64_t i = 0; i < kSegment / s.chunk + 2; ++i) starts[i].allocate(s);
    const std::int64_t d = static_cast<std::int64_t>(s.dim) * kMaxChunk;
    for (Buffer<T>* b : {&x, &y, &w, &right, &z, &gk, &rv}) b->resize(d);
    for (Buffer<T>* b : {&d_o, &dv}) b->resize(static_cast<std::int64_t>(std::max(s.dim, s.values)) * kMaxChunk);
    scores.resize(kMaxChunk * kMaxChunk);
    for (Buffer<T>* b : {&rows, &rows_too})
      b->resize(static_cast<std::int64_t>(kMaxChunk) * std::max(chunk.ldk, chunk.ldv));
    lanes_too.resize(d);
    d_diagonal.resize(s.dim);
  }

  static bool unrolls(const Options& o) { return o.gradient == Gradient::unrolled && o.solver != Solver::exact; }
};

template <typename T>
double inner_product(const T* a, const T* b, std::int64_t n) {
  double sums[8] = {};
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += static_cast<double>(a[i + j]) * b[i + j];
  }
  double total = 0;
  for (; i < n; ++i) total += static_cast<double>(a[i]) * b[i];
  for (const double s : sums) total += s;
  return total;
}

/// target += Σ_c weight_c a_c b_cᵀ, a as lanes [m × lanes], b as lanes [n × lanes], target by rows.
template <typename T>
void add_outer(const Chunk<T>& t, const T* a, int m, const T* b, int n, const double* weight, T* rows, T* target,
               int ld) {
  const int stride = padded<T>(n);
  to_rows<T>(b, t.lanes, t.len, n, rows, stride);
  for (int c = 0; c < t.len; ++c) {
    const T by = static_cast<T>(weight[c]);
    for (int i = 0; i < stride; ++i) rows[c * stride + i] *= by;
  }
  gemm<T>(m, stride, t.len, {a, t.lanes, 1}, rows, stride, target, ld, true);
}

/// out_i += Σ_{c ≥ i} M_ic weight_c b_c (a_c · key_i): lanes of the token that is written to.
template <typename T>
void add_later(const Chunk<T>& t, const Decay& decay, const T* a, const T* keys, int n, const double* weight,
               const T* b, int m, T* scores, T* out) {
  const int lanes = t.lanes;
  gemm<T>(t.len, lanes, n, {a, 1, lanes}, keys, lanes, scores, lanes);
  for (int c = 0; c < t.len; ++c) {
    T* row = scores + c * lanes;
    for (int i = 0; i <= c; ++i) row[i] *= static_cast<T>(decay.m[i][c] * weight[c]);
    std::fill(row + c + 1, row + lanes, T{0});
  }
  gemm<T>(m, lanes, t.len, {b, lanes, 1}, scores, lanes, out, lanes, true);
}

/// One term of dS_c = −p_c z_cᵀ, with S z at hand.
template <typename T>
void add_pair(Workspace<T>& w, const T* p, const T* z, const T* sz) {
  const Chunk<T>& t = w.chunk;
  const int dim = w.size.dim;
  const Decay& decay = *t.key_decay;
  T dots[kMaxChunk];
  lane_dot<T>(p, sz, dim, t.lanes, dots);
  double half[kMaxChunk], carried[kMaxChunk];
  for (int c = 0; c < t.len; ++c) {
    w.inner_h[c] -= dots[c];
    half[c] = -0.5 * w.op.sigma[c];
    carried[c] = half[c] * decay.zeta[c];
  }
  add_later<T>(t, decay, z, t.kt, dim, half, p, dim, w.scores, w.gk);
  add_later<T>(t, decay, p, t.kt, dim, half, z, dim, w.scores, w.gk);
  add_outer<T>(t, p, dim, z, dim, carried, w.rows, w.g.h, w.g.ldh);
  add_outer<T>(t, z, dim, p, dim, carried, w.rows, w.g.h, w.g.ldh);
  if (!w.op.diagonal) return;
  for (int i = 0; i < dim; ++i) {
    for (int c = 0; c < t.len; ++c) w.d_diagonal[i] -= static_cast<double>(p[i * t.lanes + c]) * z[i * t.lanes + c];
  }
}

/// Σ_c φ_c H_c: Q_ij = Σ_c M_ic φ_c M_jc is M_ij Q_jj for i ≤ j, so a recursion over Q_jj is all it takes. φ is of the
/// order of 1/f², which leaves the range of numbers long before the memory does: every factor 1/f is met with a weight
/// that is at most f before it is met with the other one, and Q_jj is kept times f_j².
template <typename T>
void add_norm_term(Workspace<T>& w) {
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
      const double kept = decay.m[j][j + 1] * f[j] / f[j + 1];
      own[j] += kept * kept * own[j + 1];
    }
    any |= own[j] != 0;
    inverse[j] = f[j] > 0 ? 1 / f[j] : 0;
  }
  if (!any) return;
  const double h_scale = w.op.h_scale;
  const T down = static_cast<T>(1 / h_scale);
  for (int i = 0; i < len; ++i) {
    if (own[i] == 0 || decay.zeta[i] == 0) continue;  // not even a NaN of H_0 gets here
    const T by = static_cast<T>(own[i] * (decay.zeta[i] * h_scale / f[i]) / f[i]);
    for (int d = 0; d < dim; ++d) w.gk[d * lanes + i] += by * (w.op.hk[d * lanes + i] * down);
  }
  for (int j = 0; j < len; ++j) {
    for (int i = 0; i < lanes; ++i) {
      const int later = std::max(i, j), earlier = std::min(i, j);
      double q = 0;
      if (i < len && own[later] != 0) {
        const double m = decay.m[earlier][later], beta = t.beta[j], once = inverse[later];
        q = own[later] * (j == later ? (beta * once) * (m * once) : (m * beta * once) * once);
      }
      w.scores[j * lanes + i] = static_cast<T>(q) * w.op.gram[j * lanes + i];
    }
  }
  gemm<T>(dim, lanes, len, {t.k, 1, t.ldk}, w.scores, lanes, w.gk, lanes, true);

  const auto reach = [&](int j) { return own[j] == 0 ? 0 : own[j] * (decay.zeta[j] / f[j]); };
  const T by = static_cast<T>(own[0] == 0 ? 0 : reach(0) * (decay.zeta[0] * h_scale / f[0]));
  for (int i = 0; by != 0 && i < dim * w.g.ldh; ++i) w.g.h[i] += by * (w.op.h[i] * down);
  for (int j = 0; j < len; ++j) {
    const T weight = static_cast<T>(own[j] == 0 ? 0 : reach(j) * (t.beta[j] / f[j]));
    for (int i = 0; i < t.ldk; ++i) w.rows[j * t.ldk + i] = weight * t.k[j * t.ldk + i];
  }
  gemm<T>(dim, padded<T>(dim), len, {t.k, 1, t.ldk}, w.rows, t.ldk, w.g.h, w.g.ldh, true);
}

template <typename T>
void scale_lanes_by_end(const Chunk<T>& t, const Decay& decay, T* values, int rows) {
  T factor[kMaxChunk] = {};
  for (int c = 0; c < t.len; ++c) factor[c] = static_cast<T>(decay.end(c, t.len));
  Recall<T>::scale_lanes(values, rows, t.lanes, factor);
}

/// What reaches the end of the chunk, taken to each of its tokens, and to its start.
template <typename T>
void carry_into_chunk(Workspace<T>& w, bool nothing_yet) {
  const Chunk<T>& t = w.chunk;
  const int dim = w.size.dim, values = w.size.values, lanes = t.lanes;
  if (nothing_yet) {
    std::fill(w.gk.get(), w.gk + static_cast<std::int64_t>(dim) * lanes, T{0});
    std::fill(w.rv.get(), w.rv + static_cast<std::int64_t>(dim) * lanes, T{0});
    std::fill(w.dv.get(), w.dv + static_cast<std::int64_t>(values) * lanes, T{0});
    return;
  }
  if (w.size.solves) {
    gemm<T>(dim, lanes, dim, {w.g.h, 1, w.g.ldh}, t.kt, lanes, w.gk, lanes);
    scale_lanes_by_end<T>(t, *t.key_decay, w.gk, dim);
    scale_by<T>(w.g.h, static_cast<std::int64_t>(dim) * w.g.ldh, t.key_decay->zeta[t.len - 1]);
  }
  if (w.size.remembers) {
    gemm<T>(dim, lanes, values, {w.g.u, w.g.ldu, 1}, t.vt, lanes, w.rv, lanes);
    gemm<T>(values, lanes, dim, {w.g.u, 1, w.g.ldu}, t.kt, lanes, w.dv, lanes);
    scale_lanes_by_end<T>(t, t.values_decay(), w.rv, dim);
    scale_lanes_by_end<T>(t, t.values_decay(), w.dv, values);
    scale_by<T>(w.g.u, static_cast<std::int64_t>(dim) * w.g.ldu, t.values_decay().zeta[t.len - 1]);
  }
}

/// o's gradient through U: w.w = σ_c s U_c do_c, ⟨dU_c, U_c⟩, and dU_c = s z_c do_cᵀ into R̄.
template <typename T>
void values_part(const Problem& p, Workspace<T>& w, const T* u, int ldu) {
  const Chunk<T>& t = w.chunk;
  const int dim = w.size.dim, values = w.size.values, lanes = t.lanes;
  w.recall.set(p, t, w.size.solves ? &w.op : nullptr);
  w.recall.mix(t, w.size.solves ? w.x.get() : nullptr);
  w.recall.transpose(t, u, ldu, w.d_o, w.w);
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
  add_later<T>(t, t.values_decay(), w.d_o, t.vt, values, ones, w.z, dim, w.scores, w.rv);
  add_later<T>(t, t.values_decay(), w.z, t.kt, dim, ones, w.d_o, values, w.scores, w.dv);
  add_outer<T>(t, w.z, dim, w.d_o, values, carried, w.rows, w.g.u, w.g.ldu);
}

/// Lost tokens take no part in products: x̃ and do count as 0 there, and what depends on them is marked at the end.
/// `lost` says which tokens those are: the lost ones and all before them, back to the last γ = 0. Returns whether the
/// chunk's start is among them.
template <typename T>
bool set_lost_aside(const Problem& p, Workspace<T>& w, const T* u, int ldu, bool* lost) {
  const Chunk<T>& t = w.chunk;
  bool values_lost[kMaxChunk] = {};
  if (w.size.remembers) {
    const bool state_lost = !all_finite(u, w.size.dim * ldu);
    t.find_lost(t.bad_value, t.values_decay(), state_lost, values_lost);
  }
  bool reaches = false;
  for (int c = t.len - 1; c >= 0; --c) {
    const bool here = values_lost[c] || (w.size.solves && w.op.lost[c]);
    for (int i = 0; here && w.size.solves && i < w.size.dim; ++i) w.x[i * t.lanes + c] = T{0};
    const int channels = w.size.remembers ? w.size.values : w.size.dim;
    for (int i = 0; here && i < channels; ++i) w.d_o[i * t.lanes + c] = T{0};
    reaches |= here;
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
  }
  if (!start_lost) return;
  if (w.size.solves) fill_nan(w.g.h.get(), static_cast<std::int64_t>(w.size.dim) * w.g.ldh);
  if (w.size.remembers) fill_nan(w.g.u.get(), static_cast<std::int64_t>(w.size.dim) * w.g.ldu);
}

/// The right-hand side of the second solve, σ dx, as lanes.
template <typename T>
void right_hand_side(Workspace<T>& w) {
  const Chunk<T>& t = w.chunk;
  const T* from = w.size.remembers ? w.w.get() : w.d_o.get();
  T factor[kMaxChunk] = {};
  for (int c = 0; c < t.len; ++c) {
    factor[c] = w.size.remembers ? w.recall.solved[c] : static_cast<T>(w.op.sigma[c]);
  }
  for (int i = 0; i < w.size.dim; ++i) {
    for (int c = 0; c < t.lanes; ++c) w.right[i * t.lanes + c] = factor[c] * from[i * t.lanes + c];
  }
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
  const bool adaptive = options.ridge_mode == RidgeMode::adaptive;
  if (Workspace<T>::unrolls(options)) {
    w.solver.solve(w.op, t.q, w.lanes_too);
    lane_dot<T>(w.lanes_too, w.right, dim, lanes, dots);
    w.solver.reverse(w.op, t.q, w.right, w.y, w.d_ridge,
                     [&](const T* p, const T* z, const T* sz) { add_pair(w, p, z, sz); });
  } else {
    w.solver.solve(w.op, w.right, w.y);
    w.op.apply_to(w.x, w.lanes_too);
    add_pair<T>(w, w.y, w.x, w.lanes_too);
    lane_dot<T>(w.x, w.y, dim, lanes, dots);
  }
  for (int c = 0; c < t.len; ++c) {
    const double sigma = w.op.sigma[c], f = w.op.norm[c];
    double through_scale = 0;  // σ dL/dσ
    if (!Workspace<T>::unrolls(options)) {
      through_scale = adaptive ? options.ridge * dots[c] : 0;
    } else if (adaptive) {
      through_scale = dots[c] + w.inner_h[c];
    } else if (options.solver != Solver::conjugate_gradient) {
      through_scale = dots[c] + w.inner_h[c] + w.op.rho[c] * w.d_ridge[c];
    }
    const bool counts = options.ridge_gradient && w.op.live(c) && f > 0;
    // σ = 1/f or 1/(f + λ): dσ/df = −σ², and df/dH = H/f.
    w.phi_f2[c] = counts ? -through_scale * (sigma * f) : 0;
    w.inner_h[c] += w.phi_f2[c];
  }
  add_norm_term(w);
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
    for (int c = 0; c < t.len; ++c) write_row(out.d_alpha, offset(out.d_alpha, b, t0 + c, head), 1, sums + c);
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
    if ((w.size.solves && w.op.lost[c]) || (w.size.remembers && w.recall.lost[c]))
      mark_lost<T>(w.lanes_too, dim, lanes, c);
  }
  w.chunk.store_lanes(out.d_q, b, t0, head, dim, w.lanes_too);
}

template <typename T>
void add_sum(Chunk<T>& t, const View& sum, std::int64_t b, std::int64_t t0, std::int64_t head, int n, T* scratch,
             T* to) {
  t.load_lanes(sum, b, t0, head, n, scratch);
  for (int i = 0; i < n * t.lanes; ++i) to[i] += scratch[i];
}

/// dβ, dk and dv from gk, rv and dv; added to what the sums hold, if told. Also k·Ḡk and k·R̄v, for dg.
template <typename T>
void write_sums(const Problem& p, Workspace<T>& w, Sums<T>& sums, std::int64_t b, std::int64_t t0, std::int64_t head,
                double* key_inner, double* value_inner, bool add) {
  Chunk<T>& t = w.chunk;
  const int dim = w.size.dim, values = w.size.values, lanes = t.lanes;
  T from_h[kMaxChunk] = {}, from_u[kMaxChunk] = {}, beta[kMaxChunk] = {};
  if (w.size.solves) lane_dot<T>(t.kt, w.gk, dim, lanes, from_h);
  if (w.size.remembers) lane_dot<T>(t.kt, w.rv, dim, lanes, from_u);
  for (int c = 0; c < t.len; ++c) {
    key_inner[c] = from_h[c];
    value_inner[c] = from_u[c];
    beta[c] = static_cast<T>(t.beta[c]);
    double& d_beta = sums.beta[(b * p.tokens + t0 + c) * p.heads + head];
    d_beta = (add ? d_beta : 0) + key_inner[c] + value_inner[c];
  }
  for (int c = 0; c < lanes; c += kLanes<T>) {
    const Vec<T> by = load(beta + c);
    for (int at = c; at < dim * lanes; at += lanes) {
      const Vec<T> gk = w.size.solves ? 2 * load(w.gk + at) : Vec<T>{};
      const Vec<T> rv = w.size.remembers ? load(w.rv + at) : Vec<T>{};
      store(w.gk + at, by * (gk + rv));
    }
  }
  if (add) add_sum<T>(t, sums.k_view, b, t0, head, dim, w.lanes_too, w.gk);
  t.store_lanes(sums.k_view, b, t0, head, dim, w.gk);
  if (!w.size.remembers) return;
  Recall<T>::scale_lanes(w.dv, values, lanes, beta);
  if (add) add_sum<T>(t, sums.v_view, b, t0, head, values, w.d_o, w.dv);
  t.store_lanes(sums.v_view, b, t0, head, values, w.dv);
}

/// dg by reverse running sums from the end of the chunk: dg_c = ⟨Ḡ_c, H_c⟩ − β_c k_cᵀḠ_ck_c, and that is also what
/// reaches H_{c-1} from later tokens, ⟨γ_c Ḡ_c, H_{c-1}⟩.
template <typename T>
void write_decay_sums(const Problem& p, Workspace<T>& w, Sums<T>& sums, std::int64_t b, std::int64_t t0,
                      std::int64_t head, double at_end, const double* key_inner, const double* value_inner) {
  const Chunk<T>& t = w.chunk;
  const bool keys = w.size.solves && p.options.decay_keys;
  double inner = at_end;
  for (int c = t.len - 1; c >= 0; --c) {
    if (keys) inner += w.inner_h[c] - t.beta[c] * key_inner[c];
    if (w.size.remembers) inner += w.inner_u[c] - t.beta[c] * value_inner[c];
    if (t.gamma[c] == 0) inner = 0;
    sums.log_decay[(b * p.tokens + t0 + c) * p.heads + head] = inner;
  }
}

/// The states at the start of every chunk of a segment; returns how many chunks there are.
template <typename T>
int chunk_starts(const Problem& p, const Segment& segment, const SegmentStates<T>& states, std::int64_t head,
                 Workspace<T>& w) {
  const Sizes& s = w.size;
  if (s.solves) unpack_matrix(states.h_at(segment.index, head), s.dim, s.dim, w.starts[0].h.get(), w.starts[0].ldh);
  if (s.remembers)
    unpack_matrix(states.u_at(segment.index, head), s.dim, s.values, w.starts[0].u.get(), w.starts[0].ldu);
  int i = 0;
  const std::int64_t end = segment.tokens.begin + segment.tokens.length;
  for (std::int64_t t = segment.tokens.begin; t < end; t += s.chunk, ++i) {
    const int len = static_cast<int>(std::min<std::int64_t>(s.chunk, end - t));
    if (t + len == end) continue;
    w.chunk.prefetch(p, segment.tokens.batch, t + len, head, std::min<std::int64_t>(s.chunk, end - t - len));
    w.chunk.load(p, segment.tokens.batch, t, head, len, {.queries = false, .key_lanes = false});
    StatePair<T>& next = w.starts[i + 1];
    if (s.solves) {
      std::memcpy(next.h, w.starts[i].h, sizeof(T) * s.dim * next.ldh);
      advance_keys<T>(w.chunk, next.h, next.ldh, 0, s.dim, w.rows);
    }
    if (s.remembers) {
      std::memcpy(next.u, w.starts[i].u, sizeof(T) * s.dim * next.ldu);
      advance_values<T>(w.chunk, next.u, next.ldu, 0, s.dim, w.rows);
    }
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

/// Pass 1. Leaves the segment's own part of its starting state's gradient in `own`.
template <typename T>
void segment_alone(const Problem& p, const Saved& saved, const Gradients& out, const Segment& segment,
                   const SegmentStates<T>& states, const SegmentStates<T>& own, double* d_diagonal, std::int64_t head,
                   Sums<T>& sums, Workspace<T>& w) {
  const Sizes& s = w.size;
  const View saved_x = Sums<T>::view_of(p, static_cast<T*>(saved.x), p.key_dim);
  const int chunks = chunk_starts(p, segment, states, head, w);
  if (s.solves) std::fill(w.g.h.get(), w.g.h + static_cast<std::int64_t>(s.dim) * w.g.ldh, T{0});
  if (s.remembers) std::fill(w.g.u.get(), w.g.u + static_cast<std::int64_t>(s.dim) * w.g.ldu, T{0});
  std::fill(w.d_diagonal.get(), w.d_diagonal + s.dim, 0.0);
  const std::int64_t b = segment.tokens.batch, begin = segment.tokens.begin;
  for (int i = chunks - 1; i >= 0; --i) {
    const std::int64_t t = begin + static_cast<std::int64_t>(i) * s.chunk;
    const int len = static_cast<int>(std::min<std::int64_t>(s.chunk, begin + segment.tokens.length - t));
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
    double key_inner[kMaxChunk], value_inner[kMaxChunk];
    write_sums(p, w, sums, b, t, head, key_inner, value_inner, false);
    write_decay_sums(p, w, sums, b, t, head, at_end, key_inner, value_inner);
  }
  if (s.solves) pack_matrix<T>(w.g.h, w.g.ldh, s.dim, s.dim, own.h_at(segment.index, head));
  if (s.remembers) pack_matrix<T>(w.g.u, w.g.ldu, s.dim, s.values, own.u_at(segment.index, head));
  if (d_diagonal != nullptr) std::memcpy(d_diagonal, w.d_diagonal, sizeof(double) * s.dim);
}

/// Π γ over tokens [from, to) of a segment.
inline double decay_over(const Problem& p, const Segment& segment, std::int64_t head, std::int64_t from) {
  if (!p.log_decay) return 1;
  double sum = 0;
  for (std::int64_t t = from; t < segment.tokens.length; ++t) {
    sum += read_gate(p.log_decay, offset(p.log_decay, segment.tokens.batch, segment.tokens.begin + t, head), 0);
  }
  return std::exp(sum);
}

/// Pass 2, for one of H and U of one head: `own` becomes what arrives at each segment's end; `start` gets the rest.
template <typename T>
void carry_along(const Problem& p, const Plan& plan, std::int64_t n, std::int64_t head, bool keys,
                 const SegmentStates<T>& own, const T* final_gradient, T* start) {
  const std::int64_t size = p.key_dim * (keys ? p.key_dim : p.value_dim);
  Buffer<T> carried(size);
  std::fill(carried.get(), carried + size, T{0});
  if (final_gradient != nullptr) std::memcpy(carried, final_gradient, sizeof(T) * size);
  const int dim = static_cast<int>(p.key_dim);
  if (keys && final_gradient != nullptr) symmetrise(carried.get(), dim, dim);
  for (std::int64_t s = plan.begin[n + 1] - 1; s >= plan.begin[n]; --s) {
    T* part = keys ? own.h_at(s, head) : own.u_at(s, head);
    const bool fades = !keys || p.options.decay_keys;
    const T zeta = static_cast<T>(fades ? decay_over(p, plan.segments[s], head, 0) : 1.0);
    for (std::int64_t i = 0; i < size; ++i) {
      const T arriving = carried[i];
      carried[i] = zeta * arriving + part[i];
      part[i] = arriving;
    }
  }
  if (start == nullptr) return;
  if (keys) symmetrise(carried.get(), dim, dim);
  std::memcpy(start, carried, sizeof(T) * size);
}

/// Pass 3: adds what arrives at the segment's end, and writes the results in their own types.
template <typename T>
void add_arriving(const Problem& p, const Gradients& out, const Segment& segment, const SegmentStates<T>& states,
                  const SegmentStates<T>& arriving, std::int64_t head, Sums<T>& sums, Workspace<T>& w) {
  const Sizes& s = w.size;
  const std::int64_t b = segment.tokens.batch, begin = segment.tokens.begin, length = segment.tokens.length;
  const bool nothing = segment.last && out.d_h == nullptr && out.d_u == nullptr;
  double key_reach[kSegment + 1], value_reach[kSegment + 1];  // Π γ from after token i to the end
  double inner = 0;
  if (!nothing) {
    key_reach[length] = value_reach[length] = 1;
    for (std::int64_t t = length - 1; t >= 0; --t) {
      const double gamma =
          p.log_decay ? std::exp(read_gate(p.log_decay, offset(p.log_decay, b, begin + t, head), 0)) : 1.0;
      value_reach[t] = value_reach[t + 1] * gamma;
      key_reach[t] = key_reach[t + 1] * (p.options.decay_keys ? gamma : 1.0);
    }
    // dg_i = ⟨G, (Π_{i ≤ l} γ_l) H_{i-1}⟩: forwards from the segment's start nothing cancels.
    if (s.solves) {
      const T* g = arriving.h_at(segment.index, head);
      unpack_matrix(g, s.dim, s.dim, w.g.h.get(), w.g.ldh);
      if (p.options.decay_keys) {
        inner += key_reach[0] * inner_product<T>(g, states.h_at(segment.index, head), p.key_dim * p.key_dim);
      }
    }
    if (s.remembers) {
      const T* g = arriving.u_at(segment.index, head);
      unpack_matrix(g, s.dim, s.values, w.g.u.get(), w.g.ldu);
      inner += value_reach[0] * inner_product<T>(g, states.u_at(segment.index, head), p.key_dim * p.value_dim);
    }
  }
  for (std::int64_t t = 0; t < length; t += s.chunk) {
    const int len = static_cast<int>(std::min<std::int64_t>(s.chunk, length - t));
    Chunk<T>& chunk = w.chunk;
    if (nothing) {
      chunk.len = len;
      chunk.lanes = padded<T>(len);
    } else {
      chunk.prefetch(p, b, begin + t + len, head, std::min<std::int64_t>(s.chunk, length - t - len));
      chunk.load(p, b, begin + t, head, len, {.queries = false, .value_lanes = true});
      T key_factor[kMaxChunk] = {}, value_factor[kMaxChunk] = {};
      for (int c = 0; c < len; ++c) {
        key_factor[c] = static_cast<T>(key_reach[t + c + 1]);
        value_factor[c] = static_cast<T>(value_reach[t + c + 1]);
      }
      const int lanes = chunk.lanes;
      if (s.solves) {
        gemm<T>(s.dim, lanes, s.dim, {w.g.h, 1, w.g.ldh}, chunk.kt, lanes, w.gk, lanes);
        Recall<T>::scale_lanes(w.gk, s.dim, lanes, key_factor);
      }
      if (s.remembers) {
        gemm<T>(s.dim, lanes, s.values, {w.g.u, w.g.ldu, 1}, chunk.vt, lanes, w.rv, lanes);
        gemm<T>(s.values, lanes, s.dim, {w.g.u, 1, w.g.ldu}, chunk.kt, lanes, w.dv, lanes);
        Recall<T>::scale_lanes(w.rv, s.dim, lanes, value_factor);
        Recall<T>::scale_lanes(w.dv, s.values, lanes, value_factor);
      }
      double key_inner[kMaxChunk], value_inner[kMaxChunk];
      write_sums(p, w, sums, b, begin + t, head, key_inner, value_inner, true);
      for (int c = 0; c < len; ++c) {
        sums.log_decay[(b * p.tokens + begin + t + c) * p.heads + head] += inner;
        if (p.options.decay_keys) inner += chunk.beta[c] * key_inner[c];
        inner += chunk.beta[c] * value_inner[c];
      }
    }
    for (int c = 0; c < len; ++c) {
      const std::int64_t at = begin + t + c;
      const std::int64_t token = (b * p.tokens + at) * p.heads + head;
      if (out.d_k) write_row<T>(out.d_k, offset(out.d_k, b, at, head), s.dim, sums.k + token * p.key_dim);
      if (out.d_v && s.remembers) {
        write_row<T>(out.d_v, offset(out.d_v, b, at, head), s.values, sums.v + token * p.value_dim);
      }
      if (out.d_beta) write_row<double>(out.d_beta, offset(out.d_beta, b, at, head), 1, sums.beta + token);
      if (out.d_log_decay) {
        write_row<double>(out.d_log_decay, offset(out.d_log_decay, b, at, head), 1, sums.log_decay + token);
      }
    }
  }
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

template <typename T>
void backward_as(const Problem& p, const Saved& saved, const Gradients& out, const Executor& executor) {
  const Plan plan = make_plan(p);
  const Sizes sizes = sizes_of(p);
  const auto segments = static_cast<std::int64_t>(plan.segments.size());
  const SegmentStates<T> states = segment_states<T>(p, saved.h, saved.u);
  Buffer<T> own_h(sizes.solves ? segments * p.heads * p.key_dim * p.key_dim : 0);
  Buffer<T> own_u(sizes.remembers ? segments * p.heads * p.key_dim * p.value_dim : 0);
  const SegmentStates<T> own = segment_states<T>(p, own_h, own_u);
  Buffer<double> diagonals(out.d_ridge_diagonal != nullptr ? segments * p.heads * p.key_dim : 0);
  Sums<T> sums(p);
  const auto workspace = [&] { return std::make_unique<Workspace<T>>(sizes, p.options); };

  parallel_tasks(executor, segments * p.heads, workspace, [&](std::int64_t task, Workspace<T>& w) {
    double* diagonal = out.d_ridge_diagonal != nullptr ? diagonals + task * p.key_dim : nullptr;
    segment_alone(p, saved, out, plan.segments[task / p.heads], states, own, diagonal, task % p.heads, sums, w);
  });
  carry_all(p, out, plan, own, executor);
  parallel_tasks(executor, segments * p.heads, workspace, [&](std::int64_t task, Workspace<T>& w) {
    add_arriving(p, out, plan.segments[task / p.heads], states, own, task % p.heads, sums, w);
  });
  if (out.d_ridge_diagonal == nullptr) return;
  std::fill(out.d_ridge_diagonal, out.d_ridge_diagonal + p.heads * p.key_dim, 0.0);
  for (std::int64_t i = 0; i < segments * p.heads * p.key_dim; ++i) {
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
