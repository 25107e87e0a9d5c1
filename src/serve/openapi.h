#pragma once

#include <string>
#include <vector>

#include "serve/problem.h"
#include "serve/routes.h"

namespace gka::serve {

/// What the description says of the models that are served: the most that one of them takes.
struct Described {
  std::int64_t vocabulary = 0, iterations = 0;
  std::vector<std::string> models{};
  bool keys = false;  // whether the server asks for one
};

/// The description of the API that GET /openapi.json gives.
Json openapi(const Described& about);

/// Throws Problem where a body (not a completion's) has a field that its description does not have, or one that is not
/// of its kind.
void check_body(const Json& body, Action action);

}  // namespace gka::serve
