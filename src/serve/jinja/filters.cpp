// Filters and tests: what stands behind | and after `is`.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "serve/jinja/builtins.h"

namespace gka::serve::jinja {
namespace {

using Run = Interpreter;
using Args = Arguments;

Args rest_of(const Args& arguments, std::size_t from) {
  Args rest;
  if (arguments.positional.size() > from) {
    rest.positional.assign(arguments.positional.begin() + static_cast<std::ptrdiff_t>(from),
                           arguments.positional.end());
  }
  return rest;
}

std::string name_at(const Args& arguments, std::size_t place, std::string_view what) {
  return need_text(arguments.need(place, what), what).bytes();
}

/// item.a.b, or item.0; nothing where a step is missing.
Value attribute_path(Run& run, Value item, const Value& path) {
  if (integer_of(path)) return run.item(item, path);
  for (const auto& part : split(need_text(path, "attribute"), nullptr, -1, false)) {
    for (const auto& step : split(*part.text(), std::make_unique<Value>(".").get(), -1, false)) {
      if (item.is_undefined()) return item;
      const auto& name = step.text()->bytes();
      const bool number = !name.empty() && std::ranges::all_of(name, [](char c) { return c >= '0' && c <= '9'; });
      item = number && name.size() < 10 ? run.item(item, static_cast<std::int64_t>(std::stoll(name)))
                                        : run.item(item, step);
    }
  }
  return item;
}

/// What sort, min, unique and groupby compare: the attribute, in small letters unless told otherwise.
Value sort_key(Run& run, const Value& item, const Value* attribute, bool case_sensitive) {
  auto key = attribute && !attribute->is_none() ? attribute_path(run, item, *attribute) : item;
  return key.text() && !case_sensitive ? Value(lower(*key.text())) : key;
}

Value sorted(Run& run, const Value& subject, const Args& a) {
  const bool reverse = flag_or(a, 0, "reverse", false), exact = flag_or(a, 1, "case_sensitive", false);
  const auto* attribute = a.find(2, "attribute");
  std::vector<std::pair<Value, Value>> keyed;
  for (auto& item : iterate(subject)) keyed.emplace_back(sort_key(run, item, attribute, exact), item);
  std::ranges::stable_sort(
      keyed, [&](const auto& x, const auto& y) { return reverse ? less(y.first, x.first) : less(x.first, y.first); });
  List list;
  for (auto& [key, item] : keyed) list.items.push_back(std::move(item));
  return list;
}

Value dict_sorted(Run& run, const Value& subject, const Args& a) {
  const bool exact = flag_or(a, 0, "case_sensitive", false), reverse = flag_or(a, 2, "reverse", false);
  const auto* by = a.find(1, "by");
  const Value place = static_cast<std::int64_t>(by && by->text() && by->text()->bytes() == "value" ? 1 : 0);
  const auto items = run.call(run.attribute(subject, "items"), {});
  return sorted(run, items, {.positional = {reverse, exact, place}, .named = {}});
}

Value extreme(Run& run, const Value& subject, const Args& a, bool largest) {
  const bool exact = flag_or(a, 0, "case_sensitive", false);
  const auto* attribute = a.find(1, "attribute");
  const auto items = iterate(subject);
  if (items.empty()) return Undefined{"the extreme of an empty list"};
  return *std::ranges::min_element(items, [&](const Value& x, const Value& y) {
    const auto kx = sort_key(run, x, attribute, exact), ky = sort_key(run, y, attribute, exact);
    return largest ? less(ky, kx) : less(kx, ky);
  });
}

Value unique(Run& run, const Value& subject, const Args& a) {
  const bool exact = flag_or(a, 0, "case_sensitive", false);
  const auto* attribute = a.find(1, "attribute");
  List list;
  std::vector<Value> seen;
  for (auto& item : iterate(subject)) {
    auto key = sort_key(run, item, attribute, exact);
    run.charge(seen.size() * 16);
    if (std::ranges::any_of(seen, [&](const Value& other) { return equal(other, key); })) continue;
    seen.push_back(std::move(key));
    list.items.push_back(std::move(item));
  }
  return list;
}

Value group_by(Run& run, const Value& subject, const Args& a) {
  const auto attribute = a.need(0, "attribute");
  const auto items = sorted(run, subject, {.positional = {false, false, attribute}, .named = {}});
  List groups;
  std::optional<Value> last;
  for (const auto& item : items.list()->items) {
    const auto key = sort_key(run, item, &attribute, false);
    if (!last || !equal(*last, key)) {
      groups.items.push_back(Value::tuple({attribute_path(run, item, attribute), Value::list({})}));
      last = key;
    }
    groups.items.back().list()->items[1].list()->items.push_back(item);
  }
  return groups;
}

Value map_items(Run& run, const Value& subject, const Args& a) {
  List list;
  const auto* attribute = a.positional.empty() ? a.find(SIZE_MAX, "attribute") : nullptr;
  const auto* otherwise = a.find(SIZE_MAX, "default");
  const auto filter = attribute ? std::string() : name_at(a, 0, "filter");
  auto rest = rest_of(a, 1);
  if (!attribute) rest.named = a.named;
  for (const auto& item : iterate(subject)) {
    auto value = attribute ? attribute_path(run, item, *attribute) : run.filter(filter, item, rest);
    if (attribute && value.is_undefined() && otherwise) value = *otherwise;
    list.items.push_back(std::move(value));
  }
  return list;
}

/// select, reject, selectattr, rejectattr.
Value choose(Run& run, const Value& subject, const Args& a, bool by_attribute, bool keep) {
  const std::size_t place = by_attribute ? 1 : 0;
  const bool tested = a.positional.size() > place;
  const auto rest = rest_of(a, place + 1);
  List list;
  for (const auto& item : iterate(subject)) {
    const auto value = by_attribute ? attribute_path(run, item, a.need(0, "attribute")) : item;
    const bool holds = tested ? run.test(name_at(a, place, "test"), value, rest) : value.truth();
    if (holds == keep) list.items.push_back(item);
  }
  return list;
}

Value join(Run& run, const Value& subject, const Args& a) {
  auto items = iterate(subject);
  if (const auto* attribute = a.find(1, "attribute"); attribute && !attribute->is_none()) {
    for (auto& item : items) item = attribute_path(run, item, *attribute);
  }
  const auto* between = a.find(0, "d");
  return joined(run, items, between ? to_text(*between) : Text());
}

Value default_to(Run&, const Value& subject, const Args& a) {
  const bool replace = subject.is_undefined() || (flag_or(a, 1, "boolean", false) && !subject.truth());
  if (!replace) return subject;
  const auto* otherwise = a.find(0, "default_value");
  return otherwise ? *otherwise : Value("");
}

Value indent(Run& run, const Value& subject, const Args& a) {
  const auto* width = a.find(0, "width");
  const bool first = flag_or(a, 1, "first", false), blank = flag_or(a, 2, "blank", false);
  Text space("    ");
  if (width && width->text()) {
    space = *width->text();
  } else if (width) {
    space =
        std::string(static_cast<std::size_t>(std::clamp<std::int64_t>(need_integer(*width, "width"), 0, 1000)), ' ');
  }
  const auto lines = lines_of(to_text(subject) + "\n", false);
  Text out;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out += "\n";
    const auto& line = *lines[i].text();
    if (i == 0 ? first : blank || !line.empty()) out += space;
    out += line;
    run.charge(space.size());
  }
  return out;
}

Value round_number(Run&, const Value& subject, const Args& a) {
  const auto number = number_of(subject);
  if (!number) throw Error("round takes a number, and got a value of type " + std::string(subject.kind()));
  const auto digits = std::clamp<std::int64_t>(integer_or(a, 0, "precision", 0), -300, 300);
  const auto* method = a.find(1, "method");
  const auto how = method ? to_text(*method).bytes() : "common";
  const double scale = std::pow(10.0, static_cast<double>(digits));
  if (how == "ceil") return std::ceil(*number * scale) / scale;
  if (how == "floor") return std::floor(*number * scale) / scale;
  return std::nearbyint(*number * scale) / scale;
}

Value to_integer(Run&, const Value& subject, const Args& a) {
  const auto* given = a.find(0, "default");
  const Value otherwise = given ? *given : Value(std::int64_t{0});
  if (const auto whole = integer_of(subject)) return *whole;
  if (const auto* real = subject.as<double>()) {
    return std::abs(*real) < 9e18 ? Value(static_cast<std::int64_t>(*real)) : otherwise;
  }
  if (!subject.text()) return otherwise;
  const auto trimmed = stripped(*subject.text(), nullptr, Side::both).bytes();
  const auto text = trimmed.starts_with('+') ? trimmed.substr(1) : trimmed;
  std::int64_t whole = 0;
  const auto* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, whole,
                                      static_cast<int>(std::clamp<std::int64_t>(integer_or(a, 1, "base", 10), 2, 36)));
  if (result.ec == std::errc() && result.ptr == end) return whole;
  double real = 0;
  const auto parsed = std::from_chars(text.data(), end, real);
  const bool fits = parsed.ec == std::errc() && parsed.ptr == end && std::abs(real) < 9e18;
  return fits ? Value(static_cast<std::int64_t>(real)) : otherwise;
}

