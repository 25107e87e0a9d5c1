// The gates of every token and head from one projection, in one kernel, for tensors on a GPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "kernels/cuda/fused.h"

namespace gka::ops {

using kernels::cuda::Gate;
struct GateKind {
  Gate gate = Gate::sigmoid;
  at::Tensor bias, a_log;  // float32 [heads]; a_log for log_decay alone
};

/// Whether `gates` takes the projection, and the parameters.
bool has_gates(const at::Tensor& projected, const std::vector<GateKind>& kinds);

/// As the kernel sees them, without room for values.
kernels::cuda::Gates gates_of(const at::Tensor& projected, const std::vector<GateKind>& kinds);

/// projected [..., kinds · heads], contiguous or columns of what is; float32 [..., heads] for each kind. With
/// gradients.
std::vector<at::Tensor> gates(const at::Tensor& projected, const std::vector<GateKind>& kinds);

}  // namespace gka::ops
