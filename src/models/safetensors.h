// The .safetensors format: a little-endian 64-bit length, a JSON header that names each tensor's type, shape and place,
// then the bytes. A tensor read from a file is a view of its mapped pages, so nothing is copied until it is used.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/files.h"
#include "models/safetensors_header.h"

namespace gka::models {

using Tensors = std::map<std::string, at::Tensor>;

struct TensorEntry {
  at::ScalarType dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin, end;  // in the bytes after the header
};

/// A file open for reading. The header is checked whole when it is opened: what `entries` promises is there.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const Metadata& metadata() const { return metadata_; }
  const std::map<std::string, TensorEntry>& entries() const { return entries_; }
  bool has(const std::string& name) const { return entries_.contains(name); }

  /// Whether all numbers of a tensor are finite: reads all of it.
  bool finite(const std::string& name) const;

  /// On the CPU; keeps the mapping alive. Writing to it does not change the file.
  at::Tensor tensor(const std::string& name) const;
  Tensors tensors() const;

 private:
  std::filesystem::path path_;
  MappedFile file_;
  std::uint64_t data_;  // where the bytes begin
  Metadata metadata_;
  std::map<std::string, TensorEntry> entries_;
};

/// A file written one tensor at a time, for those that would not fit memory together: written beside, renamed by
/// `commit`.
class SafetensorsWriter {
 public:
  struct Planned {
    std::string name;
    at::ScalarType dtype;
    std::vector<std::int64_t> shape;
  };
  SafetensorsWriter(const std::filesystem::path& path, std::vector<Planned> tensors, const Metadata& metadata = {});

  /// The next of the planned tensors, on any device and of any layout.
  void write(const at::Tensor& tensor);
  void commit();

 private:
  NewFile file_;
  std::vector<Planned> planned_;
  std::size_t written_ = 0;
};

/// All at once, in the order of names.
void write_safetensors(const std::filesystem::path& path, const Tensors& tensors, const Metadata& metadata = {});

}  // namespace gka::models
