// From a body to what the engine is asked: every check that needs the model happens here, before anything is submitted.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "infer/engine.h"
#include "serve/answer.h"
#include "serve/fields.h"
#include "serve/model.h"
#include "serve/response_request.h"

namespace gka::serve {

struct Plan {
  std::shared_ptr<const Model> model;
  bool chat = false;
  std::optional<ResponseRequest> response{};  // asked of /v1/responses: chat, but for the form of its answer
  Ask ask;
  std::vector<infer::Request> requests;  // one for each choice, in their order
  std::vector<std::string> echoes;       // the prompt's text of each choice, where it is echoed
  std::vector<std::string> stops;
  AnswerParser::Options answer;
  Json offered = nullptr;  // tools that may be called
  Json forced = nullptr;   // those of which one has to be
  int logprobs = -1;       // how many alternatives; below 0: none asked for
  bool include_usage = false;
  bool explain_prompt = false;  // prompt_logprobs
};

/// `before`: the items of the conversation that a response goes on from. Throws Problem.
Plan make_plan(std::shared_ptr<const Model> model, Ask ask, Endpoint endpoint, Json before = Json::array());

/// Token ids of a JSON list, each checked against the vocabulary. Throws Problem.
Tokens read_tokens(const Json& list, const Model& model, const std::string& param);

/// `what` is more than the model's context takes, in words that clients know as OpenAI's.
Problem too_long(const std::string& what, const Model& model, const std::string& param);

/// What the engine refuses, as HTTP has it.
Problem problem_of(const infer::Refused& refused);

}  // namespace gka::serve
