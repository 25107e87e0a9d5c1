// Reads a .safetensors file whole: a little-endian length, a JSON header that names each tensor's type, shape and
// place, then the bytes. Float32 and float64 only, as the goldens have them.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace gka::kernels::test {

struct StoredTensor {
  std::vector<std::int64_t> shape{};
  std::vector<double> values{};
};

struct StoredFile {
  std::map<std::string, std::string> metadata{};
  std::map<std::string, StoredTensor> tensors{};

  bool has(const std::string& name) const { return tensors.contains(name); }
};

template <typename T>
std::vector<double> widen(const char* bytes, std::size_t count) {
  std::vector<double> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, bytes + i * sizeof(T), sizeof(T));
    values[i] = static_cast<double>(value);
  }
  return values;
}

inline StoredFile read_safetensors(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  std::uint64_t header_size = 0;
  if (bytes.size() < sizeof(header_size)) throw std::runtime_error("cannot read " + path.string());
  std::memcpy(&header_size, bytes.data(), sizeof(header_size));
  const char* data = bytes.data() + sizeof(header_size) + header_size;

  StoredFile file;
  const auto header = nlohmann::json::parse(bytes.data() + sizeof(header_size), data);
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      file.metadata = entry.get<std::map<std::string, std::string>>();
      continue;
    }
    const auto begin = entry["data_offsets"][0].get<std::size_t>();
    const auto size = entry["data_offsets"][1].get<std::size_t>() - begin;
    const auto dtype = entry["dtype"].get<std::string>();
    if (dtype != "F32" && dtype != "F64") throw std::runtime_error(name + " has type " + dtype);
    file.tensors[name] = {.shape = entry["shape"].get<std::vector<std::int64_t>>(),
                          .values = dtype == "F64" ? widen<double>(data + begin, size / sizeof(double))
                                                   : widen<float>(data + begin, size / sizeof(float))};
  }
  return file;
}

}  // namespace gka::kernels::test
