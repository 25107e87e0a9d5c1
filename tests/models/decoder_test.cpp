// The decoder with every kind of mixer: packed, padded, cut in two and token by token it says the same; recomputed
// blocks give the same gradients to the bit.
#include "models/decoder.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "models/scratch.h"
#include "models/tiny.h"

namespace gka::models::test {
namespace {

using layers::Sequences;

class EveryMixer : public testing::TestWithParam<const char*> {
 protected:
  /// Two blocks of the mixer, so that what one passes on matters to the next.
  Decoder model(at::ScalarType dtype = at::kDouble) const {
    return tiny_model(tiny_config("2x" + std::string(GetParam())), dtype);
  }
};

at::Tensor logits_of_row(const Decoder& decoder, const at::Tensor& ids) {
  return decoder.logits(decoder.forward(ids, Sequences::rows(ids.size(0), ids.size(1), at::kCPU)).hidden);
}

TEST_P(EveryMixer, APackedBatchIsItsSequencesOneByOne) {
  const at::NoGradGuard no_gradient;
  const auto decoder = model();
  const auto ids = random_ids({1, 20});
  const auto packed = decoder.forward(ids, Sequences::packed({0, 3, 3, 14, 20}, at::kCPU)).hidden;
  for (const auto& [from, to] : {std::pair{0, 3}, {3, 14}, {14, 20}}) {
    const auto alone = decoder.forward(ids.slice(1, from, to), Sequences::rows(1, to - from, at::kCPU)).hidden;
    EXPECT_LT(error_of(packed.slice(1, from, to), alone), 1e-11) << from;
  }
}

TEST_P(EveryMixer, PaddingChangesNothing) {
  const at::NoGradGuard no_gradient;
  const auto decoder = model();
  const auto ids = random_ids({2, 12});
  const auto padded = decoder.forward(ids, Sequences::padded({7, 12}, 12, at::kCPU)).hidden;
  const auto alone = decoder.forward(ids.slice(0, 0, 1).slice(1, 0, 7), Sequences::rows(1, 7, at::kCPU)).hidden;
  EXPECT_LT(error_of(padded.slice(0, 0, 1).slice(1, 0, 7), alone), 1e-11);
}

TEST_P(EveryMixer, AStateCarriesOverACut) {
  const at::NoGradGuard no_gradient;
  const auto decoder = model();
  const auto ids = random_ids({2, 15});
  const auto whole = decoder.forward(ids, Sequences::rows(2, 15, at::kCPU)).hidden;
  const auto first = decoder.forward(ids.slice(1, 0, 9), Sequences::rows(2, 9, at::kCPU), {.want_state = true});
  const auto second =
      decoder.forward(ids.slice(1, 9, 15), Sequences::rows(2, 6, at::kCPU, {9, 9}), {.state = &first.state});
  EXPECT_LT(error_of(at::cat({first.hidden, second.hidden}, 1), whole), 1e-11);
}

TEST_P(EveryMixer, StepsInAPoolAreTheForwardPass) {
  const at::NoGradGuard no_gradient;
  const auto decoder = model();
  const auto ids = random_ids({2, 14});
  const auto whole = decoder.forward(ids, Sequences::rows(2, 14, at::kCPU)).hidden;

  auto pool = decoder.make_state(5, {.dtype = at::kDouble, .capacity = 8});
  const auto slots = at::tensor({3, 1}, at::kLong);
  const auto read = decoder.forward(ids.slice(1, 0, 6), Sequences::rows(2, 6, at::kCPU), {.want_state = true});
  decoder.scatter(read.state, pool, slots);
  for (std::int64_t t = 6; t < 14; ++t) {
    if (t == 8) decoder.reserve(pool, 14);
    const auto step = decoder.step(ids.select(1, t), pool, slots, at::full({2}, t, at::kLong));
    EXPECT_LT(error_of(step, whole.select(1, t)), 1e-11) << t;
  }
}

/// Of all parameters, in their order.
std::vector<at::Tensor> gradients_of(const Decoder& decoder, std::int64_t tokens, bool recompute) {
  const auto device = decoder.device();
  const auto hidden =
      decoder
          .forward(random_ids({2, tokens}), Sequences::rows(2, tokens, device),
                   {.recompute = recompute, .dtype = device.is_cuda() ? std::optional(at::kBFloat16) : std::nullopt})
          .hidden;
  decoder.loss(hidden, random_ids({2, tokens}, 8)).mean.backward();
  std::vector<at::Tensor> all;
  for (const auto& parameter : decoder.parameters().all()) all.push_back(parameter.value.grad());
  return all;
}

TEST_P(EveryMixer, RecomputedBlocksGiveTheSameGradientsToTheBit) {
  // Attention's own kernels may add up in any order there.
  const bool is_attention = std::string(GetParam()) == "*" || std::string(GetParam()) == "SWA";
  const bool gpu = at::hasCUDA() && at::getNumGPUs() > 0 && !is_attention;
  for (const auto device : gpu ? std::vector<at::Device>{at::kCPU, at::kCUDA} : std::vector<at::Device>{at::kCPU}) {
    const auto gradients = [&](bool recompute) {
      return gradients_of(
          Decoder(tiny_config("2x" + std::string(GetParam())), {.device = device,
                                                                .dtype = at::kFloat,
                                                                .generator = at::detail::createCPUGenerator(1),
                                                                .requires_grad = true}),
          11, recompute);
    };
    const auto plain = gradients(false);
    const auto recomputed = gradients(true);
    const auto names = model().parameters().all();
    for (std::size_t i = 0; i < plain.size(); ++i) {
      ASSERT_TRUE(plain[i].defined()) << names[i].name;
      EXPECT_TRUE(at::equal(plain[i], recomputed[i])) << names[i].name << " on " << device;
    }
  }
}

TEST_P(EveryMixer, AGpuGivesTheLossAndTheGradientsOfTheCpu) {
  if (!at::hasCUDA() || at::getNumGPUs() == 0) GTEST_SKIP() << "torch sees no GPU";
  struct Run {
    double loss;
    std::vector<at::Tensor> gradients;
  };
  const auto run_on = [&](at::Device device) {
    const Decoder decoder(
        tiny_config("2x" + std::string(GetParam())),
        {.device = device, .dtype = at::kFloat, .generator = at::detail::createCPUGenerator(1), .requires_grad = true});
    const auto hidden = decoder.forward(random_ids({2, 75}), Sequences::rows(2, 75, device)).hidden;
    const auto loss = decoder.loss(hidden, random_ids({2, 75}, 8)).mean;
    loss.backward();
    Run run{.loss = loss.item<double>(), .gradients = {}};
    for (const auto& parameter : decoder.parameters().all()) run.gradients.push_back(parameter.value.grad().cpu());
    return run;
  };
  const auto there = run_on(at::kCUDA), here = run_on(at::kCPU);
  EXPECT_NEAR(there.loss, here.loss, 1e-4);
  const auto names = model().parameters().all();
  for (std::size_t i = 0; i < names.size(); ++i) {
    EXPECT_LT(error_of(there.gradients[i], here.gradients[i]), 1e-3) << names[i].name;
  }
}

TEST_P(EveryMixer, CountingAllocatesNothingAndCountsRight) {
  EXPECT_EQ(count_parameters(tiny_config("2x" + std::string(GetParam()))), model().parameters().count());
}

INSTANTIATE_TEST_SUITE_P(Decoder, EveryMixer, testing::ValuesIn(kEveryKind), [](const auto& kind) {
  return kind.param == std::string("*") ? std::string("attention") : std::string(kind.param);
});

TEST(Decoder, TokensSeeNothingThatFollowsThem) {
  const at::NoGradGuard no_gradient;
  std::string pattern;
  for (const char* kind : kEveryKind) pattern += (pattern.empty() ? "" : "-") + std::string(kind);
  const auto decoder = tiny_model(tiny_config(pattern));
  const auto ids = random_ids({1, 13});
  auto changed = ids.clone();
  changed[0][8] = (changed[0][8].item<std::int64_t>() + 1) % 61;
  const auto before = logits_of_row(decoder, ids);
  const auto after = logits_of_row(decoder, changed);
  EXPECT_LT(error_of(after.slice(1, 0, 8), before.slice(1, 0, 8)), 1e-13);
  EXPECT_GT(error_of(after.slice(1, 8, 9), before.slice(1, 8, 9)), 1e-3);
}

TEST(Decoder, TheSameSeedGivesTheSameWeightsAndAnotherOthers) {
  const auto config = tiny_config("GKA-*");
  const auto weights = [&](std::uint64_t seed) {
    return tiny_model(config, at::kFloat, seed).parameters().find("model.layers.0.gka.q_proj.weight")->value.detach();
  };
  EXPECT_TRUE(at::equal(weights(1), weights(1)));
  EXPECT_FALSE(at::equal(weights(1), weights(2)));
}

TEST(Decoder, ATiedHeadIsTheEmbedding) {
  const auto tied = tiny_model(tiny_config("GKA", /*tied=*/true));
  const auto free = tiny_model(tiny_config("GKA"));
  EXPECT_EQ(tied.parameters().find("lm_head.weight"), nullptr);
  EXPECT_EQ(free.parameters().count() - tied.parameters().count(), 61 * 32);
  const auto ids = random_ids({1, 5});
  const auto hidden = tied.forward(ids, Sequences::rows(1, 5, at::kCPU)).hidden;
  const auto& embedding = tied.parameters().find("model.embed_tokens.weight")->value;
  EXPECT_LT(error_of(tied.logits(hidden), hidden.matmul(embedding.t())), 1e-14);
}

TEST(Decoder, BfloatActivationsComeCloseToFloatOnes) {
  const at::NoGradGuard no_gradient;
  const auto decoder = tiny_model(tiny_config("GKA-*"), at::kFloat);
  const auto ids = random_ids({1, 9});
  const auto sequences = Sequences::rows(1, 9, at::kCPU);
  const auto half = decoder.forward(ids, sequences, {.dtype = at::kBFloat16}).hidden;
  EXPECT_EQ(half.scalar_type(), at::kBFloat16);
  EXPECT_LT(error_of(half, decoder.forward(ids, sequences).hidden), 5e-2);
}

TEST(Decoder, TheFirstLayerThatIsNotFiniteIsNamed) {
  const auto decoder = tiny_model(tiny_config("*-GKA-M2"));
  const auto ids = random_ids({1, 6});
  const auto sequences = Sequences::rows(1, 6, at::kCPU);
  const auto first = [&] { return first_not_finite(decoder, ids, sequences); };
  EXPECT_EQ(first(), std::nullopt);
  const at::NoGradGuard no_gradient;
  {
    const auto& weight = decoder.parameters().find("model.layers.1.mlp.down_proj.weight")->value;
    const auto kept = weight.clone();
    weight.fill_(std::numeric_limits<double>::max());
    EXPECT_EQ(first(), "model.layers.1.mlp");
    weight.copy_(kept);
  }
  {
    // Infinite activations inside a mixer: on the CPU the operator refuses the NaN it is given.
    const auto& weight = decoder.parameters().find("model.layers.2.mamba2.in_proj.weight")->value;
    const auto kept = weight.clone();
    weight.fill_(std::numeric_limits<double>::max());
    EXPECT_EQ(first(), "model.layers.2.mamba2");
    weight.copy_(kept);
  }
  decoder.parameters().find("model.layers.2.input_layernorm.weight")->value[3] = NAN;
  EXPECT_EQ(first(), "model.layers.2.input_layernorm.weight");
}

TEST(Decoder, BadCallsAreRefusedInASentence) {
  const auto decoder = tiny_model(tiny_config("GKA"));
  const auto sequences = Sequences::rows(1, 3, at::kCPU);
  EXPECT_ERROR(decoder.forward(at::tensor({1, 61, 2}, at::kLong).unsqueeze(0), sequences),
               "the token 61 is outside the vocabulary of 61 tokens");
  EXPECT_ERROR(decoder.forward(at::tensor({1, -5, 2}, at::kLong).unsqueeze(0), sequences), "the token -5");
  EXPECT_ERROR(decoder.forward(random_ids({1, 3}), sequences, {.want_state = true, .recompute = true}),
               "takes no states and returns none");
  const DecoderState other;
  EXPECT_ERROR(decoder.forward(random_ids({1, 3}), sequences, {.state = &other}), "of 0 blocks and the model has 1");
}

TEST(Decoder, StatesOfMemoriesDoNotGrowAndThoseOfAttentionDo) {
  const auto memory = tiny_model(tiny_config("GKA"));
  const auto attention = tiny_model(tiny_config("*"));
  EXPECT_EQ(memory.state_bytes(10, at::kFloat), memory.state_bytes(100'000, at::kFloat));
  EXPECT_EQ(10 * attention.state_bytes(10, at::kFloat), attention.state_bytes(100, at::kFloat));
}

}  // namespace
}  // namespace gka::models::test
