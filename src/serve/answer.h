// An assistant's text as its parts: reasoning (<think> … </think> at its beginning), what it says, and calls of tools
// in the Hermes form (<tool_call>{"name": …, "arguments": …}</tool_call>). Works on pieces as they stream.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "serve/problem.h"

namespace gka::serve {

struct ToolCall {
  std::string name, arguments;  // arguments: JSON
};

struct Part {
  enum class Kind : std::uint8_t { content, reasoning, call } kind;
  std::string text{};
  ToolCall call{};
};

class AnswerParser {
 public:
  struct Options {
    bool reasoning = false;  // look for <think>
    bool inside = false;     // the prompt has opened <think> already
    bool tools = false;      // look for <tool_call>
    bool calling = false;    // the prompt has opened <tool_call> already: all of the answer is the call
  };
  explicit AnswerParser(Options options);

  std::vector<Part> push(const std::string& text, bool last);
  bool called() const { return calls_ > 0; }

 private:
  enum class State : std::uint8_t { start, reasoning, after_reasoning, content, call };
  std::vector<std::string> markers() const;
  bool step(std::vector<Part>& parts, bool last);
  void emit(std::vector<Part>& parts, std::string text);
  void enter(const std::string& marker, std::vector<Part>& parts);

  Options options_;
  State state_;
  std::string held_, call_;
  int calls_ = 0;
};

}  // namespace gka::serve
