#include "ops/stored.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/cuda/int8_rows.h"
#include "kernels/products.h"
#include "ops/backends.h"
#include "ops/fused.h"
#include "ops/on_gpu.h"

namespace gka::ops {
namespace {

using kernels::StoredAs;

StoredAs stored_as(const at::Tensor& weight) {
  switch (weight.scalar_type()) {
    case at::kFloat: return StoredAs::float32;
    case at::kBFloat16: return StoredAs::bfloat16;
    case at::kChar: return StoredAs::int8;
    default: throw std::logic_error(std::string("there is no product with weights of ") + at::toString(weight.dtype()));
  }
}

/// Rows 0 … rows − 1, some at a time, on torch's threads.
template <typename Body>
void for_rows(std::int64_t rows, const Body& body) {
  constexpr std::int64_t kAtOnce = 64;
  const auto& executor = torch_executor();
  executor.run(static_cast<int>((rows + kAtOnce - 1) / kAtOnce), [&](int part) {
    for (auto row = part * kAtOnce; row < std::min((part + 1) * kAtOnce, rows); ++row) body(row);
  });
}

}  // namespace

std::vector<std::int64_t> int8_shape(std::int64_t out, std::int64_t in) { return {out, kernels::int8_row_bytes(in)}; }

void store(const at::Tensor& matrix, at::Tensor stored) {
  if (!is_int8(stored)) {
    stored.copy_(matrix);
    return;
  }
  const auto wide = matrix.to(at::kCPU, at::kFloat).contiguous();
  const auto in = wide.size(1), bytes = stored.size(1);
  const at::Tensor here = stored.is_cpu() ? stored : at::empty(stored.sizes(), at::kChar);
  for_rows(wide.size(0), [&](std::int64_t row) {
    kernels::to_int8(wide.const_data_ptr<float>() + row * in, in, here.mutable_data_ptr<std::int8_t>() + row * bytes);
  });
  if (!here.is_same(stored)) stored.copy_(here);
}

namespace {

/// By torch's operators, several passes over memory.
at::Tensor dense_in_passes(const at::Tensor& weight, std::int64_t in, at::ScalarType type) {
  if (!is_int8(weight)) return weight.to(type);
  const auto rows = weight.size(0), groups = kernels::int8_groups(in), numbers = groups * kernels::kInt8Group;
  const auto scales = weight.narrow(1, numbers, 4 * groups).contiguous().view(at::kFloat).unsqueeze(-1);
  const auto whole = weight.narrow(1, 0, numbers).unflatten(1, {groups, kernels::kInt8Group}).to(at::kFloat);
  return whole.mul(scales).to(type).view({rows, numbers}).narrow(1, 0, in);
}

}  // namespace

at::Tensor dense(const at::Tensor& weight, std::int64_t in, at::ScalarType type) {
  return dense_all({weight}, in, type)[0];
}

std::vector<at::Tensor> dense_all(at::TensorList weights, std::int64_t in, at::ScalarType type) {
  using kernels::cuda::Int8Rows;
  std::vector<at::Tensor> results;
  const auto bytes = [&](const at::Tensor& weight) {
    return is_int8(weight) && weight.is_cuda() && weight.is_contiguous() && is_aligned(weight);
  };
  if (!kHasCuda || type != at::kBFloat16 || !kernels::cuda::has_int8_rows(in) || weights.size() == 0 ||
      weights.size() > Int8Rows::kMostMatrices || !std::ranges::all_of(weights, bytes)) {
    for (const auto& weight : weights) results.push_back(dense_in_passes(weight, in, type));
    return results;
  }
  Int8Rows call{.in = in, .count = static_cast<int>(weights.size())};
  for (std::size_t i = 0; i < weights.size(); ++i) {
    results.push_back(at::empty({weights[i].size(0), in}, weights[i].options().dtype(type)));
    call.of[i] = {
        .stored = weights[i].const_data_ptr(), .numbers = results[i].mutable_data_ptr(), .rows = weights[i].size(0)};
  }
  on_gpu(weights.front(), [&](const auto& device) { kernels::cuda::expand(call, device); });
  return results;
}

bool scales_are_finite(const at::Tensor& stored) {
  const auto bytes = stored.size(1), groups = bytes / kernels::int8_row_bytes(1);
  const auto rows = stored.contiguous();
  for (std::int64_t row = 0; row < rows.size(0); ++row) {
    const auto* scales = rows.const_data_ptr<std::int8_t>() + row * bytes + groups * kernels::kInt8Group;
    for (std::int64_t g = 0; g < groups; ++g) {
      float scale = 0;
      std::memcpy(&scale, scales + 4 * g, sizeof scale);
      if (!std::isfinite(scale)) return false;
    }
  }
  return true;
}

bool takes_stored(const at::Tensor& x, const std::vector<at::Tensor>& weights) {
  if (!x.is_cpu() || x.scalar_type() != at::kFloat || x.numel() == 0) return false;
  if (at::GradMode::is_enabled() && x.requires_grad()) return false;
  const auto narrow = [](const at::Tensor& weight) {
    const auto type = weight.scalar_type();
    return (type == at::kBFloat16 || type == at::kChar) && weight.is_contiguous() &&
           !(at::GradMode::is_enabled() && weight.requires_grad());
  };
  return std::ranges::all_of(weights, narrow);
}

std::vector<at::Tensor> stored_products(const at::Tensor& x, const std::vector<at::Tensor>& weights) {
  const auto rows = x.reshape({-1, x.size(-1)}).contiguous();
  std::vector<at::Tensor> results;
  std::vector<kernels::StoredMatrix> matrices;
  for (const auto& weight : weights) {
    auto shape = x.sizes().vec();
    shape.back() = weight.size(0);
    results.push_back(at::empty(shape, x.options().requires_grad(false)));
    matrices.push_back({.data = weight.const_data_ptr(),
                        .type = stored_as(weight),
                        .out = weight.size(0),
                        .y = results.back().mutable_data_ptr<float>(),
                        .y_stride = weight.size(0)});
  }
  kernels::cpu::products({.x = rows.const_data_ptr<float>(),
                          .rows = rows.size(0),
                          .in = rows.size(1),
                          .x_stride = rows.size(1),
                          .matrices = matrices},
                         torch_executor());
  return results;
}

}  // namespace gka::ops
