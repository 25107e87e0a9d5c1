#include "serve/fields.h"

#include <array>
#include <cmath>

namespace gka::serve {
namespace {

constexpr double kMost = 9007199254740991.0;  // the largest whole number every JSON reader keeps exactly
// Schemas of what is more than a flag, a number or a text. That a field may be null, for left out, is added to all.
constexpr std::string_view kAnything = "{}";
constexpr std::string_view kPrompt =
    R"({"anyOf": [{"type": "string"},
                  {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Token"}},
                  {"type": "array", "minItems": 1, "maxItems": 1024,
                   "items": {"anyOf": [{"type": "string"},
                                       {"type": "array", "items": {"$ref": "#/components/schemas/Token"}}]}}]})";
constexpr std::string_view kStop =
    R"({"anyOf": [{"type": "string", "minLength": 1, "maxLength": 1000},
                  {"type": "array", "maxItems": 16, "items": {"type": "string", "minLength": 1, "maxLength": 1000}}]})";
constexpr std::string_view kMessages =
    R"({"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Message"}})";
constexpr std::string_view kIterations = R"({"$ref": "#/components/schemas/Iterations"})";
constexpr std::string_view kObject = R"({"type": "object"})";
constexpr std::string_view kIds = R"({"type": "array", "items": {"$ref": "#/components/schemas/Token"}})";
constexpr std::string_view kText = R"({"type": "string"})";
constexpr std::string_view kTextOrIds =
    R"({"anyOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/components/schemas/Token"}}]})";
constexpr std::string_view kTools = R"({"type": "array", "items": {"type": "object"}})";
constexpr std::string_view kBias =
    R"({"type": "object", "patternProperties": {"^[0-9]+$": {"type": "number", "minimum": -100, "maximum": 100}},
        "additionalProperties": false})";
constexpr std::string_view kNothing = R"({"type": "string", "maxLength": 0})";
constexpr std::string_view kFlag = R"({"type": "boolean"})";
constexpr std::string_view kCountOrFlag =
    R"({"anyOf": [{"type": "integer", "minimum": 0, "maximum": 20}, {"type": "boolean"}]})";
constexpr std::string_view kTopP = R"({"type": "number", "exclusiveMinimum": 0, "maximum": 1})";
constexpr std::string_view kFormat =
    R"({"anyOf": [{"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}},
                  {"type": "object", "required": ["type", "json_schema"],
                   "properties": {"type": {"const": "json_schema"},
                                  "json_schema": {"type": "object", "required": ["schema"],
                                                  "properties": {"schema": {"type": ["object", "boolean"]}}}}}]})";
constexpr std::string_view kChoice =
    R"({"anyOf": [{"enum": ["auto", "none", "required"]},
                  {"type": "object", "required": ["function"],
                   "properties": {"function": {"type": "object", "required": ["name"],
                                               "properties": {"name": {"type": "string", "minLength": 1}}}}},
                  {"type": "object", "required": ["type", "allowed_tools"],
                   "properties": {"type": {"const": "allowed_tools"},
                                  "allowed_tools": {"type": "object", "required": ["mode", "tools"],
                                                    "properties": {"mode": {"enum": ["auto", "required"]},
                                                                   "tools": {"type": "array", "minItems": 1,
                                                                             "items": {"type": "object"}}}}}}]})";
constexpr std::string_view kInput =
    R"({"anyOf": [{"type": "string"},
                  {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/InputItem"}}]})";
constexpr std::string_view kFlatTools =
    R"({"type": "array", "items": {"type": "object", "required": ["type", "name"],
        "properties": {"type": {"const": "function"}, "name": {"type": "string", "minLength": 1},
                       "description": {"type": ["string", "null"]}, "parameters": {"type": ["object", "null"]},
                       "strict": {"type": ["boolean", "null"]}}}})";
