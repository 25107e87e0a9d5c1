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

#include "kernels/cpu/isa/operator.h"
#include "kernels/schedule.h"

namespace gka::kernels::cpu::GKA_ISA {

/// The schedule of every token of a chunk, iteration by iteration: [r + 1][lanes]. With an adaptive ridge all tokens
/// share one, and it is computed once.
template <typename T>
struct ScheduleTable {
  Buffer<T> s, m;
  Buffer<double> ds, dm;
  std::int64_t iterations = 0;
  int lanes = 0;
  bool shared = false;  // filled for all lanes and for good

  void allocate(const Options& options) {
    if (!has_schedule(options.solver)) return;
    iterations = options.iterations;
    const std::int64_t n = (iterations + 1) * kMaxChunk;
    s.resize(n);
    m.resize(n);
    ds.resize(n);
    dm.resize(n);
  }

  void set(const Options& options, const Operator<T>& op) {
    if (s.get() == nullptr) return;
    const bool adaptive = options.ridge_mode == RidgeMode::adaptive;
    if (shared && adaptive && lanes == op.chunk->lanes) return;
    lanes = op.chunk->lanes;
    shared = adaptive;
    for (int c = 0; c < lanes; ++c) {
      if (c > 0 && (adaptive || c >= op.chunk->len)) {
        copy_lane(c);
        continue;
      }
      const double rho = op.rho[c];
      Schedule schedule(options.solver, spectrum_top(adaptive, rho), rho);
      put(0, c, schedule.start());
      for (std::int64_t i = 1; i <= iterations; ++i) put(i, c, schedule.step(i));
    }
  }

 private:
  void put(std::int64_t i, int c, const Coefficients& k) {
    const std::int64_t at = i * lanes + c;
    s[at] = static_cast<T>(k.s);
    m[at] = static_cast<T>(k.m);
    ds[at] = k.ds;
    dm[at] = k.dm;
  }
  void copy_lane(int c) {
    for (std::int64_t at = c; at < (iterations + 1) * lanes; at += lanes) {
      s[at] = s[at - c];
      m[at] = m[at - c];
      ds[at] = ds[at - c];
      dm[at] = dm[at - c];
    }
  }
};

template <typename T>
class LaneSolver {
 public:
  LaneSolver(const Sizes& sizes, const Options& options, bool records)
      : options_(options), dim_(sizes.dim), block_(static_cast<std::int64_t>(sizes.dim) * kMaxChunk) {
    table_.allocate(options);
    const bool conjugate = options.solver == Solver::conjugate_gradient;
    for (auto& w : work_) w.resize(block_);
    if (records && options.solver != Solver::exact) {
      history_.resize((options.iterations + 1) * block_ * (conjugate ? 3 : 1));
      if (conjugate) {
        step_.resize((options.iterations + 1) * kMaxChunk);
        turn_.resize((options.iterations + 1) * kMaxChunk);
      }
    }
    records_ = records;
    if (options.solver == Solver::exact) {
      const std::int64_t square = static_cast<std::int64_t>(dim_) * dim_;
      dense_.resize(square);
      factor_.resize(square);
      column_.resize(dim_);
    }
  }

  /// x ← (σH + ρ)⁻¹ b, lanes without a system 0.
  void solve(Operator<T>& op, const T* b, T* x) {
    table_.set(options_, op);
    clear_dead_lanes(op, b, work_[3]);
    switch (options_.solver) {
      case Solver::exact: exact(op, work_[3], x); break;
      case Solver::conjugate_gradient: conjugate_gradient(op, work_[3], x); break;
      case Solver::nesterov: iterate<true>(op, work_[3], x); break;
      case Solver::chebyshev:
      case Solver::gradient_descent: iterate<false>(op, work_[3], x); break;
    }
  }

