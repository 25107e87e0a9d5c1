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
#include "kernels/cuda/group_sums.cuh"
#include "kernels/cuda/plain.h"
#include "kernels/cuda/tokens.cuh"

namespace gka::kernels::cuda {
namespace {

/// Per-token sums that pass 1 starts and pass 3 completes, in the accumulation type whatever the outputs' type is.
template <typename T>
struct Sums {
  T *k, *v;
  double *beta, *log_decay;
};

/// Chunks of a segment, at most.
__host__ __device__ int chunks_of(const Sizes& s) { return static_cast<int>((kSegment + s.chunk - 1) / s.chunk); }

template <typename T>
struct BackwardWorkspace {
  Sizes size;
  Chunk<T> chunk;
  Operator<T> op;
  LaneSolver<T> solver;
  Recall<T> recall;
  T *starts_h, *starts_u;               // states at the start of each of the segment's chunks
  const T* saved_h;                     // that of the first one, where it was saved
  T* first_u;                           // the same, if its rows are whole vectors
  T *g_h, *g_u;                         // what reaches the state at the end of a chunk
  T *d_o, *x, *y_room, *w, *right, *z;  // lanes
  T* y;                                 // wherever the solver left it
  T *gk, *rv, *dv;                      // Ḡ_i k_i, R̄_i v_i, R̄_iᵀ k_i as lanes
  T *scores, *rows, *lanes_too;
  double* d_diagonal;
  double inner_h[kMaxChunk];  // ⟨dH_c, H_c⟩
  double inner_u[kMaxChunk];  // ⟨dU_c, U_c⟩
  double phi_f2[kMaxChunk];   // φ_c ‖H_c‖²
  double d_ridge[kMaxChunk];
  double half[kMaxChunk], carried[kMaxChunk];
  double own[kMaxChunk];           // of add_norm_term
  double key_reach[kSegment + 1];  // Π γ from after token i to the segment's end
  double value_reach[kSegment + 1];
  double key_inner[kMaxChunk], value_inner[kMaxChunk];
  double inner;
  int aside[kMaxChunk];  // tokens whose own gradient is not a number
  int lost[kMaxChunk];
  int flag;
  alignas(16) T dots[kMaxChunk];
  alignas(16) T more_dots[kMaxChunk];
  alignas(16) T factor[kMaxChunk];
  alignas(16) T value_factor[kMaxChunk];

  __host__ __device__ void allocate(Arena& arena, const Sizes& s, const Options& options) {
    size = s;
    solver.allocate_hot(arena, s, options, unrolls(options));
    op.allocate_hot(arena, s);
    chunk.allocate_hot(arena, s);
    op.allocate(arena, s);
    op.keep_products(arena, s);
    scores = op.scores;
    solver.allocate(arena, s);
    chunk.allocate(arena);
    for (T** lanes : {&x, &y_room, &w, &right, &z, &gk, &rv, &lanes_too}) {
      *lanes = arena.take<T>(s.lanes_of_keys());
    }
    d_o = arena.take<T>(max(s.lanes_of_keys(), s.lanes_of_values()));
    dv = arena.take<T>(s.lanes_of_values());
    rows = arena.take<T>(s.rows_of_tokens());
    recall.allocate(arena, op.scores);
    g_h = arena.take<T>(s.h_size());
    g_u = arena.take<T>(s.u_size());
    starts_h = arena.take<T>(static_cast<std::int64_t>(chunks_of(s) - 1) * s.h_size());
    starts_u = arena.take<T>(static_cast<std::int64_t>(chunks_of(s)) * s.u_size());
    d_diagonal = arena.take<double>(s.dim);
  }

