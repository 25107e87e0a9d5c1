// JSON that people write: a key that an object has twice is a mistake, of which the parser by itself would take the
// last in silence.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.h"
#include "base/json.h"

namespace gka {

/// The first key that an object in `text` has twice. The text is valid JSON.
inline std::optional<std::string> repeated_key(std::string_view text) {
  using Event = Json::parse_event_t;
  std::vector<std::set<std::string>> open;
  std::optional<std::string> first;
  const auto look = [&](int /*depth*/, Event event, Json& parsed) {
    if (event == Event::object_start) open.emplace_back();
    if (event == Event::object_end) open.pop_back();
    if (event == Event::key && !first && !open.back().insert(parsed.get<std::string>()).second) {
      first = parsed.get<std::string>();
    }
    return event != Event::value;  // nothing needs to be kept
  };
  [[maybe_unused]] const auto shell = Json::parse(text, look);
  return first;
}

/// Throws one sentence with the place of a mistake.
inline Json read_json_with_unique_keys(const std::filesystem::path& path) {
  const auto text = read_text(path);
  auto json = parse_json(text, path.string());
  if (const auto key = repeated_key(text)) {
    throw std::runtime_error(path.string() + " has the key '" + *key + "' twice in one object; remove one of them");
  }
  return json;
}

}  // namespace gka
