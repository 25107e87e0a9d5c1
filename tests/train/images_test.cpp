// Batches of images: every image once an epoch, in an order that the seed decides, and changed only as was asked.
#include "train/images.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <stdlib.h>  // NOLINT(modernize-deprecated-headers): mkdtemp is POSIX's

#include <filesystem>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "models/safetensors.h"

namespace gka::train {
namespace {

/// Image i has i at all its pixels but for the first, which is 255; its label is i.
ImageSet numbered(std::int64_t count, std::int64_t height = 8, std::int64_t width = 8) {
  auto images = at::arange(count, at::kByte).view({count, 1, 1, 1}).expand({count, height, width, 1}).clone();
  images.select(1, 0).select(1, 0).fill_(255);
  return {.images = images, .labels = at::arange(count, at::kLong)};
}

std::vector<std::int64_t> labels_of(const ImageBatches& batches, std::int64_t first, std::int64_t count) {
  std::vector<std::int64_t> labels;
  for (auto number = first; number < first + count; ++number) {
    const auto batch = batches.batch(number).labels;
    labels.insert(labels.end(), batch.const_data_ptr<std::int64_t>(),
                  batch.const_data_ptr<std::int64_t>() + batch.numel());
  }
  return labels;
}

TEST(Images, AnEpochShowsEveryImageOnceAndTheNextInAnotherOrder) {
  const ImageBatches batches(numbered(12), /*seed=*/1, {}, /*batch=*/8);  // three batches are two epochs
  const auto labels = labels_of(batches, 0, 3);
  const std::vector<std::int64_t> first(labels.begin(), labels.begin() + 12), second(labels.begin() + 12, labels.end());
  EXPECT_EQ(std::set(first.begin(), first.end()).size(), 12U);
  EXPECT_EQ(std::set(second.begin(), second.end()).size(), 12U);
  EXPECT_NE(first, second);
}

TEST(Images, ABatchFollowsFromTheSeedAndItsNumberAlone) {
  const Augmentation both{.flip = true, .crop = true};
  const ImageBatches batches(numbered(50), 1, both, 10), again(numbered(50), 1, both, 10),
      other(numbered(50), 2, both, 10);
  (void)again.batch(3);
  EXPECT_TRUE(at::equal(batches.batch(7).images, again.batch(7).images));
  EXPECT_EQ(labels_of(batches, 0, 5), labels_of(again, 0, 5));
  EXPECT_NE(labels_of(batches, 0, 5), labels_of(other, 0, 5));
}

TEST(Images, WithoutChangesImagesAndLabelsStayTogetherAsTheyAre) {
  const auto set = numbered(20);
  const auto batch = ImageBatches(set, 3, {}, 10).batch(1);
  EXPECT_TRUE(at::equal(batch.images, set.images.index_select(0, batch.labels)));
}

TEST(Images, FlippedImagesAreMirroredOrAsTheyWere) {
  const auto set = numbered(40);
  const auto batch = ImageBatches(set, 3, {.flip = true}, 40).batch(0);
  std::int64_t mirrored = 0;
  for (std::int64_t i = 0; i < 40; ++i) {
    const auto original = set.images[batch.labels[i].item<std::int64_t>()];
    const bool same = at::equal(batch.images[i], original);
    ASSERT_TRUE(same || at::equal(batch.images[i], original.flip({1})));
    mirrored += !same;
  }
  EXPECT_GT(mirrored, 8);
  EXPECT_LT(mirrored, 32);
}

TEST(Images, CroppedImagesAreMovedByUpToAnEighthAndBlackWhereNothingWas) {
  const auto set = numbered(60, 16, 8);  // by up to 2 rows and 1 column
  const auto batch = ImageBatches(set, 3, {.crop = true}, 60).batch(0);
  std::set<std::pair<std::int64_t, std::int64_t>> moves;
  for (std::int64_t i = 0; i < 60; ++i) {
    const auto label = batch.labels[i].item<std::int64_t>();
    bool found = false;
    for (std::int64_t down = -2; down <= 2; ++down) {
      for (std::int64_t right = -1; right <= 1; ++right) {
        auto moved = at::zeros({20, 10, 1}, at::kByte);
        moved.narrow(0, 2 + down, 16).narrow(1, 1 + right, 8).copy_(set.images[label]);
        if (!at::equal(batch.images[i], moved.narrow(0, 2, 16).narrow(1, 1, 8))) continue;
        found = true;
        moves.emplace(down, right);
        break;
      }
      if (found) break;
    }
    EXPECT_TRUE(found) << label;
  }
  EXPECT_GT(moves.size(), 9U);
}

/// A folder of a test's own, with one file of images in it.
class ImageFiles : public testing::Test {
 protected:
  ImageFiles() {
    auto name = (std::filesystem::temp_directory_path() / "gka-images-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~ImageFiles() override { std::filesystem::remove_all(folder_); }

  /// What reading the file says where it holds these.
  std::string complaint(const models::Tensors& tensors, const models::Metadata& metadata = {},
                        Labels labels = Labels::required) const {
    models::write_safetensors(file(), tensors, metadata);
    models::VisionConfig config;
    config.image_size = {8, 8};
    config.channels = 1;
    config.classes = 4;
    config.class_names = {"a", "b", "c", "d"};
    try {
      (void)read_images(file(), config, labels);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return {};
  }
  std::filesystem::path file() const { return folder_ / "test.safetensors"; }

  std::filesystem::path folder_;
  ImageSet set_ = numbered(4);
};

TEST_F(ImageFiles, WhatDoesNotSuitTheModelIsRefusedInASentence) {
  const auto& [images, labels] = set_;
  const auto expect = [](const std::string& words, const std::string& complaint) {
    EXPECT_PRED_FORMAT2(testing::IsSubstring, words, complaint);
  };
  EXPECT_EQ(complaint({{"images", images}, {"labels", labels}}), "");
  expect("has no tensor 'images'", complaint({{"labels", labels}}));
  expect("has no tensor 'labels'", complaint({{"images", images}}));
  EXPECT_EQ(complaint({{"images", images}}, {}, Labels::optional), "");
  expect("image 3 of", complaint({{"images", images}, {"labels", labels + labels.eq(3)}}));
  expect("has the label -1", complaint({{"images", images}, {"labels", labels - 1}}));
  expect("one for each of its 4 images", complaint({{"images", images}, {"labels", labels.narrow(0, 0, 3)}}));
  expect("takes int64", complaint({{"images", images}, {"labels", labels.to(at::kFloat)}}));
  expect("takes uint8", complaint({{"images", images.to(at::kFloat)}, {"labels", labels}}));
  expect("the model takes [number, 8, 8, 1]", complaint({{"images", images.narrow(1, 0, 7)}, {"labels", labels}}));
}

TEST_F(ImageFiles, NamesOfClassesMustBeTheModels) {
  const models::Tensors tensors{{"images", set_.images}, {"labels", set_.labels}};
  EXPECT_EQ(complaint(tensors, {{"class_names", R"(["a", "b", "c", "d"])"}}), "");
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "called otherwise",
                      complaint(tensors, {{"class_names", R"(["a", "b", "d", "c"])"}}));
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "a list of texts", complaint(tensors, {{"class_names", "[1]"}}));
}

TEST_F(ImageFiles, AFolderStandsForThePartOfItThatIsAskedFor) {
  models::write_safetensors(file(), {{"images", set_.images}});
  EXPECT_EQ(images_file(folder_, "test"), file());
  EXPECT_EQ(images_file(file(), "train"), file());
  EXPECT_THROW(images_file(folder_, "train"), std::runtime_error);
  EXPECT_THROW(images_file(folder_ / "nowhere", "test"), std::runtime_error);
}

TEST(Images, ChangesAreNamedOrRefused) {
  EXPECT_TRUE(parse_augmentation("crop,flip").flip && parse_augmentation("flip,crop").crop);
  EXPECT_FALSE(parse_augmentation("none").flip || parse_augmentation("flip").crop);
  EXPECT_THROW(parse_augmentation("turn"), std::runtime_error);
}

}  // namespace
}  // namespace gka::train
