#include "serve/jinja/value.h"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace gka::serve::jinja {
namespace {

constexpr int kDeepest = 100;  // of lists in lists, where they are compared or written

void check_depth(int depth) {
  if (depth > kDeepest) throw Error("a value is nested more than " + std::to_string(kDeepest) + " deep");
}

bool equal_at(const Value& a, const Value& b, int depth);

bool equal_lists(const List& a, const List& b, int depth) {
  return a.tuple == b.tuple && std::ranges::equal(a.items, b.items, [&](const Value& x, const Value& y) {
           return equal_at(x, y, depth + 1);
         });
}

bool equal_dicts(const Dict& a, const Dict& b, int depth) {
  return a.items.size() == b.items.size() && std::ranges::all_of(a.items, [&](const auto& item) {
           const auto* other = b.find(item.first);
           return other != nullptr && equal_at(item.second, *other, depth + 1);
         });
}

bool equal_at(const Value& a, const Value& b, int depth) {
  check_depth(depth);
  const auto x = number_of(a), y = number_of(b);
  if (x && y) return a.is_integer() && b.is_integer() ? *integer_of(a) == *integer_of(b) : *x == *y;
  if (a.text() && b.text()) return a.text()->bytes() == b.text()->bytes();
  if (a.list() && b.list()) return a.list() == b.list() || equal_lists(*a.list(), *b.list(), depth);
  if (a.dict() && b.dict()) return a.dict() == b.dict() || equal_dicts(*a.dict(), *b.dict(), depth);
  if (a.function() && b.function()) return a.function() == b.function();
  return (a.is_none() && b.is_none()) || (a.is_undefined() && b.is_undefined());
}

std::string write_float(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[64];
  const double size = std::abs(value);
  const bool plain = size == 0 || (size >= 1e-4 && size < 1e16);
  const auto format = plain ? std::chars_format::fixed : std::chars_format::scientific;
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value, format).ptr;
  std::string text(buffer, end);
  if (plain && text.find('.') == std::string::npos) text += ".0";
  return text;
}

void append_escape(std::string& out, unsigned code) {
  constexpr const char* kDigits = "0123456789abcdef";
  out += "\\u";
  for (int shift = 12; shift >= 0; shift -= 4) out += kDigits[(code >> shift) & 15];
}

char32_t decode_at(std::string_view text, std::size_t from, std::size_t length) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[from + i]); };
  if (length == 1) return byte(0);
  char32_t code = byte(0) & (0x7FU >> length);
  for (std::size_t i = 1; i < length; ++i) code = (code << 6) | (byte(i) & 0x3FU);
  return code;
}

/// JSON's spelling of one character.
std::string escaped(std::string_view character, bool ascii) {
  static constexpr std::pair<char, const char*> kNamed[] = {{'"', "\\\""}, {'\\', "\\\\"}, {'\n', "\\n"}, {'\r', "\\r"},
                                                            {'\t', "\\t"}, {'\b', "\\b"},  {'\f', "\\f"}};
  for (const auto& [plain, spelled] : kNamed) {
    if (character[0] == plain) return spelled;
  }
  const auto first = static_cast<unsigned char>(character[0]);
  std::string out;
  if (first < 0x20) {
    append_escape(out, first);
  } else if (ascii && first >= 0x80) {
    const auto code = decode_at(character, 0, character.size());
    if (code >= 0x10000) {
      append_escape(out, 0xD800 + ((code - 0x10000) >> 10));
      append_escape(out, 0xDC00 + ((code - 0x10000) & 0x3FF));
    } else {
      append_escape(out, code);
    }
  } else {
    out = character;
  }
  return out;
}

/// Each character keeps the origin it had.
Text json_string(const Text& text, bool ascii) {
  const auto starts = character_starts(text.bytes());
  Text out("\"");
  for (std::size_t i = 0; i + 1 < starts.size(); ++i) {
    const auto origin = text.foreign(starts[i]) ? Origin::request : Origin::ours;
    const auto character = std::string_view(text.bytes()).substr(starts[i], starts[i + 1] - starts[i]);
    out += Text(escaped(character, ascii), origin);
  }
  return out += "\"";
}

