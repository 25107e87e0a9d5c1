#include "serve/problem.h"

#include <vector>

namespace gka::serve {

Json parse_body(std::string_view text) {
  constexpr std::size_t kDeepest = 64, kMostKeys = 4096;
  std::vector<std::size_t> keys(kDeepest + 2, 0);
  const auto check = [&](int depth, Json::parse_event_t event, Json&) {
    const auto level = static_cast<std::size_t>(depth);
    if (level > kDeepest) throw bad_request("the body is nested more than 64 levels deep", "", "invalid_json");
    if (event == Json::parse_event_t::object_start && level + 1 < keys.size()) keys[level + 1] = 0;
    if (event == Json::parse_event_t::key && ++keys[level] > kMostKeys) {
      throw bad_request("an object of the body has more than 4096 keys", "", "invalid_json");
    }
    return true;
  };
  try {
    auto body = Json::parse(text.begin(), text.end(), check);
    if (!body.is_object()) throw bad_request("the body takes a JSON object", "", "invalid_json");
    return body;
  } catch (const nlohmann::json::exception& error) {
    std::string why = error.what();
    why = why.substr(why.find("] ") == std::string::npos ? 0 : why.find("] ") + 2);
    throw bad_request("the body is not valid JSON: " + why, "", "invalid_json");
  }
}

}  // namespace gka::serve
