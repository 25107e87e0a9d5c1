// From the stream to heads: a projection, a short causal convolution, an activation, unit length; and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "gka/types.h"
#include "layers/config.h"
#include "layers/mixer.h"
#include "layers/parameters.h"
#include "ops/arguments.h"
#include "ops/projections.h"
#include "ops/recompute.h"

namespace gka::layers {

/// The weight of a projection, normal with the configuration's deviation; in `room` where that is given
/// (Scope::matrix_room).
at::Tensor projection_weight(std::string_view name, std::int64_t out, std::int64_t in, const MixerConfig& config,
                             const Scope& scope, const at::Tensor& room = {});
/// "name.bias", zero at the start and without weight decay.
at::Tensor projection_bias(std::string_view name, std::int64_t out, const Scope& scope);
/// "name.weight" of a norm: ones, without weight decay.
at::Tensor norm_weight(std::string_view name, std::int64_t size, const Scope& scope);

/// A depthwise causal convolution with SiLU after it; keeps the last width − 1 inputs as its state.
class ShortConv {
 public:
  ShortConv() = default;  // none: forward must not be called
  ShortConv(std::string_view name, std::int64_t channels, std::int64_t width, bool bias, const MixerConfig& config,
            const Scope& scope);

  explicit operator bool() const { return weight_.defined(); }
  const at::Tensor& weight() const { return weight_; }
  const at::Tensor& bias() const { return bias_; }
  bool has_bias() const { return bias_.defined(); }
  /// x [B,T,C] or [B,C] in a step. With a norm, each head_dim channels are brought to unit length.
  at::Tensor forward(const at::Tensor& x, Call& call, L2Norm norm = L2Norm::none, std::int64_t head_dim = 0) const;
  /// The arguments of a step's.
  ops::ConvCall step_call(const at::Tensor& x, Call& call, L2Norm norm, std::int64_t head_dim) const;
  /// y, which `forward` made of x, to be made again; where sequences begin in this call.
  ops::Remade remade(const at::Tensor& y, const at::Tensor& x, const Call& call, L2Norm norm,
                     std::int64_t head_dim) const;
  void add_fields(std::vector<StateField>& fields, at::ScalarType dtype) const;

 private:
  std::string name_;
  at::Tensor weight_, bias_;
};

struct HeadProjectionOptions {
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t conv_size = 0;  // 0: none
  bool conv_bias = false;
  Activation without_conv = Activation::silu;  // what stands in for the convolution's SiLU where there is none
  L2Norm norm = L2Norm::none;
};

/// "q_proj.weight" and "q_conv1d.weight" for the name "q".
class HeadProjection {
 public:
  HeadProjection(std::string_view name, const HeadProjectionOptions& options, const MixerConfig& config,
                 const Scope& scope, const at::Tensor& room = {});

  /// [B,T,heads,head_dim], or [B,heads,head_dim] in a step.
  at::Tensor forward(const at::Tensor& x, Call& call) const;
  /// The same in two parts: x Wᵀ with this weight, which a mixer may take together with others, and the rest.
  const at::Tensor& weight() const { return weight_; }
  at::Tensor finish(const at::Tensor& projected, Call& call) const;
  void add_fields(std::vector<StateField>& fields, at::ScalarType dtype) const { conv_.add_fields(fields, dtype); }
  const HeadProjectionOptions& options() const { return options_; }
  const ShortConv& conv() const { return conv_; }

 private:
  HeadProjectionOptions options_;
  at::Tensor weight_;
  ShortConv conv_;
};

/// All of a mixer's projections of its input: heads as HeadProjection::forward has them, and the others as they are.
/// Where heads are convolved and learn on a GPU, they are columns of one matrix product, with room for its gradient.
struct Projected {
  std::vector<at::Tensor> heads, others;
  std::vector<ops::Remade> remade;  // heads that training need not keep (ops::forget)
  c10::intrusive_ptr<ops::GradientRoom> room;
};
Projected project_heads(const at::Tensor& x, const std::vector<const HeadProjection*>& heads,
                        const std::vector<at::Tensor>& others, Call& call);

/// −exp(A_log)·softplus(projection + dt_bias) with its published start: A uniform in (low, 16), dt log-uniform in
/// (0.001, 0.1).
struct DecayParameters {
  at::Tensor a_log, dt_bias;
  at::Tensor operator()(const at::Tensor& projected) const;
};
DecayParameters decay_parameters(std::int64_t heads, const Scope& scope);
Init a_log_uniform(double low, double high);
Init dt_bias_log_uniform();

/// Keys or values of few heads for many: copies, or a learned mixture of them, plus a low-rank part of their own.
class HeadExpansion {
 public:
  struct Options {
    std::int64_t from = 0;  // heads
    std::int64_t to = 0;
    std::int64_t head_dim = 0;
    std::int64_t rank = 0;  // 0: copies alone
    bool learnable_residual = false;
  };
  HeadExpansion(std::string_view name, const Options& options, const MixerConfig& config, const Scope& scope);

  /// Whether heads are merely copied, so that what acts on each head by itself may act before.
  bool copies() const { return !down_.defined(); }
  at::Tensor forward(const at::Tensor& x) const;

 private:
  std::int64_t to_;
  at::Tensor mixture_, down_, up_;
};

/// RMS norm per head, times an activation of a gate where there is one, then the output projection.
class HeadOutput {
 public:
  struct Options {
    std::int64_t heads = 0;
    std::int64_t head_dim = 0;
    bool gate = true;
    double eps = 1e-5;
    std::string_view norm = "o_norm";  // its name
    Activation activation = Activation::silu;
    std::int64_t gate_rank = 0;  // > 0: the gate is g_proj.1(g_proj.0(x)), the second with bias
    at::Tensor gate_room{};      // for g_proj
  };
  HeadOutput(const Options& options, const MixerConfig& config, const Scope& scope);

  /// o [..., heads, head_dim]; x is what the mixer got.
  at::Tensor forward(const at::Tensor& o, const at::Tensor& x) const;
  /// The same in two parts where the gate is one projection: x Wᵀ with this weight (undefined: no gate), and the rest,
  /// added to the stream where there is one (Call::stream).
  const at::Tensor& gate_weight() const { return gate_; }
  at::Tensor finish(const at::Tensor& o, const at::Tensor& gate, const c10::intrusive_ptr<ops::GradientRoom>& room = {},
                    const at::Tensor& stream = {}) const;
  /// `finish` in two parts for who norms by itself: the norm's arguments but for o, and the output projection.
  ops::NormCall norm_call(const at::Tensor& gate) const;
  at::Tensor project_normed(const at::Tensor& normed, const at::Tensor& stream) const;

 private:
  Options options_;
  at::Tensor gate_, gate_up_, gate_bias_, norm_, out_;
};

/// `value`, or `otherwise` where it is 0.
constexpr std::int64_t or_else(std::int64_t value, std::int64_t otherwise) { return value != 0 ? value : otherwise; }
/// share · size, which must be a whole number; `what` names it in the error.
std::int64_t whole(double share, std::int64_t size, std::string_view what);
/// size / parts, which must be a whole number.
std::int64_t divided(std::int64_t size, std::int64_t parts, std::string_view what);

}  // namespace gka::layers
