#include "serve/model.h"

#include "data/unicode.h"

namespace gka::serve {

std::string_view Model::bytes(std::int64_t token) const {
  return token < tokenizer().vocab_size() ? tokenizer().bytes_of(static_cast<data::Token>(token)) : std::string_view();
}

std::string Model::shown(std::int64_t token) const {
  const auto raw = bytes(token);
  if (data::is_utf8(raw)) return std::string(raw);
  static constexpr const char* kDigits = "0123456789abcdef";
  std::string text = "bytes:";
  for (const unsigned char c : raw) text += std::string("\\x") + kDigits[c >> 4] + kDigits[c & 15];
  return text;
}

}  // namespace gka::serve