class JsonWriter {
 public:
  explicit JsonWriter(const JsonStyle& style) : style_(style) {}

  Text write(const Value& value, int depth = 0) {
    check_depth(depth);
    if (const auto* text = value.text()) return json_string(*text, style_.ascii);
    if (const auto* flag = value.as<bool>()) return *flag ? "true" : "false";
    if (value.is_none()) return "null";
    if (value.is_number()) return number(value);
    if (const auto* list = value.list()) return array(*list, depth);
    if (const auto* dict = value.dict()) return object(*dict, depth);
    throw Error("tojson cannot write a value of type " + std::string(value.kind()));
  }

 private:
  static Text number(const Value& value) {
    const auto* real = value.as<double>();
    if (real && std::isnan(*real)) return "NaN";
    if (real && std::isinf(*real)) return *real > 0 ? "Infinity" : "-Infinity";
    return to_text(value);
  }

  template <typename Items, typename Write>
  Text joined(const Items& items, const char* open, const char* close, int depth, Write&& item) {
    Text out(open);
    bool first = true;
    for (const auto& entry : items) {
      if (!first) out += style_.indent < 0 ? style_.item_separator : trimmed(style_.item_separator);
      first = false;
      break_line(out, depth + 1);
      out += item(entry);
    }
    if (!items.empty()) break_line(out, depth);
    return out += close;
  }

  Text array(const List& list, int depth) {
    return joined(list.items, "[", "]", depth, [&](const Value& item) { return write(item, depth + 1); });
  }

  Text object(const Dict& dict, int depth) {
    auto items = dict.items;
    if (style_.sort_keys) {
      std::ranges::stable_sort(items, [](const auto& a, const auto& b) { return less(a.first, b.first); });
    }
    return joined(items, "{", "}", depth, [&](const auto& item) {
      const Text key = item.first.text() ? *item.first.text() : write(item.first, depth + 1);
      return json_string(key, style_.ascii) + style_.key_separator + write(item.second, depth + 1);
    });
  }

  /// Python leaves out the space after a comma that ends a line.
  static std::string trimmed(const std::string& separator) { return separator == ", " ? "," : separator; }

  void break_line(Text& out, int depth) const {
    if (style_.indent >= 0) out += "\n" + std::string(static_cast<std::size_t>(style_.indent * depth), ' ');
  }

  const JsonStyle& style_;
};

Text repr_of_text(const Text& text) {
  const auto& bytes = text.bytes();
  const bool single = bytes.find('\'') == std::string::npos || bytes.find('"') != std::string::npos;
  const char quote = single ? '\'' : '"';
  Text out(std::string(1, quote));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const char c = bytes[i];
    std::string spelled(1, c);
    if (c == quote || c == '\\') spelled.insert(0, 1, '\\');
    if (c == '\n') spelled = "\\n";
    if (c == '\r') spelled = "\\r";
    if (c == '\t') spelled = "\\t";
    out += Text(spelled, text.foreign(i) ? Origin::request : Origin::ours);
  }
  return out += std::string(1, quote);
}

Text repr_at(const Value& value, int depth);

Text repr_of_list(const List& list, int depth) {
  Text out(list.tuple ? "(" : "[");
  for (std::size_t i = 0; i < list.items.size(); ++i) {
    if (i > 0) out += ", ";
    out += repr_at(list.items[i], depth + 1);
  }
  if (list.tuple && list.items.size() == 1) out += ",";
  return out += list.tuple ? ")" : "]";
}

Text repr_of_dict(const Dict& dict, int depth) {
  Text out("{");
  for (std::size_t i = 0; i < dict.items.size(); ++i) {
    if (i > 0) out += ", ";
    out += repr_at(dict.items[i].first, depth + 1) + ": " + repr_at(dict.items[i].second, depth + 1);
  }
  return out += "}";
}

