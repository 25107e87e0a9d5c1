// Published checkpoints give their logits (and their greedy tokens: tests/infer/generate_test.cpp).
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <string>

#include "models/checkpoint.h"
#include "models/goldens.h"
#include "models/scratch.h"
#include "models/tiny.h"

namespace gka::models::test {
namespace {

using layers::Sequences;

class PublishedCheckpoint : public testing::TestWithParam<const char*> {
 protected:
  static std::filesystem::path folder() { return goldens() / GetParam(); }
};

TEST_P(PublishedCheckpoint, GivesItsLogits) {
  const at::NoGradGuard no_gradient;
  const SafetensorsFile golden(folder() / "golden.safetensors");
  // The stored logits are float32, so no closer than 1e-7.
  for (const auto& [dtype, tolerance] : {std::pair{at::kFloat, 5e-5}, {at::kDouble, 1e-6}}) {
    const auto decoder = load_model(folder(), {.dtype = dtype});
    for (const char* number : {"0", "1", "2"}) {
      const auto ids = golden.tensor("input_ids." + std::string(number)).unsqueeze(0);
      const auto hidden = decoder.forward(ids, Sequences::rows(1, ids.size(1), at::kCPU)).hidden;
      const auto expected = golden.tensor("logits." + std::string(number));
      EXPECT_LT(error_of(decoder.logits(hidden).squeeze(0), expected), tolerance) << number << " " << dtype;
    }
  }
}

TEST_P(PublishedCheckpoint, IsSavedAsItWas) {
  const Scratch copy;
  save_model(load_model(folder()), copy.path());
  EXPECT_EQ(Weights(copy.path()).names(), Weights(folder()).names());
  const auto before = read_json(folder() / "config.json");
  const auto after = read_json(copy / "config.json");
  for (const auto& [key, value] : before.items()) {
    if (key == "gka_config") continue;                                    // written with every key
    EXPECT_EQ(nlohmann::json(after[key]), nlohmann::json(value)) << key;  // whatever the order of keys
  }
}

INSTANTIATE_TEST_SUITE_P(Goldens, PublishedCheckpoint, testing::Values("tiny-hqwen3-gka", "tiny-hqwen3-gdn"),
                         [](const auto& name) { return std::string(name.param).substr(sizeof("tiny-hqwen3")); });

}  // namespace
}  // namespace gka::models::test
