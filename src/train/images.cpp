#include "train/images.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "base/files.h"
#include "base/json.h"
#include "data/random.h"
#include "models/safetensors.h"

namespace gka::train {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& sentence) { throw std::runtime_error(sentence); }

enum Stream : std::uint64_t { kOrder = 1, kChange = 2 };

std::string shape_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

/// A picture in the place of a file of images is a likely mistake, and its first bytes tell.
models::SafetensorsFile open_images(const fs::path& path) try {
  return models::SafetensorsFile(path);
} catch (const std::exception&) {
  constexpr std::array<std::string_view, 5> kPictures{"\x89PNG", "\xFF\xD8\xFF", "GIF8", "RIFF", "BM"};
  const MappedFile bytes(path);
  if (std::ranges::none_of(kPictures, [&](auto start) { return bytes.text().starts_with(start); })) throw;
  fail(path.string() +
       " is a picture, and gka vision reads files of images (safetensors): gka.vision.load(MODEL).classify(PICTURE) "
       "asks about one in Python, experiments/data/images.py makes a data set of a folder of pictures");
}

at::Tensor read_tensor(const models::SafetensorsFile& file, const fs::path& path, const char* name, at::ScalarType type,
                       const char* takes) {
  if (!file.has(name)) fail(path.string() + " has no tensor '" + name + "', " + takes + "; docs/vision.md says more");
  auto tensor = file.tensor(name);
  if (tensor.scalar_type() != type) fail("'" + std::string(name) + "' of " + path.string() + " takes " + takes);
  return tensor;
}

void check_labels(const at::Tensor& labels, std::int64_t images, std::int64_t classes, const fs::path& path) {
  if (labels.dim() != 1 || labels.size(0) != images) {
    fail("'labels' of " + path.string() + " takes one for each of its " + std::to_string(images) +
         " images, and has the shape " + shape_of(labels));
  }
  const auto all = labels.contiguous();
  const auto* begin = all.const_data_ptr<std::int64_t>();
  const auto* bad = std::find_if(begin, begin + images, [&](auto label) { return label < 0 || label >= classes; });
  if (bad == begin + images) return;
  fail("image " + std::to_string(bad - begin) + " of " + path.string() + " has the label " + std::to_string(*bad) +
       ", and the model has the classes 0 to " + std::to_string(classes - 1));
}

/// What a file says that its classes are called; nothing where it does not say.
std::vector<std::string> names_in(const models::Metadata& metadata, const fs::path& path) {
  const auto found = metadata.find("class_names");
  std::vector<std::string> names;
  if (found != metadata.end() && !json::read(parse_json(found->second, "'class_names' of " + path.string()), names)) {
    fail("'class_names' of " + path.string() + " takes a list of texts");
  }
  return names;
}

/// A model with other names learned something else.
void check_names(const models::Metadata& metadata, const models::VisionConfig& config, const fs::path& path) {
  const auto names = names_in(metadata, path);
  if (names.empty() || config.class_names.empty() || names == config.class_names) return;
  fail("the classes of " + path.string() + " are called otherwise than the model's: " + shown(Json(names)) + ", not " +
       shown(Json(config.class_names)));
}

}  // namespace

fs::path images_file(const fs::path& path, const char* part) {
  if (!fs::exists(path)) fail("there is no " + path.string() + " with images");
  if (!fs::is_directory(path)) return path;
  const auto file = path / (std::string(part) + ".safetensors");
  if (!fs::exists(file)) {
    fail(path.string() + " is no data set: it has no " + file.filename().string() +
         "; experiments/data/images.py makes one of a folder of pictures");
  }
  return file;
}

ImageSet read_images(const fs::path& path, const models::VisionConfig& config, Labels labels) {
  const auto file = open_images(path);
  ImageSet set{.images = read_tensor(file, path, "images", at::kByte, "uint8 [number, height, width, channels]"),
               .labels = {}};
  const std::vector<std::int64_t> wanted{config.image_size[0], config.image_size[1], config.channels};
  if (set.images.dim() != 4 || set.images.sizes().slice(1) != at::IntArrayRef(wanted) || set.count() == 0) {
    fail("'images' of " + path.string() + " has the shape " + shape_of(set.images) + ", and the model takes [number, " +
         std::to_string(wanted[0]) + ", " + std::to_string(wanted[1]) + ", " + std::to_string(wanted[2]) +
         "]: height, width and channels");
  }
  if (labels == Labels::optional && !file.has("labels")) return set;
  set.labels = read_tensor(file, path, "labels", at::kLong, "int64 [number]");
  check_labels(set.labels, set.count(), config.classes, path);
  check_names(file.metadata(), config, path);
  return set;
}

