#include "layers/cases.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>

namespace gka::layers::test {
namespace {

/// The tensors are tiny: threads would only wait for each other.
class OneThread : public testing::Environment {
 public:
  void SetUp() override { at::set_num_threads(1); }
};
[[maybe_unused]] const auto* const kOneThread = testing::AddGlobalTestEnvironment(new OneThread);

MixerConfig small() {
  MixerConfig config;
  config.hidden_size = 12;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 4;
  config.sliding_window = 5;
  config.gla.num_heads = 2;
  config.gla.gate_low_rank_dim = 3;
  config.retnet.expand_k = 4.0 / 3.0;  // an even number of channels per head, for the rotary embedding
  config.mamba2.head_dim = 6;
  config.mamba2.state_size = 5;
  return config;
}

Case make(const std::string& name, const std::string& token, const std::function<void(MixerConfig&)>& change = {}) {
  Case c{.name = name, .token = token, .config = small()};
  if (change) change(c.config);
  return c;
}

std::vector<Case> all_cases() {
  return {
      make("Attention", "*"),
      make("AttentionConvolved", "*", [](auto& c) { c.attention.conv_size = 4; }),
      make("SlidingWindow", "SWA"),
      make("Gka", "GKA"),
      make("GkaPaperBeta", "GKA", [](auto& c) { c.gka.beta_weight = BetaWeight::paper; }),
      make("GkaWithoutGates", "GKA",
           [](auto& c) {
             c.gka.use_beta_gate = c.gka.use_alpha_connection = c.gka.use_forgetting_gate = c.gka.use_gate = false;
             c.gka.gla_rescale = false;
           }),
      make("GkaKeysDoNotFade", "GKA", [](auto& c) { c.gka.use_forgetting_gate_kk = false; }),
      make("GkaNoSolve", "GKA", [](auto& c) { c.gka.num_iter = 0; }),
      make("GkaConstantRidge", "GKA",
           [](auto& c) {
             c.gka.ridge_mode = RidgeMode::constant;
             c.gka.solver_type = Solver::exact;
             c.gka.ridge_strength = 0.5;
           }),
      make("GkaExact", "GKA", [](auto& c) { c.gka.solver_type = Solver::exact; }),
      make("GkaQueryConvolutionOnly", "GKA",
           [](auto& c) {
             c.gka.use_k_conv = c.gka.use_v_conv = false;
             c.gka.conv_size = 3;
           }),
      make("GkaLowRankHeads", "GKA", [](auto& c) { c.gka.kv_proj_rank = 3; }),
      make("GkaLearnedHeads", "GKA",
           [](auto& c) {
             c.gka.kv_proj_rank = 2;
             c.gka.kv_learnable_residual = true;
           }),
      make("GkaExpanded", "GKA",
           [](auto& c) {
             c.gka.expand_k = 0.5;
             c.gka.expand_v = 1.5;
           }),
      make("GkaSketched", "GKA", [](auto& c) { c.gka.sketch_dim = 2; }),
      make("GkaSketchedKeysDoNotFade", "GKA",
           [](auto& c) {
             c.gka.sketch_dim = 3;
             c.gka.use_forgetting_gate_kk = c.gka.use_alpha_connection = false;
           }),
      make("GatedDeltaNet", "GDN"),
      make("GatedDeltaNetWideValues", "GDN",
           [](auto& c) {
             c.gdn.expand_v = 2;
             c.gdn.conv_bias = true;
             c.gdn.allow_neg_eigval = true;
           }),
      make("GatedDeltaNetLowRankHeads", "GDN",
           [](auto& c) {
             c.gdn.use_short_conv = c.gdn.use_gate = false;
             c.gdn.kv_proj_rank = 3;
           }),
      make("DeltaNet", "DN"),
      make("DeltaNetNoConvolution", "DN",
           [](auto& c) {
             c.deltanet.conv_size = 0;
             c.deltanet.use_gate = true;
           }),
      make("KimiDeltaAttention", "KDA"),
      make("MesaNet", "MESA"),
      make("GatedLinearAttention", "GLA"),
      make("GatedLinearAttentionConvolved", "GLA",
           [](auto& c) {
             c.gla.conv_size = 4;
             c.gla.use_gate = false;
           }),
      make("RetNet", "RET"),
      make("LinearAttention", "LA"),
      make("LinearAttentionElu", "LA", [](auto& c) { c.linear_attention.feature_map = FeatureMap::elu; }),
      make("Mamba2", "M2"),
      make("Mamba2TwoGroups", "M2", [](auto& c) { c.mamba2.n_groups = 2; }),
  };
}

}  // namespace

const std::vector<Case>& cases() {
  static const std::vector<Case> all = all_cases();
  return all;
}

Built build(const Case& c, at::ScalarType dtype, std::uint64_t seed) {
  Built built{.parameters = std::make_unique<Parameters>(ParameterOptions{
                  .device = device(), .dtype = dtype, .generator = at::make_generator<at::CPUGeneratorImpl>(seed)}),
              .mixer = nullptr};
  built.mixer = mixer_kind(c.token).make(c.config, *built.parameters);
  for (const auto& parameter : built.parameters->all()) {
    const bool orthonormal = parameter.name == "sketch";
    at::Tensor value = parameter.value;
    value.add_(random(value.sizes(), ++seed, dtype), orthonormal ? 0.05 : 0.3);
  }
  built.parameters->require_grad(true);
  return built;
}

at::Tensor random(at::IntArrayRef shape, std::uint64_t seed, at::ScalarType dtype) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::empty(shape, at::kDouble).normal_(0.0, 1.0, generator).to(device(), dtype);
}

double relative_error(const at::Tensor& a, const at::Tensor& b) {
  const auto wide = b.detach().to(at::kDouble);
  const double difference = (a.detach().to(at::kDouble) - wide).norm().item<double>(),
               size = wide.norm().item<double>();
  return size > 0 ? difference / size : difference;
}

at::Device device() {
  const char* name = std::getenv("GKA_TEST_DEVICE");
  return at::Device(name != nullptr ? name : "cpu");
}

}  // namespace gka::layers::test
