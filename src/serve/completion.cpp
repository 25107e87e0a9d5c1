#include "serve/completion.h"

#include <algorithm>
#include <cmath>
#include <ctime>

#include "data/unicode.h"

namespace gka::serve {
namespace {

/// JSON has no infinity; OpenAI's clients know this number for "never".
double written(float logprob) { return std::isfinite(logprob) ? logprob : -9999.0; }

std::string_view finish_name(infer::Finish finish) { return finish == infer::Finish::length ? "length" : "stop"; }

Json call_json(const ToolCall& call, const std::string& id) {
  return {{"id", id}, {"type", "function"}, {"function", {{"name", call.name}, {"arguments", call.arguments}}}};
}

}  // namespace

Completion::Completion(std::string id, std::shared_ptr<http::Exchange> exchange, Surroundings surroundings)
    : id_(std::move(id)),
      exchange_(std::move(exchange)),
      surroundings_(std::move(surroundings)),
      created_(std::time(nullptr)) {}

double Completion::seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

infer::Usage Completion::usage() const {
  infer::Usage total;
  const auto n = static_cast<std::size_t>(plan_.ask.n);
  for (std::size_t i = 0; i < choices_.size(); ++i) {
    const auto& usage = choices_[i].usage;
    total.completion_tokens += usage.completion_tokens;
    if (i % n != 0) continue;  // a prompt counts once, however many answers it gets
    total.prompt_tokens += usage.prompt_tokens;
    total.remembered_tokens += usage.remembered_tokens;
    if (total.why_not_more.empty()) total.why_not_more = usage.why_not_more;
    total.kept_tokens = usage.kept_tokens;  // the one memory before all of them
  }
  return total;
}

bool Completion::is_ready() const {
  const std::lock_guard lock(mutex_);
  return ready_;
}

std::string Completion::model_if_known() const { return is_ready() ? plan_.model->name : std::string(); }

std::size_t Completion::tokens_so_far() const {
  std::size_t count = 0;
  if (!is_ready()) return count;
  for (const auto& choice : choices_) count += choice.tokens.size();
  return count;
}

std::string Completion::text() const { return choices_.empty() ? std::string() : choices_[0].content; }

// --- between the threads

void Completion::submit(Plan plan) {
  plan_ = std::move(plan);
  const auto specials = plan_.ask.skip_special_tokens ? data::Specials::no : data::Specials::yes;
  for (std::size_t i = 0; i < plan_.requests.size(); ++i) {
    choices_.push_back({.text = TextStream(plan_.model->tokenizer(), specials, plan_.stops, plan_.ask.include_stop),
                        .parser = AnswerParser(plan_.answer)});
  }
  if (plan_.response) {
    response_.emplace(
        ResponseAnswer::Head{
            .id = id_, .model = plan_.model->name, .created = created_, .settings = plan_.response->settings},
        plan_.ask.stream ? [this](const Json& event) { hold(event); } : ResponseAnswer::Listener());
  }
  for (std::size_t i = 0; i < plan_.requests.size(); ++i) {
    {
      const std::lock_guard lock(mutex_);
      if (gone_) return;
    }
    try {
      const auto id = plan_.model->engine->submit(plan_.requests[i], sink_for(i));
      bool gone = false;  // the engine is never called with the lock held: its thread takes it in push()
      {
        const std::lock_guard lock(mutex_);
        ids_.push_back(id);
        gone = gone_;
      }
      if (gone) plan_.model->engine->cancel(id);
    } catch (const infer::Refused& refused) {
      cancel_all();
      throw problem_of(refused);
    }
  }
  {
    const std::lock_guard lock(mutex_);
    ready_ = true;
    posted_ = true;
  }
  surroundings_.post([self = shared_from_this()] { self->drain(); });
}

infer::Sink Completion::sink_for(std::size_t choice) {
  const auto self = shared_from_this();
  return {.on_prompt = [self, choice](const std::vector<infer::TokenEvent>& prompt) { self->push({choice, prompt}); },
          .on_token = [self, choice](const infer::TokenEvent& token) { self->push({choice, token}); },
          .on_end = [self, choice](infer::Finish finish, const infer::Usage& usage,
                                   const std::string& error) { self->push({choice, End{finish, usage, error}}); }};
}

void Completion::push(Event event) {
  {
    const std::lock_guard lock(mutex_);
    if (gone_) return;
    events_.push_back(std::move(event));
    if (!ready_ || posted_) return;
    posted_ = true;
  }
  surroundings_.post([self = shared_from_this()] { self->drain(); });
}

void Completion::cancel_all() {
  std::vector<infer::RequestId> ids;
  {
    const std::lock_guard lock(mutex_);
    gone_ = true;
    ids = ids_;
    events_.clear();
  }
  for (const auto id : ids) plan_.model->engine->cancel(id);
}

void Completion::drain() {
  std::vector<Event> events;
  {
    const std::lock_guard lock(mutex_);
    posted_ = false;
    events.swap(events_);
  }
  if (response_ && !done_) begin_choice(0);  // its stream tells at once that the request was taken
  for (std::size_t i = 0; i < events.size() && !done_; ++i) {
    auto& event = events[i];
    if (choices_[event.choice].over) continue;
    if (auto* prompt = std::get_if<std::vector<infer::TokenEvent>>(&event.what)) {
      on_prompt(event.choice, std::move(*prompt));
    } else if (auto* token = std::get_if<infer::TokenEvent>(&event.what)) {
      if (is_last(event.choice, *token)) {
        choices_[event.choice].last_token = std::move(*token);  // goes out with the end that follows it
      } else {
        on_token(event.choice, std::move(*token), nullptr);
      }
    } else {
      const auto& end = std::get<End>(event.what);
      auto last = std::exchange(choices_[event.choice].last_token, std::nullopt);
      if (last) on_token(event.choice, *std::move(last), &end);
      if (!done_ && !choices_[event.choice].over) on_end(event.choice, end);
    }
  }
}

bool Completion::stops(std::size_t at, std::int64_t token) const {
  const auto& more = plan_.requests[at].stop_tokens;
  return (plan_.model->ends(token) && !plan_.ask.ignore_eos) || std::ranges::find(more, token) != more.end();
}

bool Completion::is_last(std::size_t at, const infer::TokenEvent& token) const {
  const auto count = static_cast<std::int64_t>(choices_[at].tokens.size()) + 1;
  return stops(at, token.token) || count >= plan_.requests[at].max_tokens;
}

// --- what happens to a choice

void Completion::begin_choice(std::size_t at) {
  auto& choice = choices_[at];
  if (std::exchange(choice.begun, true)) return;
  if (!plan_.ask.stream) return;
  open_stream();
  if (response_) {
    response_->begin();
    write_held();
  } else if (plan_.chat) {
    auto event = chunk();
    event["choices"] = Json::array({{{"index", at},
                                     {"delta", {{"role", "assistant"}, {"content", ""}}},
                                     {"logprobs", nullptr},
                                     {"finish_reason", nullptr}}});
    stream(event);
  } else if (plan_.ask.echo) {
    auto event = chunk();
    Json entry{{"index", at}, {"text", plan_.echoes[at]}, {"logprobs", nullptr}, {"finish_reason", nullptr}};
    if (plan_.logprobs >= 0) entry["logprobs"] = text_logprobs(choice, choice.prompt, choice.offset);
    event["choices"] = Json::array({std::move(entry)});
    stream(event);
  }
}

void Completion::on_prompt(std::size_t at, std::vector<infer::TokenEvent> prompt) {
  choices_[at].prompt = std::move(prompt);
  begin_choice(at);
}

void Completion::on_token(std::size_t at, infer::TokenEvent token, const End* end) {
  auto& choice = choices_[at];
  if (choice.ended()) return;  // drawn before the engine heard of it
  begin_choice(at);
  choice.last = Clock::now();
  if (choice.tokens.empty()) choice.first = choice.last;
  choice.tokens.push_back(std::move(token));
  const auto id = choice.tokens.back().token;
  std::string text;
  if (!stops(at, id) || plan_.ask.include_stop) text = choice.text.push(static_cast<data::Token>(id));
  const bool last = end != nullptr && (end->finish == infer::Finish::stop || end->finish == infer::Finish::length);
  if (last) text += choice.text.finish();
  const bool thought = choice.parser.reasoning();
  Delta delta{.parts = choice.parser.push(text, last), .token = &choice.tokens.back(), .last = last};
  delta.thinking = thought || choice.parser.reasoning();
  if (choice.ended() && !last) cancel(at);
  if (last) close_choice(at, *end);
  stream_delta(at, delta);
  if (last) finish_if_over();
}

/// A stop text or the last call came. The choice closes when the engine says that it has ended, and what it has
/// counted.
void Completion::cancel(std::size_t at) {
  infer::RequestId id = 0;
  {
    const std::lock_guard lock(mutex_);
    id = ids_[at];
  }
  plan_.model->engine->cancel(id);
}

void Completion::on_end(std::size_t at, const End& end) {
  auto& choice = choices_[at];
  if (end.finish == infer::Finish::error)
    return fail(Problem(500, end.error.empty() ? "the engine failed" : end.error));
  if (end.finish == infer::Finish::cancelled && !choice.ended()) {
    return fail(Problem(503, "the answer was cancelled: the server is stopping", "", "stopping"));
  }
  begin_choice(at);
  Delta delta{.parts = choice.parser.push(choice.text.finish(), true), .token = nullptr, .last = true};
  close_choice(at, end);
  stream_delta(at, delta);
  finish_if_over();
}

void Completion::close_choice(std::size_t at, const End& end) {
  auto& choice = choices_[at];
  choice.over = true;
  choice.usage = end.usage;
  choice.usage.completion_tokens = static_cast<std::int64_t>(choice.tokens.size());
  choice.finish = choice.ended() ? "stop" : finish_name(end.finish);
  if (choice.parser.called() && choice.finish == "stop") choice.finish = "tool_calls";
  const auto since = [&](Clock::time_point to) { return std::chrono::duration<double>(to - start_).count(); };
  Finished answer{.reason = choice.finish, .seconds = seconds(), .usage = choice.usage};
  if (!choice.tokens.empty()) answer.first_token_seconds = since(choice.first);
  if (choice.tokens.size() > 1) {
    answer.answering_seconds = since(choice.last) - since(choice.first);
    answer.token_seconds = answer.answering_seconds / static_cast<double>(choice.tokens.size() - 1);
  }
  answer.iterations = plan_.requests[at].iterations.value_or(plan_.model->engine->iterations());
  for (const auto& token : choice.tokens) {
    if (token.certainty) answer.certainty.push_back(*token.certainty);
  }
  surroundings_.metrics->finished(plan_.model->name, answer);
}

void Completion::finish_if_over() {
  if (done_ || !std::ranges::all_of(choices_, &Choice::over)) return;
  done_ = true;
  std::size_t longest = 0;
  for (const auto& choice : choices_) longest = std::max(longest, choice.tokens.size());
  surroundings_.metrics->longest_answer(plan_.model->name, longest);
  if (response_) {
    end_response();
  } else if (plan_.ask.stream) {
    if (plan_.include_usage) {
      auto event = chunk();
      event["choices"] = Json::array();
      event["usage"] = usage_json();
      event["gka"] = gka_json();
      stream(event);
    }
    exchange_->write("data: [DONE]\n\n");
    exchange_->finish();
  } else {
    exchange_->reply(200, "application/json", dumped(whole()));
  }
  surroundings_.on_done(*this, "done");
}

void Completion::fail(const Problem& problem) {
  if (done_) return;
  cancel_all();
  refuse(problem);
}

void Completion::refuse(const Problem& problem) {
  if (std::exchange(done_, true)) return;
  refusal_ = for_log(problem);
  const auto body = error_json(problem.status, problem.what(), problem.param, problem.code);
  const bool streaming = plan_.ask.stream && exchange_->status() != 0;
  if (streaming) {
    if (response_) {
      begin_choice(0);
      response_->fail(problem.what());
      write_held();
    } else {
      stream(body);
    }
    exchange_->finish();
  } else {
    http::Headers headers;
    if (problem.retry_after > 0) headers.emplace_back("Retry-After", std::to_string(problem.retry_after));
    exchange_->reply(problem.status, "application/json", dumped(body), headers);
  }
  surroundings_.on_done(*this, "refused");
}

void Completion::abandon(const std::string& why) {
  if (std::exchange(done_, true)) return;
  const bool ready = is_ready();
  cancel_all();
  for (std::size_t i = 0; ready && i < choices_.size(); ++i) {
    if (choices_[i].over) continue;
    Finished left{.reason = "abort", .seconds = seconds()};
    left.usage.prompt_tokens = std::ssize(plan_.requests[i].prompt);
    left.usage.completion_tokens = std::ssize(choices_[i].tokens);
    surroundings_.metrics->finished(plan_.model->name, left);
  }
  surroundings_.on_done(*this, why);
}

// --- JSON

void Completion::open_stream() {
  exchange_->start(200, "text/event-stream; charset=utf-8",
                   {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}});
}

