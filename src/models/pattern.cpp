#include "models/pattern.h"

#include <cctype>
#include <cstddef>
#include <stdexcept>

namespace gka::models {
namespace {

constexpr std::size_t kMostBlocks = 10'000;
constexpr int kDeepest = 50;  // groups within groups; each is a call on the stack

bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }

bool is_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '*'; }

class Parser {
 public:
  explicit Parser(std::string_view pattern) : pattern_(pattern) {}

  std::vector<std::string> all() {
    auto tokens = sequence();
    if (place_ < pattern_.size()) fail("'-' or the end");
    return tokens;
  }

 private:
  std::vector<std::string> sequence() {
    auto tokens = item();
    while (take('-')) append(tokens, item());
    return tokens;
  }

  std::vector<std::string> item() {
    const auto times = repeats();
    std::vector<std::string> once;
    if (take('(')) {
      if (++depth_ > kDeepest) fail("at most " + std::to_string(kDeepest) + " groups within each other");
      once = sequence();
      --depth_;
      if (!take(')')) fail("')' that closes the group");
    } else {
      once.push_back(token());
    }
    std::vector<std::string> tokens;
    for (std::size_t i = 0; i < times; ++i) append(tokens, once);
    return tokens;
  }

  /// `12x`, or 1 where there is none. A token may contain digits but never starts with one.
  std::size_t repeats() {
    if (!is_digit(peek())) return 1;
    std::size_t times = 0;
    while (is_digit(peek())) {
      times = times * 10 + static_cast<std::size_t>(pattern_[place_++] - '0');
      if (times > kMostBlocks) fail("at most " + std::to_string(kMostBlocks) + " blocks");
    }
    if (!take('x')) fail("'x' after the number of repeats, as in 3xGKA");
    if (times == 0) fail("a number of repeats of 1 or more");
    return times;
  }

  std::string token() {
    const auto start = place_;
    while (is_name(peek())) ++place_;
    if (place_ == start) fail("a block's name, such as * or GKA");
    return std::string(pattern_.substr(start, place_ - start));
  }

  void append(std::vector<std::string>& tokens, const std::vector<std::string>& more) {
    tokens.insert(tokens.end(), more.begin(), more.end());
    if (tokens.size() > kMostBlocks) fail("at most " + std::to_string(kMostBlocks) + " blocks");
  }

  char peek() const { return place_ < pattern_.size() ? pattern_[place_] : '\0'; }

  bool take(char c) {
    if (peek() != c) return false;
    ++place_;
    return true;
  }

  [[noreturn]] void fail(const std::string& wanted) const {
    const auto text = pattern_.size() <= 200 ? std::string(pattern_) : std::string(pattern_.substr(0, 197)) + "...";
    throw std::runtime_error("the pattern '" + text + "' cannot be read at position " + std::to_string(place_ + 1) +
                             ", which takes " + wanted);
  }

  std::string_view pattern_;
  std::size_t place_ = 0;
  int depth_ = 0;
};

}  // namespace

std::vector<std::string> expand_pattern(std::string_view pattern) { return Parser(pattern).all(); }

std::string join_pattern(const std::vector<std::string>& tokens) {
  std::string pattern;
  for (const auto& token : tokens) pattern += (pattern.empty() ? "" : "-") + token;
  return pattern;
}

}  // namespace gka::models
