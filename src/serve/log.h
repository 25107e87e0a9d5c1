// What the server writes to the standard error: one line an event, for a person or (JSON) for a program. Never a word
// of a prompt or an answer unless asked for.
#pragma once

#include <mutex>
#include <string>

#include "serve/problem.h"

namespace gka::serve {

class Log {
 public:
  Log(bool json, bool quiet) : json_(json), quiet_(quiet) {}

  /// "12:00:01 message key=value key=value"
  void say(const std::string& message, const Json& values = Json::object());

 private:
  bool json_, quiet_;
  std::mutex mutex_;
};

}  // namespace gka::serve