void Completion::stream(const Json& event) {
  written_ = Clock::now();
  exchange_->write("data: " + dumped(event) + "\n\n");
}

void Completion::hold(const Json& event) {
  held_ += "event: " + event["type"].get<std::string>() + "\ndata: " + dumped(event) + "\n\n";
}

/// Those that one token or the end brought: each of the last few has all that was said in it, with its scores, and none
/// of them can have been read before the next.
void Completion::write_held() {
  if (held_.empty()) return;
  written_ = Clock::now();
  exchange_->write(std::exchange(held_, std::string()));
}

void Completion::beat(std::chrono::milliseconds silence) {
  if (done_ || !is_ready() || !plan_.ask.stream || Clock::now() - written_ < silence) return;
  written_ = Clock::now();
  open_stream();
  exchange_->write(": not a token yet\n\n");
}

Json Completion::chunk() const {
  Json event{{"id", id_},
             {"object", plan_.chat ? "chat.completion.chunk" : "text_completion"},
             {"created", created_},
             {"model", plan_.model->name}};
  if (plan_.include_usage) event["usage"] = nullptr;
  return event;
}

std::string Completion::name_of(std::int64_t token) const {
  return plan_.ask.token_ids_as_texts ? "token_id:" + std::to_string(token) : plan_.model->shown(token);
}

