// Tables on a terminal: columns as wide as their widest cell.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

namespace gka::cli {

using Row = std::vector<std::string>;

/// Characters, not bytes.
inline std::size_t width(const std::string& text) {
  return static_cast<std::size_t>(
      std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

/// One line per row, all of equal length; `right` says which columns stand at the right, as numbers do.
inline std::string layout(const std::vector<Row>& rows, const std::vector<bool>& right) {
  std::vector<std::size_t> widths(right.size());
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string gap(widths[i] - width(row[i]), ' ');
      line += (i ? "  " : "") + (right[i] ? gap + row[i] : row[i] + gap);
    }
    text += line.erase(line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

}  // namespace gka::cli
