// The training file: what is wrong is said with the key, what it got and what it takes.
#include "train/config.h"

#include <gtest/gtest.h>

#include "base/files.h"
#include "models/scratch.h"

namespace gka::train {
namespace {

namespace fs = std::filesystem;
using models::test::Scratch;

Json smallest() {
  return {{"model", {{"hidden_size", 8}}},
          {"data", {{"kind", "task"}}},
          {"length", 16},
          {"batch_tokens", 64},
          {"steps", 10},
          {"output", "out"}};
}

Json smallest_with(const std::string& key, const Json& value) {
  auto settings = smallest();
  settings[key] = value;
  return settings;
}

std::string complaint(const Json& settings) {
  return models::test::complaint_of([&] { parse(settings); });
}

TEST(TrainingFile, FillsInWhatIsLeftOut) {
  const auto config = parse(smallest());
  EXPECT_EQ(config.learning_rate, 1e-3);
  EXPECT_EQ(config.betas, (std::array{0.9, 0.95}));
  EXPECT_EQ(config.clip, 1);
  EXPECT_EQ(config.warmup, 0.05);
  EXPECT_EQ(config.micro_batch(), 4);
  EXPECT_FALSE(config.stop_accuracy);
}

TEST(TrainingFile, EveryDefaultIsWhatItsKeyTakes) {
  for (const auto& key : keys()) {
    if (key.preset.empty()) continue;
    Config config;
    EXPECT_TRUE(key.read(Json::parse(key.preset), config)) << key.name;
  }
}

TEST(TrainingFile, NamesTheNearestKeyToAnUnknownOne) {
  const auto text = complaint(smallest_with("learning_rat", 1));
  EXPECT_NE(text.find("'learning_rat'"), std::string::npos) << text;
  EXPECT_NE(text.find("did you mean 'learning_rate'?"), std::string::npos) << text;
}

TEST(TrainingFile, SaysWhatAKeyGotAndTakes) {
  const std::vector<std::pair<std::string, Json>> wrong{{"learning_rate", "fast"},
                                                        {"learning_rate", -1},
                                                        {"warmup", 1.5},
                                                        {"betas", {0.9}},
                                                        {"betas", {0.9, 1.0}},
                                                        {"length", 2.5},
                                                        {"length", 0},
                                                        {"seed", -1},
                                                        {"dtype", "float8"},
                                                        {"device", "cuda:x"},
                                                        {"device", "tpu"},
                                                        {"stop_accuracy", 2},
                                                        {"model", 3},
                                                        {"data", "file.tokens"},
                                                        {"keep", 0},
                                                        {"steps", 0},
                                                        {"output", ""},
                                                        {"checkpoint_every", -1},
                                                        {"checkpoint_activations", 1},
                                                        {"clip", "x"}};
  for (const auto& [key, value] : wrong) {
    const auto text = complaint(smallest_with(key, value));
    EXPECT_TRUE(text.starts_with(key + " is " + value.dump() + "; it takes ")) << key << ": " << text;
  }
}

TEST(TrainingFile, LacksWhatMustBeGiven) {
  for (const char* key : {"model", "data", "batch_tokens"}) {
    auto settings = smallest();
    settings.erase(key);
    EXPECT_TRUE(complaint(settings).starts_with(std::string("the training file lacks '") + key + "'"));
  }
}

TEST(TrainingFile, WantsWholeSequencesInEveryPartOfABatch) {
  auto settings = smallest_with("accumulation", 3);
  EXPECT_NE(complaint(settings).find("16 × 3 = 48, such as 48."), std::string::npos) << complaint(settings);
  settings["batch_tokens"] = 96;
  EXPECT_EQ(complaint(settings), "");
}

TEST(TrainingFile, TakesStepsOrTokensButNotBoth) {
  auto settings = smallest();
  settings["tokens"] = 8e9;
  EXPECT_NE(complaint(settings).find("both steps and tokens"), std::string::npos);
  settings.erase("steps");
  EXPECT_EQ(parse(settings).steps, 125'000'000);
  settings["tokens"] = 65;
  EXPECT_EQ(parse(settings).steps, 2) << "rounded up";
  settings.erase("tokens");
  EXPECT_NE(complaint(settings).find("neither steps nor tokens"), std::string::npos);
}

TEST(Set, ReadsJsonAndElseText) {
  auto settings = smallest();
  assign(settings, "learning_rate=3e-4");
  assign(settings, "betas=[0.8, 0.9]");
  assign(settings, "dtype=float64");
  assign(settings, "model.hidden_size=32");
  assign(settings, "model.pattern=GKA-GKA");
  const auto config = parse(settings);
  EXPECT_EQ(config.learning_rate, 3e-4);
  EXPECT_EQ(config.betas[0], 0.8);
  EXPECT_EQ(config.dtype, "float64");
  EXPECT_EQ(config.model.at("hidden_size"), 32);
  EXPECT_EQ(config.model.at("pattern"), "GKA-GKA");
}

TEST(Set, ReachesIntoLists) {
  auto settings = smallest();
  settings["data"]["sizes"] = {{{"tokens", 64}}, {{"tokens", 128}}};
  assign(settings, "data.sizes.1.tokens=256");
  EXPECT_EQ(settings["data"]["sizes"][0]["tokens"], 64);
  EXPECT_EQ(settings["data"]["sizes"][1]["tokens"], 256);
}

TEST(Set, RefusesWhatIsNoAssignment) {
  auto settings = smallest();
  EXPECT_THROW(assign(settings, "learning_rate"), std::runtime_error);
  EXPECT_THROW(assign(settings, "=3"), std::runtime_error);
  EXPECT_THROW(assign(settings, "lenght=3"), std::runtime_error);
  EXPECT_THROW(assign(settings, "length.x=3"), std::runtime_error);
}

TEST(Set, ReplacesHowLongToTrain) {
  auto settings = smallest();
  assign(settings, "tokens=640");
  EXPECT_EQ(parse(settings).steps, 10);
  assign(settings, "steps=3");
  EXPECT_EQ(parse(settings).steps, 3);
}

TEST(TrainingFile, FollowsPathsFromItsOwnFolder) {
  const Scratch scratch;
  fs::create_directories(scratch / "models");
  write_text(scratch / "models/m.json", R"({"hidden_size": 24})");
  auto file = smallest();
  file["model"] = "models/m.json";
  file["data"] = {{"kind", "tokens"}, {"files", {"a.tokens", {{"path", "sub/b.tokens"}, {"weight", 2}}}}};
  file.erase("output");
  write_text(scratch / "small.json", file.dump());
  const auto settings = read_settings(scratch / "small.json");
  EXPECT_EQ(settings.at("model").at("hidden_size"), 24);
  EXPECT_EQ(settings.at("data").at("files")[0], (scratch / "a.tokens").string());
  EXPECT_EQ(settings.at("data").at("files")[1].at("path"), (scratch / "sub/b.tokens").string());
  EXPECT_EQ(settings.at("output"), "runs/small");
  auto unnamed = smallest_with("model", "m.json");
  unnamed.erase("output");
  write_text(scratch / "models/m.train.json", unnamed.dump());
  EXPECT_EQ(read_settings(scratch / "models/m.train.json").at("output"), "runs/models-m");
}

TEST(TrainingFile, IsNamedWhenItIsMissing) { EXPECT_ERROR(read_settings("/nowhere/x.json"), "'/nowhere/x.json'"); }

TEST(Resume, MayChangeWhatDoesNotChangeTheResult) {
  const auto before = parse(smallest()).settings;
  EXPECT_EQ(first_difference(before, parse(smallest_with("keep", 7)).settings), std::nullopt);
  EXPECT_EQ(first_difference(before, parse(smallest_with("seed", 7)).settings), "seed");
  EXPECT_EQ(first_difference(before, parse(smallest_with("steps", 11)).settings), "steps");
}

}  // namespace
}  // namespace gka::train