  /// The reverse of the last solve (which must have recorded): from dx, db (as lanes) and the terms of dA. Only for
  /// solvers that iterate. d_ridge[c] gets the whole derivative by ρ_c.
  template <typename Pair>
  void reverse(Operator<T>& op, const T* b, const T* dx, T* db, double* d_ridge, Pair&& pair) {
    clear_dead_lanes(op, b, work_[3]);
    switch (options_.solver) {
      case Solver::exact: break;  // has no iterations (unrolls)
      case Solver::conjugate_gradient: reverse_conjugate_gradient(op, dx, db, pair); break;
      case Solver::nesterov: reverse_iterations<true>(op, work_[3], dx, db, d_ridge, pair); break;
      case Solver::chebyshev:
      case Solver::gradient_descent: reverse_iterations<false>(op, work_[3], dx, db, d_ridge, pair); break;
    }
  }

 private:
  int lanes(const Operator<T>& op) const { return op.chunk->lanes; }
  T* history(std::int64_t i) { return history_ + i * block_; }

  void clear_dead_lanes(const Operator<T>& op, const T* b, T* to) const {
    const int n = lanes(op);
    bool alive[kMaxChunk];
    for (int c = 0; c < n; ++c) alive[c] = c < op.chunk->len && op.live(c);
    for (int i = 0; i < dim_; ++i) {
      for (int c = 0; c < n; ++c) to[i * n + c] = alive[c] ? b[i * n + c] : T{0};
    }
  }

  template <typename Body>
  void for_vectors(int n, Body&& body) const {
    for (int i = 0; i < dim_; ++i) {
      for (int c = 0; c < n; c += kLanes<T>) body(i, c, static_cast<std::int64_t>(i) * n + c);
    }
  }

  template <bool kAhead>
  void iterate(Operator<T>& op, const T* b, T* x) {
    const int n = lanes(op);
    T* current = work_[0];
    T* before = work_[1];
    T* ahead = work_[2];
    for_vectors(n, [&](int, int c, std::int64_t at) {
      store(current + at, load(table_.s + c) * load(b + at));
      store(before + at, Vec<T>{});
    });
    record(0, current, n);
    for (std::int64_t i = 1; i <= options_.iterations; ++i) {
      const T* s = table_.s + i * n;
      const T* m = table_.m + i * n;
      if constexpr (kAhead) {
        for_vectors(n, [&](int, int c, std::int64_t at) {
          const Vec<T> xi = load(current + at);
          store(ahead + at, xi + load(m + c) * (xi - load(before + at)));
        });
      }
      const T* z = kAhead ? ahead : current;
      op.apply(z, [&](int row, int c, Vec<T> hz) {
        const std::int64_t at = static_cast<std::int64_t>(row) * n + c;
        const Vec<T> zi = load(z + at);
        const Vec<T> y = kAhead ? zi : zi + load(m + c) * (zi - load(before + at));
        store(before + at, y - load(s + c) * (hz + op.ridge(row, c) * zi - load(b + at)));
      });
      std::swap(current, before);
      record(i, current, n);
    }
    std::memcpy(x, current, sizeof(T) * dim_ * n);
  }

  void record(std::int64_t i, const T* xi, int n) {
    if (records_) std::memcpy(history(i), xi, sizeof(T) * dim_ * n);
  }

