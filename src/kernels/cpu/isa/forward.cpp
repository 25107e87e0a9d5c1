// Forward: carry the states from segment to segment, then solve all segments at once, each walking its own chunks; a
// sequence of a few tokens goes token by token.
#include <memory>

#include "kernels/cpu/backend.h"
#include "kernels/cpu/isa/entry.h"
#include "kernels/cpu/isa/recall.h"
#include "kernels/cpu/isa/solvers.h"
#include "kernels/cpu/isa/states.h"
#include "kernels/cpu/isa/token.h"

namespace gka::kernels::cpu::GKA_ISA {
namespace {

template <typename T>
struct Workspace {
  Chunk<T> chunk;
  Operator<T> op;
  LaneSolver<T> solver;
  Recall<T> recall;
  StatePair<T> state;
  Buffer<T> x, o, scratch;
  Token<T> token;

  Workspace(const Sizes& s, const Options& options)
      : chunk(s),
        op(s),
        solver(s, options, false),
        recall(s),
        state(s),
        x(static_cast<std::int64_t>(s.dim) * kMaxChunk),
        o(static_cast<std::int64_t>(std::max(s.dim, s.values)) * kMaxChunk),
        scratch(static_cast<std::int64_t>(s.chunk) * std::max(chunk.ldk, chunk.ldv)) {}
};

template <typename T>
void write_report(const Problem& p, const Report& report, Workspace<T>& w, std::int64_t b, std::int64_t t,
                  std::int64_t head) {
  const int lanes = w.chunk.lanes, dim = w.chunk.size.dim;
  T* residual = w.o;  // free until the values are asked
  w.op.apply_to(w.x, residual);
  for (int i = 0; i < dim * lanes; ++i) residual[i] -= w.chunk.q[i];
  for (int c = 0; c < w.chunk.len; ++c) {
    const std::int64_t token = (b * p.tokens + t + c) * p.heads + head;
    const double sigma = w.op.sigma[c];
    ReportSums sums;
    for (int i = 0; i < dim; ++i) {
      const double x = w.x[i * lanes + c], plain = residual[i * lanes + c], q = w.chunk.q[i * lanes + c];
      sums.add(q, x, plain, w.op.diagonal ? static_cast<double>(w.op.ridge_row[i]) : w.op.rho[c], sigma, dim);
      if (report.x != nullptr) report.x[token * dim + i] = x * sigma;
    }
    const bool lost = w.op.lost[c];
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const auto put = [&](double* to, double value) {
      if (to != nullptr) to[token] = lost ? nan : value;
    };
    put(report.norm, w.op.norm[c]);
    put(report.ridge, sums.ridge(p.options, w.op.norm[c]));
    put(report.residual, std::sqrt(sums.with_ridge));
    put(report.true_residual, std::sqrt(sums.without));
    put(report.variance, sums.variance);
    put(report.certainty, certainty_of(sigma, sums.unexplained, sums.squares));
    for (int i = 0; lost && report.x != nullptr && i < dim; ++i) report.x[token * dim + i] = nan;
  }
}

/// x̃ of every token of the chunk into w.x; keeps what the backward pass and the report want.
template <typename T>
void solve_chunk(const Problem& p, const Outputs& out, Workspace<T>& w, std::int64_t b, std::int64_t t,
                 std::int64_t head) {
  w.op.set(w.chunk, w.state.h, w.state.ldh, p.options, head);
  w.solver.solve(w.op, w.chunk.q, w.x);
  const int dim = w.chunk.size.dim;
  for (int c = 0; c < w.chunk.len; ++c) {
    if (w.op.lost[c]) mark_lost<T>(w.x, dim, w.chunk.lanes, c);
  }
  if (out.saved.x != nullptr) {
    const View view = contiguous_view<T>(p, out.saved.x, p.key_dim);
    w.chunk.store_lanes(view, b, t, head, dim, w.x);
    for (int c = 0; c < w.chunk.len; ++c) out.saved.norm[(b * p.tokens + t + c) * p.heads + head] = w.op.norm[c];
  }
  const Report& r = out.report;
  if (r.wanted()) write_report(p, r, w, b, t, head);
}

template <typename T>
void answer_chunk(const Problem& p, const Outputs& out, Workspace<T>& w, std::int64_t b, std::int64_t t,
                  std::int64_t head) {
  const int lanes = w.chunk.lanes, len = w.chunk.len;
  if (!w.chunk.size.remembers) {
    for (int i = 0; i < w.chunk.size.dim; ++i) {
      for (int c = 0; c < len; ++c) w.o[i * lanes + c] = w.x[i * lanes + c] * static_cast<T>(w.op.sigma[c]);
    }
    for (int c = 0; c < len; ++c) {
      if (w.op.lost[c]) mark_lost<T>(w.o, w.chunk.size.dim, lanes, c);
    }
    w.chunk.store_lanes(out.o, b, t, head, w.chunk.size.dim, w.o);
    return;
  }
  w.recall.set(p, w.chunk, w.chunk.size.solves ? &w.op : nullptr);
  w.recall.mix(w.chunk, w.chunk.size.solves ? w.x.get() : nullptr);
  w.recall.read(w.chunk, w.state.u, w.state.ldu, p.options.scale, w.o);
  for (int c = 0; c < len; ++c) {
    if (w.recall.lost[c]) mark_lost<T>(w.o, w.chunk.size.values, lanes, c);
  }
  w.chunk.store_lanes(out.o, b, t, head, w.chunk.size.values, w.o);
}

/// The state at the start of a segment into w.state: from the pass before or, where this worker has just walked the
/// segment before, already there.
template <typename T>
void take_start(const Problem& p, const Segment& segment, const SegmentStates<T>& states, std::int64_t head, bool walks,
                Workspace<T>& w) {
  const Sizes& s = w.chunk.size;
  StatePair<T>& to = w.state;
  if (walks && segment.first) {
    if (s.solves) load_initial_keys<T>(p, segment.sequence, head, to.h, to.ldh);
    if (s.remembers) load_initial_values<T>(p, segment.sequence, head, to.u, to.ldu);
  }
  if (walks) {
    if (states.h != nullptr) pack_matrix<T>(to.h, to.ldh, s.dim, s.dim, states.h_at(segment.index, head));
    if (states.u != nullptr) pack_matrix<T>(to.u, to.ldu, s.dim, s.values, states.u_at(segment.index, head));
  } else {
    if (s.solves) unpack_matrix<T>(states.h_at(segment.index, head), s.dim, s.dim, to.h, to.ldh);
    if (s.remembers) unpack_matrix<T>(states.u_at(segment.index, head), s.dim, s.values, to.u, to.ldu);
  }
}

template <typename T>
void write_final_states(const Problem& p, const Outputs& out, const Segment& segment, std::int64_t head,
                        Workspace<T>& w) {
  const Sizes& s = w.chunk.size;
  const std::int64_t slot = segment.sequence * p.heads + head;
  if (out.h != nullptr && s.solves) {
    pack_matrix<T>(w.state.h, w.state.ldh, s.dim, s.dim, static_cast<T*>(out.h) + slot * s.dim * s.dim);
  }
  if (out.u != nullptr && s.remembers) {
    pack_matrix<T>(w.state.u, w.state.ldu, s.dim, s.values, static_cast<T*>(out.u) + slot * s.dim * s.values);
  }
}

/// Whether a sequence goes token by token. Half a vector of tokens is where a chunk begins to be cheaper. Its own
/// length decides, not what else is in the call.
template <typename T>
bool goes_by_tokens(const Problem& p, const Outputs& out, const Segment& segment) {
  return segment.first && segment.last && segment.tokens.length <= kLanes<T> / 2 && p.options.part == Part::both &&
         p.options.solver != Solver::exact && p.options.chunk == 0 && out.o && !out.report.examines();
}

template <typename T>
void run_tokens(const Problem& p, const Outputs& out, const Segment& segment, std::int64_t head, Workspace<T>& w) {
  const Sizes& s = w.chunk.size;
  Token<T>& token = w.token;
  const std::int64_t b = segment.tokens.batch, end = segment.tokens.begin + segment.tokens.length;
  const View x = out.saved.x != nullptr ? contiguous_view<T>(p, out.saved.x, p.key_dim) : View{};
  for (std::int64_t t = segment.tokens.begin; t < end; ++t) {
    const std::int64_t at = (b * p.tokens + t) * p.heads + head;
    read_token(p, b, t, head, token);
    write_key<T>(p.options, token, s.dim, w.state.h, w.state.ldh);
    const double sigma = solve_token<T>(p.options, w.state.h, w.state.ldh, s.dim, head, p.options.iterations, token,
                                        out.saved.norm != nullptr ? out.saved.norm + at : nullptr,
                                        out.report.certainty != nullptr ? out.report.certainty + at : nullptr);
    if (std::isnan(sigma)) std::fill_n(token.x, s.dim, static_cast<T>(sigma));  // as chunks mark a lost token
    if (x) write_row<T>(x, offset(x, b, t, head), s.dim, token.x);
    write_and_read_values<T>(p.options.scale, s.dim, s.values, sigma, w.state.u, w.state.ldu, token);
    write_row<T>(out.o, offset(out.o, b, t, head), s.values, token.y);
  }
}

template <typename T>
void run_segment(const Problem& p, const Outputs& out, const Segment& segment, const SegmentStates<T>& states,
                 std::int64_t head, bool walks, Workspace<T>& w) {
  const Sizes& s = w.chunk.size;
  take_start(p, segment, states, head, walks, w);
  const std::int64_t b = segment.tokens.batch, end = segment.tokens.begin + segment.tokens.length;
  const bool wants_final = segment.last && (out.h != nullptr || out.u != nullptr);
  const bool wants_end = wants_final || (walks && !segment.last);
  if (goes_by_tokens<T>(p, out, segment)) {
    run_tokens(p, out, segment, head, w);
    if (wants_final) write_final_states(p, out, segment, head, w);
    return;
  }
  for (std::int64_t t = segment.tokens.begin; t < end; t += s.chunk) {
    const int len = static_cast<int>(std::min<std::int64_t>(s.chunk, end - t));
    w.chunk.load(p, b, t, head, len, {});
    const std::int64_t next = std::min<std::int64_t>(s.chunk, end - t - len);
    w.chunk.prefetch(p, b, t + len, head, next);
    prefetch_rows(p.q, b, t + len, head, static_cast<int>(next), s.dim);
    if (s.solves) solve_chunk(p, out, w, b, t, head);
    if (out.o) answer_chunk(p, out, w, b, t, head);
    if (t + len == end && !wants_end) break;
    StatePair<T>& state = w.state;
    if (s.solves) advance_keys<T>(w.chunk, state.h, state.h, state.ldh, 0, s.dim, w.scratch);
    if (s.remembers) advance_values<T>(w.chunk, state.u, state.u, state.ldu, 0, s.dim, w.scratch);
  }
  if (wants_final) write_final_states(p, out, segment, head, w);
}

/// A sequence without tokens hands its state through.
template <typename T>
void pass_states_through(const Problem& p, const Outputs& out) {
  const int dim = static_cast<int>(p.key_dim), values = static_cast<int>(p.value_dim);
  for (std::int64_t n = 0; n < p.sequences; ++n) {
    if (sequence(p, n).length > 0) continue;
    for (std::int64_t head = 0; head < p.heads; ++head) {
      const std::int64_t slot = n * p.heads + head;
      if (out.h && solves(p)) load_initial_keys(p, n, head, static_cast<T*>(out.h) + slot * dim * dim, dim);
      if (out.u && remembers_values(p))
        load_initial_values(p, n, head, static_cast<T*>(out.u) + slot * dim * values, values);
    }
  }
}

/// One worker per sequence and head, walking all its segments: no pass before is needed.
template <typename T>
void walk_sequences(const Problem& p, const Outputs& out, const Plan& plan, const Executor& executor) {
  const Sizes sizes = sizes_of(p);
  const SegmentStates<T> states = segment_states<T>(p, out.saved.h, out.saved.u);
  parallel_tasks(
      executor, p.sequences * p.heads, [&] { return std::make_unique<Workspace<T>>(sizes, p.options); },
      [&](std::int64_t task, Workspace<T>& w) {
        const std::int64_t n = task / p.heads;
        for (std::int64_t s = plan.begin[n]; s < plan.begin[n + 1]; ++s) {
          run_segment(p, out, plan.segments[s], states, task % p.heads, true, w);
        }
      });
}

/// All segments at once, after a pass that carries the states from one to the next.
template <typename T>
void spread_segments(const Problem& p, const Outputs& out, const Plan& plan, const Executor& executor) {
  const Sizes sizes = sizes_of(p);
  const auto segments = static_cast<std::int64_t>(plan.segments.size());
  Buffer<T> own_h, own_u;
  if (sizes.solves && out.saved.h == nullptr) own_h.resize(segments * p.heads * p.key_dim * p.key_dim);
  if (sizes.remembers && out.saved.u == nullptr) own_u.resize(segments * p.heads * p.key_dim * p.value_dim);
  const SegmentStates<T> states = segment_states<T>(p, out.saved.h != nullptr ? out.saved.h : own_h.get(),
                                                    out.saved.u != nullptr ? out.saved.u : own_u.get());
  walk_states(p, plan, states, executor);
  parallel_tasks(
      executor, segments * p.heads, [&] { return std::make_unique<Workspace<T>>(sizes, p.options); },
      [&](std::int64_t task, Workspace<T>& w) {
        run_segment(p, out, plan.segments[task / p.heads], states, task % p.heads, false, w);
      });
}

template <typename T>
void forward_as(const Problem& p, const Outputs& out, const Executor& executor) {
  const Plan plan = make_plan(p);
  if (fills_threads(plan, p.heads, executor.threads)) {
    walk_sequences<T>(p, out, plan, executor);
  } else {
    spread_segments<T>(p, out, plan, executor);
  }
  pass_states_through<T>(p, out);
}

}  // namespace

void forward(const Problem& problem, const Outputs& outputs, const Executor& executor) {
  if (state_dtype(problem) == DType::float64) {
    forward_as<double>(problem, outputs, executor);
  } else {
    forward_as<float>(problem, outputs, executor);
  }
}

}  // namespace gka::kernels::cpu::GKA_ISA
