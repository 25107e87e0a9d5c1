// A template's text as tokens. White space is settled here, as Hugging Face sets Jinja up (trim_blocks, lstrip_blocks):
// the newline after a {% tag %} and the blanks before it go, and '-' and '+' at a tag's ends say otherwise.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gka::serve::jinja {

enum class TokenKind : std::uint8_t {
  data,
  block_begin,
  block_end,
  output_begin,
  output_end,
  name,
  text,
  integer,
  real,
  symbol,
  end
};

struct Token {
  TokenKind kind;
  std::string value;  // of a text, without its quotes and escapes
  int line;
};

/// Throws Error with the line.
std::vector<Token> tokenize(std::string_view source);

}  // namespace gka::serve::jinja
