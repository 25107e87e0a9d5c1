#include "ops/recurrence.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/autograd.h"
#include "ops/checks.h"
#include "ops/recurrence_paths.h"

namespace gka::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Longer sequences than this are not worth walking token by token.
constexpr std::int64_t kShort = 1024;

const RecurrenceKernels& kernels_of(RecurrencePath path) {
  switch (path) {
    case RecurrencePath::none: break;
    case RecurrencePath::cpu: return kCpuRecurrence;
    case RecurrencePath::tokens: return kTokenRecurrence;
    case RecurrencePath::chunks: return kChunkedRecurrence;
  }
  throw std::logic_error("recurrence: no kernel takes this call");
}

using Maybe = std::optional<at::Tensor>;  // as autograd takes tensors that may be undefined

Maybe maybe(const at::Tensor& tensor) { return tensor.defined() ? Maybe(tensor) : std::nullopt; }
at::Tensor or_undefined(const Maybe& tensor) { return tensor.value_or(at::Tensor()); }

/// o and, where it is wanted, the last state. What the backward pass needs is kept where `train` is set.
struct Recur : torch::autograd::Function<Recur> {
  static constexpr std::size_t kInputs = 7;

  static variable_list forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const Maybe& log_decay, const Maybe& beta, const Maybe& initial, const Maybe& bounds,
                               bool delta, double scale, std::int64_t path, bool train, bool want_final) {
    const Recurrence call{.q = q,
                          .k = k,
                          .v = v,
                          .log_decay = or_undefined(log_decay),
                          .beta = or_undefined(beta),
                          .initial = or_undefined(initial),
                          .bounds = or_undefined(bounds),
                          .delta = delta,
                          .scale = scale};
    const auto result = kernels_of(static_cast<RecurrencePath>(path)).forward(call, train, want_final);
    if (train) {
      variable_list saved{q, k, v, call.log_decay, call.beta, call.initial, call.bounds};
      saved.insert(saved.end(), result.kept.begin(), result.kept.end());
      context->save_for_backward(saved);
    }
    context->saved_data["delta"] = delta;
    context->saved_data["scale"] = scale;
    context->saved_data["path"] = path;
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
    const auto path = static_cast<RecurrencePath>(context->saved_data["path"].toInt());
    const auto d_o = slopes[0].defined() ? slopes[0] : at::zeros_like(call.v, at::MemoryFormat::Contiguous);
    const bool through_final = slopes.size() > 1 && slopes[1].defined();
    const auto d = kernels_of(path).backward(call, {saved.begin() + kInputs, saved.end()}, d_o,
                                             through_final ? slopes[1].contiguous() : at::Tensor());
    if (at::GradMode::is_enabled()) {
      variable_list inputs = saved;
      inputs.insert(inputs.end(), slopes.begin(), slopes.end());
      std::erase_if(inputs, [](const at::Tensor& x) { return !x.defined(); });
      forbid_second_derivative("memory", inputs, {d.q, d.k, d.v, d.log_decay, d.beta, d.initial});
    }
    return {d.q, d.k, d.v, d.log_decay, d.beta, d.initial, {}, {}, {}, {}, {}, {}};
  }
};

void check_shape(const char* name, const at::Tensor& tensor, at::IntArrayRef shape, at::IntArrayRef or_shape = {}) {
  if (!tensor.defined() || tensor.sizes() == shape || (!or_shape.empty() && tensor.sizes() == or_shape)) return;
  fail_value(c10::str("chunked_delta_rule: ", name, " takes the shape ", shape, or_shape.empty() ? "" : " or ",
                      or_shape.empty() ? std::string() : c10::str(or_shape), ", got ", tensor.sizes()));
}

