// Text to token numbers and back: plain bytes, or a byte-level BPE as Hugging Face's `tokenizers` reads it from
// tokenizer.json (or GPT-2's vocab.json with merges.txt), token for token the same.
//
//   const auto tokenizer = data::Tokenizer::load("bytes");            // no file needed; 256 bytes and an end token
//   const auto tokenizer = data::Tokenizer::load("model/");           // a folder or a tokenizer.json in it
//   std::vector<data::Token> ids = tokenizer.encode("text");
//
// A Tokenizer does not change after loading, is cheap to copy and may be used by many threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gka::data {

using Token = std::int32_t;

/// Whether encode adds what tokenizer.json's post-processor puts around a text (Llama 3's <|begin_of_text|>, say), and
/// whether decode shows special tokens.
enum class Specials : std::uint8_t { no, yes };

/// What becomes of text that spells a special token, "<|im_end|>" say: the token, as Hugging Face's `tokenizers` has
/// it, or text like any other, as the same package has it with `encode_special_tokens`. Text of a user's is `text`:
/// nobody should end a turn by typing its end.
enum class Spelled : std::uint8_t { token, text };

class Tokenizer {
 public:
  class Model;  // what was loaded; see tokenizer_model.h

  /// "bytes", a tokenizer.json, or a folder with tokenizer.json or with vocab.json and merges.txt. Throws
  /// std::runtime_error in one sentence where the file is missing, damaged or asks for something not supported.
  static Tokenizer load(const std::string& name);

  explicit Tokenizer(std::shared_ptr<const Model> model) : model_(std::move(model)) {}

  /// Bytes that are not UTF-8 count as U+FFFD, one for each that Python's errors="replace" gives. (The byte tokenizer
  /// keeps every byte as it is.)
  std::vector<Token> encode(std::string_view text, Specials specials = Specials::no,
                            Spelled spelled = Spelled::token) const;
  /// The same, appended to `ids`.
  void encode(std::string_view text, std::vector<Token>& ids, Specials specials = Specials::no,
              Spelled spelled = Spelled::token) const;

  /// UTF-8; bytes of a character that is not whole become U+FFFD. (The byte tokenizer gives the bytes back.) A number
  /// that is no token stands for nothing: models often have a few more than their tokenizer.
  std::string decode(std::span<const Token> ids, Specials specials = Specials::yes) const;

  /// What one token stands for, which may be part of a character.
  std::string_view bytes_of(Token id) const;
  bool is_special(Token id) const;

  /// The id of a token spelt as in the vocabulary or as an added token, e.g. "<|endoftext|>".
  std::optional<Token> find(std::string_view token) const;

  /// One more than the largest id: the smallest vocabulary a model can have.
  std::int64_t vocab_size() const;

  /// What separates documents: <|endoftext|> and its like (the names are in tokenizer.cpp), byte tokenizer: 256.
  std::optional<Token> end_of_document() const;

  /// The same for tokenizers that encode alike, whatever the spacing of their file.
  std::uint64_t fingerprint() const;

  /// "bytes, 257 tokens", "byte-level BPE, 50257 tokens (50000 merges, 1 added)".
  std::string describe() const;

 private:
  std::shared_ptr<const Model> model_;
};

/// The byte tokenizer as a tokenizer.json, for a model's folder: other programs read it as a byte-level BPE without
/// merges, and `Tokenizer::load` knows it for what it is.
std::string byte_tokenizer_file();

/// Decodes token by token for a terminal: a character appears once all of its bytes are there.
class StreamDecoder {
 public:
  explicit StreamDecoder(Tokenizer tokenizer, Specials specials = Specials::no)
      : tokenizer_(std::move(tokenizer)), specials_(specials) {}

  /// What can be shown now: whole characters, U+FFFD for bytes that can no longer become one.
  std::string push(Token id);
  /// What is left over at the end: U+FFFD where a character stayed incomplete.
  std::string finish();

 private:
  Tokenizer tokenizer_;
  Specials specials_;
  std::string pending_;
};

}  // namespace gka::data
