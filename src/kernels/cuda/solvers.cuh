// The solvers on an Operator, all tokens of a chunk at once, and their reverse passes.
//
// Chebyshev, gradient descent and Nesterov are one recurrence,
//
//   y_i = ξ_{i-1} + m_i (ξ_{i-1} − ξ_{i-2}),   ξ_i = y_i − s_i (A z_i − b),   ξ_0 = s_0 b,   ξ_{-1} = 0
//
// with the gradient taken at z_i = ξ_{i-1} (Chebyshev: s_i = c_i, m_i = ω_i − 1; gradient descent: m = 0) or ahead, at
// z_i = y_i (Nesterov, m_1 = 0). Conjugate gradients and the exact factorisation stand for themselves.
//
// A reverse pass hands out dA as a sum of rank-one terms, dA = −Σ p zᵀ, one call of `pair(p, z, Sz)` each, and dρ, the
// derivative by the ridge (through A and through the coefficients).
#pragma once

#include "kernels/cuda/split_solver.cuh"
#include "kernels/schedule.h"

namespace gka::kernels::cuda {

template <typename T>
struct LaneSolver {
  Solver kind;
  std::int64_t iterations;
  int dim;
  int records;   // whether solves leave what their reverse needs
  int adaptive;  // then all tokens share one schedule, and it is computed once
  int scheduled;

  T *first, *second;  // iterates
  T* right;           // the right-hand side, 0 where nothing is solved
  T* work[4];
  T* history;       // [iterations + 1] times the iterate, or r, p and w
  T *s, *m;         // the schedule, [iterations + 1][kMaxChunk]; in conjugate gradients the steps and turns
  double *ds, *dm;  // its derivatives
  double *dense, *factor, *column;   // of the exact solve
  alignas(16) T lane[8][kMaxChunk];  // numbers per token
  int in_parts;
  SplitSolver split;

  __host__ __device__ void allocate_hot(Arena& arena, const Sizes& sizes, const Options& options, bool keeps_history) {
    kind = options.solver;
    iterations = options.iterations;
    dim = sizes.dim;
    records = keeps_history;
    adaptive = options.ridge_mode == RidgeMode::adaptive;
    scheduled = 0;
    const bool simple = kind == Solver::chebyshev || kind == Solver::gradient_descent;
    in_parts = sizeof(T) == 4 && sizes.solves && !records && simple && iterations > 0 && SplitSolver::suits(dim);
    if (in_parts) split.allocate_hot(arena, dim);
    if (kind == Solver::exact) {
      factor = arena.take<double>(static_cast<std::int64_t>(dim) * dim);
      column = arena.take<double>(dim);
      dense = arena.take<double>(static_cast<std::int64_t>(dim) * dim);
    }
    first = arena.take<T>(sizes.lanes_of_keys());
    second = arena.take<T>(sizes.solves ? sizes.lanes_of_keys() : 0);
  }
  __host__ __device__ void allocate(Arena& arena, const Sizes& sizes) {
    if (!sizes.solves) return;
    const std::int64_t block = sizes.lanes_of_keys(), rows = iterations + 1;
    right = arena.take<T>(block);
    for (T*& w : work) w = arena.take<T>(block);
    if (has_schedule(kind) || records) {
      s = arena.take<T>(rows * kMaxChunk);
      m = arena.take<T>(rows * kMaxChunk);
    }
    if (!records) return;
    history = arena.take<T>(rows * block * (has_schedule(kind) ? 1 : 3));
    ds = arena.take<double>(rows * kMaxChunk);
    dm = arena.take<double>(rows * kMaxChunk);
  }

  /// x = (σH + ρ)⁻¹ b, lanes without a system 0. Returned is where x is, until the next solve: in `room` or, where it
  /// came to lie anyway, in one of the solver's own arrays.
  __device__ T* solve(Operator<T>& op, const T* b, T* room) {
    clear_dead_lanes(op, b, right);
    switch (kind) {
      case Solver::chebyshev:
      case Solver::gradient_descent:
      case Solver::nesterov: break;
      case Solver::exact: exact(op, right, room); return room;
      case Solver::conjugate_gradient: conjugate_gradient(op, right, room); return room;
    }
    set_schedule(op);
    if constexpr (sizeof(T) == 4) {
      if (in_parts && split.solve(op, right, *this, first)) return first;
    }
    return iterate(op, right);
  }
  /// Room for as many lanes, in the fastest memory there is, that a solution at x leaves free.
  __device__ T* free_room(const T* x) const { return x == first ? second : first; }

