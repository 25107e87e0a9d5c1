// The operators and, for each, which kernel runs at which level of torch's dispatcher. Nothing else registers anything.
//
//   autocast     casts q, k, v
//   autograd     where a gradient is wanted: calls gated_kalmanet_forward, with the part of gated_kalmanet, ridge_solve
//                or linear_memory, and records a node that calls gated_kalmanet_backward
//   CPU, CUDA    checks, allocates, runs a backend
//   meta         checks and allocates
#include <torch/library.h>

#include <tuple>

#include "base/limits.h"
#include "gka/block_kernels.h"
#include "gka/info.h"
#include "ops/autograd.h"
#include "ops/block.h"
#include "ops/checks.h"
#include "ops/recurrence.h"
#include "ops/run.h"
#include "ops/sketch.h"

namespace gka::ops {
namespace {

using kernels::Part;
using Boxed = c10::KernelFunction::BoxedKernelFunction;

template <Boxed* kernel>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<kernel>();
}

using Columns = std::tuple<std::vector<std::string>, c10::List<bool>, c10::List<bool>, std::vector<std::string>>;

Columns list_backends() {
  Columns columns;
  auto& [name, built, available, detail] = columns;
  for (const auto& backend : backends()) {
    name.push_back(backend.name);
    built.push_back(backend.built);
    available.push_back(backend.available);
    detail.push_back(backend.detail);
  }
  return columns;
}

std::tuple<std::string, std::string> name_kernel(const std::string& device, std::int64_t device_index,
                                                 at::ScalarType dtype, std::int64_t key_dim, std::int64_t value_dim,
                                                 const std::string& solver, const std::string& gradient,
                                                 const std::string& ridge_mode, std::int64_t iterations,
                                                 bool decay_keys, double ridge, const std::string& part, bool refine,
                                                 bool report) {
  constexpr std::string_view op = "choose_kernel";
  MemoryCall a;
  a.solver = parse_choice<Solver>(op, "solver", solver);
  a.gradient = parse_choice<Gradient>(op, "gradient", gradient);
  a.ridge_mode = parse_choice<RidgeMode>(op, "ridge_mode", ridge_mode);
  a.iterations = iterations;
  a.decay_keys = decay_keys;
  a.ridge = ridge;
  a.part = parse_choice<Part>(op, "part", part);
  a.refine = refine;
  const auto options = check_options(op, a);
  const auto choice = choose_kernel({.device = device,
                                     .device_index = static_cast<int>(device_index),
                                     .dtype = kernel_dtype(dtype),
                                     .key_dim = key_dim,
                                     .value_dim = value_dim,
                                     .solver = options.solver,
                                     .gradient = options.gradient,
                                     .ridge_mode = options.ridge_mode,
                                     .iterations = options.iterations,
                                     .decay_keys = options.decay_keys,
                                     .ridge = options.ridge,
                                     .part = options.part,
                                     .refine = options.refine,
                                     .report = report});
  return {choice.kernel, choice.reason};
}

}  // namespace