  __device__ T* start_h(int i) const { return starts_h + (i - 1) * size.h_size(); }  // not of the first chunk
  __device__ T* start_u(int i) const { return i == 0 ? first_u : starts_u + i * size.u_size(); }
};

template <typename T>
using Work = BackwardWorkspace<T>;

/// target += Σ_c weight_c a_c b_cᵀ, a as lanes [m × lanes], b as lanes [n × lanes], target by rows of ld numbers.
template <typename T>
__device__ __noinline__ void add_outer(const Chunk<T>& t, const T* a, int m, const T* b, int n, const double* weight,
                                       T* rows, T* target, int ld) {
  const int stride = padded(n) + kApart;
  each_run(t.len, n, [&](int c, int i, int count) {
    T values[kRun];
    get_run(b + i * kStride + c, count, values);
    for (T& value : values) value *= static_cast<T>(weight[c]);
    store_run(values, rows + c * stride + i);
  });
  gemm<T>(m, padded(n), t.len, {a, kStride, 1}, rows, stride, target, ld, 1);
}

/// out_i += Σ_{c ≥ i} M_ic weight_c b_c (a_c · key_i): lanes of the token that is written to. No weights: 1.
template <typename T>
__device__ __noinline__ void add_later(const Chunk<T>& t, const Decay& decay, const T* a, const T* keys, int n,
                                       const double* weight, const T* b, int m, T* scores, T* out) {
  gemm<T>(t.len, t.lanes, n, {a, 1, kStride}, keys, kStride, scores, kStride);
  move(
      t.len * kMaxChunk,
      [&](int at) {
        const int c = at / kMaxChunk, i = at % kMaxChunk;
        if (i > c) return T{0};
        const double by = decay.m(i, c) * (weight != nullptr ? weight[c] : 1);
        return static_cast<T>(by) * scores[c * kStride + i];
      },
      [&](int at, T value) { scores[at / kMaxChunk * kStride + at % kMaxChunk] = value; });
  gemm<T>(m, t.lanes, t.len, {b, kStride, 1}, scores, kStride, out, kStride, 1);
}

/// One term of dS_c = −p_c z_cᵀ, with S z at hand.
template <typename T>
__device__ __noinline__ void add_pair(Work<T>& w, const T* p, const T* z, const T* sz) {
  const Chunk<T>& t = w.chunk;
  const int dim = w.size.dim;
  const Decay& decay = t.key_decay();
  lane_dot<T>(p, sz, dim, t.lanes, w.dots);
  each(t.len, [&](int c) {
    w.inner_h[c] -= w.dots[c];
    w.half[c] = -0.5 * w.op.sigma[c];
    w.carried[c] = w.half[c] * decay.zeta[c];
  });
  add_later<T>(t, decay, z, t.kt, dim, w.half, p, dim, w.scores, w.gk);
  add_later<T>(t, decay, p, t.kt, dim, w.half, z, dim, w.scores, w.gk);
  add_outer<T>(t, p, dim, z, dim, w.carried, w.rows, w.g_h, w.size.ldh());
  add_outer<T>(t, z, dim, p, dim, w.carried, w.rows, w.g_h, w.size.ldh());
  if (!w.op.diagonal) return;
  each(dim, [&](int i) {
    for (int c = 0; c < t.len; ++c) w.d_diagonal[i] -= static_cast<double>(p[i * kStride + c]) * z[i * kStride + c];
  });
}

/// Σ_c φ_c H_c: Q_ij = Σ_c M_ic φ_c M_jc is M_ij Q_jj for i ≤ j, so a recursion over Q_jj is all it takes. φ is of the
/// order of 1/f², which leaves the range of numbers long before the memory does: every factor 1/f is met with a weight
/// that is at most f before it is met with the other one, and Q_jj is kept times f_j².
template <typename T>
__device__ __noinline__ void add_norm_term(Work<T>& w) {
  const Chunk<T>& t = w.chunk;
  const Decay& decay = t.key_decay();
  const int len = t.len, dim = w.size.dim, ldk = w.size.ldk();
  const double* f = w.op.norm;
  const double* own = w.own;  // Q_jj f_j²
  alone([&] {
    w.flag = 0;
    for (int j = len - 1; j >= 0; --j) {
      w.own[j] = w.phi_f2[j];
      if (j + 1 < len && own[j + 1] != 0) {
        const double gamma = decay.gamma[j + 1], kept = gamma == 0 ? 0 : gamma * f[j] / f[j + 1];  // f_j may be NaN
        w.own[j] += kept * kept * own[j + 1];
      }
      w.flag |= own[j] != 0;
    }
  });
  const bool any = w.flag != 0;
  sync();
  if (!any) return;
  const double h_scale = w.op.h_scale;
  const T down = static_cast<T>(1 / h_scale);
  const auto reach = [&](int j) { return own[j] == 0 ? 0 : own[j] * (decay.zeta[j] / f[j]); };
  each(t.lanes, [&](int i) {
    const bool counts = i < len && own[i] != 0;
    w.factor[i] = static_cast<T>(counts ? own[i] * (decay.zeta[i] * h_scale / f[i]) / f[i] : 0);
    w.value_factor[i] = static_cast<T>(counts ? reach(i) * (t.beta[i] / f[i]) : 0);
  });
  each_vector(dim, t.lanes, [&](int, int i, int at) {  // where ζ = 0 not even a NaN of H_0 gets through
    store(w.gk + at, load(w.gk + at) + masked(load(w.op.hk + at) * broadcast(down), load(w.factor + i)));
  });
  move(
      len * kMaxChunk,
      [&](int at) {
        const int j = at / kMaxChunk, i = at % kMaxChunk, later = max(i, j), earlier = min(i, j);
        if (i >= len || own[later] == 0) return T{0};
        const double m = decay.m(earlier, later), beta = t.beta[j];
        const double q =
            own[later] * (j == later ? (beta / f[later]) * (m / f[later]) : (m * beta / f[later]) / f[later]);
        return static_cast<T>(q) * w.op.gram[j * kStride + i];
      },
      [&](int at, T value) { w.scores[at / kMaxChunk * kStride + at % kMaxChunk] = value; });
  gemm<T>(dim, t.lanes, len, {t.k, 1, ldk}, w.scores, kStride, w.gk, kStride, 1);

  const T by = static_cast<T>(own[0] == 0 ? 0 : reach(0) * (decay.zeta[0] * h_scale / f[0]));
  if (by != 0) {
    move(
        w.size.h_size(), [&](int i) { return w.g_h[i] + by * (w.op.h[i] * down); },
        [&](int i, T value) { w.g_h[i] = value; });
  }
  move_rows(len, padded(dim), t.k, ldk, w.rows, ldk, [&](int j, T value) { return w.value_factor[j] * value; });
  gemm<T>(dim, padded(dim), len, {t.k, 1, ldk}, w.rows, ldk, w.g_h, w.size.ldh(), 1);
}

/// How much of what reaches the end of the chunk gets to each token.
template <typename T>
__device__ void set_reach(const Chunk<T>& t, const Decay& decay, T* factor) {
  each(t.lanes, [&](int c) { factor[c] = c < t.len ? static_cast<T>(decay.m(c, t.len - 1)) : T{0}; });
}

/// Ḡk, R̄v and R̄ᵀk for the gradient G, R that arrives at one place, before it is scaled to each token.
template <typename T>
__device__ void products_with_arriving(Work<T>& w) {
  const Chunk<T>& t = w.chunk;
  const Sizes& s = w.size;
  if (s.solves) gemm<T>(s.dim, t.lanes, s.dim, {w.g_h, 1, s.ldh()}, t.kt, kStride, w.gk, kStride);
  if (!s.remembers) return;
  gemm<T>(s.dim, t.lanes, s.values, {w.g_u, s.ldu(), 1}, t.vt, kStride, w.rv, kStride);
  gemm<T>(s.values, t.lanes, s.dim, {w.g_u, 1, s.ldu()}, t.kt, kStride, w.dv, kStride);
}

template <typename T>
__device__ __noinline__ void fade_all(T* values, int n, double zeta) {
  if (zeta == 1) return;
  move(n, [&](int i) { return fade(values[i], zeta); }, [&](int i, T value) { values[i] = value; });
}

/// What reaches the end of the chunk, taken to each of its tokens, and to its start.
template <typename T>
__device__ __noinline__ void carry_into_chunk(Work<T>& w, bool nothing_yet) {
  const Chunk<T>& t = w.chunk;
  const Sizes& s = w.size;
  if (nothing_yet) {
    clear_lanes(w.gk, s.dim, t.lanes);
    clear_lanes(w.rv, s.dim, t.lanes);
    clear_lanes(w.dv, s.values, t.lanes);
    return;
  }
  products_with_arriving(w);
  const double key_zeta = t.key_decay().zeta[t.len - 1], value_zeta = t.values_decay().zeta[t.len - 1];
  if (s.solves) {
    set_reach<T>(t, t.key_decay(), w.factor);
    scale_lanes(w.gk, s.dim, t.lanes, w.factor);
    fade_all(w.g_h, s.h_size(), key_zeta);
  }
  if (!s.remembers) return;
  set_reach<T>(t, t.values_decay(), w.value_factor);
  scale_lanes(w.rv, s.dim, t.lanes, w.value_factor);
  scale_lanes(w.dv, s.values, t.lanes, w.value_factor);
  fade_all(w.g_u, s.u_size(), value_zeta);
}

/// o's gradient through U: w.w = σ_c s U_c do_c, ⟨dU_c, U_c⟩, and dU_c = s z_c do_cᵀ into R̄.
template <typename T>
__device__ __noinline__ void values_part(const Problem& p, Work<T>& w, const T* u) {
  Chunk<T>& t = w.chunk;
  const Sizes& s = w.size;
  const Decay& decay = t.values_decay();
  w.recall.set(p, t, s.solves ? &w.op : nullptr, w.z);
  w.recall.mix(t, s.solves ? w.x : nullptr);
  w.recall.transpose(t, u, w.d_o, w.w);
  lane_dot<T>(w.z, w.w, s.dim, t.lanes, w.dots);
  each(t.len, [&](int c) { w.inner_u[c] = w.dots[c]; });
  each(t.lanes, [&](int c) { w.factor[c] = c < t.len ? static_cast<T>(w.recall.sigma[c]) : T{0}; });
  scale_lanes(w.z, s.dim, t.lanes, w.factor);  // z = σ z̃ from here on
  add_later<T>(t, decay, w.d_o, t.vt, s.values, nullptr, w.z, s.dim, w.scores, w.rv);
  add_later<T>(t, decay, w.z, t.kt, s.dim, nullptr, w.d_o, s.values, w.scores, w.dv);
  add_outer<T>(t, w.z, s.dim, w.d_o, s.values, decay.zeta, w.rows, w.g_u, s.ldu());
}

template <typename T>
__device__ __forceinline__ void mark_not_finite(const Vec<T>& values, int* marks, int tokens) {
  for (int v = 0; v < kVector; ++v) {
    if (v < tokens && !finite(values.x[v])) marks[v] = 1;
  }
}

/// Tokens with a memory, a query, a solution or a gradient that is not finite take no part in products: q, x̃, do and α
/// count as 0 there (w.aside), and what depends on them is marked at the end. w.lost says which tokens those are: they
/// and all before them, back to the last γ = 0. Returns whether the chunk's start is among them.
template <typename T>
__device__ __noinline__ bool set_lost_aside(const Problem& p, Work<T>& w, const T* u) {
  Chunk<T>& t = w.chunk;
  const Sizes& s = w.size;
  const int channels = s.remembers ? s.values : s.dim;
  if (s.remembers) {
    const bool state_lost = !finite(frobenius(u, s.u_size()));
    t.find_lost(t.bad_value, t.values_decay(), state_lost, w.aside);
  }
  each(t.len, [&](int c) {
    const int solve_lost = s.solves && w.op.lost[c], no_mix = !finite(t.alpha[c]);
    w.aside[c] = (s.remembers ? w.aside[c] : 0) | solve_lost | no_mix;
  });
  each_vector(s.dim, t.len, [&](int, int c, int at) {
    mark_not_finite(load(t.q + at), w.aside + c, t.len - c);
    if (s.solves) mark_not_finite(load(w.x + at), w.aside + c, t.len - c);
  });
  each_vector(channels, t.len, [&](int, int c, int at) { mark_not_finite(load(w.d_o + at), w.aside + c, t.len - c); });
  clear_lost(t.q, s.dim, t.len, w.aside);
  if (s.solves) clear_lost(w.x, s.dim, t.len, w.aside);
  clear_lost(w.d_o, channels, t.len, w.aside);
  alone([&] {
    const bool both_forget = p.options.decay_keys || !s.solves;
    w.flag = 0;
    for (int c = t.len - 1; c >= 0; --c) {
      if (w.aside[c]) t.alpha[c] = 0;
      w.flag |= w.aside[c];
      w.lost[c] = w.flag;
      if (t.gamma[c] == 0 && both_forget) w.flag = 0;
    }
  });
  const bool reaches = w.flag != 0;
  sync();
  return reaches;
}

template <typename T>
__device__ void mark_lost_gradients(Work<T>& w, bool start_lost) {
  const Sizes& s = w.size;
  const T nan = static_cast<T>(not_a_number());
  if (s.solves && w.op.diagonal) {
    each(s.dim, [&](int i) {
      for (int c = 0; c < w.chunk.len; ++c) {
        if (w.aside[c]) w.d_diagonal[i] = not_a_number();
      }
    });
  }
  mark_lost<T>(w.gk, s.dim, w.chunk.len, w.lost);
  mark_lost<T>(w.rv, s.dim, w.chunk.len, w.lost);
  mark_lost<T>(w.dv, s.values, w.chunk.len, w.lost);
  if (start_lost && s.solves) fill(w.g_h, s.h_size(), nan);
  if (start_lost && s.remembers) fill(w.g_u, s.u_size(), nan);
}

/// y (as lanes, into w.y) and everything dH_c sends on.
template <typename T>
__device__ void solve_part(const Options& options, Work<T>& w) {
  const Chunk<T>& t = w.chunk;
  const Sizes& s = w.size;
  const bool unrolled = unrolls(options);
  each(t.len, [&](int c) { w.inner_h[c] = w.d_ridge[c] = 0; });
  each(t.lanes, [&](int c) {
    const bool counts = c < t.len && !w.aside[c];
    w.factor[c] = !counts ? T{0} : s.remembers ? w.recall.solved[c] : static_cast<T>(w.op.sigma[c]);
  });
  const T* dx = s.remembers ? w.w : w.d_o;
  each_vector(s.dim, t.lanes, [&](int, int c, int at) {  // the right-hand side, σ dx
    store(w.right + at, masked(load(dx + at), load(w.factor + c)));
  });
  if (unrolled) {
    const T* x = w.solver.solve(w.op, t.q, w.lanes_too);
    lane_dot<T>(x, w.right, s.dim, t.lanes, w.more_dots);
    alone([&] { w.y = w.y_room; });
    w.solver.reverse(w.op, t.q, w.right, w.y, w.d_ridge,
                     [&](const T* p, const T* z, const T* sz) { add_pair(w, p, z, sz); });
  } else {
    T* y = w.solver.solve(w.op, w.right, w.y_room);
    alone([&] { w.y = y; });
    w.op.apply_to(w.x, w.lanes_too);
    add_pair<T>(w, y, w.x, w.lanes_too);
    lane_dot<T>(w.x, y, s.dim, t.lanes, w.more_dots);
  }
  each(t.len, [&](int c) {
    const SystemScale scale{w.op.sigma[c], w.op.rho[c]};
    const double through = gradient_through_scale(options, w.more_dots[c], w.inner_h[c], scale.rho, w.d_ridge[c]);
    w.phi_f2[c] = gradient_of_norm(options, through, scale, w.op.norm[c]);
    w.inner_h[c] += w.phi_f2[c];
  });
  add_norm_term(w);
}

template <typename T>
__device__ __noinline__ void write_query_gradients(const Gradients& out, Work<T>& w, std::int64_t b, std::int64_t t0,
                                                   std::int64_t head) {
  Chunk<T>& t = w.chunk;
  const Sizes& s = w.size;
  if (out.d_alpha.data != nullptr && s.solves && s.remembers) {
    sum_channels(
        s.dim, t.len,
        [&](int i, int c) {
          const int at = i * kStride + c;
          return ((w.op.live(c) ? static_cast<double>(w.x[at]) : 0) - t.q[at] / w.recall.sigma[c]) * w.w[at];
        },
        [&](int c, double sum) {
          write(out.d_alpha, offset(out.d_alpha, b, t0 + c, head), w.aside[c] ? not_a_number() : sum);
        });
  }
  if (out.d_q.data == nullptr) return;
  each_vector(s.dim, t.len, [&](int, int c, int at) {
    const Vec<T> solved = s.solves ? load(w.y + at) : Vec<T>{};
    const Vec<T> direct = s.remembers ? masked(load(w.w + at), load(w.recall.direct + c)) : Vec<T>{};
    store(w.lanes_too + at, solved + direct);
  });
  mark_lost<T>(w.lanes_too, s.dim, t.len, w.aside);
  t.store_lanes(out.d_q, b, t0, head, s.dim, w.lanes_too);
}

/// values (+)= the sum's tokens, which become the result.
template <typename T>
__device__ __noinline__ void store_sum(Chunk<T>& t, const View& sum, std::int64_t b, std::int64_t t0, std::int64_t head,
                                       int n, const T* values, bool add) {
  constexpr DType kType = sizeof(T) == 8 ? DType::float64 : DType::float32;
  const std::int64_t first = offset(sum, b, t0, head);
  const bool aligned = runs_aligned<kType>(sum.data, first, sum.token_stride);
  each_run(t.len, n, [&](int c, int i, int count) {
    const std::int64_t place = first + c * sum.token_stride + i;
    T own[kRun], before[kRun] = {};
    if (add) read_run<T, kType>(sum.data, place, count, aligned, before);
    get_run(values + i * kStride + c, count, own);
    for (int r = 0; r < kRun; ++r) own[r] += before[r];
    write_run<kType>(sum.data, place, count, aligned, own);
  });
}

/// dβ, dk and dv from gk, rv and dv; added to what the sums hold, if told. Also k·Ḡk and k·R̄v, for dg.
template <typename T>
__device__ __noinline__ void write_sums(const Problem& p, Work<T>& w, const Sums<T>& sums, std::int64_t b,
                                        std::int64_t t0, std::int64_t head, bool add) {
  Chunk<T>& t = w.chunk;
  const Sizes& s = w.size;
  if (s.solves) lane_dot<T>(t.kt, w.gk, s.dim, t.lanes, w.dots);
  if (s.remembers) lane_dot<T>(t.kt, w.rv, s.dim, t.lanes, w.more_dots);
  each(t.len, [&](int c) {
    w.key_inner[c] = s.solves ? w.dots[c] : T{0};
    w.value_inner[c] = s.remembers ? w.more_dots[c] : T{0};
    double& d_beta = sums.beta[(b * p.tokens + t0 + c) * p.heads + head];
    d_beta = (add ? d_beta : 0) + w.key_inner[c] + w.value_inner[c];
  });
  each(t.lanes, [&](int c) { w.factor[c] = c < t.len ? static_cast<T>(t.beta[c]) : T{0}; });
  each_vector(s.dim, t.len, [&](int, int c, int at) {
    const Vec<T> half = s.solves ? load(w.gk + at) : Vec<T>{}, rv = s.remembers ? load(w.rv + at) : Vec<T>{};
    store(w.gk + at, load(w.factor + c) * (half + half + rv));
  });
  store_sum<T>(t, contiguous_view<T>(p, sums.k, p.key_dim), b, t0, head, s.dim, w.gk, add);
  if (!s.remembers) return;
  scale_lanes(w.dv, s.values, t.lanes, w.factor);
  store_sum<T>(t, contiguous_view<T>(p, sums.v, p.value_dim), b, t0, head, s.values, w.dv, add);
}

/// dg by reverse running sums from the end of the chunk: dg_c = ⟨Ḡ_c, H_c⟩ − β_c k_cᵀḠ_ck_c, and that is also what
/// reaches H_{c-1} from later tokens, ⟨γ_c Ḡ_c, H_{c-1}⟩.
template <typename T>
__device__ void write_decay_sums(const Problem& p, Work<T>& w, const Sums<T>& sums, std::int64_t b, std::int64_t t0,
                                 std::int64_t head, double at_end) {
  const Chunk<T>& t = w.chunk;
  const bool keys = w.size.solves && p.options.decay_keys;
  alone([&] {
    double inner = at_end;
    for (int c = t.len - 1; c >= 0; --c) {
      if (keys) inner += w.inner_h[c] - t.beta[c] * w.key_inner[c];
      if (w.size.remembers) inner += w.inner_u[c] - t.beta[c] * w.value_inner[c];
      if (t.gamma[c] == 0) inner = 0;
      sums.log_decay[(b * p.tokens + t0 + c) * p.heads + head] = inner;
    }
  });
}

/// H at the start of chunk i.
template <typename T>
__device__ void copy_start(const Work<T>& w, int i, T* to) {
  const Sizes& s = w.size;
  i == 0 ? unpack_matrix(w.saved_h, s.dim, s.dim, to, s.ldh()) : copy(w.start_h(i), s.h_size(), to);
}

/// The states at the start of every chunk of a segment, and what is left of a state at its end; returns how many chunks
/// there are.
template <typename T>
__device__ __noinline__ int chunk_starts(const Problem& p, const Segment& segment, std::int64_t index,
                                         const SegmentStates<T>& states, std::int64_t head, Work<T>& w,
                                         double& key_zeta, double& value_zeta) {
  const Sizes& s = w.size;
  const bool in_place_u = s.ldu() == s.values;
  alone([&] {
    w.saved_h = states.h_at(index, head);
    w.first_u = in_place_u ? states.u_at(index, head) : w.starts_u;
  });
  if (s.remembers && !in_place_u) unpack_matrix(states.u_at(index, head), s.dim, s.values, w.first_u, s.ldu());
  const std::int64_t end = segment.begin + segment.length;
  int i = 0;
  for (std::int64_t t = segment.begin; t < end; t += s.chunk, ++i) {
    const int len = static_cast<int>(min<std::int64_t>(s.chunk, end - t));
    w.chunk.load(p, segment.batch, t, head, len, {.queries = false, .key_lanes = false});
    key_zeta *= w.chunk.key_decay().zeta[len - 1];
    value_zeta *= w.chunk.values_decay().zeta[len - 1];
    if (t + len == end) continue;
    if (s.solves) {
      copy_start(w, i, w.start_h(i + 1));
      advance<T>(w.chunk, true, w.start_h(i + 1), w.rows);
    }
    if (s.remembers) {
      copy(w.start_u(i), s.u_size(), w.start_u(i + 1));
      advance<T>(w.chunk, false, w.start_u(i + 1), w.rows);
    }
  }
  return i;
}

template <typename T>
__device__ void load_gradient(const Problem& p, const Gradients& out, Work<T>& w, std::int64_t b, std::int64_t t,
                              std::int64_t head) {
  const int channels = w.size.remembers ? w.size.values : w.size.dim;
  w.chunk.load_lanes(out.d_o, b, t, head, channels, w.d_o);
  if (!w.size.remembers || p.options.scale == 1) return;
  const T scale = static_cast<T>(p.options.scale);
  each_vector(channels, w.chunk.lanes,
              [&](int, int, int at) { store(w.d_o + at, load(w.d_o + at) * broadcast(scale)); });
}

/// Pass 1 over one chunk, tokens t … of the segment's row; `at_end` is ⟨Ḡ, H⟩ + ⟨R̄, U⟩ at its end.
template <typename T>
__device__ void chunk_alone(const Problem& p, const Saved& saved, const Gradients& out, Work<T>& w, const Sums<T>& sums,
                            std::int64_t b, std::int64_t t, std::int64_t head, int i, bool last, double at_end) {
  const Sizes& s = w.size;
  load_gradient(p, out, w, b, t, head);
  if (s.solves) {
    copy_start(w, i, w.op.h);
    w.op.set(w.chunk, p.options, head, saved.norm + (b * p.tokens + t) * p.heads + head, p.heads);
    w.chunk.load_lanes(contiguous_view<T>(p, saved.x, p.key_dim), b, t, head, s.dim, w.x);
  }
  const bool start_lost = set_lost_aside(p, w, w.start_u(i));
  carry_into_chunk(w, last);
  if (s.remembers) values_part(p, w, w.start_u(i));
  if (s.solves) solve_part(p.options, w);
  write_query_gradients(out, w, b, t, head);
  mark_lost_gradients(w, start_lost);
  write_sums(p, w, sums, b, t, head, false);
  write_decay_sums(p, w, sums, b, t, head, at_end);
}

/// Pass 1. Leaves each segment's own part of its starting state's gradient in `own`.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    segments_alone(const __grid_constant__ Problem p, const __grid_constant__ Saved saved,
                   const __grid_constant__ Gradients out, Plan plan, SegmentStates<T> states, SegmentStates<T> own,
                   double* diagonals, Sums<T> sums, Sizes s, Grid grid) {
  auto& w = own_workspace<Work<T>>(grid, [&](auto& mine, Arena& arena) { mine.allocate(arena, s, p.options); });
  for (std::int64_t task = block(); task < plan.count(p) * p.heads; task += blocks()) {
    const std::int64_t index = task / p.heads, head = task % p.heads;
    const Segment segment = plan.segments[index];
    double key_zeta = 1, value_zeta = 1;
    const int chunks = chunk_starts(p, segment, index, states, head, w, key_zeta, value_zeta);
    if (s.solves) fill(w.g_h, s.h_size(), T{0});
    if (s.remembers) fill(w.g_u, s.u_size(), T{0});
    fill(w.d_diagonal, s.dim, 0.0);
    for (int i = chunks - 1; i >= 0; --i) {
      const std::int64_t t = segment.begin + static_cast<std::int64_t>(i) * s.chunk;
      const int len = static_cast<int>(min<std::int64_t>(s.chunk, segment.begin + segment.length - t));
      const bool last = i == chunks - 1;
      double at_end = 0;
      if (!last && s.solves && p.options.decay_keys) at_end += inner_product(w.g_h, w.start_h(i + 1), s.h_size());
      if (!last && s.remembers) at_end += inner_product(w.g_u, w.start_u(i + 1), s.u_size());
      w.chunk.load(p, segment.batch, t, head, len, {.value_lanes = true});
      chunk_alone(p, saved, out, w, sums, segment.batch, t, head, i, last, at_end);
    }
    alone([&] {
      own.key_zeta[task] = key_zeta;
      own.value_zeta[task] = value_zeta;
    });
    if (s.solves) pack_symmetric<T>(w.g_h, s.ldh(), s.dim, own.h_at(index, head));
    if (s.remembers) pack_matrix<T>(w.g_u, s.ldu(), s.dim, s.values, own.u_at(index, head));
    if (diagonals != nullptr) each(s.dim, [&](int i) { diagonals[task * s.dim + i] = w.d_diagonal[i]; });
  }
}

/// What arrives at the segment's end, into w.g_h and w.g_u, and how much of it gets to each token. Returns ⟨G, H⟩ + ⟨R,
/// U⟩ at the segment's start.
template <typename T>
__device__ double load_arriving(const Problem& p, const Segment& segment, std::int64_t index,
                                const SegmentStates<T>& states, const SegmentStates<T>& arriving, std::int64_t head,
                                Work<T>& w) {
  const Sizes& s = w.size;
  const int length = static_cast<int>(segment.length);
  each(length, [&](int t) {
    const View& g = p.log_decay;
    const double gamma =
        g.data != nullptr ? exp(read<double>(g, offset(g, segment.batch, segment.begin + t, head))) : 1.0;
    w.value_reach[t] = gamma;
    w.key_reach[t] = p.options.decay_keys ? gamma : 1.0;
  });
  alone([&] {
    w.key_reach[length] = w.value_reach[length] = 1;
    for (int t = length - 1; t >= 0; --t) {
      w.value_reach[t] *= w.value_reach[t + 1];
      w.key_reach[t] *= w.key_reach[t + 1];
    }
  });
  double inner = 0;
  if (s.solves) {
    const T* g = arriving.h_at(index, head);
    unpack_matrix(g, s.dim, s.dim, w.g_h, s.ldh());
    if (p.options.decay_keys && w.key_reach[0] != 0) {
      inner += w.key_reach[0] * inner_product(g, states.h_at(index, head), p.key_dim * p.key_dim);
    }
  }
  if (s.remembers) {
    const T* g = arriving.u_at(index, head);
    unpack_matrix(g, s.dim, s.values, w.g_u, s.ldu());
    if (w.value_reach[0] != 0) {
      inner += w.value_reach[0] * inner_product(g, states.u_at(index, head), p.key_dim * p.value_dim);
    }
  }
  return inner;
}

/// The sums as results, each in its own type.
template <typename T>
__device__ __noinline__ void write_results(const Problem& p, const Gradients& out, const Sums<T>& sums, std::int64_t b,
                                           std::int64_t t0, std::int64_t head, int len) {
  const auto rows = [&](const View& to, const auto* from, int n) {
    if (to.data == nullptr) return;
    move(
        len * n, [&](int at) { return from[((b * p.tokens + t0 + at / n) * p.heads + head) * n + at % n]; },
        [&](int at, auto value) { write(to, offset(to, b, t0 + at / n, head) + at % n, value); });
  };
  rows(out.d_k, sums.k, static_cast<int>(p.key_dim));
  if (p.options.part != Part::solve) rows(out.d_v, sums.v, static_cast<int>(p.value_dim));
  rows(out.d_beta, sums.beta, 1);
  rows(out.d_log_decay, sums.log_decay, 1);
}

/// Pass 3: adds what arrives at each segment's end, and writes the results.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_arriving(const __grid_constant__ Problem p, const __grid_constant__ Gradients out, Plan plan,
                 SegmentStates<T> states, SegmentStates<T> arriving, Sums<T> sums, Sizes s, Grid grid) {
  auto& w = own_workspace<Work<T>>(grid, [&](auto& mine, Arena& arena) { mine.allocate(arena, s, p.options); });
  for (std::int64_t task = block(); task < plan.count(p) * p.heads; task += blocks()) {
    const std::int64_t index = task / p.heads, head = task % p.heads;
    const Segment segment = plan.segments[index];
    const std::int64_t b = segment.batch;
    const bool nothing = segment.last && out.d_h == nullptr && out.d_u == nullptr;
    if (!nothing) {
      // dg_i = ⟨G, (Π_{i ≤ l} γ_l) H_{i-1}⟩: forwards from the segment's start nothing cancels.
      const double at_start = load_arriving(p, segment, index, states, arriving, head, w);
      alone([&] { w.inner = at_start; });
    }
    for (std::int64_t t = 0; t < segment.length; t += s.chunk) {
      const int len = static_cast<int>(min<std::int64_t>(s.chunk, segment.length - t));
      if (!nothing) {
        Chunk<T>& chunk = w.chunk;
        chunk.load(p, b, segment.begin + t, head, len, {.queries = false, .value_lanes = true});
        each(chunk.lanes, [&](int c) {
          w.factor[c] = c < len ? static_cast<T>(w.key_reach[t + c + 1]) : T{0};
          w.value_factor[c] = c < len ? static_cast<T>(w.value_reach[t + c + 1]) : T{0};
        });
        products_with_arriving(w);
        if (s.solves) scale_lanes(w.gk, s.dim, chunk.lanes, w.factor);
        if (s.remembers) scale_lanes(w.rv, s.dim, chunk.lanes, w.value_factor);
        if (s.remembers) scale_lanes(w.dv, s.values, chunk.lanes, w.value_factor);
        write_sums(p, w, sums, b, segment.begin + t, head, true);
        alone([&] {
          for (int c = 0; c < len; ++c) {
            sums.log_decay[(b * p.tokens + segment.begin + t + c) * p.heads + head] += w.inner;
            if (p.options.decay_keys) w.inner += chunk.beta[c] * w.key_inner[c];
            w.inner += chunk.beta[c] * w.value_inner[c];
          }
        });
      }
      write_results(p, out, sums, b, segment.begin + t, head, len);
    }
  }
}

