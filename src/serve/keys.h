// API keys, compared so that the time it takes says nothing about how much of a guess was right.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gka::serve {

class Keys {
 public:
  explicit Keys(std::vector<std::string> keys) : keys_(std::move(keys)) {}
  bool any() const { return !keys_.empty(); }

  /// Which key it is; every key is looked at in full.
  std::optional<std::size_t> find(std::string_view guess) const {
    std::optional<std::size_t> found;
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      if (same(keys_[i], guess)) found = i;
    }
    return found;
  }

 private:
  static bool same(std::string_view key, std::string_view guess) {
    volatile unsigned difference = key.size() == guess.size() ? 0U : 1U;
    for (std::size_t i = 0; i < guess.size(); ++i) {
      const auto expected = static_cast<unsigned char>(key.empty() ? 0 : key[i % key.size()]);
      difference = difference | (expected ^ static_cast<unsigned char>(guess[i]));
    }
    return difference == 0;
  }

  std::vector<std::string> keys_;
};

}  // namespace gka::serve
