#include "ops/gated_skip.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "kernels/cuda/fused.h"
#include "ops/checks.h"
#include "ops/fused.h"
#include "ops/on_gpu.h"

namespace gka::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Rows of [B,T,…] are vectors without gaps, one every stride(1) numbers.
bool has_rows(const at::Tensor& x) {
  std::int64_t next = 1;
  for (auto i = x.dim() - 1; i > 1; --i) {
    if (x.size(i) > 1 && x.stride(i) != next) return false;
    next *= x.size(i);
  }
  return x.stride(1) % kFusedMultiple == 0 && (x.size(0) == 1 || x.stride(0) == x.size(1) * x.stride(1)) &&
         is_aligned(x);
}

kernels::cuda::GatedSkip call_of(const at::Tensor& x, const at::Tensor& v, const at::Tensor& gate,
                                 const at::Tensor& skip) {
  return {.rows = gate.size(0) * gate.size(1),
          .width = gate.size(2),
          .head_dim = x.size(3),
          .x_stride = x.stride(1),
          .v_stride = v.stride(1),
          .gate_stride = gate.stride(1),
          .dtype = kernel_dtype(x.scalar_type()),
          .x = x.const_data_ptr(),
          .v = v.const_data_ptr(),
          .gate = gate.const_data_ptr(),
          .skip = skip.const_data_ptr<float>()};
}

struct GatedSkip : torch::autograd::Function<GatedSkip> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& v, const at::Tensor& gate,
                            const at::Tensor& skip) {
    context->save_for_backward({x, v, gate, skip});
    const auto y = at::empty(gate.sizes(), gate.options());
    on_gpu(x, [&](const auto& device) { kernels::cuda::gated_skip(call_of(x, v, gate, skip), y.data_ptr(), device); });
    return y;
  }

  static variable_list backward(AutogradContext* context, const variable_list& slopes) {
    const auto kept = context->get_saved_variables();
    const auto &x = kept[0], &v = kept[1], &gate = kept[2], &skip = kept[3];
    const auto call = call_of(x, v, gate, skip);
    const auto d_y = slopes[0].contiguous();
    const auto like = [](const at::Tensor& t) { return at::empty(t.sizes(), t.options()); };
    const auto d_x = like(x), d_v = like(v), d_gate = like(gate);
    const auto d_skip = at::empty({call.stretches(), skip.size(0), call.head_dim / kFusedMultiple}, skip.options());
    on_gpu(x, [&](const auto& device) {
      kernels::cuda::gated_skip_backward(call,
                                         {.d_y = d_y.const_data_ptr(),
                                          .d_x = d_x.data_ptr(),
                                          .d_v = d_v.data_ptr(),
                                          .d_gate = d_gate.data_ptr(),
                                          .d_skip = d_skip.data_ptr<float>()},
                                         device);
    });
    return {d_x, d_v, d_gate, d_skip.sum(at::IntArrayRef{0, 2})};
  }
};

}  // namespace

bool has_gated_skip(const at::Tensor& x, const at::Tensor& v, const at::Tensor& gate) {
  const auto type = x.scalar_type();
  return has_kernels(x) && x.dim() == 4 && x.size(3) % kFusedMultiple == 0 && v.scalar_type() == type &&
         gate.scalar_type() == type && has_rows(x) && has_rows(v) && has_rows(gate);
}

at::Tensor gated_skip(const at::Tensor& x, const at::Tensor& v, const at::Tensor& gate, const at::Tensor& skip) {
  return GatedSkip::apply(x, v, gate, skip.to(at::kFloat).contiguous());
}

}  // namespace gka::ops