/// d_ridge_diagonal, summed over segments in their order.
static __global__ void sum_diagonals(const __grid_constant__ Problem p, Plan plan, const double* diagonals,
                                     double* out) {
  const std::int64_t n = p.heads * p.key_dim;
  for (std::int64_t i = block() * kThreads + thread(); i < n; i += blocks() * kThreads) {
    double total = 0;
    for (std::int64_t s = 0; s < plan.count(p); ++s) total += diagonals[s * n + i];
    out[i] = total;
  }
}

template <typename T>
void backward_as(const Problem& p, const Saved& saved, const Gradients& out, const Device& device) {
  const Sizes s = sizes_of(p);
  const std::int64_t tasks = segments_of(p) * p.heads, tokens = p.batch * p.tokens * p.heads;
  const Plan plan = start_plan(p, device);
  const auto states_with = [&](void* h, void* u) {
    return SegmentStates<T>{.h = static_cast<T*>(h),
                            .u = static_cast<T*>(u),
                            .key_zeta = nullptr,
                            .value_zeta = nullptr,
                            .heads = p.heads,
                            .dim = p.key_dim,
                            .values = p.value_dim};
  };
  const SegmentStates<T> states = states_with(saved.h, saved.u);
  SegmentStates<T> own = states_with(s.solves ? allocate<T>(device, tasks * p.key_dim * p.key_dim) : nullptr,
                                     s.remembers ? allocate<T>(device, tasks * p.key_dim * p.value_dim) : nullptr);
  own.key_zeta = allocate<double>(device, tasks);
  own.value_zeta = allocate<double>(device, tasks);
  double* diagonals = out.d_ridge_diagonal != nullptr ? allocate<double>(device, tasks * p.key_dim) : nullptr;
  const Sums<T> sums{.k = allocate<T>(device, tokens * p.key_dim),
                     .v = s.remembers ? allocate<T>(device, tokens * p.value_dim) : nullptr,
                     .beta = allocate<double>(device, tokens),
                     .log_decay = allocate<double>(device, tokens)};

  const Grid first = plan_grid<Work<T>>(segments_alone<T>, tasks, device,
                                        [&](auto& w, Arena& arena) { w.allocate(arena, s, p.options); });
  launch(segments_alone<T>, first.blocks, first.shared_bytes, device.stream, p, saved, out, plan, states, own,
         diagonals, sums, s, first);
  if (s.solves) {
    start_carry<T>(p, plan, device,
                   {.parts = own.h,
                    .zeta = own.key_zeta,
                    .start = static_cast<const T*>(out.d_h),
                    .end = static_cast<T*>(out.d_h0),
                    .rows = p.key_dim,
                    .columns = p.key_dim,
                    .symmetric = true,
                    .backwards = true});
  }
  if (s.remembers) {
    start_carry<T>(p, plan, device,
                   {.parts = own.u,
                    .zeta = own.value_zeta,
                    .start = static_cast<const T*>(out.d_u),
                    .end = static_cast<T*>(out.d_u0),
                    .rows = p.key_dim,
                    .columns = p.value_dim,
                    .symmetric = false,
                    .backwards = true});
  }
  Problem linear = p;  // nothing is solved in the third pass: no room for it either
  linear.options.solver = Solver::chebyshev;
  linear.options.gradient = Gradient::implicit;
  linear.options.iterations = 0;
  const Grid third = plan_grid<Work<T>>(add_arriving<T>, tasks, device,
                                        [&](auto& w, Arena& arena) { w.allocate(arena, s, linear.options); });
  Gradients by_head = out;  // dk and dv of heads that share are known when all of those are
  if (p.key_group > 1) by_head.d_k.data = nullptr;
  if (p.value_group > 1) by_head.d_v.data = nullptr;
  launch(add_arriving<T>, third.blocks, third.shared_bytes, device.stream, linear, by_head, plan, states, own, sums, s,
         third);
  if (p.key_group > 1 && out.d_k) {
    start_group_sums<T>(p, contiguous_view<T>(p, sums.k, p.key_dim), p.key_dim, p.key_group, out.d_k, device);
  }
  if (p.value_group > 1 && out.d_v && s.remembers) {
    start_group_sums<T>(p, contiguous_view<T>(p, sums.v, p.value_dim), p.value_dim, p.value_group, out.d_v, device);
  }
  if (out.d_ridge_diagonal == nullptr) return;
  launch(sum_diagonals, (p.heads * p.key_dim + kThreads - 1) / kThreads, 0, device.stream, p, plan, diagonals,
         out.d_ridge_diagonal);
}

}  // namespace

void plain::backward(const Problem& problem, const Saved& saved, const Gradients& gradients, const Device& device) {
  const CurrentDevice current(device.index);
  with_arithmetic(state_dtype(problem), [&]<typename T>(T) { backward_as<T>(problem, saved, gradients, device); });
}

}  // namespace gka::kernels::cuda
