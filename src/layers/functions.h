// The small functions layers are made of. Each is differentiable and computes in float32 (float64 for float64)
// whatever the type of its input, which is also the type of its result.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "gka/types.h"
#include "layers/parameters.h"
#include "ops/add_norm.h"
#include "ops/gates.h"
#include "ops/linear.h"

namespace gka::layers {

/// float64 stays float64; all else is computed in float32.
inline at::ScalarType accumulation_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}
inline at::Tensor accumulate(const at::Tensor& x) { return x.to(accumulation_type(x)); }

/// What lies on the CPU, on `device`. It goes through pinned memory, so that nobody waits for what a GPU still
/// computes.
at::Tensor upload(const at::Tensor& x, at::Device device);

using ops::is_learning;

/// x Wᵀ + b in the type of x.
at::Tensor project(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {});

/// x Wᵀ for each of the weights. The same as that many calls of `project`, but what they give back to x is added up at
/// once.
using ops::project_all;

/// The same of x's `rms_norm`, and `onto` + x Wᵀ + b. Where x has few rows, on a GPU, norm and sum are part of the
/// products.
using ops::InputNorm;
std::vector<at::Tensor> project_all(const at::Tensor& x, const std::vector<at::Tensor>& weights, const InputNorm& norm);
at::Tensor project_onto(const at::Tensor& onto, const at::Tensor& x, const at::Tensor& weight,
                        const at::Tensor& bias = {});

/// x / √(mean(x²) + eps) · weight over the last dimension.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

/// What a block of a decoder begins with: x + y, and its `rms_norm`. With y undefined the sum is x.
using ops::AddNorm;
AddNorm add_norm(const at::Tensor& x, const at::Tensor& y, const at::Tensor& weight, double eps);

at::Tensor activated(const at::Tensor& x, Activation activation);

/// x scaled to unit length over the last dimension; eps is 1e-6.
at::Tensor unit_norm(const at::Tensor& x, L2Norm norm);

/// The rotary embedding: at position p channel i turns with channel i + D/2 by p · theta^(−2i/D).
struct Rotation {
  at::Tensor cos, sin;  // [..., 1, D/2]
};
/// For positions […] and D channels (even) of activations of `dtype`.
Rotation rotation(const at::Tensor& positions, std::int64_t channels, double theta, at::ScalarType dtype);
/// x [..., heads, D].
at::Tensor rotate(const at::Tensor& x, const Rotation& by);

/// Consecutive copies of each head until there are `heads`: [..., H, D] to [..., heads, D].
at::Tensor repeat_heads(const at::Tensor& x, std::int64_t heads);

// On a CPU a row of these has the same bits whatever rows stand beside it, unless the parameters they are given learn:
// bias, A_log, or the weight of the projection.

/// softplus(projected + bias), at least float32. `a_log` is what it will be multiplied by, if that may learn.
at::Tensor softplus_gate(const at::Tensor& projected, const at::Tensor& bias, const at::Tensor& a_log = {});

/// −exp(A_log) · softplus(projected + dt_bias), at least float32.
at::Tensor log_decay(const at::Tensor& projected, const at::Tensor& a_log, const at::Tensor& dt_bias);

/// sigmoid(projected + bias), at least float32.
at::Tensor sigmoid_gate(const at::Tensor& projected, const at::Tensor& bias = {}, const at::Tensor& weight = {});

at::Tensor silu(const at::Tensor& x, const at::Tensor& weight);

/// gate(projected) for a gate with a number for each channel, which reads no tensors with a gradient but `parameters`
/// besides. On a GPU what it computes on the way, in float32, is computed again in the backward pass.
at::Tensor wide_gate(const std::function<at::Tensor(const at::Tensor&)>& gate, const at::Tensor& projected,
                     const std::vector<at::Tensor>& parameters);

/// A gate for every token and head: `log_decay`, `sigmoid_gate`, or its square, which published checkpoints have for β.
using ops::Gate;
using ops::GateKind;
/// Several gates from one projection, [..., kinds · heads]: at least float32 [..., heads] for each.
std::vector<at::Tensor> open_gates(const at::Tensor& projected, const std::vector<GateKind>& kinds);

/// Qwen3's feed-forward part: down(SiLU(gate x) · up x).
class SwiGlu {
 public:
  SwiGlu(std::int64_t hidden, std::int64_t intermediate, double initializer_range, const Scope& scope);
  at::Tensor forward(const at::Tensor& x) const;
  /// x + forward(x normed).
  at::Tensor onto(const at::Tensor& x, const InputNorm& norm) const;

 private:
  SwiGlu(std::int64_t hidden, std::int64_t intermediate, double initializer_range, const Scope& scope, SharedRoom room);
  bool is_fused(const at::Tensor& x) const;

  at::Tensor gate_, up_, down_;
};

}  // namespace gka::layers
