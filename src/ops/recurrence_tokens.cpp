#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "kernels/cuda/recurrence.h"
#include "ops/on_gpu.h"
#include "ops/recurrence_paths.h"

namespace gka::ops {
namespace {

bool takes(const Recurrence& r) {
  const auto type = r.q.scalar_type();
  return kHasCuda && r.q.is_cuda() && (type == at::kFloat || type == at::kBFloat16 || type == at::kHalf) &&
         r.q.numel() > 0 && r.q.size(-1) <= kernels::cuda::kRecurrenceKeys;
}

Recurrence prepare(const Recurrence& r) {
  const auto wide = [](const at::Tensor& x) { return x.defined() ? x.to(at::kFloat).contiguous() : x; };
  Recurrence p = r;
  for (auto* x : {&p.q, &p.k, &p.v, &p.log_decay, &p.beta, &p.initial}) *x = wide(*x);
  return p;
}

kernels::cuda::Recurrence call_of(const Recurrence& r) {
  auto call = sizes_of<kernels::cuda::Recurrence>(r);
  call.q = numbers(r.q);
  call.k = numbers(r.k);
  call.v = numbers(r.v);
  return call;
}

RecurrenceForward forward(const Recurrence& r, bool keep, bool want_final) {
  const auto call = call_of(r);
  RecurrenceForward result{.o = at::empty_like(r.v), .final = {}, .kept = {}};
  const auto states = [&](std::int64_t count) {
    return at::empty({count, call.heads, call.key_dim, call.value_dim}, r.q.options());
  };
  if (keep) result.kept = {states(call.kept_states(kernels::cuda::kRecurrenceSegment))};
  if (want_final) result.final = states(call.sequences);
  on_gpu(r.q, [&](const auto& device) {
    kernels::cuda::recurrence(
        call, {.o = room(result.o), .states = keep ? room(result.kept[0]) : nullptr, .final = room(result.final)},
        device);
  });
  return result;
}

RecurrenceGradients backward(const Recurrence& r, const std::vector<at::Tensor>& kept, const at::Tensor& d_o,
                             const at::Tensor& d_final) {
  const auto call = call_of(r);
  const auto slope = d_o.contiguous();
  const auto parts_like = [&](const at::Tensor& tensor) {
    auto shape = tensor.sizes().vec();
    shape.insert(shape.begin(), kernels::cuda::recurrence_parts(call));
    return at::empty(shape, tensor.options());
  };
  const auto d_q = parts_like(r.q), d_k = parts_like(r.k);
  const auto d_log_decay = r.log_decay.defined() ? parts_like(r.q) : at::Tensor();
  const auto d_beta = r.beta.defined() ? parts_like(r.beta) : at::Tensor();
  RecurrenceGradients gradients{.q = {}, .k = {}, .v = at::empty_like(r.v), .log_decay = {}, .beta = {}, .initial = {}};
  if (r.initial.defined()) gradients.initial = at::empty_like(r.initial);
  on_gpu(r.q, [&](const auto& device) {
    kernels::cuda::recurrence_backward(call,
                                       {.d_o = numbers(slope),
                                        .d_final = numbers(d_final),
                                        .states = numbers(kept[0]),
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

}  // namespace

const RecurrenceKernels kTokenRecurrence{.takes = takes, .prepare = prepare, .forward = forward, .backward = backward};

}  // namespace gka::ops
