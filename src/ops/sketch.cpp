#include "ops/sketch.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/sum.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "kernels/cuda/sketch.h"
#include "kernels/cuda/trial.h"
#include "ops/autograd.h"
#include "ops/checks.h"
#include "ops/fused.h"
#include "ops/on_gpu.h"

namespace gka::ops {
namespace {

using kernels::cuda::MemoryRows;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Maybe = std::optional<at::Tensor>;  // as autograd takes tensors that may be undefined

at::Tensor or_undefined(const Maybe& tensor) { return tensor.value_or(at::Tensor()); }

at::Tensor room(const at::Tensor& rows, std::int64_t width) {
  auto shape = rows.sizes().vec();
  shape.back() = width;
  return at::empty(shape, rows.options());
}

/// [...,H,D] as [H,N,D]: a view wherever tokens lie one behind the other.
at::Tensor by_head(const at::Tensor& x) { return x.flatten(0, -3).transpose(0, 1); }

/// α as a factor of rows.
at::Tensor factor(const at::Tensor& alpha, at::ScalarType type) { return alpha.to(type).unsqueeze(-1); }

// ---- The kernels' side

/// Rows of eight numbers and more, tokens one behind the other.
bool is_readable(const at::Tensor& x) {
  const auto whole = [&](std::int64_t i) { return x.stride(i) % 8 == 0; };
  return x.stride(-1) == 1 && whole(-2) && whole(-3) &&
         (x.dim() == 3 || x.size(0) == 1 || x.stride(0) == x.size(1) * x.stride(1)) && is_aligned(x);
}
at::Tensor readable(const at::Tensor& x) { return is_readable(x) ? x : x.clone(at::MemoryFormat::Contiguous); }

bool has_kernels_for(const at::Tensor& x, const at::Tensor& p) {
  return has_kernels(x) && x.scalar_type() == at::kBFloat16 && (x.dim() == 3 || x.dim() == 4) && is_aligned(p) &&
         kernels::cuda::has_sketch(p.size(2), p.size(1)) && kernels::cuda::on_trial(kernels::cuda::Trial::sketch);
}

MemoryRows rows(const at::Tensor& x) {
  return {.data = x.const_data_ptr(), .token_stride = x.stride(-3), .head_stride = x.stride(-2)};
}

/// `alpha` as the kernels read it, or undefined.
kernels::cuda::Sketch call_of(const at::Tensor& x, const at::Tensor& p, const at::Tensor& alpha) {
  return {.tokens = x.numel() / (x.size(-2) * x.size(-1)),
          .heads = p.size(0),
          .wide = p.size(2),
          .low = p.size(1),
          .p = p.const_data_ptr(),
          .alpha = alpha.defined() ? alpha.const_data_ptr<float>() : nullptr};
}
at::Tensor as_read(const at::Tensor& alpha) { return alpha.defined() ? alpha.to(at::kFloat).contiguous() : alpha; }

// ---- What both functions are made of. p is of the rows' type and contiguous.

/// P x.
at::Tensor down(const at::Tensor& x, const at::Tensor& p) {
  const auto low = room(x, p.size(1));
  auto to = by_head(low);
  at::bmm_out(to, by_head(x), p.transpose(1, 2));
  return low;
}

/// Pᵀ low.
at::Tensor up(const at::Tensor& low, const at::Tensor& p) {
  const auto x = room(low, p.size(2));
  auto to = by_head(x);
  at::bmm_out(to, by_head(low), p);
  return x;
}

/// base + Pᵀ low, with α (1 − α) base + α Pᵀ low.
at::Tensor joined(const at::Tensor& base, const at::Tensor& low, const at::Tensor& p, const at::Tensor& alpha) {
  if (has_kernels_for(base, p)) {
    const auto onto = readable(base), from = readable(low), kept = as_read(alpha), to = room(base, p.size(2));
    on_gpu(base, [&](const auto& device) {
      kernels::cuda::from_sketch(call_of(base, p, kept), rows(onto), rows(from), to.data_ptr(), device);
    });
    return to;
  }
  auto x = up(low, p);
  if (!alpha.defined()) return x.add_(base);
  return at::lerp_out(x, base, x, factor(alpha, base.scalar_type()));
}

struct Slopes {
  at::Tensor base, low, alpha;
};

/// The gradients of `joined` with α.
Slopes slopes_of_joined(const at::Tensor& d, const at::Tensor& base, const at::Tensor& low, const at::Tensor& p,
                        const at::Tensor& alpha) {
  if (has_kernels_for(base, p)) {
    const auto slope = readable(d), onto = readable(base), from = readable(low), kept = as_read(alpha);
    const Slopes to{
        .base = room(base, p.size(2)), .low = room(base, p.size(1)), .alpha = at::empty(kept.sizes(), kept.options())};
    on_gpu(base, [&](const auto& device) {
      kernels::cuda::from_sketch_backward(call_of(base, p, kept),
                                          {.d = rows(slope),
                                           .base = rows(onto),
                                           .low = rows(from),
                                           .d_base = to.base.data_ptr(),
                                           .d_low = to.low.data_ptr(),
                                           .d_alpha = to.alpha.data_ptr<float>()},
                                          device);
    });
    return to;
  }
  // dα = (Pᵀ low − base)·d = low·P d − base·d: Pᵀ low need not be made again.
  const auto wide = accumulation_type(base);
  const auto inside = down(d, p), open = factor(alpha, base.scalar_type());
  const auto dot = [&](const at::Tensor& a, const at::Tensor& b) { return at::sum(a * b, -1, false, wide); };
  return {.base = d * (1 - open), .low = inside * open, .alpha = dot(low, inside) - dot(base, d)};
}

/// Of Σ low·(P x) to P [H,S,D]; with α of Σ α low·(P x).
struct Pair {
  at::Tensor low, x, alpha;
};

/// The sum of all pairs' gradients, in `type`.
at::Tensor slope_of_sketch(const std::vector<Pair>& pairs, const at::Tensor& p, at::ScalarType type) {
  if (std::ranges::all_of(pairs, [&](const Pair& pair) { return has_kernels_for(pair.x, p); })) {
    const auto stretches = call_of(pairs.front().x, p, {}).stretches();
    const auto count = static_cast<std::int64_t>(pairs.size());
    const auto parts = at::empty({count, stretches, p.size(0), p.size(1), p.size(2)}, p.options().dtype(at::kFloat));
    for (std::int64_t i = 0; i < count; ++i) {
      const auto& pair = pairs[static_cast<std::size_t>(i)];
      const auto low = readable(pair.low), x = readable(pair.x), alpha = as_read(pair.alpha);
      on_gpu(x, [&](const auto& device) {
        kernels::cuda::sketch_products(call_of(x, p, alpha), rows(low), rows(x), parts[i].data_ptr<float>(), device);
      });
    }
    return parts.sum(at::IntArrayRef{0, 1}).to(type);
  }
  at::Tensor sum;
  for (const auto& pair : pairs) {
    const auto low = pair.alpha.defined() ? pair.low * factor(pair.alpha, pair.low.scalar_type()) : pair.low;
    const auto own = at::bmm(by_head(low).transpose(1, 2), by_head(pair.x)).to(type);
    sum = sum.defined() ? sum.add_(own) : own;
  }
  return sum;
}

at::Tensor in_type(const at::Tensor& sketch, const at::Tensor& x) { return sketch.to(x.scalar_type()).contiguous(); }

/// What a backward pass does, below autograd: its products are written into room that is already there.
template <typename Body>
variable_list without_gradient(const variable_list& inputs, Body&& body) {
  variable_list results;
  {
    const at::NoGradGuard no_gradient;
    results = body();
  }
  if (at::GradMode::is_enabled()) {
    variable_list given = inputs;
    std::erase_if(given, [](const at::Tensor& x) { return !x.defined(); });
    forbid_second_derivative("sketch", given, results);
  }
  return results;
}

variable_list joined_lists(variable_list first, const variable_list& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

struct ToSketch : torch::autograd::Function<ToSketch> {
  static variable_list forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& sketch) {
    const auto p = in_type(sketch, q);
    context->save_for_backward({q, k, p});
    context->saved_data["type"] = sketch.scalar_type();
    context->set_materialize_grads(false);
    return {down(q, p), down(k, p), q, k};
  }

  static variable_list backward(AutogradContext* context, const variable_list& slopes) {
    const auto kept = context->get_saved_variables();
    const auto& p = kept[2];
    return without_gradient(joined_lists(kept, slopes), [&] {
      variable_list results(3);
      std::vector<Pair> pairs;
      for (std::size_t i = 0; i < 2; ++i) {
        const auto &d_low = slopes[i], &d_same = slopes[2 + i];
        if (d_low.defined()) pairs.push_back({.low = d_low, .x = kept[i], .alpha = {}});
        if (!context->needs_input_grad(i)) continue;
        results[i] = !d_low.defined() ? d_same : !d_same.defined() ? up(d_low, p) : joined(d_same, d_low, p, {});
      }
      if (context->needs_input_grad(2) && !pairs.empty()) {
        results[2] = slope_of_sketch(pairs, p, context->saved_data["type"].toScalarType());
      }
      return results;
    });
  }
};

/// q and α are the last, because only what is given counts among the inputs.
struct FromSketch : torch::autograd::Function<FromSketch> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& z, const at::Tensor& sketch, const Maybe& q,
                            const Maybe& alpha) {
    const auto p = in_type(sketch, z);
    context->save_for_backward({z, p, or_undefined(q), or_undefined(alpha)});
    context->saved_data["type"] = sketch.scalar_type();
    return alpha.has_value() ? joined(*q, z, p, *alpha) : up(z, p);
  }

