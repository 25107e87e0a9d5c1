// Tokens to text that can be shown at once: nothing of a character whose bytes are not all there, and nothing that may
// turn out to be the beginning of a stop text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"

namespace gka::serve {

/// How many bytes at the end of `text` are the beginning of one of `words` (a whole word does not count).
std::size_t begun(std::string_view text, const std::vector<std::string>& words);

class TextStream {
 public:
  TextStream(data::Tokenizer tokenizer, data::Specials specials, std::vector<std::string> stops, bool keep_stop)
      : decoder_(std::move(tokenizer), specials), stops_(std::move(stops)), keep_stop_(keep_stop) {}

  /// What can be shown now.
  std::string push(data::Token token) { return take(decoder_.push(token)); }
  /// What is left when no more tokens come.
  std::string finish();
  /// A stop text came; nothing follows.
  bool stopped() const { return stopped_; }
  const std::string& stop() const { return stop_; }

 private:
  std::string take(std::string text);

  data::StreamDecoder decoder_;
  std::vector<std::string> stops_;
  bool keep_stop_, stopped_ = false;
  std::string held_, stop_;
};

}  // namespace gka::serve
