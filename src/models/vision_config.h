// The configuration of a model for images (config.json with "model_type": "gka_vision"): MambaVision's shape, and which
// mixer stands where it has its own. docs/models.md lists the keys.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/fields.h"
#include "layers/config.h"

namespace gka::models {

inline constexpr std::string_view kVisionType = "gka_vision";

/// What mixes tokens in the first blocks of a level: a memory of layers/kinds.h, by the name of its tensors there, or
/// one of the two that only images have: attention in both directions, and MambaVision's own.
inline constexpr std::string_view kBidirectional = "attention", kMambaVision = "mamba";

/// A JSON object that is read once it is known what it is about.
struct LaterOptions {
  Json object = Json::object();
  operator Json() const { return object; }  // NOLINT(google-explicit-constructor): as json::write wants it
};
inline bool read(const Json& json, LaterOptions& options) {
  if (json.is_object()) options.object = json;
  return json.is_object();
}
inline std::string kind(const LaterOptions&) { return "a JSON object"; }

/// MambaVision's mixer (`mixer_config` of "mamba").
struct MambaVisionConfig {
  std::int64_t state_size = 8;
  std::int64_t conv_size = 3;  // odd: it sees as far to either side

  template <typename Self, typename Visit>
  static void fields(Self& c, Visit&& visit) {
    visit("state_size", c.state_size);
    visit("conv_size", c.conv_size);
  }
};

struct VisionConfig {
  std::string model_type{kVisionType};
  std::vector<std::int64_t> image_size{};  // height, width
  std::int64_t channels = 3;
  std::int64_t classes = 0;
  std::vector<std::string> class_names{};  // as many as classes, or none
  std::vector<double> mean{}, std{};       // per channel, of pixels / 255; left out: 0 and 1
  std::int64_t in_dim = 32;                // channels inside the stem
  std::int64_t dim = 80;                   // of the first level; each further one has twice as many
  std::vector<std::int64_t> stem_strides{2, 2};
  // One entry per level.
  std::vector<std::int64_t> depths{};
  std::vector<std::string> kinds{};  // conv, mixer
  std::vector<std::int64_t> heads{};
  std::vector<std::int64_t> window_sizes{};
  double mlp_ratio = 4.0;
  std::optional<double> layer_scale{};  // what the factors of residual branches begin with; null: there are none
  double drop_path = 0.0;               // of the last block; the first has 0
  std::string mixer = "gka";
  LaterOptions mixer_config{};  // as the file has it

  layers::MixerConfig choices{};  // the same, read: the group of a memory
  MambaVisionConfig mamba{};

  std::size_t levels() const { return depths.size(); }
  std::int64_t width(std::size_t level) const { return dim << level; }
  bool mixes(std::size_t level) const { return kinds[level] == "mixer"; }
  /// The last half of a level's blocks have attention.
  bool attends(std::size_t level, std::int64_t block) const {
    return mixer == kBidirectional || block >= depths[level] - depths[level] / 2;
  }
  /// What a memory of that level is made from. Where mixer_config names a head_dim, the width decides how many heads
  /// there are, else the level's `heads`.
  layers::MixerConfig memory_of(std::size_t level) const;
  /// A class as people call it: its name, or its number.
  std::string class_name(std::int64_t label) const;

  template <typename Self, typename Visit>
  static void fields(Self& c, Visit&& visit) {
    visit("model_type", c.model_type);
    visit("image_size", c.image_size);
    visit("channels", c.channels);
    visit("classes", c.classes);
    visit("class_names", c.class_names);
    visit("mean", c.mean);
    visit("std", c.std);
    visit("in_dim", c.in_dim);
    visit("dim", c.dim);
    visit("stem_strides", c.stem_strides);
    visit("depths", c.depths);
    visit("kinds", c.kinds);
    visit("heads", c.heads);
    visit("window_sizes", c.window_sizes);
    visit("mlp_ratio", c.mlp_ratio);
    visit("layer_scale", c.layer_scale);
    visit("drop_path", c.drop_path);
    visit("mixer", c.mixer);
    visit("mixer_config", c.mixer_config);
  }
};

/// Every name `mixer` may have.
std::vector<std::string_view> vision_mixers();

/// Whether a config.json is that of a model for images.
bool is_vision(const Json& config);

/// Errors call the JSON `where`. An unknown key, a size that is missing or makes no sense, and a language model throw
/// one sentence.
VisionConfig parse_vision_config(const Json& json, const std::string& where);

Json to_json(const VisionConfig& config);

}  // namespace gka::models
