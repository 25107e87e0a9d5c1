#include "models/vision_config.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "base/nearest.h"
#include "layers/kinds.h"
#include "models/ranges.h"

namespace gka::models {
namespace {

constexpr std::size_t kMostLevels = 8;
constexpr std::int64_t kMostPixels = 1 << 14, kMostChannels = 1 << 10, kMostClasses = 1 << 20, kMostWidth = 1 << 16;
constexpr std::int64_t kMostBlocks = 1'000, kMostStride = 16, kMostWindow = 1 << 10;
constexpr double kMostRatio = 64;

/// Complains about one key of one file.
struct Checks {
  const std::string& where;

  [[noreturn]] void fail(std::string_view key, const std::string& what) const {
    throw std::runtime_error("'" + std::string(key) + "' of " + where + " " + what);
  }
  void whole(std::string_view key, std::int64_t value, std::int64_t most) const {
    if (value >= 1 && value <= most) return;
    fail(key, "takes a whole number from 1 to " + std::to_string(most) + ", and is " + std::to_string(value));
  }
  void list(std::string_view key, const std::vector<std::int64_t>& values, std::size_t count, const char* what,
            std::int64_t most) const {
    length(key, values.size(), count, what);
    for (const auto value : values) whole(key, value, most);
  }
  void length(std::string_view key, std::size_t is, std::size_t count, const char* what) const {
    if (is == count) return;
    fail(key, std::string("takes ") + what + ", " + std::to_string(count) + " in all, and has " + std::to_string(is));
  }
  void within(std::string_view key, double value, bool fine, const char* takes) const {
    if (!fine) fail(key, std::string("takes ") + takes + ", and is " + Json(value).dump());
  }
};

bool is_memory(std::string_view mixer) {
  return std::ranges::any_of(layers::kKindNames, [&](const auto& kind) {
    return kind.prefix == mixer && kind.prefix != layers::kind_name("*").prefix;
  });
}

void check_images(const VisionConfig& c, const Checks& check) {
  check.list("image_size", c.image_size, 2, "a height and a width", kMostPixels);
  check.whole("channels", c.channels, kMostChannels);
  check.whole("classes", c.classes, kMostClasses);
  if (!c.class_names.empty()) {
    check.length("class_names", c.class_names.size(), static_cast<std::size_t>(c.classes), "a name for every class");
  }
  check.length("mean", c.mean.size(), static_cast<std::size_t>(c.channels), "a number for every channel");
  check.length("std", c.std.size(), static_cast<std::size_t>(c.channels), "a number for every channel");
  for (const auto value : c.mean) check.within("mean", value, std::isfinite(value), "finite numbers");
  for (const auto value : c.std) check.within("std", value, value > 0 && std::isfinite(value), "numbers above 0");
}

void check_levels(const VisionConfig& c, const Checks& check) {
  if (c.depths.empty() || c.levels() > kMostLevels) {
    check.fail("depths", "takes the blocks of 1 to " + std::to_string(kMostLevels) + " levels, and has " +
                             std::to_string(c.levels()));
  }
  check.whole("in_dim", c.in_dim, kMostWidth);
  check.whole("dim", c.dim, kMostWidth >> (c.levels() - 1));
  check.list("stem_strides", c.stem_strides, 2, "the strides of the stem's convolutions", kMostStride);
  check.list("depths", c.depths, c.levels(), "", kMostBlocks);
  check.length("kinds", c.kinds.size(), c.levels(), "a kind for every level");
  for (const auto& kind : c.kinds) {
    if (kind != "conv" && kind != "mixer") check.fail("kinds", "takes conv or mixer, and has '" + kind + "'");
  }
  check.list("heads", c.heads, c.levels(), "a number for every level", kMostWidth);
  check.list("window_sizes", c.window_sizes, c.levels(), "a number for every level", kMostWindow);
  for (std::size_t i = 0; i < c.levels(); ++i) {
    if (c.mixes(i) && c.width(i) % c.heads[i] != 0) {
      check.fail("heads", "has " + std::to_string(c.heads[i]) + " for level " + std::to_string(i) + ", which is " +
                              std::to_string(c.width(i)) + " wide; the width must be a multiple of it");
    }
  }
}

void check_numbers(const VisionConfig& c, const Checks& check) {
  check.within("mlp_ratio", c.mlp_ratio, c.mlp_ratio > 0 && c.mlp_ratio <= kMostRatio, "a number above 0 and up to 64");
  check.within("drop_path", c.drop_path, c.drop_path >= 0 && c.drop_path < 1, "a number from 0 to below 1");
  if (c.layer_scale) check.within("layer_scale", *c.layer_scale, std::isfinite(*c.layer_scale), "a finite number");
}

void read_mixer(VisionConfig& c, const std::string& where, const OnUnknown& unknown) {
  const auto known = vision_mixers();
  if (std::ranges::find(known, c.mixer) == known.end()) {
    std::string all;
    for (const auto name : known) all += (all.empty() ? "" : ", ") + std::string(name);
    const auto guess = nearest(c.mixer, known);
    throw std::runtime_error("'mixer' of " + where + " is '" + c.mixer + "', and takes one of " + all +
                             (guess ? "; did you mean '" + std::string(*guess) + "'?" : ""));
  }
  const auto place = "'mixer_config' of " + where;
  const auto read = [&](auto& group) {
    read_fields(c.mixer_config.object, place, unknown, [&](auto&& visit) { group.fields(group, visit); });
  };
  if (is_memory(c.mixer)) {
    layers::visit_groups(c.choices, [&](std::string_view key, auto& group) {
      if (key == c.mixer + "_config") read(group);
    });
    check_groups(c.choices, where);
  } else if (c.mixer == kMambaVision) {
    read(c.mamba);
    const Checks check{place};
    check.whole("state_size", c.mamba.state_size, kMostChannels);
    if (c.mamba.conv_size < 1 || c.mamba.conv_size % 2 == 0) {
      check.fail("conv_size", "takes an odd number, and is " + std::to_string(c.mamba.conv_size));
    }
  } else if (!c.mixer_config.object.empty()) {
    throw std::runtime_error(place + " takes nothing: attention has the level's heads");
  }
}

}  // namespace

std::vector<std::string_view> vision_mixers() {
  std::vector<std::string_view> names;
  for (const auto& kind : layers::kKindNames) {
    if (is_memory(kind.prefix)) names.push_back(kind.prefix);
  }
  names.insert(names.end(), {kBidirectional, kMambaVision});
  return names;
}

layers::MixerConfig VisionConfig::memory_of(std::size_t level) const {
  auto config = choices;
  config.hidden_size = width(level);
  std::int64_t head_dim = 0;
  const auto named = mixer_config.object.find("head_dim");
  // Mamba2 has its own: it divides a wider layer.
  if (named != mixer_config.object.end() && mixer != layers::kind_name("M2").prefix) json::read(*named, head_dim);
  if (head_dim == 0) head_dim = width(level) / heads[level];
  if (head_dim < 0 || width(level) % head_dim != 0) {
    throw std::runtime_error("'head_dim' of 'mixer_config' is " + std::to_string(head_dim) + "; the width of level " +
                             std::to_string(level) + ", " + std::to_string(width(level)) +
                             ", must be a multiple of it");
  }
  config.head_dim = head_dim;
  config.num_attention_heads = config.num_key_value_heads = width(level) / head_dim;
  return config;
}

std::string VisionConfig::class_name(std::int64_t label) const {
  const auto place = static_cast<std::size_t>(label);
  return place < class_names.size() ? class_names[place] : std::to_string(label);
}

bool is_vision(const Json& config) {
  if (!config.is_object()) return false;
  const auto type = config.find("model_type");
  return type != config.end() && *type == kVisionType;
}

VisionConfig parse_vision_config(const Json& json, const std::string& where) {
  if (json.is_object() && !is_vision(json)) {
    throw std::runtime_error(where + " is of a model for text: its 'model_type' is " +
                             shown(json.value("model_type", Json())) + ", and gka vision takes models for images, \"" +
                             std::string(kVisionType) + "\"");
  }
  const auto unknown = [](const std::string&, const std::string& complaint) { throw std::runtime_error(complaint); };
  VisionConfig config;
  read_fields(json, where, unknown, [&](auto&& visit) { VisionConfig::fields(config, visit); });
  const auto channels = static_cast<std::size_t>(std::clamp<std::int64_t>(config.channels, 0, kMostChannels));
  if (config.mean.empty()) config.mean.assign(channels, 0.0);
  if (config.std.empty()) config.std.assign(channels, 1.0);
  const Checks check{where};
  check_images(config, check);
  check_levels(config, check);
  check_numbers(config, check);
  read_mixer(config, where, unknown);
  for (std::size_t i = 0; i < config.levels(); ++i) {
    if (!config.mixes(i)) continue;
    if (is_memory(config.mixer)) (void)config.memory_of(i);
    if (config.mixer == kMambaVision && config.width(i) % 2 != 0) check.fail("dim", "must be even: mamba halves it");
  }
  return config;
}

Json to_json(const VisionConfig& config) {
  auto json = write_fields([&](auto&& visit) { VisionConfig::fields(config, visit); });
  if (config.class_names.empty()) json.erase("class_names");
  return json;
}

}  // namespace gka::models
