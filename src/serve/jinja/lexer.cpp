#include "serve/jinja/lexer.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "serve/jinja/value.h"

namespace gka::serve::jinja {
namespace {

constexpr std::array<std::string_view, 26> kSymbols{"//", "**", "==", "!=", "<=", ">=", "+", "-", "*",
                                                    "/",  "%",  "~",  "<",  ">",  "=",  "(", ")", "[",
                                                    "]",  "{",  "}",  ",",  ".",  ":",  "|", ";"};

bool starts_name(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

void append_code(std::string& text, unsigned code) {
  if (code < 0x80) {
    text += static_cast<char>(code);
  } else if (code < 0x800) {
    text += static_cast<char>(0xC0 | (code >> 6));
    text += static_cast<char>(0x80 | (code & 0x3F));
  } else {
    text += static_cast<char>(0xE0 | (code >> 12));
    text += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
    text += static_cast<char>(0x80 | (code & 0x3F));
  }
}

std::string normalized(std::string_view source) {
  std::string text;
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r') {
      text += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    } else {
      text += source[i];
    }
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(normalized(source)) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) data();
    add(TokenKind::end, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(const std::string& message) const { throw Error(message, line_); }
  bool here(std::string_view word) const { return std::string_view(source_).substr(at_).starts_with(word); }
  void add(TokenKind kind, std::string value) { tokens_.push_back({kind, std::move(value), line_}); }

  /// Moves on, counting lines.
  void advance(std::size_t to) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                                         source_.begin() + static_cast<std::ptrdiff_t>(to), '\n'));
    at_ = to;
  }

  std::size_t find_tag(std::size_t from) const {
    for (auto i = source_.find('{', from); i != std::string::npos; i = source_.find('{', i + 1)) {
      if (i + 1 < source_.size() && std::string_view("{%#").find(source_[i + 1]) != std::string_view::npos) return i;
    }
    return source_.size();
  }

  /// The text before a tag whose sign is '-', '+' or nothing.
  std::string before_tag(std::size_t from, std::size_t to, char sign, bool variable) const {
    std::string text = source_.substr(from, to - from);
    if (sign == '-') {
      while (!text.empty() && is_python_space(text.back())) text.pop_back();
    } else if (sign != '+' && !variable) {
      const auto newline = text.rfind('\n');
      const auto start = newline == std::string::npos ? 0 : newline + 1;
      const bool line_start = start > 0 || line_starting_;
      if (line_start && std::all_of(text.begin() + static_cast<std::ptrdiff_t>(start), text.end(), is_python_space)) {
        text.resize(start);
      }
    }
    return text;
  }

  char sign_at(std::size_t place) const {
    const char c = place < source_.size() ? source_[place] : '\0';
    return c == '-' || c == '+' ? c : '\0';
  }

  /// Text up to the next tag, and the tag.
  void data() {
    const auto tag = find_tag(at_);
    const bool any = tag < source_.size();
    const char opened = any ? source_[tag + 1] : '\0';
    const char sign = any ? sign_at(tag + 2) : '\0';
    auto text = any ? before_tag(at_, tag, sign, opened == '{') : source_.substr(at_);
    if (!text.empty()) add(TokenKind::data, std::move(text));
    advance(tag);
    if (!any) return;
    if (opened == '#') return comment();
    advance(tag + 2 + (sign == '\0' ? 0 : 1));
    if (opened == '%' && raw()) return;
    add(opened == '{' ? TokenKind::output_begin : TokenKind::block_begin, "");
    inside(opened == '{');
  }

  /// What follows a tag that ended just before at_: '-' takes all white space, a block or comment one newline.
  void after_tag(char sign, bool variable) {
    auto to = at_;
    if (sign == '-') {
      while (to < source_.size() && is_python_space(source_[to])) ++to;
    } else if (sign != '+' && !variable && to < source_.size() && source_[to] == '\n') {
      ++to;
    }
    advance(to);
    line_starting_ = at_ > 0 && source_[at_ - 1] == '\n';
  }

  void comment() {
    const auto end = source_.find("#}", at_ + 2);
    if (end == std::string::npos) fail("a comment is not closed: #} is missing");
    const char sign = end > at_ + 1 ? sign_at(end - 1) : '\0';
    advance(end + 2);
    after_tag(sign, false);
  }

  /// {% raw %} … {% endraw %}; at_ is behind "{%".
  bool raw() {
    auto to = skip_space(at_);
    if (!std::string_view(source_).substr(to).starts_with("raw")) return false;
    to = skip_space(to + 3);
    const char sign = sign_at(to);
    if (sign != '\0') ++to;
    if (!std::string_view(source_).substr(to).starts_with("%}")) return false;
    advance(to + 2);
    after_tag(sign, false);
    for (auto tag = source_.find("{%", at_); tag != std::string::npos; tag = source_.find("{%", tag + 2)) {
      const char open = sign_at(tag + 2);
      auto inner = skip_space(tag + 2 + (open == '\0' ? 0 : 1));
      if (!std::string_view(source_).substr(inner).starts_with("endraw")) continue;
      inner = skip_space(inner + 6);
      const char close = sign_at(inner);
      if (close != '\0') ++inner;
      if (!std::string_view(source_).substr(inner).starts_with("%}")) continue;
      auto text = before_tag(at_, tag, open, false);
      if (!text.empty()) add(TokenKind::data, std::move(text));
      advance(inner + 2);
      after_tag(close, false);
      return true;
    }
    fail("{% raw %} is not closed: {% endraw %} is missing");
  }

  std::size_t skip_space(std::size_t from) const {
    while (from < source_.size() && is_python_space(source_[from])) ++from;
    return from;
  }

  /// The tokens of one tag, its end included.
  void inside(bool variable) {
    const std::string_view close = variable ? "}}" : "%}";
    int open = 0;  // brackets: a dictionary's '}}' does not end a tag
    for (;;) {
      advance(skip_space(at_));
      if (at_ >= source_.size()) fail("a tag is not closed: " + std::string(close) + " is missing");
      const char sign = sign_at(at_);
      const auto behind = at_ + (sign == '\0' ? 0 : 1);
      if (open == 0 && std::string_view(source_).substr(behind).starts_with(close)) {
        add(variable ? TokenKind::output_end : TokenKind::block_end, "");
        advance(behind + 2);
        return after_tag(sign, variable);
      }
      token(open);
    }
  }

  void token(int& open) {
    const char c = source_[at_];
    if (starts_name(c)) return word();
    if (is_digit(c)) return number();
    if (c == '"' || c == '\'') return quoted(c);
    const auto symbol = std::ranges::find_if(kSymbols, [&](auto known) { return here(known); });
    if (symbol == kSymbols.end()) fail("the character '" + std::string(1, c) + "' means nothing here");
    if (c == '(' || c == '[' || c == '{') ++open;
    if (c == ')' || c == ']' || c == '}') {
      if (--open < 0) fail("'" + std::string(1, c) + "' closes nothing");
    }
    add(TokenKind::symbol, std::string(*symbol));
    advance(at_ + symbol->size());
  }

  void word() {
    auto to = at_;
    while (to < source_.size() && (starts_name(source_[to]) || is_digit(source_[to]))) ++to;
    add(TokenKind::name, source_.substr(at_, to - at_));
    advance(to);
  }

  void number() {
    auto to = at_;
    const auto digits = [&] {
      while (to < source_.size() && (is_digit(source_[to]) || source_[to] == '_')) ++to;
    };
    digits();
    bool real = false;
    if (to + 1 < source_.size() && source_[to] == '.' && is_digit(source_[to + 1])) {
      real = true;
      ++to;
      digits();
    }
    if (to < source_.size() && (source_[to] == 'e' || source_[to] == 'E')) {
      const auto sign = sign_at(to + 1) == '\0' ? to + 1 : to + 2;
      if (sign < source_.size() && is_digit(source_[sign])) {
        real = true;
        to = sign;
        digits();
      }
    }
    auto value = source_.substr(at_, to - at_);
    std::erase(value, '_');
    add(real ? TokenKind::real : TokenKind::integer, std::move(value));
    advance(to);
  }

  void quoted(char quote) {
    std::string value;
    auto to = at_ + 1;
    for (; to < source_.size() && source_[to] != quote; ++to) {
      if (source_[to] == '\\' && to + 1 < source_.size()) {
        to = escape(to + 1, value);
      } else {
        value += source_[to];
      }
    }
    if (to >= source_.size()) fail("a text is not closed: " + std::string(1, quote) + " is missing");
    add(TokenKind::text, std::move(value));
    advance(to + 1);
  }

  /// `at` is behind the backslash; returns the escape's last character.
  std::size_t escape(std::size_t at, std::string& value) const {
    static constexpr std::pair<char, char> kPlain[] = {{'n', '\n'}, {'t', '\t'},  {'r', '\r'},  {'b', '\b'},
                                                       {'f', '\f'}, {'\\', '\\'}, {'\'', '\''}, {'"', '"'},
                                                       {'a', '\a'}, {'v', '\v'},  {'0', '\0'}};
    const char c = source_[at];
    if (c == '\n') return at;
    const std::size_t digits = c == 'u' ? 4 : c == 'x' ? 2 : 0;
    if (digits > 0 && at + digits < source_.size()) {
      const auto hex = source_.substr(at + 1, digits);
      if (std::ranges::all_of(hex, [](unsigned char d) { return std::isxdigit(d) != 0; })) {
        append_code(value, static_cast<unsigned>(std::stoul(hex, nullptr, 16)));
        return at + digits;
      }
    }
    const auto* known = std::ranges::find_if(kPlain, [&](const auto& entry) { return entry.first == c; });
    if (known == std::end(kPlain)) {
      value += '\\';
      value += c;
    } else {
      value += known->second;
    }
    return at;
  }

  std::string source_;
  std::size_t at_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(source).run(); }

}  // namespace gka::serve::jinja
