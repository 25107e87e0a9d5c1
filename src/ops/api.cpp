// The C++ functions: plain structs in, one call of the operator of the same name, plain structs out.
#include "gka/block.h"
#include "gka/gka.h"
#include "ops/arguments.h"

namespace gka {
namespace {

using ops::ConvCall;
using ops::MemoryCall;
using ops::NormCall;
using ops::Operator;

void set_ridge(MemoryCall& a, const std::variant<double, at::Tensor>& ridge) {
  if (const auto* number = std::get_if<double>(&ridge)) {
    a.ridge = *number;
  } else {
    a.ridge_diagonal = std::get<at::Tensor>(ridge);
  }
}

template <typename AnyOptions>
void set_solver(MemoryCall& a, const AnyOptions& options) {
  set_ridge(a, options.ridge);
  a.solver = options.solver;
  a.ridge_mode = options.ridge_mode;
}

template <typename AnyOptions>
void set_gradient(MemoryCall& a, const AnyOptions& options) {
  a.iterations = options.iterations;
  a.gradient = options.gradient;
  a.ridge_gradient = options.ridge_gradient;
  a.refine = options.refine;
}

template <typename Call, typename AnyOptions>
void set_sequences(Call& a, const AnyOptions& options) {
  a.output_final_state = options.output_final_state;
  a.cu_seqlens = options.cu_seqlens;
}

MemoryCall inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_decay,
                  const at::Tensor& beta, const at::Tensor& alpha) {
  MemoryCall a;
  a.q = q;
  a.k = k;
  a.v = v;
  a.log_decay = log_decay;
  a.beta = beta;
  a.alpha = alpha;
  return a;
}

MemoryCall inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_decay,
                  const at::Tensor& beta, const at::Tensor& alpha, const Options& options) {
  MemoryCall a = inputs(q, k, v, log_decay, beta, alpha);
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
ConvCall conv_inputs(const at::Tensor& x, const at::Tensor& weight, const AnyOptions& options) {
  ConvCall a;
  a.x = x;
  a.weight = weight;
  a.bias = options.bias;
  a.activation = options.activation;
  a.l2_norm = options.l2_norm;
  a.head_dim = options.head_dim;
  a.eps = options.eps;
  return a;
}

/// An empty result stands for a state that was not asked for.
template <typename Call>
at::Tensor state(const Call& a, const at::Tensor& result) {
  return a.output_final_state ? result : at::Tensor();
}

}  // namespace

Result gated_kalmanet(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_decay,
                      const at::Tensor& beta, const at::Tensor& alpha, const Options& options) {
  static const Operator<MemoryCall> op("gated_kalmanet");
  const auto a = inputs(q, k, v, log_decay, beta, alpha, options);
  const auto results = op(a);
  return {.o = results[0], .final_state = {.h = state(a, results[1]), .u = state(a, results[2])}};
}

CertainResult gated_kalmanet_certainty(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                       const at::Tensor& log_decay, const at::Tensor& beta, const at::Tensor& alpha,
                                       const Options& options) {
  static const Operator<MemoryCall> op("gated_kalmanet_certainty");
  const auto a = inputs(q, k, v, log_decay, beta, alpha, options);
  const auto results = op(a);
  return {
      .o = results[0], .final_state = {.h = state(a, results[1]), .u = state(a, results[2])}, .certainty = results[3]};
}

at::Tensor gated_kalmanet_step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const at::Tensor& log_decay, const at::Tensor& beta, const at::Tensor& alpha,
                               const StepOptions& options) {
  static const Operator<MemoryCall> op("gated_kalmanet_step");
  auto a = inputs(q, k, v, log_decay, beta, alpha);
  set_solver(a, options);
  a.scale = options.scale;
  a.decay_keys = options.decay_keys;
  a.refine = options.refine;
  a.h = options.state.h;
  a.u = options.state.u;
  a.state_indices = options.state_indices;
  a.certainty = options.certainty;
  if (const auto* number = std::get_if<std::int64_t>(&options.iterations)) {
    a.iterations = *number;
  } else {
    a.iterations_per_sequence = std::get<at::Tensor>(options.iterations);
  }
  return op(a)[0];
}

Report gated_kalmanet_report(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_decay,
                             const at::Tensor& beta, const at::Tensor& alpha, const Options& options) {
  static const Operator<MemoryCall> op("gated_kalmanet_report");
  const auto results = op(inputs(q, k, v, log_decay, beta, alpha, options));
  return {.norm = results[0],
          .ridge = results[1],
          .residual = results[2],
          .true_residual = results[3],
          .variance = results[4],
          .x = results[5]};
}

SolveResult ridge_solve(const at::Tensor& q, const at::Tensor& k, const at::Tensor& log_decay, const at::Tensor& beta,
                        const SolveOptions& options) {
  static const Operator<MemoryCall> op("ridge_solve");
  auto a = inputs(q, k, {}, log_decay, beta, {});
  set_solver(a, options);
  set_gradient(a, options);
  set_sequences(a, options);
  a.h0 = options.initial_state;
  const auto results = op(a);
  return {.x = results[0], .final_state = state(a, results[1])};
}

MemoryResult linear_memory(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_decay,
                           const at::Tensor& beta, const MemoryOptions& options) {
  static const Operator<MemoryCall> op("linear_memory");
  auto a = inputs(q, k, v, log_decay, beta, {});
  set_sequences(a, options);
  a.scale = options.scale;
  a.u0 = options.initial_state;
  const auto results = op(a);
  return {.o = results[0], .final_state = state(a, results[1])};
}

ShortConvResult short_conv(const at::Tensor& x, const at::Tensor& weight, const ShortConvOptions& options) {
  static const Operator<ConvCall> op("short_conv");
  auto a = conv_inputs(x, weight, options);
  set_sequences(a, options);
  a.initial_state = options.initial_state;
  const auto results = op(a);
  return {.y = results[0], .final_state = state(a, results[1])};
}

at::Tensor short_conv_step(const at::Tensor& x, const at::Tensor& weight, const ShortConvStepOptions& options) {
  static const Operator<ConvCall> op("short_conv_step");
  auto a = conv_inputs(x, weight, options);
  a.state = options.state;
  a.state_indices = options.state_indices;
  return op(a)[0];
}

at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight,
                          const GatedRmsNormOptions& options) {
  static const Operator<NormCall> op("gated_rms_norm");
  NormCall a;
  a.x = x;
  a.gate = gate;
  a.weight = weight;
  a.activation = options.activation;
  a.eps = options.eps;
  return op(a)[0];
}

}  // namespace gka
