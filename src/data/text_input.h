// The bytes of a text, whatever it comes in: a file, standard input, and either of them compressed by gzip, zstd or xz.
// What it is shows in its first bytes, not in its name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace gka::data {

class TextInput {
 public:
  virtual ~TextInput() = default;

  /// Up to `size` bytes of text; 0: there are no more. Throws one sentence where the file is damaged or cut short.
  virtual std::size_t read(char* into, std::size_t size) = 0;
  /// Bytes taken from the file so far, as they lie there.
  virtual std::int64_t taken() const = 0;
};

inline constexpr const char* kStandardInput = "-";

/// Whether the file has to be read through a TextInput; other texts can be mapped. Throws where it is of a kind that
/// is no text (Parquet, Arrow, zip, PDF, a token file, …) or text in UTF-16.
bool is_compressed(const std::string& path);

std::unique_ptr<TextInput> open_text(const std::string& path);

/// Appends what the input has next; false at its end.
bool append(TextInput& input, std::string& text);

/// All of a text.
std::string read_whole_text(const std::string& path);

}  // namespace gka::data
