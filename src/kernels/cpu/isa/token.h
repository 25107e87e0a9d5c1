// One token by itself, its states in place. The state is read and written once; the solve then runs on H_t itself,
// which for D = 128 stays in the second-level cache: y = Σ_d H[d, :] x_d, columns as lanes, H symmetric.
//
// In a chunk of few tokens, tokens being lanes, most lanes would be idle. An exact solve has chunks alone.
#pragma once

#include "kernels/cpu/backend.h"
#include "kernels/cpu/isa/chunk.h"
#include "kernels/cpu/isa/recall.h"
#include "kernels/cpu/isa/solvers.h"

namespace gka::kernels::cpu::GKA_ISA {

inline constexpr int kMaxDim = 256;

/// y = H x for symmetric H by rows of whole vectors; kColumns vectors of y at a time stay in registers.
template <typename T, int kColumns>
void symmetric_columns(const T* h, int ld, int dim, const T* x, T* y) {
  Vec<T> sum[kColumns] = {};
  for (int d = 0; d < dim; ++d) {
    const Vec<T> xd = broadcast(x[d]);
    const T* row = h + static_cast<std::int64_t>(d) * ld;
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; ++j) sum[j] += load(row + j * kLanes<T>) * xd;
  }
  for (int j = 0; j < kColumns; ++j) store(y + j * kLanes<T>, sum[j]);
}

template <typename T>
void symmetric_product(const T* h, int ld, int dim, const T* x, T* y) {
  const int columns = padded<T>(dim);
  int c = 0;
  for (; c + 8 * kLanes<T> <= columns; c += 8 * kLanes<T>) symmetric_columns<T, 8>(h + c, ld, dim, x, y + c);
  for (; c + 2 * kLanes<T> <= columns; c += 2 * kLanes<T>) symmetric_columns<T, 2>(h + c, ld, dim, x, y + c);
  for (; c < columns; c += kLanes<T>) symmetric_columns<T, 1>(h + c, ld, dim, x, y + c);
}

template <typename T>
struct Token {
  T q[kMaxDim + 64], k[kMaxDim + 64], v[kMaxDim + 64], x[kMaxDim + 64], before[kMaxDim + 64], y[kMaxDim + 64];
  T z[kMaxDim + 64], ridge[kMaxDim + 64];  // where the solver looks; ρ of every channel
  double gamma, beta, alpha;
};

/// Of a Problem or, at 0, of a Step.
template <typename T, typename Call>
void read_token(const Call& call, std::int64_t b, std::int64_t at, std::int64_t head, Token<T>& t) {
  const int dim = static_cast<int>(call.key_dim), values = static_cast<int>(call.value_dim);
  std::memset(static_cast<void*>(&t), 0, sizeof t);
  read_row(call.q, offset(call.q, b, at, head), dim, t.q);
  read_row(call.k, offset(call.k, b, at, key_head(call, head)), dim, t.k);
  read_row(call.v, offset(call.v, b, at, value_head(call, head)), values, t.v);
  t.gamma = call.log_decay ? std::exp(read_gate(call.log_decay, offset(call.log_decay, b, at, head), 0)) : 1.0;
  t.beta = read_gate(call.beta, offset(call.beta, b, at, head), 1);
  t.alpha = read_gate(call.alpha, offset(call.alpha, b, at, head), 1);
  if (t.beta == 0) {  // nothing is written, whatever k and v hold
    std::fill(t.k, t.k + dim, T{0});
    std::fill(t.v, t.v + values, T{0});
  }
}

/// H ← γH + βkkᵀ.
template <typename T>
void write_key(const Options& options, const Token<T>& t, int dim, T* h, int ld) {
  const T gamma = static_cast<T>(options.decay_keys ? t.gamma : 1.0), root = static_cast<T>(std::sqrt(t.beta));
  T scaled[kMaxDim];
  for (int i = 0; i < dim; ++i) scaled[i] = root * t.k[i];
  for (int i = 0; i < dim; ++i) {
    T* row = h + static_cast<std::int64_t>(i) * ld;
    for (int j = 0; j < dim; ++j) row[j] = (gamma == 0 ? T{0} : gamma * row[j]) + scaled[i] * scaled[j];
  }
}

template <typename T>
double token_certainty(const Token<T>& t, int dim, double sigma) {
  double dots = 0, squares = 0;
  for (int i = 0; i < dim; ++i) {
    dots += static_cast<double>(t.q[i]) * (static_cast<double>(t.ridge[i]) * static_cast<double>(t.x[i]));
    squares += static_cast<double>(t.q[i]) * static_cast<double>(t.q[i]);
  }
  return kernels::certainty_of(sigma, dots, squares);
}

/// Of arrays with zeros up to a whole vector.
template <typename T>
T dot(const T* a, const T* b, int dim) {
  Vec<T> sums{};
  for (int i = 0; i < dim; i += kLanes<T>) sums += load(a + i) * load(b + i);
  T sum{0};
  for (int j = 0; j < kLanes<T>; ++j) sum += sums[j];
  return sum;
}

