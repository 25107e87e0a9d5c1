// White space as Python's str.strip and \s know it, in UTF-8.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

namespace gka::cli {

inline constexpr std::array<std::string_view, 29> kWhiteSpace{
    " ",      "\t",     "\n",     "\v",     "\f",     "\r",     "\x1c",   "\x1d",   "\x1e",   "\x1f",
    "\u0085", "\u00a0", "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004", "\u2005", "\u2006",
    "\u2007", "\u2008", "\u2009", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"};

/// The bytes of the white space that begins at `place`; 0 where there is none.
inline std::size_t white_space_at(std::string_view text, std::size_t place) {
  for (const auto space : kWhiteSpace) {
    if (text.substr(place).starts_with(space)) return space.size();
  }
  return 0;
}

inline std::string_view without_leading_space(std::string_view text) {
  while (const auto size = white_space_at(text, 0)) text.remove_prefix(size);
  return text;
}

inline std::string_view without_trailing_space(std::string_view text) {
  for (bool found = true; found;) {
    found = false;
    for (const auto space : kWhiteSpace) {
      if (!text.ends_with(space)) continue;
      text.remove_suffix(space.size());
      found = true;
    }
  }
  return text;
}

}  // namespace gka::cli
