#include "data/pre_tokenizer.h"

#include <algorithm>

#include "data/unicode.h"

namespace gka::data {
namespace {

/// Characters newer than the Unicode of some PCRE2, and one it knows of the same category and length.
struct NewerRun {
  char32_t first, last, stand_in;
};

#include "data/newer_tables.inc"

/// One bit for each block of 128 code points: whether one of them is in kNewer.
constexpr auto kNewerBlocks = [] {
  std::array<std::uint64_t, (0x110000 >> 7) / 64> bits{};
  for (const auto& run : kNewer) {
    for (auto block = run.first >> 7; block <= run.last >> 7; ++block)
      bits[block / 64] |= std::uint64_t{1} << block % 64;
  }
  return bits;
}();

const NewerRun* find_newer(char32_t code) {
  const auto block = code >> 7;
  if ((kNewerBlocks[block / 64] >> block % 64 & 1) == 0) return nullptr;
  const auto run = std::ranges::lower_bound(kNewer, code, {}, &NewerRun::last);
  return run != std::end(kNewer) && run->first <= code ? run : nullptr;
}

/// Calls body(place, run) for the newer characters until it returns false; all of them have three bytes or more.
template <typename Body>
void for_each_newer(std::string_view text, Body&& body) {
  for (std::size_t at = 0; at < text.size();) {
    const auto lead = static_cast<unsigned char>(text[at]);
    if (lead < 0xE0) {
      ++at;
      continue;
    }
    const auto character = read_character(text, at);
    if (const auto* run = find_newer(character.code); run && !body(at, *run)) return;
    at += character.length;
  }
}

bool has_newer(std::string_view text) {
  bool found = false;
  for_each_newer(text, [&](std::size_t, const NewerRun&) { return !(found = true); });
  return found;
}

std::string with_stand_ins(std::string_view text) {
  std::string copy(text);
  for_each_newer(text, [&](std::size_t at, const NewerRun& run) {
    std::string letter;
    append_character(letter, run.stand_in);
    copy.replace(at, letter.size(), letter);
    return true;
  });
  return copy;
}

struct Piece {
  std::size_t first, last;
  bool match;
};

/// All of the text, cut at the matches. An empty match cuts too, and is a piece without text: that is how neighbours
/// that are joined by kind stay apart. Right behind another match there is none.
template <typename Sink>
void cut(std::string_view text, Regex::Matcher& matcher, Sink&& sink) {
  std::size_t done = 0, from = 0;
  bool any = false;
  for (Regex::Matcher::Match match{}; from <= text.size() && matcher.find(text, from, match);) {
    if (match.first > done) sink(Piece{done, match.first, false});
    if (match.last > match.first || !any || match.first > done) sink(Piece{match.first, match.last, true});
    any = true;
    done = match.last;
    from = match.last;
    if (match.last == match.first) {  // an empty match: go on behind the next character
      from += from < text.size() ? read_character(text, from).length : 1;
    }
  }
  if (done < text.size()) sink(Piece{done, text.size(), false});
}

/// Joins neighbours for the behaviours that do.
std::vector<Piece> join(std::vector<Piece> pieces, SplitBehavior behavior) {
  const bool backwards = behavior == SplitBehavior::merged_with_next;
  if (backwards) std::ranges::reverse(pieces);
  std::vector<Piece> joined;
  bool last_match = false;
  for (const auto& piece : pieces) {
    const bool same = behavior == SplitBehavior::contiguous && piece.match == last_match;
    const bool onto = behavior != SplitBehavior::contiguous && piece.match && !last_match;
    if (!joined.empty() && (same || onto)) {
      joined.back().first = std::min(joined.back().first, piece.first);
      joined.back().last = std::max(joined.back().last, piece.last);
    } else {
      joined.push_back(piece);
    }
    last_match = piece.match;
  }
  if (backwards) std::ranges::reverse(joined);
  return joined;
}

}  // namespace

PreTokenizer::Scratch::Scratch(const PreTokenizer& of) {
  for (const auto& step : of.steps_) {
    matchers_.emplace_back();
    if (step.pattern) matchers_.back().emplace(*step.pattern);
  }
}

void PreTokenizer::split(std::string_view text, Scratch& scratch, const WordSink& sink) const {
  std::string seen;
  if (has_newer(text)) seen = with_stand_ins(text);
  apply(0, {text, seen.empty() ? text : std::string_view(seen)}, scratch, sink);
}

void PreTokenizer::apply(std::size_t step, const Text& text, Scratch& scratch, const WordSink& sink) const {
  if (text.bytes.empty()) return;
  if (step == steps_.size()) return sink(text.bytes);
  if (steps_[step].pattern) return apply_pattern(step, text, scratch, sink);
  if (text.bytes.front() == ' ') return apply(step + 1, text, scratch, sink);
  const auto bytes = " " + std::string(text.bytes), seen = " " + std::string(text.seen);
  apply(step + 1, {bytes, seen}, scratch, sink);
}

void PreTokenizer::apply_pattern(std::size_t step, const Text& text, Scratch& scratch, const WordSink& sink) const {
  const auto behavior = steps_[step].behavior;
  const bool invert = steps_[step].invert;
  auto& matcher = *scratch.matchers_[step];
  const bool last = step + 1 == steps_.size();
  const auto go_on = [&](const Piece& piece) {
    if (piece.first == piece.last) return;
    if (last) return sink(text.bytes.substr(piece.first, piece.last - piece.first));
    apply(step + 1, text.part(piece.first, piece.last), scratch, sink);
  };
  if (behavior == SplitBehavior::isolated) return cut(text.seen, matcher, go_on);

  std::vector<Piece> pieces;
  cut(text.seen, matcher, [&](Piece piece) {
    piece.match = piece.match != invert;
    if (behavior != SplitBehavior::removed || !piece.match) pieces.push_back(piece);
  });
  if (behavior != SplitBehavior::removed) pieces = join(std::move(pieces), behavior);
  for (const auto& piece : pieces) go_on(piece);
}

}  // namespace gka::data
