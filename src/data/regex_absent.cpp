// Regular expressions in a build without PCRE2: none.
#include <stdexcept>

#include "data/regex.h"

namespace gka::data {

struct Regex::Code {};
struct Regex::Matcher::Data {};

bool have_regex() { return false; }

Regex::Regex(const std::string& pattern) : pattern_(pattern) {
  throw std::runtime_error(
      "this gka was built without PCRE2, which BPE tokenizers need: install libpcre2-dev and build again, or use the "
      "tokenizer \"bytes\"");
}
Regex::Matcher::Matcher(const Regex&) {}
Regex::Matcher::~Matcher() = default;
Regex::Matcher::Matcher(Matcher&&) noexcept = default;
bool Regex::Matcher::find(std::string_view, std::size_t, Match&) { return false; }

}  // namespace gka::data
