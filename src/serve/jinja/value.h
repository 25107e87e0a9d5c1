// The values of a template: Python's, as far as templates see them. Lists, dictionaries and namespaces are shared, not
// copied; only namespaces change.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/fields.h"
#include "serve/jinja/text.h"
#include "serve/sentence.h"

namespace gka::serve::jinja {

/// What went wrong in a template, and in which line of it (0: not known yet; the interpreter fills it in).
struct Error : std::runtime_error {
  Error(const std::string& message, int at) : std::runtime_error(without_zeros(message)), line(at) {}
  explicit Error(const std::string& message) : Error(message, 0) {}
  int line;
};

/// A template's own raise_exception: the request is at fault, not the template.
struct Raised : Error {
  using Error::Error;
};

class Value;
class Interpreter;

struct Undefined {
  std::string name;  // for the error of who uses it
};
struct None {};

struct List {
  std::vector<Value> items;
  bool tuple = false;
};

struct Dict {
  std::vector<std::pair<Value, Value>> items;  // in the order they came
  bool name_space = false;                     // may be changed by {% set ns.x = … %}

  const Value* find(const Value& key) const;
  const Value* named(std::string_view key) const;
  void set(Value key, Value value);
};

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;

  /// The argument at a place or by name, or null.
  const Value* find(std::size_t place, std::string_view name) const;
  const Value& need(std::size_t place, std::string_view name) const;
};

struct Function {
  std::string name;
  std::function<Value(Interpreter&, const Arguments&)> call;
};

class Value {
 public:
  using Variant = std::variant<Undefined, None, bool, std::int64_t, double, std::shared_ptr<const Text>,
                               std::shared_ptr<List>, std::shared_ptr<Dict>, std::shared_ptr<const Function>>;

  Value() : data_(Undefined{}) {}
  Value(None none) : data_(none) {}
  Value(Undefined undefined) : data_(std::move(undefined)) {}
  Value(bool value) : data_(value) {}
  Value(std::int64_t value) : data_(value) {}
  Value(double value) : data_(value) {}
  Value(Text text) : data_(std::make_shared<const Text>(std::move(text))) {}
  Value(std::string text) : Value(Text(std::move(text))) {}
  Value(const char* text) : Value(Text(text)) {}
  Value(List list) : data_(std::make_shared<List>(std::move(list))) {}
  Value(Dict dict) : data_(std::make_shared<Dict>(std::move(dict))) {}
  Value(Function function) : data_(std::make_shared<const Function>(std::move(function))) {}

  static Value list(std::vector<Value> items) { return List{std::move(items), false}; }
  static Value tuple(std::vector<Value> items) { return List{std::move(items), true}; }
  /// Every text in it counts as the request's, or as the template's own.
  static Value from_json(const Json& json, Origin origin);

  template <typename T>
  const T* as() const {
    return std::get_if<T>(&data_);
  }
  bool is_undefined() const { return as<Undefined>() != nullptr; }
  bool is_none() const { return as<None>() != nullptr; }
  bool is_integer() const { return as<std::int64_t>() != nullptr; }
  bool is_number() const { return is_integer() || as<double>() != nullptr; }  // true and false are not
  const Text* text() const;
  List* list() const;
  Dict* dict() const;
  const Function* function() const;

  bool truth() const;
  /// Python's name of its type.
  std::string_view kind() const;

 private:
  Variant data_;
};

bool equal(const Value& a, const Value& b);
/// a < b; throws where Python does.
bool less(const Value& a, const Value& b);
bool contains(const Value& container, const Value& item);

/// str(value), and repr(value).
Text to_text(const Value& value);
Text to_repr(const Value& value);

struct JsonStyle {
  int indent = -1;  // below 0: on one line
  bool sort_keys = false, ascii = false;
  std::string item_separator = ", ", key_separator = ": ";
};
Text to_json(const Value& value, const JsonStyle& style);

/// As a number, booleans included; nothing where it is none.
std::optional<double> number_of(const Value& value);
std::optional<std::int64_t> integer_of(const Value& value);
std::int64_t need_integer(const Value& value, std::string_view what);
const Text& need_text(const Value& value, std::string_view what);

/// What a loop goes through: the items of a list, the keys of a dictionary, the characters of a text.
std::vector<Value> iterate(const Value& value);
/// In characters, items or keys; nothing where Python's len() fails.
std::optional<std::int64_t> length_of(const Value& value);

// Characters of UTF-8 (malformed bytes count one each).
std::size_t count_characters(std::string_view text);
/// The byte at which each character starts, and the text's size at the end.
std::vector<std::size_t> character_starts(std::string_view text);
bool is_python_space(char c);

}  // namespace gka::serve::jinja