constexpr std::string_view kFlatChoice =
    R"({"anyOf": [{"enum": ["auto", "none", "required"]},
                  {"type": "object", "required": ["type", "name"],
                   "properties": {"type": {"const": "function"}, "name": {"type": "string", "minLength": 1}}},
                  {"type": "object", "required": ["type", "mode", "tools"],
                   "properties": {"type": {"const": "allowed_tools"}, "mode": {"enum": ["auto", "required"]},
                                  "tools": {"type": "array", "minItems": 1,
                                            "items": {"type": "object", "required": ["type", "name"],
                                                      "properties": {"type": {"const": "function"},
                                                                     "name": {"type": "string", "minLength": 1}}}}}}]})";
constexpr std::string_view kInclude = R"({"type": "array", "items": {"type": "string"}})";
constexpr std::string_view kMetadata =
    R"({"type": "object", "maxProperties": 16, "propertyNames": {"maxLength": 64},
        "additionalProperties": {"type": "string", "maxLength": 512}})";
constexpr std::string_view kNull = R"({"type": "null"})";
constexpr std::string_view kFalse = R"({"enum": [false, null]})";
constexpr std::string_view kModalities =
    R"({"type": "array", "minItems": 1, "maxItems": 1, "items": {"const": "text"}})";

/// One of the names, or null.
Json one_of(Names names) {
  Json values(std::vector<std::string>(names.begin(), names.end()));
  values.push_back(nullptr);
  return {{"enum", values}};
}

const std::string kTierNames = one_of(kTiers).dump();
const std::string kTruncationNames = one_of(kTruncations).dump();
const std::string kReasoning = Json{{"type", "object"},
                                    {"properties",
                                     {{"effort", one_of(kEfforts)},
                                      {"summary", one_of(kSummaries)},
                                      {"generate_summary", one_of(kSummaries)},
                                      {"context", one_of(kReasoningContexts)},
                                      {"mode", {{"type", {"string", "null"}}}}}}}
                                   .dump();