Json complete_config(Json config, const fs::path& path, const std::string& where) {
  if (!models::is_vision(config)) return config;  // whoever reads it says so
  const auto file = open_images(path);
  const auto images = read_tensor(file, path, "images", at::kByte, "uint8 [number, height, width, channels]");
  const auto leaves = [&](const char* key) { return !config.contains(key) || config[key].is_null(); };
  if (images.dim() == 4) {
    if (leaves("image_size")) config["image_size"] = {images.size(1), images.size(2)};
    if (leaves("channels")) config["channels"] = images.size(3);
  }
  const auto names = names_in(file.metadata(), path);
  if (leaves("classes") && !names.empty()) config["classes"] = names.size();
  if (!leaves("class_names") || names.empty()) return config;
  if (config["classes"] != names.size()) {
    fail("'classes' of " + where + " is " + shown(config["classes"]) + ", and " + path.string() + " has " +
         std::to_string(names.size()) + ": leave the key out, and it is theirs");
  }
  config["class_names"] = names;
  return config;
}

Augmentation parse_augmentation(const std::string& text) {
  Augmentation augmentation;
  if (text == "none") return augmentation;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    if (word == "flip") {
      augmentation.flip = true;
    } else if (word == "crop") {
      augmentation.crop = true;
    } else {
      fail("--augment takes flip, crop, both with a comma between, or none, and got '" + text + "'");
    }
  }
  return augmentation;
}

ImageBatches::ImageBatches(ImageSet set, std::uint64_t seed, Augmentation augmentation, std::int64_t batch)
    : set_(std::move(set)), seed_(seed), augmentation_(augmentation), batch_(batch) {
  set_.images = set_.images.contiguous();
}

void ImageBatches::place(std::int64_t epoch, std::int64_t image, std::uint8_t* to) const {
  const auto height = set_.images.size(1), width = set_.images.size(2), channels = set_.images.size(3);
  const auto* from = set_.images.const_data_ptr<std::uint8_t>() + image * height * width * channels;
  data::Random random{seed_, kChange, static_cast<std::uint64_t>(epoch), static_cast<std::uint64_t>(image)};
  const bool mirrored = augmentation_.flip && random.below(2) == 1;
  const auto moved = [&](std::int64_t size) {
    const auto most = size / 8;
    return augmentation_.crop ? random.between(-most, most + 1) : 0;
  };
  const auto down = moved(height), right = moved(width);
  for (std::int64_t y = 0; y < height; ++y) {
    if (y + down < 0 || y + down >= height) continue;
    for (std::int64_t x = 0; x < width; ++x) {
      if (x + right < 0 || x + right >= width) continue;
      const auto there = mirrored ? width - 1 - (x + right) : x + right;
      std::memcpy(to + ((y + down) * width + there) * channels, from + (y * width + x) * channels,
                  static_cast<std::size_t>(channels));
    }
  }
}

ImageBatch ImageBatches::batch(std::int64_t number) const {
  const auto count = set_.count();
  ImageBatch batch{
      .images = at::zeros({batch_, set_.images.size(1), set_.images.size(2), set_.images.size(3)}, at::kByte),
      .labels = at::empty({batch_}, at::kLong)};
  const auto pixels = batch.images.stride(0);
  const auto labels = set_.labels.contiguous();
  for (std::int64_t i = 0; i < batch_; ++i) {
    const auto position = number * batch_ + i, epoch = position / count;
    const data::Permutation order(count, data::mix({seed_, kOrder, static_cast<std::uint64_t>(epoch)}));
    const auto image = order(position % count);
    place(epoch, image, batch.images.mutable_data_ptr<std::uint8_t>() + i * pixels);
    batch.labels.mutable_data_ptr<std::int64_t>()[i] = labels.const_data_ptr<std::int64_t>()[image];
  }
  return batch;
}

}  // namespace gka::train
