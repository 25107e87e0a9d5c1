// Methods of texts, lists and dictionaries, and the functions every template has.
#include <algorithm>
#include <ctime>

#include "serve/jinja/builtins.h"

namespace gka::serve::jinja {
namespace {

using Run = Interpreter;
using Args = Arguments;

struct Method {
  std::string_view name;
  Filter call;
};

const Text& self(const Value& subject) { return *subject.text(); }

Value find_in(const Value& s, const Args& a, bool last, bool must) {
  const auto& bytes = self(s).bytes();
  const auto& wanted = need_text(a.need(0, "sub"), "find").bytes();
  const auto at = last ? bytes.rfind(wanted) : bytes.find(wanted);
  if (at == std::string::npos && must) throw Error("a text does not contain what index looks for");
  if (at == std::string::npos) return std::int64_t{-1};
  return static_cast<std::int64_t>(count_characters(std::string_view(bytes).substr(0, at)));
}

/// startswith and endswith take one text or a tuple of them.
template <typename Check>
Value any_affix(const Args& a, Check&& check) {
  const auto& wanted = a.need(0, "prefix");
  if (!wanted.list()) return check(need_text(wanted, "startswith").bytes());
  return std::ranges::any_of(wanted.list()->items,
                             [&](const Value& one) { return check(need_text(one, "startswith").bytes()); });
}

Value partition(const Value& s, const Args& a, bool last) {
  const auto& text = self(s);
  const auto& between = need_text(a.need(0, "sep"), "partition");
  if (between.empty()) throw Error("partition takes a separator that is not empty");
  const auto at = last ? text.bytes().rfind(between.bytes()) : text.bytes().find(between.bytes());
  if (at == std::string::npos) {
    return last ? Value::tuple({Text(), Text(), text}) : Value::tuple({text, Text(), Text()});
  }
  return Value::tuple({text.cut(0, at), text.cut(at, between.size()), text.cut(at + between.size())});
}

/// Whether there is a letter that `is` counts, and every character is one or is not a letter at all.
template <typename Is>
Value every(const Value& s, Is&& is) {
  return !self(s).empty() &&
         std::ranges::all_of(self(s).bytes(), [&](unsigned char c) { return is(c) != 0 || c >= 0x80; });
}

Value cased(const Value& s, bool upper_case) {
  const auto& text = self(s);
  const bool letters = upper(text).bytes() != lower(text).bytes();
  return letters && (upper_case ? upper(text) : lower(text)).bytes() == text.bytes();
}

Value count_in(const Value& s, const Args& a) {
  const auto& bytes = self(s).bytes();
  const auto& wanted = need_text(a.need(0, "sub"), "count").bytes();
  if (wanted.empty()) return static_cast<std::int64_t>(count_characters(bytes) + 1);
  std::int64_t count = 0;
  for (auto at = bytes.find(wanted); at != std::string::npos; at = bytes.find(wanted, at + wanted.size())) ++count;
  return count;
}

Value without_affix(const Value& s, const Args& a, bool front) {
  const auto& text = self(s);
  const auto& affix = need_text(a.need(0, "prefix"), "removeprefix").bytes();
  const bool has = front ? text.bytes().starts_with(affix) : text.bytes().ends_with(affix);
  if (!has) return text;
  return front ? text.cut(affix.size()) : text.cut(0, text.size() - affix.size());
}

Value padded(const Value& s, const Args& a, bool zeros, bool left) {
  const auto& text = self(s);
  const auto missing =
      need_integer(a.need(0, "width"), "the width") - static_cast<std::int64_t>(count_characters(text.bytes()));
  if (missing <= 0) return text;
  if (missing > 10000) throw Error("a width is at most 10000");
  const Text fill(std::string(static_cast<std::size_t>(missing), zeros ? '0' : ' '));
  return left ? text + fill : fill + text;
}

bool starts_word(char before) { return std::isalpha(static_cast<unsigned char>(before)) == 0; }

constexpr Method kTextMethods[] = {
    {"strip",
     [](Run&, const Value& s, const Args& a) -> Value { return stripped(self(s), a.find(0, "chars"), Side::both); }},
    {"lstrip",
     [](Run&, const Value& s, const Args& a) -> Value { return stripped(self(s), a.find(0, "chars"), Side::left); }},
    {"rstrip",
     [](Run&, const Value& s, const Args& a) -> Value { return stripped(self(s), a.find(0, "chars"), Side::right); }},
    {"split",
     [](Run&, const Value& s, const Args& a) {
       return Value::list(split(self(s), a.find(0, "sep"), integer_or(a, 1, "maxsplit", -1), false));
     }},
    {"rsplit",
     [](Run&, const Value& s, const Args& a) {
       return Value::list(split(self(s), a.find(0, "sep"), integer_or(a, 1, "maxsplit", -1), true));
     }},
    {"splitlines", [](Run&, const Value& s,
                      const Args& a) { return Value::list(lines_of(self(s), flag_or(a, 0, "keepends", false))); }},
    {"startswith",
     [](Run&, const Value& s, const Args& a) {
       return any_affix(a, [&](const std::string& affix) { return self(s).bytes().starts_with(affix); });
     }},
    {"endswith",
     [](Run&, const Value& s, const Args& a) {
       return any_affix(a, [&](const std::string& affix) { return self(s).bytes().ends_with(affix); });
     }},
    {"upper", [](Run&, const Value& s, const Args&) -> Value { return upper(self(s)); }},
    {"lower", [](Run&, const Value& s, const Args&) -> Value { return lower(self(s)); }},
    {"capitalize", [](Run&, const Value& s, const Args&) -> Value { return capitalized(self(s)); }},
    {"title", [](Run&, const Value& s, const Args&) -> Value { return titled(self(s), starts_word); }},
    {"replace",
     [](Run& run, const Value& s, const Args& a) -> Value {
       return replaced(run, self(s), need_text(a.need(0, "old"), "replace"), need_text(a.need(1, "new"), "replace"),
                       integer_or(a, 2, "count", -1));
     }},
    {"join",
     [](Run& run, const Value& s, const Args& a) -> Value {
       return joined(run, iterate(a.need(0, "iterable")), self(s));
     }},
    {"find", [](Run&, const Value& s, const Args& a) { return find_in(s, a, false, false); }},
    {"rfind", [](Run&, const Value& s, const Args& a) { return find_in(s, a, true, false); }},
    {"index", [](Run&, const Value& s, const Args& a) { return find_in(s, a, false, true); }},
    {"count", [](Run&, const Value& s, const Args& a) { return count_in(s, a); }},
    {"format", [](Run&, const Value& s, const Args& a) -> Value { return brace_format(self(s), a); }},
    {"partition", [](Run&, const Value& s, const Args& a) { return partition(s, a, false); }},
    {"rpartition", [](Run&, const Value& s, const Args& a) { return partition(s, a, true); }},
    {"removeprefix", [](Run&, const Value& s, const Args& a) { return without_affix(s, a, true); }},
    {"removesuffix", [](Run&, const Value& s, const Args& a) { return without_affix(s, a, false); }},
    {"zfill", [](Run&, const Value& s, const Args& a) { return padded(s, a, true, false); }},
    {"ljust", [](Run&, const Value& s, const Args& a) { return padded(s, a, false, true); }},
    {"rjust", [](Run&, const Value& s, const Args& a) { return padded(s, a, false, false); }},
    {"isdigit",
     [](Run&, const Value& s, const Args&) { return every(s, [](unsigned char c) { return std::isdigit(c); }); }},
    {"isalpha",
     [](Run&, const Value& s, const Args&) { return every(s, [](unsigned char c) { return std::isalpha(c); }); }},
    {"isalnum",
     [](Run&, const Value& s, const Args&) { return every(s, [](unsigned char c) { return std::isalnum(c); }); }},
    {"isspace",
     [](Run&, const Value& s, const Args&) { return every(s, [](unsigned char c) { return std::isspace(c); }); }},
    {"isupper", [](Run&, const Value& s, const Args&) { return cased(s, true); }},
    {"islower", [](Run&, const Value& s, const Args&) { return cased(s, false); }},
};

[[noreturn]] Value refuse_change(Run&, const Value&, const Args&) {
  throw Error("a template cannot change the lists and dictionaries it is given; namespace() can be changed");
}

Value position_in(Run&, const Value& s, const Args& a) {
  const auto& items = s.list()->items;
  const auto found = std::ranges::find_if(items, [&](const Value& item) { return equal(item, a.need(0, "value")); });
  if (found == items.end()) throw Error("a list does not contain what index looks for");
  return static_cast<std::int64_t>(found - items.begin());
}

constexpr Method kListMethods[] = {
    {"index", position_in},
    {"count",
     [](Run&, const Value& s, const Args& a) -> Value {
       return static_cast<std::int64_t>(
           std::ranges::count_if(s.list()->items, [&](const Value& item) { return equal(item, a.need(0, "value")); }));
     }},
    {"copy", [](Run&, const Value& s, const Args&) -> Value { return *s.list(); }},
    {"append", refuse_change},
    {"extend", refuse_change},
    {"insert", refuse_change},
    {"pop", refuse_change},
    {"remove", refuse_change},
    {"reverse", refuse_change},
    {"sort", refuse_change},
    {"clear", refuse_change},
};

Value items_of(Run&, const Value& s, const Args&) {
  List list;
  for (const auto& [key, value] : s.dict()->items) list.items.push_back(Value::tuple({key, value}));
  return list;
}

constexpr Method kDictMethods[] = {
    {"items", items_of},
    {"keys", [](Run&, const Value& s, const Args&) { return Value::list(iterate(s)); }},
    {"values",
     [](Run&, const Value& s, const Args&) -> Value {
       List list;
       for (const auto& entry : s.dict()->items) list.items.push_back(entry.second);
       return list;
     }},
    {"get",
     [](Run&, const Value& s, const Args& a) -> Value {
       if (const auto* value = s.dict()->find(a.need(0, "key"))) return *value;
       const auto* otherwise = a.find(1, "default");
       return otherwise ? *otherwise : Value(None{});
     }},
    {"copy", [](Run&, const Value& s, const Args&) -> Value { return *s.dict(); }},
    {"update", refuse_change},
    {"pop", refuse_change},
    {"popitem", refuse_change},
    {"setdefault", refuse_change},
    {"clear", refuse_change},
};

template <typename Table>
Filter look_up(const Table& table, std::string_view name) {
  const auto* found = std::ranges::find(table, name, &Method::name);
  return found == std::end(table) ? nullptr : found->call;
}

// --- functions

Value range(Run& run, const Args& a) {
  const auto count = a.positional.size();
  if (count < 1 || count > 3) throw Error("range takes one to three numbers");
  const auto number = [&](std::size_t i) { return need_integer(a.positional[i], "range"); };
  const auto from = count > 1 ? number(0) : 0, to = count > 1 ? number(1) : number(0);
  const auto step = count > 2 ? number(2) : 1;
  if (step == 0) throw Error("range's step cannot be 0");
  constexpr std::size_t kMost = 100'000;
  List list;
  for (auto i = from; step > 0 ? i < to : i > to;) {
    if (list.items.size() >= kMost) throw Error("a range has more than " + std::to_string(kMost) + " numbers");
    list.items.emplace_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  run.charge(list.items.size() * 64);
  return list;
}

Value dictionary(Run&, const Args& a) {
  Dict made;
  if (const auto* from = a.positional.empty() ? nullptr : &a.positional[0]; from && from->dict()) made = *from->dict();
  made.name_space = false;
  for (const auto& [name, value] : a.named) made.set(name, value);
  return made;
}

Value name_space(Run& run, const Args& a) {
  auto made = dictionary(run, a);
  made.dict()->name_space = true;
  return made;
}

Value raise(Run&, const Args& a) { throw Raised(to_text(a.need(0, "message")).bytes()); }

Value strftime_now(Run& run, const Args& a) {
  const auto now = run.limits().now.value_or(std::time(nullptr));
  std::tm parts{};
  ::localtime_r(&now, &parts);
  const auto& format = need_text(a.need(0, "format"), "strftime_now").bytes();
  char buffer[512];
  if (format.size() > 100) throw Error("strftime_now takes a format of at most 100 characters");
  const auto length = std::strftime(buffer, sizeof(buffer), format.c_str(), &parts);
  return std::string(buffer, length);
}

/// cycler('a', 'b'): next() gives one after the other.
Value cycler(Run&, const Args& a) {
  if (a.positional.empty()) throw Error("cycler takes at least one value");
  const auto at = std::make_shared<std::size_t>(0);
  const auto items = a.positional;
  const auto next = [at, items](Run&, const Args&) -> Value { return items[(*at)++ % items.size()]; };
  Dict made{.items = {}, .name_space = true};
  made.set("next", Function{"next", next});
  return made;
}

/// joiner(', '): nothing the first time, the separator each time after.
Value joiner(Run&, const Args& a) {
  const auto* given = a.find(0, "sep");
  const auto used = std::make_shared<bool>(false);
  const auto separator = given ? to_text(*given) : Text(", ");
  return Function{"joiner", [used, separator](Run&, const Args&) -> Value {
                    return std::exchange(*used, true) ? separator : Text();
                  }};
}

struct Global {
  std::string_view name;
  Value (*call)(Run&, const Args&);
};
constexpr Global kGlobals[] = {{"range", range},           {"dict", dictionary},           {"namespace", name_space},
                               {"raise_exception", raise}, {"strftime_now", strftime_now}, {"cycler", cycler},
                               {"joiner", joiner}};

}  // namespace

Filter find_method(const Value& subject, std::string_view name) {
  if (subject.text()) return look_up(kTextMethods, name);
  if (subject.list()) return look_up(kListMethods, name);
  if (subject.dict() && !subject.dict()->name_space) return look_up(kDictMethods, name);
  return nullptr;
}

std::optional<Value> find_global(std::string_view name) {
  const auto* found = std::ranges::find(kGlobals, name, &Global::name);
  if (found == std::end(kGlobals)) return std::nullopt;
  return Function{std::string(name), found->call};
}

}  // namespace gka::serve::jinja
