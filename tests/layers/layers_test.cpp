// What is true of one layer or part alone: how it starts, and where numbers are extreme.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/IListRef.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/stack.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>
#include <set>

#include "layers/cases.h"
#include "layers/functions.h"
#include "layers/memory.h"
#include "layers/reference.h"

namespace gka::layers::test {
namespace {

using at::Tensor;

/// As its authors start it: nothing added to the parameters.
std::unique_ptr<Parameters> started(const std::string& token, const MixerConfig& config, at::Device where = at::kCPU) {
  auto parameters = std::make_unique<Parameters>(
      ParameterOptions{.device = where, .generator = at::make_generator<at::CPUGeneratorImpl>(3)});
  mixer_kind(token).make(config, *parameters);
  return parameters;
}

MixerConfig wide() {
  MixerConfig config;
  config.hidden_size = 256;
  config.num_attention_heads = config.num_key_value_heads = 64;
  config.head_dim = 8;
  config.sliding_window = 16;
  config.mamba2.head_dim = 8;
  return config;
}

double lowest(const Tensor& x) { return x.min().item<double>(); }
double highest(const Tensor& x) { return x.max().item<double>(); }

TEST(Start, DecaysOfGkaAndGatedDeltaNetSpanTheirRanges) {
  for (const auto* token : {"GKA", "GDN"}) {
    const auto parameters = started(token, wide());
    const auto a = parameters->find("A_log")->value.exp();
    EXPECT_GT(lowest(a), 0) << token;
    EXPECT_LT(lowest(a), 3) << token;
    EXPECT_GT(highest(a), 13) << token;
    EXPECT_LE(highest(a), 16) << token;
    const auto dt = at::softplus(parameters->find("dt_bias")->value);
    EXPECT_GE(lowest(dt), 0.00099) << token;
    EXPECT_LT(lowest(dt), 0.003) << token;
    EXPECT_GT(highest(dt), 0.03) << token;
    EXPECT_LE(highest(dt), 0.101) << token;
  }
}

TEST(Start, KimiDeltaAttentionsDecayIsAtLeastOnePerStepAndItsBiasZero) {
  const auto parameters = started("KDA", wide());
  const auto a = parameters->find("A_log")->value.exp();
  EXPECT_GE(lowest(a), 1);
  EXPECT_LE(highest(a), 16.001);
  EXPECT_EQ(parameters->find("dt_bias")->value.numel(), 64 * 8);
  EXPECT_EQ(highest(parameters->find("dt_bias")->value.abs()), 0);
}

TEST(Start, MambasDecaysCountTheHeads) {
  const auto parameters = started("M2", wide());
  const auto a = parameters->find("A_log")->value.exp();
  EXPECT_TRUE(at::allclose(a, at::arange(1, 65, at::kFloat), 1e-5));
  EXPECT_EQ(lowest(parameters->find("D")->value), 1);
}

TEST(Start, MesaNetsRidgeIsOne) {
  const auto parameters = started("MESA", wide());
  const auto ridge = at::softplus(parameters->find("lambda_params")->value) + 0.25;
  EXPECT_TRUE(at::allclose(ridge, at::full_like(ridge, 1.0), 1e-6));
}

TEST(Start, SketchesHaveOrthonormalRows) {
  auto config = wide();
  config.gka.sketch_dim = 3;
  const auto p = started("GKA", config)->find("sketch")->value;
  EXPECT_EQ(p.sizes(), at::IntArrayRef({64, 3, 8}));
  EXPECT_TRUE(at::allclose(p.matmul(p.transpose(1, 2)), at::eye(3).expand({64, 3, 3}), 0, 1e-5));
  EXPECT_FALSE(at::allclose(p[0], p[1]));
}

TEST(Start, LowRankHeadsBeginAsCopies) {
  auto config = wide();
  config.num_key_value_heads = 16;
  config.gka.kv_proj_rank = 4;
  config.gka.kv_learnable_residual = true;
  const auto parameters = started("GKA", config);
  EXPECT_EQ(highest(parameters->find("proj_k.linearB.weight")->value.abs()), 0);
  const auto mixture = parameters->find("v_rep")->value;
  EXPECT_EQ(mixture.sizes(), at::IntArrayRef({64, 16}));
  EXPECT_TRUE(at::equal(mixture.argmax(1), at::arange(64, at::kLong).floor_divide(4)));
  EXPECT_EQ(mixture.sum().item<double>(), 64);
}

TEST(Start, ProjectionsHaveTheConfiguredDeviationAndBiasesAreZero) {
  auto config = wide();
  config.initializer_range = 0.05;
  const auto parameters = started("GKA", config);
  EXPECT_NEAR(parameters->find("q_proj.weight")->value.std().item<double>(), 0.05, 0.001);
  EXPECT_EQ(highest(parameters->find("b_proj.bias")->value.abs()), 0);
  const auto taps = parameters->find("k_conv1d.weight")->value;
  EXPECT_EQ(taps.sizes(), at::IntArrayRef({512, 1, 4}));
  EXPECT_LE(highest(taps.abs()), 0.5);
  EXPECT_GT(highest(taps.abs()), 0.45);
}

TEST(Start, NormsBiasesAndDecaysAreExemptFromWeightDecay) {
  for (const auto& kind : mixer_kinds()) {
    auto config = wide();
    config.gka.kv_proj_rank = 2;
    Parameters parameters({.device = at::kMeta});
    kind.make(config, parameters);
    for (const auto& parameter : parameters.all()) {
      const bool matrix = parameter.value.dim() >= 2;
      EXPECT_EQ(parameter.weight_decay == WeightDecay::yes, matrix) << kind.token << " " << parameter.name;
    }
  }
}

TEST(Start, ASeedGivesTheSameWeightsAndAnotherSeedOthers) {
  const auto one = started("GKA", wide()), same = started("GKA", wide());
  for (std::size_t i = 0; i < one->all().size(); ++i) {
    EXPECT_TRUE(at::equal(one->all()[i].value, same->all()[i].value)) << one->all()[i].name;
  }
  Parameters other({.generator = at::make_generator<at::CPUGeneratorImpl>(4)});
  mixer_kind("GKA").make(wide(), other);
  EXPECT_FALSE(at::equal(other.find("q_proj.weight")->value, one->find("q_proj.weight")->value));
}

TEST(Parameters, ANameIsTakenOnce) {
  Parameters parameters;
  const Scope scope = Scope(parameters) / "model" / "norm";
  scope.add("weight", {3}, init::constant(1), WeightDecay::no);
  EXPECT_NE(parameters.find("model.norm.weight"), nullptr);
  EXPECT_EQ(parameters.find("model.norm"), nullptr);
  EXPECT_THROW(scope.add("weight", {3}, init::constant(1)), std::invalid_argument);
}

TEST(Mixers, TokensAreDistinctAndAnUnknownOneIsAnswered) {
  std::set<std::string_view> tokens;
  for (const auto& kind : mixer_kinds()) EXPECT_TRUE(tokens.insert(kind.token).second) << kind.token;
  EXPECT_EQ(mixer_kind("GKA").prefix, "gka");
  EXPECT_EQ(mixer_kind("SWA").prefix, "self_attn");
  try {
    mixer_kind("BMF");
    FAIL() << "BMF is not a mixer";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("'BMF'"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("GKA, GDN"), std::string::npos);
  }
}

TEST(Mixers, ConfigurationsThatMakeNoSenseAreRefused) {
  const auto refused = [](const std::string& token, const std::function<void(MixerConfig&)>& change) {
    auto config = wide();
    change(config);
    Parameters parameters({.device = at::kMeta});
    EXPECT_THROW(mixer_kind(token).make(config, parameters), std::invalid_argument) << token;
  };
  refused("*", [](auto& c) { c.num_key_value_heads = 3; });
  refused("*", [](auto& c) { c.head_dim = 7; });
  refused("SWA", [](auto& c) { c.sliding_window = 0; });
  refused("GKA", [](auto& c) { c.num_key_value_heads = 3; });
  refused("GKA", [](auto& c) { c.gka.num_q_heads = 48; });
  refused("GKA", [](auto& c) { c.gka.sketch_dim = 9; });
  refused("GKA", [](auto& c) { c.gka.expand_v = 0.3; });
  refused("GLA", [](auto& c) { c.gla.num_heads = 3; });
  refused("M2", [](auto& c) { c.mamba2.head_dim = 5; });
  refused("RET", [](auto& c) { c.retnet.num_heads = c.hidden_size; });  // keys of one channel, which nothing can turn
  for (const auto* token : {"GDN", "DN", "KDA"}) refused(token, [](auto& c) { c.head_dim = 257; });
}

TEST(Functions, SwiGluIsItsFormula) {
  Parameters parameters({.dtype = at::kDouble, .generator = at::make_generator<at::CPUGeneratorImpl>(1)});
  const SwiGlu mlp(6, 10, 0.5, Scope(parameters) / "mlp");
  const auto x = random({2, 3, 6}, 1).cpu();
  const auto w = [&](const char* name) {
    return parameters.find(std::string("mlp.") + name + "_proj.weight")->value.t();
  };
  const auto want = (at::silu(x.matmul(w("gate"))) * x.matmul(w("up"))).matmul(w("down"));
  EXPECT_LE(relative_error(mlp.forward(x), want), 1e-12);
}

TEST(Functions, RotationDependsOnTheDistanceOfPositionsAlone) {
  const auto q = random({1, 1, 2, 8}, 1), k = random({1, 1, 2, 8}, 2);
  const auto at_position = [&](const Tensor& x, std::int64_t p) {
    const auto position = at::full({1, 1}, p, at::TensorOptions(at::kLong).device(device()));
    return rotate(x, rotation(position, x.size(-1), 10000.0, x.scalar_type()));
  };
  const auto product = [&](std::int64_t p) { return (at_position(q, p + 5) * at_position(k, p)).sum(-1); };
  EXPECT_LE(relative_error(product(1000000), product(0)), 1e-8);
  EXPECT_GT(relative_error((at_position(q, 6) * at_position(k, 0)).sum(-1), product(0)), 1e-3);
}

/// The rules for whole sequences in float32, by kernels and by torch's operations in chunks, against the same rules
/// step by step in float64.
void expect_chunks_equal_steps(double strength) {
  const std::int64_t tokens = 130, heads = 2, size = 6;
  for (const bool per_channel : {false, true}) {
    for (const auto rule : {MemoryRule::add, MemoryRule::delta}) {
      const at::NoGradGuard no_grad;
      const auto single = [&](std::uint64_t seed) { return random({1, tokens, heads, size}, seed, at::kFloat); };
      const auto unit = [&](std::uint64_t seed) { return unit_norm(single(seed), L2Norm::rsqrt); };
      auto log_decay = single(4).abs() * strength;
      // Strong decay comes now and then, between tokens that keep almost all.
      log_decay = at::where(single(5) > 0.5, log_decay, log_decay * 1e-4);
      if (!per_channel) log_decay = log_decay.select(-1, 0);
      const MemoryInputs in{.q = unit(1),
                            .k = unit(2),
                            .v = single(3),
                            .log_decay = log_decay,
                            .beta = single(6).select(-1, 0).sigmoid()};

      const auto sequences = Sequences::rows(1, tokens, device());
      Call call(sequences, nullptr, true), chunked(sequences, nullptr, true);
      const auto got = remember(in, rule, call), in_chunks = remember_in_chunks(in, rule, chunked);

      State pool{.tensors = {at::zeros({1, heads, size, size}, at::TensorOptions(at::kDouble).device(device()))}};
      std::vector<Tensor> want;
      for (std::int64_t t = 0; t < tokens; ++t) {
        const auto token = [&](const Tensor& x) { return x.select(1, t).to(at::kDouble); };
        Call step(pool, {}, {});
        want.push_back(remember({.q = token(in.q),
                                 .k = token(in.k),
                                 .v = token(in.v),
                                 .log_decay = token(in.log_decay),
                                 .beta = token(in.beta)},
                                rule, step));
      }
      EXPECT_TRUE(at::isfinite(got).all().item<bool>());
      EXPECT_LE(relative_error(got, at::stack(want, 1)), 1e-5) << per_channel << static_cast<int>(rule);
      EXPECT_LE(relative_error(call.out().tensors[0], pool.tensors[0]), 1e-5) << per_channel << static_cast<int>(rule);
      EXPECT_LE(relative_error(in_chunks, at::stack(want, 1)), 1e-5) << per_channel << static_cast<int>(rule);
      EXPECT_LE(relative_error(chunked.out().tensors[0], pool.tensors[0]), 1e-5)
          << per_channel << static_cast<int>(rule);
    }
  }
}

TEST(Memory, ChunksEqualStepsHoweverStrongTheDecay) {
  for (const double strength : {-1e-3, -1.0, -30.0, -1e3, -1e4}) {
    SCOPED_TRACE(strength);
    expect_chunks_equal_steps(strength);
  }
}

/// What `remember` answers, and the gradient of everything that went into it.
std::vector<Tensor> answer_and_gradients(const MemoryInputs& in, MemoryRule rule, const Tensor& initial, bool packed,
                                         decltype(&remember) how) {
  std::vector<Tensor> leaves;
  const auto leaf = [&](const Tensor& x) {
    if (!x.defined()) return x;
    return leaves.emplace_back(x.detach().clone().requires_grad_());
  };
  const MemoryInputs own{.q = leaf(in.q),
                         .k = leaf(in.k),
                         .v = leaf(in.v),
                         .log_decay = leaf(in.log_decay),
                         .beta = leaf(in.beta),
                         .scale = in.scale};
  const State before{.tensors = {leaf(initial)}};
  const auto sequences = packed ? Sequences::packed(at::tensor({0, 3, 3, 73, 90}, at::kLong), device())
                                : Sequences::rows(in.q.size(0), in.q.size(1), device());
  Call call(sequences, &before, true);
  const auto o = how(own, rule, call), final = call.out().tensors[0];
  const auto slope = [](const Tensor& x) { return random(x.sizes().vec(), 9, x.scalar_type()); };
  auto results = torch::autograd::grad({o, final}, leaves, {slope(o), slope(final)});
  results.insert(results.begin(), {o.detach(), final.detach()});
  return results;
}

TEST(Memory, KernelsAndTorchsOperationsHaveTheSameGradients) {
  for (const bool packed : {false, true}) {
    for (const int decays : {0, 1, 2}) {
      for (const auto rule : {MemoryRule::add, MemoryRule::delta}) {
        SCOPED_TRACE(decays + 10 * static_cast<int>(rule) + (packed ? 100 : 0));
        const std::int64_t rows = packed ? 1 : 2, tokens = packed ? 90 : 45, heads = 2;
        const auto some = [&](std::int64_t size, std::uint64_t seed) {
          return random({rows, tokens, heads, size}, seed);
        };
        Tensor log_decay = decays == 0 ? Tensor() : -some(7, 4).abs();
        if (decays == 1) log_decay = log_decay.select(-1, 0);
        const MemoryInputs in{.q = unit_norm(some(7, 1), L2Norm::rsqrt),
                              .k = unit_norm(some(7, 2), L2Norm::rsqrt),
                              .v = some(35, 3),
                              .log_decay = log_decay,
                              .beta = rule == MemoryRule::delta ? some(1, 5).squeeze(-1).sigmoid() : Tensor(),
                              .scale = 0.7};
        const auto initial = random({packed ? 4 : rows, heads, 7, 35}, 6);
        const auto got = answer_and_gradients(in, rule, initial, packed, remember);
        const auto want = answer_and_gradients(in, rule, initial, packed, remember_in_chunks);
        ASSERT_EQ(got.size(), want.size());
        for (std::size_t i = 0; i < got.size(); ++i) EXPECT_LE(relative_error(got[i], want[i]), 1e-11) << i;
      }
    }
  }
}

TEST(Memory, ASecondDerivativeIsRefusedWhereKernelsHaveNone) {
  const auto q = random({1, 5, 1, 4}, 1).requires_grad_(), k = random({1, 5, 1, 4}, 2), v = random({1, 5, 1, 4}, 3);
  const auto sequences = Sequences::rows(1, 5, device());
  Call call(sequences, nullptr, false);
  const auto o = remember({.q = q, .k = k, .v = v}, MemoryRule::delta, call);
  const auto slope = torch::autograd::grad({o.square().sum()}, {q}, {}, true, /*create_graph=*/true)[0];
  try {
    slope.sum().backward();
    FAIL() << "it was not refused";
  } catch (const std::exception& refused) {
    EXPECT_NE(std::string(refused.what()).find("this asks for a second derivative"), std::string::npos)
        << refused.what();
  }
}

TEST(Memory, AStepOfWhichAGradientIsNeededHasOne) {
  const auto slope_of = [](bool by_step) {
    const auto q = random({1, 2, 4}, 1).requires_grad_(), k = random({1, 2, 4}, 2), v = random({1, 2, 3}, 3);
    const auto beta = random({1, 2}, 4).sigmoid();
    Tensor o;
    if (by_step) {
      State pool{.tensors = {at::ones({1, 2, 4, 3}, q.options().requires_grad(false))}};
      Call step(pool, {}, {});
      o = remember({.q = q, .k = k, .v = v, .beta = beta}, MemoryRule::delta, step);
    } else {
      const State before{.tensors = {at::ones({1, 2, 4, 3}, q.options().requires_grad(false))}};
      const auto sequences = Sequences::rows(1, 1, device());
      Call call(sequences, &before, false);
      const auto one = [](const Tensor& x) { return x.unsqueeze(1); };
      o = remember({.q = one(q), .k = one(k), .v = one(v), .beta = one(beta)}, MemoryRule::delta, call);
    }
    return torch::autograd::grad({o.sum()}, {q})[0];
  };
  EXPECT_LE(relative_error(slope_of(true), slope_of(false)), 1e-12);
}

TEST(Memory, WideHeadsThatTheOperatorDoesNotTakeGiveTheSame) {
  // Values are independent of each other, so 300 of them are 200 and 100.
  const at::NoGradGuard no_grad;
  const auto q = random({1, 70, 1, 5}, 1), k = random({1, 70, 1, 5}, 2), v = random({1, 70, 1, 300}, 3);
  const auto decay = -random({1, 70, 1}, 4).abs();
  const auto sequences = Sequences::rows(1, 70, device());
  const auto ask = [&](const Tensor& values) {
    Call call(sequences, nullptr, false);
    return remember({.q = q, .k = k, .v = values, .log_decay = decay, .scale = 0.5}, MemoryRule::add, call);
  };
  EXPECT_LE(relative_error(ask(v).narrow(-1, 100, 200), ask(v.narrow(-1, 100, 200))), 1e-12);
}

TEST(Attention, LongSequencesAreCutIntoBlocksOfQueries) {
  Case c{.name = "", .token = "SWA", .config = cases()[0].config};
  c.config.sliding_window = 600;
  const auto [parameters, mixer] = build(c);
  const at::NoGradGuard no_grad;
  const auto x = random({1, 1300, c.config.hidden_size}, 1);
  const auto y = mixer->forward(x, Sequences::rows(1, 1300, device())).y;
  // The last tokens see nothing from before the window.
  const auto last = mixer->forward(x.narrow(1, 650, 650), Sequences::rows(1, 650, device())).y;
  EXPECT_LE(relative_error(y.narrow(1, 1249, 51), last.narrow(1, 599, 51)), 1e-10);
  EXPECT_GT(relative_error(y.narrow(1, 650, 50), last.narrow(1, 0, 50)), 1e-3);
}

TEST(Gates, OfGkaFollowTheirWeightsWhetherTheyLearnOrNot) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    Parameters parameters(
        {.dtype = dtype, .generator = at::make_generator<at::CPUGeneratorImpl>(3), .requires_grad = true});
    MixerConfig config = wide();
    const auto mixer = mixer_kind("GKA").make(config, parameters);
    const auto x = random({1, 6, config.hidden_size}, 1).to(at::kCPU, dtype);
    const auto sequences = Sequences::rows(1, 6, at::kCPU);
    const auto learning = [&] { return mixer->forward(x, sequences).y.detach(); };
    const auto using_it = [&] {
      const at::NoGradGuard no_grad;
      return mixer->forward(x, sequences).y;
    };
    auto before = learning();
    EXPECT_TRUE(at::equal(using_it(), before));
    for (const auto* name : {"a_proj.weight", "b_proj.weight", "alpha_proj.weight"}) {
      {
        const at::NoGradGuard no_grad;
        Tensor weight = parameters.find(name)->value;
        weight.copy_(random(weight.sizes(), 2));  // as a checkpoint is loaded, or an optimiser steps
      }
      const auto after = learning();
      EXPECT_TRUE(at::equal(using_it(), after)) << name;
      EXPECT_FALSE(at::equal(after, before)) << name;
      before = after;
    }
  }
}