Value to_float(Run&, const Value& subject, const Args& a) {
  if (const auto number = number_of(subject)) return *number;
  const auto* otherwise = a.find(0, "default");
  if (subject.text()) {
    const auto text = stripped(*subject.text(), nullptr, Side::both).bytes();
    double real = 0;
    const auto* end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data(), end, real);
    if (parsed.ec == std::errc() && parsed.ptr == end) return real;
  }
  return otherwise ? *otherwise : Value(0.0);
}

Value write_json(Run& run, const Value& subject, const Args& a) {
  JsonStyle style;
  if (const auto* separators = a.find(SIZE_MAX, "separators"); separators && separators->list()) {
    const auto& pair = separators->list()->items;
    if (pair.size() != 2) throw Error("separators takes two texts");
    style.item_separator = need_text(pair[0], "separators").bytes();
    style.key_separator = need_text(pair[1], "separators").bytes();
  }
  const auto* indent = a.find(SIZE_MAX, "indent");
  if (indent == nullptr && a.positional.size() > 1) indent = &a.positional[1];
  if (indent && !indent->is_none())
    style.indent = static_cast<int>(std::clamp<std::int64_t>(need_integer(*indent, "indent"), 0, 100));
  style.sort_keys = flag_or(a, SIZE_MAX, "sort_keys", false);
  style.ascii = flag_or(a, 0, "ensure_ascii", false);
  auto text = to_json(subject, style);
  run.charge(text.size());
  return text;
}

