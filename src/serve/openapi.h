#pragma once

#include "serve/problem.h"

namespace gka::serve {

/// The description of the API that GET /openapi.json gives.
Json openapi();

}  // namespace gka::serve
