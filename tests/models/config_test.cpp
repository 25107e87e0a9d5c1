// Configurations: the published keys and ours, what is refused, and that what is written reads back the same.
#include "models/config.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/files.h"
#include "models/goldens.h"
#include "models/scratch.h"

namespace gka::models::test {
namespace {

Json smallest() {
  return {{"vocab_size", 100},
          {"hidden_size", 64},
          {"intermediate_size", 128},
          {"num_attention_heads", 4},
          {"hybrid_override_pattern", "*-GKA"}};
}

Json with(const std::string& key, const Json& value) {
  auto json = smallest();
  json[key] = value;
  return json;
}

Json without(const std::string& key) {
  auto json = smallest();
  json.erase(key);
  return json;
}

ModelConfig parse(const Json& json) { return parse_training_config(json, "model.json"); }

TEST(Config, WhatFollowsFromOtherSizesMayBeLeftOut) {
  const auto config = parse(smallest());
  EXPECT_EQ(config.mixer.head_dim, 16);
  EXPECT_EQ(config.mixer.num_key_value_heads, 4);
  EXPECT_EQ(config.layer_types, (std::vector<std::string>{"*", "GKA"}));
  EXPECT_EQ(config.mixer.gka.num_iter, 30);
  EXPECT_EQ(config.mixer.gdn.norm_eps, 1e-5);
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_TRUE(config.eos_token_id.empty());
}

TEST(Config, WhatIsWrittenReadsBackTheSame) {
  auto json =
      with("gka_config", {{"num_iter", 12}, {"beta_weight", "paper"}, {"use_gate", false}, {"kv_proj_rank", 4}});
  json["hybrid_override_pattern"] = "2x(GKA-GDN-M2)-SWA-KDA-MESA-GLA-RET-LA-DN";
  json["sliding_window"] = 16;
  json["eos_token_id"] = {3, 5};
  json["mamba2_config"] = {{"state_size", 32}};
  json["transformers_version"] = "5.0";
  const auto written = to_json(parse(json));
  EXPECT_EQ(to_json(parse(written)), written);
  EXPECT_EQ(written["transformers_version"], "5.0");
  const auto again = parse(written);
  EXPECT_EQ(again.mixer.gka.num_iter, 12);
  EXPECT_EQ(again.mixer.gka.beta_weight, layers::BetaWeight::paper);
  EXPECT_FALSE(again.mixer.gka.use_gate);
  EXPECT_EQ(again.mixer.gka.kv_proj_rank, 4);
  EXPECT_EQ(again.mixer.mamba2.state_size, 32);
  EXPECT_EQ(again.eos_token_id, (std::vector<std::int64_t>{3, 5}));
  EXPECT_EQ(again.blocks(), 13);
}

TEST(Config, AWrittenFileHasThePublishedKeysAndNoOthersAtTheirDefaults) {
  const auto written = to_json(parse(smallest()));
  for (const char* key :
       {"architectures", "model_type", "hybrid_override_pattern", "max_position_embeddings", "rope_parameters"}) {
    EXPECT_TRUE(written.contains(key)) << key;
  }
  EXPECT_FALSE(written.contains("layer_types"));  // transformers refuses the names of memories
  EXPECT_TRUE(written["gka_config"].contains("ridge_strength"));
  for (const char* key : {"beta_weight", "sketch_dim", "ridge_mode"}) EXPECT_FALSE(written["gka_config"].contains(key));
  EXPECT_FALSE(written.contains("gdn_config"));
}

TEST(Config, AnUnknownKeyOfATrainingFileIsAnsweredWithTheNearest) {
  EXPECT_ERROR(parse(with("hiden_size", 3)),
               "the key 'hiden_size' of model.json is unknown; did you mean 'hidden_size'?");
  EXPECT_ERROR(parse(with("gka_confg", Json::object())), "did you mean 'gka_config'?");
  EXPECT_ERROR(parse(with("gka_config", {{"num_iters", 3}})),
               "the key 'num_iters' of 'gka_config' of model.json is unknown; did you mean 'num_iter'?");
}

TEST(Config, UnknownKeysOfACheckpointAreOneLineOfWarning) {
  std::vector<std::string> warnings;
  auto json = with("frobnication", true);
  json["gka_config"] = {{"wobble", 1}, {"chunk_size", 64}};
  const auto config =
      parse_checkpoint_config(json, "config.json", [&](const std::string& line) { warnings.push_back(line); });
  EXPECT_EQ(warnings, std::vector<std::string>{"config.json has keys that gka does not know and ignores: frobnication, "
                                               "gka_config.wobble"});
  EXPECT_EQ(to_json(config)["frobnication"], true);
}

TEST(Config, LayersThatAreNotSupportedAreNamed) {
  EXPECT_ERROR(parse(with("hybrid_override_pattern", "*-BMF")), "layer 1 of model.json has the type 'BMF'");
  EXPECT_ERROR(parse(with("hybrid_override_pattern", "GKA*-*")), "'GKA*', which is a fused pair");
  EXPECT_ERROR(parse(with("hybrid_override_pattern", "GKB")), "'GKB', which is not known; the types are *, SWA, GKA");
}

TEST(Config, OverridesWin) {
  auto json = with("gka_config", {{"num_iter", 30}, {"use_gate", false}});
  json["gka_overrides"] = {{"num_iter", 10}};
  EXPECT_EQ(parse(json).mixer.gka.num_iter, 10);
  EXPECT_FALSE(parse(json).mixer.gka.use_gate);
  EXPECT_EQ(parse(with("gka_overrides", {{"num_iter", 7}})).mixer.gka.num_iter, 7);
  EXPECT_ERROR(parse(with("gka_overrides", {{"num_itr", 7}})), "did you mean 'num_iter'?");
}

TEST(Config, RotarySettingsComeInTwoForms) {
  EXPECT_EQ(parse(with("rope_theta", 5e5)).mixer.rope_theta, 5e5);
  EXPECT_EQ(parse(with("rope_parameters", {{"rope_type", "default"}, {"rope_theta", 1e6}})).mixer.rope_theta, 1e6);
  EXPECT_ERROR(parse(with("rope_parameters", {{"rope_type", "yarn"}})), "'yarn'");
  EXPECT_ERROR(parse(with("rope_scaling", {{"factor", 2}})), "'rope_scaling'");
  EXPECT_EQ(parse(with("rope_scaling", nullptr)).mixer.hidden_size, 64);
}

TEST(Config, APlainQwen3FileIsAttentionThroughout) {
  auto json = without("hybrid_override_pattern");
  json["num_hidden_layers"] = 3;
  EXPECT_EQ(parse(json).layer_types, (std::vector<std::string>{"*", "*", "*"}));
  json["layer_types"] = {"full_attention", "sliding_attention", "full_attention"};
  json["sliding_window"] = 9;
  EXPECT_EQ(parse(json).layer_types, (std::vector<std::string>{"*", "SWA", "*"}));
}

TEST(Config, OnlyKnownKindsOfModelAreRead) {
  EXPECT_ERROR(parse(with("model_type", "gemma3_text")),
               "'model_type' of model.json is 'gemma3_text', a kind of model that gka does not have; it has "
               "hybrid_qwen3, qwen3, qwen2, llama");
  EXPECT_TRUE(parse(with("model_type", "qwen3")).mixer.attention.qk_norm);
  EXPECT_FALSE(parse(with("model_type", "llama")).mixer.attention.qk_norm);
  EXPECT_TRUE(parse(with("model_type", "qwen2")).mixer.attention.qkv_bias);
}

TEST(Config, AttentionAloneIsWrittenUnderTransformersName) {
  for (const char* type : {"qwen3", "qwen2", "llama"}) {
    auto json = with("model_type", type);
    json["hybrid_override_pattern"] = "*-*";
    const auto written = to_json(parse(json));
    EXPECT_EQ(written["model_type"], type);
    EXPECT_EQ(written["layer_types"], (Json{"full_attention", "full_attention"}));
    EXPECT_FALSE(written.contains("hybrid_override_pattern"));
    EXPECT_EQ(to_json(parse(written)), written);
    json["hybrid_override_pattern"] = "*-GKA";
    const auto hybrid = to_json(parse(json));
    EXPECT_EQ(hybrid["model_type"], "hybrid_qwen3");
    EXPECT_EQ(to_json(parse(hybrid)), hybrid);
    EXPECT_EQ(parse(hybrid).mixer.attention.qk_norm, parse(json).mixer.attention.qk_norm);
  }
}

TEST(Config, KeysThatChangeTheMathematicsAreHonouredOrRefused) {
  auto json = without("hybrid_override_pattern");
  json["num_hidden_layers"] = 3;
  json["sliding_window"] = 9;
  json["max_window_layers"] = 1;
  EXPECT_EQ(parse(json).layer_types, (std::vector<std::string>{"*", "*", "*"}));
  json["use_sliding_window"] = true;
  EXPECT_EQ(parse(json).layer_types, (std::vector<std::string>{"*", "SWA", "SWA"}));

  auto hybrid = with("hybrid_override_pattern", "SWA-GKA");
  hybrid["swa_config"] = {{"window_size", 7}};
  EXPECT_EQ(parse(hybrid).mixer.sliding_window, 7);
  hybrid["layer_types"] = {"sliding_attention", "linear_attention"};
  EXPECT_EQ(parse(hybrid).layer_types, (std::vector<std::string>{"SWA", "GKA"}));
  hybrid["layer_types"] = {"linear_attention", "linear_attention"};
  EXPECT_ERROR(parse(hybrid), "say different things");

  EXPECT_ERROR(parse(with("quantization_config", {{"quant_method", "fp8"}})),
               "'quantization_config' of model.json is set");
  EXPECT_ERROR(parse(with("mlp_bias", true)), "'mlp_bias' of model.json is true");
  EXPECT_ERROR(parse(with("final_logit_softcapping", 30.0)), "it must be left out");
  EXPECT_EQ(parse(with("mlp_bias", false)).mixer.hidden_size, 64);
  EXPECT_EQ(parse(with("partial_rotary_factor", 1.0)).mixer.hidden_size, 64);
}

TEST(Config, RotaryScalingIsReadInBothFormsAndWritten) {
  const Json llama3{{"rope_type", "llama3"},   {"factor", 8.0},     {"low_freq_factor", 1.0},
                    {"high_freq_factor", 4.0}, {"rope_theta", 5e5}, {"original_max_position_embeddings", 8192}};
  const auto config = parse(with("rope_parameters", llama3));
  EXPECT_EQ(config.mixer.rope.rope_type, layers::RopeType::llama3);
  EXPECT_EQ(config.mixer.rope_theta, 5e5);
  EXPECT_EQ(to_json(parse(to_json(config))), to_json(config));
  auto older = llama3;
  older["type"] = older["rope_type"];
  older.erase("rope_type");
  older.erase("rope_theta");
  EXPECT_EQ(parse(with("rope_scaling", older)).mixer.rope.factor, 8.0);
  older.erase("high_freq_factor");
  EXPECT_ERROR(parse(with("rope_scaling", older)), "'high_freq_factor' above that");
  EXPECT_ERROR(parse(with("rope_parameters", {{"rope_type", "longrope"}})), "one of default, linear, llama3, yarn");
}

TEST(Config, WhatMakesNoSenseIsRefusedInASentence) {
  EXPECT_ERROR(parse(without("vocab_size")), "'vocab_size' of model.json is missing");
  EXPECT_ERROR(parse(without("hybrid_override_pattern")), "has no layers: it needs 'hybrid_override_pattern'");
  EXPECT_ERROR(parse(without("intermediate_size")), "'intermediate_size'");
  EXPECT_ERROR(parse(with("hidden_size", -4)), "must be above 0, and is -4");
  EXPECT_ERROR(parse(with("hidden_size", "wide")),
               R"('hidden_size' of model.json takes a whole number, and is "wide")");
  EXPECT_ERROR(parse(with("num_hidden_layers", 5)), "is 5, and its pattern has 2 layers");
  EXPECT_ERROR(parse(with("layer_types", {"GKA", "GKA"})), "say different things");
  EXPECT_ERROR(parse(with("num_key_value_heads", 3)), "must be a multiple of 'num_key_value_heads'");
  EXPECT_ERROR(parse(with("hybrid_override_pattern", "SWA")), "'sliding_window' of model.json is missing");
  EXPECT_ERROR(parse(with("eos_token_id", 100)), "outside the vocabulary of 100 tokens");
  EXPECT_ERROR(parse(with("eos_token_id", "end")), "takes a token number or a list of them");
  EXPECT_ERROR(parse(with("hidden_act", "gelu")), "'gelu'; gka has 'silu'");
  EXPECT_ERROR(parse(with("gka_config", 3)), "'gka_config' of model.json takes a JSON object");
  EXPECT_ERROR(parse(with("gka_config", {{"solver_type", "jacobi"}})), "one of chebyshev, conjugate_gradient");
  EXPECT_ERROR(parse(with("gka_config", {{"ridge_strength", 0}})),
               "'ridge_strength' of 'gka_config' of model.json is 0.0; it takes a number above 0");
  EXPECT_ERROR(parse(with("gdn_config", {{"norm_eps", -1}})), "it takes a number of at least 0");
  EXPECT_ERROR(parse(with("mesa_config", {{"lambda_lower_bound", 1}})), "of at least 0 and below 1");
  EXPECT_NO_THROW(parse(with("gka_config", {{"norm_eps", 0}})));
  EXPECT_ERROR(parse(with("gka_config", {{"conv_size", 9}})), "it takes at most 8");
  EXPECT_ERROR(parse(with("mesa_config", {{"num_iter", 0}})), "it takes at least 1");
  EXPECT_ERROR(parse(with("gla_config", {{"gate_low_rank_dim", 0}})), "it takes at least 1");
  for (const char* key : {"head_dim", "state_size", "n_groups", "conv_size"}) {
    EXPECT_ERROR(parse(with("mamba2_config", {{key, 0}})), "it takes at least 1");
  }
  for (const char* key : {"rms_norm_eps", "initializer_range", "conv_initializer_range"}) {
    EXPECT_ERROR(parse(with(key, -1)), "' of model.json is -1.0; it takes a number of at least 0");
  }
  for (const double theta : {0.0, -1.0}) {
    EXPECT_ERROR(parse(with("rope_theta", theta)), "it takes a number above 0");
    EXPECT_ERROR(parse(with("rope_parameters", {{"rope_type", "default"}, {"rope_theta", theta}})), "above 0");
  }
  EXPECT_ERROR(parse(Json::array()), "does not hold a JSON object");
}

TEST(Config, Mamba2AloneNeedsNoMlp) {
  auto json = without("intermediate_size");
  json["hybrid_override_pattern"] = "2xM2";
  EXPECT_EQ(parse(json).intermediate_size, 0);
  json["mlp_everywhere"] = true;
  EXPECT_ERROR(parse(json), "'intermediate_size'");
}

TEST(Config, BrokenJsonIsShownWithItsLine) {
  const Scratch folder;
  write_text(folder / "bad.json", "{\n  \"a\": 1,\n  oops\n}");
  EXPECT_ERROR(read_json(folder / "bad.json"), "bad.json is not valid JSON: there is a mistake in line 3");
  EXPECT_ERROR(read_json(folder / "none.json"), "cannot open");
}

TEST(Config, PublishedFilesAreReadWithoutAWarning) {
  for (const char* name : {"tiny-hqwen3-gka", "tiny-hqwen3-gdn"}) {
    const auto path = goldens() / name / "config.json";
    const auto config = parse_training_config(read_json(path), path.string());
    EXPECT_EQ(config.blocks(), 4);
    EXPECT_EQ(config.mixer.rope_theta, 1e6);
    EXPECT_EQ(config.mixer.num_key_value_heads, 2);
  }
}

}  // namespace
}  // namespace gka::models::test