  template <bool kAhead, typename Pair>
  void reverse_iterations(Operator<T>& op, const T* b, const T* dx, T* db, double* d_ridge, Pair&& pair) {
    const int n = lanes(op);
    T* e = work_[0];         // dξ_i
    T* e_before = work_[1];  // dξ_{i-1}, what later steps left there
    T* p = work_[2];
    T* z = work_[4];
    T* sz = work_[5];
    clear_dead_lanes(op, dx, e);
    std::fill(e_before, e_before + dim_ * n, T{0});
    std::fill(db, db + dim_ * n, T{0});
    T dot[kMaxChunk], ds[kMaxChunk], dm[kMaxChunk];
    for (std::int64_t i = options_.iterations; i >= 1; --i) {
      const T* s = table_.s + i * n;
      const T* m = table_.m + i * n;
      const T* now = history(i);
      const T* last = history(i - 1);
      const T* older = i >= 2 ? history(i - 2) : zeros(n);
      std::fill(ds, ds + n, T{0});
      std::fill(dm, dm + n, T{0});
      for_vectors(n, [&](int row, int c, std::int64_t at) {
        const Vec<T> si = load(s + c), xi = load(last + at), ei = load(e + at);
        const Vec<T> momentum = xi - load(older + at);
        const Vec<T> y = xi + load(m + c) * momentum;
        const Vec<T> zi = kAhead ? y : xi;
        const Vec<T> gradient = (y - load(now + at)) / si;  // A z − b
        store(z + at, zi);
        store(sz + at, gradient + load(b + at) - op.ridge(row, c) * zi);
        store(p + at, si * ei);
        store(db + at, load(db + at) + si * ei);
        store(ds + c, load(ds + c) - ei * gradient);
      });
      lane_dot<T>(p, z, dim_, n, dot);
      pair(p, z, sz);
      // e ← dξ_{i-1}, e_before ← dξ_{i-2}
      op.apply_to(p, sz);
      for_vectors(n, [&](int row, int c, std::int64_t at) {
        const Vec<T> dz = -(load(sz + at) + op.ridge(row, c) * load(p + at));
        const Vec<T> mi = load(m + c), ei = load(e + at);
        const Vec<T> dy = kAhead ? ei + dz : ei;
        const Vec<T> to_last = (1 + mi) * dy + (kAhead ? Vec<T>{} : dz);
        store(dm + c, load(dm + c) + dy * (load(last + at) - load(older + at)));
        store(e + at, to_last + load(e_before + at));
        store(e_before + at, -mi * dy);
      });
      for (int c = 0; c < op.chunk->len; ++c) {
        d_ridge[c] += -static_cast<double>(dot[c]) + ds[c] * table_.ds[i * n + c] + dm[c] * table_.dm[i * n + c];
      }
    }
    lane_dot<T>(e, b, dim_, n, dot);
    for_vectors(
        n, [&](int, int c, std::int64_t at) { store(db + at, load(db + at) + load(table_.s + c) * load(e + at)); });
    for (int c = 0; c < op.chunk->len; ++c) d_ridge[c] += dot[c] * table_.ds[c];
  }

  const T* zeros(int n) {
    std::fill(work_[6].get(), work_[6] + static_cast<std::int64_t>(dim_) * n, T{0});
    return work_[6];
  }

  /// A token whose residual has fallen to the rounding of its right-hand side stays where it is: further steps would
  /// follow rounding errors, and their reverse would divide by them.
  void conjugate_gradient(Operator<T>& op, const T* b, T* x) {
    const int n = lanes(op);
    T* r = work_[0];
    T* p = work_[1];
    T* w = work_[2];
    std::fill(x, x + static_cast<std::int64_t>(dim_) * n, T{0});
    std::memcpy(r, b, sizeof(T) * dim_ * n);
    std::memcpy(p, b, sizeof(T) * dim_ * n);
    T energy[kMaxChunk], fresh[kMaxChunk], curvature[kMaxChunk], step[kMaxChunk], turn[kMaxChunk], floor[kMaxChunk];
    lane_dot<T>(r, r, dim_, n, energy);
    constexpr T kRounding = std::numeric_limits<T>::epsilon();
    for (int c = 0; c < n; ++c) floor[c] = kRounding * kRounding * energy[c];
    for (std::int64_t i = 0; i < options_.iterations; ++i) {
      op.apply_to(p, w);
      for_vectors(
          n, [&](int row, int c, std::int64_t at) { store(w + at, load(w + at) + op.ridge(row, c) * load(p + at)); });
      lane_dot<T>(p, w, dim_, n, curvature);
      for (int c = 0; c < n; ++c) step[c] = energy[c] > floor[c] && curvature[c] > 0 ? energy[c] / curvature[c] : T{0};
      record_conjugate(i, r, p, w, n);
      for_vectors(n, [&](int, int c, std::int64_t at) {
        const Vec<T> a = load(step + c);
        store(x + at, load(x + at) + a * load(p + at));
        store(r + at, load(r + at) - a * load(w + at));
      });
      lane_dot<T>(r, r, dim_, n, fresh);
      for (int c = 0; c < n; ++c) turn[c] = step[c] != 0 ? fresh[c] / energy[c] : T{0};
      for_vectors(n, [&](int, int c, std::int64_t at) { store(p + at, load(r + at) + load(turn + c) * load(p + at)); });
      if (records_) {
        std::memcpy(step_ + i * kMaxChunk, step, sizeof(T) * n);
        std::memcpy(turn_ + i * kMaxChunk, turn, sizeof(T) * n);
      }
      std::memcpy(energy, fresh, sizeof(T) * n);
    }
    record_conjugate(options_.iterations, r, p, w, n);
  }

