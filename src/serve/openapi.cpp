#include "serve/openapi.h"

#include <algorithm>
#include <array>

#include "gka/info.h"
#include "serve/fields.h"
#include "serve/routes.h"

namespace gka::serve {
namespace {

/// What answers and bodies share.
constexpr std::string_view kComponents = R"({
  "Error": {"type": "object", "required": ["error"], "properties": {"error": {
    "type": "object", "required": ["message", "type", "param", "code"],
    "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
                   "code": {"type": ["string", "integer"]}}}}},
  "Message": {"type": "object", "required": ["role"],
    "properties": {"role": {"type": "string"}},
    "anyOf": [
      {"required": ["content"], "properties": {"content": {"$ref": "#/components/schemas/Content"},
                                               "tool_calls": {"type": "null"}}},
      {"required": ["tool_calls"],
       "properties": {"content": {"anyOf": [{"$ref": "#/components/schemas/Content"}, {"type": "null"}]},
                      "tool_calls": {"type": "array", "items": {"$ref": "#/components/schemas/ToolCall"}}}}]},
  "Content": {"anyOf": [
    {"type": "string"},
    {"type": "array", "items": {"type": "object", "required": ["text"],
                                "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}}]},
  "ToolCall": {"type": "object", "required": ["function"], "properties": {"function": {
    "type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}}},
  "Usage": {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {"prompt_tokens": {"type": "integer"}, "completion_tokens": {"type": "integer"},
                   "total_tokens": {"type": "integer"},
                   "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": {"type": "integer"}}}}},
  "Own": {"type": "object", "required": ["remembered_tokens", "why_not_more"],
    "properties": {"remembered_tokens": {"type": "integer"}, "why_not_more": {"type": ["string", "null"]},
                   "kept_tokens": {"type": "integer"},
                   "certainty": {"type": "array", "items": {"type": ["number", "null"]}},
                   "layer_certainty": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}}},
  "Completion": {"type": "object", "required": ["id", "object", "created", "model", "choices", "usage", "gka"],
    "properties": {"id": {"type": "string"}, "object": {"const": "text_completion"}, "created": {"type": "integer"},
      "model": {"type": "string"}, "usage": {"$ref": "#/components/schemas/Usage"},
      "gka": {"$ref": "#/components/schemas/Own"},
      "choices": {"type": "array", "items": {"type": "object",
        "required": ["index", "text", "logprobs", "finish_reason"],
        "properties": {"index": {"type": "integer"}, "text": {"type": "string"},
                       "logprobs": {"type": ["object", "null"]}, "finish_reason": {"enum": ["stop", "length"]}}}}}},
  "ChatCompletion": {"type": "object", "required": ["id", "object", "created", "model", "choices", "usage", "gka"],
    "properties": {"id": {"type": "string"}, "object": {"const": "chat.completion"}, "created": {"type": "integer"},
      "model": {"type": "string"}, "usage": {"$ref": "#/components/schemas/Usage"},
      "gka": {"$ref": "#/components/schemas/Own"},
      "choices": {"type": "array", "items": {"type": "object",
        "required": ["index", "message", "logprobs", "finish_reason"],
        "properties": {"index": {"type": "integer"}, "logprobs": {"type": ["object", "null"]},
          "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
          "message": {"type": "object", "required": ["role", "content"],
            "properties": {"role": {"const": "assistant"}, "content": {"type": ["string", "null"]},
              "reasoning_content": {"type": "string"},
              "tool_calls": {"type": "array", "items": {"$ref": "#/components/schemas/ToolCall"}}}}}}}}},
  "InputItem": {"type": "object", "anyOf": [
    {"required": ["role", "content"], "properties": {
      "type": {"enum": ["message", null]}, "role": {"enum": ["user", "system", "developer"]},
      "content": {"$ref": "#/components/schemas/ItemContent"}, "status": {"$ref": "#/components/schemas/ItemStatus"},
      "id": {"type": ["string", "null"]}}},
    {"required": ["role", "content"], "properties": {
      "type": {"enum": ["message", null]}, "role": {"const": "assistant"},
      "content": {"anyOf": [
        {"$ref": "#/components/schemas/ItemContent"},
        {"type": "array", "items": {"type": "object", "required": ["type", "refusal"],
                                    "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}}}}]},
      "status": {"$ref": "#/components/schemas/ItemStatus"}, "id": {"type": ["string", "null"]}}},
    {"required": ["type", "call_id", "name", "arguments"], "properties": {
      "type": {"const": "function_call"}, "call_id": {"type": "string"}, "name": {"type": "string"},
      "arguments": {"type": "string"}, "status": {"$ref": "#/components/schemas/ItemStatus"},
      "id": {"type": ["string", "null"]}}},
    {"required": ["type", "call_id", "output"], "properties": {
      "type": {"const": "function_call_output"}, "call_id": {"type": "string"},
      "output": {"$ref": "#/components/schemas/ItemContent"}, "status": {"$ref": "#/components/schemas/ItemStatus"},
      "id": {"type": ["string", "null"]}}},
    {"required": ["type", "id"], "properties": {"type": {"const": "item_reference"}, "id": {"type": "string"}}},
    {"required": ["type"], "properties": {
      "type": {"const": "reasoning"},
      "content": {"type": ["array", "null"],
                  "items": {"type": "object", "required": ["type", "text"],
                            "properties": {"type": {"const": "reasoning_text"}, "text": {"type": "string"}}}},
      "status": {"$ref": "#/components/schemas/ItemStatus"}, "id": {"type": ["string", "null"]}}}]},
  "ItemContent": {"anyOf": [
    {"type": "string"},
    {"type": "array", "items": {"type": "object", "required": ["type", "text"],
                                "properties": {"type": {"enum": ["input_text", "output_text", "text"]},
                                               "text": {"type": "string"}}}}]},
  "ItemStatus": {"enum": ["in_progress", "completed", "incomplete", null]},
  "OutputItem": {"type": "object", "required": ["id", "type", "status"],
    "properties": {"id": {"type": "string"}, "type": {"enum": ["message", "reasoning", "function_call"]},
      "status": {"enum": ["completed", "incomplete"]}, "role": {"const": "assistant"}, "content": {"type": "array"},
      "summary": {"type": "array"}, "call_id": {"type": "string"}, "name": {"type": "string"},
      "arguments": {"type": "string"}}},
  "Response": {"type": "object",
    "required": ["id", "object", "created_at", "status", "error", "incomplete_details", "model", "output", "usage",
                 "parallel_tool_calls", "tool_choice", "tools", "gka"],
    "properties": {"id": {"type": "string"}, "object": {"const": "response"}, "created_at": {"type": "integer"},
      "status": {"enum": ["completed", "incomplete"]}, "model": {"type": "string"},
      "incomplete_details": {"type": ["object", "null"]},
      "output": {"type": "array", "items": {"$ref": "#/components/schemas/OutputItem"}},
      "parallel_tool_calls": {"type": "boolean"}, "tools": {"type": "array"}, "gka": {"$ref": "#/components/schemas/Own"},
      "usage": {"type": "object",
        "required": ["input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"],
        "properties": {"input_tokens": {"type": "integer"}, "output_tokens": {"type": "integer"},
          "total_tokens": {"type": "integer"},
          "input_tokens_details": {"type": "object", "properties": {"cached_tokens": {"type": "integer"}}},
          "output_tokens_details": {"type": "object", "properties": {"reasoning_tokens": {"type": "integer"}}}}}}},
  "DeletedResponse": {"type": "object", "required": ["id", "object", "deleted"], "properties": {
    "id": {"type": "string"}, "object": {"const": "response"}, "deleted": {"const": true}}},
  "Items": {"type": "object", "required": ["object", "data", "first_id", "last_id", "has_more"], "properties": {
    "object": {"const": "list"}, "first_id": {"type": "string"}, "last_id": {"type": "string"},
    "has_more": {"type": "boolean"}, "data": {"type": "array", "items": {"type": "object", "required": ["id", "type"],
    "properties": {"id": {"type": "string"}, "type": {"type": "string"}}}}}},
  "Model": {"type": "object", "required": ["id", "object", "created", "owned_by", "max_model_len", "gka"],
    "properties": {"id": {"type": "string"}, "object": {"const": "model"}, "created": {"type": "integer"},
      "owned_by": {"type": "string"}, "max_model_len": {"type": "integer"}, "gka": {"type": "object"}}},
  "Models": {"type": "object", "required": ["object", "data"], "properties": {"object": {"const": "list"},
    "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}}},
  "Memory": {"type": "object",
    "required": ["id", "object", "name", "model", "tokens", "state_bytes", "cache_bytes", "created"],
    "properties": {"id": {"type": "string"}, "object": {"const": "memory"}, "name": {"type": "string"},
      "model": {"type": "string"}, "tokens": {"type": "integer"}, "state_bytes": {"type": "integer"},
      "cache_bytes": {"type": "integer"}, "kept_tokens": {"type": "integer"}, "created": {"type": "integer"}}},
  "Memories": {"type": "object", "required": ["object", "data"], "properties": {"object": {"const": "list"},
    "data": {"type": "array", "items": {"$ref": "#/components/schemas/Memory"}}}},
  "Deleted": {"type": "object", "required": ["id", "object", "deleted"], "properties": {"id": {"type": "string"},
    "object": {"const": "memory.deleted"}, "deleted": {"const": true}}},
  "Tokens": {"type": "object", "required": ["tokens", "count", "max_model_len"], "properties": {
    "tokens": {"type": "array", "items": {"type": "integer"}}, "count": {"type": "integer"},
    "max_model_len": {"type": "integer"}, "token_strs": {"type": "array", "items": {"type": "string"}}}},
  "Text": {"type": "object", "required": ["prompt", "content"],
    "properties": {"prompt": {"type": "string"}, "content": {"type": "string"}}},
  "Applied": {"type": "object", "required": ["prompt", "tokens"],
    "properties": {"prompt": {"type": "string"}, "tokens": {"type": "array", "items": {"type": "integer"}}}},
  "TokenizerInfo": {"type": "object", "required": ["eos_token", "bos_token", "vocab_size", "model_max_length"],
    "properties": {"eos_token": {"type": ["string", "null"]}, "bos_token": {"type": ["string", "null"]},
      "vocab_size": {"type": "integer"}, "model_max_length": {"type": "integer"}}},
  "Health": {"type": "object", "required": ["status"], "properties": {"status": {"const": "ok"}}},
  "Version": {"type": "object", "required": ["version"], "properties": {"version": {"type": "string"}}},
  "Props": {"type": "object", "required": ["version", "model", "models", "total_slots", "chat_template"],
    "properties": {"models": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}}}},
  "Slots": {"type": "array", "items": {"type": "object", "required": ["id", "is_processing"],
    "properties": {"id": {"type": "integer"}, "is_processing": {"type": "boolean"}}}}
})";

constexpr std::string_view kMessages =
    R"({"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Message"}})";
constexpr std::string_view kObjects = R"({"type": "array", "items": {"type": "object"}})";
constexpr std::string_view kIds = R"({"type": "array", "items": {"$ref": "#/components/schemas/Token"}})";
constexpr std::string_view kText = R"({"type": "string"})";
constexpr std::string_view kFlag = R"({"type": "boolean"})";
constexpr std::string_view kObject = R"({"type": "object"})";

/// A field of a body that is not a completion's.
struct Part {
  Action action;
  std::string_view name, schema, about = {};
};
constexpr std::array kParts{
    Part{Action::tokenize, "model", kText},
    Part{Action::tokenize, "prompt", kText},
    Part{Action::tokenize, "content", kText},
    Part{Action::tokenize, "messages", kMessages},
    Part{Action::tokenize, "tools", kObjects},
    Part{Action::tokenize, "chat_template_kwargs", kObject},
    Part{Action::tokenize, "add_generation_prompt", kFlag},
    Part{Action::tokenize, "continue_final_message", kFlag},
    Part{Action::tokenize, "add_special_tokens", kFlag},
    Part{Action::tokenize, "add_special", kFlag},
    Part{Action::tokenize, "parse_special", kFlag},
    Part{Action::tokenize, "return_token_strs", kFlag},
    Part{Action::detokenize, "model", kText},
    Part{Action::detokenize, "tokens", kIds},
    Part{Action::apply_template, "model", kText},
    Part{Action::apply_template, "messages", kMessages},
    Part{Action::apply_template, "tools", kObjects},
    Part{Action::apply_template, "chat_template_kwargs", kObject},
    Part{Action::apply_template, "add_generation_prompt", kFlag},
    Part{Action::apply_template, "continue_final_message", kFlag},
};

std::vector<Part> parts_of(Action action) {
  std::vector<Part> parts;
  for (const auto& part : kParts) {
    if (part.action == action) parts.push_back(part);
  }
  if (action == Action::create_memory || action == Action::fork_memory) {
    for (const auto& field : memory_fields()) parts.push_back({action, field.name, field.schema, field.about});
  }
  return parts;
}

/// Of which fields a body needs one (and of a memory's, no two).
Json needed(Action action) {
  const auto field = [](const char* name) {
    return Json{{"required", {name}}, {"properties", {{name, {{"not", {{"type", "null"}}}}}}}};
  };
  switch (action) {
    case Action::tokenize: return {{"anyOf", {field("messages"), field("prompt"), field("content")}}};
    case Action::detokenize: return {{"anyOf", Json::array({field("tokens")})}};
    case Action::apply_template: return {{"anyOf", Json::array({field("messages")})}};
    case Action::create_memory: return {{"oneOf", {field("input"), field("messages")}}};
    case Action::fork_memory: return {{"not", {{"allOf", {field("input"), field("messages")}}}}};
    default: return Json::object();
  }
}

Json body_of(Action action) {
  if (action == Action::completions) return schema_of(kCompletions);
  if (action == Action::chat) return schema_of(kChat);
  if (action == Action::respond) return schema_of(kResponses);
  Json body{{"type", "object"}, {"properties", Json::object()}, {"additionalProperties", false}};
  for (const auto& part : parts_of(action)) {
    auto& property = body["properties"][std::string(part.name)] = or_null(Json::parse(part.schema));
    if (!part.about.empty()) property["description"] = part.about;
  }
  body.update(needed(action));
  return body;
}

/// The schema's name of what an action answers; "": not JSON.
std::string answer_of(Action action) {
  switch (action) {
    case Action::health: return "Health";
    case Action::version: return "Version";
    case Action::models: return "Models";
    case Action::model: return "Model";
    case Action::completions: return "Completion";
    case Action::chat: return "ChatCompletion";
    case Action::respond:
    case Action::response: return "Response";
    case Action::delete_response: return "DeletedResponse";
    case Action::response_items: return "Items";
    case Action::tokenize: return "Tokens";
    case Action::detokenize: return "Text";
    case Action::tokenizer_info: return "TokenizerInfo";
    case Action::apply_template: return "Applied";
    case Action::memories: return "Memories";
    case Action::memory:
    case Action::create_memory:
    case Action::fork_memory: return "Memory";
    case Action::delete_memory: return "Deleted";
    case Action::props: return "Props";
    case Action::slots: return "Slots";
    case Action::page:
    case Action::embeddings:  // answers with an error alone
    case Action::metrics:
    case Action::openapi: break;
  }
  return {};
}

Json content_of(Action action) {
  const auto name = answer_of(action);
  if (action == Action::page) return {{"text/html", Json::object()}};
  if (action == Action::metrics) return {{"text/plain", Json::object()}};
  if (name.empty()) return {{"application/json", Json::object()}};
  Json content{{"application/json", {{"schema", {{"$ref", "#/components/schemas/" + name}}}}}};
  const bool streams = action == Action::completions || action == Action::chat || action == Action::respond;
  if (streams) content["text/event-stream"] = Json::object();
  return content;
}

Json parameter(const char* name, const char* about, Json schema) {
  return {{"name", name}, {"in", "query"}, {"required", false}, {"description", about}, {"schema", std::move(schema)}};
}

/// What may stand behind a path's question mark.
std::vector<Json> query_of(Action action, const Described& about) {
  const Json text{{"type", "string"}};
  switch (action) {
    case Action::tokenizer_info:
      return {parameter("model", "One of /v1/models; without it the first",
                        about.models.empty() ? text : Json{{"enum", about.models}})};
    case Action::response_items:
      return {parameter("order", "The newest first (desc), or the oldest", {{"enum", {"asc", "desc"}}}),
              parameter("limit", "How many at most; 20 without it",
                        {{"type", "integer"}, {"minimum", 1}, {"maximum", 100}}),
              parameter("after", "The id of the item before the first", text)};
    case Action::response: return {parameter("stream", "A response that is kept comes whole", {{"const", false}})};
    default: return {};
  }
}

/// A field whose schema has one type is of it, and so are the objects of a list.
void check_kind(const Part& part, const Json& value) {
  struct Kind {
    std::string_view type, takes;
    bool fits;
  };
  const Kind kinds[] = {{"boolean", "true or false", value.is_boolean()},
                        {"string", "a text", value.is_string()},
                        {"object", "an object", value.is_object()},
                        {"array", "a list", value.is_array()}};
  const std::string name(part.name);
  const auto schema = Json::parse(part.schema);
  const auto type = schema.value("type", Json());
  for (const auto& kind : kinds) {
    if (type == kind.type && !kind.fits) throw bad_request("'" + name + "' takes " + std::string(kind.takes), name);
  }
  if (type != "array" || schema["items"].value("type", Json()) != "object") return;
  for (const auto& item : value) {
    if (!item.is_object()) throw bad_request("each of '" + name + "' takes an object", name);
  }
}

}  // namespace

void check_body(const Json& body, Action action) {
  std::vector<std::string_view> known;
  for (const auto& part : parts_of(action)) {
    known.push_back(part.name);
    const auto found = body.find(part.name);
    if (found != body.end() && !found->is_null()) check_kind(part, *found);
  }
  for (const auto& [key, value] : body.items()) {
    if (std::ranges::find(known, key) == known.end())
      throw bad_request(unknown_key(key.substr(0, 100), "the body", known), key.substr(0, 100), "unknown_field");
  }
}

Json openapi(const Described& about) {
  auto schemas = Json::parse(kComponents);
  schemas["Token"] = {{"type", "integer"}, {"minimum", 0}};
  if (about.vocabulary > 0) schemas["Token"]["maximum"] = about.vocabulary - 1;
  schemas["Iterations"] = {{"anyOf",
                            {{{"type", "integer"}, {"minimum", 0}, {"maximum", about.iterations}},
                             {{"const", "auto"}},
                             {{"type", "null"}}}}};
  const Json error{{"description", "What is wrong, in a sentence"},
                   {"content", {{"application/json", {{"schema", {{"$ref", "#/components/schemas/Error"}}}}}}}};
  Json paths = Json::object();
  for (const auto& route : kRoutes) {
    if (route.action == Action::embeddings) continue;  // which is there to be refused
    Json operation{
        {"summary", route.about},
        {"responses", {{"200", {{"description", "OK"}, {"content", content_of(route.action)}}}, {"default", error}}}};
    if (route.method == "POST") {
      operation["requestBody"] = {{"required", route.action != Action::fork_memory},
                                  {"content", {{"application/json", {{"schema", body_of(route.action)}}}}}};
    }
    if (route.path.find('{') != std::string_view::npos) {
      operation["parameters"] =
          Json::array({{{"name", "id"}, {"in", "path"}, {"required", true}, {"schema", {{"type", "string"}}}}});
    }
    for (const auto& parameter : query_of(route.action, about)) operation["parameters"].push_back(parameter);
    if (about.keys && !route.open) operation["security"] = Json::array({{{"bearer", Json::array()}}});
    auto method = std::string(route.method);
    for (auto& c : method) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    paths[std::string(route.path)][method] = std::move(operation);
  }
  return {
      {"openapi", "3.1.0"},
      {"info", {{"title", "gka"}, {"version", gka::version()}}},
      {"paths", std::move(paths)},
      {"components",
       {{"schemas", std::move(schemas)}, {"securitySchemes", {{"bearer", {{"type", "http"}, {"scheme", "bearer"}}}}}}}};
}

}  // namespace gka::serve
