#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "kernels/cuda/memory/memory.h"
#include "ops/checks.h"
#include "ops/on_gpu.h"
#include "ops/recurrence_paths.h"

namespace gka::ops {
namespace {

using kernels::cuda::ChunkedMemory;
using kernels::cuda::MemoryRows;

void* bits(const at::Tensor& tensor) { return tensor.defined() ? tensor.data_ptr() : nullptr; }

bool runs_on(const at::Tensor& x) {
  bool runs = false;
  on_gpu(x, [&](const auto& device) { runs = kernels::cuda::has_room_for_chunks(device.index); });
  return runs;
}

bool takes(const Recurrence& r) {
  const auto half = [](const at::Tensor& x) { return x.scalar_type() == at::kBFloat16 && x.size(-1) % 8 == 0; };
  return kHasCuda && r.q.is_cuda() && half(r.q) && half(r.k) && half(r.v) && r.q.numel() > 0 && r.v.numel() > 0 &&
         r.q.size(-1) <= ChunkedMemory::kMaxKeys && runs_on(r.q);
}

bool is_aligned(const at::Tensor& x) { return reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0; }

/// Rows of whole vectors, and batch rows one behind the other. Heads may share their numbers.
bool is_readable(const at::Tensor& x) {
  const auto whole = [](std::int64_t stride) { return stride % 8 == 0; };
  return x.stride(3) == 1 && whole(x.stride(2)) && whole(x.stride(1)) &&
         (x.size(0) == 1 || x.stride(0) == x.size(1) * x.stride(1)) && is_aligned(x);
}
at::Tensor readable(const at::Tensor& x) { return is_readable(x) ? x : x.clone(at::MemoryFormat::Contiguous); }

Recurrence prepare(const Recurrence& r) {
  Recurrence p = r;
  for (auto* x : {&p.q, &p.k, &p.v}) *x = readable(*x);
  for (auto* x : {&p.log_decay, &p.beta, &p.initial}) {
    if (x->defined()) *x = x->to(at::kFloat).contiguous();
  }
  if (is_per_channel(p) && !is_aligned(p.log_decay)) p.log_decay = p.log_decay.clone();
  return p;
}

MemoryRows rows(const at::Tensor& x) {
  return {.data = x.const_data_ptr(), .token_stride = x.stride(1), .head_stride = x.stride(2)};
}

ChunkedMemory call_of(const Recurrence& r) {
  auto call = sizes_of<ChunkedMemory>(r);
  call.q = rows(r.q);
  call.k = rows(r.k);
  call.v = rows(r.v);
  return call;
}

/// What the passes hand on, in the order in which it is kept; undefined where the call has no use for it.
struct Handed {
  at::Tensor tiles, t, u, states;

  kernels::cuda::ChunkedMemorySaved pointers() const {
    return {.tiles = bits(tiles), .t = bits(t), .u = bits(u), .states = bits(states)};
  }
};

Handed make_handed(const Recurrence& r, const ChunkedMemory& call, bool keep) {
  const auto half = r.q.options();
  constexpr std::int64_t kChunk = ChunkedMemory::kChunk;
  const auto slots = call.slots();
  Handed h{.tiles = at::empty({slots, call.heads, call.tile_bytes()}, half.dtype(at::kByte)),
           .t = {},
           .u = {},
           .states = {}};
  if (call.has_own_u()) h.u = at::empty({call.tokens, call.heads, call.value_dim}, half);
  if (keep && call.delta) h.t = at::empty({slots, call.heads, kChunk, kChunk}, half);
  if (keep) h.states = at::empty({slots, call.heads, call.key_dim, call.value_dim}, half);
  return h;
}

RecurrenceForward forward(const Recurrence& r, bool keep, bool want_final) {
  const auto call = call_of(r);
  const auto handed = make_handed(r, call, keep);
  RecurrenceForward result{.o = at::empty(r.v.sizes(), r.v.options()), .final = {}, .kept = {}};
  if (want_final) {
    const auto whole = r.q.options().dtype(at::kFloat);
    result.final = at::empty({call.sequences, call.heads, call.key_dim, call.value_dim}, whole);
  }
  on_gpu(r.q, [&](const auto& device) {
    kernels::cuda::chunked_memory(call, handed.pointers(), {.o = bits(result.o), .final = room(result.final)}, device);
  });
  if (keep) result.kept = {handed.tiles, handed.t, handed.u, handed.states};
  return result;
}

RecurrenceGradients backward(const Recurrence& r, const std::vector<at::Tensor>& kept, const at::Tensor& d_o,
                             const at::Tensor& d_final) {
  const auto call = call_of(r);
  const Handed handed{.tiles = kept[0], .t = kept[1], .u = kept[2], .states = kept[3]};
  const auto d = gradients_like(r);
  const auto slope = readable(d_o), d_u = at::empty(r.v.sizes(), r.v.options()),
             d_states = at::empty_like(handed.states);
  on_gpu(r.q, [&](const auto& device) {
    kernels::cuda::chunked_memory_backward(call, handed.pointers(),
                                           {.d_o = rows(slope),
                                            .d_final = numbers(d_final),
                                            .d_u = bits(d_u),
                                            .d_states = bits(d_states),
                                            .d_q = bits(d.q),
                                            .d_k = bits(d.k),
                                            .d_v = bits(d.v),
                                            .d_log_decay = room(d.log_decay),
                                            .d_beta = room(d.beta),
                                            .d_initial = room(d.initial)},
                                           device);
  });
  return d;
}

}  // namespace

const RecurrenceKernels kChunkedRecurrence{
    .takes = takes, .prepare = prepare, .forward = forward, .backward = backward};

bool has_recurrence_step(const RecurrenceStep& s) {
  if (needs_gradient(s)) return false;
  const auto type = s.q.scalar_type();
  const bool on_gpu = kHasCuda && s.q.is_cuda() && type != at::kDouble && s.k.scalar_type() == type &&
                      s.v.scalar_type() == type && s.q.size(-1) <= kernels::cuda::MemoryStep::kMaxKeys &&
                      s.v.size(-1) % 4 == 0 && s.pool.is_contiguous();
  return on_gpu || has_cpu_step(s);
}

at::Tensor recurrence_step(const RecurrenceStep& s) {
  if (s.q.is_cpu()) return cpu_step(s);
  const auto q = s.q.contiguous(), k = s.k.contiguous(), v = s.v.contiguous();
  const auto gate = [](const at::Tensor& x) { return x.defined() ? x.to(at::kFloat).contiguous() : x; };
  const auto log_decay = gate(s.log_decay), beta = gate(s.beta);
  const auto o = at::empty_like(v);
  const kernels::cuda::MemoryStep step{.batch = q.size(0),
                                       .heads = q.size(1),
                                       .key_dim = q.size(2),
                                       .value_dim = v.size(2),
                                       .delta = s.delta,
                                       .per_channel = log_decay.defined() && log_decay.dim() == q.dim(),
                                       .scale = static_cast<float>(s.scale),
                                       .dtype = kernel_dtype(q.scalar_type()),
                                       .q = bits(q),
                                       .k = bits(k),
                                       .v = bits(v),
                                       .log_decay = numbers(log_decay),
                                       .beta = numbers(beta),
                                       .slots = s.slots.defined() ? s.slots.const_data_ptr<std::int64_t>() : nullptr,
                                       .pool = room(s.pool),
                                       .o = bits(o)};
  on_gpu(q, [&](const auto& device) { kernels::cuda::memory_step(step, device); });
  return o;
}

}  // namespace gka::ops