Text repr_at(const Value& value, int depth) {
  check_depth(depth);
  if (const auto* text = value.text()) return repr_of_text(*text);
  if (const auto* list = value.list()) return repr_of_list(*list, depth);
  if (const auto* dict = value.dict()) return repr_of_dict(*dict, depth);
  if (value.is_undefined()) return "Undefined";
  return to_text(value);
}

}  // namespace

const Value* Dict::find(const Value& key) const {
  const auto found = std::ranges::find_if(items, [&](const auto& item) { return equal(item.first, key); });
  return found == items.end() ? nullptr : &found->second;
}

const Value* Dict::named(std::string_view key) const {
  const auto found = std::ranges::find_if(
      items, [&](const auto& item) { return item.first.text() != nullptr && item.first.text()->bytes() == key; });
  return found == items.end() ? nullptr : &found->second;
}

void Dict::set(Value key, Value value) {
  const auto found = std::ranges::find_if(items, [&](const auto& item) { return equal(item.first, key); });
  if (found != items.end()) {
    found->second = std::move(value);
  } else {
    items.emplace_back(std::move(key), std::move(value));
  }
}

const Value* Arguments::find(std::size_t place, std::string_view name) const {
  if (place < positional.size()) return &positional[place];
  const auto found = std::ranges::find_if(named, [&](const auto& entry) { return entry.first == name; });
  return found == named.end() ? nullptr : &found->second;
}

const Value& Arguments::need(std::size_t place, std::string_view name) const {
  if (const auto* value = find(place, name)) return *value;
  throw Error("the argument '" + std::string(name) + "' is missing");
}

Value Value::from_json(const Json& json, Origin origin) {
  switch (json.type()) {
    case Json::value_t::boolean: return json.get<bool>();
    case Json::value_t::number_integer: return json.get<std::int64_t>();
    case Json::value_t::number_unsigned:
      return json.get<std::uint64_t>() <= static_cast<std::uint64_t>(INT64_MAX) ? Value(json.get<std::int64_t>())
                                                                                : Value(json.get<double>());
    case Json::value_t::number_float: return json.get<double>();
    case Json::value_t::string: return Text(json.get<std::string>(), origin);
    case Json::value_t::array: {
      List list;
      for (const auto& item : json) list.items.push_back(from_json(item, origin));
      return list;
    }
    case Json::value_t::object: {
      Dict dict;
      for (const auto& [key, item] : json.items()) dict.items.emplace_back(Text(key, origin), from_json(item, origin));
      return dict;
    }
    default: return None{};
  }
}

const Text* Value::text() const {
  const auto* held = as<std::shared_ptr<const Text>>();
  return held ? held->get() : nullptr;
}
List* Value::list() const {
  const auto* held = as<std::shared_ptr<List>>();
  return held ? held->get() : nullptr;
}
Dict* Value::dict() const {
  const auto* held = as<std::shared_ptr<Dict>>();
  return held ? held->get() : nullptr;
}
const Function* Value::function() const {
  const auto* held = as<std::shared_ptr<const Function>>();
  return held ? held->get() : nullptr;
}

bool Value::truth() const {
  if (const auto number = number_of(*this)) return *number != 0;
  if (text()) return !text()->empty();
  if (list()) return !list()->items.empty();
  if (dict()) return dict()->name_space || !dict()->items.empty();
  return function() != nullptr;
}

std::string_view Value::kind() const {
  static constexpr std::string_view kNames[] = {"undefined", "None", "bool", "int",     "float",
                                                "str",       "list", "dict", "function"};
  if (list() && list()->tuple) return "tuple";
  if (dict() && dict()->name_space) return "namespace";
  return kNames[data_.index()];
}

bool equal(const Value& a, const Value& b) { return equal_at(a, b, 0); }

bool less(const Value& a, const Value& b) {
  const auto x = number_of(a), y = number_of(b);
  if (x && y) return a.is_integer() && b.is_integer() ? *integer_of(a) < *integer_of(b) : *x < *y;
  if (a.text() && b.text()) return a.text()->bytes() < b.text()->bytes();
  if (a.list() && b.list()) {
    return std::ranges::lexicographical_compare(a.list()->items, b.list()->items, less);
  }
  throw Error("'<' is not defined between " + std::string(a.kind()) + " and " + std::string(b.kind()));
}

