#include "serve/answer.h"

#include <algorithm>
#include <optional>

#include "serve/text_stream.h"

namespace gka::serve {
namespace {

constexpr const char* kThink = "<think>";
constexpr const char* kThought = "</think>";
constexpr const char* kWhite = " \t\r\n";
constexpr std::size_t kLongestHead = 1000;  // in bytes; a longer one is looked for only when the call has ended

/// What stands between the marks of a call, or an empty name where it is none.
ToolCall read_call(const std::string& text) {
  const auto json = Json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("name") || !json["name"].is_string()) return {};
  const auto arguments = json.value("arguments", Json::object());
  return {json["name"].get<std::string>(), arguments.is_string() ? arguments.get<std::string>() : dumped(arguments)};
}

std::string marked(const std::string& call) { return std::string(kCallMark) + call + std::string(kCalledMark); }

/// The beginning of a call as most models write it: {"name": "…", "arguments": {
struct Head {
  std::string name;
  std::size_t size;  // up to the arguments' brace
};

/// The next thing in `text` from `at` on, white space before it aside; false where it is not there (yet).
bool skip(std::string_view text, std::size_t& at, std::string_view word) {
  at = std::min(text.find_first_not_of(kWhite, at), text.size());
  if (!text.substr(at).starts_with(word)) return false;
  at += word.size();
  return true;
}

std::optional<Head> read_head(std::string_view text) {
  std::size_t at = 0;
  if (!skip(text, at, "{") || !skip(text, at, "\"name\"") || !skip(text, at, ":") || !skip(text, at, "\"")) return {};
  const auto begin = at - 1;
  for (; at < text.size() && text[at] != '"'; ++at) {
    if (text[at] == '\\') ++at;
  }
  if (at >= text.size()) return {};
  const auto name = Json::parse(text.substr(begin, ++at - begin), nullptr, false);
  if (!name.is_string() || name.get_ref<const std::string&>().empty()) return {};
  if (!skip(text, at, ",") || !skip(text, at, "\"arguments\"") || !skip(text, at, ":") || !skip(text, at, "{"))
    return {};
  return Head{name.get<std::string>(), at - 1};
}

void add(std::vector<Part>& parts, Part::Kind kind, std::string text) {
  if (text.empty()) return;
  if (!parts.empty() && parts.back().kind == kind) {
    parts.back().text += text;
  } else {
    parts.push_back({kind, std::move(text)});
  }
}

}  // namespace

std::size_t ObjectEnd::take(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size() && !ended_) {
    const char c = text[at++];
    if (in_text_) {
      // No text of JSON has a new line in it: one that was left open ends there, not with the answer.
      if (c == '\n' || (c == '"' && !escaped_)) in_text_ = false;
      escaped_ = c == '\\' && !escaped_;
    } else if (c == '"') {
      in_text_ = true;
      escaped_ = false;
    } else if (c == '{' || c == '[') {
      ++depth_;
    } else if (c == '}' || c == ']') {
      ended_ = --depth_ == 0;
    }
  }
  return at;
}

AnswerParser::AnswerParser(Options options)
    : options_(options),
      state_(options.calling     ? State::call
             : options.inside    ? State::reasoning
             : options.reasoning ? State::start
                                 : State::content) {}

std::vector<std::string> AnswerParser::markers() const {
  switch (state_) {
    case State::start:
      return options_.tools ? std::vector<std::string>{kThink, std::string(kCallMark)}
                            : std::vector<std::string>{kThink};
    case State::reasoning: return {kThought};
    case State::call:  // one that the prompt has opened ends with the answer: its texts may hold any marker
    case State::arguments:
    case State::after_arguments:
      return options_.calling ? std::vector<std::string>{} : std::vector<std::string>{std::string(kCalledMark)};
    case State::over: return {};
    case State::after_mark:
    case State::content: break;
  }
  return options_.tools ? std::vector<std::string>{std::string(kCallMark)} : std::vector<std::string>{};
}