/// (σH + ρ) x̃ = q by a schedule of steps; the gradient is taken at x̃, or ahead of it (Nesterov).
template <bool kAhead, typename T>
void iterate(const T* h, int ld, int dim, Schedule schedule, std::int64_t iterations, T scale, Token<T>& t) {
  const T start = static_cast<T>(schedule.start().s);
  T* now = t.x;
  T* before = t.before;
  for (int i = 0; i < dim; ++i) now[i] = start * t.q[i];
  for (std::int64_t n = 1; n <= iterations; ++n) {
    const Coefficients k = schedule.step(n);
    const T step = static_cast<T>(k.s), momentum = static_cast<T>(k.m);
    for (int i = 0; kAhead && i < dim; ++i) t.z[i] = now[i] + momentum * (now[i] - before[i]);
    const T* z = kAhead ? t.z : now;
    symmetric_product<T>(h, ld, dim, z, t.y);
    for (int i = 0; i < dim; ++i) {
      const T gradient = scale * t.y[i] + t.ridge[i] * z[i] - t.q[i];
      before[i] = (kAhead ? z[i] : now[i] + momentum * (now[i] - before[i])) - step * gradient;
    }
    std::swap(now, before);
  }
  if (now != t.x) std::memcpy(t.x, now, sizeof(T) * dim);
}

/// The same by conjugate gradients, which end where the residual has fallen to rounding (as in solvers.h).
template <typename T>
void conjugate_gradient(const T* h, int ld, int dim, std::int64_t iterations, T scale, Token<T>& t) {
  T* residual = t.before;
  T* direction = t.z;
  std::memcpy(residual, t.q, sizeof(T) * dim);
  std::memcpy(direction, t.q, sizeof(T) * dim);
  T energy = dot(residual, residual, dim);
  const T floor = std::numeric_limits<T>::epsilon() * std::numeric_limits<T>::epsilon() * energy;
  for (std::int64_t n = 0; n < iterations && !(energy <= floor); ++n) {  // not >: a NaN goes on to the answer
    symmetric_product<T>(h, ld, dim, direction, t.y);
    for (int i = 0; i < dim; ++i) t.y[i] = scale * t.y[i] + t.ridge[i] * direction[i];
    const T curvature = dot(direction, t.y, dim);
    if (curvature <= 0) break;
    const T length = energy / curvature;
    for (int i = 0; i < dim; ++i) {
      t.x[i] += length * direction[i];
      residual[i] -= length * t.y[i];
    }
    const T fresh = dot(residual, residual, dim), turn = fresh / energy;
    for (int i = 0; i < dim; ++i) direction[i] = residual[i] + turn * direction[i];
    energy = fresh;
  }
}

/// x̃ into t.x, by H in rows of whole vectors; returns σ (0: nothing to solve, x̃ = 0).
template <typename T>
double solve_token(const Options& options, const T* h, int ld, int dim, std::int64_t head, std::int64_t iterations,
                   Token<T>& t, double* norm, double* certainty) {
  const double f = frobenius(h, dim, ld);
  if (norm != nullptr) *norm = f;
  const bool adaptive = options.ridge_mode == RidgeMode::adaptive;
  const SystemScale scales =
      system_scale(options, f, 1, static_cast<double>(std::numeric_limits<T>::max()), /*lost=*/false);
  const double sigma = scales.sigma, rho = scales.rho;
  if (sigma == 0) {
    const double none = std::isnan(f) ? f : 0;
    if (certainty != nullptr) *certainty = none;
    return none;
  }
  const double* diagonal = options.ridge_diagonal;
  for (int i = 0; i < dim; ++i) t.ridge[i] = static_cast<T>(diagonal != nullptr ? diagonal[head * dim + i] : rho);
  const Schedule schedule(options.solver, spectrum_top(adaptive, rho), rho);
  const T scale = static_cast<T>(sigma);
  switch (options.solver) {
    case Solver::chebyshev:
    case Solver::gradient_descent: iterate<false>(h, ld, dim, schedule, iterations, scale, t); break;
    case Solver::nesterov: iterate<true>(h, ld, dim, schedule, iterations, scale, t); break;
    case Solver::conjugate_gradient: conjugate_gradient(h, ld, dim, iterations, scale, t); break;
    case Solver::exact: break;  // in chunks alone
  }
  if (certainty != nullptr) *certainty = token_certainty(t, dim, sigma);
  return sigma;
}

/// U ← γU + βkvᵀ and o = s Uᵀ(q + α(x − q)), in one pass over U; o into t.y.
template <typename T>
void write_and_read_values(double output_scale, int dim, int values, double sigma, T* u, int ld, Token<T>& t) {
  const T gamma = static_cast<T>(t.gamma), beta = static_cast<T>(t.beta);
  // Row by row with σU and x̃, not U and σx̃: see recall.h.
  const bool solved = sigma > 0;
  const double tau = solved ? 1 / sigma : 1;
  const T from_x = solved ? static_cast<T>(t.alpha) : T{0}, from_q = static_cast<T>((1 - t.alpha) * tau);
  const T scale = static_cast<T>(solved ? sigma : 1);
  std::fill(t.y, t.y + values, T{0});
  for (int d = 0; d < dim; ++d) {
    T* row = u + static_cast<std::int64_t>(d) * ld;
    const T weight = beta * t.k[d];
    const T z = (from_x != 0 ? from_x * t.x[d] : T{0}) + (from_q != 0 ? from_q * t.q[d] : T{0});
    for (int j = 0; j < values; ++j) {
      row[j] = (gamma == 0 ? T{0} : gamma * row[j]) + weight * t.v[j];
      t.y[j] += (scale * row[j]) * z;
    }
  }
  const T factor = static_cast<T>(std::isnan(sigma) ? sigma : output_scale);
  for (int j = 0; j < values; ++j) t.y[j] *= factor;
}

}  // namespace gka::kernels::cpu::GKA_ISA
