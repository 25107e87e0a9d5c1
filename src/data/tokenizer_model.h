// What a Tokenizer holds once loaded, and the stages a text goes through:
//
//   added tokens (raw) → normalisation → added tokens (normalised) → words → byte pairs → template around it all
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "data/added_tokens.h"
#include "data/bpe.h"
#include "data/pre_tokenizer.h"
#include "data/tokenizer.h"

namespace gka::data {

class Tokenizer::Model {
 public:
  struct Parts {
    bool bytes_only = false;                           // token = byte; nothing below but `spelling` is used
    std::vector<std::string> spelling{};               // of each token, as decode gives it
    std::vector<bool> special{};                       // of each token
    std::unordered_map<std::string, Token> by_name{};  // as the vocabulary spells it
    std::vector<AddedToken> added{};
    bool nfc = false;
    PreTokenizer pre_tokenizer{};
    Bpe bpe{};
    std::vector<Token> before{}, after{};  // what the post-processor puts around a text
    std::uint64_t fingerprint = 0;
  };

  explicit Model(Parts parts);

  void encode(std::string_view text, std::vector<Token>& ids, Specials specials, Spelled spelled) const;

  const Parts& parts() const { return parts_; }

  /// The words of a text, after normalisation and without added tokens: what a BPE is learnt from.
  void words(std::string_view text, const WordSink& sink) const;

 private:
  struct Scratch {
    explicit Scratch(const PreTokenizer& pre_tokenizer) : words(pre_tokenizer) {}
    PreTokenizer::Scratch words;
    Bpe::Scratch pairs;
  };
  class Borrowed;
  /// What is looked for in a text, before and after normalisation.
  struct Finders {
    AddedTokens raw, normalized;
  };
  Finders find_added(bool specials) const;
  template <typename OnText, typename OnToken>
  void for_each_piece(std::string_view text, const Finders& finders, OnText&& on_text, OnToken&& on_token) const;

  Parts parts_;
  Finders all_, without_specials_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> idle_;
};

/// The models behind Tokenizer::load.
std::shared_ptr<const Tokenizer::Model> byte_model();
std::shared_ptr<const Tokenizer::Model> load_model(const std::string& path);

}  // namespace gka::data