  void record_conjugate(std::int64_t i, const T* r, const T* p, const T* w, int n) {
    if (!records_) return;
    std::memcpy(history(3 * i), r, sizeof(T) * dim_ * n);
    std::memcpy(history(3 * i + 1), p, sizeof(T) * dim_ * n);
    std::memcpy(history(3 * i + 2), w, sizeof(T) * dim_ * n);
  }

  /// Adjoints of x, r and p travel back through each step; those of its scalars (the energies r·r, the step and the
  /// turn) are resolved on the way.
  template <typename Pair>
  void reverse_conjugate_gradient(Operator<T>& op, const T* dx, T* db, Pair&& pair) {
    const int n = lanes(op);
    T* x_bar = work_[0];
    T* r_bar = work_[1];
    T* p_bar = work_[2];
    T* w_bar = work_[4];
    clear_dead_lanes(op, dx, x_bar);
    std::fill(r_bar, r_bar + static_cast<std::int64_t>(dim_) * n, T{0});
    std::fill(p_bar, p_bar + static_cast<std::int64_t>(dim_) * n, T{0});
    T energy_bar[kMaxChunk] = {}, dots[kMaxChunk], more[kMaxChunk], energy[kMaxChunk], curvature[kMaxChunk];
    T inverse_energy[kMaxChunk], inverse_curvature[kMaxChunk], curvature_bar[kMaxChunk];
    for (std::int64_t i = options_.iterations - 1; i >= 0; --i) {
      const T* r = history(3 * i);
      const T* p = history(3 * i + 1);
      const T* w = history(3 * i + 2);
      const T* next_r = history(3 * i + 3);
      const T* step = step_ + i * kMaxChunk;
      const T* turn = turn_ + i * kMaxChunk;
      lane_dot<T>(r, r, dim_, n, energy);
      lane_dot<T>(p, w, dim_, n, curvature);
      for (int c = 0; c < n; ++c) {
        inverse_energy[c] = step[c] != 0 ? 1 / energy[c] : T{0};
        inverse_curvature[c] = step[c] != 0 ? 1 / curvature[c] : T{0};
      }
      // p_{i+1} = r_{i+1} + turn p_i, turn = energy_{i+1} / energy_i, energy_{i+1} = r_{i+1} · r_{i+1}
      lane_dot<T>(p_bar, p, dim_, n, dots);
      T next_energy_bar[kMaxChunk];
      for (int c = 0; c < n; ++c) {
        next_energy_bar[c] = energy_bar[c] + dots[c] * inverse_energy[c];
        energy_bar[c] = -dots[c] * turn[c] * inverse_energy[c];
      }
      for_vectors(n, [&](int, int c, std::int64_t at) {
        const Vec<T> pb = load(p_bar + at);
        store(r_bar + at, load(r_bar + at) + pb + 2 * load(next_energy_bar + c) * load(next_r + at));
        store(p_bar + at, load(turn + c) * pb + load(step + c) * load(x_bar + at));
      });
      // r_{i+1} = r_i − step w, x += step p_i, step = energy_i / (p · w)
      lane_dot<T>(r_bar, w, dim_, n, dots);
      lane_dot<T>(x_bar, p, dim_, n, more);
      for (int c = 0; c < n; ++c) {
        const T step_bar = more[c] - dots[c];
        energy_bar[c] += step_bar * inverse_curvature[c];
        curvature_bar[c] = -step_bar * step[c] * inverse_curvature[c];
      }
      for_vectors(n, [&](int, int c, std::int64_t at) {
        const Vec<T> kb = load(curvature_bar + c);
        store(w_bar + at, load(step + c) * load(r_bar + at) - kb * load(p + at));  // −dL/dw
        store(p_bar + at, load(p_bar + at) + kb * load(w + at));
      });
      T* sp = work_[5];
      for_vectors(
          n, [&](int row, int c, std::int64_t at) { store(sp + at, load(w + at) - op.ridge(row, c) * load(p + at)); });
      pair(w_bar, p, sp);
      op.apply_to(w_bar, sp);
      for_vectors(n, [&](int row, int c, std::int64_t at) {
        store(p_bar + at, load(p_bar + at) - load(sp + at) - op.ridge(row, c) * load(w_bar + at));
      });
    }
    const T* b = options_.iterations > 0 ? history(0) : work_[3].get();
    for_vectors(n, [&](int, int c, std::int64_t at) {
      store(db + at, load(r_bar + at) + load(p_bar + at) + 2 * load(energy_bar + c) * load(b + at));
    });
  }

