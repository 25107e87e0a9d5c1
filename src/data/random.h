// Random numbers that depend on what they are for and nothing else: a generator is named by numbers (seed, stream,
// index), so that sequence 1,000,000 can be made without the ones before it, and a shuffle needs no list in memory.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>

namespace gka::data {

/// Every bit of the result depends on every bit of x, and no two x share one (splitmix64's last step).
constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

constexpr std::uint64_t mix(std::initializer_list<std::uint64_t> numbers) {
  std::uint64_t state = 0;
  for (const auto number : numbers) state = mix(state + 0x9E3779B97F4A7C15 + mix(number));
  return state;
}

class Random {
 public:
  explicit constexpr Random(std::initializer_list<std::uint64_t> name) : state_(mix(name)) {}

  constexpr std::uint64_t next() { return mix(state_ += 0x9E3779B97F4A7C15); }

  /// 0 … n − 1, all equally likely: the high half of a product, drawn again in the few cases that would favour some.
  constexpr std::int64_t below(std::int64_t n) {
    const auto range = static_cast<std::uint64_t>(n);
    while (true) {
      const auto product = static_cast<unsigned __int128>(next()) * range;
      if (const auto low = static_cast<std::uint64_t>(product); low >= range || low >= (0 - range) % range) {
        return static_cast<std::int64_t>(product >> 64);
      }
    }
  }
  constexpr std::int64_t between(std::int64_t first, std::int64_t last) { return first + below(last - first); }

  /// In (0, 1].
  constexpr double uniform() { return static_cast<double>((next() >> 11) + 1) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

/// A shuffle of 0 … size − 1 that answers "which comes at place i" by itself. It is a Feistel network on the next even
/// number of bits; a number that falls outside is sent round again, which stays within one cycle and so repeats none.
class Permutation {
 public:
  Permutation(std::int64_t size, std::uint64_t key) : size_(static_cast<std::uint64_t>(size)), key_(key) {
    const int bits = size_ > 1 ? std::bit_width(size_ - 1) : 1;
    half_ = (bits + 1) / 2;
  }

  std::int64_t operator()(std::int64_t place) const {
    auto number = static_cast<std::uint64_t>(place);
    do {
      number = scramble(number);
    } while (number >= size_);
    return static_cast<std::int64_t>(number);
  }

 private:
  static constexpr std::uint64_t kRounds = 6;

  std::uint64_t scramble(std::uint64_t number) const {
    const std::uint64_t mask = (std::uint64_t{1} << half_) - 1;
    std::uint64_t left = number >> half_, right = number & mask;
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      const std::uint64_t mixed = left ^ (mix(key_ + mix(right * kRounds + round)) & mask);
      left = right;
      right = mixed;
    }
    return left << half_ | right;
  }

  std::uint64_t size_, key_;
  int half_;
};

}  // namespace gka::data
