#include "models/safetensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <utility>

namespace gka::models {
namespace {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian, and read as they are");

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kLongestHeader = 100'000'000;  // the format's own limit
constexpr const char* kMetadataKey = "__metadata__";

constexpr std::array<std::pair<const char*, at::ScalarType>, 9> kTypes{{
    {"F64", at::kDouble},
    {"F32", at::kFloat},
    {"BF16", at::kBFloat16},
    {"F16", at::kHalf},
    {"I64", at::kLong},
    {"I32", at::kInt},
    {"I16", at::kShort},
    {"U8", at::kByte},
    {"BOOL", at::kBool},
}};

std::runtime_error bad_file(const std::filesystem::path& path, const std::string& what) {
  return std::runtime_error(path.string() + " is not a sound safetensors file: " + what);
}

std::optional<at::ScalarType> type_named(const std::string& name) {
  for (const auto& [known, type] : kTypes) {
    if (known == name) return type;
  }
  return std::nullopt;
}

std::string name_of_type(at::ScalarType type) {
  for (const auto& [name, known] : kTypes) {
    if (known == type) return name;
  }
  throw std::runtime_error(std::string("safetensors files cannot hold tensors of type ") + at::toString(type));
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
  auto header = Json::parse(bytes.substr(kLengthBytes, length), nullptr, /*allow_exceptions=*/false);
  if (!header.is_object()) throw bad_file(path, "its header is not a JSON object");
  return header;
}

bool is_natural(const Json& value) { return value.is_number_unsigned(); }

bool is_list_of_naturals(const Json& value) { return value.is_array() && std::ranges::all_of(value, is_natural); }

/// The bytes a tensor of that shape takes, or nothing where they do not fit 64 bits.
std::optional<std::uint64_t> bytes_of(const std::vector<std::int64_t>& shape, at::ScalarType type) {
  std::uint64_t bytes = at::elementSize(type);
  if (std::ranges::find(shape, 0) != shape.end()) return 0;
  for (const auto size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes)) return std::nullopt;
  }
  return bytes;
}

TensorEntry read_entry(const std::filesystem::path& path, const std::string& name, const Json& entry,
                       std::uint64_t available) {
  const bool well_formed = entry.is_object() && entry.contains("dtype") && entry["dtype"].is_string() &&
                           entry.contains("shape") && is_list_of_naturals(entry["shape"]) &&
                           entry.contains("data_offsets") && is_list_of_naturals(entry["data_offsets"]) &&
                           entry["data_offsets"].size() == 2;
  if (!well_formed) throw bad_file(path, "its entry for '" + name + "' lacks a dtype, a shape or two data_offsets");
  const auto type = type_named(entry["dtype"]);
  if (!type) {
    throw bad_file(path, "'" + name + "' has type " + entry["dtype"].get<std::string>() + ", which gka does not read");
  }
  TensorEntry result{.dtype = *type,
                     .shape = entry["shape"].get<std::vector<std::int64_t>>(),
                     .begin = entry["data_offsets"][0],
                     .end = entry["data_offsets"][1]};
  if (result.end < result.begin || bytes_of(result.shape, result.dtype) != result.end - result.begin) {
    throw bad_file(path, "the offsets of '" + name + "' do not fit its type and shape");
  }
  if (result.end > available) {
    throw bad_file(path, "'" + name + "' ends at byte " + std::to_string(result.end) + " but the file holds only " +
                             std::to_string(available) + " bytes of data; it may be truncated");
  }
  return result;
}

/// The format asks that tensors fill the data without overlap or gap.
void check_layout(const std::filesystem::path& path, const std::map<std::string, TensorEntry>& entries,
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

std::string header_of(const std::vector<SafetensorsWriter::Planned>& tensors, const Metadata& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kMetadataKey] = metadata;
  std::uint64_t place = 0;
  for (const auto& [name, dtype, shape] : tensors) {
    const auto end = place + bytes_of(shape, dtype).value();
    header[name] = {{"dtype", name_of_type(dtype)}, {"shape", shape}, {"data_offsets", {place, end}}};
    place = end;
  }
  auto text = header.dump();
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');  // so that the data are aligned
  return text;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : path_(path), file_(path) {
  const auto header = read_header(path, file_.text());
  std::uint64_t length = 0;
  std::memcpy(&length, file_.data(), kLengthBytes);
  data_ = kLengthBytes + length;
  const auto available = file_.size() - data_;
  for (const auto& [name, entry] : header.items()) {
    if (name != kMetadataKey) {
      entries_.emplace(name, read_entry(path, name, entry, available));
      continue;
    }
    if (!entry.is_object() || !std::ranges::all_of(entry, [](const Json& value) { return value.is_string(); })) {
      throw bad_file(path, "its metadata are not texts");
    }
    metadata_ = entry.get<Metadata>();
  }
  check_layout(path, entries_, available);
}

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) throw std::runtime_error(path_.string() + " has no tensor '" + name + "'");
  const auto& entry = found->second;
  const auto options = at::TensorOptions(entry.dtype);
  if (entry.begin == entry.end) return at::empty(entry.shape, options);
  char* start = file_.data() + data_ + entry.begin;
  if (reinterpret_cast<std::uintptr_t>(start) % at::elementSize(entry.dtype) == 0) {
    return at::from_blob(start, entry.shape, [owner = file_.owner()](void*) {}, options);
  }
  auto copy = at::empty(entry.shape, options);  // a header whose length the writer did not round up
  std::memcpy(copy.data_ptr(), start, entry.end - entry.begin);
  return copy;
}

Tensors SafetensorsFile::tensors() const {
  Tensors all;
  for (const auto& [name, entry] : entries_) all.emplace(name, tensor(name));
  return all;
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::vector<Planned> tensors,
                                     const Metadata& metadata)
    : file_(path), planned_(std::move(tensors)) {
  const auto header = header_of(planned_, metadata);
  const std::uint64_t length = header.size();
  file_.write(&length, kLengthBytes);
  file_.write(header);
}

void SafetensorsWriter::write(const at::Tensor& tensor) {
  const auto& planned = planned_.at(written_++);
  if (tensor.sizes() != at::IntArrayRef(planned.shape) || tensor.scalar_type() != planned.dtype) {
    throw std::logic_error("'" + planned.name + "' is not the tensor that was announced");
  }
  const auto stored = tensor.detach().to(at::kCPU).contiguous();
  file_.write(stored.const_data_ptr(), stored.nbytes());
}

void SafetensorsWriter::commit() {
  if (written_ != planned_.size()) throw std::logic_error("'" + planned_[written_].name + "' was never written");
  file_.commit();
}

void write_safetensors(const std::filesystem::path& path, const Tensors& tensors, const Metadata& metadata) {
  std::vector<SafetensorsWriter::Planned> planned;
  for (const auto& [name, tensor] : tensors) {
    planned.push_back({.name = name, .dtype = tensor.scalar_type(), .shape = tensor.sizes().vec()});
  }
  SafetensorsWriter writer(path, std::move(planned), metadata);
  for (const auto& [name, tensor] : tensors) writer.write(tensor);
  writer.commit();
}

}  // namespace gka::models
