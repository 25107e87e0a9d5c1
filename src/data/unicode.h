// The little of Unicode a tokenizer needs: UTF-8 that may be malformed, white space, and canonical composition (NFC).
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace gka::data {

struct Character {
  char32_t code;
  std::size_t length;  // bytes it takes; of malformed text, the bytes that one U+FFFD replaces
  bool valid;
  bool cut_off;  // not valid, but the end of the text came before the end of the character
};

/// The character that starts at text[at], at < text.size().
Character read_character(std::string_view text, std::size_t at);
void append_character(std::string& text, char32_t code);

bool is_utf8(std::string_view text);

/// One U+FFFD for each longest start of a character that is not continued, as Python's errors="replace" does it.
std::string replace_malformed(std::string_view text);

/// Where the text's last character is cut off, its first byte; otherwise the text's size.
std::size_t whole_characters(std::string_view text);

/// Of a text in UTF-8.
std::size_t count_characters(std::string_view text);

bool is_space(char32_t code);

std::string compose(std::string_view text);

}  // namespace gka::data
