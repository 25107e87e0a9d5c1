// A file of events is a list of records, each with its length and the CRC-32C of both length and content; the content
// is a small protocol buffer:
//
//   Event   1: wall_time (double)  2: step (int64)  3: file_version (string)  5: summary (Summary)
//   Summary 1: value, repeated     Value 1: tag (string)  2: simple_value (float)
#include "train/events.h"

#include <array>
#include <bit>
#include <string_view>

namespace gka::train {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // Castagnoli's, reflected

constexpr auto kTable = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    auto value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
    table[i] = value;
  }
  return table;
}();

/// As these files have it: rotated and offset, since a checksum of data with checksums in it is weak.
std::uint32_t masked_checksum(std::string_view bytes) {
  std::uint32_t value = ~0U;
  for (const char byte : bytes) value = kTable[(value ^ static_cast<unsigned char>(byte)) & 0xFF] ^ (value >> 8);
  return std::rotr(~value, 15) + 0xA282EAD8;
}

template <typename Number>
std::string little_endian(Number number) {
  std::string bytes(sizeof(Number), '\0');
  for (std::size_t i = 0; i < sizeof(Number); ++i) bytes[i] = static_cast<char>(number >> (8 * i));
  return bytes;
}

std::string record(const std::string& content) {
  const auto length = little_endian(static_cast<std::uint64_t>(content.size()));
  return length + little_endian(masked_checksum(length)) + content + little_endian(masked_checksum(content));
}

enum class Wire : std::uint8_t { varint = 0, eight_bytes = 1, counted = 2, four_bytes = 5 };

std::string varint(std::uint64_t number) {
  std::string bytes;
  for (; number >= 0x80; number >>= 7) bytes += static_cast<char>((number & 0x7F) | 0x80);
  return bytes + static_cast<char>(number);
}

std::string field(int number, Wire wire, const std::string& value) {
  return varint(static_cast<std::uint64_t>(number) << 3 | static_cast<std::uint64_t>(wire)) +
         (wire == Wire::counted ? varint(value.size()) : "") + value;
}

std::string at(double wall_time) {
  return field(1, Wire::eight_bytes, little_endian(std::bit_cast<std::uint64_t>(wall_time)));
}

}  // namespace

std::string events_header(double wall_time) { return record(at(wall_time) + field(3, Wire::counted, "brain.Event:2")); }

std::string event_of(const Json& line, double wall_time) {
  std::string summary, step;
  for (const auto& [name, value] : line.items()) {
    if (!value.is_number()) continue;
    if (name == "step") {
      step = field(2, Wire::varint, varint(static_cast<std::uint64_t>(value.get<std::int64_t>())));
      continue;
    }
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(value.get<double>()));
    summary += field(1, Wire::counted, field(1, Wire::counted, name) + field(2, Wire::four_bytes, little_endian(bits)));
  }
  return record(at(wall_time) + step + field(5, Wire::counted, summary));
}

}  // namespace gka::train
