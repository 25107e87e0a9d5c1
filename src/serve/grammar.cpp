// JSON as a machine with a stack. A schema becomes a tree of `Form`s (schema.h); a `State` is what has been read so
// far: a stack of frames, each a value that is open. A token is allowed when all of its bytes lead from one state to
// the next.
#include "serve/grammar.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>

#include "data/unicode.h"
#include "serve/answer.h"
#include "serve/schema.h"

namespace gka::serve {
namespace {

constexpr int kDeepest = 48;               // of open values: an answer cannot nest for ever
constexpr std::size_t kMostStates = 1024;  // readings kept at once, where a schema allows several
// White space is what people write: a space, or a new line and its indentation, which is no deeper than the values are.
// A model that likes more would never end.
constexpr int kIndented = 100, kTab = 4;

// --- the machine

/// A value that is open. What `place` counts depends on the kind: characters of a literal, a property's number, …
struct Frame {
  enum class At : std::uint8_t {
    value,         // before a value (white space may come)
    literal,       // in one, `place` characters in
    string,        // in a text; `place` is a state of `string_step`
    number,        // in a number; `place` is a state of `number_step`
    object_start,  // after '{'
    key,           // in a key of the schema, `place` characters in, property `index`
    free_key,      // in a key of any kind (as `string`)
    colon,         // after a key
    object_next,   // after a member's value
    array_start,   // after '['
    array_next,    // after an item
    opening,       // before a call or in the mark that opens it, `place` characters in
    closing,       // after a call or in the mark that closes it
  } at = At::value;
  const Form* form = nullptr;
  std::uint32_t place = 0, index = 0, count = 0;
  std::int64_t value = 0;  // of a number within bounds: its digits so far
  bool operator==(const Frame&) const = default;
};

struct State {
  std::vector<Frame> stack;
  int space = 0;  // white space just read: 1 a space, from kIndented on a new line and what follows it
  bool done = false;
  bool operator==(const State&) const = default;
  bool in_text() const {
    if (stack.empty() || stack.back().place != 0) return false;
    return stack.back().at == Frame::At::string || stack.back().at == Frame::At::free_key;
  }
  /// A text whose length or characters are limited, at any place in it.
  bool in_limited_text() const {
    return !stack.empty() && stack.back().at == Frame::At::string && stack.back().form->limited();
  }
};

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Numbers: 0 start, 1 after '-', 2 after a leading 0, 3 in digits, 4 after '.', 5 in the fraction, 6 after 'e', 7 after
// its sign, 8 in its digits.
int number_step(int at, char c, bool whole) {
  switch (at) {
    case 0: return c == '-' ? 1 : c == '0' ? 2 : is_digit(c) ? 3 : -1;
    case 1: return c == '0' ? 2 : is_digit(c) ? 3 : -1;
    case 2:
    case 3:
      if (at == 3 && is_digit(c)) return 3;
      if (whole) return -1;
      return c == '.' ? 4 : c == 'e' || c == 'E' ? 6 : -1;
    case 4: return is_digit(c) ? 5 : -1;
    case 5: return is_digit(c) ? 5 : c == 'e' || c == 'E' ? 6 : -1;
    case 6: return c == '+' || c == '-' ? 7 : is_digit(c) ? 8 : -1;
    default: return is_digit(c) ? 8 : -1;
  }
}
bool number_ends(std::uint32_t at) { return at == 2 || at == 3 || at == 5 || at == 8; }

/// The next place inside a text; -1: not allowed, -2: the text ends. 9 and above: bytes of a character still to come.
int string_step(std::uint32_t at, char character) {
  const auto c = static_cast<unsigned char>(character);
  if (at == 0) {
    if (c == '"') return -2;
    if (c == '\\') return 1;
    if (c < 0x20) return -1;
    if (c < 0x80) return 0;
    if (c >= 0xC2 && c <= 0xDF) return 9;
    if (c >= 0xE0 && c <= 0xEF) return c == 0xE0 ? 12 : c == 0xED ? 13 : 10;
    return c >= 0xF0 && c <= 0xF4 ? (c == 0xF0 ? 14 : c == 0xF4 ? 15 : 11) : -1;
  }
  if (at == 1)
    return character == 'u' ? 2 : std::string_view("\"\\/bfnrt").find(character) != std::string_view::npos ? 0 : -1;
  if (at <= 5) return std::isxdigit(c) != 0 ? (at == 5 ? 0 : static_cast<int>(at) + 1) : -1;
  const bool more = (c & 0xC0U) == 0x80U;
  if (!more || (at == 12 && c < 0xA0) || (at == 13 && c >= 0xA0) || (at == 14 && c < 0x90) || (at == 15 && c >= 0x90))
    return -1;
  return at == 9 ? 0 : at == 11 || at == 14 || at == 15 ? 10 : 9;
}

/// A text whose length and characters a schema limits. Where it is: in the JSON, in the pattern, and how many
/// characters.
struct LimitedText {
  std::uint32_t place = 0, pattern = Pattern::kStart, count = 0;
  enum class Step : std::uint8_t { on, ends, nowhere };

