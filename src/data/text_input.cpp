#include "data/text_input.h"

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#ifdef GKA_ZLIB
#include <zlib.h>
#endif
#ifdef GKA_ZSTD
#include <zstd.h>
#endif
#ifdef GKA_LZMA
#include <lzma.h>
#endif

#include "base/files.h"

namespace gka::data {
namespace {

constexpr std::size_t kPiece = std::size_t{256} << 10;

std::runtime_error bad(const std::string& path, const std::string& what) {
  return std::runtime_error("cannot read " + path + ": " + what);
}

/// The file itself, piece by piece.
class Bytes {
 public:
  explicit Bytes(const std::string& path)
      : path_(path == kStandardInput ? "standard input" : path),
        file_(path == kStandardInput ? Descriptor(::dup(STDIN_FILENO)) : open_regular(path).descriptor),
        piece_(kPiece, '\0') {
    if (!file_.open()) throw file_error("open", path_);
    while (held_ < kLongestMark && more()) {
    }
  }

  const std::string& path() const { return path_; }
  std::int64_t taken() const { return taken_; }
  /// What is there and not yet used; empty only at the end.
  std::string_view rest() {
    if (used_ == held_) {
      used_ = held_ = 0;
      more();
    }
    return std::string_view(piece_).substr(used_, held_ - used_);
  }
  void use(std::size_t count) { used_ += count; }

 private:
  static constexpr std::size_t kLongestMark = 16;  // of what files start with

  bool more() {
    while (true) {
      const auto got = ::read(file_.get(), piece_.data() + held_, piece_.size() - held_);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw file_error("read", path_);
      held_ += static_cast<std::size_t>(got);
      taken_ += got;
      return got > 0;
    }
  }

  std::string path_;
  Descriptor file_;
  std::string piece_;
  std::size_t held_ = 0, used_ = 0;
  std::int64_t taken_ = 0;
};

class Plain final : public TextInput {
 public:
  explicit Plain(Bytes bytes) : bytes_(std::move(bytes)) {}
  std::size_t read(char* into, std::size_t size) override {
    const auto got = bytes_.rest().substr(0, size);
    got.copy(into, got.size());
    bytes_.use(got.size());
    return got.size();
  }
  std::int64_t taken() const override { return bytes_.taken(); }

 private:
  Bytes bytes_;
};

/// What a format's library does with a piece of input: how much it used and made, and whether one stream is complete.
struct Progress {
  std::size_t used = 0, made = 0;
  bool complete = false;
};

/// The part that all formats have in common. A file may hold several streams, one after the other.
template <typename Decoder>
class Compressed final : public TextInput {
 public:
  explicit Compressed(Bytes bytes) : bytes_(std::move(bytes)) {}

  std::size_t read(char* into, std::size_t size) override {
    while (true) {
      const auto input = bytes_.rest();
      if (input.empty() && between_) return 0;
      if (input.empty() && starved_) throw bad(bytes_.path(), "it ends in the middle of its compressed text");
      const auto done = decoder_.decode(input, into, size);
      if (!done) throw bad(bytes_.path(), "its compressed text is damaged");
      bytes_.use(done->used);
      between_ = done->complete;
      starved_ = input.empty() && done->made == 0;
      if (done->made > 0) return done->made;
    }
  }
  std::int64_t taken() const override { return bytes_.taken(); }

 private:
  Bytes bytes_;
  Decoder decoder_;
  bool between_ = false;  // at the end of a stream
  bool starved_ = false;  // nothing came in and nothing came out
};

#ifdef GKA_ZLIB
class Gzip {
 public:
  Gzip() {
    if (inflateInit2(&stream_, 15 + 16) != Z_OK) throw std::bad_alloc();
  }
  ~Gzip() { inflateEnd(&stream_); }
  Gzip(const Gzip&) = delete;
  Gzip& operator=(const Gzip&) = delete;

  std::optional<Progress> decode(std::string_view input, char* into, std::size_t size) {
    if (complete_) inflateReset(&stream_);
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(input.data()));
    stream_.avail_in = static_cast<uInt>(input.size());
    stream_.next_out = reinterpret_cast<Bytef*>(into);
    stream_.avail_out = static_cast<uInt>(std::min(size, kPiece));
    const auto room = stream_.avail_out;
    const int result = inflate(&stream_, Z_NO_FLUSH);
    if (result != Z_OK && result != Z_STREAM_END && result != Z_BUF_ERROR) return std::nullopt;
    complete_ = result == Z_STREAM_END;
    return Progress{input.size() - stream_.avail_in, room - stream_.avail_out, complete_};
  }

 private:
  z_stream stream_{};
  bool complete_ = false;
};
#endif

#ifdef GKA_ZSTD
class Zstd {
 public:
  Zstd() : stream_(ZSTD_createDStream()) {
    if (!stream_) throw std::bad_alloc();
  }
  ~Zstd() { ZSTD_freeDStream(stream_); }
  Zstd(const Zstd&) = delete;
  Zstd& operator=(const Zstd&) = delete;

