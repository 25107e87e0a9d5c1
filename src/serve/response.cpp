#include "serve/response.h"

#include <algorithm>
#include <ctime>
#include <utility>

namespace gka::serve {

ResponseAnswer::ResponseAnswer(Head head, Listener listener) : head_(std::move(head)), listener_(std::move(listener)) {}

void ResponseAnswer::tell(const char* type, Json event) {
  if (!listener_) return;
  Json told{{"type", type}, {"sequence_number", events_++}};
  told.update(event);
  listener_(told);
}

/// An event of the item that is open, or of its text.
void ResponseAnswer::tell_of_item(const char* type, Json more) {
  if (!listener_) return;
  Json event{{"item_id", output_.back()["id"]}, {"output_index", output_.size() - 1}};
  if (open_ != Open::call) event["content_index"] = 0;
  event.update(more);
  tell(type, std::move(event));
}

/// An event that has all of the response. Where nobody listens it is not made.
void ResponseAnswer::tell_whole(const char* type) {
  if (listener_) tell(type, {{"response", body()}});
}

void ResponseAnswer::begin() {
  tell_whole("response.created");
  tell_whole("response.in_progress");
}

void ResponseAnswer::open(Open kind, Json item) {
  close("completed");
  open_ = kind;
  output_.push_back(std::move(item));
  tell("response.output_item.added", {{"output_index", output_.size() - 1}, {"item", output_.back()}});
  if (kind == Open::call) return;
  auto& content = output_.back()["content"];
  content.push_back(
      kind == Open::reasoning
          ? Json{{"type", "reasoning_text"}, {"text", ""}}
          : Json{{"type", "output_text"}, {"annotations", Json::array()}, {"logprobs", Json::array()}, {"text", ""}});
  tell_of_item("response.content_part.added", {{"part", content[0]}});
}

void ResponseAnswer::close(const char* status) {
  const auto kind = open_;
  if (kind == Open::nothing) return;
  auto& item = output_.back();
  if (kind == Open::call) {  // whatever ended it: clients read the arguments of one that is complete
    status = Json::accept(item["arguments"].get_ref<const std::string&>()) ? "completed" : "incomplete";
  }
  item["status"] = status;
  if (kind == Open::call) {
    tell_of_item("response.function_call_arguments.done", {{"name", item["name"]}, {"arguments", item["arguments"]}});
  } else {
    const auto& part = item["content"][0];
    Json done{{"text", part["text"]}};
    if (kind == Open::message) done["logprobs"] = part["logprobs"];
    tell_of_item(kind == Open::message ? "response.output_text.done" : "response.reasoning_text.done", std::move(done));
    tell_of_item("response.content_part.done", {{"part", part}});
  }
  open_ = Open::nothing;
  tell("response.output_item.done", {{"output_index", output_.size() - 1}, {"item", item}});
}

void ResponseAnswer::open_message() {
  open(Open::message, {{"id", next_id("msg_")},
                       {"type", "message"},
                       {"status", "in_progress"},
                       {"role", "assistant"},
                       {"content", Json::array()}});
}

void ResponseAnswer::open_reasoning() {
  open(Open::reasoning, {{"id", next_id("rs_")},
                         {"type", "reasoning"},
                         {"status", "in_progress"},
                         {"summary", Json::array()},
                         {"content", Json::array()}});
}

void ResponseAnswer::open_call(const std::string& name) {
  waiting_.clear();  // they spelled the call
  waiting_tokens_ = 0;
  open(Open::call, {{"id", next_id("fc_")},
                    {"type", "function_call"},
                    {"status", "in_progress"},
                    {"call_id", call_id(head_.id, 0, calls_++)},
                    {"name", name},
                    {"arguments", ""}});
}

void ResponseAnswer::say(Open kind, const std::string& text, Json& own) {
  const bool message = kind == Open::message;
  if (open_ != kind) message ? open_message() : open_reasoning();
  auto& part = output_.back()["content"][0];
  part["text"].get_ref<std::string&>() += text;
  Json delta{{"delta", text}};
  if (message) {
    waiting_tokens_ = 0;
    delta["logprobs"] = std::exchange(waiting_, Json::array());
    for (const auto& logprob : delta["logprobs"]) part["logprobs"].push_back(logprob);
  }
  if (!own.empty()) delta["gka"] = std::exchange(own, Json::object());
  tell_of_item(message ? "response.output_text.delta" : "response.reasoning_text.delta", std::move(delta));
}

void ResponseAnswer::add_arguments(const std::string& text, Json& own) {
  output_.back()["arguments"].get_ref<std::string&>() += text;
  Json delta{{"delta", text}};
  if (!own.empty()) delta["gka"] = std::exchange(own, Json::object());
  tell_of_item("response.function_call_arguments.delta", std::move(delta));
}

/// Whose a token is: reasoning's, or (once it shows) the message's or a call's.
void ResponseAnswer::note(const Step& step) {
  if (step.thinking) {
    reasoning_tokens_ += waiting_tokens_ + 1;  // those before it spelled the mark
    waiting_tokens_ = 0;
    waiting_.clear();
  } else {
    ++waiting_tokens_;
  }
  const bool said = std::ranges::any_of(step.parts, [](const Part& part) { return part.kind == Part::Kind::content; });
  if ((!step.thinking || said) && !step.logprob.is_null()) waiting_.push_back(step.logprob);
}

void ResponseAnswer::push(const Step& step) {
  if (step.token) note(step);
  auto own = step.own;
  for (const auto& part : step.parts) {
    switch (part.kind) {
      case Part::Kind::content: say(Open::message, part.text, own); break;
      case Part::Kind::reasoning: say(Open::reasoning, part.text, own); break;
      case Part::Kind::call: open_call(part.text); break;
      case Part::Kind::arguments: add_arguments(part.text, own); break;
    }
  }
}

void ResponseAnswer::end(const End& end) {
  if (output_.empty()) open_message();  // an answer without a word is a message, too
  close(end.cut_off ? "incomplete" : "completed");
  status_ = end.cut_off ? "incomplete" : "completed";
  if (end.cut_off) {
    incomplete_ = {{"reason", "max_output_tokens"}};
  } else {
    completed_at_ = std::time(nullptr);
  }
  usage_ = {{"input_tokens", end.prompt_tokens},
            {"input_tokens_details", {{"cached_tokens", end.remembered_tokens}, {"cache_write_tokens", 0}}},
            {"output_tokens", end.answer_tokens},
            {"output_tokens_details", {{"reasoning_tokens", reasoning_tokens_}}},
            {"total_tokens", end.prompt_tokens + end.answer_tokens}};
  own_ = end.own;
  tell_whole(end.cut_off ? "response.incomplete" : "response.completed");
}

void ResponseAnswer::fail(const std::string& why) {
  status_ = "failed";
  error_ = {{"code", "server_error"}, {"message", why}};
  if (open_ != Open::nothing) output_.back()["status"] = "incomplete";
  tell_whole("response.failed");
}

Json ResponseAnswer::body() const {
  Json body{{"id", head_.id},
            {"object", "response"},
            {"created_at", head_.created},
            {"status", status_},
            {"completed_at", completed_at_},
            {"error", error_},
            {"incomplete_details", incomplete_},
            {"model", head_.model},
            {"output", output_}};
  body.update(head_.settings);
  body["usage"] = usage_;
  if (!own_.is_null()) body["gka"] = own_;
  return body;
}

}  // namespace gka::serve