  Step step(const Form& form, char c) {
    // Escapes by number are not written: two of them may be one character.
    const int next = place == 1 && c == 'u' ? -1 : string_step(place, c);
    if (next == -1) return Step::nowhere;
    if (next == -2) {
      const bool fits = count >= form.least && (!form.pattern || form.pattern->accepts(pattern));
      return fits ? Step::ends : Step::nowhere;
    }
    if (next == 1) {  // it stands for what follows it
      place = 1;
      const auto may_follow = [&](char named) { return LimitedText(*this).step(form, named) == Step::on; };
      return std::ranges::any_of(std::string_view("\"\\/bfnrt"), may_follow) ? Step::on : Step::nowhere;
    }
    static constexpr std::string_view kNames = "bfnrt", kNamed = "\b\f\n\r\t";
    const auto named = place == 1 ? kNames.find(c) : std::string_view::npos;
    const char byte = named == std::string_view::npos ? c : kNamed[named];
    if (place <= 1) ++count;
    place = static_cast<std::uint32_t>(next);
    if (count > form.most) return Step::nowhere;
    if (!form.pattern) return Step::on;
    pattern = form.pattern->step(pattern, static_cast<unsigned char>(byte));
    if (pattern == Pattern::kNowhere) return Step::nowhere;
    const auto most = form.pattern->most(pattern);
    const bool can_end = count + std::size_t{form.pattern->least(pattern)} <= form.most &&
                         (most == Pattern::kAny || count + std::size_t{most} >= form.least);
    return can_end ? Step::on : Step::nowhere;
  }
};

// Numbers within bounds have at most so many digits, and no exponent.
constexpr int kMostDigits = 15;
constexpr std::uint32_t kNegative = 1;  // of Frame::index; the rest of it counts digits after the point

/// Of how many one is a unit of the last digit.
double parts_of(const Frame& frame) { return std::pow(10.0, frame.index >> 1); }

bool is_within(const Frame& frame) {
  const auto& form = *frame.form;
  const auto size = static_cast<double>(frame.value) / parts_of(frame);
  const double value = (frame.index & kNegative) != 0 ? -size : size;
  return (form.above_low ? value > form.low : value >= form.low) &&
         (form.below_high ? value < form.high : value <= form.high);
}

/// Whether a number that begins so can still come to lie within its form's bounds.
bool can_be_within(const Frame& frame) {
  const auto& form = *frame.form;
  const bool negative = (frame.index & kNegative) != 0;
  if (frame.count == kMostDigits) return frame.place != 4 && is_within(frame);
  const auto reaches = [&](double from, double to) {  // magnitudes, `to` itself not among them
    const double low = negative ? -form.high : form.low, high = negative ? -form.low : form.high;
    const bool open = negative ? form.above_low : form.below_high;
    return to > low && (open ? from < high : from <= high);
  };
  if (frame.place == 1) return form.low < 0;
  const auto digits = static_cast<double>(frame.value), parts = parts_of(frame);
  const bool whole = form.kind == Form::Kind::integer;
  if (frame.place == 2) return whole ? reaches(0, 0.5) : reaches(0, 1);
  if (frame.place >= 4) return reaches(digits / parts, (digits + 1) / parts);
  for (int more = 0; more <= kMostDigits - static_cast<int>(frame.count); ++more) {
    const auto scale = std::pow(10.0, more);
    if (reaches(digits * scale, (digits + 1) * scale - (whole ? 0.5 : 0))) return true;
  }
  return false;
}

/// The next place in a number within bounds; false: nothing may come there.
bool bounded_step(Frame& frame, char c) {
  const int place = number_step(static_cast<int>(frame.place), c, frame.form->kind == Form::Kind::integer);
  if (place < 0 || place >= 6) return false;
  frame.place = static_cast<std::uint32_t>(place);
  if (c == '-') frame.index |= kNegative;
  if (is_digit(c)) {
    if (++frame.count > kMostDigits) return false;
    frame.value = frame.value * 10 + (c - '0');
    if (place == 5) frame.index += 2;
  }
  return can_be_within(frame);
}

bool may_end(const Frame& number) { return number_ends(number.place) && (!number.form->bounded || is_within(number)); }

class Machine {
 public:
  explicit Machine(std::shared_ptr<const Schema> schema) : schema_(std::move(schema)) {}