  /// Token by token: the dense matrix, its LDLᵀ factorisation and two triangular solves, in float64.
  void exact(Operator<T>& op, const T* b, T* x) {
    const Chunk<T>& t = *op.chunk;
    const int n = t.lanes;
    std::fill(x, x + static_cast<std::int64_t>(dim_) * n, T{0});
    for (int i = 0; i < dim_; ++i) {
      for (int j = 0; j < dim_; ++j) dense_[i * dim_ + j] = op.h[i * op.ldh + j];
    }
    for (int c = 0; c < t.len; ++c) {
      advance_dense(t, c);
      if (!op.live(c)) continue;
      factorise(op, c);
      for (int i = 0; i < dim_; ++i) column_[i] = b[i * n + c];
      substitute();
      for (int i = 0; i < dim_; ++i) x[i * n + c] = static_cast<T>(column_[i]);
    }
  }

  void advance_dense(const Chunk<T>& t, int c) {
    const double gamma = c == 0 ? t.key_decay->zeta[0] : t.key_decay->m[c - 1][c];
    const T* k = t.k + static_cast<std::int64_t>(c) * t.ldk;
    for (int i = 0; i < dim_; ++i) {
      const double weight = t.beta[c] * k[i];
      double* row = dense_ + static_cast<std::int64_t>(i) * dim_;
      for (int j = 0; j < dim_; ++j) row[j] = (gamma == 0 ? 0 : gamma * row[j]) + weight * k[j];
    }
  }

  /// Left-looking LDLᵀ: row i of L in the lower triangle, D on the diagonal, with L·D kept for the row being built.
  void factorise(const Operator<T>& op, int c) {
    double* l = factor_;
    for (int i = 0; i < dim_; ++i) {
      double* row = l + static_cast<std::int64_t>(i) * dim_;
      for (int j = 0; j <= i; ++j) row[j] = op.sigma[c] * dense_[i * dim_ + j];
      row[i] += op.diagonal ? static_cast<double>(op.ridge_row[i]) : op.rho[c];
      for (int j = 0; j < i; ++j) {
        const double* other = l + static_cast<std::int64_t>(j) * dim_;
        double sum = row[j];
        for (int m = 0; m < j; ++m) sum -= row[m] * other[m];  // row[m] still carries D
        row[j] = sum;
      }
      for (int j = 0; j < i; ++j) {
        const double scaled = row[j];
        row[j] = scaled / l[static_cast<std::int64_t>(j) * dim_ + j];
        row[i] -= scaled * row[j];
      }
    }
  }

  void substitute() {
    const double* l = factor_;
    for (int i = 0; i < dim_; ++i) {
      for (int j = 0; j < i; ++j) column_[i] -= l[i * dim_ + j] * column_[j];
    }
    for (int i = 0; i < dim_; ++i) column_[i] /= l[i * dim_ + i];
    for (int i = dim_ - 1; i >= 0; --i) {
      for (int j = 0; j < i; ++j) column_[j] -= l[i * dim_ + j] * column_[i];
    }
  }

  Options options_;
  int dim_;
  std::int64_t block_;
  bool records_ = false;
  ScheduleTable<T> table_;
  Buffer<T> work_[7];
  Buffer<T> history_, step_, turn_;
  Buffer<double> dense_, factor_, column_;
};

}  // namespace gka::kernels::cpu::GKA_ISA
