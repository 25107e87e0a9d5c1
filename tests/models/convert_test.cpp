// Attention replaced by memories: what is taken over, what stays, and what cannot be.
#include "models/convert.h"

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <string>

#include "models/scratch.h"
#include "models/tiny.h"

namespace gka::models::test {
namespace {

const at::Tensor& value(const Decoder& model, const std::string& name) { return model.parameters().find(name)->value; }

TEST(Convert, MemoriesTakeOverProjectionsAndTheRestStays) {
  const auto model = tiny_model(tiny_config("*-*-SWA", /*tied=*/true));
  const auto hybrid = replace_attention(model, "*-GKA-KDA");
  EXPECT_EQ(hybrid.config().layer_types, (std::vector<std::string>{"*", "GKA", "KDA"}));
  for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
    const auto weight = "." + std::string(name) + ".weight";
    EXPECT_TRUE(
        at::equal(value(hybrid, "model.layers.1.gka" + weight), value(model, "model.layers.1.self_attn" + weight)))
        << name;
  }
  // KDA has a key head for every query head: copies of the two there are.
  const auto keys = value(hybrid, "model.layers.2.kda.k_proj.weight").unflatten(0, {4, 8});
  const auto few = value(model, "model.layers.2.self_attn.k_proj.weight").unflatten(0, {2, 8});
  for (int head = 0; head < 4; ++head) EXPECT_TRUE(at::equal(keys[head], few[head / 2])) << head;
  const auto conv = value(hybrid, "model.layers.1.gka.k_conv1d.weight");
  EXPECT_EQ(conv.select(-1, 3).min().item<double>(), 1.0);
  EXPECT_EQ(conv.narrow(-1, 0, 3).abs().max().item<double>(), 0.0);
  for (const char* name : {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight",
                           "model.layers.1.mlp.up_proj.weight", "model.norm.weight"}) {
    EXPECT_TRUE(at::equal(value(hybrid, name), value(model, name))) << name;
  }
  const auto sequences = layers::Sequences::rows(1, 9, at::kCPU);
  const auto logits = hybrid.logits(hybrid.forward(random_ids({1, 9}), sequences).hidden);
  EXPECT_TRUE(logits.isfinite().all().item<bool>());
}

TEST(Convert, WhatCannotBeReplacedIsNamed) {
  const auto model = tiny_model(tiny_config("*-GKA"));
  EXPECT_ERROR(replace_attention(model, "*-GKA-*"), "has 3 layers, and the model 2");
  EXPECT_ERROR(replace_attention(model, "*-*"), "layer 1 would change from GKA to *; only attention is replaced");
  EXPECT_ERROR(replace_attention(model, "M2-GKA"), "cannot take over attention's projections");
  EXPECT_ERROR(replace_attention(model, "GLA-GKA"), "of another shape than attention's");
}

}  // namespace
}  // namespace gka::models::test
