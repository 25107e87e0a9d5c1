// A plain struct as a JSON object. The struct names its keys once, in a function that visits them, and that one list
// reads it, writes it, and knows the nearest key to one that is not there:
//
//   template <typename Self, typename Visit>
//   static void fields(Self& c, Visit&& visit) {
//     visit("width", c.width);
//     visit("solver", c.solver);
//   }
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/nearest.h"
#include "gka/types.h"

namespace gka {

namespace json {

// Each reads one kind of value: false where the JSON is of another kind.
inline bool read(const Json& json, bool& value) {
  if (!json.is_boolean()) return false;
  value = json.get<bool>();
  return true;
}
/// 8e9 is a whole number too.
inline bool read(const Json& json, std::int64_t& value) {
  constexpr double kExact = 9007199254740992.0;  // 2^53
  if (json.is_number_integer()) {
    value = json.get<std::int64_t>();
    return !json.is_number_unsigned() || json.get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX);
  }
  if (!json.is_number_float()) return false;
  const auto number = json.get<double>();
  if (!(number >= -kExact && number <= kExact)) return false;
  value = static_cast<std::int64_t>(number);
  return static_cast<double>(value) == number;
}
inline bool read(const Json& json, double& value) {
  if (!json.is_number()) return false;
  value = json.get<double>();
  return true;
}
inline bool read(const Json& json, std::string& value) {
  if (!json.is_string()) return false;
  value = json.get<std::string>();
  return true;
}
template <typename Enum>
  requires std::is_enum_v<Enum>
bool read(const Json& json, Enum& value) {
  if (!json.is_string()) return false;
  const auto parsed = parse_name<Enum>(json.get<std::string>());
  if (parsed) value = *parsed;
  return parsed.has_value();
}
template <typename T>
bool read(const Json& json, std::vector<T>& values);
template <typename T>
bool read(const Json& json, std::optional<T>& value) {
  if (json.is_null()) {
    value.reset();
    return true;
  }
  return read(json, value.emplace());
}
template <typename T>
bool read(const Json& json, std::vector<T>& values) {
  if (!json.is_array()) return false;
  values.clear();
  return std::ranges::all_of(json, [&](const Json& entry) {
    T value{};
    const bool fine = read(entry, value);
    values.push_back(value);
    return fine;
  });
}

template <typename T>
Json write(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return name_of(value);
  } else {
    return value;
  }
}
template <typename T>
Json write(const std::optional<T>& value) {
  return value ? write(*value) : Json(nullptr);
}

// What a kind of value is called in an error.
inline std::string kind(const bool&) { return "true or false"; }
inline std::string kind(const std::int64_t&) { return "a whole number"; }
inline std::string kind(const double&) { return "a number"; }
inline std::string kind(const std::string&) { return "a text"; }
template <typename Enum>
  requires std::is_enum_v<Enum>
std::string kind(const Enum&) {
  return "one of " + list_names<Enum>();
}
template <typename T>
std::string kind(const std::vector<T>&) {
  return "a list of which each entry is " + kind(T{});
}
template <typename T>
std::string kind(const std::optional<T>&) {
  return kind(T{}) + ", or null";
}

}  // namespace json

/// What to do about a key that nobody visits; `complaint` is a sentence that suggests the nearest one.
using OnUnknown = std::function<void(const std::string& key, const std::string& complaint)>;

/// "the key 'hiden_size' of config.json is unknown; did you mean 'hidden_size'?"
inline std::string unknown_key(std::string_view key, std::string_view where, std::span<const std::string_view> known) {
  std::string text = "the key '" + std::string(key) + "' of " + std::string(where) + " is unknown";
  if (const auto guess = nearest(key, known)) text += "; did you mean '" + std::string(*guess) + "'?";
  return text;
}

namespace json {

/// A value of the wrong kind throws one sentence; null keeps what is there.
template <typename T>
void read_key(const Json& value, std::string_view key, std::string_view where, T& field) {
  if (value.is_null() || read(value, field)) return;
  throw std::runtime_error("'" + std::string(key) + "' of " + std::string(where) + " takes " + kind(field) +
                           ", and is " + shown(value));
}

}  // namespace json

/// `visit_all(visitor)` calls the visitor with every (name, field). Keys that are absent keep what their field has.
/// `where` is what errors call the JSON object.
template <typename VisitAll>
void read_fields(const Json& object, std::string_view where, const OnUnknown& unknown, VisitAll&& visit_all) {
  if (!object.is_object())
    throw std::runtime_error(std::string(where) + " takes a JSON object, and is " + shown(object));
  std::vector<std::string_view> known;
  visit_all([&](std::string_view name, auto& field) {
    known.push_back(name);
    if (const auto found = object.find(name); found != object.end()) json::read_key(*found, name, where, field);
  });
  for (const auto& [key, value] : object.items()) {
    if (std::ranges::find(known, key) == known.end()) unknown(key, unknown_key(key, where, known));
  }
}

template <typename VisitAll>
Json write_fields(VisitAll&& visit_all) {
  Json object = Json::object();
  visit_all([&](std::string_view name, const auto& field) { object[std::string(name)] = json::write(field); });
  return object;
}

}  // namespace gka