const std::string kTextSettings =
    Json{{"type", "object"},
         {"additionalProperties", false},
         {"properties", {{"verbosity", one_of(kVerbosities)}, {"format", Json::parse(R"({"anyOf": [
              {"type": "null"},
              {"type": "object", "required": ["type"], "properties": {"type": {"enum": ["text", "json_object"]}}},
              {"type": "object", "required": ["type", "name", "schema"],
               "properties": {"type": {"const": "json_schema"}, "name": {"type": "string"},
                              "schema": {"type": "object"}}}]})")}}}}
        .dump();

const std::array kFields{
    Field{"model", &Ask::model, kEvery, 0, 0, "", "", "One of /v1/models; may be left out where there is one"},
    Field{"prompt", &Ask::prompt, kCompletions, 0, 0, "", kPrompt, "Text, token ids, or a list of either"},
    Field{"messages", &Ask::messages, kChat, 0, 0, "", kMessages, "The conversation so far"},
    Field{"max_tokens", &Ask::max_tokens, kBoth, 0, kMost, "", "", "How many tokens at most (16 for completions)"},
    Field{"max_completion_tokens", &Ask::max_completion_tokens, kChat, 0, kMost, "", "",
          "The same, OpenAI's newer name"},
    Field{"min_tokens", &Ask::min_tokens, kEvery, 0, kMost, "0", "", "Nothing stops the answer before so many tokens"},
    Field{"temperature", &Ask::temperature, kEvery, 0, 100, "1", "", "0: the likeliest token each time"},
    Field{"top_p", &Ask::top_p, kEvery, 0, 1, "1", kTopP,
          "Among the fewest tokens that hold this much of the probability"},
    Field{"top_k", &Ask::top_k, kEvery, -1, kMost, "0", "", "Among so many likeliest tokens; 0 or -1: all"},
    Field{"min_p", &Ask::min_p, kEvery, 0, 1, "0", "",
          "Among tokens at least this likely, as a share of the likeliest"},
    Field{"repetition_penalty", &Ask::repetition_penalty, kEvery, 0.01, 100, "1", "",
          "Above 1: tokens seen before become less likely"},
    Field{"presence_penalty", &Ask::presence_penalty, kEvery, -2, 2, "0", "",
          "Taken from the logit of a token that came already"},
    Field{"frequency_penalty", &Ask::frequency_penalty, kEvery, -2, 2, "0", "", "And this, times how often it came"},
    Field{"logit_bias", &Ask::logit_bias, kEvery, 0, 0, "", kBias,
          "Token id to a number from -100 to 100 that is added"},
    Field{"seed", &Ask::seed, kEvery, -kMost, kMost, "", "", "The same seed gives the same answer"},
    Field{"stop", &Ask::stop, kEvery, 0, 0, "", kStop, "Texts that end the answer, and are not part of it"},
    Field{"stop_token_ids", &Ask::stop_token_ids, kEvery, 0, 0, "", kIds,
          "Tokens that end it, besides the model's own"},
    Field{"include_stop_str_in_output", &Ask::include_stop, kEvery, 0, 0, "false", "",
          "Keep the text that ended the answer"},
    Field{"ignore_eos", &Ask::ignore_eos, kEvery, 0, 0, "false", "", "Go on where the model would end"},
    Field{"n", &Ask::n, kBoth, 1, 128, "1", "", "How many answers"},
    Field{"best_of", &Ask::best_of, kCompletions, 1, 128, "", "", "Taken where it equals n"},
    Field{"suffix", &Ask::suffix, kCompletions, 0, 0, "", kNothing, "Refused: these models do not fill in"},
    Field{"echo", &Ask::echo, kCompletions, 0, 0, "false", "", "Give the prompt back before the answer"},
    Field{"logprobs", &Ask::logprobs, kCompletions, 0, 0, "", kCountOrFlag,
          "Score the answer's tokens, with so many alternatives"},
    Field{"logprobs", &Ask::logprobs, kChat, 0, 0, "", kFlag, "Score the answer's tokens"},
    Field{"top_logprobs", &Ask::top_logprobs, kChat, 0, 20, "", "", "How many alternatives each token comes with"},
    Field{"prompt_logprobs", &Ask::prompt_logprobs, kBoth, 0, 20, "", "",
          "Score the prompt's tokens, with so many alternatives"},
    Field{"stream", &Ask::stream, kEvery, 0, 0, "false", "", "Server-sent events, one token each"},
    Field{"stream_options", &Ask::stream_options, kBoth, 0, 0, "", kObject,
          "include_usage: a last event with the usage"},
    Field{"stream_options", &Ask::stream_options, kResponses, 0, 0, "", kObject,
          "Ignored: the last event has the usage"},
    Field{"response_format", &Ask::response_format, kBoth, 0, 0, "", kFormat,
          "text, json_object, or json_schema with its schema"},
    Field{"tools", &Ask::tools, kChat, 0, 0, "", kTools, "Functions the model may call"},
    Field{"tool_choice", &Ask::tool_choice, kChat, 0, 0, "\"auto\"", kChoice,
          "auto, none, required, a function by name, or some of the tools (allowed_tools)"},
    Field{"parallel_tool_calls", &Ask::parallel_tool_calls, kTalk, 0, 0, "true", "",
          "false: the answer ends with its first call"},
    Field{"input", &Ask::input, kResponses, 0, 0, "", kInput,
          "A text, or the conversation's items: messages, calls, what they gave back, reasoning"},
    Field{"instructions", &Ask::instructions, kResponses, 0, 0, "", "", "What the system says; for this answer alone"},
    Field{"previous_response_id", &Ask::previous_response_id, kResponses, 0, 0, "", "",
          "The response that the conversation goes on from"},
    Field{"max_output_tokens", &Ask::max_completion_tokens, kResponses, 0, kMost, "", "",
          "How many tokens at most, reasoning among them"},
    Field{"text", &Ask::text, kResponses, 0, 0, "", kTextSettings,
          "format: text, json_object, or json_schema with its name and schema (verbosity is ignored)"},
    Field{"tools", &Ask::tools, kResponses, 0, 0, "", kFlatTools, "Functions the model may call"},
    Field{"tool_choice", &Ask::tool_choice, kResponses, 0, 0, "\"auto\"", kFlatChoice,
          "auto, none, required, a function by name, or some of the tools (allowed_tools)"},
    Field{"include", &Ask::include, kResponses, 0, 0, "", kInclude,
          "message.output_text.logprobs: score the answer's tokens; of the others there is never any"},
    Field{"top_logprobs", &Ask::top_logprobs, kResponses, 0, 20, "0", "",
          "How many alternatives each token comes with, where include asks for scores"},
    Field{"store", &Ask::store, kResponses, 0, 0, "true", "", "Keep the response for previous_response_id and GET"},
    Field{"metadata", &Ask::metadata, kResponses, 0, 0, "", kMetadata, "Names and texts that the answer repeats"},
    Field{"reasoning", &Ask::reasoning, kResponses, 0, 0, "", kReasoning, "Repeated, and ignored"},
    Field{"truncation", &Ask::truncation, kResponses, 0, 0, "\"disabled\"", kTruncationNames,
          "Nothing is ever dropped"},
    Field{"background", &Ask::background, kResponses, 0, 0, "false", kFalse, "An answer comes with its request"},
    Field{"conversation", &Ask::conversation, kResponses, 0, 0, "", kNull, "Refused; there is previous_response_id"},
    Field{"prompt", &Ask::prompt, kResponses, 0, 0, "", kNull, "Refused: no prompts are kept here"},
    Field{"context_management", &Ask::context_management, kResponses, 0, 0, "", kNull, "Refused: nothing is dropped"},
    Field{"service_tier", &Ask::service_tier, kResponses, 0, 0, "\"auto\"", kTierNames, "There is one, default"},
    Field{"max_tool_calls", &Ask::max_tool_calls, kResponses, 0, kMost, "", "", "Of built-in tools; there are none"},
    Field{"user", &Ask::user, kResponses, 0, 0, "", "", "Repeated in the answer"},
    Field{"safety_identifier", &Ask::safety_identifier, kResponses, 0, 0, "", "", "Repeated in the answer"},
    Field{"prompt_cache_key", &Ask::prompt_cache_key, kResponses, 0, 0, "", "",
          "Repeated in the answer; every prefix is remembered"},
    Field{"modalities", &Ask::modalities, kChat, 0, 0, "", kModalities, "Text is what there is"},
    Field{"chat_template_kwargs", &Ask::template_values, kTalk, 0, 0, "", kObject, "More variables for the template"},
    Field{"add_generation_prompt", &Ask::add_generation_prompt, kChat, 0, 0, "true", "",
          "Let the template open the answer"},
    Field{"continue_final_message", &Ask::continue_final_message, kChat, 0, 0, "false", "",
          "Go on in the last message instead of a new one"},
    Field{"separate_reasoning", &Ask::separate_reasoning, kTalk, 0, 0, "true", "",
          "Give <think> … </think> as reasoning_content, or as an item of its own"},
    Field{"add_special_tokens", &Ask::add_special_tokens, kEvery, 0, 0, "", "",
          "Put what the tokenizer puts around a text (completions: true, chat: false)"},
    Field{"skip_special_tokens", &Ask::skip_special_tokens, kEvery, 0, 0, "true", "",
          "Leave special tokens out of the text"},
    Field{"return_token_ids", &Ask::return_token_ids, kBoth, 0, 0, "false", "", "Add token_ids to every choice"},
    Field{"return_tokens_as_token_ids", &Ask::token_ids_as_texts, kEvery, 0, 0, "false", "",
          "Logprobs name tokens token_id:N"},
    Field{"iterations", &Ask::iterations, kEvery, 0, 0, "", kIterations,
          "Solver steps of the GKA layers, 0 to the model's own, or auto"},
    Field{"memory", &Ask::memory, kEvery, 0, 0, "", "", "Id of a memory that stands before the prompt"},
    Field{"certainty", &Ask::certainty, kEvery, 0, 0, "false", "", "How much of each token's query the past explains"},
    // What clients send and nothing here depends on.
    Field{"user", &Ask::ignored, kBoth, 0, 0, "", kAnything, "Ignored"},
    Field{"metadata", &Ask::ignored, kBoth, 0, 0, "", kAnything, "Ignored"},
    Field{"store", &Ask::ignored, kBoth, 0, 0, "", kAnything, "Ignored"},
    Field{"service_tier", &Ask::ignored, kBoth, 0, 0, "", kAnything, "Ignored"},
    Field{"reasoning_effort", &Ask::ignored, kChat, 0, 0, "", kAnything, "Ignored"},
    Field{"verbosity", &Ask::ignored, kChat, 0, 0, "", kAnything, "Ignored"},
    Field{"prediction", &Ask::ignored, kChat, 0, 0, "", kAnything, "Ignored: it only makes an answer come sooner"},
    Field{"moderation", &Ask::ignored, kChat, 0, 0, "", kAnything, "Ignored"},
    Field{"prompt_cache_options", &Ask::ignored, kTalk, 0, 0, "", kAnything, "Ignored"},
    Field{"prompt_cache_retention", &Ask::ignored, kTalk, 0, 0, "", kAnything, "Ignored"},
    Field{"safety_identifier", &Ask::ignored, kBoth, 0, 0, "", kAnything, "Ignored"},
    Field{"prompt_cache_key", &Ask::ignored, kBoth, 0, 0, "", kAnything, "Ignored: every prefix is remembered"},
    Field{"spaces_between_special_tokens", &Ask::ignored, kEvery, 0, 0, "", kAnything, "Ignored"},
    Field{"request_id", &Ask::ignored, kEvery, 0, 0, "", kAnything, "Ignored"},
    Field{"priority", &Ask::ignored, kEvery, 0, 0, "", kAnything, "Ignored"},
};

std::string written(double number) {
  return number == std::floor(number) && std::abs(number) < 1e16 ? std::to_string(static_cast<std::int64_t>(number))
                                                                 : Json(number).dump();
}

std::string range_of(const Field& field) {
  if (field.high >= kMost) return field.low <= -kMost ? "" : " from " + written(field.low) + " up";
  return " from " + written(field.low) + " to " + written(field.high);
}

std::string shown(const Json& value) {
  auto text = dumped(value);
  return text.size() <= 60 ? text : text.substr(0, 57) + "...";
}

/// The sentence of a value that is not what the field takes.
Problem wrong(const Field& field, const std::string& takes, const Json& value) {
  return bad_request("'" + std::string(field.name) + "' takes " + takes + ", and is " + shown(value),
                     std::string(field.name));
}

template <typename T>
T number(const Field& field, const Json& value) {
  T parsed{};
  const std::string kind = std::is_same_v<T, double> ? "a number" : "a whole number";
  if (!json::read(value, parsed)) throw wrong(field, kind + range_of(field), value);
  const auto real = static_cast<double>(parsed);
  if (!(real >= field.low && real <= field.high)) throw wrong(field, kind + range_of(field), value);
  return parsed;
}

struct Reader {
  const Field& field;
  const Json& value;
  Ask& ask;

  void operator()(bool Ask::* member) const {
    if (!value.is_boolean()) throw wrong(field, "true or false", value);
    ask.*member = value.get<bool>();
  }
  void operator()(std::optional<bool> Ask::* member) const {
    if (!value.is_boolean()) throw wrong(field, "true or false", value);
    ask.*member = value.get<bool>();
  }
  void operator()(std::int64_t Ask::* member) const { ask.*member = number<std::int64_t>(field, value); }
  void operator()(std::optional<std::int64_t> Ask::* member) const { ask.*member = number<std::int64_t>(field, value); }
  void operator()(double Ask::* member) const { ask.*member = number<double>(field, value); }
  void operator()(std::string Ask::* member) const {
    if (!value.is_string()) throw wrong(field, "a text", value);
    ask.*member = value.get<std::string>();
  }
  void operator()(Json Ask::* member) const { ask.*member = value; }
};

struct Describer {
  const Field& field;

  Json operator()(bool Ask::*) const { return {{"type", "boolean"}}; }
  Json operator()(std::optional<bool> Ask::*) const { return {{"type", "boolean"}}; }
  Json operator()(std::int64_t Ask::*) const { return ranged("integer"); }
  Json operator()(std::optional<std::int64_t> Ask::*) const { return ranged("integer"); }
  Json operator()(double Ask::*) const { return ranged("number"); }
  Json operator()(std::string Ask::*) const { return {{"type", "string"}}; }
  Json operator()(Json Ask::*) const { return Json::object(); }  // the field's own schema says it all

  Json ranged(const char* type) const {
    return {
        {"type", type}, {"minimum", Json::parse(written(field.low))}, {"maximum", Json::parse(written(field.high))}};
  }
};

constexpr std::array kMemoryFields{
    MemoryField{"input", kTextOrIds, "What is read: a text, or token ids"},
    MemoryField{"messages", kMessages, "The same as a conversation; one of the two"},
    MemoryField{"name", R"({"type":"string","maxLength":200})", "For people"},
    MemoryField{"model", kText, "One of /v1/models; may be left out where there is one, and of a fork"},
    MemoryField{"keep_tokens", R"({"type":"integer","minimum":0})",
                "How many of the last tokens attention's caches keep, in pages of 64; without it all of them"},
    MemoryField{"tools", kTools, "For the template of messages"},
    MemoryField{"chat_template_kwargs", kObject, "More variables for it"},
    MemoryField{"add_special_tokens", kFlag, "Put what the tokenizer puts around a text (a fork: false)"},
};

}  // namespace

std::span<const MemoryField> memory_fields() { return kMemoryFields; }

std::span<const Field> fields() { return kFields; }

Called called(Endpoint endpoint) {
  if (endpoint == kResponses) return {"input", "text.format", "max_output_tokens"};
  if (endpoint == kChat) return {"messages", "response_format", "max_completion_tokens"};
  return {"prompt", "response_format", "max_tokens"};
}

Ask read_ask(const Json& body, Endpoint endpoint) {
  Ask ask;
  std::vector<std::string_view> known;
  for (const auto& field : kFields) {
    if ((field.endpoints & endpoint) != 0) known.push_back(field.name);
  }
  for (const auto& [key, value] : body.items()) {
    const auto is_it = [&, &name = key](const Field& entry) {
      return entry.name == name && (entry.endpoints & endpoint) != 0;
    };
    const auto* field = std::ranges::find_if(kFields, is_it);
    if (field == kFields.end()) {
      if (value.is_null()) continue;  // left out
      throw bad_request(unknown_key(key.substr(0, 100), "the body", known), key.substr(0, 100), "unknown_field");
    }
    if (!value.is_null()) std::visit(Reader{*field, value, ask}, field->member);
  }
  return ask;
}

Json or_null(Json schema) {
  if (schema.contains("anyOf")) schema["anyOf"].push_back({{"type", "null"}});
  if (schema.contains("type") && schema["type"] != "null") schema["type"] = {schema["type"], "null"};
  return schema;
}

Json schema_of(Endpoint endpoint) {
  const auto needed = called(endpoint).prompt;
  Json properties = Json::object();
  for (const auto& field : kFields) {
    if ((field.endpoints & endpoint) == 0) continue;
    auto schema = field.schema.empty() ? std::visit(Describer{field}, field.member) : Json::parse(field.schema);
    if (field.name != needed) schema = or_null(std::move(schema));
    if (!field.fallback.empty()) schema["default"] = Json::parse(field.fallback);
    schema["description"] = field.about;
    properties[std::string(field.name)] = std::move(schema);
  }
  Json body{{"type", "object"},
            {"properties", std::move(properties)},
            {"required", {needed}},
            {"additionalProperties", false}};
  if (endpoint == kChat) {
    body["anyOf"] = Json::parse(R"([{"properties": {"top_logprobs": {"type": "null"}}},
                                    {"required": ["logprobs"], "properties": {"logprobs": {"const": true}}}])");
  }
  if (endpoint == kResponses) {
    body["anyOf"] = Json::parse(R"([{"properties": {"top_logprobs": {"enum": [0, null]}}},
                                    {"required": ["include"],
                                     "properties": {"include": {"contains": {"const": "message.output_text.logprobs"},
                                                                "type": "array"}}}])");
  }
  return body;
}

}  // namespace gka::serve
