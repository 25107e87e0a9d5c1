// One token for many sequences, states in place, a block per (sequence, head). The state is read and written once; H_t
// stays in shared memory, where it fits, for the iterations: y = Σ_d H[d, :] x_d, one column per thread.
//
// Solvers with a schedule and a scalar ridge take this path. The others are a chunk of one token.
#ifdef __CUDACC__
#include "kernels/cuda/step_registers.h"
#endif
#include "kernels/cuda/tokens.cuh"

namespace gka::kernels::cuda {
namespace {

inline constexpr int kMaxDim = 256;

template <typename T>
struct StepWorkspace {
  T q[kMaxDim], k[kMaxDim], v[kMaxDim];
  T first[kMaxDim], second[kMaxDim], ahead[kMaxDim];
  T z[kMaxDim];
  T parts[kMaxDim > kThreads ? kMaxDim : kThreads];
  T* h;

  __host__ __device__ void allocate(Arena& arena, std::int64_t dim) { h = arena.take<T>(dim * dim); }
};

__device__ std::int64_t slot_of(const Step& s, std::int64_t b) {
  return s.state_indices != nullptr ? s.state_indices[b] : b;
}
__device__ std::int64_t iterations_of(const Step& s, std::int64_t b) {
  return s.iterations != nullptr ? s.iterations[b] : s.options.iterations;
}

/// to[j] = finish(j, Σ_d term(d, j)), columns by threads; where there are threads to spare several share a column.
template <typename T, typename Term, typename Finish>
__device__ void sum_columns(int rows, int columns, T* parts, Term&& term, Finish&& finish) {
  const int shares = max(kThreads / columns, 1);
  each(columns * shares, [&](int at) {
    const int j = at % columns;
    T total = 0;
#pragma unroll 8
    for (int d = at / columns; d < rows; d += shares) total += term(d, j);
    parts[at] = total;
  });
  each(columns, [&](int j) {
    T total = 0;
    for (int share = 0; share < shares; ++share) total += parts[share * columns + j];
    finish(j, total);
  });
}

/// Of a token whose solve left x̃ in x, or none.
template <typename T>
__device__ void write_certainty(double* to, const T* q, const T* x, int dim, double sigma, double rho) {
  alone([&] {
    double dots = 0, squares = 0;
    for (int i = 0; i < dim; ++i) {
      dots += static_cast<double>(q[i]) * static_cast<double>(x[i]);
      squares += static_cast<double>(q[i]) * static_cast<double>(q[i]);
    }
    *to = sigma != sigma ? sigma : certainty_of(sigma, rho * dots, squares);
  });
}

/// x̃ into w.first or w.second; which one comes back in x. Returns σ (0: nothing to solve).
template <typename T>
__device__ double solve_token(const Options& options, const T* h, int dim, std::int64_t iterations, StepWorkspace<T>& w,
                              T*& x, double* certainty) {
  const double f = frobenius(h, static_cast<std::int64_t>(dim) * dim);
  const bool adaptive = options.ridge_mode == RidgeMode::adaptive, ahead = options.solver == Solver::nesterov;
  const SystemScale scales =
      system_scale(options, f, 1, static_cast<double>(std::numeric_limits<T>::max()), /*lost=*/false);
  const double sigma = scales.sigma, rho = scales.rho;
  if (sigma == 0) {
    const double none = f != f ? f : 0;
    if (certainty != nullptr) write_certainty(certainty, w.q, w.q, dim, none, 0);
    return none;
  }
  Schedule schedule(options.solver, spectrum_top(adaptive, rho), rho);
  const T start = static_cast<T>(schedule.start().s), scale = static_cast<T>(sigma), ridge = static_cast<T>(rho);
  T* now = w.first;
  T* before = w.second;
  each(dim, [&](int i) {
    now[i] = start * w.q[i];
    before[i] = T{0};
  });
  for (std::int64_t n = 1; n <= iterations; ++n) {
    const Coefficients k = schedule.step(n);
    const T step = static_cast<T>(k.s), momentum = static_cast<T>(k.m);
    if (ahead) each(dim, [&](int i) { w.ahead[i] = now[i] + momentum * (now[i] - before[i]); });
    const T* at = ahead ? w.ahead : now;
    sum_columns<T>(
        dim, dim, w.parts, [&](int d, int j) { return h[d * dim + j] * at[d]; },
        [&](int i, T hx) {
          const T y = ahead ? at[i] : now[i] + momentum * (now[i] - before[i]);
          before[i] = y - step * (scale * hx + ridge * at[i] - w.q[i]);
        });
    T* const done = before;
    before = now;
    now = done;
  }
  x = now;
  if (certainty != nullptr) write_certainty(certainty, w.q, x, dim, sigma, rho);
  return sigma;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) step_directly(const __grid_constant__ Step s, Grid grid) {
  const int dim = static_cast<int>(s.key_dim), values = static_cast<int>(s.value_dim);
  auto& w = own_workspace<StepWorkspace<T>>(grid, [&](auto& own, Arena& arena) { own.allocate(arena, s.key_dim); });
  for (std::int64_t task = block(); task < s.batch * s.heads; task += blocks()) {
    const std::int64_t b = task / s.heads, head = task % s.heads, at = slot_of(s, b) * s.heads + head;
    const auto gate = [&](const View& view, double otherwise) {
      return view.data != nullptr ? read<double>(view, offset(view, b, 0, head)) : otherwise;
    };
    const double gamma = exp(gate(s.log_decay, 0)), beta = gate(s.beta, 1), alpha = gate(s.alpha, 1);
    const bool writes = beta != 0;  // else nothing is written, whatever k and v hold
    const std::int64_t k_at = offset(s.k, b, 0, key_head(s, head)), v_at = offset(s.v, b, 0, value_head(s, head));
    each(max(dim, values), [&](int i) {
      if (i < dim) {
        w.q[i] = read<T>(s.q, offset(s.q, b, 0, head) + i);
        w.k[i] = writes ? read<T>(s.k, k_at + i) : T{0};
      }
      if (i < values) w.v[i] = writes ? read<T>(s.v, v_at + i) : T{0};
    });

    // H ← γH + βkkᵀ
    T* pool = static_cast<T*>(s.h) + at * s.key_dim * s.key_dim;
    const T key_gamma = static_cast<T>(s.options.decay_keys ? gamma : 1.0), root = static_cast<T>(sqrt(beta));
    each(dim * dim, [&](int e) {
      const T written = (root * w.k[e / dim]) * (root * w.k[e % dim]);
      w.h[e] = pool[e] = (key_gamma == 0 ? T{0} : key_gamma * pool[e]) + written;
    });
    T* x = w.first;
    const double sigma = solve_token(s.options, w.h, dim, iterations_of(s, b), w, x,
                                     s.certainty != nullptr ? s.certainty + task : nullptr);

    // U ← γU + βkvᵀ and o = s Uᵀ(q + α(x − q)) in one pass over U, with σU and x̃, not U and σx̃: see recall.cuh.
    T* u = static_cast<T*>(s.u) + at * s.key_dim * s.value_dim;
    const bool solved = sigma > 0;
    const T from_x = solved ? static_cast<T>(alpha) : T{0};
    const T from_q = static_cast<T>((1 - alpha) * (solved ? 1 / sigma : 1));
    const T value_gamma = static_cast<T>(gamma), weight = static_cast<T>(beta),
            scale = static_cast<T>(solved ? sigma : 1);
    const T output_scale = static_cast<T>(sigma != sigma ? sigma : s.options.scale);
    each(dim, [&](int d) { w.z[d] = (from_x != 0 ? from_x * x[d] : T{0}) + (from_q != 0 ? from_q * w.q[d] : T{0}); });
    sum_columns<T>(
        dim, values, w.parts,
        [&](int d, int j) {
          T& element = u[d * values + j];
          element = (value_gamma == 0 ? T{0} : value_gamma * element) + weight * w.k[d] * w.v[j];
          return scale * element * w.z[d];
        },
        [&](int j, T o) { write(s.o, offset(s.o, b, 0, head) + j, o * output_scale); });
  }
}

/// Sequences of one token each, from and to the pool.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    step_as_chunks(const __grid_constant__ Problem p, const __grid_constant__ Outputs out,
                   const __grid_constant__ Step step, Sizes s, Grid grid) {
  auto& w =
      own_workspace<ForwardWorkspace<T>>(grid, [&](auto& own, Arena& arena) { own.allocate(arena, s, p.options); });
  for (std::int64_t task = block(); task < step.batch * step.heads; task += blocks()) {
    const std::int64_t b = task / step.heads, head = task % step.heads, at = slot_of(step, b) * step.heads + head;
    T* h = static_cast<T*>(step.h) + at * p.key_dim * p.key_dim;
    T* u = static_cast<T*>(step.u) + at * p.key_dim * p.value_dim;
    each(s.h_size(), [&](int e) {
      const int i = e / s.ldh(), j = e % s.ldh();
      w.op.h[e] = j >= s.dim ? T{0} : i == j ? h[i * s.dim + i] : (h[i * s.dim + j] + h[j * s.dim + i]) / 2;
    });
    unpack_matrix(u, s.dim, s.values, w.u, s.ldu());
    alone([&] { w.solver.iterations = iterations_of(step, b); });
    run_tokens(p, out, w, b, 0, 1, head, true);
    pack_symmetric<T>(w.op.h, s.ldh(), s.dim, h);
    pack_matrix<T>(w.u, s.ldu(), s.dim, s.values, u);
  }
}

template <typename T>
void step_as(const Step& s, const Device& device) {
  const std::int64_t tasks = s.batch * s.heads;
  if (has_schedule(s.options.solver)) {
    const Grid grid = plan_grid<StepWorkspace<T>>(step_directly<T>, tasks, device,
                                                  [&](auto& w, Arena& arena) { w.allocate(arena, s.key_dim); });
    return launch(step_directly<T>, grid.blocks, grid.shared_bytes, device.stream, s, grid);
  }
  const Problem p{.batch = s.batch,
                  .tokens = 1,
                  .heads = s.heads,
                  .key_dim = s.key_dim,
                  .value_dim = s.value_dim,
                  .sequences = s.batch,
                  .key_group = s.key_group,
                  .value_group = s.value_group,
                  .q = s.q,
                  .k = s.k,
                  .v = s.v,
                  .log_decay = s.log_decay,
                  .beta = s.beta,
                  .alpha = s.alpha,
                  .options = s.options};
  const Outputs out{.o = s.o, .report = {.certainty = s.certainty}};
  const Sizes sizes = sizes_of(p);
  const Grid grid = plan_grid<ForwardWorkspace<T>>(step_as_chunks<T>, tasks, device,
                                                   [&](auto& w, Arena& arena) { w.allocate(arena, sizes, p.options); });
  launch(step_as_chunks<T>, grid.blocks, grid.shared_bytes, device.stream, p, out, s, sizes, grid);
}

}  // namespace

void step(const Step& step, const Device& device) {
  const CurrentDevice current(device.index);
#ifdef __CUDACC__  // a kernel for warps, which the host's stand-in has none of
  if (step_in_registers(step, device)) return;
#endif
  with_arithmetic(step.q.dtype, [&]<typename T>(T) { step_as<T>(step, device); });
}

}  // namespace gka::kernels::cuda
