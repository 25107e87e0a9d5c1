// Tokens that are found in a text before anything else is done with it: <|endoftext|> and its like.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/regex.h"
#include "data/tokenizer.h"

namespace gka::data {

struct AddedToken {
  std::string content;
  Token id = 0;
  bool single_word = false;  // not where a letter or digit stands next to it
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // and after it
  bool normalized = false;   // looked for after normalisation
  bool special = false;      // left out when decoding for people
};

/// One that is found just as it is spelt, as tokenizer.json lists it.
template <typename Json>
Json added_token_entry(std::int64_t id, std::string_view content, bool special) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", special}};
}

class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);

  /// Calls token(id) for each token found and text(piece) for what lies between, in order. Of those that start at one
  /// place the longest is taken.
  template <typename OnText, typename OnToken>
  void split(std::string_view all, OnText&& text, OnToken&& token) const {
    std::size_t done = 0, from = 0;
    for (Found found; find(all, from, done, found);) {
      from = found.end;
      if (!found.taken) continue;
      if (found.first > done) text(all.substr(done, found.first - done));
      token(found.id);
      done = found.last;
    }
    if (done < all.size()) text(all.substr(done));
  }

 private:
  struct Found {
    std::size_t first = 0, last = 0;  // with the white space it takes along
    std::size_t end = 0;              // where to go on looking
    Token id = 0;
    bool taken = false;  // false: it stands inside a word and must not
  };
  bool find(std::string_view all, std::size_t from, std::size_t done, Found& found) const;
  const AddedToken* longest_at(std::string_view text) const;
  bool inside_word(std::string_view all, std::size_t first, std::size_t last) const;

  std::vector<AddedToken> tokens_;                                  // in order of their first byte, the longest first
  std::array<std::pair<std::size_t, std::size_t>, 256> by_byte_{};  // where those of a byte are
  std::optional<Regex> word_;
};

}  // namespace gka::data
