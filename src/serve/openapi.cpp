#include "serve/openapi.h"

#include "gka/info.h"
#include "serve/fields.h"
#include "serve/routes.h"

namespace gka::serve {
namespace {

Json body_of(std::string_view path) {
  if (path == "/v1/completions") return schema_of(kCompletions);
  if (path == "/v1/chat/completions") return schema_of(kChat);
  if (path.starts_with("/v1/memories")) return memory_schema();
  return {{"type", "object"}};
}

}  // namespace

Json openapi() {
  Json paths = Json::object();
  for (const auto& route : kRoutes) {
    Json operation{{"summary", route.about},
                   {"responses",
                    {{"200", {{"description", "OK"}}},
                     {"default", {{"description", "An error: {\"error\": {message, type, param, code}}"}}}}}};
    if (route.method == "POST") {
      operation["requestBody"] = {{"required", true},
                                  {"content", {{"application/json", {{"schema", body_of(route.path)}}}}}};
    }
    if (route.path.find('{') != std::string_view::npos) {
      operation["parameters"] =
          Json::array({{{"name", "id"}, {"in", "path"}, {"required", true}, {"schema", {{"type", "string"}}}}});
    }
    if (!route.open) operation["security"] = Json::array({{{"bearer", Json::array()}}});
    auto method = std::string(route.method);
    for (auto& c : method) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    paths[std::string(route.path)][method] = std::move(operation);
  }
  return {{"openapi", "3.1.0"},
          {"info", {{"title", "gka"}, {"version", gka::version()}}},
          {"paths", std::move(paths)},
          {"components", {{"securitySchemes", {{"bearer", {{"type", "http"}, {"scheme", "bearer"}}}}}}}};
}

}  // namespace gka::serve
