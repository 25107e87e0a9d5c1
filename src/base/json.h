// JSON from files and from users: one place that parses it, with one limit on how deep it may be nested. The parser
// itself takes any depth; copying, comparing and writing what it made goes down one call a level, and the stack ends.
#pragma once

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

#include "base/files.h"

namespace gka {

using Json = nlohmann::ordered_json;

/// No format here has more than a dozen levels.
inline constexpr std::size_t kDeepestJson = 100;

/// Whether brackets outside of texts are ever open more than `kDeepestJson` deep.
inline bool nested_too_deep(std::string_view text) {
  std::size_t depth = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') quoted = !quoted;
    if (quoted && c == '\\') ++i;
    if (quoted) continue;
    if ((c == '[' || c == '{') && ++depth > kDeepestJson) return true;
    if ((c == ']' || c == '}') && depth > 0) --depth;
  }
  return false;
}

/// Throws one sentence, in which errors call the text `where`.
template <typename Value = Json>
Value parse_json(std::string_view text, const std::string& where) {
  if (nested_too_deep(text)) {
    throw std::runtime_error(where + " is nested more than " + std::to_string(kDeepestJson) + " levels deep");
  }
  try {
    return Value::parse(text);
  } catch (const nlohmann::json::parse_error& error) {
    const auto before = text.substr(0, std::min(error.byte, text.size()));
    throw std::runtime_error(where + " is not valid JSON: there is a mistake in line " +
                             std::to_string(1 + std::ranges::count(before, '\n')));
  } catch (const nlohmann::json::exception&) {
    throw std::runtime_error(where + " is not valid JSON: it has a number too large for any type");
  }
}

/// A discarded value (`is_discarded`) where the text is none.
template <typename Value = Json>
Value parse_json_if_any(std::string_view text) {
  if (nested_too_deep(text)) return Value(Value::value_t::discarded);
  return Value::parse(text, nullptr, /*allow_exceptions=*/false);
}

template <typename Value = Json>
Value read_json_file(const std::filesystem::path& path) {
  return parse_json<Value>(read_text(path), path.string());
}

/// A value as it appears in a message: short, on one line, whatever bytes it has.
inline std::string shown(const Json& value) {
  const auto text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

}  // namespace gka
