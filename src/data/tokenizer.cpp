#include "data/tokenizer.h"

#include <algorithm>
#include <array>

#include "base/hash.h"
#include "data/tokenizer_model.h"
#include "data/unicode.h"

namespace gka::data {
namespace {

/// What separates documents, as well-known vocabularies spell it; the first that is there.
constexpr std::array<std::string_view, 7> kEndsOfDocument{
    "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|im_end|>", "</s>", "<eos>", "<|eot_id|>"};

constexpr Token kEndOfBytes = 256;

}  // namespace

/// A scratch from the pool, given back at the end.
class Tokenizer::Model::Borrowed {
 public:
  explicit Borrowed(const Model& model) : model_(model) {
    const std::scoped_lock lock(model_.mutex_);
    if (model_.idle_.empty()) return;
    scratch_ = std::move(model_.idle_.back());
    model_.idle_.pop_back();
  }
  ~Borrowed() {
    if (!scratch_) return;
    const std::scoped_lock lock(model_.mutex_);
    model_.idle_.push_back(std::move(scratch_));
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  Scratch& operator*() {
    if (!scratch_) scratch_ = std::make_unique<Scratch>(model_.parts_.pre_tokenizer);
    return *scratch_;
  }

 private:
  const Model& model_;
  std::unique_ptr<Scratch> scratch_;
};

Tokenizer::Model::Model(Parts parts)
    : parts_(std::move(parts)), all_(find_added(true)), without_specials_(find_added(false)) {}

Tokenizer::Model::Finders Tokenizer::Model::find_added(bool specials) const {
  std::vector<AddedToken> raw, normalized;
  for (const auto& token : parts_.added) {
    if (token.special && !specials) continue;
    if (!token.normalized) {
      raw.push_back(token);
      continue;
    }
    auto copy = token;
    if (parts_.nfc) copy.content = compose(copy.content);
    normalized.push_back(copy);
  }
  return {AddedTokens(std::move(raw)), AddedTokens(std::move(normalized))};
}

template <typename OnText, typename OnToken>
void Tokenizer::Model::for_each_piece(std::string_view text, const Finders& finders, OnText&& on_text,
                                      OnToken&& on_token) const {
  std::string repaired;
  if (!is_utf8(text)) text = repaired = replace_malformed(text);
  const auto normalize = [&](std::string_view piece) {
    if (!parts_.nfc) return finders.normalized.split(piece, on_text, on_token);
    const auto composed = compose(piece);
    finders.normalized.split(composed, on_text, on_token);
  };
  finders.raw.split(text, normalize, on_token);
}

void Tokenizer::Model::encode(std::string_view text, std::vector<Token>& ids, Specials specials,
                              Spelled spelled) const {
  if (parts_.bytes_only) {
    for (const char byte : text) ids.push_back(static_cast<unsigned char>(byte));
    return;
  }
  if (specials == Specials::yes) ids.insert(ids.end(), parts_.before.begin(), parts_.before.end());
  Borrowed borrowed(*this);
  auto& scratch = *borrowed;
  const WordSink encode_word = [&](std::string_view word) { parts_.bpe.encode(word, scratch.pairs, ids); };
  for_each_piece(
      text, spelled == Spelled::token ? all_ : without_specials_,
      [&](std::string_view piece) { parts_.pre_tokenizer.split(piece, scratch.words, encode_word); },
      [&](Token id) { ids.push_back(id); });
  if (specials == Specials::yes) ids.insert(ids.end(), parts_.after.begin(), parts_.after.end());
}

void Tokenizer::Model::words(std::string_view text, const WordSink& sink) const {
  Borrowed borrowed(*this);
  auto& scratch = *borrowed;
  for_each_piece(
      text, all_, [&](std::string_view piece) { parts_.pre_tokenizer.split(piece, scratch.words, sink); },
      [](Token) {});
}

std::shared_ptr<const Tokenizer::Model> byte_model() {
  Tokenizer::Model::Parts parts{.bytes_only = true};
  for (int byte = 0; byte < 256; ++byte) parts.spelling.emplace_back(1, static_cast<char>(byte));
  parts.spelling.emplace_back("<|endoftext|>");
  parts.special.assign(257, false);
  parts.special[kEndOfBytes] = true;
  parts.by_name["<|endoftext|>"] = kEndOfBytes;
  parts.fingerprint = hash64("gka bytes");
  return std::make_shared<const Tokenizer::Model>(std::move(parts));
}

Tokenizer Tokenizer::load(const std::string& name) {
  return Tokenizer(name == "bytes" ? byte_model() : load_model(name));
}

std::vector<Token> Tokenizer::encode(std::string_view text, Specials specials, Spelled spelled) const {
  std::vector<Token> ids;
  model_->encode(text, ids, specials, spelled);
  return ids;
}

void Tokenizer::encode(std::string_view text, std::vector<Token>& ids, Specials specials, Spelled spelled) const {
  model_->encode(text, ids, specials, spelled);
}

std::string_view Tokenizer::bytes_of(Token id) const {
  const auto& spelling = model_->parts().spelling;
  if (id < 0 || static_cast<std::size_t>(id) >= spelling.size()) return {};
  return spelling[static_cast<std::size_t>(id)];
}

bool Tokenizer::is_special(Token id) const {
  const auto& special = model_->parts().special;
  return id >= 0 && static_cast<std::size_t>(id) < special.size() && special[static_cast<std::size_t>(id)];
}

std::string Tokenizer::decode(std::span<const Token> ids, Specials specials) const {
  std::string text;
  for (const auto id : ids) {
    if (specials == Specials::yes || !is_special(id)) text += bytes_of(id);
  }
  return model_->parts().bytes_only || is_utf8(text) ? text : replace_malformed(text);
}

std::optional<Token> Tokenizer::find(std::string_view token) const {
  const auto& names = model_->parts().by_name;
  const auto found = names.find(std::string(token));
  return found == names.end() ? std::nullopt : std::optional(found->second);
}

std::int64_t Tokenizer::vocab_size() const { return static_cast<std::int64_t>(model_->parts().spelling.size()); }

std::optional<Token> Tokenizer::end_of_document() const {
  for (const auto name : kEndsOfDocument) {
    if (const auto id = find(name)) return id;
  }
  return std::nullopt;
}

std::uint64_t Tokenizer::fingerprint() const { return model_->parts().fingerprint; }

std::string Tokenizer::describe() const {
  const auto& parts = model_->parts();
  const auto tokens = std::to_string(vocab_size()) + " tokens";
  if (parts.bytes_only) return "bytes, " + tokens;
  return "byte-level BPE, " + tokens + " (" + std::to_string(parts.bpe.merges()) + " merges, " +
         std::to_string(parts.added.size()) + " added)";
}

std::string StreamDecoder::push(Token id) {
  if (specials_ == Specials::no && tokenizer_.is_special(id)) return {};
  pending_ += tokenizer_.bytes_of(id);
  const auto whole = whole_characters(pending_);
  auto ready = replace_malformed(std::string_view(pending_).substr(0, whole));
  pending_.erase(0, whole);
  return ready;
}

std::string StreamDecoder::finish() { return replace_malformed(std::exchange(pending_, {})); }

}  // namespace gka::data
