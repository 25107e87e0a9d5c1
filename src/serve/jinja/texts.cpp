#include <wctype.h>

#include <algorithm>
#include <clocale>
#include <cmath>
#include <cstdio>

#include "serve/jinja/builtins.h"

namespace gka::serve::jinja {
namespace {

locale_t unicode() {
  static const locale_t kLocale = ::newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr);
  return kLocale;
}

wint_t decode(std::string_view character) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(character[i]); };
  if (character.size() == 1) return byte(0);
  wint_t code = byte(0) & (0x7FU >> character.size());
  for (std::size_t i = 1; i < character.size(); ++i) code = (code << 6) | (byte(i) & 0x3FU);
  return code;
}

std::string encode(wint_t code) {
  std::string text;
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  static constexpr unsigned kFirst[] = {0, 0xC0, 0xE0, 0xF0};
  text += static_cast<char>(kFirst[more] | (code >> (6 * more)));
  for (int i = more - 1; i >= 0; --i) text += static_cast<char>(0x80 | ((code >> (6 * i)) & 0x3F));
  return text;
}

/// Each character through `map(character, previous byte or 0)`.
template <typename Map>
Text mapped(const Text& text, Map&& map) {
  const auto starts = character_starts(text.bytes());
  Text out;
  for (std::size_t i = 0; i + 1 < starts.size(); ++i) {
    const auto character = std::string_view(text.bytes()).substr(starts[i], starts[i + 1] - starts[i]);
    const char before = i == 0 ? '\0' : text.bytes()[starts[i] - 1];
    out += Text(map(character, before), text.foreign(starts[i]) ? Origin::request : Origin::ours);
  }
  return out;
}

std::string large(std::string_view c) {
  return c.size() > 4 ? std::string(c) : encode(::towupper_l(decode(c), unicode()));
}
std::string small(std::string_view c) {
  return c.size() > 4 ? std::string(c) : encode(::towlower_l(decode(c), unicode()));
}

}  // namespace

Text upper(const Text& text) {
  return mapped(text, [](std::string_view c, char) { return large(c); });
}
Text lower(const Text& text) {
  return mapped(text, [](std::string_view c, char) { return small(c); });
}
Text capitalized(const Text& text) {
  bool first = true;
  return mapped(text, [&](std::string_view c, char) { return std::exchange(first, false) ? large(c) : small(c); });
}
Text titled(const Text& text, const std::function<bool(char)>& starts) {
  return mapped(text, [&](std::string_view c, char before) { return starts(before) ? large(c) : small(c); });
}

Text stripped(const Text& text, const Value* characters, Side side) {
  const auto& bytes = text.bytes();
  const bool given = characters != nullptr && !characters->is_none();
  const std::string set = given ? need_text(*characters, "strip").bytes() : "";
  const auto starts = character_starts(bytes);
  const auto goes = [&](std::size_t i) {
    const auto character = std::string_view(bytes).substr(starts[i], starts[i + 1] - starts[i]);
    if (given) return set.find(character) != std::string::npos;
    return character.size() == 1
               ? is_python_space(character[0])
               : ::iswspace_l(decode(character), unicode()) != 0 || character == "\u00a0" || character == "\u202f";
  };
  std::size_t first = 0, last = starts.size() - 1;
  if ((static_cast<int>(side) & 1) != 0) {
    while (first < last && goes(first)) ++first;
  }
  if ((static_cast<int>(side) & 2) != 0) {
    while (last > first && goes(last - 1)) --last;
  }
  return text.cut(starts[first], starts[last] - starts[first]);
}

Text replaced(Interpreter& run, const Text& text, const Text& from, const Text& to, std::int64_t times) {
  const auto& bytes = text.bytes();
  Text out;
  std::size_t done = 0;
  if (from.empty()) {
    const auto starts = character_starts(bytes);
    for (const auto at : starts) {
      if (times-- == 0) break;
      out += text.cut(done, at - done) + to;
      done = at;
      run.charge(out.size());
    }
    return out += text.cut(done);
  }
  for (auto at = bytes.find(from.bytes()); at != std::string::npos && times-- != 0;
       at = bytes.find(from.bytes(), done)) {
    out += text.cut(done, at - done);
    out += to;
    done = at + from.size();
    run.charge(0);
    if (out.size() > run.limits().bytes) run.charge(out.size());
  }
  return out += text.cut(done);
}

namespace {

/// Words between white space.
std::vector<Value> split_words(const Text& text, std::int64_t times, bool from_right) {
  const auto& bytes = text.bytes();
  std::vector<std::pair<std::size_t, std::size_t>> words;
  for (std::size_t i = 0; i < bytes.size();) {
    while (i < bytes.size() && is_python_space(bytes[i])) ++i;
    const auto start = i;
    while (i < bytes.size() && !is_python_space(bytes[i])) ++i;
    if (i > start) words.emplace_back(start, i);
  }
  const auto keep = times < 0 ? words.size() : static_cast<std::size_t>(times) + 1;
  while (words.size() > keep) {  // what is over stays one piece, white space inside it included
    if (from_right) {
      words[1].first = words[0].first;
      words.erase(words.begin());
    } else {
      words[words.size() - 2].second = words.back().second;
      words.pop_back();
    }
  }
  if (!from_right && times >= 0 && words.size() == keep && !words.empty()) {
    words.back().second = bytes.size();
  }
  if (from_right && times >= 0 && words.size() == keep && !words.empty()) words.front().first = 0;
  std::vector<Value> pieces;
  for (const auto& [first, last] : words) pieces.emplace_back(text.cut(first, last - first));
  return pieces;
}

}  // namespace