void AnswerParser::emit(std::vector<Part>& parts, std::string text) {
  if (state_ == State::call) call_ += text;
  if (state_ == State::call || state_ == State::after_arguments || state_ == State::over) return;
  if (state_ == State::after_mark) text.erase(0, std::min(text.find_first_not_of(kWhite), text.size()));
  if (text.empty()) return;
  if (state_ == State::after_mark) state_ = State::content;
  add(parts, state_ == State::reasoning ? Part::Kind::reasoning : Part::Kind::content, std::move(text));
}

void AnswerParser::enter(const std::string& marker, std::vector<Part>& parts) {
  if (marker == kThink) state_ = State::reasoning;
  if (marker == kThought) state_ = State::after_mark;
  if (marker == kCallMark) {
    state_ = State::call;
    call_.clear();
  }
  if (marker == kCalledMark) end_call(parts);
}

void AnswerParser::end_call(std::vector<Part>& parts) {
  const bool begun = state_ != State::call;  // its name and arguments are out already
  state_ = State::content;
  if (!begun) {
    auto call = read_call(call_);
    // Not a call, or one that was cut off: what the model wrote.
    if (call.name.empty()) return emit(parts, options_.calling ? call_ : marked(call_));
    ++calls_;
    parts.push_back({Part::Kind::call, std::move(call.name)});
    add(parts, Part::Kind::arguments, std::move(call.arguments));
  }
  broken_ = begun && !object_.ended();
  state_ = options_.single ? State::over : State::after_mark;
}

bool AnswerParser::step_start(bool last) {
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
  return true;
}

/// Whether a call's arguments have begun.
bool AnswerParser::step_call(std::vector<Part>& parts) {
  if (call_.size() > kLongestHead) return false;
  const auto text = call_ + held_;
  const auto head = read_head(text);
  if (!head) return false;
  ++calls_;
  parts.push_back({Part::Kind::call, head->name});
  held_ = text.substr(head->size);
  call_.clear();
  object_ = {};
  state_ = State::arguments;
  return true;
}

/// More of a call's arguments. Where they are in a text of their own, a marker is part of it.
bool AnswerParser::step_arguments(std::vector<Part>& parts, bool last) {
  const auto words = markers();
  while (!held_.empty() && !object_.ended()) {
    const auto found = words.empty() ? std::string::npos : held_.find(words[0]);
    if (found == 0 && !object_.in_text()) break;
    // Up to the next marker, or what may become one; of a marker that is text its first byte, and then again.
    auto size = found == 0 ? 1 : found;
    if (found == std::string::npos) size = held_.size() - (last ? 0 : begun(held_, words));
    if (size == 0) return false;
    size = object_.take(std::string_view(held_).substr(0, size));
    add(parts, Part::Kind::arguments, held_.substr(0, size));
    held_.erase(0, size);
  }
  if (held_.empty() && !object_.ended()) return false;
  state_ = State::after_arguments;
  return true;
}

/// One marker further; false when what is held has to wait for more.
bool AnswerParser::step(std::vector<Part>& parts, bool last) {
  if (state_ == State::start && !step_start(last)) return false;
  if (state_ == State::call && step_call(parts)) return last;  // arguments wait, so that the name goes out by itself
  if (state_ == State::arguments && !step_arguments(parts, last)) return false;
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

/// The answer has ended: with it, a call that was open.
void AnswerParser::close(std::vector<Part>& parts) {
  const bool begun = state_ == State::arguments || state_ == State::after_arguments;
  if (begun || (state_ == State::call && options_.calling)) {
    end_call(parts);
  } else if (state_ == State::call) {  // cut off before its arguments
    state_ = State::content;
    emit(parts, std::string(kCallMark) + call_);
  }
}

std::vector<Part> AnswerParser::push(const std::string& text, bool last) {
  std::vector<Part> parts;
  held_ += text;
  while (step(parts, last)) {
  }
  if (last) close(parts);
  return parts;
}

}  // namespace gka::serve