  /// The reverse of the last solve (which must have recorded): from dx, db (as lanes) and the terms of dA. Only for
  /// solvers that iterate. d_ridge[c] gets the whole derivative by ρ_c.
  template <typename Pair>
  __device__ void reverse(Operator<T>& op, const T* b, const T* dx, T* db, double* d_ridge, Pair&& pair) {
    clear_dead_lanes(op, b, right);
    if (has_schedule(kind)) {
      reverse_iterations(op, right, dx, db, d_ridge, pair);
    } else {
      reverse_conjugate_gradient(op, dx, db, pair);
    }
  }

 private:
  __device__ T* recorded(std::int64_t i) { return history + i * dim * kStride; }

  __device__ void record(std::int64_t i, const T* values, int lanes) {
    if (records) copy_lanes(values, dim, lanes, recorded(i));
  }

  __device__ __noinline__ void clear_dead_lanes(const Operator<T>& op, const T* b, T* to) const {
    each_vector(dim, op.chunk->lanes, [&](int, int c, int at) {
      Vec<T> values = load(b + at);
      for (int v = 0; v < kVector; ++v) {
        if (c + v >= op.chunk->len || !op.live(c + v)) values.x[v] = T{0};
      }
      store(to + at, values);
    });
  }

  __device__ __noinline__ void set_schedule(const Operator<T>& op) {
    if (scheduled) return;
    each(kMaxChunk, [&](int c) {
      const double rho = op.rho[c < op.chunk->len ? c : 0];
      Schedule schedule(kind, spectrum_top(adaptive, rho), rho);
      for (std::int64_t i = 0; i <= iterations; ++i) {
        const Coefficients k = i == 0 ? schedule.start() : schedule.step(i);
        const std::int64_t at = i * kMaxChunk + c;
        s[at] = static_cast<T>(k.s);
        m[at] = static_cast<T>(k.m);
        if (records) {
          ds[at] = k.ds;
          dm[at] = k.dm;
        }
      }
    });
    alone([&] { scheduled = adaptive; });
  }

  __device__ __noinline__ T* iterate(Operator<T>& op, const T* b) {
    const int lanes = op.chunk->lanes;
    const bool ahead = kind == Solver::nesterov;
    T* current = first;
    T* before = second;
    each_vector(dim, lanes, [&](int, int c, int at) {
      store(current + at, load(s + c) * load(b + at));
      store(before + at, Vec<T>{});
    });
    record(0, current, lanes);
    for (std::int64_t i = 1; i <= iterations; ++i) {
      const T* si = s + i * kMaxChunk;
      const T* mi = m + i * kMaxChunk;
      const T* z = current;
      if (ahead) {
        T* y = work[0];
        each_vector(dim, lanes, [&](int, int c, int at) {
          const Vec<T> xi = load(current + at);
          store(y + at, xi + load(mi + c) * (xi - load(before + at)));
        });
        z = y;
      }
      const auto right_side = [&]<int kWidth>(int row, int c, Width<kWidth>) {
        return load<kWidth>(b + row * kStride + c);
      };
      op.apply(z, right_side, [&]<int kWidth>(int row, int c, const Vec<T, kWidth>& hz, const Vec<T, kWidth>& bi) {
        const int at = row * kStride + c;
        const auto zi = load<kWidth>(z + at);
        const auto y = ahead ? zi : zi + load<kWidth>(mi + c) * (zi - load<kWidth>(before + at));
        store(before + at, y - load<kWidth>(si + c) * (hz + op.template ridge<kWidth>(row, c) * zi - bi));
      });
      T* const done = before;
      before = current;
      current = done;
      record(i, current, lanes);
    }
    return current;
  }

