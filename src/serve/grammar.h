// Answers that are JSON: a filter that lets through only tokens with which the text so far can still become what was
// asked for, an object or what a JSON Schema describes; and calls of tools that a request insists on.
#pragma once

#include <memory>

#include "infer/engine.h"
#include "serve/model.h"
#include "serve/problem.h"

namespace gka::serve {

/// Nothing for {"type": "text"} and null. Throws Problem where the format or its schema asks for something unknown.
std::shared_ptr<infer::TokenFilter> filter_for(const Json& response_format, const Model& model);
/// {"name": …, "arguments": …} of one of the tools, and nothing after it.
std::shared_ptr<infer::TokenFilter> call_filter(const Json& tools, const Model& model);

}  // namespace gka::serve
