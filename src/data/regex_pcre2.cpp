// Regular expressions by PCRE2, compiled to machine code where it can.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <vector>

#include "data/regex.h"
#include "data/unicode.h"

namespace gka::data {
namespace {

/// Machine code keeps what it may have to go back to on a stack of its own; long runs of one kind need some.
constexpr std::size_t kFirstStack = 64 << 10, kLargestStack = 16 << 20;

/// Oniguruma's \w: letters, marks, digits, connectors, and the letters in circles and squares; by itself, but not
/// inside
/// [...], ² ³ ¹ ¼ ½ ¾ as well. PCRE2's lacks marks and connectors.
constexpr std::string_view kWord =
    R"(\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\x{24b6}-\x{24e9}\x{1f130}-\x{1f149}\x{1f150}-\x{1f169}\x{1f170}-\x{1f189})";
constexpr std::string_view kLatinToo = R"(\x{b2}\x{b3}\x{b9}\x{bc}-\x{be})";
/// PCRE2's \s has U+180E, which is no longer a space.
constexpr std::string_view kSpace = R"(\t-\r\x{85}\p{Z})";

/// What a letter behind a backslash becomes, ~w, ~l and ~s being the classes above; none: it cannot stand there.
struct Escape {
  char letter;
  const char* inside;   // within [...]
  const char* outside;  // by itself
};

constexpr std::array<Escape, 17> kEscapes{{
    {'s', "~s", "[~s]"},
    {'S', nullptr, "[^~s]"},
    {'w', "~w", "[~w~l]"},
    {'W', nullptr, "[^~w~l]"},
    {'b', nullptr, "(?:(?<=[~w~l])(?![~w~l])|(?<![~w~l])(?=[~w~l]))"},
    {'B', nullptr, "(?:(?<=[~w~l])(?=[~w~l])|(?<![~w~l])(?![~w~l]))"},
    {'d', R"(\p{Nd})", R"(\p{Nd})"},
    {'D', R"(\P{Nd})", R"(\P{Nd})"},
    {'t', R"(\t)", R"(\t)"},
    {'n', R"(\n)", R"(\n)"},
    {'r', R"(\r)", R"(\r)"},
    {'f', R"(\f)", R"(\f)"},
    {'v', R"(\x0B)", R"(\x0B)"},  // PCRE2: any vertical space
    {'a', R"(\x07)", R"(\x07)"},
    {'e', R"(\x1B)", R"(\x1B)"},
    {'A', nullptr, R"(\A)"},
    {'z', nullptr, R"(\z)"},
}};

std::string spelled_out(std::string_view meaning) {
  std::string text;
  for (std::size_t i = 0; i < meaning.size(); ++i) {
    if (meaning[i] != '~') {
      text += meaning[i];
      continue;
    }
    const char which = meaning[++i];
    text += which == 'w' ? kWord : which == 'l' ? kLatinToo : kSpace;
  }
  return text;
}

/// \\p{...} by categories means the same in both.
constexpr std::string_view kCategories =
    " L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp C Cc Cf Co ";
/// Scripts that both know with the same characters. By a script's name alone PCRE2 means its extensions too: 、 and 。
/// would count as Han. Those that got characters since PCRE2's Unicode are not here.
constexpr std::array<std::string_view, 11> kScripts{"Han",  "Hiragana", "Katakana", "Hangul",  "Greek",   "Hebrew",
                                                    "Thai", "Tamil",    "Armenian", "Tibetan", "Bopomofo"};

std::string shortened(const std::string& pattern) {
  return pattern.size() <= 200 ? pattern : pattern.substr(0, 197) + "...";
}

/// Rewrites a pattern for Oniguruma (in Ruby's syntax, as the `tokenizers` package has it) into one for PCRE2 that
/// matches the same. What might not is refused by name.
class Translator {
 public:
  explicit Translator(const std::string& pattern) : pattern_(pattern) {}

  std::string all() {
    while (at_ < pattern_.size()) one();
    return std::move(out_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    throw std::runtime_error("not supported: " + what + " in the tokenizer's pattern " + shortened(pattern_));
  }

  bool next_is(std::string_view text) const { return std::string_view(pattern_).substr(at_).starts_with(text); }
  char peek() const { return at_ < pattern_.size() ? pattern_[at_] : '\0'; }
  bool ignores_case() const { return ignore_case_.back(); }

  void one() {
    switch (peek()) {
      case '\\': return escape(false);
      case '[': return char_class();
      case '(': return open();
      case ')':
        if (ignore_case_.size() > 1) ignore_case_.pop_back();
        return copy();
      case '{': return repeat();
      default: return literal();
    }
  }

  void copy() {
    last_letter_ = '\0';
    out_ += pattern_[at_++];
  }

  /// A character that stands for itself, or one of . ^ $ | * + ? that mean the same in both.
  void literal() {
    const char letter = peek();
    if (ignores_case()) check_folds(letter);
    copy();
    last_letter_ = letter;
  }

  /// Without regard to case Oniguruma lets one character stand for several (ß for ss, ﬁ for fi), and PCRE2 does not.
  void check_folds(char letter) const {
    if (letter & 0x80) refuse("a letter beyond ASCII where case is ignored");
    constexpr std::array<std::string_view, 5> kPairs{"ss", "ff", "fi", "fl", "st"};
    const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; };
    const std::array<char, 2> pair{lower(last_letter_), lower(letter)};
    for (const auto folded : kPairs) {
      if (folded == std::string_view(pair.data(), 2)) refuse("'" + std::string(folded) + "' where case is ignored");
    }
  }

