#include "layers/frequencies.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <stdexcept>
#include <string>

namespace gka::layers {
namespace {

constexpr double kTurn = 2.0 * std::numbers::pi;

double or_else(double value, double otherwise) { return value != 0.0 ? value : otherwise; }

void require(bool fine, const RopeConfig& config, const std::string& what) {
  if (!fine) {
    throw std::invalid_argument("The rope_type '" + std::string(name_of(config.rope_type)) + "' takes " + what + ".");
  }
}

void check(const RopeConfig& config) {
  if (config.rope_type == RopeType::plain) return;
  require(config.factor > 0 && std::isfinite(config.factor), config, "a 'factor' above 0");
  if (config.rope_type == RopeType::linear) return;
  require(config.original_max_position_embeddings > 0, config, "an 'original_max_position_embeddings' above 0");
  if (config.rope_type == RopeType::llama3) {
    require(config.low_freq_factor > 0 && config.high_freq_factor > config.low_freq_factor, config,
            "a 'low_freq_factor' above 0 and a 'high_freq_factor' above that");
  }
}

double llama3(double turn, const RopeConfig& c) {
  const double turns_in_all = static_cast<double>(c.original_max_position_embeddings) * turn / kTurn;
  const double kept =
      std::clamp((turns_in_all - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor), 0.0, 1.0);
  return turn * (kept + (1.0 - kept) / c.factor);
}

/// The pair of channels, as a fraction, that turns so often within the original length.
double pair_that_turns(double times, double channels, double theta, const RopeConfig& c) {
  const auto length = static_cast<double>(c.original_max_position_embeddings);
  return channels * std::log(length / (times * kTurn)) / (2.0 * std::log(theta));
}

void yarn(RotaryFrequencies& frequencies, std::int64_t channels, double theta, const RopeConfig& c) {
  const auto size = static_cast<double>(channels);
  double first = pair_that_turns(or_else(c.beta_fast, 32.0), size, theta, c);
  double last = pair_that_turns(or_else(c.beta_slow, 1.0), size, theta, c);
  if (c.truncate) {
    first = std::floor(first);
    last = std::ceil(last);
  }
  first = std::max(first, 0.0);
  last = std::min(last, size - 1.0);
  if (first == last) last += 0.001;
  for (std::size_t i = 0; i < frequencies.turns.size(); ++i) {
    const double slowed = std::clamp((static_cast<double>(i) - first) / (last - first), 0.0, 1.0);
    frequencies.turns[i] *= (1.0 - slowed) + slowed / c.factor;
  }
  const auto sharper = [&](double scale) { return c.factor <= 1.0 ? 1.0 : 0.1 * scale * std::log(c.factor) + 1.0; };
  const bool both = c.mscale != 0.0 && c.mscale_all_dim != 0.0;
  frequencies.factor = or_else(c.attention_factor, both ? sharper(c.mscale) / sharper(c.mscale_all_dim) : sharper(1.0));
}

}  // namespace

RotaryFrequencies rotary_frequencies(std::int64_t channels, double theta, const RopeConfig& config) {
  check(config);
  const auto half = channels / 2;
  RotaryFrequencies frequencies;
  for (std::int64_t i = 0; i < half; ++i) {
    frequencies.turns.push_back(std::pow(theta, -static_cast<double>(i) / static_cast<double>(half)));
  }
  switch (config.rope_type) {
    case RopeType::plain: break;
    case RopeType::linear:
      for (auto& turn : frequencies.turns) turn /= config.factor;
      break;
    case RopeType::llama3:
      for (auto& turn : frequencies.turns) turn = llama3(turn, config);
      break;
    case RopeType::yarn: yarn(frequencies, channels, theta, config); break;
  }
  return frequencies;
}

}  // namespace gka::layers
