#include "data/turns.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "data/random.h"

namespace gka::data {
namespace {

constexpr std::int64_t kRound = 4096;

/// Whole numbers in proportion to the weights that add up to kRound: largest remainders get what rounding down leaves.
std::vector<std::int64_t> share_out(std::span<const double> weights) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<std::int64_t> quotas;
  std::vector<std::pair<double, std::size_t>> remainders;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const double exact = weights[i] / sum * kRound;
    quotas.push_back(static_cast<std::int64_t>(exact));
    remainders.emplace_back(std::floor(exact) - exact, i);
  }
  std::ranges::sort(remainders);
  auto left = kRound - std::accumulate(quotas.begin(), quotas.end(), std::int64_t{0});
  for (std::size_t i = 0; left > 0; ++i, --left) ++quotas[remainders[i % remainders.size()].second];
  return quotas;
}

}  // namespace

Turns::Turns(std::span<const double> weights, std::uint64_t key) : quotas_(share_out(weights)) {
  const Permutation order(kRound, key);
  std::vector<std::int64_t> drawn(weights.size(), 0);
  for (std::int64_t place = 0; place < kRound; ++place) {
    auto slot = order(place);
    std::size_t who = 0;
    while (slot >= quotas_[who]) slot -= quotas_[who++];
    round_.push_back({who, drawn[who]++});
  }
}

Turn Turns::operator()(std::int64_t place) const {
  const auto& [who, number] = round_[static_cast<std::size_t>(place % kRound)];
  return {who, place / kRound * quotas_[who] + number};
}

}  // namespace gka::data
