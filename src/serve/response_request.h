// What a request to /v1/responses asks for, told as chat has it: items become messages, tools and formats take chat's
// form, so that from there on one way leads to the engine. What chat has no place for stands beside: the conversation
// as items, which are kept and listed, and what the answer repeats of the request.
#pragma once

#include <string>

#include "serve/fields.h"

namespace gka::serve {

struct ResponseRequest {
  Json settings = Json::object();  // what the answer repeats
  std::string items{};             // all that is answered, each with its id, as JSON; "" where it is not to be kept
  bool store = true;
};

/// Gives `ask` chat's fields. `before`: the items of the conversation that it goes on from. Throws Problem.
ResponseRequest read_response_request(Ask& ask, Json before);

}  // namespace gka::serve