  static variable_list backward(AutogradContext* context, const variable_list& slopes) {
    const auto kept = context->get_saved_variables();
    const auto &z = kept[0], &p = kept[1], &q = kept[2], &alpha = kept[3], &d = slopes[0];
    return without_gradient(joined_lists(kept, slopes), [&] {
      Slopes to;
      if (alpha.defined()) {
        to = slopes_of_joined(d, q, z, p, alpha);
        to.alpha = to.alpha.to(alpha.scalar_type());
      } else {
        to.low = down(d, p);
      }
      const auto d_sketch = context->needs_input_grad(1) ? slope_of_sketch({{.low = z, .x = d, .alpha = alpha}}, p,
                                                                           context->saved_data["type"].toScalarType())
                                                         : at::Tensor();
      return variable_list{to.low, d_sketch, to.base, to.alpha};
    });
  }
};

// ---- What they take

void check_sketch(const char* op, const at::Tensor& q, const at::Tensor& sketch) {
  if (sketch.dim() != 3) {
    fail_value(c10::str(op, ": sketch takes three dimensions [H, S, D], got ", sketch.sizes()));
  }
  if (q.dim() < 3 || q.size(-2) != sketch.size(0) || q.size(-1) != sketch.size(2)) {
    fail_value(c10::str(op, ": q takes the shape [..., ", sketch.size(0), ", ", sketch.size(2), "] beside a sketch of ",
                        sketch.sizes(), ", got ", q.sizes()));
  }
}

