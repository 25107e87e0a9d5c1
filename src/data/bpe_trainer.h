// Learns a byte-level BPE from text: counts words, then again and again joins the most frequent pair of neighbours (of
// equals, the one with the smaller tokens), until the vocabulary is full.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "data/pre_tokenizer.h"
#include "data/tokenizer.h"

namespace gka::data {

struct BpeTrainerOptions {
  std::int64_t vocab_size = 32768;  // special tokens and the 256 bytes included
  std::int64_t min_count = 2;       // a pair that occurs less often is not joined
  std::string pattern = "gpt2";     // a name in kKnownPatterns, or a regular expression
  std::vector<std::string> specials{"<|endoftext|>"};
};

class BpeTrainer {
 public:
  explicit BpeTrainer(BpeTrainerOptions options);
  BpeTrainer(const BpeTrainer&) = delete;
  BpeTrainer& operator=(const BpeTrainer&) = delete;

  /// Counts the words of one document.
  void add(std::string_view text);

  std::int64_t words() const { return words_seen_; }
  std::int64_t distinct_words() const { return static_cast<std::int64_t>(counts_.size()); }

  /// Learns the merges and returns the tokenizer.json. `progress` hears of merges done and merges to do.
  std::string train(const std::function<void(std::int64_t done, std::int64_t all)>& progress = {});

 private:
  BpeTrainerOptions options_;
  KnownPattern pattern_;  // may look into options_
  std::shared_ptr<const Tokenizer::Model> splitter_;
  std::unordered_map<std::string, std::int64_t> counts_;
  std::int64_t words_seen_ = 0;
};

}  // namespace gka::data
