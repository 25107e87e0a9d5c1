// The regular expressions of tokenizers, by PCRE2. A tokenizer.json is written for Oniguruma; where both read the same
// letters differently (\s, \w, line ends), the pattern is translated first, and what cannot be is refused.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace gka::data {

/// Whether this build has PCRE2; without it the constructor of Regex throws and says so.
bool have_regex();

class Regex {
 public:
  explicit Regex(const std::string& pattern);

  const std::string& pattern() const { return pattern_; }

  /// What one thread needs to search; make one and keep it.
  class Matcher {
   public:
    explicit Matcher(const Regex& regex);
    ~Matcher();
    Matcher(Matcher&& other) noexcept;

    struct Match {
      std::size_t first, last;  // [first, last) in the text
    };
    /// The first match from `from` on; false: none. The text is valid UTF-8.
    bool find(std::string_view text, std::size_t from, Match& match);

   private:
    struct Data;
    std::unique_ptr<Data> data_;
  };

 private:
  struct Code;
  std::string pattern_;
  std::shared_ptr<const Code> code_;
};

}  // namespace gka::data
