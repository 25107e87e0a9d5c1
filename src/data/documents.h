// Documents from files: a text file is one (or several, with a separator between), a file of JSON lines has one a line.
// Files compressed by gzip, zstd or xz are read as what is in them, and - is standard input.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gka::data {

struct DocumentOptions {
  std::optional<std::string> field{};      // files are JSON lines, and this is the key of the text
  std::optional<std::string> separator{};  // between documents of a text file
};

/// A document as it stands in the file: its text, or its line of JSON.
struct RawDocument {
  std::string_view bytes;
  std::size_t file = 0;
  std::int64_t line = 0;  // of JSON, from 1
};

/// Calls `sink` with batches of neighbouring documents, about `batch_bytes` at a time. Files
/// called .jsonl or .ndjson are JSON lines with the field "text" unless the options say otherwise.
class DocumentReader {
 public:
  DocumentReader(std::vector<std::string> paths, DocumentOptions options);

  using Sink = std::function<void(const std::vector<RawDocument>& batch, std::int64_t bytes_done)>;
  void read(std::size_t batch_bytes, const Sink& sink) const;

  /// The document's text. Throws with file and line where the JSON is bad or has no such field.
  std::string text(const RawDocument& document) const;

  std::int64_t total_bytes() const { return total_bytes_; }

 private:
  std::optional<std::string> field_of(const std::string& path) const;
  std::string separator_of(std::size_t file) const;
  void read_mapped(std::size_t file, std::size_t batch_bytes, std::int64_t bytes_before, const Sink& sink) const;
  void read_stream(std::size_t file, std::size_t batch_bytes, std::int64_t bytes_before, const Sink& sink) const;

  std::vector<std::string> paths_;
  DocumentOptions options_;
  std::int64_t total_bytes_ = 0;
};

}  // namespace gka::data
