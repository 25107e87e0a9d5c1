#include "ops/run.h"

#include <ATen/ops/empty.h>

#include <initializer_list>
#include <string>

#include "ops/arguments.h"
#include "ops/backends.h"
#include "ops/checks.h"
#include "ops/tensors.h"

namespace gka::ops {
namespace {

using kernels::Part;
using kernels::View;

// ---- Tensors as the kernels see them ----------------------------------------------------------------------------

double* doubles(const at::Tensor& tensor) { return static_cast<double*>(pointer(tensor)); }

View view(const at::Tensor& tensor, std::int64_t token_dim) {
  if (!tensor.defined()) return {};
  if (tensor.numel() == 0) return {.dtype = kernel_dtype(tensor.scalar_type())};
  return {.data = pointer(tensor),
          .dtype = kernel_dtype(tensor.scalar_type()),
          .batch_stride = tensor.stride(0),
          .token_stride = token_dim < 0 ? 0 : tensor.stride(token_dim),
          .head_stride = tensor.stride(token_dim < 0 ? 1 : 2)};
}

/// [B,T,H,…]
View sequence_view(const at::Tensor& tensor) { return view(tensor, 1); }
/// [B,H,…]
View token_view(const at::Tensor& tensor) { return view(tensor, -1); }

/// Drops what the part has no use for, and with it any gradient for it.
void drop_unused(MemoryCall& a) {
  switch (a.part) {
    case Part::both: break;
    case Part::solve: a.v = a.alpha = a.u0 = a.d_u = at::Tensor(); break;
    case Part::memory: a.alpha = a.h0 = a.d_h = a.ridge_diagonal = at::Tensor(); break;
  }
}

/// Whether the kernels read keys and values that heads share where they are. For one token on a GPU each head gets a
/// copy, which is few bytes.
bool reads_shared_heads(const MemoryCall& a) { return a.q.is_cpu() || a.q.dim() != 3; }

/// How many of q's heads share one of k or v.
std::int64_t group_of(const MemoryCall& a, const at::Tensor& shared) {
  return shared.defined() && shared.numel() > 0 ? a.q.size(-2) / shared.size(-2) : 1;
}

/// Brings the tensors into the layout and type the kernels read, without a copy where they have it already.
void prepare(MemoryCall& a) {
  for (auto* tensor : {&a.k, &a.v}) {
    const auto group = group_of(a, *tensor);
    if (group > 1 && !reads_shared_heads(a)) *tensor = tensor->repeat_interleave(group, -2);
  }
  for (auto* tensor : {&a.q, &a.k, &a.v, &a.d_o}) make_channels_contiguous(*tensor);
  for (auto* tensor : {&a.h0, &a.u0, &a.x, &a.norm, &a.h_segments, &a.u_segments, &a.d_h, &a.d_u}) {
    if (tensor->defined()) *tensor = tensor->contiguous();
  }
  if (a.ridge_diagonal.defined()) a.ridge_diagonal = a.ridge_diagonal.to(at::kDouble).contiguous();
  const auto device = a.q.device();
  a.cu_seqlens = integers(a.cu_seqlens, device);
  a.state_indices = integers(a.state_indices, device);
  a.iterations_per_sequence = integers(a.iterations_per_sequence, device, at::kInt);
}

kernels::Problem problem_of(const MemoryCall& a, const Sizes& sizes, kernels::Options options) {
  options.ridge_diagonal = doubles(a.ridge_diagonal);
  return {.batch = sizes.batch.expect_int(),
          .tokens = sizes.tokens.expect_int(),
          .heads = sizes.heads.expect_int(),
          .key_dim = sizes.key_dim.expect_int(),
          .value_dim = sizes.value_dim.expect_int(),
          .sequences = sizes.sequences.expect_int(),
          .key_group = group_of(a, a.k),
          .value_group = group_of(a, a.v),
          .cu_seqlens = static_cast<const std::int64_t*>(pointer(a.cu_seqlens)),
          .q = sequence_view(a.q),
          .k = sequence_view(a.k),
          .v = sequence_view(a.v),
          .log_decay = sequence_view(a.log_decay),
          .beta = sequence_view(a.beta),
          .alpha = sequence_view(a.alpha),
          .h0 = pointer(a.h0),
          .u0 = pointer(a.u0),
          .options = options};
}

// ---- Which backend, and what is checked before it ----------------------------------------------------------------

bool is_meta(const MemoryCall& a) { return a.q.device().is_meta(); }

const Backend& find_backend(std::string_view op, const MemoryCall& a) {
  const Backend& backend = backend_for(op, a.q.device());
  if (values_are_checked(a.q.device())) check_values(op, a);
  return backend;
}

// ---- Room for results --------------------------------------------------------------------------------------------

at::Tensor room(const MemoryCall& a, std::initializer_list<c10::SymInt> shape, at::ScalarType type) {
  return at::empty_symint(shape, a.q.options().dtype(type));
}

/// Stands for a result that was not asked for.
at::Tensor nothing(const MemoryCall& a) { return at::empty({0}, a.q.options()); }

struct ForwardResults {
  at::Tensor o, h, u, x, norm, h_segments, u_segments;
};

ForwardResults forward_room(const MemoryCall& a, const Sizes& s) {
  const auto wide = accumulation_type(a.q);
  const bool solves = ops::solves(a.part), remembers = ops::remembers(a.part);
  const auto maybe = [&](bool wanted, std::initializer_list<c10::SymInt> shape, at::ScalarType type) {
    return wanted ? room(a, shape, type) : nothing(a);
  };
  const auto& out_dim = remembers ? s.value_dim : s.key_dim;
  return {
      .o = room(a, {s.batch, s.tokens, s.heads, out_dim}, a.q.scalar_type()),
      .h = maybe(solves && a.output_final_state, {s.sequences, s.heads, s.key_dim, s.key_dim}, wide),
      .u = maybe(remembers && a.output_final_state, {s.sequences, s.heads, s.key_dim, s.value_dim}, wide),
      .x = maybe(solves && a.save, {s.batch, s.tokens, s.heads, s.key_dim}, wide),
      .norm = maybe(solves && a.save, {s.batch, s.tokens, s.heads}, at::kDouble),
      .h_segments = maybe(solves && a.save, {s.segments, s.heads, s.key_dim, s.key_dim}, wide),
      .u_segments = maybe(remembers && a.save, {s.segments, s.heads, s.key_dim, s.value_dim}, wide),
  };
}

std::vector<at::Tensor> gradient_room(const MemoryCall& a) {
  std::vector<at::Tensor> gradients;
  for (std::size_t i = 0; i < std::size(kDifferentiable); ++i) {
    const at::Tensor& input = a.*kDifferentiable[i];
    const bool wanted = a.needs[i] && input.defined();
    gradients.push_back(wanted ? at::empty_symint(input.sym_sizes(), input.options()) : nothing(a));
  }
  return gradients;
}

/// What is behind the states of a problem's segments, which backends need not write, is then the same at every call.
void clear_spare_room(const kernels::Problem& p, const ForwardResults& results) {
  const auto segments = kernels::max_segments(p.cu_seqlens != nullptr, p.batch, p.tokens, p.sequences);
  for (const at::Tensor& states : {results.h_segments, results.u_segments}) {
    if (states.dim() > 1) states.slice(0, segments).zero_();
  }
}

kernels::Saved saved_pointers(const at::Tensor& x, const at::Tensor& norm, const at::Tensor& h, const at::Tensor& u) {
  return {.x = pointer(x), .norm = doubles(norm), .h = pointer(h), .u = pointer(u)};
}

/// What all forward operators do: checks, room, and the kernel. `certainty`: room for it, if it is wanted.
ForwardResults forward(MemoryCall& a, std::string_view name, at::Tensor* certainty = nullptr) {
  drop_unused(a);
  const auto options = check_options(name, a);
  const auto sizes = check_call(name, a);
  auto results = forward_room(a, sizes);
  if (certainty != nullptr) *certainty = room(a, {sizes.batch, sizes.tokens, sizes.heads}, at::kDouble);
  if (is_meta(a)) return results;
  const auto& backend = find_backend(name, a);
  prepare(a);
  const auto problem = problem_of(a, sizes, options);
  clear_spare_room(problem, results);
  backend.forward(problem,
                  {.o = sequence_view(results.o),
                   .h = pointer(results.h),
                   .u = pointer(results.u),
                   .saved = saved_pointers(results.x, results.norm, results.h_segments, results.u_segments),
                   .report = {.certainty = certainty != nullptr ? doubles(*certainty) : nullptr}},
                  a.q.device());
  return results;
}

}  // namespace

kernels::Step step_of(MemoryCall& a, const Sizes& sizes, kernels::Options options, const at::Tensor& o) {
  prepare(a);
  options.ridge_diagonal = doubles(a.ridge_diagonal);
  return {.batch = sizes.batch.expect_int(),
          .heads = sizes.heads.expect_int(),
          .key_dim = sizes.key_dim.expect_int(),
          .value_dim = sizes.value_dim.expect_int(),
          .key_group = group_of(a, a.k),
          .value_group = group_of(a, a.v),
          .q = token_view(a.q),
          .k = token_view(a.k),
          .v = token_view(a.v),
          .log_decay = token_view(a.log_decay),
          .beta = token_view(a.beta),
          .alpha = token_view(a.alpha),
          .o = token_view(o),
          .h = pointer(a.h),
          .u = pointer(a.u),
          .state_indices = static_cast<const std::int64_t*>(pointer(a.state_indices)),
          .iterations = static_cast<const std::int32_t*>(pointer(a.iterations_per_sequence)),
          .certainty = doubles(a.certainty),
          .options = options};
}

template <Part part>
void run_part(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const Operator<MemoryCall> self(op);
  MemoryCall a = self.pop(*stack);
  a.part = part;
  const auto results = forward(a, public_name(part));
  stack->emplace_back(results.o);
  if (solves(part)) stack->emplace_back(results.h);
  if (remembers(part)) stack->emplace_back(results.u);
}

template void run_part<Part::both>(const c10::OperatorHandle&, torch::jit::Stack*);
template void run_part<Part::solve>(const c10::OperatorHandle&, torch::jit::Stack*);
template void run_part<Part::memory>(const c10::OperatorHandle&, torch::jit::Stack*);

void run_forward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const Operator<MemoryCall> self(op);
  MemoryCall a = self.pop(*stack);
  const auto results = forward(a, public_name(a.part));
  push_results(*stack,
               {results.o, results.h, results.u, results.x, results.norm, results.h_segments, results.u_segments});
}