Value truncate(Run&, const Value& subject, const Args& a) {
  const auto text = to_text(subject);
  const auto length = integer_or(a, 0, "length", 255), leeway = integer_or(a, 3, "leeway", 5);
  const auto* given = a.find(2, "end");
  const auto end = given ? to_text(*given) : Text("...");
  if (static_cast<std::int64_t>(count_characters(text.bytes())) <= length + leeway) return text;
  const auto keep = length - static_cast<std::int64_t>(count_characters(end.bytes()));
  if (keep < 0) throw Error("truncate takes a length of at least its end's");
  auto cut = *slice_of(text, 0, keep, 1).text();
  if (!flag_or(a, 1, "killwords", false)) {
    const auto space = cut.bytes().rfind(' ');
    if (space != std::string::npos) cut = cut.cut(0, space);
  }
  return cut + end;
}

Value batch(Run& run, const Value& subject, const Args& a) {
  const auto count = need_integer(a.need(0, "linecount"), "batch");
  if (count < 1) throw Error("batch takes a number above 0");
  const auto* fill = a.find(1, "fill_with");
  List rows;
  for (auto& item : iterate(subject)) {
    if (rows.items.empty() || static_cast<std::int64_t>(rows.items.back().list()->items.size()) == count) {
      rows.items.push_back(Value::list({}));
    }
    rows.items.back().list()->items.push_back(std::move(item));
  }
  if (fill && !fill->is_none() && !rows.items.empty()) {
    run.charge(static_cast<std::size_t>(count) * 64);
    rows.items.back().list()->items.resize(static_cast<std::size_t>(count), *fill);
  }
  return rows;
}

