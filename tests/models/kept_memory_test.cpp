// What a block keeps for its backward pass: the bytes in use after the forward pass of a model with a block more.
#include <ATen/Context.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "models/tiny.h"

namespace gka::models::test {
namespace {

/// Bytes that this thread has taken and not given back.
struct Meter final : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, std::int64_t bytes, std::size_t, std::size_t, c10::Device) override { held += bytes; }
  bool memoryProfilingEnabled() const override { return true; }
  std::int64_t held = 0;
};

/// A model as wide as those of 440M, or an eighth of it.
ModelConfig config_of(const std::string& mixer, int blocks, std::int64_t narrower) {
  return parse_training_config({{"vocab_size", 61},
                                {"hidden_size", 1024 / narrower},
                                {"intermediate_size", 2816 / narrower},
                                {"num_attention_heads", 8},
                                {"num_key_value_heads", 8},
                                {"head_dim", 128 / narrower},
                                {"hybrid_override_pattern", std::to_string(blocks) + "x" + mixer}},
                               "a test");
}

struct Case {
  at::Device device;
  at::ScalarType dtype;
  std::int64_t tokens, narrower;
};

/// What one block keeps, in tensors as large as the stream between blocks.
double kept_units(const std::string& mixer, const Case& c) {
  const auto held = [&](int blocks) {
    const Decoder decoder(config_of(mixer, blocks, c.narrower), {.device = c.device,
                                                                 .dtype = at::kFloat,
                                                                 .generator = at::detail::createCPUGenerator(1),
                                                                 .requires_grad = true});
    const auto meter = std::make_shared<Meter>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
    const auto result =
        decoder.forward(random_ids({1, c.tokens}), layers::Sequences::rows(1, c.tokens, c.device), {.dtype = c.dtype});
    return meter->held;
  };
  held(1);  // what a library keeps for itself from its first call on
  const auto unit = c.tokens * 1024 / c.narrower * static_cast<std::int64_t>(c10::elementSize(c.dtype));
  return static_cast<double>(held(2) - held(1)) / static_cast<double>(unit);
}

// Of a GKA block on a GPU, in units: the MLP's product 5.5, all projections 4.06, states 4, solutions (float32) 2, two
// residual sums 2, o 1; weights as they multiply, gates and norms the rest. On a CPU the MLP keeps 11, and a unit is
// float32.
TEST(KeptMemory, ABlockOfGkaKeepsNothingThatIsCheapToMakeAgain) {
  EXPECT_LT(kept_units("GKA", {.device = at::kCPU, .dtype = at::kFloat, .tokens = 512, .narrower = 8}), 20.1);
  if (!at::hasCUDA() || at::getNumGPUs() == 0) return;
  EXPECT_LT(kept_units("GKA", {.device = at::kCUDA, .dtype = at::kBFloat16, .tokens = 16384, .narrower = 1}), 20.0);
}

}  // namespace
}  // namespace gka::models::test
