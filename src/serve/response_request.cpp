#include "serve/response_request.h"

#include <algorithm>
#include <array>
#include <set>
#include <span>

#include "data/unicode.h"
#include "serve/ids.h"

namespace gka::serve {
namespace {

Problem wrong(const std::string& where, const std::string& sentence) {
  return bad_request("'" + where + "' " + sentence, where);
}

std::string quoted(const Json& value) { return dumped(value).substr(0, 60); }

std::string listed(Names names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    text += (i == 0 ? "" : i + 1 < names.size() ? ", " : " or ") + std::string(names[i]);
  }
  return text;
}

/// A field of an object; null where it has none.
Json field_of(const Json& object, std::string_view name) {
  const auto found = object.find(name);
  return found == object.end() ? Json(nullptr) : *found;
}

std::string text_of(const Json& object, std::string_view name, const std::string& where) {
  const auto value = field_of(object, name);
  const auto place = where + "." + std::string(name);
  if (value.is_null()) throw bad_request("'" + place + "' is missing", place, "missing_field");
  if (!value.is_string()) throw wrong(place, "takes a text");
  return value.get<std::string>();
}

/// Null, or one of the names.
void check_name(const Json& value, Names names, const std::string& where) {
  const bool fits = value.is_null() ||
                    (value.is_string() && std::ranges::find(names, value.get_ref<const std::string&>()) != names.end());
  if (!fits) throw wrong(where, "takes " + listed(names) + ", and is " + quoted(value));
}

// --- items

constexpr std::string_view kStatuses[] = {"in_progress", "completed", "incomplete"};

/// What an item has beside its content: its own id or a new one, its type and its status.
Json head_of(const Json& item, const char* prefix, const char* type, const std::string& where) {
  const auto id = field_of(item, "id"), status = field_of(item, "status");
  if (!id.is_null() && !id.is_string()) throw wrong(where + ".id", "takes a text");
  check_name(status, kStatuses, where + ".status");
  const bool named = id.is_string() && !id.get_ref<const std::string&>().empty();
  return {{"id", named ? id : Json(prefix + fresh_id())},
          {"type", type},
          {"status", status.is_null() ? Json("completed") : status}};
}

/// A part of a message: text, as the role has it, or what a model refused to say.
Json read_part(const Json& part, bool assistant, const std::string& where) {
  if (!part.is_object()) throw wrong(where, "takes {\"type\": \"input_text\", \"text\": …}");
  const auto type = field_of(part, "type");
  if (assistant && type == "refusal") return {{"type", type}, {"refusal", text_of(part, "refusal", where)}};
  if (type != "input_text" && type != "output_text" && type != "text") {
    throw wrong(where, "is of type " + quoted(type) + ", and this model reads text alone (input_text, output_text)");
  }
  Json read{{"type", assistant ? "output_text" : "input_text"}, {"text", text_of(part, "text", where)}};
  if (assistant) read["annotations"] = Json::array();
  return read;
}

Json read_content(const Json& content, bool assistant, const std::string& where) {
  if (content.is_string()) return Json::array({read_part({{"type", "text"}, {"text", content}}, assistant, where)});
  if (!content.is_array()) throw wrong(where, "takes a text, or a list of {\"type\": \"input_text\", \"text\": …}");
  Json parts = Json::array();
  for (std::size_t i = 0; i < content.size(); ++i) {
    parts.push_back(read_part(content[i], assistant, where + "[" + std::to_string(i) + "]"));
  }
  return parts;
}

Json read_message(const Json& item, const std::string& where) {
  static constexpr std::string_view kRoles[] = {"user", "assistant", "system", "developer"};
  const auto role = text_of(item, "role", where);
  check_name(role, kRoles, where + ".role");
  auto read = head_of(item, "msg_", "message", where);
  read["role"] = role;
  read["content"] = read_content(field_of(item, "content"), role == "assistant", where + ".content");
  return read;
}

Json read_call(const Json& item, const std::string& where) {
  auto read = head_of(item, "fc_", "function_call", where);
  for (const auto* name : {"call_id", "name", "arguments"}) read[name] = text_of(item, name, where);
  return read;
}

Json read_output(const Json& item, const std::string& where) {
  auto read = head_of(item, "fco_", "function_call_output", where);
  read["call_id"] = text_of(item, "call_id", where);
  const auto output = field_of(item, "output");
  read["output"] = output.is_string() ? output : read_content(output, false, where + ".output");
  return read;
}

/// Reasoning that a client gives back: its text where it has it. A summary or what is encrypted says nothing here.
Json read_reasoning(const Json& item, const std::string& where) {
  auto read = head_of(item, "rs_", "reasoning", where);
  read["summary"] = Json::array();
  read["content"] = Json::array();
  const auto content = field_of(item, "content");
  if (!content.is_null() && !content.is_array()) throw wrong(where + ".content", "takes a list");
  for (const auto& part : content) {
    if (!part.is_object() || field_of(part, "type") != "reasoning_text") {
      throw wrong(where + ".content", "takes {\"type\": \"reasoning_text\", \"text\": …}");
    }
    read["content"].push_back({{"type", "reasoning_text"}, {"text", text_of(part, "text", where + ".content")}});
  }
  return read;
}

struct ItemKind {
  std::string_view type;
  Json (*read)(const Json& item, const std::string& where);
};
constexpr std::array kItemKinds{ItemKind{"message", read_message}, ItemKind{"function_call", read_call},
                                ItemKind{"function_call_output", read_output}, ItemKind{"reasoning", read_reasoning}};

Json read_item(const Json& item, const std::string& where) {
  if (!item.is_object()) throw wrong(where, "takes an object");
  auto type = field_of(item, "type");
  if (type.is_null() && item.contains("role")) type = "message";
  const auto kind = std::ranges::find_if(kItemKinds, [&](const auto& one) { return type == one.type; });
  if (kind == kItemKinds.end()) {
    throw wrong(where, "is of type " + quoted(type) +
                           ", and what is read here is message, function_call, function_call_output, reasoning and "
                           "item_reference");
  }
  return kind->read(item, where);
}

Json read_input(const Json& input) {
  if (input.is_null()) throw bad_request("'input' is missing", "input", "missing_field");
  if (input.is_string()) return Json::array({read_item({{"role", "user"}, {"content", input}}, "input")});
  if (!input.is_array() || input.empty()) throw wrong("input", "takes a text or a list of at least one item");
  Json items = Json::array();
  for (std::size_t i = 0; i < input.size(); ++i) {
    items.push_back(read_item(input[i], "input[" + std::to_string(i) + "]"));
  }
  return items;
}

/// What a function gave back belongs to a call: without it the model would read an answer to nothing.
void check_outputs(const Json& before, const Json& input) {
  std::set<std::string> calls;
  const auto note = [&](const Json& item) {
    if (item["type"] == "function_call") calls.insert(item["call_id"].get<std::string>());
  };
  for (const auto& item : before) note(item);
  for (std::size_t i = 0; i < input.size(); ++i) {
    note(input[i]);
    if (input[i]["type"] != "function_call_output" || calls.contains(input[i]["call_id"].get<std::string>())) continue;
    throw wrong("input[" + std::to_string(i) + "].call_id",
                "is " + quoted(input[i]["call_id"]) +
                    ", and no function_call before it has that; send it too, or previous_response_id");
  }
}

// --- as chat has them

Json chat_parts(const Json& parts) {
  Json said = Json::array();
  for (auto part : parts) {
    if (part.contains("text")) part = {{"type", "text"}, {"text", part["text"]}};
    said.push_back(std::move(part));
  }
  return said;
}

/// What one assistant's turn is to chat (reasoning, text and calls of one message) are items of their own here.
class Messages {
 public:
  void add(const Json& item) {
    const auto& type = item["type"].get_ref<const std::string&>();
    if (type == "reasoning") return reason(item);
    if (type == "function_call") return call(item);
    if (type == "function_call_output") {
      const auto& output = item["output"];
      list_.push_back({{"role", "tool"},
                       {"tool_call_id", item["call_id"]},
                       {"content", output.is_string() ? output : chat_parts(output)}});
    } else if (item["role"] == "assistant") {
      auto& message = turn(false);
      message["content"] = chat_parts(item["content"]);
    } else {
      list_.push_back({{"role", item["role"]}, {"content", chat_parts(item["content"])}});
    }
  }