  std::vector<State> start() const {
    return {State{.stack = {Frame{.at = Frame::At::value, .form = schema_->root.get()}}}};
  }

  std::vector<State> step(const std::vector<State>& states, char c) const {
    std::vector<State> next;
    for (const auto& state : states) advance(state, c, next);
    return next;
  }

  static bool done(const std::vector<State>& states) {
    return std::ranges::any_of(states, [](const State& s) {
      if (s.done || s.stack.size() != 1) return s.done;
      const auto& last = s.stack[0];
      return (last.at == At::number && may_end(last)) || (last.at == At::opening && last.place == 0);
    });
  }

 private:
  using At = Frame::At;

  static void keep(State state, std::vector<State>& next) {
    if (next.size() < kMostStates && std::ranges::find(next, state) == next.end()) next.push_back(std::move(state));
  }

  /// The value on top is complete: what it stands in goes on.
  static void close(State& state) {
    state.stack.pop_back();
    if (state.stack.empty()) state.done = true;
  }

  void advance(const State& state, char c, std::vector<State>& next) const {
    if (state.done) return;  // nothing follows
    const auto& top = state.stack.back();
    switch (top.at) {
      case At::value: return open_value(state, c, next);
      case At::literal: return in_literal(state, c, next);
      case At::string: return in_string(state, c, next);
      case At::number: return in_number(state, c, next);
      case At::object_start: return in_object(state, c, true, next);
      case At::key: return in_key(state, c, next);
      case At::free_key: return in_free_key(state, c, next);
      case At::colon: return after_key(state, c, next);
      case At::object_next: return in_object(state, c, false, next);
      case At::array_start: return in_array(state, c, true, next);
      case At::array_next: return in_array(state, c, false, next);
      case At::opening: return in_mark(state, kCallMark, c, next);
      case At::closing: return in_mark(state, kCalledMark, c, next);
    }
  }

  enum class Room : std::uint8_t { none, space, line };  // for white space

  /// White space keeps everything as it is; true where c was some.
  static bool spaced(const State& state, char c, Room room, std::vector<State>& next) {
    if (!is_space(c)) return false;
    const int width = c == '\t' ? kTab : 1, most = kIndented + kTab * static_cast<int>(state.stack.size());
    const bool indented = state.space >= kIndented;
    State same = state;
    same.space = c == '\n' ? kIndented : state.space + width;
    const bool fine = c == '\n'  ? room == Room::line && state.space == 0
                      : indented ? c != '\r' && same.space <= most
                                 : c == ' ' && room != Room::none && state.space == 0;
    if (fine) keep(std::move(same), next);
    return true;
  }

