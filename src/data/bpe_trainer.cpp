// A merge touches only the words that hold its pair. So each pair knows its count and the words it was seen in, a merge
// changes the counts of the pairs beside it, and a heap with outdated entries (their count tells) finds the next pair.
#include "data/bpe_trainer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <queue>
#include <stdexcept>

#include "data/added_tokens.h"
#include "data/bpe.h"
#include "data/random.h"
#include "data/tokenizer_model.h"

namespace gka::data {
namespace {

using Json = nlohmann::ordered_json;

struct Pair {
  Token left, right;
  auto operator<=>(const Pair&) const = default;
};
struct HashPair {
  std::size_t operator()(const Pair& pair) const {
    return mix(static_cast<std::uint64_t>(static_cast<std::uint32_t>(pair.left)) << 32 |
               static_cast<std::uint32_t>(pair.right));
  }
};

struct Word {
  std::vector<Token> tokens;
  std::int64_t count;
};

struct PairInfo {
  std::int64_t count = 0;
  std::vector<std::uint32_t> words{};  // it was seen in, perhaps no longer or twice
};

struct Candidate {
  std::int64_t count;
  Pair pair;
  /// Below: less frequent, or as frequent with larger tokens.
  bool operator<(const Candidate& o) const { return count != o.count ? count < o.count : pair > o.pair; }
};

class Merger {
 public:
  Merger(std::vector<Word> words, std::vector<std::string> vocabulary)
      : words_(std::move(words)), names_(std::move(vocabulary)) {
    for (std::size_t id = 0; id < names_.size(); ++id) ids_[names_[id]] = static_cast<Token>(id);
    for (std::size_t i = 0; i < words_.size(); ++i) {
      const auto& [tokens, count] = words_[i];
      for (std::size_t t = 0; t + 1 < tokens.size(); ++t) change({tokens[t], tokens[t + 1]}, count, i);
    }
    for (const auto& [pair, info] : pairs_) candidates_.push({info.count, pair});
  }

  std::size_t vocabulary() const { return names_.size(); }
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<Pair>& merges() const { return merges_; }

  /// Joins the next pair; false where none occurs often enough.
  bool step(std::int64_t min_count) {
    while (!candidates_.empty()) {
      const auto best = candidates_.top();
      candidates_.pop();
      const auto found = pairs_.find(best.pair);
      const bool outdated = found == pairs_.end() || found->second.count != best.count;
      if (outdated) continue;
      if (best.count < std::max<std::int64_t>(1, min_count)) return false;
      join(best.pair, std::move(found->second.words));
      return true;
    }
    return false;
  }

 private:
  void change(Pair pair, std::int64_t by, std::size_t word) {
    auto& info = pairs_[pair];
    info.count += by;
    const auto place = static_cast<std::uint32_t>(word);
    if (by > 0 && (info.words.empty() || info.words.back() != place)) info.words.push_back(place);
    touched_.push_back(pair);
  }

  Token token_for(Pair pair) {
    auto name = names_[static_cast<std::size_t>(pair.left)] + names_[static_cast<std::size_t>(pair.right)];
    const auto [entry, fresh] = ids_.try_emplace(name, static_cast<Token>(names_.size()));
    if (fresh) names_.push_back(std::move(name));
    return entry->second;
  }

  void join(Pair pair, std::vector<std::uint32_t> places) {
    const auto joined = token_for(pair);
    merges_.push_back(pair);
    touched_.clear();
    std::ranges::sort(places);
    places.erase(std::unique(places.begin(), places.end()), places.end());
    for (const auto place : places) join_in(place, pair, joined);
    pairs_.erase(pair);
    std::ranges::sort(touched_);
    touched_.erase(std::unique(touched_.begin(), touched_.end()), touched_.end());
    for (const auto& other : touched_) {
      const auto found = pairs_.find(other);
      if (found == pairs_.end()) continue;
      if (found->second.count > 0) {
        candidates_.push({found->second.count, other});
      } else {
        pairs_.erase(found);
      }
    }
  }

  void join_in(std::size_t place, Pair pair, Token joined) {
    auto& [tokens, count] = words_[place];
    std::size_t kept = 0;
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      const bool here = t + 1 < tokens.size() && tokens[t] == pair.left && tokens[t + 1] == pair.right;
      if (!here) {
        tokens[kept++] = tokens[t];
        continue;
      }
      if (kept > 0) {
        change({tokens[kept - 1], pair.left}, -count, place);
        change({tokens[kept - 1], joined}, count, place);
      }
      if (t + 2 < tokens.size()) {
        change({pair.right, tokens[t + 2]}, -count, place);
        change({joined, tokens[t + 2]}, count, place);
      }
      tokens[kept++] = joined;
      ++t;
    }
    tokens.resize(kept);
  }