  void escape(bool in_class) {
    last_letter_ = '\0';
    if (++at_ == pattern_.size()) refuse("a backslash at the end");
    const char letter = pattern_[at_];
    const bool named = (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z');
    const bool digit = letter >= '0' && letter <= '9';
    if (letter == 'p' || letter == 'P') return property();
    if (letter == 'x' || letter == 'u') return number(in_class);
    if (!named && !digit) {
      if (ignores_case()) check_folds(letter);
      out_ += '\\';
      return copy();
    }
    for (const auto& entry : kEscapes) {
      if (entry.letter != letter) continue;
      const char* meaning = in_class ? entry.inside : entry.outside;
      if (!meaning) refuse(std::string("\\") + letter + " inside [...]");
      out_ += spelled_out(meaning);
      ++at_;
      return;
    }
    refuse(std::string("\\") + letter);
  }

  void property() {
    const bool negated = pattern_[at_++] == 'P';
    const auto end = pattern_.find('}', at_);
    if (peek() != '{' || end == std::string::npos) refuse("\\p without {...}");
    auto name = pattern_.substr(at_ + 1, end - at_ - 1);
    const bool inverted = name.starts_with('^');
    if (inverted) name.erase(0, 1);
    const bool category =
        name.find(' ') == std::string::npos && kCategories.find(" " + name + " ") != std::string::npos;
    const bool script = std::ranges::find(kScripts, name) != kScripts.end();
    if (!category && !script) refuse("\\p{" + name + "}");
    if (ignores_case() && (name == "Lu" || name == "Ll" || name == "Lt")) {
      refuse("\\p{" + name + "} where case is ignored");
    }
    out_ += (negated != inverted ? "\\P{" : "\\p{") + std::string(script ? "sc:" : "") + name + "}";
    at_ = end + 1;
  }

  /// \\x{1F600}, \\x41, \\u0041. Two hexadecimal digits of 80 and above would be a byte.
  void number(bool in_class) {
    const char letter = pattern_[at_++];
    const bool braces = letter == 'x' && peek() == '{';
    const auto digits = braces ? pattern_.find('}', at_) - at_ - 1 : letter == 'x' ? 2 : 4;
    const auto start = at_ + (braces ? 1 : 0);
    std::uint32_t code = 0;
    const auto* first = pattern_.data() + start;
    const auto* last = start + digits <= pattern_.size() ? first + digits : first;
    const auto read = std::from_chars(first, last, code, 16);
    if (first == last || read.ptr != last || read.ec != std::errc() || code > 0x10FFFF) {
      refuse(std::string("\\") + letter + " without its number");
    }
    if (letter == 'x' && !braces && code >= 0x80) refuse("\\x80 and above, which is a byte");
    if (ignores_case() && code >= 0x80) refuse("a letter beyond ASCII where case is ignored");
    if (ignores_case() && !in_class) check_folds(static_cast<char>(code));
    std::array<char, 16> text{};
    std::snprintf(text.data(), text.size(), "\\x{%x}", static_cast<unsigned>(code));
    out_ += text.data();
    at_ = start + digits + (braces ? 1 : 0);
    last_letter_ = code < 0x80 ? static_cast<char>(code) : '\0';
  }

  void char_class() {
    copy();
    if (peek() == '^') copy();
    if (peek() == ']') refuse("an empty class or a bare ] in one");
    while (peek() != ']') {
      if (at_ >= pattern_.size()) refuse("a class that does not end");
      if (peek() == '[' || next_is("&&")) refuse("a class within a class");
      if (peek() == '\\') {
        escape(true);
        continue;
      }
      if (ignores_case() && (peek() & 0x80)) refuse("a letter beyond ASCII where case is ignored");
      copy();
    }
    copy();
    last_letter_ = '\0';
  }

  void open() {
    last_letter_ = '\0';
    if (next_is("(*")) refuse("(*");
    ignore_case_.push_back(ignores_case());
    if (!next_is("(?")) return copy();
    for (const std::string_view same : {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!"}) {
      if (!next_is(same)) continue;
      out_ += same;
      at_ += same.size();
      return;
    }
    options();
  }

  /// (?i:...), (?m-i:...); m is what PCRE2 calls s. Without a colon they hold for what follows, and where that ends the
  /// two do not agree, except at the very start.
  void options() {
    const auto start = at_;
    at_ += 2;
    out_ += "(?";
    bool on = true, ignore = ignores_case();
    for (; peek() == 'i' || peek() == 'm' || peek() == '-'; ++at_) {
      if (peek() == '-') on = false;
      if (peek() == 'i') ignore = on;
      out_ += peek() == 'm' ? 's' : peek();
    }
    if (peek() == ':') {
      ignore_case_.back() = ignore;
    } else if (peek() == ')' && start == 0) {
      ignore_case_.pop_back();
      ignore_case_.back() = ignore;
    } else {
      refuse("a group that begins with " + pattern_.substr(start, std::min<std::size_t>(4, pattern_.size() - start)));
    }
    copy();
  }

  std::optional<int> count() {
    int value = 0;
    const auto* first = pattern_.data() + at_;
    const auto read = std::from_chars(first, pattern_.data() + pattern_.size(), value);
    if (read.ec != std::errc() || value < 0) return std::nullopt;
    at_ += static_cast<std::size_t>(read.ptr - first);
    return value;
  }

  /// {n}, {n,}, {n,m} and {,m}, which PCRE2 does not know. {n,m}+ repeats the whole in Oniguruma and never gives back
  /// in PCRE2; {n}? makes it optional there and is idle here.
  void repeat() {
    last_letter_ = '\0';
    const auto start = at_++;
    const auto least = count();
    const bool comma = peek() == ',';
    if (comma) ++at_;
    const auto most = comma ? count() : least;
    if (peek() != '}' || (!least && !most)) {
      at_ = start + 1;
      out_ += "\\{";
      return;
    }
    ++at_;
    if (peek() == '+') refuse("{n,m}+");
    if (peek() == '?' && !comma) refuse("{n}?");
    if (most && least.value_or(0) > *most) refuse("{n,m} with n above m");
    out_ += "{" + std::to_string(least.value_or(0)) + (comma ? "," : "") +
            (comma && most ? std::to_string(*most) : "") + "}";
  }

  const std::string& pattern_;
  std::size_t at_ = 0;
  std::string out_;
  std::vector<bool> ignore_case_{false};  // of each group that is open
  char last_letter_ = '\0';               // where the last thing was a letter that stands for itself
};

std::string message_of(int error) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(error, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

}  // namespace

struct Regex::Code {
  pcre2_code* code = nullptr;
  bool machine_code = false;
  ~Code() { pcre2_code_free(code); }
};

bool have_regex() { return true; }

Regex::Regex(const std::string& pattern) : pattern_(pattern) {
  if (!is_utf8(pattern)) throw std::runtime_error("the tokenizer's pattern is not valid UTF-8");
  const auto translated = Translator(pattern).all();
  const auto code = std::make_shared<Code>();
  int error = 0;
  PCRE2_SIZE where = 0;
  // Oniguruma's ^ and $ are those of a line.
  code->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                             PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NO_UTF_CHECK, &error, &where, nullptr);
  if (!code->code) {
    throw std::runtime_error("not supported: the tokenizer's pattern " + shortened(pattern) + " (" + message_of(error) +
                             " at " + std::to_string(where) + ")");
  }
  code->machine_code = pcre2_jit_compile(code->code, PCRE2_JIT_COMPLETE) == 0;
  code_ = code;
}

struct Regex::Matcher::Data {
  std::shared_ptr<const Code> code;
  pcre2_match_data* match;
  pcre2_match_context* context;
  pcre2_jit_stack* stack = nullptr;

