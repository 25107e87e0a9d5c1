// XXH64, the 64-bit hash behind checksums and fingerprints: fast, and known elsewhere (`xxhsum -H1` computes it too).
// It finds accidents, not attackers.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace gka {

/// Takes its input in pieces of any size.
class Hash64 {
 public:
  explicit Hash64(std::uint64_t seed = 0) : seed_(seed), lanes_{seed + kP1 + kP2, seed + kP2, seed, seed - kP1} {}

  void add(const void* data, std::size_t size) {
    const auto* from = static_cast<const unsigned char*>(data);
    total_ += size;
    if (held_ > 0) {
      const std::size_t taken = size < kStripe - held_ ? size : kStripe - held_;
      if (taken > 0) std::memcpy(&buffer_[held_], from, taken);
      held_ += taken;
      from += taken;
      size -= taken;
      if (held_ < kStripe) return;
      stripe(buffer_.data());
      held_ = 0;
    }
    for (; size >= kStripe; from += kStripe, size -= kStripe) stripe(from);
    if (size > 0) std::memcpy(buffer_.data(), from, size);
    held_ = size;
  }
  void add(std::string_view text) { add(text.data(), text.size()); }

  /// Of everything added so far; more may follow.
  std::uint64_t value() const {
    std::uint64_t hash = seed_ + kP5;
    if (total_ >= kStripe) {
      hash = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) + std::rotl(lanes_[3], 18);
      for (const auto lane : lanes_) hash = (hash ^ round(0, lane)) * kP1 + kP4;
    }
    hash += total_;

    const unsigned char* rest = buffer_.data();
    const unsigned char* end = rest + held_;
    for (; end - rest >= 8; rest += 8) hash = std::rotl(hash ^ round(0, load<std::uint64_t>(rest)), 27) * kP1 + kP4;
    for (; end - rest >= 4; rest += 4) hash = std::rotl(hash ^ load<std::uint32_t>(rest) * kP1, 23) * kP2 + kP3;
    for (; rest < end; ++rest) hash = std::rotl(hash ^ *rest * kP5, 11) * kP1;

    hash = (hash ^ (hash >> 33)) * kP2;
    hash = (hash ^ (hash >> 29)) * kP3;
    return hash ^ (hash >> 32);
  }

 private:
  static constexpr std::uint64_t kP1 = 0x9E3779B185EBCA87, kP2 = 0xC2B2AE3D27D4EB4F, kP3 = 0x165667B19E3779F9,
                                 kP4 = 0x85EBCA77C2B2AE63, kP5 = 0x27D4EB2F165667C5;
  static constexpr std::size_t kStripe = 32;

  /// Little-endian, as the machines this runs on are.
  template <typename T>
  static std::uint64_t load(const unsigned char* from) {
    static_assert(std::endian::native == std::endian::little);
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
  }
  static std::uint64_t round(std::uint64_t lane, std::uint64_t word) { return std::rotl(lane + word * kP2, 31) * kP1; }
  void stripe(const unsigned char* from) {
    for (std::size_t i = 0; i < lanes_.size(); ++i) lanes_[i] = round(lanes_[i], load<std::uint64_t>(from + 8 * i));
  }

  std::uint64_t seed_;
  std::array<std::uint64_t, 4> lanes_;
  std::array<unsigned char, kStripe> buffer_{};
  std::size_t held_ = 0;
  std::uint64_t total_ = 0;
};

inline std::uint64_t hash64(std::string_view text, std::uint64_t seed = 0) {
  Hash64 hash(seed);
  hash.add(text);
  return hash.value();
}

}  // namespace gka