std::vector<Value> split(const Text& text, const Value* separator, std::int64_t times, bool from_right) {
  if (separator == nullptr || separator->is_none()) return split_words(text, times, from_right);
  const auto& between = need_text(*separator, "split").bytes();
  if (between.empty()) throw Error("split takes a separator that is not empty");
  std::vector<std::size_t> places;
  const auto& bytes = text.bytes();
  if (from_right) {
    for (auto end = bytes.size(); end >= between.size() && times-- != 0;) {
      const auto at = bytes.rfind(between, end - between.size());
      if (at == std::string::npos) break;
      places.insert(places.begin(), at);
      end = at;
    }
  } else {
    for (auto at = bytes.find(between); at != std::string::npos && times-- != 0;
         at = bytes.find(between, at + between.size())) {
      places.push_back(at);
    }
  }
  std::vector<Value> pieces;
  std::size_t done = 0;
  for (const auto at : places) {
    pieces.emplace_back(text.cut(done, at - done));
    done = at + between.size();
  }
  pieces.emplace_back(text.cut(done));
  return pieces;
}

std::vector<Value> lines_of(const Text& text, bool keep_ends) {
  const auto& bytes = text.bytes();
  std::vector<Value> lines;
  for (std::size_t start = 0; start < bytes.size();) {
    const auto end = std::min(bytes.find_first_of("\n\r\v\f\x1c\x1d\x1e", start), bytes.size());
    auto next = std::min(end + 1, bytes.size());
    if (end + 1 < bytes.size() && bytes[end] == '\r' && bytes[end + 1] == '\n') ++next;
    lines.emplace_back(text.cut(start, (keep_ends ? next : end) - start));
    start = next;
  }
  return lines;
}

Text joined(Interpreter& run, const std::vector<Value>& items, const Text& between) {
  Text out;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out += between;
    const auto piece = to_text(items[i]);
    run.charge(piece.size() + between.size());
    out += piece;
    if (out.size() > run.limits().bytes) run.charge(out.size());
  }
  return out;
}

namespace {

std::string fixed(double number, int digits) {
  char buffer[400];
  std::snprintf(buffer, sizeof(buffer), "%.*f", std::clamp(digits, 0, 40), number);
  return buffer;
}

}  // namespace

Text percent_format(const Text& format, const Arguments& values) {
  const auto& bytes = format.bytes();
  Text out;
  std::size_t next = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != '%') {
      out += format.cut(i, 1);
      continue;
    }
    int digits = 6;
    if (++i < bytes.size() && bytes[i] == '.') {
      digits = 0;
      while (++i < bytes.size() && bytes[i] >= '0' && bytes[i] <= '9')
        digits = std::min(digits * 10 + (bytes[i] - '0'), 40);
    }
    const char kind = i < bytes.size() ? bytes[i] : '\0';
    if (kind == '%') {
      out += "%";
      continue;
    }
    if (next >= values.positional.size()) throw Error("a format has more places than values");
    const auto& value = values.positional[next++];
    const auto number = number_of(value);
    if (kind == 's') {
      out += to_text(value);
    } else if (kind == 'r') {
      out += to_repr(value);
    } else if (kind == 'd' && number) {
      out += std::to_string(static_cast<std::int64_t>(std::clamp(*number, -9e18, 9e18)));
    } else if (kind == 'f' && number) {
      out += fixed(*number, digits);
    } else {
      throw Error("the format %" + std::string(1, kind) + " of a value of type " + std::string(value.kind()) +
                  " is not known");
    }
  }
  return out;
}

Text brace_format(const Text& format, const Arguments& values) {
  const auto& bytes = format.bytes();
  Text out;
  std::size_t next = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    const bool twice = i + 1 < bytes.size() && bytes[i + 1] == bytes[i];
    if (bytes[i] != '{' || twice) {
      out += format.cut(i, 1);
      if (twice && (bytes[i] == '{' || bytes[i] == '}')) ++i;
      continue;
    }
    const auto close = bytes.find('}', i);
    if (close == std::string::npos) throw Error("a format's '{' is not closed");
    const auto field = bytes.substr(i + 1, close - i - 1);
    const bool number = std::ranges::all_of(field, [](char c) { return c >= '0' && c <= '9'; });
    const Value* value = nullptr;
    if (number && field.size() < 6) {
      const auto place = field.empty() ? next++ : static_cast<std::size_t>(std::stoi(field));
      value = place < values.positional.size() ? &values.positional[place] : nullptr;
    } else {
      value = values.find(SIZE_MAX, field);
    }
    if (value == nullptr) throw Error("a format's field '{" + field + "}' has no value");
    out += to_text(*value);
    i = close;
  }
  return out;
}

std::int64_t integer_or(const Arguments& arguments, std::size_t place, std::string_view name, std::int64_t otherwise) {
  const auto* value = arguments.find(place, name);
  return value == nullptr || value->is_none() ? otherwise : need_integer(*value, name);
}

bool flag_or(const Arguments& arguments, std::size_t place, std::string_view name, bool otherwise) {
  const auto* value = arguments.find(place, name);
  return value == nullptr ? otherwise : value->truth();
}

}  // namespace gka::serve::jinja