bool contains(const Value& container, const Value& item) {
  if (const auto* text = container.text()) {
    return text->bytes().find(need_text(item, "the left side of 'in'").bytes()) != std::string::npos;
  }
  if (const auto* list = container.list()) {
    return std::ranges::any_of(list->items, [&](const Value& entry) { return equal(entry, item); });
  }
  if (const auto* dict = container.dict()) return dict->find(item) != nullptr;
  if (container.is_undefined()) return false;
  throw Error("'in' cannot look into a value of type " + std::string(container.kind()));
}

Text to_text(const Value& value) {
  if (const auto* text = value.text()) return *text;
  if (value.is_undefined()) return {};
  if (value.is_none()) return "None";
  if (const auto* flag = value.as<bool>()) return *flag ? "True" : "False";
  if (const auto* whole = value.as<std::int64_t>()) return std::to_string(*whole);
  if (const auto* real = value.as<double>()) return write_float(*real);
  if (const auto* function = value.function()) return "<function " + function->name + ">";
  return to_repr(value);
}

Text to_repr(const Value& value) { return repr_at(value, 0); }
Text to_json(const Value& value, const JsonStyle& style) { return JsonWriter(style).write(value); }

std::optional<double> number_of(const Value& value) {
  if (const auto* real = value.as<double>()) return *real;
  if (const auto whole = integer_of(value)) return static_cast<double>(*whole);
  return std::nullopt;
}

std::optional<std::int64_t> integer_of(const Value& value) {
  if (const auto* flag = value.as<bool>()) return *flag ? 1 : 0;
  if (const auto* whole = value.as<std::int64_t>()) return *whole;
  return std::nullopt;
}

std::int64_t need_integer(const Value& value, std::string_view what) {
  if (const auto whole = integer_of(value)) return *whole;
  throw Error(std::string(what) + " takes a whole number, and got a value of type " + std::string(value.kind()));
}

const Text& need_text(const Value& value, std::string_view what) {
  if (const auto* text = value.text()) return *text;
  throw Error(std::string(what) + " takes a text, and got a value of type " + std::string(value.kind()) +
              (value.is_undefined() ? " ('" + value.as<Undefined>()->name + "')" : ""));
}

std::vector<Value> iterate(const Value& value) {
  if (const auto* list = value.list()) return list->items;
  if (value.is_undefined()) return {};
  std::vector<Value> items;
  if (const auto* dict = value.dict()) {
    for (const auto& item : dict->items) items.push_back(item.first);
    return items;
  }
  if (const auto* text = value.text()) {
    const auto starts = character_starts(text->bytes());
    for (std::size_t i = 0; i + 1 < starts.size(); ++i) {
      items.emplace_back(text->cut(starts[i], starts[i + 1] - starts[i]));
    }
    return items;
  }
  throw Error("a value of type " + std::string(value.kind()) + " cannot be iterated over");
}

std::optional<std::int64_t> length_of(const Value& value) {
  if (value.text()) return static_cast<std::int64_t>(count_characters(value.text()->bytes()));
  if (value.list()) return static_cast<std::int64_t>(value.list()->items.size());
  if (value.dict()) return static_cast<std::int64_t>(value.dict()->items.size());
  if (value.is_undefined()) return 0;
  return std::nullopt;
}

std::vector<std::size_t> character_starts(std::string_view text) {
  std::vector<std::size_t> starts;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xC0U) != 0x80U) starts.push_back(i);
  }
  if (!text.empty() && (starts.empty() || starts[0] != 0)) starts.insert(starts.begin(), 0);
  starts.push_back(text.size());
  return starts;
}

std::size_t count_characters(std::string_view text) { return character_starts(text).size() - 1; }

bool is_python_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r') || (c >= 0x1c && c <= 0x1f); }

}  // namespace gka::serve::jinja
