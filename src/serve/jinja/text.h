// A text that knows, byte by byte, what of it came from a request. Templates write special tokens such as <|im_end|>;
// a message that spells one must stay text, however the template cuts and joins it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace gka::serve::jinja {

enum class Origin : std::uint8_t { ours, request };

class Text {
 public:
  Text() = default;
  Text(std::string bytes, Origin origin = Origin::ours) : bytes_(std::move(bytes)) {
    if (origin == Origin::request) foreign_.assign(bytes_.size(), 1);
  }
  Text(const char* bytes) : bytes_(bytes) {}

  const std::string& bytes() const { return bytes_; }
  std::size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }
  /// Whether byte `at` came from a request.
  bool foreign(std::size_t at) const { return !foreign_.empty() && foreign_[at] != 0; }
  bool any_foreign() const { return foreign_.find(char{1}) != std::string::npos; }
  Origin origin() const { return any_foreign() ? Origin::request : Origin::ours; }

  Text cut(std::size_t from, std::size_t length = std::string::npos) const {
    Text part;
    part.bytes_ = bytes_.substr(from, length);
    if (!foreign_.empty()) part.foreign_ = foreign_.substr(from, length);
    return part;
  }

  Text& operator+=(const Text& more) {
    if (!foreign_.empty() || !more.foreign_.empty()) {
      foreign_.resize(bytes_.size(), 0);
      if (more.foreign_.empty()) {
        foreign_.append(more.bytes_.size(), 0);
      } else {
        foreign_ += more.foreign_;
      }
    }
    bytes_ += more.bytes_;
    return *this;
  }

 private:
  std::string bytes_;
  std::string foreign_;  // empty, or one 0 or 1 for each byte
};

inline Text operator+(Text left, const Text& right) { return std::move(left += right); }

}  // namespace gka::serve::jinja
