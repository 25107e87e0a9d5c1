// MesaNet: the same two memories as Gated KalmaNet, solved by conjugate gradients with a learned diagonal ridge that
// does not follow the size of H.
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/softplus.h>

#include <cmath>

#include "gka/gka.h"
#include "layers/functions.h"
#include "layers/head_sizes.h"
#include "layers/memory.h"
#include "layers/mixers.h"
#include "layers/projection.h"

namespace gka::layers {
namespace {

class MesaNet final : public Mixer {
 public:
  MesaNet(const MesaConfig& c, const MixerConfig& config, const Scope& scope)
      : config_(c),
        heads_(or_else(c.num_heads, config.num_attention_heads)),
        size_(head_size("a key", or_else(c.head_dim, config.head_dim))),
        query_("q", head_options(c.conv_size, Activation::silu, L2Norm::rsqrt), config, scope),
        key_("k", head_options(c.conv_size, Activation::silu, L2Norm::rsqrt), config, scope),
        value_("v", head_options(0, Activation::none, L2Norm::none), config, scope),
        output_({.heads = heads_, .head_dim = size_, .gate = c.use_gate, .eps = c.norm_eps}, config, scope) {
    decay_ = projection_weight("a_proj", heads_, config.hidden_size, config, scope);
    decay_bias_ = projection_bias("a_proj", heads_, scope);
    beta_ = projection_weight("b_proj", heads_, config.hidden_size, config, scope);
    beta_bias_ = projection_bias("b_proj", heads_, scope);
    // softplus of it is 1 − bound, so that Λ starts at 1.
    const double start = std::log(std::expm1(1.0 - c.lambda_lower_bound));
    lambda_ = scope.add("lambda_params", {heads_ * size_}, init::constant(start), WeightDecay::no);
  }

  std::vector<StateField> state_fields(at::ScalarType dtype) const override {
    std::vector<StateField> fields;
    query_.add_fields(fields, dtype);
    key_.add_fields(fields, dtype);
    fields.push_back(memory_field(heads_, size_, size_, dtype));
    fields.back().name = "h";
    fields.push_back(memory_field(heads_, size_, size_, dtype));
    fields.back().name = "u";
    return fields;
  }

  double flops(std::int64_t) const override {
    return solve_flops(heads_, size_, config_.num_iter, /*unrolled=*/false) +
           memory_flops(heads_, size_, size_, MemoryRule::add);
  }

 protected:
  at::Tensor mix(const at::Tensor& x, Call& call) const override {
    const auto q = query_.forward(x, call);
    const auto k = key_.forward(x, call);
    const auto v = value_.forward(x, call);
    const auto log_decay = at::log_sigmoid(accumulate(project(x, decay_, decay_bias_)));
    const auto beta = sigmoid_gate(project(x, beta_), beta_bias_);
    const auto ridge =
        (at::softplus(lambda_.to(beta.scalar_type())) + config_.lambda_lower_bound).view({heads_, size_});
    const auto h = call.take();
    if (call.is_step()) {
      const auto o = gated_kalmanet_step(q, k, v, log_decay, beta, {},
                                         {.state = {.h = h, .u = call.take()},
                                          .state_indices = call.slots(),
                                          .ridge = ridge,
                                          .iterations = config_.num_iter,
                                          .solver = Solver::conjugate_gradient,
                                          .ridge_mode = RidgeMode::constant});
      return output_.forward(o, x);
    }
    const auto result = gated_kalmanet(q, k, v, log_decay, beta, {},
                                       {.ridge = ridge,
                                        .iterations = config_.num_iter,
                                        .solver = Solver::conjugate_gradient,
                                        .ridge_mode = RidgeMode::constant,
                                        .initial_state = {.h = h, .u = call.take()},
                                        .output_final_state = call.wants_state(),
                                        .cu_seqlens = call.sequences().cu_seqlens()});
    call.give(result.final_state.h);
    call.give(result.final_state.u);
    return output_.forward(result.o, x);
  }

 private:
  HeadProjectionOptions head_options(std::int64_t conv_size, Activation activation, L2Norm norm) const {
    return {.heads = heads_, .head_dim = size_, .conv_size = conv_size, .without_conv = activation, .norm = norm};
  }

  MesaConfig config_;
  std::int64_t heads_, size_;
  HeadProjection query_, key_, value_;
  HeadOutput output_;
  at::Tensor decay_, decay_bias_, beta_, beta_bias_, lambda_;
};

}  // namespace

std::unique_ptr<Mixer> make_mesanet(const MixerConfig& config, const Scope& scope) {
  return std::make_unique<MesaNet>(config.mesa, config, scope);
}

}  // namespace gka::layers
