#include "models/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>

namespace gka::models {
namespace {

std::string number(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

}  // namespace

Sampler::Sampler(const Sampling& sampling) : sampling_(sampling), generator_(sampling.seed) {
  if (!(sampling.temperature > 0) || !std::isfinite(sampling.temperature)) {
    throw std::invalid_argument("the temperature must be above 0, and is " + number(sampling.temperature) +
                                "; for the likeliest token each time ask for greedy decoding");
  }
  if (!(sampling.top_p > 0 && sampling.top_p <= 1)) {
    throw std::invalid_argument("top-p must be above 0 and at most 1, and is " + number(sampling.top_p));
  }
}

std::int64_t Sampler::next(std::span<const float> logits) {
  if (std::ranges::any_of(logits, [](float logit) { return std::isnan(logit); })) {
    throw std::runtime_error("the model gave logits that are not numbers; its weights or states are damaged");
  }
  if (sampling_.greedy) return std::ranges::max_element(logits) - logits.begin();
  return draw(logits);
}

std::int64_t Sampler::draw(std::span<const float> logits) {
  const double highest = *std::ranges::max_element(logits);
  weights_.resize(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) {
    weights_[i] = std::exp((logits[i] - highest) / sampling_.temperature);
  }
  const double total = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  order_.resize(logits.size());
  std::iota(order_.begin(), order_.end(), std::int64_t{0});
  double kept = total;
  if (sampling_.top_p < 1) {
    std::ranges::stable_sort(order_, std::greater{},
                             [&](auto token) { return weights_[static_cast<std::size_t>(token)]; });
    kept = 0;
    std::size_t count = 0;
    while (count < order_.size() && kept < sampling_.top_p * total) {
      kept += weights_[static_cast<std::size_t>(order_[count++])];
    }
    order_.resize(count);
  }
  constexpr double kUnit = 0x1p-53;
  double left = kept * kUnit * static_cast<double>(generator_() >> 11);
  for (const auto token : order_) {
    left -= weights_[static_cast<std::size_t>(token)];
    if (left < 0) return token;
  }
  return order_.back();
}

}  // namespace gka::models