  /// Before a value: nothing at the very start, a space after a colon.
  void open_value(const State& state, char c, std::vector<State>& next) const {
    const auto depth = state.stack.size();
    const bool after_colon = depth > 1 && state.stack[depth - 2].at == At::object_next;
    if (spaced(state, c, depth == 1 ? Room::none : after_colon ? Room::space : Room::line, next)) return;
    begin(state, *state.stack.back().form, c, next);
  }

  void begin(const State& state, const Form& form, char c, std::vector<State>& next) const {
    using Kind = Form::Kind;
    const auto open = [&](At at, std::uint32_t place) {
      State opened = state;
      opened.space = 0;
      opened.stack.back() = Frame{.at = at, .form = &form, .place = place};
      if (opened.stack.size() <= kDeepest) keep(std::move(opened), next);
    };
    const bool any = form.kind == Kind::any;
    if (form.kind == Kind::link) return begin(state, *form.target, c, next);
    if (form.kind == Kind::choice) {
      for (const auto& one : form.forms) begin(state, *one, c, next);
      return;
    }
    if (any) {
      for (const auto* word : {&kTrue, &kFalse, &kNull}) begin(state, *word, c, next);
    }
    if ((any || form.kind == Kind::object) && c == '{') open(At::object_start, 0);
    if ((any || form.kind == Kind::array) && c == '[') open(At::array_start, 0);
    if ((any || form.kind == Kind::string) && c == '"') open(At::string, 0);
    if (form.bounded) {
      State opened = state;
      opened.space = 0;
      opened.stack.back() = Frame{.at = At::number, .form = &form};
      if (bounded_step(opened.stack.back(), c)) keep(std::move(opened), next);
    } else if (any || form.kind == Kind::number || form.kind == Kind::integer) {
      const int place = number_step(0, c, form.kind == Kind::integer);
      if (place > 0) open(At::number, static_cast<std::uint32_t>(place));
    }
    if (form.kind == Kind::calls && c == kCallMark[0]) open(At::opening, 1);
    if (form.kind == Kind::literal && form.text[0] == c) {
      State opened = state;
      opened.space = 0;
      opened.stack.back() = Frame{.at = At::literal, .form = &form, .place = 1};
      if (form.text.size() == 1) close(opened);
      keep(std::move(opened), next);
    }
  }

  /// Around a call: after the one mark comes what is called, after the other the next call or the end.
  void in_mark(const State& state, std::string_view mark, char c, std::vector<State>& next) const {
    const auto& top = state.stack.back();
    if (top.place == 0 && spaced(state, c, Room::line, next)) return;
    if (mark[top.place] != c) return;
    State read = state;
    read.space = 0;
    auto& frame = read.stack.back();
    if (++frame.place == mark.size()) {
      const bool opened = frame.at == At::opening;
      const auto& form = *frame.form;
      frame.at = opened ? At::closing : At::opening;
      frame.place = 0;
      if (opened) {
        read.stack.push_back(Frame{.at = At::value, .form = form.items.get()});
      } else if (form.most == 1) {
        close(read);
      }
    }
    keep(std::move(read), next);
  }

  void in_literal(const State& state, char c, std::vector<State>& next) const {
    const auto& top = state.stack.back();
    if (top.form->text[top.place] != c) return;
    State read = state;
    if (++read.stack.back().place == top.form->text.size()) close(read);
    keep(std::move(read), next);
  }

  void in_string(const State& state, char c, std::vector<State>& next) const {
    if (state.in_limited_text()) return in_limited_string(state, c, next);
    const int place = string_step(state.stack.back().place, c);
    if (place == -1) return;
    State read = state;
    if (place == -2) {
      close(read);
    } else {
      read.stack.back().place = static_cast<std::uint32_t>(place);
    }
    keep(std::move(read), next);
  }