TEST(Gates, DecaysHaveTheSameBitsWithAndWithoutGradientsWhicheverParameterLearns) {
  const auto x = random({37, 33}, 1).to(at::kFloat);
  for (const bool rate_learns : {true, false}) {
    const auto a_log = random({33}, 2).to(at::kFloat).requires_grad_(rate_learns);
    const auto dt_bias = random({33}, 3).to(at::kFloat).requires_grad_(!rate_learns);
    const auto learning = log_decay(x, a_log, dt_bias).detach();
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(log_decay(x, a_log, dt_bias), learning)) << (rate_learns ? "A_log" : "dt_bias");
  }
}

TEST(Gates, OfGkaThatLieSideBySideLearnEachForItself) {
  Parameters parameters({.generator = at::make_generator<at::CPUGeneratorImpl>(3), .requires_grad = true});
  const auto mixer = mixer_kind("GKA").make(wide(), parameters);
  const Tensor beta = parameters.find("b_proj.weight")->value, decay = parameters.find("a_proj.weight")->value;
  EXPECT_TRUE(beta.is_leaf() && beta.requires_grad() && beta.is_contiguous());
  const auto other = decay.clone();
  const auto version = decay._version();
  const at::NoGradGuard no_grad;
  Tensor(beta).zero_();
  EXPECT_TRUE(at::equal(decay, other));
  EXPECT_EQ(decay._version(), version);
}

