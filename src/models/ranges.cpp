#include "models/ranges.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "base/json.h"
#include "base/limits.h"
#include "gka/block_kernels.h"

namespace gka::models {
namespace {

struct Range {
  std::string_view key;
  std::int64_t most;
};

/// By the key's name, in the file itself and in its groups.
constexpr std::array<Range, 16> kRanges{{
    {"vocab_size", 1 << 24},
    {"hidden_size", 1 << 20},
    {"intermediate_size", 1 << 22},
    {"num_hidden_layers", 10'000},
    {"num_attention_heads", 1 << 14},
    {"num_key_value_heads", 1 << 14},
    {"num_q_heads", 1 << 14},
    {"num_k_heads", 1 << 14},
    {"num_v_heads", 1 << 14},
    {"num_heads", 1 << 14},
    {"n_groups", 1 << 14},
    {"head_dim", 1 << 14},
    {"state_size", 1 << 14},
    {"kv_proj_rank", 1 << 20},
    {"conv_size", kernels::kMaxConvWidth},
    {"num_iter", kMostIterations},
}};
constexpr std::int64_t kMostOfOthers = std::int64_t{1} << 31;

/// Whole numbers that cannot be left out, so that 0 stands for nothing.
constexpr std::array<std::pair<std::string_view, std::string_view>, 6> kNeeded{{
    {"mamba2_config", "head_dim"},
    {"mamba2_config", "state_size"},
    {"mamba2_config", "n_groups"},
    {"mamba2_config", "conv_size"},
    {"mesa_config", "num_iter"},
    {"gla_config", "gate_low_rank_dim"},
}};

std::int64_t most_of(std::string_view key) {
  for (const auto& range : kRanges) {
    if (range.key == key) return range.most;
  }
  return kMostOfOthers;
}

}  // namespace

void check_range(std::string_view key, std::int64_t value, const std::string& where) {
  const auto most = most_of(key);
  if (value <= most) return;
  throw std::runtime_error("'" + std::string(key) + "' of " + where + " is " + std::to_string(value) +
                           "; it takes at most " + std::to_string(most));
}

namespace {

constexpr std::array<std::string_view, 5> kMayBeNone{"norm_eps", "rms_norm_eps", "lambda_lower_bound",
                                                     "initializer_range", "conv_initializer_range"};

/// A number that has a fraction. Most of them are factors, which 0 would make nothing of.
void check_number(std::string_view key, double value, const std::string& where) {
  const bool may_be_none = std::ranges::find(kMayBeNone, key) != kMayBeNone.end();
  const bool fine = std::isfinite(value) && (may_be_none ? value >= 0 : value > 0);
  if (fine && (key != "lambda_lower_bound" || value < 1)) return;  // Λ begins at 1, above it
  throw std::runtime_error("'" + std::string(key) + "' of " + where + " is " + Json(value).dump() +
                           "; it takes a number " + (may_be_none ? "of at least 0" : "above 0") +
                           (key == "lambda_lower_bound" ? " and below 1" : ""));
}

}  // namespace

void check_groups(const layers::MixerConfig& mixer, const std::string& where) {
  layers::visit_groups(mixer, [&](std::string_view group, const auto& values) {
    using Group = std::remove_cvref_t<decltype(values)>;
    Group::fields(values, [&](std::string_view key, const auto& value) {
      if constexpr (std::is_same_v<decltype(value), const std::int64_t&>) {
        check_range(key, value, "'" + std::string(group) + "' of " + where);
        const std::int64_t least = std::ranges::find(kNeeded, std::pair(group, key)) != kNeeded.end() ? 1 : 0;
        if (value >= least) return;
        throw std::runtime_error("'" + std::string(key) + "' of '" + std::string(group) + "' of " + where + " is " +
                                 std::to_string(value) + "; it takes at least " + std::to_string(least));
      }
      if constexpr (std::is_same_v<decltype(value), const double&>) {
        check_number(key, value, "'" + std::string(group) + "' of " + where);
      }
    });
  });
}

void check_ranges(const ModelConfig& config, const std::string& where) {
  const auto& mixer = config.mixer;
  check_range("vocab_size", config.vocab_size, where);
  check_range("hidden_size", mixer.hidden_size, where);
  check_range("intermediate_size", config.intermediate_size, where);
  check_range("num_attention_heads", mixer.num_attention_heads, where);
  check_range("num_key_value_heads", mixer.num_key_value_heads, where);
  check_range("head_dim", mixer.head_dim, where);
  check_range("sliding_window", mixer.sliding_window, where);
  check_number("rms_norm_eps", mixer.rms_norm_eps, where);
  check_number("rope_theta", mixer.rope_theta, where);
  check_number("initializer_range", mixer.initializer_range, where);
  check_number("conv_initializer_range", mixer.conv_initializer_range, where);
  check_groups(mixer, where);
}

}  // namespace gka::models
