#include "serve/plan.h"

#include <algorithm>
#include <charconv>
#include <random>

#include "data/unicode.h"
#include "serve/grammar.h"

namespace gka::serve {
namespace {

constexpr std::size_t kMostStops = 16, kLongestStop = 1000, kMostChoices = 1024;

std::uint64_t fresh_seed() {
  thread_local std::mt19937_64 random{std::random_device{}()};
  return random();
}

std::vector<std::string> read_stops(const Json& stop) {
  std::vector<std::string> stops;
  if (stop.is_null()) return stops;
  const auto list = stop.is_array() ? stop : Json::array({stop});
  for (const auto& entry : list) {
    const bool fine = entry.is_string() && !entry.get_ref<const std::string&>().empty() &&
                      data::count_characters(entry.get_ref<const std::string&>()) <= kLongestStop;
    if (!fine) throw bad_request("'stop' takes a text of 1 to 1000 characters, or a list of up to 16", "stop");
    stops.push_back(entry.get<std::string>());
  }
  if (stops.size() > kMostStops) throw bad_request("'stop' takes at most 16 texts", "stop");
  return stops;
}

std::vector<std::pair<std::int64_t, float>> read_bias(const Json& bias, const Model& model) {
  std::vector<std::pair<std::int64_t, float>> all;
  if (bias.is_null()) return all;
  if (!bias.is_object()) throw bad_request("'logit_bias' takes an object of token ids and numbers", "logit_bias");
  for (const auto& [key, value] : bias.items()) {
    std::int64_t token = -1;
    const auto parsed = std::from_chars(key.data(), key.data() + key.size(), token);
    const bool id = parsed.ec == std::errc() && parsed.ptr == key.data() + key.size() && token >= 0 &&
                    token < model.engine->vocabulary();
    if (!id) {
      throw bad_request("'logit_bias' takes token ids below " + std::to_string(model.engine->vocabulary()) +
                            ", and has '" + key.substr(0, 40) + "'",
                        "logit_bias");
    }
    if (!value.is_number() || std::abs(value.get<double>()) > 100) {
      throw bad_request("'logit_bias' takes numbers from -100 to 100", "logit_bias");
    }
    all.emplace_back(token, value.get<float>());
  }
  return all;
}

/// The prompts of a completion, as tokens and (for echo) as text.
struct Prompt {
  Tokens tokens;
  std::string text{};
  bool has_text = false;
};

Prompt text_prompt(const std::string& text, const Model& model, const Ask& ask) {
  const bool add = ask.add_special_tokens.value_or(ask.memory.empty());
  return {model.encoder.encode(text, add, true), text, true};
}

std::vector<Prompt> read_prompts(const Model& model, const Ask& ask) {
  const auto& prompt = ask.prompt;
  if (prompt.is_string()) return {text_prompt(prompt.get<std::string>(), model, ask)};
  const bool list = prompt.is_array() && !prompt.empty();
  if (list && prompt[0].is_number()) return {{read_tokens(prompt, model, "prompt")}};
  if (!list || prompt.size() > kMostChoices) {
    throw bad_request("'prompt' takes a text, a list of token ids, or a list of up to 1024 of either", "prompt");
  }
  std::vector<Prompt> prompts;
  for (std::size_t i = 0; i < prompt.size(); ++i) {
    const auto where = "prompt[" + std::to_string(i) + "]";
    if (prompt[i].is_string()) {
      prompts.push_back(text_prompt(prompt[i].get<std::string>(), model, ask));
    } else if (prompt[i].is_array()) {
      prompts.push_back({read_tokens(prompt[i], model, where)});
    } else {
      throw bad_request("'" + where + "' takes a text or a list of token ids", "prompt");
    }
  }
  return prompts;
}

void read_iterations(const Json& value, const Model& model, infer::Request& request) {
  if (value.is_null()) return;
  const auto own = model.engine->iterations();
  if (own == 0) {
    throw bad_request("'iterations' has nothing to choose: no layer of the model solves (it has no GKA layer)",
                      "iterations");
  }
  if (value == "auto") {
    request.auto_iterations = true;
    return;
  }
  std::int64_t steps = -1;
  if (value.is_boolean() || !json::read(value, steps) || steps < 0 || steps > own) {
    throw bad_request("'iterations' takes a whole number from 0 to " + std::to_string(own) +
                          " (the model's own) or auto, and is " + dumped(value).substr(0, 60),
                      "iterations");
  }
  request.iterations = steps;
}

int read_logprobs(const Ask& ask, bool chat) {
  if (chat) {
    if (!ask.logprobs.is_null() && !ask.logprobs.is_boolean()) {
      throw bad_request("'logprobs' takes true or false", "logprobs");
    }
    const bool asked = ask.logprobs.is_boolean() && ask.logprobs.get<bool>();
    if (ask.top_logprobs && !asked)
      throw bad_request("'top_logprobs' takes effect with logprobs: true alone", "top_logprobs");
    return asked ? static_cast<int>(ask.top_logprobs.value_or(0)) : -1;
  }
  if (ask.logprobs.is_null() || ask.logprobs == false) return -1;
  std::int64_t count = ask.logprobs == true ? 1 : -1;
  if (!ask.logprobs.is_boolean() && !json::read(ask.logprobs, count)) count = -1;
  if (count < 0 || count > 20) throw bad_request("'logprobs' takes a whole number from 0 to 20", "logprobs");
  return static_cast<int>(count);
}

/// What all choices share.
infer::Request base_request(const Model& model, const Ask& ask) {
  infer::Request request;
  auto& s = request.sampling;
  s.temperature = ask.temperature;
  s.top_p = ask.top_p;
  s.top_k = std::max<std::int64_t>(ask.top_k, 0);
  s.min_p = ask.min_p;
  s.repetition_penalty = ask.repetition_penalty;
  s.presence_penalty = ask.presence_penalty;
  s.frequency_penalty = ask.frequency_penalty;
  if (ask.top_p <= 0) throw bad_request("'top_p' takes a number above 0 up to 1, and is 0", "top_p");
  s.logit_bias = read_bias(ask.logit_bias, model);
  request.min_tokens = ask.min_tokens;
  request.ignore_eos = ask.ignore_eos;
  request.certainty = ask.certainty;
  request.memory = ask.memory;
  if (!ask.stop_token_ids.is_null()) request.stop_tokens = read_tokens(ask.stop_token_ids, model, "stop_token_ids");
  read_iterations(ask.iterations, model, request);
  return request;
}

std::int64_t memory_tokens(const Model& model, const std::string& id) {
  if (id.empty()) return 0;
  if (const auto memory = model.engine->memory(id)) return memory->tokens;
  throw Problem(404, "there is no memory '" + id.substr(0, 100) + "'; GET /v1/memories lists them", "memory",
                "memory_not_found");
}

/// How long the answer may get; throws where prompt and answer do not fit.
std::int64_t longest_answer(const Plan& plan, const Called& names, std::int64_t prompt, std::int64_t before) {
  const auto& ask = plan.ask;
  const auto context = plan.model->engine->context();
  const auto room = context - prompt - before;
  const auto asked = ask.max_completion_tokens ? ask.max_completion_tokens : ask.max_tokens;
  const auto all = std::to_string(prompt + before) + " tokens";
  if (room < 0 || (room == 0 && asked.value_or(1) > 0))
    throw too_long("the prompt has " + all, *plan.model, names.prompt);
  if (asked && *asked > room) {
    const auto name = ask.max_completion_tokens ? names.longest : "max_tokens";
    throw too_long("the prompt's " + all + " and " + name + " of " + std::to_string(*asked) + " are too many",
                   *plan.model, name);
  }
  return asked.value_or(plan.chat ? room : std::min<std::int64_t>(room, 16));
}

/// After every token that ends a message.
std::vector<std::int64_t> boundaries(const Model& model, const Tokens& prompt) {
  std::vector<std::int64_t> places;
  for (std::size_t i = 0; i + 1 < prompt.size(); ++i) {
    if (model.ends(prompt[i])) places.push_back(static_cast<std::int64_t>(i) + 1);
  }
  return places;
}

std::string name_of(const Json& function_holder) {
  const auto function = function_holder.is_object() ? function_holder.value("function", Json()) : Json();
  const auto name = function.is_object() ? function.value("name", Json()) : Json();
  return name.is_string() ? name.get<std::string>() : std::string();
}

Problem wrong_choice(const std::string& what) { return bad_request("'tool_choice' " + what, "tool_choice"); }

/// Those of `tools` that have one of the names.
Json tools_named(const Json& tools, const std::vector<std::string>& names) {
  Json some = Json::array();
  for (const auto& name : names) {
    const auto found = std::ranges::find_if(tools, [&](const Json& tool) { return name_of(tool) == name; });
    if (found == tools.end()) throw wrong_choice("names '" + name.substr(0, 60) + "', which is none of 'tools'");
    some.push_back(*found);
  }
  return some;
}

/// The tools that the model is told of, and those of which one has to be called; null where there are none.
struct Tools {
  Json offered, forced;
};

Tools choose_tools(const Ask& ask) {
  Tools tools{.offered = ask.tools.is_array() && !ask.tools.empty() ? ask.tools : Json(nullptr), .forced = nullptr};
  auto choice = ask.tool_choice;
  const bool some = choice.is_object() && choice.value("type", Json()) == "allowed_tools";
  const auto allowed = some ? choice.value("allowed_tools", Json()) : Json();
  if (some && allowed.is_object() && allowed.value("tools", Json()).is_array()) {
    std::vector<std::string> names;
    for (const auto& tool : allowed["tools"]) names.push_back(name_of(tool));
    if (names.empty()) throw wrong_choice("allows none of 'tools'");
    tools.offered = tools_named(tools.offered, names);
    choice = allowed.value("mode", Json());
  }
  if (choice == "none") tools.offered = nullptr;
  if (choice.is_null() || choice == "auto" || choice == "none") return tools;
  const auto name = name_of(choice);
  if (choice != "required" && name.empty()) {
    throw wrong_choice(
        "takes auto, none, required, {\"type\": \"function\", \"function\": {\"name\": …}} or allowed_tools, " +
        ("and is " + dumped(ask.tool_choice).substr(0, 60)));
  }
  if (tools.offered.is_null()) throw wrong_choice("insists on a call, and 'tools' has none to call");
  tools.forced = choice == "required" ? tools.offered : tools_named(tools.offered, {name});
  return tools;
}

std::vector<Prompt> chat_prompt(Plan& plan, const Called& names) {
  const auto& ask = plan.ask;
  const auto& model = *plan.model;
  if (!ask.template_values.is_null() && !ask.template_values.is_object()) {
    throw bad_request("'chat_template_kwargs' takes an object", "chat_template_kwargs");
  }
  if (!ask.tools.is_null() && !ask.tools.is_array()) throw bad_request("'tools' takes a list", "tools");
  for (const auto& tool : ask.tools) {
    if (!tool.is_object()) throw bad_request("each of 'tools' takes an object", "tools");
  }
  if (!ask.modalities.is_null() && ask.modalities != Json::array({"text"})) {
    throw bad_request("'modalities' takes [\"text\"]: text is what this model makes", "modalities");
  }
  const auto tools = choose_tools(ask);
  plan.offered = tools.offered;
  plan.forced = tools.forced;
  const bool use_tools = !tools.offered.is_null();
  auto text = model.chat.render({.messages = ask.messages,
                                 .tools = tools.offered,
                                 .values = ask.template_values,
                                 .add_generation_prompt = ask.add_generation_prompt,
                                 .continue_final_message = ask.continue_final_message,
                                 .param = names.prompt});
  auto tail = text.bytes();
  while (!tail.empty() && (tail.back() == '\n' || tail.back() == ' ')) tail.pop_back();
  plan.answer.tools = use_tools;
  plan.answer.single = !ask.parallel_tool_calls;
  plan.answer.reasoning = ask.separate_reasoning && model.chat.mentions("</think>");
  const bool call = !plan.forced.is_null(), thinking = tail.ends_with("<think>");
  const bool json = ask.response_format.is_object() && ask.response_format.value("type", Json()) != "text";
  // Where only JSON may come, reasoning that the template began ends before it: it would be the answer otherwise.
  if (thinking && (call || json)) text += jinja::Text("\n</think>\n\n");
  if (call) text += jinja::Text("<tool_call>\n");  // so that the answer is nothing else
  plan.answer.calling = call;
  plan.answer.inside = plan.answer.reasoning && thinking && !call && !json;
  std::vector<Prompt> prompts;
  auto tokens = model.encoder.encode(text);
  if (ask.add_special_tokens.value_or(false)) tokens = model.encoder.encode(text.bytes(), true, true);
  prompts.push_back({std::move(tokens), text.bytes(), true});
  return prompts;
}

}  // namespace

Tokens read_tokens(const Json& list, const Model& model, const std::string& param) {
  if (!list.is_array()) throw bad_request("'" + param + "' takes a list of token ids", param);
  Tokens tokens;
  tokens.reserve(list.size());
  for (const auto& entry : list) {
    std::int64_t token = -1;
    if (!json::read(entry, token) || token < 0 || token >= model.engine->vocabulary()) {
      throw bad_request("'" + param + "' takes token ids below " + std::to_string(model.engine->vocabulary()) +
                            ", and has " + dumped(entry).substr(0, 60),
                        param);
    }
    tokens.push_back(token);
  }
  return tokens;
}

Problem too_long(const std::string& what, const Model& model, const std::string& param) {
  return bad_request(
      what + ", and this model's maximum context length is " + std::to_string(model.engine->context()) + " tokens",
      param, "context_length_exceeded");
}

Problem problem_of(const infer::Refused& refused) {
  using Reason = infer::Refused::Reason;
  Problem problem(400, refused.message, refused.field);
  switch (refused.reason) {
    case Reason::unknown_memory:
      problem.status = 404;
      problem.code = "memory_not_found";
      break;
    case Reason::too_long: problem.code = "context_length_exceeded"; break;
    case Reason::queue_full:
      problem.status = 429;
      problem.code = "queue_full";
      problem.retry_after = 1;
      break;
    case Reason::stopping:
      problem.status = 503;
      problem.code = "stopping";
      break;
    case Reason::bad_request: break;
  }
  return problem;
}

Plan make_plan(std::shared_ptr<const Model> model, Ask ask, Endpoint endpoint, Json before) {
  Plan plan{.model = std::move(model),
            .chat = endpoint != kCompletions,
            .ask = std::move(ask),
            .requests = {},
            .echoes = {},
            .stops = {},
            .answer = {}};
  const auto names = called(endpoint);
  if (endpoint == kResponses) plan.response = read_response_request(plan.ask, std::move(before));
  const auto& asked = plan.ask;
  if (!asked.suffix.empty()) {
    throw bad_request("'suffix' is refused: this model continues a text, it does not fill in between", "suffix");
  }
  if (asked.stream && asked.prompt_logprobs) {
    throw bad_request("'prompt_logprobs' comes with a whole answer; a stream has no place for it", "prompt_logprobs");
  }
  if (asked.best_of && *asked.best_of != asked.n) {
    throw bad_request("'best_of' takes the same number as 'n'; choosing among more is not done here", "best_of");
  }
  if (plan.chat ? asked.messages.is_null() : asked.prompt.is_null()) {
    throw bad_request("'" + names.prompt + "' is missing", names.prompt, "missing_field");
  }
  if (!asked.stream_options.is_null()) {
    if (!asked.stream_options.is_object()) throw bad_request("'stream_options' takes an object", "stream_options");
    plan.include_usage = asked.stream_options.value("include_usage", Json(false)) == true;
  }
  plan.logprobs = read_logprobs(asked, plan.chat);
  plan.stops = read_stops(asked.stop);
  auto base = base_request(*plan.model, asked);
  const auto remembered = memory_tokens(*plan.model, asked.memory);
  const auto prompts = plan.chat ? chat_prompt(plan, names) : read_prompts(*plan.model, asked);
  if (plan.chat && plan.stops.empty()) plan.stops = plan.model->chat.stops();
  if (prompts.size() * static_cast<std::size_t>(asked.n) > kMostChoices) {
    throw bad_request("'n' times the number of prompts is at most 1024", "n");
  }
  plan.explain_prompt = asked.prompt_logprobs.has_value();
  base.prompt_logprobs = plan.explain_prompt || (asked.echo && plan.logprobs >= 0);
  base.top_logprobs = std::max<std::int64_t>(plan.logprobs, asked.prompt_logprobs.value_or(0));
  // Also where a call comes before it: what is wrong in a format is said.
  const auto format = filters_for(asked.response_format, names.format, plan.offered,
                                  asked.parallel_tool_calls ? Calls::any : Calls::one, *plan.model);
  const auto filters = plan.forced.is_null() ? format : call_filters(plan.forced, *plan.model);
  const auto seed = asked.seed ? static_cast<std::uint64_t>(*asked.seed) : fresh_seed();
  for (const auto& prompt : prompts) {
    if (prompt.tokens.empty() && remembered == 0) {
      throw bad_request("the prompt is empty; the model needs at least one token", names.prompt);
    }
    auto request = base;
    request.prompt = prompt.tokens;
    request.max_tokens = longest_answer(plan, names, static_cast<std::int64_t>(prompt.tokens.size()), remembered);
    if (request.min_tokens > request.max_tokens) {
      throw bad_request("'min_tokens' is more than the answer may have (" + std::to_string(request.max_tokens) + ")",
                        "min_tokens");
    }
    request.boundaries = boundaries(*plan.model, prompt.tokens);
    std::vector<data::Token> ids(prompt.tokens.begin(), prompt.tokens.end());
    const auto text = prompt.has_text ? prompt.text : data::replace_malformed(plan.model->tokenizer().decode(ids));
    for (std::int64_t i = 0; i < asked.n; ++i) {
      request.sampling.seed = seed + static_cast<std::uint64_t>(i);
      request.filter = filters();
      plan.requests.push_back(request);
      plan.echoes.push_back(asked.echo ? text : std::string());
    }
  }
  return plan;
}

}  // namespace gka::serve