TEST(Flops, AreTheMultiplicationsAndAdditionsOfTheDefinition) {
  MixerConfig config = wide();    // 64 heads of 8, a window of 16
  const double products = 2 * 3;  // a multiplication and an addition, forward and twice backward
  const double memory = 64 * 8 * 8, tokens = 100;
  double seen = 0, seen_in_window = 0;
  for (int t = 1; t <= 100; ++t) {
    seen += t / tokens;
    seen_in_window += std::min(t, 16) / tokens;
  }
  const std::pair<const char*, double> expected[] = {
      {"*", products * 2 * seen * 64 * 8},
      {"SWA", products * 2 * seen_in_window * 64 * 8},
      {"GDN", products * 3 * memory},  // asked, written, asked
      {"DN", products * 3 * memory},
      {"KDA", products * 3 * memory},
      {"GKA", products * 2 * memory + products * 2 * memory + 2 * 2 * 30 * memory},  // U, H, two solves of 30 steps
      {"MESA", products * 2 * memory + products * 2 * memory + 2 * 2 * 30 * memory},
      {"M2", products * 2 * (512 / 8) * 128 * 8},
      {"GLA", products * 2 * 4 * (128 / 4) * (256 / 4)},
      {"RET", products * 2 * 64 * 4 * 8},
      {"LA", products * 2 * 64 * 4 * 4},
  };
  ASSERT_EQ(std::size(expected), mixer_kinds().size());
  for (const auto& [token, flops] : expected) {
    EXPECT_NEAR(mixing_flops(token, config, 100), flops, 1e-9 * flops) << token;
  }
  config.gka.num_iter = 0;
  EXPECT_EQ(mixing_flops("GKA", config, 100), products * 2 * memory);
}

