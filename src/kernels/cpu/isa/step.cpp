// One token for many sequences, states in place. The state is read and written once; the solve then runs on H_t
// itself, which for D = 128 stays in the second-level cache: y = Σ_d H[d, :] x_d, columns as lanes, H symmetric.
//
// Every solver that iterates takes this path: in a chunk of one token, tokens being lanes, 15 of 16 would be idle. An
// exact solve is such a chunk.
#include <memory>

#include "kernels/cpu/backend.h"
#include "kernels/cpu/isa/entry.h"
#include "kernels/cpu/isa/recall.h"
#include "kernels/cpu/isa/solvers.h"
#include "kernels/cpu/plan.h"

namespace gka::kernels::cpu::GKA_ISA {
namespace {

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
  int c = 0;
  for (; c + 8 * kLanes<T> <= ld; c += 8 * kLanes<T>) symmetric_columns<T, 8>(h + c, ld, dim, x, y + c);
  for (; c + 2 * kLanes<T> <= ld; c += 2 * kLanes<T>) symmetric_columns<T, 2>(h + c, ld, dim, x, y + c);
  for (; c < ld; c += kLanes<T>) symmetric_columns<T, 1>(h + c, ld, dim, x, y + c);
}

template <typename T>
struct Token {
  T q[kMaxDim + 64], k[kMaxDim + 64], v[kMaxDim + 64], x[kMaxDim + 64], before[kMaxDim + 64], y[kMaxDim + 64];
  T z[kMaxDim + 64], ridge[kMaxDim + 64];  // where the solver looks; ρ of every channel
  double gamma, beta, alpha;
};

template <typename T>
struct Workspace {
  Token<T> token;
  Buffer<T> h;  // a padded copy, where the pool's rows are not whole vectors
};

template <typename T>
void read_token(const Step& s, std::int64_t b, std::int64_t head, Token<T>& t) {
  const int dim = static_cast<int>(s.key_dim), values = static_cast<int>(s.value_dim);
  std::memset(static_cast<void*>(&t), 0, sizeof t);
  read_row(s.q, offset(s.q, b, 0, head), dim, t.q);
  read_row(s.k, offset(s.k, b, 0, key_head(s, head)), dim, t.k);
  read_row(s.v, offset(s.v, b, 0, value_head(s, head)), values, t.v);
  t.gamma = s.log_decay ? std::exp(read_gate(s.log_decay, offset(s.log_decay, b, 0, head), 0)) : 1.0;
  t.beta = read_gate(s.beta, offset(s.beta, b, 0, head), 1);
  t.alpha = read_gate(s.alpha, offset(s.alpha, b, 0, head), 1);
  if (t.beta == 0) {  // nothing is written, whatever k and v hold
    std::fill(t.k, t.k + dim, T{0});
    std::fill(t.v, t.v + values, T{0});
  }
}

/// H ← γH + βkkᵀ in the pool. Returns H by rows of whole vectors.
template <typename T>
const T* write_key(const Step& s, Workspace<T>& w, T* h, int& ld) {
  const int dim = static_cast<int>(s.key_dim);
  const Token<T>& t = w.token;
  const T gamma = static_cast<T>(s.options.decay_keys ? t.gamma : 1.0), root = static_cast<T>(std::sqrt(t.beta));
  T scaled[kMaxDim];
  for (int i = 0; i < dim; ++i) scaled[i] = root * t.k[i];
  for (int i = 0; i < dim; ++i) {
    T* row = h + static_cast<std::int64_t>(i) * dim;
    for (int j = 0; j < dim; ++j) row[j] = (gamma == 0 ? T{0} : gamma * row[j]) + scaled[i] * scaled[j];
  }
  ld = padded<T>(dim);
  if (ld == dim) return h;
  unpack_matrix<T>(h, dim, dim, w.h, ld);
  return w.h;
}

template <typename T>
double certainty_of(const Token<T>& t, int dim, double sigma) {
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

/// x̃ into t.x; returns σ (0: nothing to solve, x̃ = 0).
template <typename T>
double solve_token(const Step& s, const T* h, int ld, std::int64_t head, std::int64_t iterations, Token<T>& t,
                   double* certainty) {
  const int dim = static_cast<int>(s.key_dim);
  const double f = frobenius(h, dim, ld);
  const bool adaptive = s.options.ridge_mode == RidgeMode::adaptive;
  const SystemScale scales =
      system_scale(s.options, f, 1, static_cast<double>(std::numeric_limits<T>::max()), /*lost=*/false);
  const double sigma = scales.sigma, rho = scales.rho;
  if (sigma == 0) {
    const double none = std::isnan(f) ? f : 0;
    if (certainty != nullptr) *certainty = none;
    return none;
  }
  const double* diagonal = s.options.ridge_diagonal;
  for (int i = 0; i < dim; ++i) t.ridge[i] = static_cast<T>(diagonal != nullptr ? diagonal[head * dim + i] : rho);
  const Schedule schedule(s.options.solver, spectrum_top(adaptive, rho), rho);
  const T scale = static_cast<T>(sigma);
  switch (s.options.solver) {
    case Solver::chebyshev:
    case Solver::gradient_descent: iterate<false>(h, ld, dim, schedule, iterations, scale, t); break;
    case Solver::nesterov: iterate<true>(h, ld, dim, schedule, iterations, scale, t); break;
    case Solver::conjugate_gradient: conjugate_gradient(h, ld, dim, iterations, scale, t); break;
    case Solver::exact: break;  // step_as_chunks
  }
  if (certainty != nullptr) *certainty = certainty_of(t, dim, sigma);
  return sigma;
}

/// U ← γU + βkvᵀ and o = s Uᵀ(q + α(x − q)), in one pass over U.
template <typename T>
void write_and_read_values(const Step& s, std::int64_t b, std::int64_t head, double sigma, T* u, Token<T>& t) {
  const int dim = static_cast<int>(s.key_dim), values = static_cast<int>(s.value_dim);
  const T gamma = static_cast<T>(t.gamma), beta = static_cast<T>(t.beta);
  // Row by row with σU and x̃, not U and σx̃: see recall.h.
  const bool solved = sigma > 0;
  const double tau = solved ? 1 / sigma : 1;
  const T from_x = solved ? static_cast<T>(t.alpha) : T{0}, from_q = static_cast<T>((1 - t.alpha) * tau);
  const T scale = static_cast<T>(solved ? sigma : 1);
  std::fill(t.y, t.y + values, T{0});
  for (int d = 0; d < dim; ++d) {
    T* row = u + static_cast<std::int64_t>(d) * values;
    const T weight = beta * t.k[d];
    const T z = (from_x != 0 ? from_x * t.x[d] : T{0}) + (from_q != 0 ? from_q * t.q[d] : T{0});
    for (int j = 0; j < values; ++j) {
      row[j] = (gamma == 0 ? T{0} : gamma * row[j]) + weight * t.v[j];
      t.y[j] += (scale * row[j]) * z;
    }
  }
  const T output_scale = static_cast<T>(std::isnan(sigma) ? sigma : s.options.scale);
  for (int j = 0; j < values; ++j) t.y[j] *= output_scale;
  write_row<T>(s.o, offset(s.o, b, 0, head), values, t.y);
}

std::int64_t slot_of(const Step& s, std::int64_t b) { return s.state_indices != nullptr ? s.state_indices[b] : b; }
std::int64_t iterations_of(const Step& s, std::int64_t b) {
  return s.iterations != nullptr ? s.iterations[b] : s.options.iterations;
}

template <typename T>
void step_directly(const Step& s, const Executor& executor) {
  const int dim = static_cast<int>(s.key_dim);
  const auto workspace = [&] {
    auto w = std::make_unique<Workspace<T>>();
    if (padded<T>(dim) != dim) w->h.resize(static_cast<std::int64_t>(dim) * padded<T>(dim));
    return w;
  };
  parallel_tasks(executor, s.batch * s.heads, workspace, [&](std::int64_t task, Workspace<T>& w) {
    const std::int64_t b = task / s.heads, head = task % s.heads, at = slot_of(s, b) * s.heads + head;
    read_token(s, b, head, w.token);
    int ld = 0;
    const T* h = write_key(s, w, static_cast<T*>(s.h) + at * s.key_dim * s.key_dim, ld);
    const double sigma = solve_token(s, h, ld, head, iterations_of(s, b), w.token,
                                     s.certainty != nullptr ? s.certainty + task : nullptr);
    write_and_read_values(s, b, head, sigma, static_cast<T*>(s.u) + at * s.key_dim * s.value_dim, w.token);
  });
}

/// A batch of sequences of one token each, from and to the pool.
void step_as_chunks(const Step& s, const Executor& executor) {
  const bool wide = s.q.dtype == DType::float64;
  const std::int64_t bytes = wide ? 8 : 4;
  for (std::int64_t b = 0; b < s.batch; ++b) {
    Problem p{.batch = 1,
              .tokens = 1,
              .heads = s.heads,
              .key_dim = s.key_dim,
              .value_dim = s.value_dim,
              .sequences = 1,
              .key_group = s.key_group,
              .value_group = s.value_group};
    const auto row = [&](View view) {
      if (view)
        view.data = static_cast<char*>(view.data) +
                    b * view.batch_stride * with_type(view.dtype, [](auto t) { return sizeof t; });
      return view;
    };
    p.q = row(s.q);
    p.k = row(s.k);
    p.v = row(s.v);
    p.log_decay = row(s.log_decay);
    p.beta = row(s.beta);
    p.alpha = row(s.alpha);
    char* h = static_cast<char*>(s.h) + slot_of(s, b) * s.heads * s.key_dim * s.key_dim * bytes;
    char* u = static_cast<char*>(s.u) + slot_of(s, b) * s.heads * s.key_dim * s.value_dim * bytes;
    p.h0 = h;
    p.u0 = u;
    p.options = s.options;
    p.options.iterations = iterations_of(s, b);
    Outputs out;
    out.o = row(s.o);
    out.h = h;
    out.u = u;
    if (s.certainty != nullptr) out.report.certainty = s.certainty + b * s.heads;
    forward(p, out, executor);
  }
}

}  // namespace

void step(const Step& s, const Executor& executor) {
  if (s.options.solver == Solver::exact) {
    step_as_chunks(s, executor);
  } else if (s.q.dtype == DType::float64) {
    step_directly<double>(s, executor);
  } else {
    step_directly<float>(s, executor);
  }
}

#define GKA_TEXT_OF(x) #x
#define GKA_TEXT(x) GKA_TEXT_OF(x)
const InstructionSet kInstructionSet{.name = GKA_TEXT(GKA_ISA),
                                     .forward = forward,
                                     .backward = backward,
                                     .step = step,
                                     .short_conv = short_conv,
                                     .short_conv_backward = short_conv_backward,
                                     .short_conv_step = short_conv_step,
                                     .gated_rms_norm = gated_rms_norm,
                                     .gated_rms_norm_backward = gated_rms_norm_backward,
                                     .products = products};
#undef GKA_TEXT
#undef GKA_TEXT_OF

}  // namespace gka::kernels::cpu::GKA_ISA
