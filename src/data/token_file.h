// Token files: what `gka tokenize` writes and training maps into memory. docs/data.md has the layout to the byte; in
// short a header of 96 bytes, the tokens as little-endian u16 or u32, padding to 8 bytes, and documents + 1 offsets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <vector>

#include "base/files.h"
#include "base/hash.h"
#include "data/tokenizer.h"

namespace gka::data {

/// The start of the file, as it lies on the disk. Numbers are little-endian.
struct TokenFileHeader {
  char magic[8] = {'G', 'K', 'A', 'T', 'O', 'K', 'E', 'N'};
  std::uint32_t version = 1;
  std::uint32_t token_bytes = 0;  // 2 or 4
  std::uint64_t tokens = 0;       // end-of-document tokens included
  std::uint64_t documents = 0;
  std::uint64_t vocab_size = 0;       // every token is below it
  std::int64_t end_of_document = -1;  // the token appended to each document, −1: none
  std::uint64_t tokenizer = 0;        // Tokenizer::fingerprint()
  std::uint64_t body_hash = 0;        // XXH64 of everything behind the header
  std::uint64_t reserved[3] = {};     // zero
  std::uint64_t header_hash = 0;      // XXH64 of the header's bytes before this field
};
static_assert(sizeof(TokenFileHeader) == 96);

/// Where `gka tokenize` leaves a copy of the tokenizer.json a token file was made with, for the models trained on it:
/// book.tokenizer.json for book.tokens.
std::filesystem::path tokenizer_beside(std::filesystem::path token_file);

/// Reads a token file through memory mapping. Opening checks the header, the size and that documents follow each other
/// inside the file; the tokens themselves are only checked by `verify`, because that reads all of them.
class TokenFile {
 public:
  explicit TokenFile(const std::filesystem::path& path);

  const TokenFileHeader& header() const { return header_; }
  const std::filesystem::path& path() const { return path_; }
  std::int64_t tokens() const { return static_cast<std::int64_t>(header_.tokens); }
  std::int64_t documents() const { return static_cast<std::int64_t>(header_.documents); }

  Token operator[](std::int64_t index) const;
  /// Tokens first … first + out.size() − 1.
  void read(std::int64_t first, std::span<std::int64_t> out) const;
  /// Where documents start, and the number of tokens at the end: documents + 1 entries.
  std::span<const std::uint64_t> offsets() const { return {offsets_, header_.documents + 1}; }

  /// Throws where the file's contents are not those that were written.
  void verify() const;
  /// The same, once for each file: one that was found whole is remembered by its place, size and time of change in a
  /// file of the user's cache folder (docs/data.md).
  void verify_once() const;

 private:
  std::filesystem::path path_;
  MappedFile map_;
  TokenFileHeader header_;
  const std::byte* tokens_ = nullptr;
  const std::uint64_t* offsets_ = nullptr;
};

/// Writes a token file beside its name; it appears under its name, whole, with `commit`.
class TokenFileWriter {
 public:
  /// u16 where the vocabulary allows it.
  TokenFileWriter(const std::filesystem::path& path, const Tokenizer& tokenizer, std::optional<Token> end_of_document);

  /// One document; the end-of-document token is appended here.
  void add(std::span<const Token> document);
  void commit();

  const TokenFileHeader& header() const { return header_; }

 private:
  void put(std::span<const Token> ids);
  void flush();

  NewFile file_;
  TokenFileHeader header_;
  std::vector<std::uint64_t> offsets_{0};
  std::vector<std::byte> buffer_;
  Hash64 hash_;
};

}  // namespace gka::data
