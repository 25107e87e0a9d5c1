#include "data/token_file.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "data/verified.h"

namespace gka::data {
namespace {

constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kAlignment = 8;
constexpr std::size_t kBufferBytes = std::size_t{4} << 20;

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

std::size_t padded(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

std::uint64_t hash_of_header(const TokenFileHeader& header) {
  return hash64({reinterpret_cast<const char*>(&header), offsetof(TokenFileHeader, header_hash)});
}

std::runtime_error bad(const std::filesystem::path& path, const std::string& what) {
  return std::runtime_error(path.string() + " " + what);
}

/// The file's size as the header has it; 0 where its numbers make no sense.
std::size_t expected_size(const TokenFileHeader& header) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 56;
  if (header.tokens > kMost || header.documents > kMost) return 0;  // their products still fit
  return sizeof(TokenFileHeader) + padded(header.tokens * header.token_bytes) + 8 * (header.documents + 1);
}

TokenFileHeader read_header(const std::filesystem::path& path, std::string_view bytes) {
  constexpr const char* kAgain = "; make it again with `gka tokenize`.";
  TokenFileHeader header;
  const TokenFileHeader fresh;
  if (bytes.size() < sizeof fresh.magic || std::memcmp(bytes.data(), fresh.magic, sizeof fresh.magic) != 0) {
    throw bad(path, "is not a token file (it does not start with GKATOKEN); `gka tokenize` makes one from text.");
  }
  if (bytes.size() < sizeof header) throw bad(path, "is truncated: its header is not whole" + std::string(kAgain));
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.version != kVersion) {
    throw bad(path, "has format version " + std::to_string(header.version) + ", and this gka reads version " +
                        std::to_string(kVersion) + kAgain);
  }
  if (header.header_hash != hash_of_header(header) || (header.token_bytes != 2 && header.token_bytes != 4)) {
    throw bad(path, "is damaged: its header does not match its checksum" + std::string(kAgain));
  }
  if (const auto expected = expected_size(header); bytes.size() != expected) {
    throw bad(path, std::string(bytes.size() < expected ? "is truncated" : "has bytes too many") + ": " +
                        std::to_string(bytes.size()) + " of " + std::to_string(expected) + " bytes" + kAgain);
  }
  return header;
}

template <typename Stored>
void widen(const std::byte* from, std::span<std::int64_t> out) {
  const auto* stored = reinterpret_cast<const Stored*>(from);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = stored[i];
}

template <typename Stored>
std::uint64_t largest_of(const std::byte* from, std::int64_t count) {
  const auto* stored = reinterpret_cast<const Stored*>(from);
  Stored largest = 0;
  for (std::int64_t i = 0; i < count; ++i) largest = std::max(largest, stored[i]);
  return largest;
}

template <typename Stored>
void narrow(std::span<const Token> ids, std::vector<std::byte>& out) {
  const auto start = out.size();
  out.resize(start + ids.size() * sizeof(Stored));
  auto* stored = reinterpret_cast<Stored*>(out.data() + start);
  for (std::size_t i = 0; i < ids.size(); ++i) stored[i] = static_cast<Stored>(ids[i]);
}

}  // namespace

std::filesystem::path tokenizer_beside(std::filesystem::path token_file) {
  return token_file.replace_extension(".tokenizer.json");
}

TokenFile::TokenFile(const std::filesystem::path& path)
    : path_(path), map_(path), header_(read_header(path, map_.text())) {
  tokens_ = reinterpret_cast<const std::byte*>(map_.data()) + sizeof(TokenFileHeader);
  offsets_ = reinterpret_cast<const std::uint64_t*>(tokens_ + padded(header_.tokens * header_.token_bytes));
  // Everything that reads documents trusts these from here on.
  if (offsets_[0] != 0 || offsets_[header_.documents] != header_.tokens || !std::ranges::is_sorted(offsets())) {
    throw bad(path,
              "is damaged: its documents do not follow each other from its first token to its last; make it "
              "again with `gka tokenize`.");
  }
}

Token TokenFile::operator[](std::int64_t index) const {
  std::int64_t value = 0;
  read(index, {&value, 1});
  return static_cast<Token>(value);
}

void TokenFile::read(std::int64_t first, std::span<std::int64_t> out) const {
  const auto* from = tokens_ + static_cast<std::size_t>(first) * header_.token_bytes;
  header_.token_bytes == 2 ? widen<std::uint16_t>(from, out) : widen<std::uint32_t>(from, out);
}

void TokenFile::verify() const {
  if (hash64(map_.text().substr(sizeof(TokenFileHeader))) != header_.body_hash) {
    throw bad(path_, "is damaged: its contents do not match its checksum; make it again with `gka tokenize`.");
  }
  const auto largest = header_.token_bytes == 2 ? largest_of<std::uint16_t>(tokens_, tokens())
                                                : largest_of<std::uint32_t>(tokens_, tokens());
  if (header_.tokens > 0 && largest >= header_.vocab_size) {
    throw bad(path_, "is damaged: it has the token " + std::to_string(largest) + ", and its vocabulary has " +
                         std::to_string(header_.vocab_size) + "; make it again with `gka tokenize`.");
  }
}

void TokenFile::verify_once() const {
  const VerifiedFiles verified;
  const auto mark = mark_of(path_, header_.body_hash);
  if (verified.has(mark)) return;
  verify();
  verified.add(mark);
}

TokenFileWriter::TokenFileWriter(const std::filesystem::path& path, const Tokenizer& tokenizer,
                                 std::optional<Token> end_of_document)
    : file_(path) {
  header_.vocab_size = static_cast<std::uint64_t>(tokenizer.vocab_size());
  header_.token_bytes = header_.vocab_size <= 0x10000 ? 2 : 4;
  header_.end_of_document = end_of_document.value_or(-1);
  header_.tokenizer = tokenizer.fingerprint();
  file_.write(&header_, sizeof header_);  // its place; `commit` fills it in
}

void TokenFileWriter::put(std::span<const Token> ids) {
  header_.token_bytes == 2 ? narrow<std::uint16_t>(ids, buffer_) : narrow<std::uint32_t>(ids, buffer_);
  header_.tokens += ids.size();
  if (buffer_.size() >= kBufferBytes) flush();
}

void TokenFileWriter::flush() {
  hash_.add(buffer_.data(), buffer_.size());
  file_.write(buffer_.data(), buffer_.size());
  buffer_.clear();
}

void TokenFileWriter::add(std::span<const Token> document) {
  put(document);
  if (header_.end_of_document >= 0) {
    const auto end = static_cast<Token>(header_.end_of_document);
    put({&end, 1});
  }
  offsets_.push_back(header_.tokens);
}

void TokenFileWriter::commit() {
  header_.documents = offsets_.size() - 1;
  const auto bytes = header_.tokens * header_.token_bytes;
  buffer_.resize(buffer_.size() + padded(bytes) - bytes);
  flush();
  hash_.add(offsets_.data(), 8 * offsets_.size());
  file_.write(offsets_.data(), 8 * offsets_.size());
  header_.body_hash = hash_.value();
  header_.header_hash = hash_of_header(header_);
  file_.write_at(0, &header_, sizeof header_);
  file_.commit();
}

}  // namespace gka::data
