// The files of configs/: each reads, models of one size have as many parameters as each other, and recipes name models.
// Parameters are counted on the meta device, which allocates nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "models/decoder.h"
#include "models/goldens.h"

namespace gka::models::test {
namespace {

namespace fs = std::filesystem;

bool is_recipe(const fs::path& path) { return path.string().ends_with(".train.json"); }

/// The language models of each folder of configs/.
std::map<std::string, std::vector<fs::path>> models_by_size() {
  std::map<std::string, std::vector<fs::path>> models;
  for (const auto& entry : fs::recursive_directory_iterator(repository() / "configs")) {
    if (entry.path().extension() != ".json" || is_recipe(entry.path())) continue;
    if (entry.path().parent_path().filename() == "vision") continue;
    models[entry.path().parent_path().filename()].push_back(entry.path());
  }
  return models;
}

ModelConfig read(const fs::path& path) { return parse_training_config(read_json(path), path.string()); }

void expect_within_two_percent(const std::vector<fs::path>& models, double size) {
  for (const auto& path : models) {
    const auto count = static_cast<double>(count_parameters(read(path)));
    EXPECT_LT(std::abs(count - size) / size, 0.02) << path << ": " << count;
  }
}

TEST(Configs, LayersOfOneSizeHaveTheSameNumberOfParameters) {
  const auto models = models_by_size();
  expect_within_two_percent(models.at("440m"), 440e6);
  expect_within_two_percent(models.at("1b"), 1.0e9);
  expect_within_two_percent(models.at("2.8b"), 2.8e9);
  for (const char* size : {"tiny", "small"}) {
    const auto gka = count_parameters(read(repository() / "configs" / size / "gka.json"));
    expect_within_two_percent(models.at(size), static_cast<double>(gka));
  }
}

TEST(Configs, EverySizeOfThePaperHasEveryMixer) {
  const auto models = models_by_size();
  for (const char* size : {"440m", "1b", "2.8b", "small", "tiny"}) EXPECT_GE(models.at(size).size(), 11U) << size;
}

TEST(Configs, ThePapersShapesAreKept) {
  struct Shape {
    const char* size;
    std::int64_t blocks, heads, width;
  };
  for (const auto& shape : {Shape{"440m", 28, 8, 1024}, {"1b", 28, 12, 1536}, {"2.8b", 32, 20, 2560}}) {
    const auto models = models_by_size();
    for (const auto& path : models.at(shape.size)) {
      const auto config = read(path);
      EXPECT_EQ(config.vocab_size, 50257) << path;
      EXPECT_EQ(config.mixer.hidden_size, shape.width) << path;
      EXPECT_EQ(config.mixer.num_attention_heads, shape.heads) << path;
      if (path.stem() != "mamba2" && path.stem() != "hybrid") {
        EXPECT_EQ(config.blocks(), shape.blocks) << path;
      }
    }
  }
  const auto hybrid = read(repository() / "configs/2.8b/hybrid.json");
  ASSERT_EQ(hybrid.blocks(), 30);
  for (const std::size_t place : {6, 14, 22, 29}) EXPECT_EQ(hybrid.layer_types[place], "*");
}

TEST(Configs, EveryModelHasARecipeBesideItThatNamesIt) {
  for (const auto& [size, models] : models_by_size()) {
    for (auto path : models) {
      const auto name = path.filename().string();
      const auto recipe = read_json(path.replace_extension(".train.json"));
      EXPECT_EQ(recipe["model"], name) << path;
    }
  }
}

}  // namespace
}  // namespace gka::models::test
