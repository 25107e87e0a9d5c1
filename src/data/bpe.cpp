// Most words were met before and come from a cache. The others are short, and searching all their pairs for the
// strongest is fastest; a long one (a line of dashes, a script without spaces) uses a heap, so that time grows as
// n log n.
#include "data/bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <queue>

#include "data/random.h"
#include "data/unicode.h"

namespace gka::data {
namespace {

constexpr std::size_t kCacheEntries = 1 << 15;
constexpr std::size_t kShort = 40;

std::uint64_t key_of(Token left, Token right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 | static_cast<std::uint32_t>(right);
}

std::uint64_t hash_word(std::string_view word) {
  std::uint64_t hash = word.size();
  const char* at = word.data();
  std::size_t left = word.size();
  for (; left >= 8; left -= 8, at += 8) {
    std::uint64_t chunk;
    std::memcpy(&chunk, at, 8);
    hash = mix(hash ^ chunk);
  }
  std::uint64_t rest = 0;
  if (left > 0) std::memcpy(&rest, at, left);
  return mix(hash ^ rest ^ std::uint64_t{left} << 56);
}

/// Code point of the letter for each byte.
constexpr std::array<char32_t, 256> kLetters = [] {
  std::array<char32_t, 256> letters{};
  char32_t next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
    letters[byte] = printable ? byte : next++;
  }
  return letters;
}();

}  // namespace

std::string letter_of(unsigned char byte) {
  std::string letter;
  append_character(letter, kLetters[byte]);
  return letter;
}

std::optional<std::string> bytes_of_letters(std::string_view letters) {
  static const auto bytes = [] {
    std::array<int, 0x180> table;
    table.fill(-1);
    for (int byte = 0; byte < 256; ++byte) table[kLetters[static_cast<std::size_t>(byte)]] = byte;
    return table;
  }();
  std::string result;
  for (std::size_t at = 0; at < letters.size();) {
    const auto letter = read_character(letters, at);
    if (!letter.valid || letter.code >= bytes.size() || bytes[letter.code] < 0) return std::nullopt;
    result += static_cast<char>(bytes[letter.code]);
    at += letter.length;
  }
  return result;
}

Bpe::Scratch::Scratch() : cache_(kCacheEntries) {}

Bpe::Bpe(BpeOptions options) : options_(std::move(options)) {
  slots_.resize(std::bit_ceil(2 * options_.merges.size() + 1));
  const auto mask = slots_.size() - 1;
  for (std::size_t i = 0; i < options_.merges.size(); ++i) {
    const auto pair = key_of(options_.merges[i].left, options_.merges[i].right);
    auto at = mix(pair) & mask;
    while (slots_[at].rank != kNoRank && slots_[at].pair != pair) at = (at + 1) & mask;
    slots_[at] = {pair, static_cast<std::uint32_t>(i)};  // of two equal ones the later counts
  }
}

std::uint32_t Bpe::rank(Token left, Token right) const {
  const auto pair = key_of(left, right);
  const auto mask = slots_.size() - 1;
  for (auto at = mix(pair) & mask;; at = (at + 1) & mask) {
    if (slots_[at].rank == kNoRank || slots_[at].pair == pair) return slots_[at].rank;
  }
}

void Bpe::start(std::string_view word, std::vector<Token>& ids) const {
  ids.clear();
  bool after_unknown = false;
  for (const char byte : word) {
    const auto id = options_.bytes[static_cast<unsigned char>(byte)];
    const bool known = id != kMissing;
    if (known) ids.push_back(id);
    if (!known && options_.unknown && !(after_unknown && options_.fuse_unknown)) ids.push_back(*options_.unknown);
    after_unknown = !known;
  }
}