TORCH_LIBRARY(gka, m) {
  m.def(
      "gated_kalmanet(Tensor q, Tensor k, Tensor v, Tensor? log_decay=None, Tensor? beta=None, Tensor? alpha=None, *, "
      "float scale=1.0, float ridge=0.02, Tensor? ridge_diagonal=None, int iterations=30, str solver=\"chebyshev\", "
      "str gradient=\"implicit\", str ridge_mode=\"adaptive\", bool ridge_gradient=True, bool decay_keys=True, "
      "bool refine=True, Tensor? h0=None, Tensor? u0=None, bool output_final_state=False, Tensor? cu_seqlens=None) "
      "-> (Tensor o, Tensor h, Tensor u)");
  m.def(
      "ridge_solve(Tensor q, Tensor k, Tensor? log_decay=None, Tensor? beta=None, *, "
      "float ridge=0.02, Tensor? ridge_diagonal=None, int iterations=30, str solver=\"chebyshev\", "
      "str gradient=\"implicit\", str ridge_mode=\"adaptive\", bool ridge_gradient=True, bool refine=True, "
      "Tensor? h0=None, bool output_final_state=False, Tensor? cu_seqlens=None) -> (Tensor x, Tensor h)");
  m.def(
      "linear_memory(Tensor q, Tensor k, Tensor v, Tensor? log_decay=None, Tensor? beta=None, *, "
      "float scale=1.0, Tensor? u0=None, bool output_final_state=False, Tensor? cu_seqlens=None) "
      "-> (Tensor o, Tensor u)");
  m.def(
      "gated_kalmanet_step(Tensor q, Tensor k, Tensor v, Tensor? log_decay=None, Tensor? beta=None, "
      "Tensor? alpha=None, *, Tensor(a!) h, Tensor(b!) u, Tensor? state_indices=None, float scale=1.0, "
      "float ridge=0.02, Tensor? ridge_diagonal=None, int iterations=30, Tensor? iterations_per_sequence=None, "
      "str solver=\"chebyshev\", str ridge_mode=\"adaptive\", bool decay_keys=True, bool refine=True, "
      "Tensor(c!)? certainty=None) "
      "-> Tensor o");
  // gated_kalmanet for inference, with how much of each query the memory knew.
  m.def(
      "gated_kalmanet_certainty(Tensor q, Tensor k, Tensor v, Tensor? log_decay=None, Tensor? beta=None, "
      "Tensor? alpha=None, *, float scale=1.0, float ridge=0.02, Tensor? ridge_diagonal=None, int iterations=30, "
      "str solver=\"chebyshev\", str ridge_mode=\"adaptive\", bool decay_keys=True, bool refine=True, "
      "Tensor? h0=None, Tensor? u0=None, bool output_final_state=False, Tensor? cu_seqlens=None) "
      "-> (Tensor o, Tensor h, Tensor u, Tensor certainty)");
  m.def(
      "gated_kalmanet_report(Tensor q, Tensor k, Tensor v, Tensor? log_decay=None, Tensor? beta=None, "
      "Tensor? alpha=None, *, float scale=1.0, float ridge=0.02, Tensor? ridge_diagonal=None, int iterations=30, "
      "str solver=\"chebyshev\", str gradient=\"implicit\", str ridge_mode=\"adaptive\", bool ridge_gradient=True, "
      "bool decay_keys=True, bool refine=True, Tensor? h0=None, Tensor? u0=None, bool output_final_state=False, "
      "Tensor? cu_seqlens=None) "
      "-> (Tensor norm, Tensor ridge, Tensor residual, Tensor true_residual, Tensor variance, Tensor x)");

  // What the differentiable operators are made of.
  m.def(
      "gated_kalmanet_forward(str part, Tensor q, Tensor k, Tensor? v, Tensor? log_decay, Tensor? beta, Tensor? alpha, "
      "Tensor? h0, Tensor? u0, Tensor? ridge_diagonal, Tensor? cu_seqlens, float scale, float ridge, int iterations, "
      "str solver, str gradient, str ridge_mode, bool ridge_gradient, bool decay_keys, bool refine, "
      "bool output_final_state, bool save) "
      "-> (Tensor o, Tensor h, Tensor u, Tensor x, Tensor norm, Tensor h_segments, Tensor u_segments)");
  m.def(
      "gated_kalmanet_backward(str part, Tensor q, Tensor k, Tensor? v, Tensor? log_decay, Tensor? beta, "
      "Tensor? alpha, Tensor? h0, Tensor? u0, Tensor? ridge_diagonal, Tensor? cu_seqlens, float scale, float ridge, "
      "int iterations, str solver, str gradient, str ridge_mode, bool ridge_gradient, bool decay_keys, bool refine, "
      "Tensor? x, Tensor? norm, Tensor? h_segments, Tensor? u_segments, Tensor d_o, Tensor? d_h, Tensor? d_u, "
      "bool[] needs) "
      "-> (Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_log_decay, Tensor d_beta, Tensor d_alpha, Tensor d_h0, "
      "Tensor d_u0, Tensor d_ridge_diagonal)");

  // The small operations around the memory in a block.
  m.def(
      "short_conv(Tensor x, Tensor weight, Tensor? bias=None, *, str activation=\"silu\", str l2_norm=\"none\", "
      "int head_dim=0, float eps=1e-6, Tensor? initial_state=None, bool output_final_state=False, "
      "Tensor? cu_seqlens=None) -> (Tensor y, Tensor final_state)");
  m.def(
      "short_conv_backward(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens, "
      "str activation, str l2_norm, int head_dim, float eps, Tensor d_y, Tensor? d_final_state, bool[] needs) "
      "-> (Tensor d_x, Tensor d_weight, Tensor d_bias, Tensor d_initial_state)");
  m.def(
      "short_conv_step(Tensor x, Tensor weight, Tensor? bias=None, *, Tensor(a!) state, Tensor? state_indices=None, "
      "str activation=\"silu\", str l2_norm=\"none\", int head_dim=0, float eps=1e-6) -> Tensor y");
  m.def(
      "gated_rms_norm(Tensor x, Tensor? gate=None, Tensor? weight=None, *, str activation=\"silu\", float eps=1e-6) "
      "-> Tensor y");
  m.def(
      "gated_rms_norm_backward(Tensor x, Tensor? gate, Tensor? weight, str activation, float eps, Tensor d_y, "
      "bool[] needs) -> (Tensor d_x, Tensor d_gate, Tensor d_weight)");

  // Gated DeltaNet's rule (delta=False: linear attention's) in chunks on a GPU's tensor cores; a log_decay of q's shape
  // has one for each key channel, as Kimi Delta Attention's and gated linear attention's.
  m.def(
      "chunked_delta_rule(Tensor q, Tensor k, Tensor v, Tensor? log_decay=None, Tensor? beta=None, *, float scale=1.0, "
      "bool delta=True, Tensor? initial_state=None, bool output_final_state=False, Tensor? cu_seqlens=None) "
      "-> (Tensor o, Tensor state)",
      chunked_delta_rule);

  // Queries and keys in the dimensions of a sketch, and what was solved there back among the queries. to_sketch's last
  // two results are q and k themselves.
  m.def(
      "to_sketch(Tensor(a) q, Tensor(b) k, Tensor sketch) -> "
      "(Tensor low_q, Tensor low_k, Tensor(a) same_q, Tensor(b) same_k)",
      to_sketch);
  m.def("from_sketch(Tensor q, Tensor z, Tensor sketch, Tensor? alpha=None) -> Tensor", from_sketch);

  m.def("version() -> str", []() -> std::string { return version(); });
  m.def("limits() -> (int head, int conv_size, int conv_head)",
        [] { return std::tuple(kLargestDim, kernels::kMaxConvWidth, kernels::kMaxConvHead); });
  m.def("backends() -> (str[] name, bool[] built, bool[] available, str[] detail)", list_backends);
  m.def(
      "choose_kernel(str device, int device_index, ScalarType dtype, int key_dim, int value_dim, str solver, "
      "str gradient, str ridge_mode, int iterations, bool decay_keys, float ridge, str part, bool refine, bool report) "
      "-> (str kernel, str reason)",
      name_kernel);
}

