// The C++ functions: plain structs in, one call of the operator of the same name, plain structs out.
#include "gka/block.h"
#include "gka/gka.h"
#include "ops/arguments.h"

namespace gka {
namespace {

using ops::Arguments;

void set_ridge(Arguments& a, const std::variant<double, at::Tensor>& ridge) {
  if (const auto* number = std::get_if<double>(&ridge)) {
    a.ridge = *number;
  } else {
    a.ridge_diagonal = std::get<at::Tensor>(ridge);
  }
}

template <typename AnyOptions>
void set_solver(Arguments& a, const AnyOptions& options) {
  set_ridge(a, options.ridge);
  a.solver = name_of(options.solver);
  a.ridge_mode = name_of(options.ridge_mode);
}

template <typename AnyOptions>
void set_gradient(Arguments& a, const AnyOptions& options) {
  a.iterations = options.iterations;
  a.gradient = name_of(options.gradient);
  a.ridge_gradient = options.ridge_gradient;
  a.refine = options.refine;
}

template <typename AnyOptions>
void set_sequences(Arguments& a, const AnyOptions& options) {
  a.output_final_state = options.output_final_state;
  a.cu_seqlens = options.cu_seqlens;
}

Arguments inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_decay,
                 const at::Tensor& beta, const at::Tensor& alpha) {
  Arguments a;
  a.q = q;
  a.k = k;
  a.v = v;
  a.log_decay = log_decay;
  a.beta = beta;
  a.alpha = alpha;
  return a;
}

Arguments inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_decay,
                 const at::Tensor& beta, const at::Tensor& alpha, const Options& options) {
  Arguments a = inputs(q, k, v, log_decay, beta, alpha);
  set_solver(a, options);
  set_gradient(a, options);
  set_sequences(a, options);
  a.scale = options.scale;
  a.decay_keys = options.decay_keys;
  a.h0 = options.initial_state.h;
  a.u0 = options.initial_state.u;
  return a;
}

template <typename AnyOptions>
Arguments conv_inputs(const at::Tensor& x, const at::Tensor& weight, const AnyOptions& options) {
  Arguments a;
  a.x = x;
  a.weight = weight;
  a.bias = options.bias;
  a.activation = name_of(options.activation);
  a.l2_norm = name_of(options.l2_norm);
  a.head_dim = options.head_dim;
  a.eps = options.eps;
  return a;
}

/// An empty result stands for a state that was not asked for.
at::Tensor state(const Arguments& a, const at::Tensor& result) { return a.output_final_state ? result : at::Tensor(); }

}  // namespace

Result gated_kalmanet(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_decay,
                      const at::Tensor& beta, const at::Tensor& alpha, const Options& options) {
  const auto a = inputs(q, k, v, log_decay, beta, alpha, options);
  const auto results = ops::call("gated_kalmanet", a);
  return {.o = results[0], .final_state = {.h = state(a, results[1]), .u = state(a, results[2])}};
}

at::Tensor gated_kalmanet_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& log_decay, const at::Tensor& beta, const at::Tensor& alpha,
                               const StepOptions& options) {
  auto a = inputs(q, k, v, log_decay, beta, alpha);
  set_solver(a, options);
  a.scale = options.scale;
  a.decay_keys = options.decay_keys;
  a.h = options.state.h;
  a.u = options.state.u;
  a.state_indices = options.state_indices;
  if (const auto* number = std::get_if<std::int64_t>(&options.iterations)) {
    a.iterations = *number;
  } else {
    a.iterations_per_sequence = std::get<at::Tensor>(options.iterations);
  }
  return ops::call("gated_kalmanet_step", a)[0];
}

Report gated_kalmanet_report(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_decay,
                             const at::Tensor& beta, const at::Tensor& alpha, const Options& options) {
  const auto results = ops::call("gated_kalmanet_report", inputs(q, k, v, log_decay, beta, alpha, options));
  return {.norm = results[0],
          .ridge = results[1],
          .residual = results[2],
          .true_residual = results[3],
          .variance = results[4],
          .x = results[5]};
}

SolveResult ridge_solve(const at::Tensor& q, const at::Tensor& k, const at::Tensor& log_decay, const at::Tensor& beta,
                        const SolveOptions& options) {
  auto a = inputs(q, k, {}, log_decay, beta, {});
  set_solver(a, options);
  set_gradient(a, options);
  set_sequences(a, options);
  a.h0 = options.initial_state;
  const auto results = ops::call("ridge_solve", a);
  return {.x = results[0], .final_state = state(a, results[1])};
}

MemoryResult linear_memory(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_decay,
                           const at::Tensor& beta, const MemoryOptions& options) {
  auto a = inputs(q, k, v, log_decay, beta, {});
  set_sequences(a, options);
  a.scale = options.scale;
  a.u0 = options.initial_state;
  const auto results = ops::call("linear_memory", a);
  return {.o = results[0], .final_state = state(a, results[1])};
}

ShortConvResult short_conv(const at::Tensor& x, const at::Tensor& weight, const ShortConvOptions& options) {
  auto a = conv_inputs(x, weight, options);
  set_sequences(a, options);
  a.initial_state = options.initial_state;
  const auto results = ops::call("short_conv", a);
  return {.y = results[0], .final_state = state(a, results[1])};
}

at::Tensor short_conv_step(const at::Tensor& x, const at::Tensor& weight, const ShortConvStepOptions& options) {
  auto a = conv_inputs(x, weight, options);
  a.state = options.state;
  a.state_indices = options.state_indices;
  return ops::call("short_conv_step", a)[0];
}

at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight,
                          const GatedRmsNormOptions& options) {
  Arguments a;
  a.x = x;
  a.gate = gate;
  a.weight = weight;
  a.activation = name_of(options.activation);
  a.eps = options.eps;
  return ops::call("gated_rms_norm", a)[0];
}

}  // namespace gka