void Bpe::merge_short(Scratch& scratch) const {
  auto& ids = scratch.ids_;
  auto& ranks = scratch.ranks_;  // of ids[i] and ids[i + 1]
  ranks.clear();
  for (std::size_t i = 0; i + 1 < ids.size(); ++i) ranks.push_back(rank(ids[i], ids[i + 1]));
  while (!ranks.empty()) {
    const auto best = std::ranges::min_element(ranks);
    if (*best == kNoRank) return;
    const auto i = static_cast<std::size_t>(best - ranks.begin());
    ids[i] = options_.merges[*best].joined;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    ranks.erase(best);
    if (i > 0) ranks[i - 1] = rank(ids[i - 1], ids[i]);
    if (i < ranks.size()) ranks[i] = rank(ids[i], ids[i + 1]);
  }
}

void Bpe::merge_long(Scratch& scratch) const {
  auto& links = scratch.links_;
  auto& heap = scratch.heap_;
  links.clear();
  heap.clear();
  const auto count = static_cast<std::int32_t>(scratch.ids_.size());
  for (std::int32_t i = 0; i < count; ++i) {
    links.push_back({scratch.ids_[static_cast<std::size_t>(i)], i - 1, i + 1 < count ? i + 1 : -1});
  }
  const auto at = [&](std::int32_t place) -> Scratch::Link& { return links[static_cast<std::size_t>(place)]; };
  const auto consider = [&](std::int32_t place) {
    if (place < 0 || at(place).after < 0) return;
    const auto left = at(place).id, right = at(at(place).after).id;
    const auto found = rank(left, right);
    if (found == kNoRank) return;
    heap.push_back({found, place, left, right});
    std::ranges::push_heap(heap, std::greater{});
  };
  for (std::int32_t i = 0; i < count; ++i) consider(i);

  while (!heap.empty()) {
    std::ranges::pop_heap(heap, std::greater{});
    const auto best = heap.back();
    heap.pop_back();
    auto& left = at(best.place);
    const bool stale = left.id != best.left || left.after < 0 || at(left.after).id != best.right;
    if (stale) continue;
    auto& right = at(left.after);
    left.id = options_.merges[best.rank].joined;
    left.after = right.after;
    right.id = kMissing;  // gone
    if (left.after >= 0) at(left.after).before = best.place;
    consider(left.before);
    consider(best.place);
  }
  scratch.ids_.clear();
  for (std::int32_t i = 0; i >= 0 && i < count; i = at(i).after) scratch.ids_.push_back(at(i).id);
}

void Bpe::encode_new(std::string_view word, Scratch& scratch, std::vector<Token>& out) const {
  if (!options_.words.empty()) {
    if (const auto whole = options_.words.find(std::string(word)); whole != options_.words.end()) {
      out.push_back(whole->second);
      return;
    }
  }
  start(word, scratch.ids_);
  scratch.ids_.size() <= kShort ? merge_short(scratch) : merge_long(scratch);
  out.insert(out.end(), scratch.ids_.begin(), scratch.ids_.end());
}

void Bpe::encode(std::string_view word, Scratch& scratch, std::vector<Token>& out) const {
  using Entry = Scratch::Entry;
  if (word.empty()) return;
  if (word.size() > std::tuple_size_v<decltype(Entry::word)>) return encode_new(word, scratch, out);
  const auto hash = hash_word(word);
  auto& entry = scratch.cache_[hash & (kCacheEntries - 1)];
  if (entry.hash == hash && entry.length == word.size() &&
      std::memcmp(entry.word.data(), word.data(), word.size()) == 0) {
    out.insert(out.end(), entry.ids.begin(), entry.ids.begin() + entry.count);
    return;
  }
  const auto before = out.size();
  encode_new(word, scratch, out);
  const auto count = out.size() - before;
  if (count > entry.ids.size()) return;
  entry.hash = hash;
  entry.length = static_cast<std::uint8_t>(word.size());
  entry.count = static_cast<std::uint8_t>(count);
  std::memcpy(entry.word.data(), word.data(), word.size());
  std::copy(out.begin() + static_cast<std::ptrdiff_t>(before), out.end(), entry.ids.begin());
}

}  // namespace gka::data
