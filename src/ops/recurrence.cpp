#include "ops/recurrence.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "kernels/cuda/recurrence.h"
#include "ops/on_gpu.h"

namespace gka::ops {
namespace {

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

}  // namespace

bool has_recurrence(const at::Tensor& q) {
  const auto type = q.scalar_type();
  return kHasCuda && q.is_cuda() && (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf) &&
         q.numel() > 0 && q.size(-1) <= kernels::cuda::kRecurrenceKeys;
}

RecurrenceResult recurrence(const Recurrence& r, bool keep_states, bool want_final) {
  const auto call = call_of(r);
  RecurrenceResult result{.o = at::empty_like(r.v), .states = {}, .final = {}};
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

RecurrenceGradients recurrence_backward(const Recurrence& r, const at::Tensor& states, const at::Tensor& d_o,
                                        const at::Tensor& d_final) {
  const auto call = call_of(r);
  const auto parts_like = [&](const at::Tensor& tensor) {
    auto shape = tensor.sizes().vec();
    shape.insert(shape.begin(), call.column_blocks());
    return at::empty(shape, tensor.options());
  };
  const auto d_q = parts_like(r.q), d_k = parts_like(r.k);
  const auto d_log_decay = r.log_decay.defined() ? parts_like(r.q) : at::Tensor();
  const auto d_beta = r.beta.defined() ? parts_like(r.beta) : at::Tensor();
  RecurrenceGradients gradients{.q = {}, .k = {}, .v = at::empty_like(r.v), .log_decay = {}, .beta = {}, .initial = {}};
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

}  // namespace gka::ops
