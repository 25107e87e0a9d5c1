// Byte-pair encoding of one word: its bytes become tokens, and the neighbouring pair whose merge was learnt first is
// joined until no pair is left that was learnt.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/tokenizer.h"

namespace gka::data {

struct Merge {
  Token left, right, joined;
};

/// The letter that stands for a byte in a vocabulary: printable ones for themselves, the rest from U+0100 on.
std::string letter_of(unsigned char byte);

/// The bytes that a vocabulary entry's letters stand for; nothing where one of them stands for none.
std::optional<std::string> bytes_of_letters(std::string_view letters);

struct BpeOptions {
  std::array<Token, 256> bytes;                    // the token of each byte, kMissing: none
  std::vector<Merge> merges{};                     // the first is the strongest
  std::unordered_map<std::string, Token> words{};  // with ignore_merges: words that are tokens as they are
  std::optional<Token> unknown{};                  // stands for bytes without a token
  bool fuse_unknown = false;                       // one for a run of them
};

class Bpe {
 public:
  static constexpr Token kMissing = -1;

  Bpe() = default;
  explicit Bpe(BpeOptions options);

  /// What one thread works with: the words it has met, and room.
  class Scratch {
   public:
    Scratch();

   private:
    friend class Bpe;
    /// One cache line; where two words meet the later one stays.
    struct alignas(64) Entry {
      std::uint64_t hash = 0;
      std::uint8_t length = 0, count = 0;  // length 0: free
      std::array<char, 30> word;
      std::array<Token, 6> ids;
    };
    struct Link {
      Token id;
      std::int32_t before, after;
    };
    struct Candidate {
      std::uint32_t rank;
      std::int32_t place;
      Token left, right;
      bool operator>(const Candidate& o) const { return rank != o.rank ? rank > o.rank : place > o.place; }
    };
    std::vector<Entry> cache_;
    std::vector<Token> ids_;
    std::vector<std::uint32_t> ranks_;
    std::vector<Link> links_;
    std::vector<Candidate> heap_;
  };

  /// Appends the word's tokens.
  void encode(std::string_view word, Scratch& scratch, std::vector<Token>& out) const;

  std::size_t merges() const { return options_.merges.size(); }

 private:
  static constexpr std::uint32_t kNoRank = ~std::uint32_t{0};

  std::uint32_t rank(Token left, Token right) const;
  void start(std::string_view word, std::vector<Token>& ids) const;
  void merge_short(Scratch& scratch) const;
  void merge_long(Scratch& scratch) const;
  void encode_new(std::string_view word, Scratch& scratch, std::vector<Token>& out) const;

  /// Open addressing: a pair of tokens and its place in `merges`.
  struct Slot {
    std::uint64_t pair = 0;
    std::uint32_t rank = kNoRank;
  };

  BpeOptions options_{};
  std::vector<Slot> slots_;
};

}  // namespace gka::data
