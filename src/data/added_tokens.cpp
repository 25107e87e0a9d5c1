#include "data/added_tokens.h"

#include <algorithm>
#include <tuple>

#include "data/unicode.h"

namespace gka::data {
namespace {

std::size_t first_byte(const AddedToken& token) { return static_cast<unsigned char>(token.content.front()); }

/// The start of the last character before `at`.
std::size_t before(std::string_view text, std::size_t at) {
  do {
    --at;
  } while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80);
  return at;
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::erase_if(tokens_, [](const AddedToken& token) { return token.content.empty(); });
  std::ranges::sort(tokens_, [](const AddedToken& a, const AddedToken& b) {
    const auto key = [](const AddedToken& t) {
      return std::tuple(first_byte(t), ~t.content.size(), std::string_view(t.content));
    };
    return key(a) < key(b);
  });
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    auto& [first, last] = by_byte_[first_byte(tokens_[i])];
    if (last == 0) first = i;
    last = i + 1;
  }
  if (std::ranges::any_of(tokens_, &AddedToken::single_word)) {
    // Another \w than that of patterns: the `tokenizers` package asks Rust's regular expressions here.
    word_.emplace(R"([\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\x{24b6}-\x{24e9}\x{1f130}-\x{1f149}\x{1f150}-\x{1f169})"
                  R"(\x{1f170}-\x{1f189}\x{200c}\x{200d}])");
  }
}

const AddedToken* AddedTokens::longest_at(std::string_view text) const {
  const auto [first, last] = by_byte_[static_cast<unsigned char>(text.front())];
  for (std::size_t i = first; i < last; ++i) {
    if (text.starts_with(tokens_[i].content)) return &tokens_[i];
  }
  return nullptr;
}

bool AddedTokens::inside_word(std::string_view all, std::size_t first, std::size_t last) const {
  Regex::Matcher matcher(*word_);
  Regex::Matcher::Match match{};
  if (first > 0) {
    const auto start = before(all, first);
    if (matcher.find(all.substr(start, first - start), 0, match)) return true;
  }
  return last < all.size() && matcher.find(all.substr(last, read_character(all, last).length), 0, match);
}

bool AddedTokens::find(std::string_view all, std::size_t from, std::size_t done, Found& found) const {
  if (tokens_.empty()) return false;
  for (auto at = from; at < all.size(); ++at) {
    if (by_byte_[static_cast<unsigned char>(all[at])].second == 0) continue;
    const auto* token = longest_at(all.substr(at));
    if (!token) continue;
    auto first = at, last = at + token->content.size();
    found = {first, last, last, token->id, !token->single_word || !inside_word(all, first, last)};
    while (token->lstrip && first > done && is_space(read_character(all, before(all, first)).code))
      first = before(all, first);
    while (token->rstrip && last < all.size() && is_space(read_character(all, last).code)) {
      last += read_character(all, last).length;
    }
    found.first = first;
    found.last = last;
    return true;
  }
  return false;
}

}  // namespace gka::data