Json Completion::text_logprobs(const Choice&, std::span<const infer::TokenEvent> tokens, std::size_t& offset) const {
  Json names = Json::array(), values = Json::array(), tops = Json::array(), offsets = Json::array();
  for (const auto& token : tokens) {
    names.push_back(name_of(token.token));
    const bool first = std::isnan(token.logprob);
    values.push_back(first ? Json(nullptr) : Json(written(token.logprob)));
    Json top = first ? Json(nullptr) : Json::object();
    if (!first) {
      const auto count = std::min(token.top.size(), static_cast<std::size_t>(plan_.logprobs));
      for (std::size_t i = 0; i < count; ++i) {
        auto name = name_of(token.top[i].token);
        if (!top.contains(name))
          top[name] = written(token.top[i].logprob);  // best first: of two with one name it stays
      }
      if (auto name = name_of(token.token); !top.contains(name)) top[name] = written(token.logprob);
    }
    tops.push_back(std::move(top));
    offsets.push_back(offset);
    offset += data::count_characters(plan_.model->shown(token.token));
  }
  return {{"tokens", names}, {"token_logprobs", values}, {"top_logprobs", tops}, {"text_offset", offsets}};
}

Json Completion::chat_logprobs(std::span<const infer::TokenEvent> tokens) const {
  const auto entry = [&](std::int64_t token, float logprob) -> Json {
    Json bytes = Json::array();
    for (const unsigned char c : plan_.model->bytes(token)) bytes.push_back(c);
    return {{"token", name_of(token)}, {"logprob", written(logprob)}, {"bytes", bytes}};
  };
  Json content = Json::array();
  for (const auto& token : tokens) {
    auto made = entry(token.token, token.logprob);
    Json top = Json::array();
    const auto count = std::min(token.top.size(), static_cast<std::size_t>(plan_.logprobs));
    for (std::size_t i = 0; i < count; ++i) top.push_back(entry(token.top[i].token, token.top[i].logprob));
    made["top_logprobs"] = std::move(top);
    content.push_back(std::move(made));
  }
  return {{"content", content}, {"refusal", nullptr}};
}

