// Cuts a text into the words that are encoded one by one, as the `pre_tokenizer` of a tokenizer.json says.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/regex.h"
#include "gka/types.h"

namespace gka::data {

/// What becomes of the pieces that match a pattern: pieces of their own, dropped, joined with the piece before or
/// after, or with their like.
enum class SplitBehavior : std::uint8_t { isolated, removed, merged_with_previous, merged_with_next, contiguous };

inline constexpr std::array<NameTable<SplitBehavior>, 5> kSplitBehaviorNames{{
    {"Isolated", SplitBehavior::isolated},
    {"Removed", SplitBehavior::removed},
    {"MergedWithPrevious", SplitBehavior::merged_with_previous},
    {"MergedWithNext", SplitBehavior::merged_with_next},
    {"Contiguous", SplitBehavior::contiguous},
}};
constexpr const auto& names_of(SplitBehavior) { return kSplitBehaviorNames; }

/// A pattern to split at; without one, a space put before a piece that has none.
struct PreTokenizerStep {
  std::optional<Regex> pattern{};
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;  // what does not match counts as matching
};

using WordSink = std::function<void(std::string_view word)>;

class PreTokenizer {
 public:
  PreTokenizer() = default;
  explicit PreTokenizer(std::vector<PreTokenizerStep> steps) : steps_(std::move(steps)) {}

  /// One thread's matchers, one per step.
  class Scratch {
   public:
    explicit Scratch(const PreTokenizer& of);

   private:
    friend class PreTokenizer;
    std::vector<std::optional<Regex::Matcher>> matchers_;
  };

  /// Hands the words of a text (valid UTF-8) to `sink`, in order. They live until the sink returns.
  void split(std::string_view text, Scratch& scratch, const WordSink& sink) const;

 private:
  /// A text, and what the patterns see of it: the same, or with older characters in the place of very new ones.
  struct Text {
    std::string_view bytes, seen;
    Text part(std::size_t first, std::size_t last) const {
      return {bytes.substr(first, last - first), seen.substr(first, last - first)};
    }
  };
  void apply(std::size_t step, const Text& text, Scratch& scratch, const WordSink& sink) const;
  void apply_pattern(std::size_t step, const Text& text, Scratch& scratch, const WordSink& sink) const;

  std::vector<PreTokenizerStep> steps_;
};

/// Patterns people know by a name.
struct KnownPattern {
  std::string_view name;
  std::string_view pattern;
  bool nfc;  // the models that use it normalise first
};
inline constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
inline constexpr std::array<KnownPattern, 3> kKnownPatterns{{
    {"gpt2", kGpt2Pattern, false},
    {"llama3",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     false},
    {"qwen2",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     true},
}};

}  // namespace gka::data
