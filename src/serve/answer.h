// An assistant's text as its parts: reasoning (<think> … </think> at its beginning), what it says, and calls of tools
// in the Hermes form (<tool_call>{"name": …, "arguments": …}</tool_call>). Works on pieces as they stream.
//
// A call is one from its arguments' opening brace on: its name comes at once and the arguments as they are written, so
// one that breaks off or is no JSON has the arguments it got. What never comes that far is what the model said.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "serve/problem.h"

namespace gka::serve {

/// What stands around a call.
inline constexpr std::string_view kCallMark = "<tool_call>", kCalledMark = "</tool_call>";

struct ToolCall {
  std::string name, arguments;  // arguments: JSON, as the model wrote it
};

/// The name of a call: of all that a request's answers make, none has another's.
inline std::string call_id(const std::string& answer, std::size_t choice, std::size_t index) {
  return "call_" + answer + "_" + std::to_string(choice) + "_" + std::to_string(index);
}

struct Part {
  /// A call has its name as text, and what follows it as arguments belongs to it.
  enum class Kind : std::uint8_t { content, reasoning, call, arguments } kind;
  std::string text{};
};

/// Where a JSON object that comes in pieces ends.
class ObjectEnd {
 public:
  /// How many bytes of `text` belong to it.
  std::size_t take(std::string_view text);
  bool ended() const { return ended_; }
  bool in_text() const { return in_text_; }

 private:
  int depth_ = 0;
  bool in_text_ = false, escaped_ = false, ended_ = false;
};

class AnswerParser {
 public:
  struct Options {
    bool reasoning = false;  // look for <think>
    bool inside = false;     // the prompt has opened <think> already
    bool tools = false;      // look for <tool_call>
    bool calling = false;    // the prompt has opened <tool_call> already: all of the answer is the call
    bool single = false;     // nothing follows the first call
  };
  explicit AnswerParser(Options options);

  std::vector<Part> push(const std::string& text, bool last);
  /// There are calls, and the last one did not break off.
  bool called() const { return calls_ > 0 && !broken_; }
  /// Whatever more is pushed will not be looked at.
  bool over() const { return state_ == State::over; }
  bool reasoning() const { return state_ == State::reasoning; }

 private:
  /// After a mark, the end of reasoning or of a call, white space is not the answer's.
  enum class State : std::uint8_t { start, reasoning, after_mark, content, call, arguments, after_arguments, over };
  std::vector<std::string> markers() const;
  bool step(std::vector<Part>& parts, bool last);
  bool step_start(bool last);
  bool step_call(std::vector<Part>& parts);
  bool step_arguments(std::vector<Part>& parts, bool last);
  void emit(std::vector<Part>& parts, std::string text);
  void enter(const std::string& marker, std::vector<Part>& parts);
  void end_call(std::vector<Part>& parts);
  void close(std::vector<Part>& parts);

  Options options_;
  State state_;
  std::string held_, call_;
  ObjectEnd object_;  // of the arguments
  int calls_ = 0;
  bool broken_ = false;
};

}  // namespace gka::serve
