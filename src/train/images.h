// Images to learn from: safetensors with `images`, uint8 [N,H,W,C], and `labels`, int64 [N]. A data set is a folder
// with train.safetensors and test.safetensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "base/json.h"
#include "models/vision_config.h"

namespace gka::train {

struct ImageSet {
  at::Tensor images;  // uint8 [N,H,W,C], pages of the file
  at::Tensor labels;  // int64 [N]; undefined where the file has none

  std::int64_t count() const { return images.size(0); }
};

enum class Labels : bool { optional, required };

/// Throws one sentence where the file does not suit the model: sizes, types, or a label outside its classes.
ImageSet read_images(const std::filesystem::path& file, const models::VisionConfig& config,
                     Labels labels = Labels::required);

/// A model's configuration with what it leaves to the images it is to learn from: their size and channels, how many
/// classes there are and what they are called. Errors call the configuration `where`.
Json complete_config(Json config, const std::filesystem::path& file, const std::string& where);

/// The part of a data set that a folder stands for; a file stands for itself.
std::filesystem::path images_file(const std::filesystem::path& path, const char* part);

/// What is done to images by chance while they are learned from.
struct Augmentation {
  bool flip = false;  // mirrored, every second one
  bool crop = false;  // moved by up to an eighth of their size; what comes in is black
};
/// "flip,crop", either of them, or "none"; throws one sentence where it is something else.
Augmentation parse_augmentation(const std::string& text);

struct ImageBatch {
  at::Tensor images, labels;
};

/// Batches in a shuffled order, another one in every epoch, and each image changed by chance in its own way: all of it
/// decided by the seed and by which batch it is, and by nothing else.
class ImageBatches {
 public:
  ImageBatches(ImageSet set, std::uint64_t seed, Augmentation augmentation, std::int64_t batch);
  /// From 0 on; the next epoch begins where one ends, be it within a batch.
  ImageBatch batch(std::int64_t number) const;

 private:
  void place(std::int64_t epoch, std::int64_t image, std::uint8_t* to) const;

  ImageSet set_;
  std::uint64_t seed_;
  Augmentation augmentation_;
  std::int64_t batch_;
};

}  // namespace gka::train
