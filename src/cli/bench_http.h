// The same requests given to an engine and sent to it over HTTP, within one process.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "infer/engine.h"

namespace gka::cli {

struct HttpRates {
  double engine = 0, http = 0;  // tokens/s of all streams together, while all of them run
};

/// One stream for each prompt, of so many tokens.
HttpRates http_rates(std::unique_ptr<infer::Engine> engine, const std::vector<std::vector<std::int64_t>>& prompts,
                     std::int64_t tokens);

}  // namespace gka::cli