Value sum(Run& run, const Value& subject, const Args& a) {
  const auto* attribute = a.find(0, "attribute");
  const auto* start = a.find(1, "start");
  Value total = start ? *start : Value(std::int64_t{0});
  for (const auto& item : iterate(subject)) {
    total =
        arithmetic(run, "+", total, attribute && !attribute->is_none() ? attribute_path(run, item, *attribute) : item);
  }
  return total;
}

Value escape_html(Run&, const Value& subject, const Args&) {
  static constexpr std::pair<char, const char*> kEscapes[] = {
      {'&', "&amp;"}, {'<', "&lt;"}, {'>', "&gt;"}, {'"', "&#34;"}, {'\'', "&#39;"}};
  const auto text = to_text(subject);
  Text out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto* found =
        std::ranges::find_if(kEscapes, [&](const auto& entry) { return entry.first == text.bytes()[i]; });
    out += found == std::end(kEscapes) ? text.cut(i, 1) : Text(found->second);
  }
  return out;
}

Value reversed(Run&, const Value& subject, const Args&) {
  if (subject.text()) return slice_of(subject, std::nullopt, std::nullopt, -1);
  auto items = iterate(subject);
  std::ranges::reverse(items);
  return Value::list(std::move(items));
}

Value length(Run&, const Value& subject, const Args&) {
  if (const auto count = length_of(subject)) return *count;
  throw Error("a value of type " + std::string(subject.kind()) + " has no length");
}

Value absolute(Run&, const Value& subject, const Args&) {
  if (const auto* real = subject.as<double>()) return std::abs(*real);
  const auto whole = need_integer(subject, "abs");
  if (whole == INT64_MIN) throw Error("a number is too large");
  return std::abs(whole);
}

Value end_of(const Value& subject, bool last) {
  const auto items = iterate(subject);
  if (items.empty()) return Undefined{last ? "the last item of an empty list" : "the first item of an empty list"};
  return last ? items.back() : items.front();
}

Value centered(Run&, const Value& subject, const Args& a) {
  const auto text = to_text(subject);
  const auto missing = std::min<std::int64_t>(integer_or(a, 0, "width", 80), 10000) -
                       static_cast<std::int64_t>(count_characters(text.bytes()));
  if (missing <= 0) return text;
  const auto width = missing + static_cast<std::int64_t>(count_characters(text.bytes()));
  const auto left = missing / 2 + (missing & width & 1);
  return Text(std::string(static_cast<std::size_t>(left), ' ')) + text +
         Text(std::string(static_cast<std::size_t>(missing - left), ' '));
}

bool title_starts(char before) {
  return before == '\0' || is_python_space(before) || std::string_view("-({[<").find(before) != std::string_view::npos;
}