  template <typename Pair>
  __device__ __noinline__ void reverse_iterations(Operator<T>& op, const T* b, const T* dx, T* db, double* d_ridge,
                                                  Pair&& pair) {
    const int lanes = op.chunk->lanes;
    const bool ahead = kind == Solver::nesterov;
    T* e = first;           // dξ_i
    T* p = second;          // s_i dξ_i
    T* e_before = work[0];  // dξ_{i-1}, what later steps left there
    T* z = work[1];
    T* sz = work[2];
    T* momentum = work[3];  // ξ_{i-1} − ξ_{i-2}
    T *dot = lane[0], *by_s = lane[1], *by_m = lane[2];
    clear_dead_lanes(op, dx, e);
    clear_lanes(e_before, dim, lanes);
    clear_lanes(db, dim, lanes);
    for (std::int64_t i = iterations; i >= 1; --i) {
      const T* si = s + i * kMaxChunk;
      const T* mi = m + i * kMaxChunk;
      const T* now = recorded(i);
      const T* last = recorded(i - 1);
      const T* older = i >= 2 ? recorded(i - 2) : nullptr;
      T* gradient = work[2];  // A z − b, until it becomes S z
      each_vector(dim, lanes, [&](int, int c, int at) {
        const Vec<T> xi = load(last + at), step = xi - (older != nullptr ? load(older + at) : Vec<T>{});
        const Vec<T> y = xi + load(mi + c) * step, pi = load(si + c) * load(e + at);
        store(momentum + at, step);
        store(z + at, ahead ? y : xi);
        store(gradient + at, (y - load(now + at)) / load(si + c));
        store(p + at, pi);
        store(db + at, load(db + at) + pi);
      });
      lane_dot<T>(e, gradient, dim, lanes, by_s);
      lane_dot<T>(p, z, dim, lanes, dot);
      each_vector(dim, lanes, [&](int row, int c, int at) {
        store(sz + at, load(gradient + at) + load(b + at) - op.ridge(row, c) * load(z + at));
      });
      pair(p, z, sz);
      // e ← dξ_{i-1}, e_before ← dξ_{i-2}
      op.apply_to(p, sz);
      T* dy = z;
      each_vector(dim, lanes, [&](int row, int c, int at) {
        const Vec<T> dz = Vec<T>{} - (load(sz + at) + op.ridge(row, c) * load(p + at));
        const Vec<T> factor = load(mi + c), ei = load(e + at), d = ahead ? ei + dz : ei;
        store(dy + at, d);
        store(e + at, d + factor * d + (ahead ? Vec<T>{} : dz) + load(e_before + at));
        store(e_before + at, Vec<T>{} - factor * d);
      });
      lane_dot<T>(dy, momentum, dim, lanes, by_m);
      each(op.chunk->len, [&](int c) {
        const std::int64_t at = i * kMaxChunk + c;
        d_ridge[c] += -static_cast<double>(dot[c]) - by_s[c] * ds[at] + by_m[c] * dm[at];
      });
    }
    lane_dot<T>(e, b, dim, lanes, dot);
    each_vector(dim, lanes, [&](int, int c, int at) { store(db + at, load(db + at) + load(s + c) * load(e + at)); });
    each(op.chunk->len, [&](int c) { d_ridge[c] += dot[c] * ds[c]; });
  }

