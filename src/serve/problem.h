// What a request did wrong, as clients of OpenAI's API expect to read it.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "base/fields.h"
#include "serve/sentence.h"

namespace gka::serve {

struct Problem : std::runtime_error {
  Problem(int http_status, const std::string& sentence, std::string field = {}, std::string name = {})
      : std::runtime_error(without_zeros(sentence)),
        status(http_status),
        param(std::move(field)),
        code(std::move(name)) {}
  int status;
  std::string param, code;
  int retry_after = 0;  // seconds; 0: not said
};

inline Problem bad_request(const std::string& sentence, std::string field, std::string code = {}) {
  return Problem(400, sentence, std::move(field), std::move(code));
}

inline std::string_view error_type(int status) {
  switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 429: return "rate_limit_error";
    default: return status >= 500 ? "server_error" : "invalid_request_error";
  }
}

/// {"error": {"message", "type", "param", "code"}}
inline Json error_json(int status, const std::string& message, const std::string& param = {},
                       const std::string& code = {}) {
  const auto or_null = [](const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); };
  return {{"error",
           {{"message", message},
            {"type", error_type(status)},
            {"param", or_null(param)},
            {"code", code.empty() ? Json(status) : Json(code)}}}};
}

/// What a log may say of it: no word of the request, but the name of the field; of our own failures the sentence.
inline Json for_log(const Problem& problem) {
  Json values = Json::object();
  if (!problem.param.empty()) values["param"] = problem.param;
  if (!problem.code.empty()) values["code"] = problem.code;
  if (problem.status >= 500) values["why"] = problem.what();
  return values;
}

/// JSON as text, whatever bytes are in it.
inline std::string dumped(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

/// A request's body. Bounded in depth and in keys per object (they are searched one by one).
Json parse_body(std::string_view text);

}  // namespace gka::serve
