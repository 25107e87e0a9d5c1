#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <utility>

#include "kernels/recurrence.h"
#include "ops/backends.h"
#include "ops/recurrence_paths.h"

namespace gka::ops {
namespace {

using kernels::cpu::kRecurrenceSegment;

/// A tensor with numbers of its own: what is traced or transformed goes through torch's operations.
bool is_plain(const at::Tensor& x) { return x.is_cpu() && !at::isTensorSubclassLike(x); }

bool takes(const Recurrence& r) {
  return is_plain(r.q) && is_plain(r.k) && is_plain(r.v) && at::isFloatingType(r.q.scalar_type()) && r.q.numel() > 0 &&
         r.v.numel() > 0;
}

at::Tensor wide(const at::Tensor& x, at::ScalarType type) { return x.defined() ? x.to(type).contiguous() : x; }
at::ScalarType type_for(const at::Tensor& q) { return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

Recurrence prepare(const Recurrence& r) {
  Recurrence p = r;
  for (auto* x : {&p.q, &p.k, &p.v, &p.log_decay, &p.beta, &p.initial}) *x = wide(*x, type_for(r.q));
  p.bounds = wide(r.bounds, at::kLong);
  return p;
}

template <typename T>
kernels::Recurrence<T> call_of(const Recurrence& r) {
  auto call = sizes_of<kernels::Recurrence<T>, T>(r);
  call.q = numbers<T>(r.q);
  call.k = numbers<T>(r.k);
  call.v = numbers<T>(r.v);
  return call;
}

template <typename T>
RecurrenceForward forward_as(const Recurrence& r, bool keep, bool want_final) {
  const auto call = call_of<T>(r);
  const auto states = [&](std::int64_t count, bool wanted) {
    return wanted ? at::empty({count, call.heads, call.key_dim, call.value_dim}, r.q.options()) : at::Tensor();
  };
  const auto kept = states(call.kept_states(kRecurrenceSegment), keep);
  RecurrenceForward result{.o = at::empty_like(r.v), .final = states(call.sequences, want_final), .kept = {}};
  kernels::cpu::recurrence<T>(call, {.o = room<T>(result.o), .states = room<T>(kept), .final = room<T>(result.final)},
                              torch_executor());
  if (keep) result.kept = {kept};
  return result;
}

template <typename T>
RecurrenceGradients backward_as(const Recurrence& r, const std::vector<at::Tensor>& kept, const at::Tensor& d_o,
                                const at::Tensor& d_final) {
  const auto slope = d_o.contiguous();
  const auto d = gradients_like(r);
  kernels::cpu::recurrence_backward<T>(call_of<T>(r),
                                       {.d_o = numbers<T>(slope),
                                        .d_final = numbers<T>(d_final),
                                        .states = numbers<T>(kept[0]),
                                        .d_q = room<T>(d.q),
                                        .d_k = room<T>(d.k),
                                        .d_v = room<T>(d.v),
                                        .d_log_decay = room<T>(d.log_decay),
                                        .d_beta = room<T>(d.beta),
                                        .d_initial = room<T>(d.initial)},
                                       torch_executor());
  return d;
}

RecurrenceForward forward(const Recurrence& r, bool keep, bool want_final) {
  return r.q.scalar_type() == at::kDouble ? forward_as<double>(r, keep, want_final)
                                          : forward_as<float>(r, keep, want_final);
}

RecurrenceGradients backward(const Recurrence& r, const std::vector<at::Tensor>& kept, const at::Tensor& d_o,
                             const at::Tensor& d_final) {
  return r.q.scalar_type() == at::kDouble ? backward_as<double>(r, kept, d_o, d_final)
                                          : backward_as<float>(r, kept, d_o, d_final);
}

/// A step as a call of sequences of one token.
template <typename T>
at::Tensor step_as(const RecurrenceStep& s) {
  const auto one = [](const at::Tensor& x) { return x.defined() ? x.unsqueeze(1) : x; };
  const auto r = prepare({.q = one(s.q),
                          .k = one(s.k),
                          .v = one(s.v),
                          .log_decay = one(s.log_decay),
                          .beta = one(s.beta),
                          .initial = {},
                          .bounds = {},
                          .delta = s.delta,
                          .scale = s.scale});
  const auto slots = wide(s.slots, at::kLong);
  const auto o = at::empty_like(r.v);
  kernels::cpu::recurrence_step<T>(
      {.call = call_of<T>(r), .slots = numbers<std::int64_t>(slots), .pool = room<T>(s.pool), .o = room<T>(o)},
      torch_executor());
  return o.squeeze(1).to(s.v.scalar_type());
}

}  // namespace

const RecurrenceKernels kCpuRecurrence{.takes = takes, .prepare = prepare, .forward = forward, .backward = backward};

bool has_cpu_step(const RecurrenceStep& s) {
  return is_plain(s.q) && s.q.numel() > 0 && s.v.numel() > 0 && s.pool.is_contiguous() &&
         s.pool.scalar_type() == type_for(s.q);
}

at::Tensor cpu_step(const RecurrenceStep& s) {
  return s.q.scalar_type() == at::kDouble ? step_as<double>(s) : step_as<float>(s);
}

}  // namespace gka::ops
