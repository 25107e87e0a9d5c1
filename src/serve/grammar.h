// Answers that are JSON: a filter that lets through only tokens with which the text so far can still become what was
// asked for, an object or what a JSON Schema describes; and calls of tools that a request insists on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "infer/engine.h"
#include "serve/model.h"
#include "serve/problem.h"

namespace gka::serve {

/// Makes a filter for each answer: it follows its own.
using Filters = std::function<std::shared_ptr<infer::TokenFilter>()>;

enum class Calls : std::uint8_t { one, any };

/// They make nothing for {"type": "text"} and null. `param`: what the request calls the format. Throws Problem where it
/// or its schema asks for something unknown. Where there are tools (a list, or null), calls of them may come instead.
Filters filters_for(const Json& format, const std::string& param, const Json& tools, Calls calls, const Model& model);
/// {"name": …, "arguments": …} of one of the tools, and nothing after it.
Filters call_filters(const Json& tools, const Model& model);

}  // namespace gka::serve