void check_same(const char* op, const char* name, const at::Tensor& x, at::IntArrayRef shape) {
  if (x.sizes() != shape) fail_value(c10::str(op, ": ", name, " takes the shape ", shape, ", got ", x.sizes()));
}

void check_type(const char* op, const char* name, const at::Tensor& x, const at::Tensor& like) {
  if (x.scalar_type() == like.scalar_type()) return;
  fail_type(c10::str(op, ": ", name, " takes the type of q, ", like.scalar_type(), ", got ", x.scalar_type()));
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> to_sketch(const at::Tensor& q, const at::Tensor& k,
                                                                     const at::Tensor& sketch) {
  check_sketch("to_sketch", q, sketch);
  check_same("to_sketch", "k", k, q.sizes());
  check_type("to_sketch", "k", k, q);
  const auto results = ToSketch::apply(q, k, sketch);
  return {results[0], results[1], results[2], results[3]};
}

at::Tensor from_sketch(const at::Tensor& q, const at::Tensor& z, const at::Tensor& sketch, const Maybe& alpha) {
  check_sketch("from_sketch", q, sketch);
  auto shape = q.sizes().vec();
  shape.back() = sketch.size(1);
  check_same("from_sketch", "z", z, shape);
  check_type("from_sketch", "z", z, q);
  const bool mixes = alpha.has_value() && alpha->defined();
  if (mixes) check_same("from_sketch", "alpha", *alpha, q.sizes().slice(0, static_cast<std::size_t>(q.dim() - 1)));
  return FromSketch::apply(z, sketch, mixes ? Maybe(q) : std::nullopt, mixes ? alpha : std::nullopt);
}

}  // namespace gka::ops