void run_certainty(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const Operator<MemoryCall> self(op);
  MemoryCall a = self.pop(*stack);
  at::Tensor certainty;
  const auto results = forward(a, self.name(), &certainty);
  push_results(*stack, {results.o, results.h, results.u, certainty});
}

void run_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const Operator<MemoryCall> self(op);
  const auto name = self.name();
  MemoryCall a = self.pop(*stack);
  drop_unused(a);
  const auto options = check_options(name, a);
  const auto sizes = check_backward(name, a);
  const auto results = gradient_room(a);
  if (!is_meta(a)) {
    const auto& backend = find_backend(name, a);
    // The kernels write λ's gradient as they read λ, in float64.
    const auto& d_ridge = results[8];
    const auto d_ridge_wide = d_ridge.numel() > 0 ? room(a, {sizes.heads, sizes.key_dim}, at::kDouble) : at::Tensor();
    prepare(a);
    backend.backward(problem_of(a, sizes, options), saved_pointers(a.x, a.norm, a.h_segments, a.u_segments),
                     {.d_o = sequence_view(a.d_o),
                      .d_h = pointer(a.d_h),
                      .d_u = pointer(a.d_u),
                      .d_q = sequence_view(results[0]),
                      .d_k = sequence_view(results[1]),
                      .d_v = sequence_view(results[2]),
                      .d_log_decay = sequence_view(results[3]),
                      .d_beta = sequence_view(results[4]),
                      .d_alpha = sequence_view(results[5]),
                      .d_h0 = pointer(results[6]),
                      .d_u0 = pointer(results[7]),
                      .d_ridge_diagonal = doubles(d_ridge_wide)},
                     a.q.device());
    if (d_ridge_wide.defined()) d_ridge.copy_(d_ridge_wide);
  }
  push_results(*stack, results);
}