/// The kernels read everything by the sizes of q and v.
void check_shapes(const Recurrence& r) {
  if (r.q.dim() != 4 || r.v.dim() != 4) {
    fail_value(c10::str("chunked_delta_rule: q and v take four dimensions [B, T, H, channels], got ", r.q.sizes(),
                        " and ", r.v.sizes()));
  }
  const auto of_token = r.q.sizes().slice(0, 3);
  const bool packed = r.bounds.defined();
  if (packed && (r.bounds.dim() != 1 || r.bounds.numel() < 2 || r.q.size(0) != 1)) {
    fail_value(c10::str("chunked_delta_rule: cu_seqlens takes one dimension, one entry more than there are sequences ",
                        "and q with batch size 1, got ", r.bounds.sizes(), " and q ", r.q.sizes()));
  }
  const auto sequences = packed ? r.bounds.numel() - 1 : r.q.size(0);
  check_shape("k", r.k, r.q.sizes());
  check_shape("v", r.v, {of_token[0], of_token[1], of_token[2], r.v.size(3)});
  check_shape("log_decay", r.log_decay, of_token, r.q.sizes());
  check_shape("beta", r.beta, of_token);
  check_shape("initial_state", r.initial, {sequences, of_token[2], r.q.size(3), r.v.size(3)});
}

bool any_needs_gradient(std::initializer_list<at::Tensor> inputs) {
  return at::GradMode::is_enabled() &&
         std::ranges::any_of(inputs, [](const at::Tensor& x) { return x.defined() && x.requires_grad(); });
}

}  // namespace

RecurrenceGradients gradients_like(const Recurrence& r) {
  const auto like = [](const at::Tensor& x) { return x.defined() ? at::empty(x.sizes(), x.options()) : x; };
  return {.q = like(r.q),
          .k = like(r.k),
          .v = like(r.v),
          .log_decay = like(r.log_decay),
          .beta = like(r.beta),
          .initial = like(r.initial)};
}

bool needs_gradient(const RecurrenceStep& s) {
  return any_needs_gradient({s.q, s.k, s.v, s.log_decay, s.beta, s.pool});
}

RecurrencePath recurrence_path(const Recurrence& r, std::int64_t longest) {
  if (kCpuRecurrence.takes(r)) return RecurrencePath::cpu;
  if (kChunkedRecurrence.takes(r)) return RecurrencePath::chunks;
  return longest <= kShort && kTokenRecurrence.takes(r) ? RecurrencePath::tokens : RecurrencePath::none;
}

RecurrenceResult recurrence(const Recurrence& r, RecurrencePath path, bool want_final) {
  const auto p = kernels_of(path).prepare(r);
  const bool train = any_needs_gradient({p.q, p.k, p.v, p.log_decay, p.beta, p.initial});
  const auto results = Recur::apply(p.q, p.k, p.v, maybe(p.log_decay), maybe(p.beta), maybe(p.initial), maybe(p.bounds),
                                    p.delta, p.scale, static_cast<std::int64_t>(path), train, want_final);
  return {.o = results[0].to(r.v.scalar_type()), .final = want_final ? results[1] : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> chunked_delta_rule(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                      const Maybe& log_decay, const Maybe& beta, double scale,
                                                      bool delta, const Maybe& initial_state, bool output_final_state,
                                                      const Maybe& cu_seqlens) {
  const Recurrence r{.q = q,
                     .k = k,
                     .v = v,
                     .log_decay = or_undefined(log_decay),
                     .beta = or_undefined(beta),
                     .initial = or_undefined(initial_state),
                     .bounds = cu_seqlens.has_value() ? cu_seqlens->to(q.device(), at::kLong) : at::Tensor(),
                     .delta = delta,
                     .scale = scale};
  check_shapes(r);
  if (!kChunkedRecurrence.takes(r)) {
    throw c10::NotImplementedError(
        "chunked_delta_rule: q, k and v take bfloat16 on a GPU, widths that are multiples of 8 and keys of at most "
        "128, got " +
        std::string(c10::toString(q.scalar_type())) + " on " + q.device().str() + " with keys of " +
        std::to_string(q.size(-1)) + " and values of " + std::to_string(v.size(-1)));
  }
  auto result = recurrence(r, RecurrencePath::chunks, output_final_state);
  return {result.o, output_final_state ? result.final : at::empty({0}, q.options().dtype(at::kFloat))};
}

}  // namespace gka::ops