struct NamedFilter {
  std::string_view name;
  Filter call;
};
constexpr NamedFilter kFilters[] = {
    {"abs", absolute},
    {"attr", [](Run& run, const Value& s, const Args& a) { return run.attribute(s, name_at(a, 0, "name")); }},
    {"batch", batch},
    {"capitalize", [](Run&, const Value& s, const Args&) -> Value { return capitalized(to_text(s)); }},
    {"center", centered},
    {"count", length},
    {"d", default_to},
    {"default", default_to},
    {"dictsort", dict_sorted},
    {"e", escape_html},
    {"escape", escape_html},
    {"first", [](Run&, const Value& s, const Args&) { return end_of(s, false); }},
    {"float", to_float},
    {"format", [](Run&, const Value& s, const Args& a) -> Value { return percent_format(to_text(s), a); }},
    {"groupby", group_by},
    {"indent", indent},
    {"int", to_integer},
    {"items", [](Run& run, const Value& s,
                 const Args&) { return s.is_undefined() ? Value::list({}) : run.call(run.attribute(s, "items"), {}); }},
    {"join", join},
    {"last", [](Run&, const Value& s, const Args&) { return end_of(s, true); }},
    {"length", length},
    {"list", [](Run&, const Value& s, const Args&) { return Value::list(iterate(s)); }},
    {"lower", [](Run&, const Value& s, const Args&) -> Value { return lower(to_text(s)); }},
    {"map", map_items},
    {"max", [](Run& run, const Value& s, const Args& a) { return extreme(run, s, a, true); }},
    {"min", [](Run& run, const Value& s, const Args& a) { return extreme(run, s, a, false); }},
    {"reject", [](Run& run, const Value& s, const Args& a) { return choose(run, s, a, false, false); }},
    {"rejectattr", [](Run& run, const Value& s, const Args& a) { return choose(run, s, a, true, false); }},
    {"replace",
     [](Run& run, const Value& s, const Args& a) -> Value {
       return replaced(run, to_text(s), to_text(a.need(0, "old")), to_text(a.need(1, "new")),
                       integer_or(a, 2, "count", -1));
     }},
    {"reverse", reversed},
    {"round", round_number},
    {"safe", [](Run&, const Value& s, const Args&) -> Value { return to_text(s); }},
    {"select", [](Run& run, const Value& s, const Args& a) { return choose(run, s, a, false, true); }},
    {"selectattr", [](Run& run, const Value& s, const Args& a) { return choose(run, s, a, true, true); }},
    {"sort", sorted},
    {"string", [](Run&, const Value& s, const Args&) -> Value { return to_text(s); }},
    {"sum", sum},
    {"title", [](Run&, const Value& s, const Args&) -> Value { return titled(to_text(s), title_starts); }},
    {"tojson", write_json},
    {"trim",
     [](Run&, const Value& s, const Args& a) -> Value { return stripped(to_text(s), a.find(0, "chars"), Side::both); }},
    {"truncate", truncate},
    {"unique", unique},
    {"upper", [](Run&, const Value& s, const Args&) -> Value { return upper(to_text(s)); }},
    {"wordcount",
     [](Run&, const Value& s, const Args&) -> Value {
       return static_cast<std::int64_t>(split(to_text(s), nullptr, -1, false).size());
     }},
};

// --- tests

bool same(const Value& a, const Value& b) {
  if (a.list() || b.list()) return a.list() == b.list();
  if (a.dict() || b.dict()) return a.dict() == b.dict();
  return a.kind() == b.kind() && equal(a, b);
}

bool is_true(const Value& s, bool wanted) {
  const auto* flag = s.as<bool>();
  return flag != nullptr && *flag == wanted;
}

std::int64_t remainder(const Value& s, std::int64_t by) {
  if (by == 0) throw Error("a division by zero");
  return need_integer(s, "a test") % by;
}

bool cased(const Value& s, Text (*as)(const Text&)) {
  const auto text = to_text(s);
  return upper(text).bytes() != lower(text).bytes() && as(text).bytes() == text.bytes();
}