  explicit Data(std::shared_ptr<const Code> of)
      : code(std::move(of)),
        match(pcre2_match_data_create_from_pattern(code->code, nullptr)),
        context(pcre2_match_context_create(nullptr)) {
    if (!match || !context) throw std::bad_alloc();
    if (!code->machine_code) return;
    stack = pcre2_jit_stack_create(kFirstStack, kLargestStack, nullptr);
    pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~Data() {
    pcre2_match_data_free(match);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
  }
  Data(const Data&) = delete;
  Data& operator=(const Data&) = delete;
};

Regex::Matcher::Matcher(const Regex& regex) : data_(std::make_unique<Data>(regex.code_)) {}
Regex::Matcher::~Matcher() = default;
Regex::Matcher::Matcher(Matcher&&) noexcept = default;

bool Regex::Matcher::find(std::string_view text, std::size_t from, Match& match) {
  const auto& d = *data_;
  const auto search = [&](auto by, std::uint32_t options) {
    return by(d.code->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from, PCRE2_NO_UTF_CHECK | options,
              d.match, d.context);
  };
  int found = d.code->machine_code ? search(pcre2_jit_match, 0) : search(pcre2_match, 0);
  if (found == PCRE2_ERROR_JIT_STACKLIMIT) found = search(pcre2_match, PCRE2_NO_JIT);
  if (found == PCRE2_ERROR_NOMATCH) return false;
  if (found < 0) throw std::runtime_error("the tokenizer's pattern failed on this text: " + message_of(found));
  const auto* bounds = pcre2_get_ovector_pointer(d.match);
  match = {bounds[0], bounds[1]};
  return true;
}

}  // namespace gka::data