Json Completion::prompt_logprobs(const Choice& choice) const {
  Json all = Json::array();
  for (const auto& token : choice.prompt) {
    if (std::isnan(token.logprob)) {
      all.push_back(nullptr);
      continue;
    }
    Json entry = Json::object();
    const auto add = [&](std::int64_t id, float logprob) {
      entry[std::to_string(id)] = {{"logprob", written(logprob)}, {"decoded_token", plan_.model->shown(id)}};
    };
    for (const auto& top : token.top) add(top.token, top.logprob);
    add(token.token, token.logprob);
    all.push_back(std::move(entry));
  }
  return all;
}

namespace {

Json certainty_json(std::span<const infer::TokenEvent> tokens) {
  Json means = Json::array(), layers = Json::array();
  for (const auto& token : tokens) {
    means.push_back(token.certainty ? Json(*token.certainty) : Json(nullptr));
    layers.push_back(token.layer_certainty);
  }
  return {{"certainty", means}, {"layer_certainty", layers}};
}

}  // namespace

/// Adds to what the choice has said; the same as a chat's delta.
Json Completion::take_parts(std::size_t at, const std::vector<Part>& parts) {
  auto& choice = choices_[at];
  std::string content, reasoning;
  Json calls = Json::array();
  for (const auto& part : parts) {
    if (part.kind == Part::Kind::content) content += part.text;
    if (part.kind == Part::Kind::reasoning) reasoning += part.text;
    if (part.kind == Part::Kind::call) {
      choice.calls.push_back({.name = part.text, .arguments = ""});
      calls.push_back(call_json(choice.calls.back(), call_id(id_, at, choice.calls.size() - 1)));
      calls.back()["index"] = choice.calls.size() - 1;
    }
    if (part.kind == Part::Kind::arguments) {
      choice.calls.back().arguments += part.text;
      // Those of a call that began in this very delta stand beside its name.
      if (calls.empty()) calls.push_back({{"index", choice.calls.size() - 1}, {"function", {{"arguments", ""}}}});
      auto& arguments = calls.back()["function"]["arguments"].get_ref<std::string&>();
      arguments += part.text;
    }
  }
  choice.content += content;
  choice.reasoning += reasoning;
  Json delta = Json::object();
  if (!content.empty() || (reasoning.empty() && calls.empty())) delta["content"] = std::move(content);
  if (!reasoning.empty()) delta["reasoning_content"] = std::move(reasoning);
  if (!calls.empty()) delta["tool_calls"] = std::move(calls);
  return delta;
}