  /// A system message that stands first already takes them in: few templates have room for two.
  void instruct(const std::string& instructions) {
    if (!list_.empty() && (list_[0]["role"] == "system" || list_[0]["role"] == "developer")) {
      auto& parts = list_[0]["content"];
      parts.insert(parts.begin(), Json{{"type", "text"}, {"text", instructions}});
    } else {
      list_.insert(list_.begin(), Json{{"role", "system"}, {"content", instructions}});
    }
  }

  Json take() { return std::move(list_); }

 private:
  /// The assistant's message that an item goes into: the last one while it has no more than reasoning (where `said`,
  /// also with its text and calls, as a further call does), or else a new one.
  Json& turn(bool said) {
    const bool open = !list_.empty() && list_.back()["role"] == "assistant" &&
                      (said || (list_.back()["content"].is_null() && !list_.back().contains("tool_calls")));
    if (!open) list_.push_back({{"role", "assistant"}, {"content", nullptr}});
    return list_.back();
  }

  void reason(const Json& item) {
    std::string text;
    for (const auto& part : item["content"]) text += part["text"].get_ref<const std::string&>();
    if (text.empty()) return;
    auto& message = turn(false);
    message["reasoning_content"] = message.value("reasoning_content", "") + text;
  }

  void call(const Json& item) {
    turn(true)["tool_calls"].push_back({{"id", item["call_id"]},
                                        {"type", "function"},
                                        {"function", {{"name", item["name"]}, {"arguments", item["arguments"]}}}});
  }

