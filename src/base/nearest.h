// For "did you mean": which of the known words a misspelt one is closest to.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace gka {

/// How many letters to insert, drop, replace or swap with their neighbour to turn `a` into `b`.
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before_last, last(b.size() + 1), row(b.size() + 1);
  std::iota(last.begin(), last.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before_last[j - 2] + 1);
    }
    before_last = last;
    last = row;
  }
  return last.back();
}

/// Nothing when even the closest word shares less than half its letters with `word`.
inline std::optional<std::string_view> nearest(std::string_view word, std::span<const std::string_view> known) {
  const auto closest = std::ranges::min_element(known, {}, [&](auto entry) { return edit_distance(word, entry); });
  if (closest == known.end()) return std::nullopt;
  const bool close = 2 * edit_distance(word, *closest) <= std::max(word.size(), closest->size());
  return close ? std::optional(*closest) : std::nullopt;
}

}  // namespace gka