void Completion::stream_delta(std::size_t at, const Delta& delta) {
  auto& choice = choices_[at];
  auto change = take_parts(at, delta.parts);
  if (response_) return respond(delta);
  if (!plan_.ask.stream) return;

  const auto token = delta.token ? std::span(delta.token, 1) : std::span<const infer::TokenEvent>();
  Json entry{{"index", at}};
  if (plan_.chat) {
    entry["delta"] = std::move(change);
    entry["logprobs"] = plan_.logprobs >= 0 && delta.token ? chat_logprobs(token) : Json(nullptr);
  } else {
    entry["text"] = change.value("content", "");
    entry["logprobs"] =
        plan_.logprobs >= 0 && delta.token ? text_logprobs(choice, token, choice.offset) : Json(nullptr);
  }
  entry["finish_reason"] = delta.last ? Json(choice.finish) : Json(nullptr);
  if (delta.last && choice.text.stopped()) entry["stop_reason"] = choice.text.stop();
  if (plan_.ask.return_token_ids) entry["token_ids"] = delta.token ? Json::array({delta.token->token}) : Json::array();
  auto event = chunk();
  event["choices"] = Json::array({std::move(entry)});
  Json own = Json::object();
  if (plan_.ask.certainty && delta.token) own = certainty_json(token);
  if (delta.last) own.update(gka_json());
  if (!own.empty()) event["gka"] = std::move(own);
  stream(event);
}

void Completion::respond(const Delta& delta) {
  ResponseAnswer::Step step{
      .parts = delta.parts, .token = delta.token != nullptr, .thinking = delta.thinking, .logprob = {}, .own = {}};
  if (delta.token) {
    const auto token = std::span(delta.token, 1);
    const bool shown = !stops(0, delta.token->token) || plan_.ask.include_stop;
    if (plan_.logprobs >= 0 && shown) step.logprob = chat_logprobs(token)["content"][0];
    if (plan_.ask.certainty) step.own = certainty_json(token);
  }
  response_->push(step);
  if (!delta.last) write_held();
}