  Json list_ = Json::array();
};

Json messages_of(const Json& items, const std::string& instructions) {
  Messages messages;
  for (const auto& item : items) messages.add(item);
  if (!instructions.empty()) messages.instruct(instructions);
  auto list = messages.take();
  for (auto& message : list) {  // an answer that broke off in its reasoning said nothing
    if (message["content"].is_null() && !message.contains("tool_calls")) message["content"] = "";
  }
  return list;
}

/// A function as the Responses API has it: its name and parameters beside its type.
Json read_tool(const Json& tool, const std::string& where) {
  if (!tool.is_object()) throw wrong("tools", "takes objects, and has " + quoted(tool));
  if (field_of(tool, "type") != "function") {
    throw wrong(where, "is of type " + quoted(field_of(tool, "type")) +
                           ", and functions are what can be called here ({\"type\": \"function\", \"name\": …})");
  }
  if (!tool.contains("name") && tool.contains("function")) {
    throw wrong(where + ".name", "is missing: here a function's name and parameters stand beside its type");
  }
  Json read{{"type", "function"}, {"name", text_of(tool, "name", where)}};
  for (const auto* name : {"description", "parameters", "strict"}) read[name] = field_of(tool, name);
  if (read["name"].get_ref<const std::string&>().empty()) throw wrong(where + ".name", "takes a text, and is empty");
  if (!read["description"].is_null() && !read["description"].is_string())
    throw wrong(where + ".description", "takes a text");
  if (!read["parameters"].is_null() && !read["parameters"].is_object())
    throw wrong(where + ".parameters", "takes an object");
  if (!read["strict"].is_null() && !read["strict"].is_boolean()) throw wrong(where + ".strict", "takes true or false");
  return read;
}

Json read_tools(const Json& tools) {
  Json list = Json::array();
  if (!tools.is_null() && !tools.is_array()) throw wrong("tools", "takes a list");
  for (std::size_t i = 0; i < tools.size(); ++i) {
    list.push_back(read_tool(tools[i], "tools[" + std::to_string(i) + "]"));
  }
  return list;
}

Json chat_tools(const Json& tools) {
  Json list = Json::array();
  for (const auto& tool : tools) {
    Json function = Json::object();
    for (const auto& [name, value] : tool.items()) {
      if (name != "type" && !value.is_null()) function[name] = value;
    }
    list.push_back({{"type", "function"}, {"function", std::move(function)}});
  }
  return list;
}

Json named(const Json& name) { return {{"type", "function"}, {"function", {{"name", name}}}}; }

bool names_function(const Json& choice) {
  return choice.is_object() && field_of(choice, "type") == "function" && field_of(choice, "name").is_string();
}

Json chat_choice(const Json& choice) {
  if (choice.is_null() || choice == "auto" || choice == "none" || choice == "required") return choice;
  if (names_function(choice)) return named(choice["name"]);
  const bool some = choice.is_object() && field_of(choice, "type") == "allowed_tools" &&
                    field_of(choice, "tools").is_array() && std::ranges::all_of(choice["tools"], names_function);
  if (!some) {
    throw wrong(
        "tool_choice",
        "takes auto, none, required, {\"type\": \"function\", \"name\": …} or allowed_tools, and is " + quoted(choice));
  }
  Json tools = Json::array();
  for (const auto& tool : choice["tools"]) tools.push_back(named(tool["name"]));
  return {{"type", "allowed_tools"}, {"allowed_tools", {{"mode", field_of(choice, "mode")}, {"tools", tools}}}};
}

/// `text`, with what it leaves out.
Json read_text_settings(const Json& text) {
  static constexpr std::string_view kKeys[] = {"format", "verbosity"};
  if (!text.is_null() && !text.is_object()) throw wrong("text", "takes an object");
  Json read{{"format", {{"type", "text"}}}};
  for (const auto& [key, value] : text.items()) {
    if (std::ranges::find(kKeys, key) == std::end(kKeys))
      throw bad_request(unknown_key(key.substr(0, 100), "'text'", kKeys), "text");
    if (!value.is_null()) read[key] = value;
  }
  check_name(field_of(read, "verbosity"), kVerbosities, "text.verbosity");
  return read;
}

Json chat_format(const Json& format) {
  const std::string where = "text.format";
  static constexpr std::string_view kTypes[] = {"text", "json_object", "json_schema"};
  if (!format.is_object()) throw wrong(where, "takes an object with a type");
  const auto type = field_of(format, "type");
  if (type.is_null()) throw wrong(where, "takes an object with a type");
  check_name(type, kTypes, where);
  if (type != "json_schema") return {{"type", type}};
  const auto schema = field_of(format, "schema");
  if (!schema.is_object()) throw wrong(where, "takes a schema, which is an object");
  return {{"type", type}, {"json_schema", {{"name", text_of(format, "name", where)}, {"schema", schema}}}};
}

/// Whether log-probabilities are asked for. What else may be included are parts of items that never come.
bool read_include(const Json& include) {
  static constexpr std::string_view kIncludable[] = {"message.output_text.logprobs",
                                                     "reasoning.encrypted_content",
                                                     "file_search_call.results",
                                                     "web_search_call.results",
                                                     "web_search_call.action.sources",
                                                     "message.input_image.image_url",
                                                     "computer_call_output.output.image_url",
                                                     "code_interpreter_call.outputs"};
  if (!include.is_null() && !include.is_array()) throw wrong("include", "takes a list");
  for (const auto& name : include) {
    if (name.is_null()) throw wrong("include", "takes texts");
    check_name(name, kIncludable, "include");
  }
  return std::ranges::find(include, kIncludable[0]) != include.end();
}

Json read_metadata(const Json& metadata) {
  if (metadata.is_null()) return Json::object();
  bool fits = metadata.is_object() && metadata.size() <= 16;
  for (const auto& [name, value] : metadata.items()) {
    fits = fits && data::count_characters(name) <= 64 && value.is_string() &&
           data::count_characters(value.get_ref<const std::string&>()) <= 512;
  }
  if (!fits) throw wrong("metadata", "takes up to 16 names of up to 64 characters, each with a text of up to 512");
  return metadata;
}

Json read_reasoning_settings(const Json& reasoning) {
  Json read{{"effort", nullptr}, {"summary", nullptr}};
  if (reasoning.is_null()) return read;
  if (!reasoning.is_object()) throw wrong("reasoning", "takes an object");
  read.update(reasoning);
  check_name(read["effort"], kEfforts, "reasoning.effort");
  check_name(read["summary"], kSummaries, "reasoning.summary");
  check_name(field_of(read, "generate_summary"), kSummaries, "reasoning.generate_summary");
  check_name(field_of(read, "context"), kReasoningContexts, "reasoning.context");
  if (const auto mode = field_of(read, "mode"); !mode.is_null() && !mode.is_string())
    throw wrong("reasoning.mode", "takes a text");
  return read;
}

void refuse_what_is_not_done(const Ask& ask) {
  if (ask.background) throw wrong("background", "takes false: an answer comes with the request that asks for it");
  const auto refuse = [](const Json& value, const std::string& name, const std::string& why) {
    if (!value.is_null()) throw wrong(name, "is refused: " + why);
  };
  refuse(ask.conversation, "conversation", "conversations go on by previous_response_id");
  refuse(ask.prompt, "prompt", "no prompts are kept here; send instructions and input");
  refuse(ask.context_management, "context_management", "nothing of a conversation is dropped or summed up");
  check_name(ask.truncation, kTruncations, "truncation");
  check_name(ask.service_tier, kTiers, "service_tier");
}

Json given_or_null(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }
Json given_or_null(const std::optional<std::int64_t>& number) { return number ? Json(*number) : Json(nullptr); }

}  // namespace