  void in_limited_string(const State& state, char c, std::vector<State>& next) const {
    State read = state;
    auto& top = read.stack.back();
    LimitedText text{.place = top.place, .pattern = top.index, .count = top.count};
    const auto step = text.step(*top.form, c);
    if (step == LimitedText::Step::nowhere) return;
    if (step == LimitedText::Step::ends) {
      close(read);
    } else {
      top.place = text.place;
      top.index = text.pattern;
      top.count = text.count;
    }
    keep(std::move(read), next);
  }

  /// A number ends where something else comes: that belongs to what it stands in.
  void in_number(const State& state, char c, std::vector<State>& next) const {
    const auto& top = state.stack.back();
    const int place =
        top.count < 40 ? number_step(static_cast<int>(top.place), c, top.form->kind == Form::Kind::integer) : -1;
    if (top.form->bounded) {
      State read = state;
      if (bounded_step(read.stack.back(), c)) keep(std::move(read), next);
    } else if (place >= 0) {
      State read = state;
      read.stack.back().place = static_cast<std::uint32_t>(place);
      ++read.stack.back().count;
      keep(std::move(read), next);
    }
    if (!may_end(top) || state.stack.size() == 1) return;
    State closed = state;
    close(closed);
    advance(closed, c, next);
  }

  static bool complete(const Form& form, std::uint32_t from) {
    return std::ranges::none_of(form.properties.begin() + from, form.properties.end(), &Form::Property::required);
  }

  /// Before a key, or after a member. `index` is the next property that may come.
  void in_object(const State& state, char c, bool first, std::vector<State>& next) const {
    const auto& top = state.stack.back();
    const auto& form = *top.form;
    const bool anything = form.kind == Form::Kind::any || form.open;
    const bool key_only = first || top.place != 0, may_close = anything || complete(form, top.index);
    if (spaced(state, c, key_only || may_close ? Room::line : Room::none, next)) return;
    if (c == '}' && top.place == 0 && may_close) {
      State closed = state;
      closed.space = 0;
      close(closed);
      return keep(std::move(closed), next);
    }
    if (!first && top.place == 0) {
      // White space before a comma is nobody's: after some, only the end comes.
      if (c != ',' || state.space > 0 || (!anything && top.index >= form.properties.size())) return;
      State read = state;
      read.space = 0;
      read.stack.back().place = 1;  // a comma came: a key has to follow
      return keep(std::move(read), next);
    }
    if (c != '"') return;
    if (anything) {
      State read = state;
      read.space = 0;
      read.stack.back().at = At::free_key;
      read.stack.back().place = 0;
      return keep(std::move(read), next);
    }
    for (auto i = top.index; i < form.properties.size(); ++i) {
      State read = state;
      read.space = 0;
      read.stack.back().at = At::key;
      read.stack.back().index = i;
      read.stack.back().place = 1;
      keep(std::move(read), next);
      if (form.properties[i].required) break;  // it cannot be left out
    }
  }

  void in_key(const State& state, char c, std::vector<State>& next) const {
    const auto& top = state.stack.back();
    const auto& key = top.form->properties[top.index].key;
    if (key[top.place] != c) return;
    State read = state;
    auto& frame = read.stack.back();
    if (++frame.place == key.size()) {
      frame.at = At::colon;
      frame.place = 0;
    }
    keep(std::move(read), next);
  }

  void in_free_key(const State& state, char c, std::vector<State>& next) const {
    const int place = string_step(state.stack.back().place, c);
    if (place == -1) return;
    State read = state;
    read.stack.back().place = place == -2 ? 0 : static_cast<std::uint32_t>(place);
    if (place == -2) read.stack.back().at = At::colon;
    keep(std::move(read), next);
  }