void run_step(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const Operator<MemoryCall> self(op);
  const auto name = self.name();
  MemoryCall a = self.pop(*stack);
  const auto options = check_options(name, a);
  const auto sizes = check_step(name, a);
  const auto o = room(a, {sizes.batch, sizes.heads, sizes.value_dim}, a.q.scalar_type());
  if (!is_meta(a)) find_backend(name, a).step(step_of(a, sizes, options, o), a.q.device());
  push_results(*stack, {o});
}

void run_report(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const Operator<MemoryCall> self(op);
  const auto name = self.name();
  MemoryCall a = self.pop(*stack);
  auto options = check_options(name, a);
  const auto s = check_call(name, a);
  std::vector<at::Tensor> results;  // norm, ridge, residual, true_residual, variance
  for (int i = 0; i < 5; ++i) results.push_back(room(a, {s.batch, s.tokens, s.heads}, at::kDouble));
  results.push_back(room(a, {s.batch, s.tokens, s.heads, s.key_dim}, at::kDouble));  // x
  if (!is_meta(a)) {
    const auto& backend = find_backend(name, a);
    prepare(a);
    options.part = Part::solve;  // nothing in a report depends on the values
    const auto o = room(a, {s.batch, s.tokens, s.heads, s.key_dim}, a.q.scalar_type());
    backend.forward(problem_of(a, s, options),
                    {.o = sequence_view(o),
                     .saved = {},
                     .report = {.norm = doubles(results[0]),
                                .ridge = doubles(results[1]),
                                .residual = doubles(results[2]),
                                .true_residual = doubles(results[3]),
                                .variance = doubles(results[4]),
                                .x = doubles(results[5])}},
                    a.q.device());
  }
  push_results(*stack, results);
}

}  // namespace gka::ops
