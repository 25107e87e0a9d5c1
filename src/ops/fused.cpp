#include "ops/fused.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <stdexcept>
#include <string>

#include "kernels/cuda/fused.h"
#include "ops/backends.h"
#include "ops/checks.h"

namespace gka::ops {
namespace {

using kernels::cuda::kFusedVector;

#ifdef GKA_HAS_CUDA
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

/// body(device) with the CUDA kernels, which only a build that has them names.
template <typename Body>
void on_gpu(const at::Tensor& tensor, Body&& body) {
  if constexpr (kHasCuda) {
    on_cuda(tensor.device(), body);
  } else {
    throw std::logic_error("a fused operation was called on " + tensor.device().str() + ", where there is none");
  }
}

bool is_aligned(const at::Tensor& tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

kernels::cuda::SwiGlu swiglu_of(const at::Tensor& gate, const at::Tensor& up) {
  return {.size = gate.numel(),
          .dtype = kernel_dtype(gate.scalar_type()),
          .gate = gate.const_data_ptr(),
          .up = up.const_data_ptr()};
}

}  // namespace

bool has_fused(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return kHasCuda && tensor.is_cuda() && (type == at::kBFloat16 || type == at::kHalf || type == at::kFloat) &&
         tensor.numel() > 0 && tensor.size(-1) % kFusedVector == 0 && tensor.is_contiguous() && is_aligned(tensor);
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  const auto y = at::empty_like(gate);
  on_gpu(gate, [&](const auto& device) { kernels::cuda::swiglu(swiglu_of(gate, up), y.data_ptr(), device); });
  return y;
}

std::pair<at::Tensor, at::Tensor> swiglu_backward(const at::Tensor& d_y, const at::Tensor& gate, const at::Tensor& up) {
  const auto slope = d_y.contiguous();
  const auto d_gate = at::empty_like(gate), d_up = at::empty_like(up);
  on_gpu(gate, [&](const auto& device) {
    kernels::cuda::swiglu_backward(swiglu_of(gate, up), slope.const_data_ptr(), d_gate.data_ptr(), d_up.data_ptr(),
                                   device);
  });
  return {d_gate, d_up};
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign) {
  const auto y = at::empty_like(x);
  on_gpu(x, [&](const auto& device) {
    kernels::cuda::rotate({.tokens = cos.numel() / cos.size(-1),
                           .heads = x.size(-2),
                           .half = cos.size(-1),
                           .dtype = kernel_dtype(x.scalar_type()),
                           .x = x.const_data_ptr(),
                           .cos = cos.const_data_ptr<float>(),
                           .sin = sin.const_data_ptr<float>(),
                           .sign = static_cast<float>(sign)},
                          y.data_ptr(), device);
  });
  return y;
}

CrossEntropyRows cross_entropy_(at::Tensor logits, const at::Tensor& labels, std::int64_t classes,
                                const at::Tensor& scale, bool predict) {
  CrossEntropyRows rows{.losses = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat)), .predicted = {}};
  if (predict) rows.predicted = at::empty({logits.size(0)}, labels.options());
  on_gpu(logits, [&](const auto& device) {
    kernels::cuda::cross_entropy({.rows = logits.size(0),
                                  .classes = classes,
                                  .stride = logits.size(1),
                                  .dtype = kernel_dtype(logits.scalar_type()),
                                  .logits = logits.data_ptr(),
                                  .labels = labels.const_data_ptr<std::int64_t>(),
                                  .scale = scale.defined() ? scale.const_data_ptr<float>() : nullptr,
                                  .losses = rows.losses.data_ptr<float>(),
                                  .predicted = predict ? rows.predicted.data_ptr<std::int64_t>() : nullptr},
                                 device);
  });
  return rows;
}

}  // namespace gka::ops