  void after_key(const State& state, char c, std::vector<State>& next) const {
    if (c != ':') return;
    State read = state;
    read.space = 0;
    auto& frame = read.stack.back();
    const auto& form = *frame.form;
    const Form* value = &kAny;
    if (!form.properties.empty()) {
      value = form.properties[frame.index].value.get();
      ++frame.index;
    } else if (form.items) {
      value = form.items.get();
    }
    frame.at = At::object_next;
    frame.place = 0;
    read.stack.push_back(Frame{.at = At::value, .form = value});
    keep(std::move(read), next);
  }

  static const Form* item_of(const Form& array, std::uint32_t at) {
    if (at < array.first.size()) return array.first[at].get();
    return array.items ? array.items.get() : &kAny;
  }

  void in_array(const State& state, char c, bool first, std::vector<State>& next) const {
    const auto& top = state.stack.back();
    const auto& form = *top.form;
    if (spaced(state, c, first || top.count >= form.least ? Room::line : Room::none, next)) return;
    if (c == ']' && top.place == 0 && top.count >= form.least) {
      State closed = state;
      closed.space = 0;
      close(closed);
      return keep(std::move(closed), next);
    }
    if (top.count >= form.most) return;
    State read = state;
    read.space = 0;
    auto& frame = read.stack.back();
    if (!first) {
      if (c != ',' || state.space > 0) return;
      frame.at = At::array_next;
      ++frame.count;
      read.stack.push_back(Frame{.at = At::value, .form = item_of(form, top.count)});
      return keep(std::move(read), next);
    }
    frame.at = At::array_next;
    ++frame.count;
    read.stack.push_back(Frame{.at = At::value, .form = item_of(form, top.count)});
    open_value(read, c, next);
  }

  static Form word(const char* text) {
    Form form;
    form.kind = Form::Kind::literal;
    form.text = text;
    return form;
  }
  static inline const Form kAny{};
  static inline const Form kTrue = word("true"), kFalse = word("false"), kNull = word("null");

  std::shared_ptr<const Schema> schema_;
};

// --- tokens

/// The vocabulary as a tree of bytes, so that tokens with one beginning are walked once. Made once per model.
struct TokenTree {
  struct Node {
    std::vector<std::pair<char, std::uint32_t>> next;
    std::vector<std::int32_t> tokens;  // that end here
  };
  std::vector<Node> nodes = std::vector<Node>(1);

  void add(std::string_view bytes, std::int32_t token) {
    std::uint32_t at = 0;
    for (const char c : bytes) {
      auto found = std::ranges::find_if(nodes[at].next, [&](const auto& entry) { return entry.first == c; });
      if (found == nodes[at].next.end()) {
        nodes[at].next.emplace_back(c, static_cast<std::uint32_t>(nodes.size()));
        at = static_cast<std::uint32_t>(nodes.size());
        nodes.emplace_back();
      } else {
        at = found->second;
      }
    }
    nodes[at].tokens.push_back(token);
  }
};

/// Inside a text nearly every token is fine: those that stay in it whatever comes are known beforehand, and only the
/// others are walked.
struct Vocabulary {
  TokenTree all, not_plain;
  std::vector<bool> plain;
  std::vector<std::uint32_t> characters;  // of those that are plain
};

bool plain_text(std::string_view bytes) {
  const auto ends = [](unsigned char c) { return c == '"' || c == '\\' || c < 0x20; };
  return std::ranges::none_of(bytes, ends) && data::is_utf8(bytes);
}

}  // namespace

struct JsonTokens {
  std::mutex mutex;
  std::shared_ptr<const Vocabulary> vocabulary;
};

std::shared_ptr<JsonTokens> make_json_tokens() { return std::make_shared<JsonTokens>(); }

namespace {

std::shared_ptr<const Vocabulary> vocabulary_of(const Model& model) {
  const std::lock_guard lock(model.json_tokens->mutex);
  auto& vocabulary = model.json_tokens->vocabulary;
  if (vocabulary) return vocabulary;
  auto made = std::make_shared<Vocabulary>();
  const auto size = model.engine->vocabulary();
  made->plain.assign(static_cast<std::size_t>(size), false);
  made->characters.assign(static_cast<std::size_t>(size), 0);
  for (std::int64_t token = 0; token < std::min(size, model.tokenizer().vocab_size()); ++token) {
    const auto bytes = model.bytes(token);
    if (bytes.empty() || model.tokenizer().is_special(static_cast<data::Token>(token))) continue;
    made->all.add(bytes, static_cast<std::int32_t>(token));
    if (plain_text(bytes)) {
      made->plain[static_cast<std::size_t>(token)] = true;
      made->characters[static_cast<std::size_t>(token)] = static_cast<std::uint32_t>(data::count_characters(bytes));
    } else {
      made->not_plain.add(bytes, static_cast<std::int32_t>(token));
    }
  }
  vocabulary = made;
  return vocabulary;
}

class JsonFilter : public infer::TokenFilter {
 public:
  JsonFilter(std::shared_ptr<const Schema> schema, const Model& model)
      : machine_(std::move(schema)), states_(machine_.start()), vocabulary_(vocabulary_of(model)), model_(model) {}

