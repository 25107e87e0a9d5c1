#include "ops/recurrence.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <optional>

#include "kernels/cuda/recurrence.h"
#include "ops/on_gpu.h"

namespace gka::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const float* numbers(const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr; }
float* room(const at::Tensor& tensor) { return tensor.defined() ? tensor.data_ptr<float>() : nullptr; }

kernels::cuda::Recurrence call_of(const Recurrence& r) {
  const bool packed = r.bounds.defined();
  return {.sequences = packed ? r.bounds.size(0) - 1 : r.q.size(0),
          .heads = r.q.size(2),
          .key_dim = r.q.size(3),
          .value_dim = r.v.size(3),
          .length = r.q.size(1),
          .tokens = r.q.size(0) * r.q.size(1),
          .bounds = packed ? r.bounds.const_data_ptr<std::int64_t>() : nullptr,
          .delta = r.delta,
          .per_channel = r.log_decay.defined() && r.log_decay.dim() == r.q.dim(),
          .scale = static_cast<float>(r.scale),
          .q = numbers(r.q),
          .k = numbers(r.k),
          .v = numbers(r.v),
          .log_decay = numbers(r.log_decay),
          .beta = numbers(r.beta),
          .initial = numbers(r.initial)};
}

struct Forward {
  at::Tensor o;
  at::Tensor states;  // for the backward pass; undefined unless asked for
  at::Tensor final;   // likewise
};

Forward forward(const Recurrence& r, bool keep_states, bool want_final) {
  const auto call = call_of(r);
  Forward result{.o = at::empty_like(r.v), .states = {}, .final = {}};
  const auto states = [&](std::int64_t count) {
    return at::empty({count, call.heads, call.key_dim, call.value_dim}, r.q.options());
  };
  if (keep_states) result.states = states(call.kept_states());
  if (want_final) result.final = states(call.sequences);
  on_gpu(r.q, [&](const auto& device) {
    kernels::cuda::recurrence(call, {.o = room(result.o), .states = room(result.states), .final = room(result.final)},
                              device);
  });
  return result;
}

struct Gradients {
  at::Tensor q, k, v, log_decay, beta, initial;  // undefined where the input is
};

Gradients backward(const Recurrence& r, const at::Tensor& states, const at::Tensor& d_o, const at::Tensor& d_final) {
  const auto call = call_of(r);
  const auto parts_like = [&](const at::Tensor& tensor) {
    auto shape = tensor.sizes().vec();
    shape.insert(shape.begin(), call.column_blocks());
    return at::empty(shape, tensor.options());
  };
  const auto d_q = parts_like(r.q), d_k = parts_like(r.k);
  const auto d_log_decay = r.log_decay.defined() ? parts_like(r.q) : at::Tensor();
  const auto d_beta = r.beta.defined() ? parts_like(r.beta) : at::Tensor();
  Gradients gradients{.q = {}, .k = {}, .v = at::empty_like(r.v), .log_decay = {}, .beta = {}, .initial = {}};
  if (r.initial.defined()) gradients.initial = at::empty_like(r.initial);
  on_gpu(r.q, [&](const auto& device) {
    kernels::cuda::recurrence_backward(call,
                                       {.d_o = numbers(d_o),
                                        .d_final = numbers(d_final),
                                        .states = numbers(states),
                                        .d_q = room(d_q),
                                        .d_k = room(d_k),
                                        .d_v = room(gradients.v),
                                        .d_log_decay = room(d_log_decay),
                                        .d_beta = room(d_beta),
                                        .d_initial = room(gradients.initial)},
                                       device);
  });
  gradients.q = d_q.sum(0);
  gradients.k = d_k.sum(0);
  if (d_beta.defined()) gradients.beta = d_beta.sum(0);
  if (d_log_decay.defined()) {
    gradients.log_decay = call.per_channel ? d_log_decay.sum(0) : d_log_decay.sum(at::IntArrayRef{0, -1});
  }
  return gradients;
}

using Maybe = std::optional<at::Tensor>;  // as autograd takes tensors that may be undefined

Maybe maybe(const at::Tensor& tensor) { return tensor.defined() ? Maybe(tensor) : std::nullopt; }
at::Tensor or_undefined(const Maybe& tensor) { return tensor.value_or(at::Tensor()); }

/// o and, where it is wanted, the last state. States on the way are kept where `train` is set.
struct Recur : torch::autograd::Function<Recur> {
  static variable_list forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const Maybe& log_decay, const Maybe& beta, const Maybe& initial, const Maybe& bounds,
                               bool delta, double scale, bool train, bool want_final) {
    const Recurrence call{.q = q,
                          .k = k,
                          .v = v,
                          .log_decay = or_undefined(log_decay),
                          .beta = or_undefined(beta),
                          .initial = or_undefined(initial),
                          .bounds = or_undefined(bounds),
                          .delta = delta,
                          .scale = scale};
    auto result = ops::forward(call, train, want_final);
    if (train) {
      context->save_for_backward({q, k, v, call.log_decay, call.beta, call.initial, call.bounds, result.states});
    }
    context->saved_data["delta"] = delta;
    context->saved_data["scale"] = scale;
    context->set_materialize_grads(false);
    variable_list results{result.o};
    if (want_final) results.push_back(result.final);
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& slopes) {
    const auto saved = context->get_saved_variables();
    const Recurrence call{.q = saved[0],
                          .k = saved[1],
                          .v = saved[2],
                          .log_decay = saved[3],
                          .beta = saved[4],
                          .initial = saved[5],
                          .bounds = saved[6],
                          .delta = context->saved_data["delta"].toBool(),
                          .scale = context->saved_data["scale"].toDouble()};
    const auto d_o = slopes[0].defined() ? slopes[0].contiguous() : at::zeros_like(call.v);
    const bool through_final = slopes.size() > 1 && slopes[1].defined();
    const auto d = ops::backward(call, saved[7], d_o, through_final ? slopes[1].contiguous() : at::Tensor());
    return {d.q, d.k, d.v, d.log_decay, d.beta, d.initial, {}, {}, {}, {}, {}};
  }
};

bool needs_gradient(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

}  // namespace

bool has_recurrence(const at::Tensor& q) {
  const auto type = q.scalar_type();
  return kHasCuda && q.is_cuda() && (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf) &&
         q.numel() > 0 && q.size(-1) <= kernels::cuda::kRecurrenceKeys;
}

RecurrenceResult recurrence(const Recurrence& r, bool want_final) {
  const auto wide = [](const at::Tensor& x) { return x.defined() ? x.to(at::kFloat).contiguous() : x; };
  const std::array inputs{wide(r.q), wide(r.k), wide(r.v), wide(r.log_decay), wide(r.beta), wide(r.initial)};
  const bool train = at::GradMode::is_enabled() && std::ranges::any_of(inputs, needs_gradient);
  const auto results = Recur::apply(inputs[0], inputs[1], inputs[2], maybe(inputs[3]), maybe(inputs[4]),
                                    maybe(inputs[5]), maybe(r.bounds), r.delta, r.scale, train, want_final);
  return {.o = results[0], .final = want_final ? results[1] : at::Tensor()};
}

}  // namespace gka::ops
