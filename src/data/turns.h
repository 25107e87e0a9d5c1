// Who comes at which place where several take turns in proportion to their weights: in rounds of a fixed number of
// places, shuffled, so that the place alone says who it is and how many of theirs came before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace gka::data {

struct Turn {
  std::size_t who;
  std::int64_t number;  // how many of theirs came before, in all rounds
};

class Turns {
 public:
  Turns() = default;  // nobody takes turns
  /// Weights are positive; shares are rounded to 1/4096. `key` decides the order.
  Turns(std::span<const double> weights, std::uint64_t key);

  bool empty() const { return round_.empty(); }
  Turn operator()(std::int64_t place) const;

 private:
  std::vector<std::int64_t> quotas_;  // places of each in a round
  std::vector<Turn> round_;           // numbers within it
};

}  // namespace gka::data