  bool allowed(std::span<const std::int64_t> generated, std::vector<bool>& mask) override {
    if (generated.size() < read_) {  // asked for another beginning
      states_ = machine_.start();
      read_ = 0;
    }
    for (; read_ < generated.size(); ++read_) {
      for (const char c : model_.bytes(generated[read_])) states_ = machine_.step(states_, c);
    }
    mask.assign(vocabulary_->plain.size(), false);
    const bool one = states_.size() == 1;
    const auto* limits = one && states_[0].in_limited_text() ? states_[0].stack.back().form : nullptr;
    if (limits != nullptr && limits->pattern) {
      const auto& top = states_[0].stack.back();
      walk_text(vocabulary_->all, 0, {.place = top.place, .pattern = top.index, .count = top.count}, mask);
    } else if (one && states_[0].in_text()) {
      allow_plain(limits, mask);
      walk(vocabulary_->not_plain, 0, states_, mask);
    } else {
      walk(vocabulary_->all, 0, states_, mask);
    }
    // Where nothing can follow (a schema may ask for what there is not) the answer ends, too.
    if (Machine::done(states_) || std::ranges::find(mask, true) == mask.end()) {
      for (const auto token : model_.end_tokens) mask[static_cast<std::size_t>(token)] = true;
    }
    return true;
  }

 private:
  void allow_plain(const Form* limits, std::vector<bool>& mask) const {
    if (limits == nullptr) {
      mask = vocabulary_->plain;
      return;
    }
    const auto room = limits->most - states_[0].stack.back().count;
    for (std::size_t token = 0; token < mask.size(); ++token) {
      mask[token] = vocabulary_->plain[token] && vocabulary_->characters[token] <= room;
    }
  }

  /// As `walk`, inside a text with a pattern, where nothing but the text changes until it ends.
  void walk_text(const TokenTree& tree, std::uint32_t at, LimitedText text, std::vector<bool>& mask) const {
    for (const auto token : tree.nodes[at].tokens) mask[static_cast<std::size_t>(token)] = true;
    for (const auto& [c, child] : tree.nodes[at].next) {
      auto further = text;
      const auto step = further.step(*states_[0].stack.back().form, c);
      if (step == LimitedText::Step::on) walk_text(tree, child, further, mask);
      if (step != LimitedText::Step::ends) continue;
      auto closing = states_;
      auto& top = closing[0].stack.back();
      top.place = text.place;
      top.index = text.pattern;
      top.count = text.count;
      walk(tree, child, machine_.step(closing, c), mask);
    }
  }

  void walk(const TokenTree& tree, std::uint32_t at, const std::vector<State>& states, std::vector<bool>& mask) const {
    for (const auto token : tree.nodes[at].tokens) mask[static_cast<std::size_t>(token)] = true;
    for (const auto& [c, child] : tree.nodes[at].next) {
      if (const auto next = machine_.step(states, c); !next.empty()) walk(tree, child, next, mask);
    }
  }

