// Gated KalmaNet as functions of torch tensors.
//
//   #include <gka/gka.h>
//
//   auto [o, state] = gka::gated_kalmanet(q, k, v, log_decay, beta, alpha, {.output_final_state = true});
//
// Per head, with γ_t = exp(log_decay_t):
//
//   H_t = γ_t H_{t-1} + β_t k_t k_tᵀ        λ_t = ridge · ‖H_t‖_F
//   U_t = γ_t U_{t-1} + β_t k_t v_tᵀ        x_t = solve(H_t + λ_t I, q_t)
//                                           o_t = scale · U_tᵀ (q_t + α_t (x_t − q_t))
//
// Shapes: q, k [B,T,H,D]; v [B,T,H,V]; log_decay (≤ 0), beta (≥ 0), alpha [B,T,H]; D and V from 1 to 256. A gate that
// is an undefined tensor is left out: log_decay 0, beta 1, alpha 1. k and v may each have fewer heads, of a number that
// divides H: neighbouring heads of q then share one.
//
// Types: q, k, v share one of float64, float32, bfloat16, float16; each gate has that type or float32 (float64 beside
// float64). States are float32, or float64 for float64 inputs. Each gradient has its own input's type.
//
// The functions call the torch operators of the same names, so autograd, autocast and tracing see them. Bad input
// throws c10::ValueError or c10::TypeError with one sentence that names the argument, what it got and what it takes
// (what_without_backtrace(); what() goes on with a trace). On the CPU log_decay, beta and a ridge in a tensor are
// looked at as well: a NaN in log_decay or ridge is a gka::NotFiniteError (errors.h), and anywhere else makes NaN of
// what depends on it. Any number of threads may call at once, as long as no two step the same slots of a state.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <variant>

#include "gka/info.h"
#include "gka/types.h"

namespace gka {

/// What a memory has stored: h [N,H,D,D], taken as symmetric, and u [N,H,D,V]. N is B or the number of packed
/// sequences. An undefined tensor stands for zero on the way in and for "not asked for" on the way out.
struct State {
  at::Tensor h{};
  at::Tensor u{};
};

struct Options {
  double scale = 1.0;

  /// a in λ_t = a ‖H_t‖_F; with RidgeMode::constant λ itself, where a tensor [H,D] gives each head and key channel its
  /// own (solvers conjugate_gradient and exact).
  std::variant<double, at::Tensor> ridge = 0.02;

  std::int64_t iterations = 30;
  Solver solver = Solver::chebyshev;
  Gradient gradient = Gradient::implicit;
  RidgeMode ridge_mode = RidgeMode::adaptive;

  bool ridge_gradient = true;  // false: no gradient through λ
  bool decay_keys = true;      // false: log_decay fades U alone
  bool refine = true;          // false: plain Chebyshev steps on low-precision kernels (the CPU's are not)

  State initial_state{};
  bool output_final_state = false;

  /// Packed sequences: B = 1, and sequence n is the tokens cu_seqlens[n] … cu_seqlens[n+1] − 1. int32 or int64 [N+1]
  /// from 0 to T, never decreasing.
  at::Tensor cu_seqlens{};
};

struct Result {
  at::Tensor o;       // [B,T,H,V], the type of q
  State final_state;  // undefined tensors unless output_final_state
};

/// The memory layer: writes every token and answers every query from all tokens up to its own. Differentiable once.
Result gated_kalmanet(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_decay = {},
                      const at::Tensor& beta = {}, const at::Tensor& alpha = {}, const Options& options = {});

struct CertainResult {
  at::Tensor o;
  State final_state;
  /// float64 [B,T,H]: the share of q_t that lies in what was written, q_tᵀ H_t x_t/‖q_t‖² = 1 − λ_t q_t·x_t/‖q_t‖²; 0
  /// where nothing is remembered.
  at::Tensor certainty;
};

/// The same for inference, with how much the memory knew of each query. No gradient.
CertainResult gated_kalmanet_certainty(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                       const at::Tensor& log_decay = {}, const at::Tensor& beta = {},
                                       const at::Tensor& alpha = {}, const Options& options = {});

struct StepOptions {
  /// Updated in place, contiguous: one slot per sequence, or a larger pool of which state_indices picks.
  State state{};
  /// int32 or int64 [B], distinct: the slot of each sequence. Undefined: sequence b has slot b.
  at::Tensor state_indices{};

  double scale = 1.0;
  std::variant<double, at::Tensor> ridge = 0.02;
  /// For all sequences, or an int32 tensor [B].
  std::variant<std::int64_t, at::Tensor> iterations = std::int64_t{30};
  Solver solver = Solver::chebyshev;
  RidgeMode ridge_mode = RidgeMode::adaptive;
  bool decay_keys = true;
  bool refine = true;      // as in Options; the CPU takes all iterations in either case
  at::Tensor certainty{};  // float64 [B,H], written if it is there: as CertainResult has it
};

/// One token for each sequence, for decoding: q, k [B,H,D]; v [B,H,V]; gates [B,H]. Returns o [B,H,V] and has no
/// gradient.
at::Tensor gated_kalmanet_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& log_decay, const at::Tensor& beta, const at::Tensor& alpha,
                               const StepOptions& options);

/// How each solve went; all float64, [B,T,H] but for x.
struct Report {
  at::Tensor norm;           // ‖H_t‖_F
  at::Tensor ridge;          // λ_t (of a diagonal: the mean)
  at::Tensor residual;       // ‖(H_t + λ_t I) x_t − q_t‖
  at::Tensor true_residual;  // ‖H_t x_t − q_t‖
  at::Tensor variance;       // q_t · x_t: how little the memory knows about this query
  at::Tensor x;              // [B,T,H,D]
};

/// What `gated_kalmanet` with the same arguments does inside. No gradient.
Report gated_kalmanet_report(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& log_decay = {}, const at::Tensor& beta = {},
                             const at::Tensor& alpha = {}, const Options& options = {});

struct SolveOptions {
  std::variant<double, at::Tensor> ridge = 0.02;
  std::int64_t iterations = 30;
  Solver solver = Solver::chebyshev;
  Gradient gradient = Gradient::implicit;
  RidgeMode ridge_mode = RidgeMode::adaptive;
  bool ridge_gradient = true;
  bool refine = true;
  at::Tensor initial_state{};  // h
  bool output_final_state = false;
  at::Tensor cu_seqlens{};
};

struct SolveResult {
  at::Tensor x;            // [B,T,H,D], the type of q
  at::Tensor final_state;  // h
};

/// The H half alone: x_t = solve(H_t + λ_t I, q_t). For keys that do not fade, leave out log_decay.
SolveResult ridge_solve(const at::Tensor& q, const at::Tensor& k, const at::Tensor& log_decay = {},
                        const at::Tensor& beta = {}, const SolveOptions& options = {});

struct MemoryOptions {
  double scale = 1.0;
  at::Tensor initial_state{};  // u
  bool output_final_state = false;
  at::Tensor cu_seqlens{};
};

struct MemoryResult {
  at::Tensor o;            // [B,T,H,V], the type of q
  at::Tensor final_state;  // u
};

/// The U half alone: o_t = scale · U_tᵀ q_t, gated linear attention.
MemoryResult linear_memory(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& log_decay = {}, const at::Tensor& beta = {},
                           const MemoryOptions& options = {});

}  // namespace gka