  /// A token whose residual has fallen to the rounding of its right-hand side stays where it is: further steps would
  /// follow rounding errors, and their reverse would divide by them.
  __device__ __noinline__ void conjugate_gradient(Operator<T>& op, const T* b, T* x) {
    const int lanes = op.chunk->lanes;
    T* p = first;
    T* w = second;
    T* r = work[0];
    T *energy = lane[0], *fresh = lane[1], *curvature = lane[2], *step = lane[3], *turn = lane[4], *floor = lane[5];
    clear_lanes(x, dim, lanes);
    copy_lanes(b, dim, lanes, r);
    copy_lanes(b, dim, lanes, p);
    lane_dot<T>(r, r, dim, lanes, energy);
    constexpr T kRounding = std::numeric_limits<T>::epsilon();
    each(lanes, [&](int c) { floor[c] = kRounding * kRounding * energy[c]; });
    for (std::int64_t i = 0; i < iterations; ++i) {
      op.apply(p, NothingEarly<T>{}, [&]<int kWidth>(int row, int c, const Vec<T, kWidth>& hp, const Vec<T, kWidth>&) {
        const int at = row * kStride + c;
        store(w + at, hp + op.template ridge<kWidth>(row, c) * load<kWidth>(p + at));
      });
      lane_dot<T>(p, w, dim, lanes, curvature);
      record_conjugate(i, r, p, w, lanes);
      each(lanes, [&](int c) { step[c] = energy[c] > floor[c] && curvature[c] > 0 ? energy[c] / curvature[c] : T{0}; });
      each_vector(dim, lanes, [&](int, int c, int at) {
        const Vec<T> a = load(step + c);
        store(x + at, load(x + at) + a * load(p + at));
        store(r + at, load(r + at) - a * load(w + at));
      });
      lane_dot<T>(r, r, dim, lanes, fresh);
      each(lanes, [&](int c) {
        turn[c] = step[c] != 0 ? fresh[c] / energy[c] : T{0};
        energy[c] = fresh[c];
        if (records) {
          s[i * kMaxChunk + c] = step[c];
          m[i * kMaxChunk + c] = turn[c];
        }
      });
      each_vector(dim, lanes, [&](int, int c, int at) { store(p + at, load(r + at) + load(turn + c) * load(p + at)); });
    }
    record_conjugate(iterations, r, p, w, lanes);
  }

  __device__ void record_conjugate(std::int64_t i, const T* r, const T* p, const T* w, int lanes) {
    record(3 * i, r, lanes);
    record(3 * i + 1, p, lanes);
    record(3 * i + 2, w, lanes);
  }

  /// Adjoints of x, r and p travel back through each step; those of its scalars (the energies r·r, the step and the
  /// turn) are resolved on the way.
  template <typename Pair>
  __device__ __noinline__ void reverse_conjugate_gradient(Operator<T>& op, const T* dx, T* db, Pair&& pair) {
    const int lanes = op.chunk->lanes;
    T* w_bar = first;
    T* sp = second;
    T* x_bar = work[0];
    T* r_bar = work[1];
    T* p_bar = work[2];
    T *energy_bar = lane[0], *dots = lane[1], *more = lane[2], *energy = lane[3], *curvature = lane[4];
    T *next_energy_bar = lane[5], *curvature_bar = lane[6];
    clear_dead_lanes(op, dx, x_bar);
    clear_lanes(r_bar, dim, lanes);
    clear_lanes(p_bar, dim, lanes);
    each(lanes, [&](int c) { energy_bar[c] = T{0}; });
    for (std::int64_t i = iterations - 1; i >= 0; --i) {
      const T* r = recorded(3 * i);
      const T* p = recorded(3 * i + 1);
      const T* w = recorded(3 * i + 2);
      const T* next_r = recorded(3 * i + 3);
      const T* step = s + i * kMaxChunk;
      const T* turn = m + i * kMaxChunk;
      lane_dot<T>(r, r, dim, lanes, energy);
      lane_dot<T>(p, w, dim, lanes, curvature);
      // p_{i+1} = r_{i+1} + turn p_i, turn = energy_{i+1} / energy_i, energy_{i+1} = r_{i+1} · r_{i+1}
      lane_dot<T>(p_bar, p, dim, lanes, dots);
      each(lanes, [&](int c) {
        const T inverse = step[c] != 0 ? 1 / energy[c] : T{0};
        next_energy_bar[c] = energy_bar[c] + dots[c] * inverse;
        energy_bar[c] = -dots[c] * turn[c] * inverse;
      });
      each_vector(dim, lanes, [&](int, int c, int at) {
        const Vec<T> pb = load(p_bar + at), eb = load(next_energy_bar + c);
        store(r_bar + at, load(r_bar + at) + pb + (eb + eb) * load(next_r + at));
        store(p_bar + at, load(turn + c) * pb + load(step + c) * load(x_bar + at));
      });
      // r_{i+1} = r_i − step w, x += step p_i, step = energy_i / (p · w)
      lane_dot<T>(r_bar, w, dim, lanes, dots);
      lane_dot<T>(x_bar, p, dim, lanes, more);
      each(lanes, [&](int c) {
        const T inverse = step[c] != 0 ? 1 / curvature[c] : T{0}, step_bar = more[c] - dots[c];
        energy_bar[c] += step_bar * inverse;
        curvature_bar[c] = -step_bar * step[c] * inverse;
      });
      each_vector(dim, lanes, [&](int row, int c, int at) {
        const Vec<T> kb = load(curvature_bar + c), pi = load(p + at), wi = load(w + at);
        store(w_bar + at, load(step + c) * load(r_bar + at) - kb * pi);  // −dL/dw
        store(p_bar + at, load(p_bar + at) + kb * wi);
        store(sp + at, wi - op.ridge(row, c) * pi);
      });
      pair(w_bar, p, sp);
      op.apply_to(w_bar, sp);
      each_vector(dim, lanes, [&](int row, int c, int at) {
        store(p_bar + at, load(p_bar + at) - load(sp + at) - op.ridge(row, c) * load(w_bar + at));
      });
    }
    const T* b = iterations > 0 ? recorded(0) : right;
    each_vector(dim, lanes, [&](int, int c, int at) {
      const Vec<T> eb = load(energy_bar + c);
      store(db + at, load(r_bar + at) + load(p_bar + at) + (eb + eb) * load(b + at));
    });
  }