  Machine machine_;
  std::vector<State> states_;
  std::size_t read_ = 0;  // tokens of the answer that states_ has seen
  std::shared_ptr<const Vocabulary> vocabulary_;
  const Model& model_;
};

bool has_name(const Json& tool) {
  const auto function = tool.value("function", Json());
  return function.is_object() && function.value("name", Json()).is_string();
}

Schema arguments_of(const Json& tool) {
  auto parameters = tool["function"].value("parameters", Json());
  if (parameters.empty()) parameters = {{"type", "object"}};  // whatever they are, arguments have names
  return read_schema(parameters, "tools");
}

FormPtr call_of(const Json& tool, const Schema& arguments, std::vector<FormPtr>& linked) {
  linked.insert(linked.end(), arguments.linked.begin(), arguments.linked.end());
  auto form = std::make_shared<Form>();
  form->kind = Form::Kind::object;
  form->open = false;
  form->properties = {{"\"name\"", literal(tool["function"]["name"]), true}, {"\"arguments\"", arguments.root, true}};
  return form;
}

/// Calls that nobody insists on: a tool that has no name is not called, and one that describes its arguments in a way
/// that is not understood takes any. Null where none is left.
FormPtr calls_of(const Json& tools, Calls calls, std::vector<FormPtr>& linked) {
  std::vector<FormPtr> forms;
  for (const auto& tool : tools) {
    if (!has_name(tool)) continue;
    Schema arguments;
    try {
      arguments = arguments_of(tool);
    } catch (const Problem&) {
      arguments = read_schema({{"type", "object"}}, "tools");
    }
    forms.push_back(call_of(tool, arguments, linked));
  }
  if (forms.empty()) return nullptr;
  auto form = std::make_shared<Form>();
  form->kind = Form::Kind::calls;
  form->items = any_of(std::move(forms));
  if (calls == Calls::one) form->most = 1;
  return form;
}

void check_end_tokens(const Model& model, const std::string& param) {
  if (!model.end_tokens.empty()) return;
  throw bad_request("'" + param + "' needs a model with an end token (eos_token_id of config.json), and this has none",
                    param);
}

Schema schema_of(const Json& format, const std::string& param) {
  const auto type = format.value("type", Json());
  if (type == "json_object") return read_schema({{"type", "object"}}, param);
  if (type != "json_schema") {
    throw bad_request(
        "'" + param + ".type' takes text, json_object or json_schema, and is " + dumped(type).substr(0, 60), param);
  }
  const auto holder = format.value("json_schema", Json());
  if (!holder.is_object() || !holder.contains("schema")) {
    throw bad_request("'" + param + ".json_schema' takes an object with a schema", param);
  }
  return read_schema(holder["schema"], param);
}

Filters filters(Schema schema, const Model& model) {
  return [shared = std::make_shared<const Schema>(std::move(schema)), &model] {
    return std::make_shared<JsonFilter>(shared, model);
  };
}

}  // namespace

Filters filters_for(const Json& format, const std::string& param, const Json& tools, Calls calls, const Model& model) {
  const Filters none = [] { return nullptr; };
  if (format.is_null()) return none;
  if (!format.is_object()) throw bad_request("'" + param + "' takes an object", param);
  if (format.value("type", Json()) == "text") return none;
  check_end_tokens(model, param);
  auto schema = schema_of(format, param);
  if (auto form = calls_of(tools, calls, schema.linked)) schema.root = any_of({schema.root, std::move(form)});
  return filters(std::move(schema), model);
}

Filters call_filters(const Json& tools, const Model& model) {
  check_end_tokens(model, "tool_choice");
  Schema schema;
  std::vector<FormPtr> calls;
  for (const auto& tool : tools) {
    if (!has_name(tool)) throw bad_request("each of 'tools' takes a function with a name", "tools");
    calls.push_back(call_of(tool, arguments_of(tool), schema.linked));
  }
  schema.root = any_of(std::move(calls));
  return filters(std::move(schema), model);
}

}  // namespace gka::serve