// One kernel each for every device: the table of backends decides what runs, and says so where nothing does.
void register_devices(torch::Library& m) {
  m.impl("gated_kalmanet", boxed<run_part<Part::both>>());
  m.impl("ridge_solve", boxed<run_part<Part::solve>>());
  m.impl("linear_memory", boxed<run_part<Part::memory>>());
  m.impl("gated_kalmanet_forward", boxed<run_forward>());
  m.impl("gated_kalmanet_backward", boxed<run_backward>());
  m.impl("gated_kalmanet_step", boxed<run_step>());
  m.impl("gated_kalmanet_report", boxed<run_report>());
  m.impl("gated_kalmanet_certainty", boxed<run_certainty>());
  m.impl("short_conv", boxed<run_short_conv>());
  m.impl("short_conv_backward", boxed<run_short_conv_backward>());
  m.impl("short_conv_step", boxed<run_short_conv_step>());
  m.impl("gated_rms_norm", boxed<run_gated_rms_norm>());
  m.impl("gated_rms_norm_backward", boxed<run_gated_rms_norm_backward>());
}
TORCH_LIBRARY_IMPL(gka, CPU, m) { register_devices(m); }
TORCH_LIBRARY_IMPL(gka, CUDA, m) { register_devices(m); }
TORCH_LIBRARY_IMPL(gka, Meta, m) { register_devices(m); }

TORCH_LIBRARY_IMPL(gka, Autograd, m) {
  m.impl("gated_kalmanet", boxed<differentiate_part<Part::both>>());
  m.impl("ridge_solve", boxed<differentiate_part<Part::solve>>());
  m.impl("linear_memory", boxed<differentiate_part<Part::memory>>());
  m.impl("gated_kalmanet_forward", boxed<refuse_gradient>());
  m.impl("gated_kalmanet_backward", boxed<differentiable_once>());
  m.impl("gated_kalmanet_step", boxed<refuse_gradient>());
  m.impl("gated_kalmanet_report", boxed<ignore_gradient>());
  m.impl("gated_kalmanet_certainty", boxed<refuse_gradient>());
  m.impl("short_conv", boxed<differentiate_short_conv>());
  m.impl("short_conv_backward", boxed<differentiable_once>());
  m.impl("short_conv_step", boxed<refuse_gradient>());
  m.impl("gated_rms_norm", boxed<differentiate_gated_rms_norm>());
  m.impl("gated_rms_norm_backward", boxed<differentiable_once>());
}
TORCH_LIBRARY_IMPL(gka, ADInplaceOrView, m) {
  m.impl("gated_kalmanet_step", boxed<mark_states_changed>());
  m.impl("short_conv_step", boxed<mark_states_changed>());
}

void register_autocast(torch::Library& m) {
  m.impl("gated_kalmanet", boxed<autocast<3>>());
  m.impl("ridge_solve", boxed<autocast<2>>());
  m.impl("linear_memory", boxed<autocast<3>>());
  m.impl("gated_kalmanet_step", boxed<autocast<3>>());
  m.impl("gated_kalmanet_report", boxed<autocast<3>>());
  m.impl("gated_kalmanet_certainty", boxed<autocast<3>>());
}
TORCH_LIBRARY_IMPL(gka, AutocastCPU, m) { register_autocast(m); }
TORCH_LIBRARY_IMPL(gka, AutocastCUDA, m) { register_autocast(m); }

}  // namespace gka::ops
