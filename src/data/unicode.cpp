#include "data/unicode.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

namespace gka::data {
namespace {

constexpr char32_t kReplacement = 0xFFFD;

struct CombiningRun {
  char32_t first, last;
  unsigned char combining_class;
};

/// `composed` in its two parts, or in one where `second` is 0.
struct Decomposition {
  char32_t composed, first, second;
  bool composes;  // the parts become one again
};

#include "data/nfc_tables.inc"

// Hangul syllables are composed by arithmetic: leading consonant, vowel, and perhaps a trailing consonant.
constexpr char32_t kSyllable = 0xAC00, kLeading = 0x1100, kVowel = 0x1161, kTrailing = 0x11A7;
constexpr char32_t kLeadings = 19, kVowels = 21, kTrailings = 28, kSyllables = kLeadings * kVowels * kTrailings;

int combining_class(char32_t code) {
  if (code < 0x300) return 0;
  const auto run = std::ranges::lower_bound(kCombining, code, {}, &CombiningRun::last);
  return run != std::end(kCombining) && run->first <= code ? run->combining_class : 0;
}

void decompose(char32_t code, std::vector<char32_t>& out) {
  if (code - kSyllable < kSyllables) {
    const auto index = code - kSyllable;
    out.push_back(kLeading + index / (kVowels * kTrailings));
    out.push_back(kVowel + index / kTrailings % kVowels);
    if (index % kTrailings != 0) out.push_back(kTrailing + index % kTrailings);
    return;
  }
  const auto found = std::ranges::lower_bound(kDecompositions, code, {}, &Decomposition::composed);
  if (found == std::end(kDecompositions) || found->composed != code) {
    out.push_back(code);
    return;
  }
  decompose(found->first, out);
  if (found->second != 0) decompose(found->second, out);
}

/// The decompositions that compose, in order of their parts.
const std::vector<Decomposition>& compositions() {
  static const auto sorted = [] {
    std::vector<Decomposition> all;
    std::ranges::copy_if(kDecompositions, std::back_inserter(all), &Decomposition::composes);
    std::ranges::sort(all, {}, [](const auto& entry) { return std::pair(entry.first, entry.second); });
    return all;
  }();
  return sorted;
}

/// What two characters make together, 0: nothing.
char32_t composed(char32_t first, char32_t second) {
  if (first - kLeading < kLeadings && second - kVowel < kVowels) {
    return kSyllable + ((first - kLeading) * kVowels + (second - kVowel)) * kTrailings;
  }
  if (first - kSyllable < kSyllables && (first - kSyllable) % kTrailings == 0 && second > kTrailing &&
      second < kTrailing + kTrailings) {
    return first + (second - kTrailing);
  }
  const auto parts = [](const auto& entry) { return std::pair(entry.first, entry.second); };
  const auto found = std::ranges::lower_bound(compositions(), std::pair(first, second), {}, parts);
  return found != compositions().end() && parts(*found) == std::pair(first, second) ? found->composed : 0;
}

/// Marks in the order of their classes; those of one class keep theirs.
void reorder(std::vector<char32_t>& text) {
  for (auto from = text.begin(); from != text.end();) {
    if (combining_class(*from) == 0) {
      ++from;
      continue;
    }
    const auto to = std::find_if(from, text.end(), [](char32_t code) { return combining_class(code) == 0; });
    std::stable_sort(from, to, [](char32_t a, char32_t b) { return combining_class(a) < combining_class(b); });
    from = to;
  }
}

/// Joins each mark with the last starter unless another of its class or higher stands between.
void recompose(std::vector<char32_t>& text) {
  std::size_t kept = 0, starter = 0;
  bool has_starter = false;
  int last_class = -1;  // of what was kept after the starter
  for (const auto code : text) {
    const int own_class = combining_class(code);
    if (has_starter && (last_class < own_class)) {
      if (const auto both = composed(text[starter], code); both != 0) {
        text[starter] = both;
        continue;
      }
    }
    if (own_class == 0) {
      starter = kept;
      has_starter = true;
      last_class = -1;
    } else {
      last_class = own_class;
    }
    text[kept++] = code;
  }
  text.resize(kept);
}

/// Nothing below U+0300 is changed by composition, nor combines with what comes before it.
bool below_combining(std::string_view text) {
  return std::ranges::all_of(text, [](char byte) { return static_cast<unsigned char>(byte) < 0xCC; });
}

bool is_ascii(std::string_view text) {
  std::size_t at = 0;
  for (; at + 8 <= text.size(); at += 8) {
    std::uint64_t word;
    std::memcpy(&word, text.data() + at, 8);
    if (word & 0x8080808080808080) return false;
  }
  return std::all_of(text.begin() + static_cast<std::ptrdiff_t>(at), text.end(), [](char byte) { return byte >= 0; });
}

}  // namespace

Character read_character(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[at + i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {lead, 1, true, false};
  const std::size_t length = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  if (length == 0) return {kReplacement, 1, false, false};

  // The second byte is where overlong forms, surrogates and numbers beyond U+10FFFF show.
  const unsigned least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  char32_t code = lead & (0x7F >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if (at + i == text.size()) return {kReplacement, i, false, true};
    const unsigned next = byte(i);
    if (next < (i == 1 ? least : 0x80) || next > (i == 1 ? most : 0xBF)) return {kReplacement, i, false, false};
    code = code << 6 | (next & 0x3F);
  }
  return {code, length, true, false};
}

void append_character(std::string& text, char32_t code) {
  const auto put = [&](char32_t byte) { text += static_cast<char>(byte); };
  if (code < 0x80) return put(code);
  if (code < 0x800) return put(0xC0 | code >> 6), put(0x80 | (code & 0x3F));
  if (code < 0x10000) return put(0xE0 | code >> 12), put(0x80 | (code >> 6 & 0x3F)), put(0x80 | (code & 0x3F));
  put(0xF0 | code >> 18), put(0x80 | (code >> 12 & 0x3F)), put(0x80 | (code >> 6 & 0x3F)), put(0x80 | (code & 0x3F));
}

bool is_utf8(std::string_view text) {
  if (is_ascii(text)) return true;
  for (std::size_t at = 0; at < text.size();) {
    const auto character = read_character(text, at);
    if (!character.valid) return false;
    at += character.length;
  }
  return true;
}

std::string replace_malformed(std::string_view text) {
  std::string fixed;
  fixed.reserve(text.size() + 16);
  for (std::size_t at = 0; at < text.size();) {
    const auto character = read_character(text, at);
    if (character.valid) {
      fixed.append(text, at, character.length);
    } else {
      append_character(fixed, kReplacement);
    }
    at += character.length;
  }
  return fixed;
}

std::size_t whole_characters(std::string_view text) {
  const std::size_t most = std::min<std::size_t>(3, text.size());  // a cut-off character has at most three bytes
  for (std::size_t back = most; back > 0; --back) {
    const auto character = read_character(text, text.size() - back);
    if (character.cut_off && character.length == back) return text.size() - back;
  }
  return text.size();
}

std::size_t count_characters(std::string_view text) {
  return static_cast<std::size_t>(std::ranges::count_if(text, [](unsigned char c) { return (c & 0xC0U) != 0x80U; }));
}

bool is_space(char32_t code) {
  constexpr std::array<std::pair<char32_t, char32_t>, 10> kSpaces{{{0x9, 0xD},
                                                                   {0x20, 0x20},
                                                                   {0x85, 0x85},
                                                                   {0xA0, 0xA0},
                                                                   {0x1680, 0x1680},
                                                                   {0x2000, 0x200A},
                                                                   {0x2028, 0x2029},
                                                                   {0x202F, 0x202F},
                                                                   {0x205F, 0x205F},
                                                                   {0x3000, 0x3000}}};
  return std::ranges::any_of(kSpaces, [&](const auto& range) { return range.first <= code && code <= range.second; });
}

std::string compose(std::string_view text) {
  if (below_combining(text)) return std::string(text);
  std::vector<char32_t> codes;
  codes.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const auto character = read_character(text, at);
    decompose(character.code, codes);
    at += character.length;
  }
  reorder(codes);
  recompose(codes);
  std::string result;
  result.reserve(text.size());
  for (const auto code : codes) append_character(result, code);
  return result;
}

}  // namespace gka::data
