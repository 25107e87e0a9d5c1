// The header of a .safetensors file: which tensors there are, of what type and shape, and where they lie. Without
// torch.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace gka::models {

using Metadata = std::map<std::string, std::string>;

struct StoredType {
  std::string_view name;  // as files spell it
  std::uint64_t bytes;    // of an element
};
inline constexpr std::array<StoredType, 10> kStoredTypes{{
    {"F64", 8},
    {"F32", 4},
    {"BF16", 2},
    {"F16", 2},
    {"I64", 8},
    {"I32", 4},
    {"I16", 2},
    {"I8", 1},
    {"U8", 1},
    {"BOOL", 1},
}};

struct StoredTensor {
  std::size_t type;  // in kStoredTypes
  std::vector<std::int64_t> shape;
  std::uint64_t begin, end;  // in the bytes after the header
};

struct SafetensorsHeader {
  std::uint64_t data = 0;  // where the bytes begin
  Metadata metadata{};
  std::map<std::string, StoredTensor> tensors{};
};

/// From all the bytes of a file, which errors call `path`. Checked whole: every tensor lies inside, they fill the data
/// without overlap or gap, and their sizes are those of their types and shapes.
SafetensorsHeader read_safetensors_header(const std::filesystem::path& path, std::string_view bytes);

/// The bytes a tensor takes; throws where they do not fit 64 bits.
std::uint64_t bytes_of(const std::vector<std::int64_t>& shape, const StoredType& type);

/// Whether all of the numbers are finite; those of whole types are.
bool all_finite(std::string_view bytes, const StoredType& type);

}  // namespace gka::models
