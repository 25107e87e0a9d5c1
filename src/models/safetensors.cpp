#include "models/safetensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

namespace gka::models {
namespace {

constexpr std::uint64_t kLengthBytes = 8;
constexpr const char* kMetadataKey = "__metadata__";

/// torch's name for each of kStoredTypes.
constexpr std::array<at::ScalarType, kStoredTypes.size()> kTypes{at::kDouble, at::kFloat, at::kBFloat16, at::kHalf,
                                                                 at::kLong,   at::kInt,   at::kShort,    at::kChar,
                                                                 at::kByte,   at::kBool};

const StoredType& stored_type(at::ScalarType type) {
  for (std::size_t i = 0; i < kTypes.size(); ++i) {
    if (kTypes[i] == type) return kStoredTypes[i];
  }
  throw std::runtime_error(std::string("safetensors files cannot hold tensors of type ") + at::toString(type));
}

std::string header_of(const std::vector<SafetensorsWriter::Planned>& tensors, const Metadata& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kMetadataKey] = metadata;
  std::uint64_t place = 0;
  for (const auto& [name, dtype, shape] : tensors) {
    const auto& type = stored_type(dtype);
    const auto end = place + bytes_of(shape, type);
    header[name] = {{"dtype", type.name}, {"shape", shape}, {"data_offsets", {place, end}}};
    place = end;
  }
  auto text = header.dump();
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');  // so that the data are aligned
  return text;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : path_(path), file_(path) {
  auto header = read_safetensors_header(path, file_.text());
  data_ = header.data;
  metadata_ = std::move(header.metadata);
  for (auto& [name, stored] : header.tensors) {
    entries_.emplace(name, TensorEntry{kTypes[stored.type], std::move(stored.shape), stored.begin, stored.end});
  }
}

bool SafetensorsFile::finite(const std::string& name) const {
  const auto& entry = entries_.at(name);
  return all_finite(file_.text().substr(data_ + entry.begin, entry.end - entry.begin), stored_type(entry.dtype));
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
