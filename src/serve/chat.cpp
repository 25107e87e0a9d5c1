#include "serve/chat.h"

#include <algorithm>

#include "base/files.h"

namespace gka::serve {
namespace {

constexpr const char* kPlain =
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}";

Json read_config(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) return Json::object();
  const auto json = Json::parse(read_text(path), nullptr, false);
  if (!json.is_object()) throw std::runtime_error(path.string() + " is not a JSON object");
  return json;
}

/// A special token of tokenizer_config.json: a text, or an object that holds one.
std::string token_text(const Json& config, const char* name) {
  const auto found = config.find(name);
  if (found == config.end()) return {};
  if (found->is_string()) return found->get<std::string>();
  return found->is_object() && found->contains("content") && (*found)["content"].is_string()
             ? (*found)["content"].get<std::string>()
             : std::string();
}

/// One template, or the one named default (or the first) of a list of them.
std::string template_text(const Json& config) {
  const auto found = config.find("chat_template");
  if (found == config.end()) return {};
  if (found->is_string()) return found->get<std::string>();
  std::string text;
  if (!found->is_array()) return text;
  for (const auto& entry : *found) {
    if (!entry.is_object() || !entry.contains("template") || !entry["template"].is_string()) continue;
    if (text.empty() || entry.value("name", "") == "default") text = entry["template"].get<std::string>();
  }
  return text;
}

/// Texts of a list of parts, joined by newlines.
std::string joined_parts(const Json& parts, const std::string& param) {
  std::string text;
  for (const auto& part : parts) {
    const auto type = part.is_object() ? part.value("type", Json("text")) : Json();
    const char* name = type == "refusal" ? "refusal" : "text";  // what a model may have said, as its client keeps it
    if (type != name || !part.contains(name) || !part[name].is_string())
      throw bad_request("'" + param + "' takes a text, or a list of {\"type\": \"text\", \"text\": …}", param);
    text += (text.empty() ? "" : "\n") + part[name].get<std::string>();
  }
  return text;
}

void check_calls(Json& calls, const std::string& param) {
  if (!calls.is_array()) throw bad_request("'" + param + "' takes a list", param);
  for (auto& call : calls) {
    const bool fine = call.is_object() && call.contains("function") && call["function"].is_object() &&
                      call["function"].contains("name") && call["function"]["name"].is_string();
    if (!fine) throw bad_request("each of '" + param + "' takes a function with a name", param);
    auto& function = call["function"];
    if (!function.contains("arguments") || !function["arguments"].is_string()) continue;
    auto parsed = Json::parse(function["arguments"].get<std::string>(), nullptr, false);
    if (parsed.is_object()) function["arguments"] = std::move(parsed);
  }
}

}  // namespace

Json checked_messages(const Json& messages, const std::string& param) {
  if (!messages.is_array() || messages.empty()) {
    throw bad_request("'" + param + "' takes a list of at least one message", param);
  }
  Json out = Json::array();
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const auto where = param + "[" + std::to_string(i) + "]";
    auto message = messages[i];
    if (!message.is_object() || !message.contains("role") || !message["role"].is_string()) {
      throw bad_request("'" + where + "' takes an object with a role", where);
    }
    if (message.contains("content") && message["content"].is_array()) {
      message["content"] = joined_parts(message["content"], where + ".content");
    }
    const bool called = message.contains("tool_calls") && !message["tool_calls"].is_null();
    if (called) check_calls(message["tool_calls"], where + ".tool_calls");
    const bool has_text = message.contains("content") && message["content"].is_string();
    if (!has_text && !(called && (!message.contains("content") || message["content"].is_null()))) {
      throw bad_request("'" + where + ".content' takes a text", where + ".content");
    }
    if (!has_text) message["content"] = "";
    if (!called) message.erase("tool_calls");
    out.push_back(std::move(message));
  }
  return out;
}

namespace {

std::string in_marks(const char* mark, const std::string& text) {
  return "<" + std::string(mark) + ">\n" + text + "\n</" + mark + ">";
}

/// For a template that knows nothing of tools: what there is to call stands in the system message, and calls and their
/// results are words of the conversation, in the form that answers are read in.
Json with_tools_in_words(Json messages, const Json& tools) {
  std::string list;
  for (const auto& tool : tools) list += (list.empty() ? "" : "\n") + dumped(tool);
  const auto about = "You can call functions. They are, one a line:\n" + in_marks("tools", list) +
                     "\nTo call one, write its name and arguments as JSON, like this:\n" +
                     in_marks("tool_call", R"({"name": "its name", "arguments": {"its": "arguments"}})");
  for (auto& message : messages) {
    auto text = message["content"].get<std::string>();
    for (const auto& call : message.value("tool_calls", Json::array())) {
      const auto& function = call["function"];
      const Json said{{"name", function["name"]}, {"arguments", function.value("arguments", Json::object())}};
      text += (text.empty() ? "" : "\n") + in_marks("tool_call", dumped(said));
    }
    message.erase("tool_calls");
    if (message["role"] == "tool") {
      message["role"] = "user";
      text = in_marks("tool_response", text);
    }
    message["content"] = text;
  }
  const auto role = messages[0]["role"];
  if (role == "system" || role == "developer") {
    messages[0]["content"] = messages[0]["content"].get<std::string>() + "\n\n" + about;
  } else {
    messages.insert(messages.begin(), Json{{"role", "system"}, {"content", about}});
  }
  return messages;
}

}  // namespace