  std::optional<Progress> decode(std::string_view input, char* into, std::size_t size) {
    ZSTD_inBuffer in{input.data(), input.size(), 0};
    ZSTD_outBuffer out{into, size, 0};
    const auto left = ZSTD_decompressStream(stream_, &out, &in);
    if (ZSTD_isError(left)) return std::nullopt;
    return Progress{in.pos, out.pos, left == 0};
  }

 private:
  ZSTD_DStream* stream_;
};
#endif

#ifdef GKA_LZMA
class Xz {
 public:
  Xz() {
    constexpr std::uint64_t kMemory = std::uint64_t{1} << 30;
    if (lzma_stream_decoder(&stream_, kMemory, 0) != LZMA_OK) throw std::bad_alloc();
  }
  ~Xz() { lzma_end(&stream_); }
  Xz(const Xz&) = delete;
  Xz& operator=(const Xz&) = delete;

  std::optional<Progress> decode(std::string_view input, char* into, std::size_t size) {
    if (complete_ && lzma_stream_decoder(&stream_, std::uint64_t{1} << 30, 0) != LZMA_OK) return std::nullopt;
    stream_.next_in = reinterpret_cast<const std::uint8_t*>(input.data());
    stream_.avail_in = input.size();
    stream_.next_out = reinterpret_cast<std::uint8_t*>(into);
    stream_.avail_out = size;
    const auto result = lzma_code(&stream_, LZMA_RUN);
    if (result != LZMA_OK && result != LZMA_STREAM_END && result != LZMA_BUF_ERROR) return std::nullopt;
    complete_ = result == LZMA_STREAM_END;
    return Progress{input.size() - stream_.avail_in, size - stream_.avail_out, complete_};
  }

 private:
  lzma_stream stream_ = LZMA_STREAM_INIT;
  bool complete_ = false;
};
#endif

using Open = std::unique_ptr<TextInput> (*)(Bytes bytes);

template <typename Decoder>
std::unique_ptr<TextInput> open_compressed(Bytes bytes) {
  return std::make_unique<Compressed<Decoder>>(std::move(bytes));
}

struct Format {
  std::string_view mark;  // what its files start with
  const char* name;
  bool compression;  // of a text
  Open open;         // none: this build does not read it
};

#ifdef GKA_ZLIB
constexpr Open kGzip = open_compressed<Gzip>;
#else
constexpr Open kGzip = nullptr;
#endif
#ifdef GKA_ZSTD
constexpr Open kZstd = open_compressed<Zstd>;
#else
constexpr Open kZstd = nullptr;
#endif
#ifdef GKA_LZMA
constexpr Open kXz = open_compressed<Xz>;
#else
constexpr Open kXz = nullptr;
#endif

using std::string_view_literals::operator""sv;
constexpr std::array<Format, 11> kFormats{{
    {"\x1F\x8B"sv, "gzip", true, kGzip},
    {"\x28\xB5\x2F\xFD"sv, "zstd", true, kZstd},
    {"\xFD\x37\x7A\x58\x5A\x00"sv, "xz", true, kXz},
    {"PAR1"sv, "a Parquet file (`python -m gka.data FILE` prints its texts for gka tokenize -)", false, nullptr},
    {"ARROW1"sv, "an Arrow file (`python -m gka.data FILE` prints its texts for gka tokenize -)", false, nullptr},
    {"PK\x03\x04"sv, "a zip archive", false, nullptr},
    {"BZh91AY&SY"sv, "compressed by bzip2", false, nullptr},
    {"%PDF-"sv, "a PDF (`pdftotext FILE` makes text of it)", false, nullptr},
    {"GKATOKEN"sv, "a token file, which gka tokenize has made already", false, nullptr},
    {"\xFF\xFE"sv, "in UTF-16 (`iconv -f UTF-16 -t UTF-8 FILE` makes it UTF-8)", false, nullptr},
    {"\xFE\xFF"sv, "in UTF-16 (`iconv -f UTF-16 -t UTF-8 FILE` makes it UTF-8)", false, nullptr},
}};

const Format* format_of(Bytes& bytes) {
  for (const auto& format : kFormats) {
    if (!bytes.rest().starts_with(format.mark)) continue;
    if (format.compression && format.open) return &format;
    if (format.compression) {
      throw bad(bytes.path(), std::string("it is compressed by ") + format.name + ", which this gka was built without");
    }
    throw bad(bytes.path(), std::string("it is ") + format.name +
                                "; gka reads text and JSON lines, plain or compressed by gzip, zstd or xz");
  }
  return nullptr;
}

}  // namespace

bool is_compressed(const std::string& path) {
  Bytes bytes(path);
  return format_of(bytes) != nullptr;
}

std::unique_ptr<TextInput> open_text(const std::string& path) {
  Bytes bytes(path);
  if (const auto* format = format_of(bytes)) return format->open(std::move(bytes));
  return std::make_unique<Plain>(std::move(bytes));
}

bool append(TextInput& input, std::string& text) {
  constexpr std::size_t kStep = std::size_t{1} << 20;
  const auto before = text.size();
  text.resize(before + kStep);
  const auto got = input.read(text.data() + before, kStep);
  text.resize(before + got);
  return got > 0;
}

std::string read_whole_text(const std::string& path) {
  const auto input = open_text(path);
  std::string text;
  while (append(*input, text)) {
  }
  return text;
}

}  // namespace gka::data
