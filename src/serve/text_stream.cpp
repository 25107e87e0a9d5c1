#include "serve/text_stream.h"

#include <algorithm>

namespace gka::serve {

std::size_t begun(std::string_view text, const std::vector<std::string>& words) {
  std::size_t longest = 0;
  for (const auto& word : words) {
    if (word.empty()) continue;
    for (auto length = std::min(word.size() - 1, text.size()); length > longest; --length) {
      if (text.ends_with(std::string_view(word).substr(0, length))) longest = length;
    }
  }
  return longest;
}

std::string TextStream::take(std::string text) {
  if (stopped_) return {};
  held_ += text;
  auto first = std::string::npos;
  for (const auto& stop : stops_) {
    if (const auto at = held_.find(stop); at < first) {
      first = at;
      stop_ = stop;
    }
  }
  stopped_ = first != std::string::npos;
  const auto ready = stopped_ ? first + (keep_stop_ ? stop_.size() : 0) : held_.size() - begun(held_, stops_);
  auto out = held_.substr(0, ready);
  held_.erase(0, ready);
  return out;
}

std::string TextStream::finish() {
  if (stopped_) return {};
  auto out = take(decoder_.finish());
  if (!stopped_) out += held_;
  held_.clear();
  return out;
}

}  // namespace gka::serve
