// The forward pass over a run of tokens of one head, chunk by chunk, from the state before them.
#pragma once

#include "kernels/cuda/recall.cuh"
#include "kernels/cuda/segments.cuh"
#include "kernels/cuda/solvers.cuh"

namespace gka::kernels::cuda {

template <typename T>
struct ForwardWorkspace {
  Chunk<T> chunk;
  Operator<T> op;
  LaneSolver<T> solver;
  Recall<T> recall;
  T* u;
  T *x_room, *o, *rows;
  T* x;  // x̃ of the chunk, wherever the solver left it

  __host__ __device__ void allocate(Arena& arena, const Sizes& s, const Options& options) {
    solver.allocate_hot(arena, s, options, false);
    op.allocate_hot(arena, s);
    chunk.allocate_hot(arena, s);
    op.allocate(arena, s);
    op.lend_room(solver.second);
    solver.allocate(arena, s);
    chunk.allocate(arena);
    u = arena.take<T>(s.u_size());
    x_room = arena.take<T>(has_schedule(options.solver) ? 0 : s.lanes_of_keys());
    o = arena.take<T>(max(s.lanes_of_keys(), s.lanes_of_values()));
    rows = arena.take<T>(s.rows_of_tokens());
    recall.allocate(arena, op.scores);
  }
};

template <typename T>
__device__ __noinline__ void write_report(const Problem& p, const Report& report, ForwardWorkspace<T>& w,
                                          std::int64_t b, std::int64_t t, std::int64_t head) {
  const int dim = w.chunk.size.dim;
  T* applied = w.o;  // free until the values are asked
  w.op.apply_to(w.x, applied);
  each(w.chunk.len, [&](int c) {
    const std::int64_t token = (b * p.tokens + t + c) * p.heads + head;
    const double sigma = w.op.sigma[c];
    const bool lost = w.op.lost[c] != 0;
    ReportSums sums;
    for (int i = 0; i < dim; ++i) {
      const int at = i * kStride + c;
      const T difference = applied[at] - w.chunk.q[at];
      const double x = w.x[at], plain = difference, q = w.chunk.q[at];
      sums.add(q, x, plain, w.op.diagonal ? static_cast<double>(w.op.ridge_row[i]) : w.op.rho[c], sigma, dim);
      if (report.x != nullptr) report.x[token * dim + i] = lost ? not_a_number() : x * sigma;
    }
    const auto put = [&](double* to, double value) {
      if (to != nullptr) to[token] = lost ? not_a_number() : value;
    };
    put(report.norm, w.op.norm[c]);
    put(report.ridge, sums.ridge(p.options, w.op.norm[c]));
    put(report.residual, sqrt(sums.with_ridge));
    put(report.true_residual, sqrt(sums.without));
    put(report.variance, sums.variance);
    put(report.certainty, certainty_of(sigma, sums.unexplained, sums.squares));
  });
}

/// x̃ of every token of the chunk into w.x; keeps what the backward pass and the report want.
template <typename T>
__device__ void solve_chunk(const Problem& p, const Outputs& out, ForwardWorkspace<T>& w, std::int64_t b,
                            std::int64_t t, std::int64_t head) {
  w.op.set(w.chunk, p.options, head);
  T* x = w.solver.solve(w.op, w.chunk.q, w.x_room);
  alone([&] { w.x = x; });
  const int dim = w.chunk.size.dim, len = w.chunk.len;
  mark_lost<T>(w.x, dim, len, w.op.lost);
  if (out.saved.x != nullptr) {
    w.chunk.store_lanes(contiguous_view<T>(p, out.saved.x, p.key_dim), b, t, head, dim, w.x);
    each(len, [&](int c) { out.saved.norm[(b * p.tokens + t + c) * p.heads + head] = w.op.norm[c]; });
  }
  const Report& r = out.report;
  if (r.wanted()) write_report(p, r, w, b, t, head);
}

template <typename T>
__device__ void answer_chunk(const Problem& p, const Outputs& out, ForwardWorkspace<T>& w, std::int64_t b,
                             std::int64_t t, std::int64_t head) {
  const Sizes& s = w.chunk.size;
  T* const o = s.solves && s.values <= s.dim ? w.x : w.o;  // x has been read by the time o is written
  if (!s.remembers) {
    each_lane(s.dim, w.chunk.len, [&](int, int c, int at) { o[at] = w.x[at] * static_cast<T>(w.op.sigma[c]); });
    mark_lost<T>(o, s.dim, w.chunk.len, w.op.lost);
  } else {
    w.recall.set(p, w.chunk, s.solves ? &w.op : nullptr, w.solver.free_room(s.solves ? w.x : nullptr));
    w.recall.mix(w.chunk, s.solves ? w.x : nullptr);
    w.recall.read(w.chunk, w.u, p.options.scale, o);
    mark_lost<T>(o, s.values, w.chunk.len, w.recall.lost);
  }
  w.chunk.store_lanes(out.o, b, t, head, s.remembers ? s.values : s.dim, o);
}

/// Tokens begin … end − 1 of row b. The state before them is in w.op.h and w.u; the state after them is left there, if
/// asked for.
template <typename T>
__device__ void run_tokens(const Problem& p, const Outputs& out, ForwardWorkspace<T>& w, std::int64_t b,
                           std::int64_t begin, std::int64_t end, std::int64_t head, bool wants_final) {
  const Sizes& s = w.chunk.size;
  for (std::int64_t t = begin; t < end; t += s.chunk) {
    const int len = static_cast<int>(min<std::int64_t>(s.chunk, end - t));
    w.chunk.load(p, b, t, head, len, {});
    if (s.solves) solve_chunk(p, out, w, b, t, head);
    if (out.o.data != nullptr) answer_chunk(p, out, w, b, t, head);
    if (t + len == end && !wants_final) break;
    if (s.solves) advance<T>(w.chunk, true, w.op.h, w.rows);
    if (s.remembers) advance<T>(w.chunk, false, w.u, w.rows);
  }
}

}  // namespace gka::kernels::cuda