struct NamedTest {
  std::string_view name;
  Test call;
};
constexpr Test kEqual = [](Run&, const Value& s, const Args& a) { return equal(s, a.need(0, "other")); };
constexpr Test kNotEqual = [](Run&, const Value& s, const Args& a) { return !equal(s, a.need(0, "other")); };
constexpr Test kLess = [](Run&, const Value& s, const Args& a) { return less(s, a.need(0, "other")); };
constexpr Test kMore = [](Run&, const Value& s, const Args& a) { return less(a.need(0, "other"), s); };
constexpr Test kAtMost = [](Run&, const Value& s, const Args& a) { return !less(a.need(0, "other"), s); };
constexpr Test kAtLeast = [](Run&, const Value& s, const Args& a) { return !less(s, a.need(0, "other")); };

constexpr NamedTest kTests[] = {
    {"boolean", [](Run&, const Value& s, const Args&) { return s.as<bool>() != nullptr; }},
    {"callable", [](Run&, const Value& s, const Args&) { return s.function() != nullptr; }},
    {"defined", [](Run&, const Value& s, const Args&) { return !s.is_undefined(); }},
    {"undefined", [](Run&, const Value& s, const Args&) { return s.is_undefined(); }},
    {"divisibleby", [](Run&, const Value& s,
                       const Args& a) { return remainder(s, need_integer(a.need(0, "num"), "divisibleby")) == 0; }},
    {"eq", kEqual},
    {"equalto", kEqual},
    {"==", kEqual},
    {"ne", kNotEqual},
    {"!=", kNotEqual},
    {"lt", kLess},
    {"lessthan", kLess},
    {"<", kLess},
    {"gt", kMore},
    {"greaterthan", kMore},
    {">", kMore},
    {"le", kAtMost},
    {"<=", kAtMost},
    {"ge", kAtLeast},
    {">=", kAtLeast},
    {"even", [](Run&, const Value& s, const Args&) { return remainder(s, 2) == 0; }},
    {"odd", [](Run&, const Value& s, const Args&) { return remainder(s, 2) != 0; }},
    {"false", [](Run&, const Value& s, const Args&) { return is_true(s, false); }},
    {"true", [](Run&, const Value& s, const Args&) { return is_true(s, true); }},
    {"float", [](Run&, const Value& s, const Args&) { return s.as<double>() != nullptr; }},
    {"in", [](Run&, const Value& s, const Args& a) { return contains(a.need(0, "seq"), s); }},
    {"integer", [](Run&, const Value& s, const Args&) { return s.is_integer(); }},
    {"iterable",
     [](Run&, const Value& s, const Args&) { return s.text() || s.list() || s.dict() || s.is_undefined(); }},
    {"sequence",
     [](Run&, const Value& s, const Args&) { return s.text() || s.list() || s.dict() || s.is_undefined(); }},
    {"lower", [](Run&, const Value& s, const Args&) { return cased(s, lower); }},
    {"upper", [](Run&, const Value& s, const Args&) { return cased(s, upper); }},
    {"mapping", [](Run&, const Value& s, const Args&) { return s.dict() != nullptr; }},
    {"none", [](Run&, const Value& s, const Args&) { return s.is_none(); }},
    {"number", [](Run&, const Value& s, const Args&) { return number_of(s).has_value(); }},
    {"sameas", [](Run&, const Value& s, const Args& a) { return same(s, a.need(0, "other")); }},
    {"string", [](Run&, const Value& s, const Args&) { return s.text() != nullptr; }},
    {"filter", [](Run&, const Value& s, const Args&) { return s.text() && find_filter(s.text()->bytes()) != nullptr; }},
    {"test", [](Run&, const Value& s, const Args&) { return s.text() && find_test(s.text()->bytes()) != nullptr; }},
};

}  // namespace

Filter find_filter(std::string_view name) {
  const auto* found = std::ranges::find(kFilters, name, &NamedFilter::name);
  return found == std::end(kFilters) ? nullptr : found->call;
}

Test find_test(std::string_view name) {
  const auto* found = std::ranges::find(kTests, name, &NamedTest::name);
  return found == std::end(kTests) ? nullptr : found->call;
}

}  // namespace gka::serve::jinja
