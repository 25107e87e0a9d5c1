#include "serve/pattern.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace gka::serve {
namespace {

constexpr std::size_t kMostNodes = 100'000;
constexpr std::uint32_t kMostRepeats = 1000;
constexpr int kDeepest = 50;  // of groups
constexpr std::uint32_t kLastCharacter = 0x10FFFF;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

using Ranges = std::vector<std::pair<std::uint32_t, std::uint32_t>>;  // of characters, both ends included

/// In order and without overlaps.
Ranges tidied(Ranges ranges) {
  std::ranges::sort(ranges);
  Ranges out;
  for (const auto& [low, high] : ranges) {
    if (!out.empty() && low <= out.back().second + 1) {
      out.back().second = std::max(out.back().second, high);
    } else {
      out.emplace_back(low, high);
    }
  }
  return out;
}

Ranges others(const Ranges& ranges) {
  Ranges out;
  std::uint32_t next = 0;
  for (const auto& [low, high] : tidied(ranges)) {
    if (low > next) out.emplace_back(next, low - 1);
    next = high + 1;
  }
  if (next <= kLastCharacter) out.emplace_back(next, kLastCharacter);
  return out;
}

const Ranges kDigits{{'0', '9'}}, kWord{{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}},
    kSpace{{'\t', '\r'},     {' ', ' '},       {0xA0, 0xA0},     {0x1680, 0x1680}, {0x2000, 0x200A},
           {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}, {0xFEFF, 0xFEFF}},
    kLineEnds{{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};

// --- a machine that may be in several places at once

struct Node {
  enum class Kind : std::uint8_t { bytes, split, begin, end, match } kind = Kind::split;
  unsigned char low = 0, high = 0;    // of bytes
  std::vector<std::uint32_t> next{};  // of bytes one, of a split any number
};

/// A part of the machine: where it is entered, and the node (a split without a way on) that it leads to.
struct Piece {
  std::uint32_t in, out;
};

class Builder {
 public:
  std::vector<Node> nodes;

  std::uint32_t add(Node node) {
    if (nodes.size() >= kMostNodes) refuse("is too large");
    nodes.push_back(std::move(node));
    return static_cast<std::uint32_t>(nodes.size() - 1);
  }
  std::uint32_t split() { return add({.kind = Node::Kind::split}); }
  void link(std::uint32_t from, std::uint32_t to) { nodes[from].next.push_back(to); }

  Piece nothing() {
    const auto at = split();
    return {at, at};
  }
  Piece then(Piece first, Piece second) {
    link(first.out, second.in);
    return {first.in, second.out};
  }
  Piece assertion(Node::Kind kind) {
    const auto at = add({.kind = kind}), out = split();
    link(at, out);
    return {at, out};
  }

  /// One character out of the ranges, as the bytes of its UTF-8.
  Piece character(const Ranges& ranges) {
    const Piece made{split(), split()};
    for (const auto& [low, high] : tidied(ranges)) {
      add_range(made, low, std::min<std::uint32_t>(high, 0xD7FF));
      add_range(made, std::max<std::uint32_t>(low, 0xE000), high);  // no halves of pairs
    }
    return made;
  }

 private:
  static std::string encoded(std::uint32_t c) {
    const auto byte = [](std::uint32_t value) { return static_cast<char>(value); };
    if (c < 0x80) return {byte(c)};
    if (c < 0x800) return {byte(0xC0 | (c >> 6)), byte(0x80 | (c & 63))};
    if (c < 0x10000) return {byte(0xE0 | (c >> 12)), byte(0x80 | ((c >> 6) & 63)), byte(0x80 | (c & 63))};
    return {byte(0xF0 | (c >> 18)), byte(0x80 | ((c >> 12) & 63)), byte(0x80 | ((c >> 6) & 63)), byte(0x80 | (c & 63))};
  }

  /// Cut until all characters of a piece are the same ranges of bytes.
  void add_range(Piece piece, std::uint32_t low, std::uint32_t high) {
    if (low > high) return;
    for (const std::uint32_t last : {0x7FU, 0x7FFU, 0xFFFFU}) {
      if (low <= last && last < high) {
        add_range(piece, low, last);
        return add_range(piece, last + 1, high);
      }
    }
    for (int bits = 6; low >= 0x80 && bits <= 18; bits += 6) {
      const std::uint32_t mask = (1U << bits) - 1;
      if ((low & ~mask) == (high & ~mask)) continue;  // they part further up
      if ((low & mask) != 0) {
        add_range(piece, low, low | mask);
        return add_range(piece, (low | mask) + 1, high);
      }
      if ((high & mask) != mask) {
        add_range(piece, low, (high & ~mask) - 1);
        return add_range(piece, high & ~mask, high);
      }
    }
    const auto first = encoded(low), last = encoded(high);
    auto after = piece.out;
    for (std::size_t i = first.size(); i-- > 0;) {
      after = add({.kind = Node::Kind::bytes,
                   .low = static_cast<unsigned char>(first[i]),
                   .high = static_cast<unsigned char>(last[i]),
                   .next = {after}});
    }
    link(piece.in, after);
  }
};

// --- from an expression to that machine

class Reader {
 public:
  Reader(std::string_view text, Builder& builder) : text_(text), builder_(builder) {}

  Piece read() {
    const auto piece = alternatives(0);
    if (at_ < text_.size()) refuse("has a ) that closes nothing");
    return piece;
  }

 private:
  bool more() const { return at_ < text_.size(); }
  char peek() const { return more() ? text_[at_] : '\0'; }
  bool take(std::string_view word) {
    if (!text_.substr(at_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }

  Piece alternatives(int depth) {
    if (depth > kDeepest) refuse("is nested too deep");
    auto piece = sequence(depth);
    if (peek() != '|') return piece;
    const Piece all{builder_.split(), builder_.split()};
    for (;;) {
      builder_.link(all.in, piece.in);
      builder_.link(piece.out, all.out);
      if (!take("|")) return all;
      piece = sequence(depth);
    }
  }

  Piece sequence(int depth) {
    auto piece = builder_.nothing();
    while (more() && peek() != '|' && peek() != ')') {
      const auto start = at_;
      auto one = atom(depth);
      piece = builder_.then(piece, repeated(one, start, depth));
    }
    return piece;
  }

  /// An atom that is read again for each of its copies.
  Piece again(std::size_t start, int depth) {
    const auto here = std::exchange(at_, start);
    const auto piece = atom(depth);
    at_ = here;
    return piece;
  }

  Piece repeated(Piece piece, std::size_t start, int depth) {
    const auto counts = repetition();
    if (!counts) return piece;
    const auto [least, most] = *counts;
    auto all = builder_.nothing();
    bool fresh = true;  // the piece that was read first is a copy too
    const auto copy = [&] { return std::exchange(fresh, false) ? piece : again(start, depth); };
    for (std::uint32_t i = 0; i < least; ++i) all = builder_.then(all, copy());
    if (most == Pattern::kAny) {
      const auto one = copy();
      const auto hub = builder_.split(), out = builder_.split();
      builder_.link(all.out, hub);
      builder_.link(hub, one.in);
      builder_.link(one.out, hub);
      builder_.link(hub, out);
      return {all.in, out};
    }
    if (most == least) return all;
    const auto out = builder_.split();
    for (auto i = least; i < most; ++i) {
      builder_.link(all.out, out);
      all = builder_.then(all, copy());
    }
    builder_.link(all.out, out);
    return {all.in, out};
  }

  /// How often the atom before may come.
  std::optional<std::pair<std::uint32_t, std::uint32_t>> repetition() {
    std::pair<std::uint32_t, std::uint32_t> counts{0, Pattern::kAny};
    if (take("+")) {
      counts.first = 1;
    } else if (take("?")) {
      counts.second = 1;
    } else if (peek() == '{') {
      if (!braces(counts)) return std::nullopt;
    } else if (!take("*")) {
      return std::nullopt;
    }
    take("?");  // which of several matches is found does not matter here
    if (peek() == '*' || peek() == '+' || peek() == '?') refuse("repeats a repetition");
    return counts;
  }

  bool braces(std::pair<std::uint32_t, std::uint32_t>& counts) {
    const auto end = text_.find('}', at_);
    if (end == std::string_view::npos) refuse("has a { without its }");
    const auto inside = text_.substr(at_ + 1, end - at_ - 1);
    const auto comma = inside.find(',');
    counts.first = count(inside.substr(0, comma));
    counts.second = comma == std::string_view::npos ? counts.first
                    : comma + 1 == inside.size()    ? Pattern::kAny
                                                    : count(inside.substr(comma + 1));
    if (counts.second < counts.first) refuse("has a repetition whose most is below its least");
    at_ = end + 1;
    return true;
  }

  static std::uint32_t count(std::string_view digits) {
    std::uint32_t value = 0;
    for (const char c : digits) {
      if (c < '0' || c > '9') refuse("has a { that is no repetition");
      value = value * 10 + static_cast<std::uint32_t>(c - '0');
      if (value > kMostRepeats) refuse("repeats more than 1000 times");
    }
    if (digits.empty()) refuse("has a { that is no repetition");
    return value;
  }

  Piece atom(int depth) {
    const char c = peek();
    if (c == '(') return group(depth);
    if (c == '[') return builder_.character(set());
    if (take(".")) return builder_.character(others(kLineEnds));
    if (take("^")) return builder_.assertion(Node::Kind::begin);
    if (take("$")) return builder_.assertion(Node::Kind::end);
    if (c == '*' || c == '+' || c == '?') refuse("repeats nothing");
    if (c == '{') refuse("has a { that is no repetition");
    return builder_.character(one());
  }

  Piece group(int depth) {
    ++at_;
    if (take("?")) {
      if (!take(":")) {
        if (peek() == '=' || peek() == '!') refuse("has a look-ahead");
        if (text_.substr(at_).starts_with("<=") || text_.substr(at_).starts_with("<!")) refuse("has a look-behind");
        take("P");  // as Python writes names
        const auto end = text_.find('>', at_);
        if (!take("<") || end == std::string_view::npos) refuse("has a (? that is no group");
        at_ = end + 1;
      }
    }
    const auto piece = alternatives(depth + 1);
    if (!take(")")) refuse("has a ( without its )");
    return piece;
  }

  /// A character, or the class that an escape stands for.
  Ranges one(bool in_set = false) {
    if (!take("\\")) {
      const auto c = character();
      return {{c, c}};
    }
    if (!more()) refuse("ends in a \\");
    const char c = text_[at_++];
    switch (c) {
      case 'd': return kDigits;
      case 'D': return others(kDigits);
      case 'w': return kWord;
      case 'W': return others(kWord);
      case 's': return kSpace;
      case 'S': return others(kSpace);
      case 't': return {{'\t', '\t'}};
      case 'n': return {{'\n', '\n'}};
      case 'r': return {{'\r', '\r'}};
      case 'f': return {{'\f', '\f'}};
      case 'v': return {{'\v', '\v'}};
      case '0': return {{0, 0}};
      case 'x': return same(hexadecimal(2));
      case 'u': return same(hexadecimal(4));
      case 'b':
        if (in_set) return {{'\b', '\b'}};
        break;
      default: break;
    }
    const bool letter = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    if (letter) refuse(std::string("has \\") + c);
    --at_;
    return same(character());
  }

  static Ranges same(std::uint32_t c) { return {{c, c}}; }

  std::uint32_t hexadecimal(std::size_t digits) {
    std::uint32_t value = 0;
    for (std::size_t i = 0; i < digits; ++i) {
      const char c = more() ? text_[at_++] : '\0';
      const bool digit = c >= '0' && c <= '9';
      const char small = static_cast<char>(c | 0x20);
      if (!digit && (small < 'a' || small > 'f')) refuse("has an escape without its digits");
      value = value * 16 + static_cast<std::uint32_t>(digit ? c - '0' : small - 'a' + 10);
    }
    return value;
  }

  /// The next character of the expression, which is UTF-8 (it came as JSON).
  std::uint32_t character() {
    const auto first = static_cast<unsigned char>(text_[at_++]);
    if (first < 0x80) return first;
    const int more_bytes = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
    std::uint32_t c = first & (0x3FU >> more_bytes);
    for (int i = 0; i < more_bytes && more(); ++i) c = (c << 6) | (static_cast<unsigned char>(text_[at_++]) & 63U);
    return c;
  }

  Ranges set() {
    ++at_;
    const bool negated = take("^");
    Ranges all;
    for (;;) {
      if (!more()) refuse("has a [ without its ]");
      if (take("]")) break;
      const auto low = one(true);
      const bool range = peek() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']';
      if (!range) {
        all.insert(all.end(), low.begin(), low.end());
        continue;
      }
      ++at_;
      const auto high = one(true);
      const auto single = [](const Ranges& r) { return r.size() == 1 && r[0].first == r[0].second; };
      if (!single(low) || !single(high) || high[0].first < low[0].first) refuse("has a range that goes backwards");
      all.emplace_back(low[0].first, high[0].first);
    }
    return negated ? others(all) : all;
  }

  std::string_view text_;
  Builder& builder_;
  std::size_t at_ = 0;
};

// --- from that machine to one that is in one place at a time

using Places = std::vector<std::uint32_t>;

class Walker {
 public:
  Walker(const std::vector<Node>& nodes, std::size_t& work) : nodes_(nodes), seen_(nodes.size(), 0), work_(work) {}

  /// All that can be reached without a byte. `begin`, `end`: whether the text begins, or ends, here.
  Places closed(Places from, bool begin, bool end) {
    ++round_;
    Places out;
    while (!from.empty()) {
      const auto at = from.back();
      from.pop_back();
      if (std::exchange(seen_[at], round_) == round_) continue;
      spend(1 + nodes_[at].next.size());
      using Kind = Node::Kind;
      const auto kind = nodes_[at].kind;
      if (kind != Kind::split) out.push_back(at);
      const bool on = kind == Kind::split || (kind == Kind::begin && begin) || (kind == Kind::end && end);
      if (on) from.insert(from.end(), nodes_[at].next.begin(), nodes_[at].next.end());
    }
    std::ranges::sort(out);
    return out;
  }

  bool matches(const Places& places, bool begin) {
    const auto all = closed(places, begin, true);
    return std::ranges::any_of(all, [&](auto at) { return nodes_[at].kind == Node::Kind::match; });
  }

  /// Where every byte leads, for bytes that lead somewhere.
  std::map<Places, std::vector<unsigned char>> steps(const Places& places) {
    std::array<Places, 256> to;
    for (const auto at : places) {
      const auto& node = nodes_[at];
      if (node.kind != Node::Kind::bytes) continue;
      spend(node.high - node.low + 1U);
      for (unsigned byte = node.low; byte <= node.high; ++byte) to[byte].push_back(node.next[0]);
    }
    std::map<Places, std::vector<unsigned char>> by_places;
    for (unsigned byte = 0; byte < 256; ++byte) {
      if (!to[byte].empty()) by_places[to[byte]].push_back(static_cast<unsigned char>(byte));
    }
    return by_places;
  }

 private:
  void spend(std::size_t looks) {
    if (looks > work_) refuse("is too large");
    work_ -= looks;
  }

  const std::vector<Node>& nodes_;
  std::vector<std::uint32_t> seen_;
  std::uint32_t round_ = 0;
  std::size_t& work_;
};

bool starts_character(unsigned byte) { return (byte & 0xC0U) != 0x80U; }

}  // namespace

std::shared_ptr<const Pattern> Pattern::compile(std::string_view expression, Budget& budget) {
  Builder builder;
  const auto anything = [&] {  // what an expression does not hold on to may stand before and after it
    const auto one = builder.character({{0, kLastCharacter}});
    const auto hub = builder.split();
    builder.link(hub, one.in);
    builder.link(one.out, hub);
    return Piece{hub, hub};
  };
  const auto before = anything();
  const auto whole = builder.then(builder.then(before, Reader(expression, builder).read()), anything());
  builder.link(whole.out, builder.add({.kind = Node::Kind::match}));

  Walker walker(builder.nodes, budget.work);
  auto pattern = std::make_shared<Pattern>();
  std::map<std::pair<Places, bool>, std::uint32_t> numbers;
  std::deque<std::pair<Places, bool>> waiting;
  const auto number_of = [&](Places places, bool begin) {
    const auto [found, fresh] = numbers.emplace(std::pair(places, begin), static_cast<std::uint32_t>(numbers.size()));
    if (fresh) {
      if (budget.states == 0) refuse("is too large");
      --budget.states;
      waiting.emplace_back(std::move(places), begin);
    }
    return found->second;
  };
  number_of(walker.closed({whole.in}, true, false), true);
  while (!waiting.empty()) {
    const auto [places, begin] = std::move(waiting.front());
    waiting.pop_front();
    State state;
    state.next.fill(kNowhere);
    state.accepts = walker.matches(places, begin);
    for (const auto& [to, bytes] : walker.steps(places)) {
      const auto next = number_of(walker.closed(to, false, false), false);
      for (const auto byte : bytes) state.next[byte] = next;
    }
    pattern->states_.push_back(state);
  }
  pattern->measure();
  if (pattern->least(kStart) == kNowhere) refuse("matches nothing");
  return pattern;
}

void Pattern::measure() {
  measure_least();
  for (auto& state : states_) {
    for (auto& next : state.next) {
      if (next != kNowhere && states_[next].least == kNowhere) next = kNowhere;  // it could never end there
    }
  }
  measure_most();
}

/// From the ends back; a byte inside a character costs nothing.
void Pattern::measure_least() {
  std::vector<std::vector<std::pair<std::uint32_t, bool>>> from(states_.size());
  std::deque<std::uint32_t> waiting;
  for (std::uint32_t at = 0; at < states_.size(); ++at) {
    for (unsigned byte = 0; byte < 256; ++byte) {
      const auto next = states_[at].next[byte];
      const std::pair entry{at, starts_character(byte)};
      if (next != kNowhere && (from[next].empty() || from[next].back() != entry)) from[next].push_back(entry);
    }
    if (states_[at].accepts) {
      states_[at].least = 0;
      waiting.push_back(at);
    }
  }
  while (!waiting.empty()) {
    const auto at = waiting.front();
    waiting.pop_front();
    for (const auto& [before, counts] : from[at]) {
      const auto least = states_[at].least + (counts ? 1 : 0);
      if (least >= states_[before].least) continue;
      states_[before].least = least;
      counts ? waiting.push_back(before) : waiting.push_front(before);
    }
  }
}

/// The longest way to an end: any number where it can come by the same place again.
void Pattern::measure_most() {
  enum class Seen : std::uint8_t { no, open, done };
  std::vector<Seen> seen(states_.size(), Seen::no);
  std::vector<std::pair<std::uint32_t, unsigned>> path{{kStart, 0}};
  seen[kStart] = Seen::open;
  while (!path.empty()) {
    auto& [at, byte] = path.back();
    auto& state = states_[at];
    if (byte == 256) {
      seen[at] = Seen::done;
      const auto most = state.most;
      path.pop_back();
      if (path.empty()) break;
      auto& before = states_[path.back().first];
      const bool counts = starts_character(path.back().second - 1);
      before.most = most == kAny ? kAny : std::max(before.most, most + (counts ? 1 : 0));
      continue;
    }
    const auto next = state.next[byte++];
    if (next == kNowhere) continue;
    if (seen[next] == Seen::no) {
      seen[next] = Seen::open;
      path.emplace_back(next, 0);
    } else if (seen[next] == Seen::open || states_[next].most == kAny) {
      state.most = kAny;
    } else {
      state.most = std::max(state.most, states_[next].most + (starts_character(byte - 1) ? 1 : 0));
    }
  }
}

}  // namespace gka::serve
