#include "serve/answer.h"

#include <algorithm>

#include "serve/text_stream.h"

namespace gka::serve {
namespace {

constexpr const char* kThink = "<think>";
constexpr const char* kThought = "</think>";
constexpr const char* kCall = "<tool_call>";
constexpr const char* kCalled = "</tool_call>";
constexpr const char* kWhite = " \t\r\n";

/// What stands between the marks of a call, or an empty name where it is none.
ToolCall read_call(const std::string& text) {
  const auto json = Json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("name") || !json["name"].is_string()) return {};
  const auto arguments = json.value("arguments", Json::object());
  return {json["name"].get<std::string>(), arguments.is_string() ? arguments.get<std::string>() : dumped(arguments)};
}

}  // namespace

AnswerParser::AnswerParser(Options options)
    : options_(options),
      state_(options.calling     ? State::call
             : options.inside    ? State::reasoning
             : options.reasoning ? State::start
                                 : State::content) {}

std::vector<std::string> AnswerParser::markers() const {
  switch (state_) {
    case State::start:
      return options_.tools ? std::vector<std::string>{kThink, kCall} : std::vector<std::string>{kThink};
    case State::reasoning: return {kThought};
    case State::call:  // one that the prompt has opened ends with the answer: its texts may hold any marker
      return options_.calling ? std::vector<std::string>{} : std::vector<std::string>{kCalled};
    case State::after_reasoning:
    case State::content: break;
  }
  return options_.tools ? std::vector<std::string>{kCall} : std::vector<std::string>{};
}

void AnswerParser::emit(std::vector<Part>& parts, std::string text) {
  if (state_ == State::call) {
    call_ += text;
    return;
  }
  if (state_ == State::after_reasoning) text.erase(0, std::min(text.find_first_not_of(kWhite), text.size()));
  if (text.empty()) return;
  if (state_ == State::after_reasoning) state_ = State::content;
  const bool blank = text.find_first_not_of(kWhite) == std::string::npos;
  if (state_ == State::content && blank && calls_ > 0) return;  // between two calls
  const auto kind = state_ == State::reasoning ? Part::Kind::reasoning : Part::Kind::content;
  if (!parts.empty() && parts.back().kind == kind) {
    parts.back().text += text;
  } else {
    parts.push_back({kind, std::move(text), {}});
  }
}

void AnswerParser::enter(const std::string& marker, std::vector<Part>& parts) {
  if (marker == kThink) state_ = State::reasoning;
  if (marker == kThought) state_ = State::after_reasoning;
  if (marker == kCall) {
    state_ = State::call;
    call_.clear();
  }
  if (marker == kCalled) {
    state_ = State::content;
    auto call = read_call(call_);
    // Not a call, or one that was cut off: what the model wrote.
    if (call.name.empty()) return emit(parts, options_.calling ? call_ : kCall + call_ + kCalled);
    ++calls_;
    parts.push_back({Part::Kind::call, {}, std::move(call)});
  }
}

/// One marker further; false when what is held has to wait for more.
bool AnswerParser::step(std::vector<Part>& parts, bool last) {
  if (state_ == State::start) {
    const auto first = held_.find_first_not_of(kWhite);
    if (first == std::string::npos && !last) return false;
    const auto rest = first == std::string::npos ? std::string() : held_.substr(first);
    if (rest.starts_with(kThink)) {
      held_ = rest.substr(std::string_view(kThink).size());
      state_ = State::reasoning;
      return true;
    }
    if (!last && std::string_view(kThink).starts_with(rest)) return false;
    state_ = State::content;
  }
  const auto words = markers();
  std::size_t at = std::string::npos;
  std::string found;
  for (const auto& word : words) {
    if (const auto place = held_.find(word); place < at) {
      at = place;
      found = word;
    }
  }
  if (at != std::string::npos) {
    emit(parts, held_.substr(0, at));
    held_.erase(0, at + found.size());
    enter(found, parts);
    return true;
  }
  const auto keep = last ? 0 : begun(held_, words);
  emit(parts, held_.substr(0, held_.size() - keep));
  held_.erase(0, held_.size() - keep);
  return false;
}

std::vector<Part> AnswerParser::push(const std::string& text, bool last) {
  std::vector<Part> parts;
  held_ += text;
  while (step(parts, last)) {
  }
  if (last && state_ == State::call && options_.calling) {
    enter(kCalled, parts);
  } else if (last && state_ == State::call) {  // cut off inside a call
    state_ = State::content;
    emit(parts, kCall + call_);
  }
  return parts;
}

}  // namespace gka::serve
