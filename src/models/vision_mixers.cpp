#include "models/vision_mixers.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv1d.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "layers/functions.h"
#include "layers/kinds.h"
#include "layers/mixers.h"

namespace gka::models {
namespace {

constexpr double kDeviation = 0.02;

at::Tensor matrix(std::string_view name, std::int64_t out, std::int64_t in, const layers::Scope& scope) {
  return (scope / name).add_matrix("weight", {out, in}, layers::init::normal(kDeviation));
}

class Memory final : public WindowMixer {
 public:
  Memory(const VisionConfig& config, std::size_t level, const layers::Scope& scope)
      : mixer_(kind_of(config.mixer).make(config.memory_of(level), scope)) {}

  at::Tensor forward(const at::Tensor& x, const layers::Sequences& sequences) const override {
    return mixer_->forward(x, sequences).y;
  }

 private:
  static const layers::MixerKind& kind_of(std::string_view prefix) {
    return *std::ranges::find(layers::mixer_kinds(), prefix, &layers::MixerKind::prefix);
  }

  std::unique_ptr<layers::Mixer> mixer_;
};

class Attention final : public WindowMixer {
 public:
  Attention(std::int64_t width, std::int64_t heads, const layers::Scope& scope)
      : heads_(heads), qkv_(3 * width, width, scope / "qkv"), proj_(width, width, scope / "proj") {}

  at::Tensor forward(const at::Tensor& x, const layers::Sequences&) const override {
    const auto qkv = qkv_.forward(x).unflatten(-1, {3, heads_, -1}).permute({2, 0, 3, 1, 4});  // [3, B, heads, T, D]
    const auto y = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2]);
    return proj_.forward(y.transpose(1, 2).flatten(2));
  }

 private:
  std::int64_t heads_;
  Affine qkv_, proj_;
};

/// MambaVision's: both halves of a projection go through a convolution that sees to either side; the first half through
/// Mamba's selective scan, h ← e^{ΔA} h + Δ B x, y = C·h + D x, with a state for every channel; out of both.
class MambaVision final : public WindowMixer {
 public:
  MambaVision(const MambaVisionConfig& config, std::int64_t width, const layers::Scope& scope)
      : config_(config), half_(width / 2), rank_((width + 15) / 16) {
    using layers::WeightDecay;
    const auto& c = config_;
    in_ = matrix("in_proj", width, width, scope);
    x_proj_ = matrix("x_proj", rank_ + 2 * c.state_size, half_, scope);
    dt_proj_ = Affine(half_, rank_, scope / "dt_proj");
    const auto counting = [](at::Tensor& t, const at::Generator&) {
      t.copy_(at::arange(1, t.size(1) + 1, t.options()).log().expand_as(t));
    };
    a_log_ = scope.add("A_log", {half_, c.state_size}, counting, WeightDecay::no);
    skip_ = scope.add("D", {half_}, layers::init::constant(1), WeightDecay::no);
    const double bound = 1.0 / std::sqrt(static_cast<double>(c.conv_size));
    const auto conv = [&](const char* name) {
      return (scope / name).add("weight", {half_, 1, c.conv_size}, layers::init::uniform(-bound, bound));
    };
    conv_x_ = conv("conv1d_x");
    conv_z_ = conv("conv1d_z");
    out_ = matrix("out_proj", width, width, scope);
  }

  at::Tensor forward(const at::Tensor& input, const layers::Sequences&) const override {
    const auto parts = layers::project(input, in_).transpose(1, 2).split(half_, 1);
    const auto x = convolved(parts[0], conv_x_), z = convolved(parts[1], conv_z_);  // [B, T, half]
    return layers::project(at::cat({scanned(x), z}, -1), out_);
  }

 private:
  at::Tensor convolved(const at::Tensor& x, const at::Tensor& weight) const {
    const auto y = at::conv1d(x, weight.to(x.scalar_type()), {}, /*stride=*/1, /*padding=*/config_.conv_size / 2,
                              /*dilation=*/1, /*groups=*/half_);
    return at::silu(y).transpose(1, 2);
  }

  at::Tensor scanned(const at::Tensor& x) const {
    const auto states = config_.state_size;
    const auto parts = layers::project(x, x_proj_).split_with_sizes({rank_, states, states}, -1);
    // The bias counts twice, in the projection and again before the softplus: so the published weights were trained.
    const auto dt = at::softplus(layers::accumulate(dt_proj_.forward(parts[0])) + layers::accumulate(dt_proj_.bias));
    const auto decay = (dt.unsqueeze(-1) * layers::accumulate(a_log_).exp().neg()).exp();  // [B, T, half, states]
    const auto write = (dt * layers::accumulate(x)).unsqueeze(-1) * layers::accumulate(parts[1]).unsqueeze(2);
    const auto y = at::matmul(states_of(decay, write), layers::accumulate(parts[2]).unsqueeze(-1)).squeeze(-1);
    return (y + layers::accumulate(x) * skip_).to(x.scalar_type());
  }

  /// h_t = decay_t h_{t−1} + write_t for all t. Token by token: a window has few, and with a state of its own for every
  /// channel the matrix products of a chunked memory are four times as slow on a CPU.
  static at::Tensor states_of(const at::Tensor& decay, const at::Tensor& write) {
    const auto decays = decay.unbind(1), writes = write.unbind(1);
    std::vector<at::Tensor> states{writes[0]};
    for (std::size_t t = 1; t < writes.size(); ++t) states.push_back(at::addcmul(writes[t], decays[t], states.back()));
    return at::stack(states, 1);
  }

  MambaVisionConfig config_;
  std::int64_t half_, rank_;
  at::Tensor in_, x_proj_, a_log_, skip_, conv_x_, conv_z_, out_;
  Affine dt_proj_;
};

}  // namespace

Affine::Affine(std::int64_t out, std::int64_t in, const layers::Scope& scope)
    : weight(scope.add_matrix("weight", {out, in}, layers::init::normal(kDeviation))),
      bias(scope.add("bias", {out}, layers::init::constant(0), layers::WeightDecay::no)) {}

at::Tensor Affine::forward(const at::Tensor& x) const { return layers::project(x, weight, bias); }

std::unique_ptr<WindowMixer> make_window_mixer(const VisionConfig& config, std::size_t level, std::int64_t block,
                                               const layers::Scope& scope) {
  const auto width = config.width(level);
  if (config.attends(level, block)) return std::make_unique<Attention>(width, config.heads[level], scope);
  if (config.mixer == kMambaVision) return std::make_unique<MambaVision>(config.mamba, width, scope);
  return std::make_unique<Memory>(config, level, scope);
}

}  // namespace gka::models