ChatTemplate ChatTemplate::load(const std::filesystem::path& folder) {
  const auto config = read_config(folder / "tokenizer_config.json");
  const auto file = folder / "chat_template.jinja";
  auto source = std::filesystem::exists(file) ? read_text(file) : template_text(config);
  const bool plain = source.empty();
  if (plain) source = kPlain;
  try {
    ChatTemplate made(jinja::Template::parse(source));
    made.source_ = source;
    made.plain_ = plain;
    made.bos_ = token_text(config, "bos_token");
    made.eos_ = token_text(config, "eos_token");
    return made;
  } catch (const jinja::Error& error) {
    throw std::runtime_error("the chat template of " + folder.string() + " has a mistake in line " +
                             std::to_string(error.line) + ": " + error.what());
  }
}

std::vector<std::string> ChatTemplate::stops() const {
  return plain_ ? std::vector<std::string>{"\nuser:", "\nsystem:"} : std::vector<std::string>{};
}

jinja::Text ChatTemplate::render(const Turn& turn) const {
  using jinja::Origin;
  using jinja::Value;
  auto messages = checked_messages(turn.messages, turn.param);
  const bool tools = turn.tools.is_array() && !turn.tools.empty();
  if (tools && !mentions("tools")) messages = with_tools_in_words(std::move(messages), turn.tools);
  for (auto& message : messages) {  // OpenAI's newer name, which few templates know: they would drop what it says
    if (message["role"] == "developer" && !mentions("developer")) message["role"] = "system";
  }
  jinja::Dict variables;
  if (turn.values.is_object()) {
    for (const auto& [key, value] : turn.values.items()) variables.set(key, Value::from_json(value, Origin::request));
  }
  variables.set("messages", Value::from_json(messages, Origin::request));
  variables.set("add_generation_prompt", turn.add_generation_prompt && !turn.continue_final_message);
  if (tools) variables.set("tools", Value::from_json(turn.tools, Origin::request));
  variables.set("bos_token", bos_);
  variables.set("eos_token", eos_);
  try {
    auto text = parsed_.render(variables);
    if (!turn.continue_final_message) return text;
    const auto& last = messages.back()["content"].get_ref<const std::string&>();
    const auto at = text.bytes().rfind(last);
    if (at == std::string::npos) {
      throw bad_request("the template changes the last message, so it cannot be continued", "continue_final_message");
    }
    return text.cut(0, at + last.size());
  } catch (const jinja::Raised& error) {
    throw bad_request(std::string("the chat template refuses these messages: ") + error.what(), turn.param);
  } catch (const jinja::Error& error) {
    throw bad_request(
        "the chat template fails on these messages in line " + std::to_string(error.line) + ": " + error.what(),
        turn.param);
  }
}

Encoder::Encoder(data::Tokenizer tokenizer) : tokenizer_(std::move(tokenizer)) {
  for (data::Token id = 0; id < tokenizer_.vocab_size(); ++id) {
    if (tokenizer_.is_special(id) && !tokenizer_.bytes_of(id).empty()) spellings_.emplace_back(tokenizer_.bytes_of(id));
  }
  std::ranges::sort(spellings_, [](const auto& a, const auto& b) { return a.size() > b.size(); });
}

std::vector<Encoder::Special> Encoder::find_specials(const jinja::Text& text) const {
  std::vector<Special> found;
  const std::string_view bytes(text.bytes());
  std::string firsts;
  for (const auto& word : spellings_) firsts += word[0];
  for (auto at = bytes.find_first_of(firsts); at != std::string_view::npos && !firsts.empty();
       at = bytes.find_first_of(firsts, at)) {
    const auto word =
        std::ranges::find_if(spellings_, [&](const auto& one) { return bytes.substr(at).starts_with(one); });
    if (word == spellings_.end()) {
      ++at;
      continue;
    }
    bool ours = true;
    for (auto i = at; i < at + word->size(); ++i) ours = ours && !text.foreign(i);
    found.push_back({at, at + word->size(), ours});
    at += ours ? word->size() : 1;
  }
  return found;
}

Tokens Encoder::encode(const jinja::Text& text) const {
  Tokens tokens;
  const auto append = [&](std::string_view part) {
    const auto ids = tokenizer_.encode(part);
    tokens.insert(tokens.end(), ids.begin(), ids.end());
  };
  std::size_t done = 0;
  const std::string_view bytes(text.bytes());
  for (const auto& special : find_specials(text)) {
    if (special.ours) continue;
    append(bytes.substr(done, special.begin + 1 - done));  // cut inside the spelling: neither half is a token's
    done = special.begin + 1;
  }
  append(bytes.substr(done));
  return tokens;
}

Tokens Encoder::encode(const std::string& text, bool add_specials, bool parse_specials) const {
  if (!parse_specials && !add_specials) return encode(jinja::Text(text, jinja::Origin::request));
  const auto ids = tokenizer_.encode(text, add_specials ? data::Specials::yes : data::Specials::no);
  return {ids.begin(), ids.end()};
}

}  // namespace gka::serve