void Completion::end_response() {
  const auto& choice = choices_[0];
  const auto total = usage();
  auto own = gka_json();
  if (plan_.ask.certainty) own.update(certainty_json(choice.tokens));
  response_->end({.cut_off = choice.finish == "length",
                  .prompt_tokens = total.prompt_tokens,
                  .remembered_tokens = total.remembered_tokens,
                  .answer_tokens = total.completion_tokens,
                  .own = std::move(own)});
  const bool keeps = plan_.response->store && surroundings_.keep;
  const auto body = keeps || !plan_.ask.stream ? dumped(response_->body()) : std::string();
  if (keeps) surroundings_.keep({.id = id_, .response = body, .items = std::move(plan_.response->items)});
  write_held();
  if (plan_.ask.stream) return exchange_->finish();
  exchange_->reply(200, "application/json", body);
}

Json Completion::choice_json(std::size_t at) const {
  const auto& choice = choices_[at];
  Json entry{{"index", at}};
  if (plan_.chat) {
    Json message{{"role", "assistant"}, {"content", choice.content}, {"refusal", nullptr}};
    if (!choice.reasoning.empty()) message["reasoning_content"] = choice.reasoning;
    if (!choice.calls.empty()) {
      message["tool_calls"] = Json::array();
      for (std::size_t i = 0; i < choice.calls.size(); ++i) {
        message["tool_calls"].push_back(call_json(choice.calls[i], call_id(id_, at, i)));
      }
      if (choice.content.empty()) message["content"] = nullptr;
    }
    entry["message"] = std::move(message);
    entry["logprobs"] = plan_.logprobs >= 0 ? chat_logprobs(choice.tokens) : Json(nullptr);
  } else {
    entry["text"] = plan_.echoes[at] + choice.content;
    entry["logprobs"] = nullptr;
    if (plan_.logprobs >= 0) {
      auto tokens = plan_.ask.echo ? choice.prompt : std::vector<infer::TokenEvent>();
      tokens.insert(tokens.end(), choice.tokens.begin(), choice.tokens.end());
      std::size_t offset = 0;
      entry["logprobs"] = text_logprobs(choice, tokens, offset);
    }
  }
  entry["finish_reason"] = choice.finish;
  if (choice.text.stopped()) entry["stop_reason"] = choice.text.stop();
  if (plan_.explain_prompt) entry["prompt_logprobs"] = prompt_logprobs(choice);
  if (plan_.ask.return_token_ids) {
    Json ids = Json::array();
    for (const auto& token : choice.tokens) ids.push_back(token.token);
    entry["token_ids"] = std::move(ids);
    entry["prompt_token_ids"] = plan_.requests[at].prompt;
  }
  if (plan_.ask.certainty) entry["gka"] = certainty_json(choice.tokens);
  return entry;
}

Json Completion::usage_json() const {
  const auto total = usage();
  return {{"prompt_tokens", total.prompt_tokens},
          {"completion_tokens", total.completion_tokens},
          {"total_tokens", total.prompt_tokens + total.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", total.remembered_tokens}}}};
}

Json Completion::gka_json() const {
  const auto total = usage();
  Json own{{"remembered_tokens", total.remembered_tokens},
           {"why_not_more", total.why_not_more.empty() ? Json(nullptr) : Json(total.why_not_more)}};
  if (total.kept_tokens) own["kept_tokens"] = *total.kept_tokens;
  return own;
}

Json Completion::whole() const {
  Json body{{"id", id_},
            {"object", plan_.chat ? "chat.completion" : "text_completion"},
            {"created", created_},
            {"model", plan_.model->name},
            {"choices", Json::array()}};
  for (std::size_t i = 0; i < choices_.size(); ++i) body["choices"].push_back(choice_json(i));
  body["usage"] = usage_json();
  body["gka"] = gka_json();
  if (plan_.ask.certainty && !choices_.empty()) body["gka"].update(certainty_json(choices_[0].tokens));
  return body;
}

}  // namespace gka::serve