TEST(Sequences, ChunksComeInStepsWithTheLongestSequencesFirst) {
  const auto sequences = Sequences::packed({0, 2, 9, 9, 13}, at::kCPU);
  const auto& plan = sequences.chunks(4);
  EXPECT_EQ(plan.chunks, 4);
  EXPECT_EQ(plan.alive, (std::vector<std::int64_t>{3, 1}));
  const std::vector<std::int64_t> gather{2, 3, 4, 5, 0, 1, 0, 0, 9, 10, 11, 12, 6, 7, 8, 0};
  const auto data = plan.gather.data_ptr<std::int64_t>();
  EXPECT_EQ(std::vector<std::int64_t>(data, data + plan.gather.numel()), gather);
  EXPECT_TRUE(at::equal(plan.gather.index_select(0, plan.scatter), at::arange(13, at::kLong)));
  EXPECT_EQ(plan.padding.sum().item<std::int64_t>(), 3);
}

TEST(Sequences, BoundsThatGoBackAreRefused) {
  EXPECT_THROW(Sequences::packed({0, 5, 3}, at::kCPU), std::invalid_argument);
  EXPECT_THROW(Sequences::packed({1, 5}, at::kCPU), std::invalid_argument);
  EXPECT_THROW(Sequences::padded({7}, 6, at::kCPU), std::invalid_argument);
  EXPECT_THROW(Sequences::rows(2, 3, at::kCPU, {1}), std::invalid_argument);
}

}  // namespace
}  // namespace gka::layers::test