ResponseRequest read_response_request(Ask& ask, Json before) {
  refuse_what_is_not_done(ask);
  const auto input = read_input(ask.input);
  check_outputs(before, input);
  const auto tools = read_tools(ask.tools), text = read_text_settings(ask.text);
  auto items = std::move(before);
  items.insert(items.end(), input.begin(), input.end());
  ResponseRequest request{.settings = {}, .items = ask.store ? dumped(items) : "", .store = ask.store};
  request.settings = {{"background", false},
                      {"instructions", given_or_null(ask.instructions)},
                      {"max_output_tokens", given_or_null(ask.max_completion_tokens)},
                      {"max_tool_calls", given_or_null(ask.max_tool_calls)},
                      {"metadata", read_metadata(ask.metadata)},
                      {"parallel_tool_calls", ask.parallel_tool_calls},
                      {"previous_response_id", given_or_null(ask.previous_response_id)},
                      {"prompt_cache_key", given_or_null(ask.prompt_cache_key)},
                      {"reasoning", read_reasoning_settings(ask.reasoning)},
                      {"safety_identifier", given_or_null(ask.safety_identifier)},
                      {"service_tier", "default"},
                      {"store", ask.store},
                      {"temperature", ask.temperature},
                      {"text", text},
                      {"tool_choice", ask.tool_choice.is_null() ? Json("auto") : ask.tool_choice},
                      {"tools", tools},
                      {"top_logprobs", ask.top_logprobs.value_or(0)},
                      {"top_p", ask.top_p},
                      {"truncation", "disabled"},
                      {"user", given_or_null(ask.user)}};
  const bool logprobs = read_include(ask.include);
  if (!logprobs && ask.top_logprobs.value_or(0) > 0) {
    throw wrong("top_logprobs", "takes effect with include: [\"message.output_text.logprobs\"] alone");
  }
  if (!logprobs) ask.top_logprobs.reset();
  ask.logprobs = logprobs;
  ask.messages = messages_of(items, ask.instructions);
  ask.tools = chat_tools(tools);
  ask.tool_choice = chat_choice(ask.tool_choice);
  ask.response_format = chat_format(text["format"]);
  return request;
}

}  // namespace gka::serve
