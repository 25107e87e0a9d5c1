// Checkpoints: saving and loading is exact, whole or split; what is damaged or missing is named.
#include "models/checkpoint.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/files.h"
#include "models/activations.h"
#include "models/scratch.h"
#include "models/tiny.h"

namespace gka::models::test {
namespace {

void expect_same(const Decoder& a, const Decoder& b) {
  ASSERT_EQ(a.parameters().all().size(), b.parameters().all().size());
  for (const auto& parameter : a.parameters().all()) {
    const auto* other = b.parameters().find(parameter.name);
    ASSERT_NE(other, nullptr) << parameter.name;
    EXPECT_EQ(other->value.scalar_type(), parameter.value.scalar_type()) << parameter.name;
    EXPECT_TRUE(at::equal(parameter.value, other->value)) << parameter.name;
  }
  EXPECT_EQ(a.config().layer_types, b.config().layer_types);
}

void no_warning(const std::string& line) { ADD_FAILURE() << line; }

TEST(Checkpoint, WhatIsSavedLoadsToTheBit) {
  std::string pattern;
  for (const char* kind : kEveryKind) pattern += (pattern.empty() ? "" : "-") + std::string(kind);
  for (const bool tied : {false, true}) {
    const Scratch folder;
    const auto model = tiny_model(tiny_config(pattern, tied), at::kFloat);
    save_model(model, folder.path());
    EXPECT_EQ(folder.names(), (std::vector<std::string>{"config.json", "gka_hf.py", "model.safetensors"}));
    EXPECT_EQ(Weights(folder.path()).has("lm_head.weight"), !tied);
    expect_same(model, load_model(folder.path(), {.warn = no_warning}));
  }
}

TEST(Checkpoint, AboveASizeItIsSplitWithAnIndexAndLoadsTheSame) {
  const Scratch folder;
  const auto model = tiny_model(tiny_config("GKA-*"), at::kFloat);
  save_model(model, folder.path());
  save_model(model, folder.path(), {.shard_bytes = 20'000});
  const auto names = folder.names();
  EXPECT_GT(names.size(), 4U);
  EXPECT_EQ(names[2], "model-00001-of-0000" + std::to_string(names.size() - 3) + ".safetensors");
  EXPECT_EQ(names.back(), "model.safetensors.index.json");
  expect_same(model, load_model(folder.path(), {.warn = no_warning}));

  const auto index = read_json(folder / "model.safetensors.index.json");
  std::int64_t bytes = 0;
  for (const auto& parameter : model.parameters().all()) bytes += static_cast<std::int64_t>(parameter.value.nbytes());
  EXPECT_EQ(index["metadata"]["total_size"], bytes);

  save_model(model, folder.path());
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"config.json", "gka_hf.py", "model.safetensors"}));
}

TEST(Checkpoint, AHybridNamesThePythonThatTransformersOpensItWith) {
  const Scratch folder;
  auto config = tiny_config("GKA-*");
  config.extra["auto_map"] = {{"AutoConfig", "theirs.Config"}};  // where it came from; that file is not here
  save_model(tiny_model(config, at::kFloat), folder.path());
  EXPECT_EQ(read_json(folder / "config.json")["auto_map"]["AutoConfig"], "gka_hf.GkaConfig");
  save_model(tiny_model(tiny_config("*"), at::kFloat), folder / "attention");
  EXPECT_FALSE(read_json(folder / "attention" / "config.json").contains("auto_map"));
}

TEST(Checkpoint, AModelLoadsInAnotherType) {
  const Scratch folder;
  const auto model = tiny_model(tiny_config("GKA"), at::kFloat);
  save_model(model, folder.path(), {.dtype = at::kBFloat16});
  EXPECT_EQ(read_json(folder / "config.json")["dtype"], "bfloat16");
  EXPECT_EQ(load_model(folder.path()).parameters().options().dtype, at::kBFloat16);
  const auto wide = load_model(folder.path(), {.dtype = at::kFloat});
  for (const auto& parameter : wide.parameters().all()) {
    EXPECT_EQ(parameter.value.scalar_type(), at::kFloat);
    EXPECT_TRUE(
        at::equal(parameter.value.to(at::kBFloat16), model.parameters().find(parameter.name)->value.to(at::kBFloat16)));
  }
}

TEST(Checkpoint, WhatIsMissingOrOfAnotherShapeIsNamed) {
  const Scratch folder;
  const auto model = tiny_model(tiny_config("GKA"), at::kFloat);
  save_model(model, folder.path());
  auto tensors = SafetensorsFile(folder / "model.safetensors").tensors();
  const auto norm = tensors.extract("model.norm.weight");
  write_safetensors(folder / "model.safetensors", tensors);
  EXPECT_ERROR(load_model(folder.path()), "the checkpoint lacks tensors of this model: model.norm.weight");
  tensors["model.norm.weight"] = at::zeros({3});
  write_safetensors(folder / "model.safetensors", tensors);
  EXPECT_ERROR(load_model(folder.path()),
               "'model.norm.weight' has the shape [3] in the checkpoint and [32] by its configuration");
  tensors["model.norm.weight"] = norm.mapped();
  tensors["model.surplus"] = at::zeros({3});
  write_safetensors(folder / "model.safetensors", tensors);
  EXPECT_ERROR(load_model(folder.path()), "the checkpoint has tensors that this model has no use for");
  EXPECT_ERROR(load_model(folder.path()), "model.surplus");
}

TEST(Checkpoint, TheSlidingLayersOfAHybridHaveTheirPublishedNamesAndLoadUnderBoth) {
  const Scratch folder;
  const auto model = tiny_model(tiny_config("SWA-GKA"), at::kFloat);
  save_model(model, folder.path());
  auto tensors = SafetensorsFile(folder / "model.safetensors").tensors();
  EXPECT_TRUE(tensors.contains("model.layers.0.swa.q_proj.weight"));
  EXPECT_EQ(read_json(folder / "config.json")["swa_config"]["window_size"], 5);
  expect_same(model, load_model(folder.path(), {.warn = no_warning}));

  Tensors renamed;
  for (const auto& [name, tensor] : tensors) {
    auto other = name;
    if (const auto place = name.find(".swa."); place != std::string::npos) other.replace(place, 5, ".self_attn.");
    renamed.emplace(other, tensor);
  }
  write_safetensors(folder / "model.safetensors", renamed);
  expect_same(model, load_model(folder.path(), {.warn = no_warning}));
}

TEST(Checkpoint, AttentionWithItsOwnChoicesLoadsAsItWasSaved) {
  auto config = tiny_config("*-*");
  config.mixer.attention = {.conv_size = 3, .qk_norm = false, .qkv_bias = true};
  config.mixer.rope = {.rope_type = layers::RopeType::linear, .factor = 4.0};
  const Scratch folder;
  const auto model = tiny_model(config, at::kFloat);
  save_model(model, folder.path());
  const auto again = load_model(folder.path(), {.warn = no_warning});
  expect_same(model, again);
  EXPECT_EQ(again.config().mixer.attention.conv_size, 3);
  EXPECT_EQ(again.config().mixer.rope.factor, 4.0);
}

TEST(Checkpoint, AnotherModelsTensorsAreAnError) {
  const Scratch folder;
  save_model(tiny_model(tiny_config("GKA-GKA", /*tied=*/true), at::kFloat), folder.path());
  auto tensors = SafetensorsFile(folder / "model.safetensors").tensors();
  tensors["lm_head.weight"] = tensors.at("model.embed_tokens.weight") + 1;
  write_safetensors(folder / "model.safetensors", tensors);
  EXPECT_ERROR(load_model(folder.path()), "a 'lm_head.weight' that is not its embedding");
  tensors["lm_head.weight"] = tensors.at("model.embed_tokens.weight");
  tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = at::zeros({3});
  write_safetensors(folder / "model.safetensors", tensors);
  load_model(folder.path(), {.warn = no_warning});
  tensors["model.layers.0.mamba.in_proj.weight"] = at::zeros({3});
  write_safetensors(folder / "model.safetensors", tensors);
  EXPECT_ERROR(load_model(folder.path()), "with a rotary embedding and norms of B and C");
}

TEST(Checkpoint, EndTokensOfTheGenerationConfigurationCount) {
  const Scratch folder;
  auto config = tiny_config("*");
  config.eos_token_id = {1};
  save_model(tiny_model(config, at::kFloat), folder.path());
  EXPECT_EQ(load_config(folder.path()).eos_token_id, (std::vector<std::int64_t>{1}));
  write_text(folder / "generation_config.json", R"({"eos_token_id": [2, 3], "temperature": 0.6})");
  EXPECT_EQ(load_config(folder.path()).eos_token_id, (std::vector<std::int64_t>{2, 3}));
  write_text(folder / "generation_config.json", R"({"eos_token_id": 61})");
  EXPECT_ERROR(load_config(folder.path()), "generation_config.json is 61, outside the vocabulary of 61 tokens");
}

TEST(Checkpoint, ATokenizerIsDescribedToTransformers) {
  const Scratch folder;
  auto config = tiny_config("*");
  config.eos_token_id = {7};
  config.max_position_embeddings = 99;
  write_tokenizer_config(folder.path(), config);
  EXPECT_TRUE(folder.names().empty());
  write_text(folder / "tokenizer.json", R"({"added_tokens": [{"id": 7, "content": "<end>"}], "model": {"vocab": {}}})");
  write_tokenizer_config(folder.path(), config, "{{ messages }}");
  const auto json = read_json(folder / "tokenizer_config.json");
  EXPECT_EQ(json["eos_token"], "<end>");
  EXPECT_EQ(json["model_max_length"], 99);
  EXPECT_EQ(json["chat_template"], "{{ messages }}");
}

TEST(Checkpoint, WhatIsNoCheckpointIsCalledThat) {
  const Scratch folder;
  EXPECT_ERROR(load_model(folder / "nowhere"), "there is no model '" + (folder / "nowhere").string() +
                                                   "': it is a checkpoint's folder or a training run");
  EXPECT_ERROR(load_model(folder.path()), "is not a checkpoint: that is a folder with a config.json in it");
  save_model(tiny_model(tiny_config("GKA"), at::kFloat), folder.path(), {.shard_bytes = 20'000});
  write_text(folder / "model-00002-of-00003.safetensors", "");
  EXPECT_NE(complaint_of([&] { load_model(folder.path()); }), "");
  std::filesystem::remove(folder / "model.safetensors.index.json");
  EXPECT_ERROR(load_model(folder.path()),
               "holds no weights: neither model.safetensors nor model.safetensors.index.json");
  write_text(folder / "model.safetensors.index.json", "{}");
  EXPECT_ERROR(load_model(folder.path()), "has no 'weight_map'");
}

TEST(Checkpoint, Int8OnAGpuGoesWithBfloat16Activations) {
  const at::Device gpu(at::kCUDA, 0);
  EXPECT_EQ(matrices_type(WeightsAs::int8, at::kBFloat16, at::kBFloat16, gpu), at::kChar);
  EXPECT_EQ(matrices_type(WeightsAs::stored, at::kChar, at::kBFloat16, gpu), at::kChar);
  EXPECT_ERROR(matrices_type(WeightsAs::int8, at::kHalf, at::kHalf, gpu), "give that type to the activations");
  EXPECT_EQ(activations_of({.device = gpu, .dtype = at::kFloat, .matrices = at::kChar}), at::kBFloat16);
  EXPECT_EQ(activations_of({.device = gpu, .dtype = at::kFloat, .matrices = at::kBFloat16}), at::kBFloat16);
  EXPECT_EQ(activations_of({.device = at::kCPU, .dtype = at::kFloat, .matrices = at::kChar}), at::kFloat);
}

}  // namespace
}  // namespace gka::models::test