  std::vector<Word> words_;
  std::vector<std::string> names_;  // in letters
  std::unordered_map<std::string, Token> ids_;
  std::unordered_map<Pair, PairInfo, HashPair> pairs_;
  std::priority_queue<Candidate> candidates_;
  std::vector<Pair> merges_, touched_;
};

KnownPattern resolve(const std::string& pattern) {
  const auto known = std::ranges::find(kKnownPatterns, pattern, &KnownPattern::name);
  return known != kKnownPatterns.end() ? *known : KnownPattern{.name = "", .pattern = pattern, .nfc = false};
}

Json normalizer_json(const KnownPattern& pattern) { return pattern.nfc ? Json{{"type", "NFC"}} : Json(); }

Json byte_level_json(bool use_regex) {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", use_regex}};
}

Json pre_tokenizer_json(const KnownPattern& pattern) {
  if (pattern.pattern == kGpt2Pattern) return byte_level_json(true);
  const Json split{
      {"type", "Split"}, {"pattern", {{"Regex", pattern.pattern}}}, {"behavior", "Isolated"}, {"invert", false}};
  return {{"type", "Sequence"}, {"pretokenizers", Json::array({split, byte_level_json(false)})}};
}

}  // namespace

BpeTrainer::BpeTrainer(BpeTrainerOptions options) : options_(std::move(options)), pattern_(resolve(options_.pattern)) {
  const auto least = static_cast<std::int64_t>(256 + options_.specials.size());
  if (options_.vocab_size < least) {
    throw std::runtime_error("a vocabulary of " + std::to_string(options_.vocab_size) +
                             " is too small: 256 bytes and the special tokens make " + std::to_string(least));
  }
  Tokenizer::Model::Parts parts{.nfc = pattern_.nfc};
  for (const auto& special : options_.specials) parts.added.push_back({.content = special});
  parts.pre_tokenizer = PreTokenizer({PreTokenizerStep{.pattern = Regex(std::string(pattern_.pattern))}});
  splitter_ = std::make_shared<const Tokenizer::Model>(std::move(parts));
}

void BpeTrainer::add(std::string_view text) {
  splitter_->words(text, [&](std::string_view word) {
    ++counts_[std::string(word)];
    ++words_seen_;
  });
}

std::string BpeTrainer::train(const std::function<void(std::int64_t, std::int64_t)>& progress) {
  std::vector<std::string> vocabulary = options_.specials;
  std::vector<std::pair<std::string, unsigned char>> letters;
  for (int byte = 0; byte < 256; ++byte) letters.emplace_back(letter_of(static_cast<unsigned char>(byte)), byte);
  std::ranges::sort(letters);
  std::array<Token, 256> token_of{};
  for (const auto& [letter, byte] : letters) {
    token_of[byte] = static_cast<Token>(vocabulary.size());
    vocabulary.push_back(letter);
  }

  std::vector<Word> words;
  for (const auto& [text, count] : counts_) {
    auto& word = words.emplace_back(Word{{}, count});
    for (const char byte : text) word.tokens.push_back(token_of[static_cast<unsigned char>(byte)]);
  }
  Merger merger(std::move(words), std::move(vocabulary));
  const auto wanted = static_cast<std::size_t>(options_.vocab_size);
  const auto all = options_.vocab_size - static_cast<std::int64_t>(merger.vocabulary());
  while (merger.vocabulary() < wanted && merger.step(options_.min_count)) {
    const auto left = static_cast<std::int64_t>(wanted - merger.vocabulary());
    if (progress) progress(all - left, all);
  }

  Json added = Json::array(), names = Json::object(), merges = Json::array();
  for (std::size_t id = 0; id < options_.specials.size(); ++id) {
    added.push_back(added_token_entry<Json>(static_cast<std::int64_t>(id), options_.specials[id], /*special=*/true));
  }
  // Pushed back, because looking each name up among the ones before would take the square of their number.
  auto& entries = names.get_ref<Json::object_t&>();
  for (std::size_t id = 0; id < merger.names().size(); ++id) {
    static_cast<std::vector<std::pair<const std::string, Json>>&>(entries).emplace_back(merger.names()[id], id);
  }
  for (const auto& [left, right] : merger.merges()) {
    merges.push_back({merger.names()[static_cast<std::size_t>(left)], merger.names()[static_cast<std::size_t>(right)]});
  }
  const Json file{{"version", "1.0"},
                  {"truncation", nullptr},
                  {"padding", nullptr},
                  {"added_tokens", added},
                  {"normalizer", normalizer_json(pattern_)},
                  {"pre_tokenizer", pre_tokenizer_json(pattern_)},
                  {"post_processor", nullptr},
                  {"decoder", byte_level_json(true)},
                  {"model",
                   {{"type", "BPE"},
                    {"dropout", nullptr},
                    {"unk_token", nullptr},
                    {"continuing_subword_prefix", nullptr},
                    {"end_of_word_suffix", nullptr},
                    {"fuse_unk", false},
                    {"byte_fallback", false},
                    {"ignore_merges", false},
                    {"vocab", names},
                    {"merges", merges}}}};
  return file.dump(1);
}

}  // namespace gka::data