  /// Token by token: the dense matrix, its LDLᵀ factorisation and two triangular solves, in float64.
  __device__ __noinline__ void exact(Operator<T>& op, const T* b, T* x) {
    const Chunk<T>& t = *op.chunk;
    clear_lanes(x, dim, t.lanes);
    each(dim * dim, [&](int at) { dense[at] = op.h[at / dim * t.size.ldh() + at % dim]; });
    for (int c = 0; c < t.len; ++c) {
      const double gamma = t.key_decay().gamma[c], beta = t.beta[c];
      const T* k = t.k + c * t.size.ldk();
      each(dim * dim,
           [&](int at) { dense[at] = (gamma == 0 ? 0 : gamma * dense[at]) + beta * k[at / dim] * k[at % dim]; });
      if (!op.live(c)) continue;
      each(dim * dim, [&](int at) {
        const int i = at / dim;
        const double ridge = op.diagonal ? static_cast<double>(op.ridge_row[i]) : op.rho[c];
        factor[at] = op.sigma[c] * dense[at] + (i == at % dim ? ridge : 0);
      });
      each(dim, [&](int i) { column[i] = b[i * kStride + c]; });
      factorise();
      substitute();
      each(dim, [&](int i) { x[i * kStride + c] = static_cast<T>(column[i]); });
    }
  }

  /// What is left to factorise lies in the lower triangle, column j of L in row j of the upper one, D on the diagonal.
  __device__ void factorise() {
    for (int j = 0; j < dim; ++j) {
      const int below = dim - j - 1;
      const double pivot = factor[j * dim + j];
      each(below, [&](int n) { factor[j * dim + j + 1 + n] = factor[(j + 1 + n) * dim + j] / pivot; });
      each(below * below, [&](int n) {
        const int i = j + 1 + n / below, l = j + 1 + n % below;
        if (l <= i) factor[i * dim + l] -= factor[j * dim + i] * factor[l * dim + j];
      });
    }
  }

  __device__ void substitute() {
    for (int j = 0; j < dim; ++j) {
      each(dim - j - 1, [&](int n) { column[j + 1 + n] -= factor[j * dim + j + 1 + n] * column[j]; });
    }
    each(dim, [&](int i) { column[i] /= factor[i * dim + i]; });
    for (int i = dim - 1; i > 0; --i) each(i, [&](int j) { column[j] -= factor[j * dim + i] * column[i]; });
  }
};

}  // namespace gka::kernels::cuda
