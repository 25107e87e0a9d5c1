// The GGUF format, in which llama.cpp and its relatives keep models: little-endian; keys with values, then each
// tensor's name, shape, type and place, then their bytes. Most tensors are in blocks of small whole numbers with a
// scale or two for each block, and `dequantise` makes float32 of them. Knows nothing of torch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/fields.h"
#include "base/files.h"

namespace gka::models {

/// The types that are read, with the format's own numbers.
enum class GgufType : std::uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  bf16 = 30,
};

struct GgufTensor {
  GgufType type = GgufType::f32;
  std::vector<std::int64_t> shape;  // rows first, as everywhere else; the format has them last
  std::string_view bytes;           // of the file
  std::int64_t count() const;
};

/// What a file holds. Tensors are views of the bytes it was read from.
struct Gguf {
  Json metadata = Json::object();
  std::map<std::string, GgufTensor> tensors;

  /// The value of a key; an error that calls the file `where` if it is not there or of another kind.
  template <typename T>
  T get(const std::string& key, const std::string& where) const {
    T value{};
    const auto found = metadata.find(key);
    if (found == metadata.end()) throw std::runtime_error(where + " has no '" + key + "'");
    json::read_key(*found, key, where, value);
    return value;
  }
  template <typename T>
  T get_or(const std::string& key, const std::string& where, T otherwise) const {
    return metadata.contains(key) ? get<T>(key, where) : otherwise;
  }
};

/// Throws one sentence, which calls the file `where`, for whatever is not sound: every length and offset is checked.
Gguf parse_gguf(std::string_view bytes, const std::string& where);

/// A file open for reading, its bytes mapped.
class GgufFile {
 public:
  explicit GgufFile(const std::filesystem::path& path)
      : path_(path), file_(path), content_(parse_gguf(file_.text(), path.string())) {}

  const std::filesystem::path& path() const { return path_; }
  const Gguf& content() const { return content_; }

 private:
  std::filesystem::path path_;
  MappedFile file_;
  Gguf content_;
};

/// "Q4_K"
std::string_view name_of_gguf_type(GgufType type);
/// Whether its numbers are single ones, not blocks with a scale.
bool is_plain(GgufType type);

/// out: as many numbers as the tensor has.
void dequantise(const GgufTensor& tensor, std::span<float> out);

}  // namespace gka::models
