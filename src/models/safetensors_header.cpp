#include "models/safetensors_header.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <utility>

#include "base/json.h"

namespace gka::models {
namespace {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian, and read as they are");

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kLongestHeader = 100'000'000;  // the format's own limit
constexpr const char* kMetadataKey = "__metadata__";

std::runtime_error bad_file(const std::filesystem::path& path, const std::string& what) {
  return std::runtime_error(path.string() + " is not a sound safetensors file: " + what);
}

std::optional<std::size_t> type_named(const std::string& name) {
  const auto found = std::ranges::find(kStoredTypes, name, &StoredType::name);
  if (found == kStoredTypes.end()) return std::nullopt;
  return static_cast<std::size_t>(found - kStoredTypes.begin());
}

/// The header's JSON, from a file of which only the size is known to be right.
Json read_header(const std::filesystem::path& path, std::string_view bytes) {
  if (bytes.size() < kLengthBytes) {
    throw bad_file(path, "it has " + std::to_string(bytes.size()) + " bytes, fewer than its first field");
  }
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), kLengthBytes);
  if (length > kLongestHeader || length > bytes.size() - kLengthBytes) {
    throw bad_file(path, "it states a header of " + std::to_string(length) + " bytes but has " +
                             std::to_string(bytes.size()) + " bytes in all; it may be truncated or of another format");
  }
  const auto header = parse_json_if_any<Json>(bytes.substr(kLengthBytes, length));
  if (!header.is_object()) throw bad_file(path, "its header is not a JSON object");
  return header;
}

/// Whole and small enough for either kind of 64 bits.
bool is_natural(const Json& value) {
  return value.is_number_unsigned() && value.get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX);
}

bool is_list_of_naturals(const Json& value) { return value.is_array() && std::ranges::all_of(value, is_natural); }

/// The bytes a tensor of that shape takes, or nothing where they do not fit 64 bits.
std::optional<std::uint64_t> size_of(const std::vector<std::int64_t>& shape, std::uint64_t element) {
  std::uint64_t bytes = element;
  if (std::ranges::find(shape, 0) != shape.end()) return 0;
  for (const auto size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes)) return std::nullopt;
  }
  return bytes;
}

StoredTensor read_entry(const std::filesystem::path& path, const std::string& name, const Json& entry,
                        std::uint64_t available) {
  const bool well_formed = entry.is_object() && entry.contains("dtype") && entry["dtype"].is_string() &&
                           entry.contains("shape") && is_list_of_naturals(entry["shape"]) &&
                           entry.contains("data_offsets") && is_list_of_naturals(entry["data_offsets"]) &&
                           entry["data_offsets"].size() == 2;
  if (!well_formed) throw bad_file(path, "its entry for '" + name + "' lacks a dtype, a shape or two data_offsets");
  const auto type = type_named(entry["dtype"].get<std::string>());
  if (!type) {
    throw bad_file(path, "'" + name + "' has type " + entry["dtype"].get<std::string>() + ", which gka does not read");
  }
  StoredTensor result{.type = *type,
                      .shape = entry["shape"].get<std::vector<std::int64_t>>(),
                      .begin = entry["data_offsets"][0].get<std::uint64_t>(),
                      .end = entry["data_offsets"][1].get<std::uint64_t>()};
  if (result.end < result.begin ||
      size_of(result.shape, kStoredTypes[result.type].bytes) != result.end - result.begin) {
    throw bad_file(path, "the offsets of '" + name + "' do not fit its type and shape");
  }
  if (result.end > available) {
    throw bad_file(path, "'" + name + "' ends at byte " + std::to_string(result.end) + " but the file holds only " +
                             std::to_string(available) + " bytes of data; it may be truncated");
  }
  return result;
}

/// The format asks that tensors fill the data without overlap or gap.
void check_layout(const std::filesystem::path& path, const std::map<std::string, StoredTensor>& entries,
                  std::uint64_t available) {
  std::vector<std::pair<std::uint64_t, std::string>> order;
  for (const auto& [name, entry] : entries) order.emplace_back(entry.begin, name);
  std::ranges::sort(order, {}, [&](const auto& item) { return std::pair(item.first, entries.at(item.second).end); });
  std::uint64_t reached = 0;
  for (const auto& [begin, name] : order) {
    if (begin < reached) throw bad_file(path, "'" + name + "' overlaps the tensor before it");
    if (begin > reached) throw bad_file(path, "there is a gap before '" + name + "'");
    reached = entries.at(name).end;
  }
  if (reached != available) {
    throw bad_file(path, std::to_string(available - reached) + " bytes follow its last tensor");
  }
}

/// Whether no number of the kind has all of its exponent's bits set, as infinities and NaN have.
template <typename Bits>
bool no_full_exponent(std::string_view bytes, Bits exponent) {
  Bits found = 0;
  for (std::size_t i = 0; i + sizeof(Bits) <= bytes.size(); i += sizeof(Bits)) {
    Bits bits;
    std::memcpy(&bits, bytes.data() + i, sizeof(Bits));
    found |= static_cast<Bits>((bits & exponent) == exponent);
  }
  return found == 0;
}

}  // namespace

SafetensorsHeader read_safetensors_header(const std::filesystem::path& path, std::string_view bytes) {
  const auto json = read_header(path, bytes);
  SafetensorsHeader header;
  std::memcpy(&header.data, bytes.data(), kLengthBytes);
  header.data += kLengthBytes;
  const auto available = bytes.size() - header.data;
  for (const auto& [name, entry] : json.items()) {
    if (name != kMetadataKey) {
      header.tensors.emplace(name, read_entry(path, name, entry, available));
      continue;
    }
    if (!entry.is_object() || !std::ranges::all_of(entry, [](const Json& value) { return value.is_string(); })) {
      throw bad_file(path, "its metadata are not texts");
    }
    header.metadata = entry.get<Metadata>();
  }
  check_layout(path, header.tensors, available);
  return header;
}

std::uint64_t bytes_of(const std::vector<std::int64_t>& shape, const StoredType& type) {
  if (const auto bytes = size_of(shape, type.bytes)) return *bytes;
  throw std::runtime_error("a tensor's shape has more numbers than fit 64 bits");
}

bool all_finite(std::string_view bytes, const StoredType& type) {
  if (type.name == "F64") return no_full_exponent<std::uint64_t>(bytes, 0x7FF0000000000000);
  if (type.name == "F32") return no_full_exponent<std::uint32_t>(bytes, 0x7F800000);
  if (type.name == "BF16") return no_full_exponent<std::uint16_t>(bytes, 0x7F80);
  if (type.name == "F16") return no_full_exponent<std::uint16_t>(bytes, 0x7C00);
  return true;
}

}  // namespace gka::models
