// Sentences that quote what a request or a template spells.
#pragma once

#include <string>

namespace gka::serve {

/// what() ends at the first zero byte, and a quoted name may hold one: it becomes the mark for what cannot be shown.
inline std::string without_zeros(const std::string& text) {
  std::string shown;
  for (const char c : text) {
    if (c != '\0') {
      shown += c;
    } else {
      shown += "\uFFFD";
    }
  }
  return shown;
}

}  // namespace gka::serve
