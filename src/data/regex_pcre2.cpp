// Regular expressions by PCRE2, compiled to machine code where it can.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>
#include <cstdint>
#include <stdexcept>

#include "data/regex.h"

namespace gka::data {
namespace {

/// Machine code keeps what it may have to go back to on a stack of its own; long runs of one kind need some.
constexpr std::size_t kFirstStack = 64 << 10, kLargestStack = 16 << 20;

struct Class {
  char letter;
  const char* inside;   // within [...]
  const char* outside;  // by itself
};

// PCRE2's \s has U+180E, which is no longer a space, and its \w lacks marks and connectors.
constexpr std::array<Class, 4> kClasses{{
    {'s', "\\t-\\r\\x{85}\\p{Z}", "[\\t-\\r\\x{85}\\p{Z}]"},
    {'S', nullptr, "[^\\t-\\r\\x{85}\\p{Z}]"},
    {'w', "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}", "[\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}]"},
    {'W', nullptr, "[^\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}]"},
}};

std::runtime_error not_supported(const std::string& pattern, const std::string& what) {
  return std::runtime_error("not supported: " + what + " in the tokenizer's pattern " + pattern);
}

std::string translate(const std::string& pattern) {
  std::string out;
  bool in_class = false;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char letter = pattern[i];
    if (letter == '\\' && i + 1 < pattern.size()) {
      const char next = pattern[++i];
      const Class* found = nullptr;
      for (const auto& entry : kClasses) {
        if (entry.letter == next) found = &entry;
      }
      if (next == 'h' || next == 'H') throw not_supported(pattern, std::string("\\") + next);
      if (found && in_class && !found->inside) throw not_supported(pattern, std::string("\\") + next + " inside [...]");
      out += found ? std::string(in_class ? found->inside : found->outside) : std::string{letter, next};
      continue;
    }
    if (letter == '[' && !in_class) {
      in_class = true;
      out += letter;
      if (i + 1 < pattern.size() && pattern[i + 1] == '^') out += pattern[++i];
      if (i + 1 < pattern.size() && pattern[i + 1] == ']')
        throw not_supported(pattern, "an empty class or a bare ] in one");
      continue;
    }
    if (in_class && (letter == '[' || pattern.compare(i, 2, "&&") == 0)) {
      throw not_supported(pattern, "a class within a class");
    }
    if (letter == ']') in_class = false;
    out += letter;
  }
  return out;
}

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
  const auto translated = translate(pattern);
  const auto code = std::make_shared<Code>();
  int error = 0;
  PCRE2_SIZE where = 0;
  // Oniguruma's ^ and $ are those of a line.
  code->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                             PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NO_UTF_CHECK, &error, &where, nullptr);
  if (!code->code) {
    throw std::runtime_error("not supported: the tokenizer's pattern " + pattern + " (" + message_of(error) + " at " +
                             std::to_string(where) + ")");
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
