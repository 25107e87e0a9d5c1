// An answer of /v1/responses: its items as they grow, and the events that tell of them in the order clients rely on.
// Knows neither engine nor sockets: it is told what every token adds, and tells its events to whoever listens.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "serve/answer.h"
#include "serve/ids.h"

namespace gka::serve {

class ResponseAnswer {
 public:
  /// An event, with its type and number.
  using Listener = std::function<void(const Json& event)>;
  struct Head {
    std::string id, model;
    std::int64_t created = 0;
    Json settings = Json::object();  // of the request
  };
  ResponseAnswer(Head head, Listener listener);

  void begin();
  struct Step {  // what one token adds, or (without one) what was held back until the end
    std::span<const Part> parts{};
    bool token = true;
    bool thinking = false;      // the token belongs to reasoning
    Json logprob = nullptr;     // its own, where they are asked for
    Json own = Json::object();  // what goes beside it as `gka`
  };
  void push(const Step& step);
  struct End {
    bool cut_off = false;  // by the number of tokens
    std::int64_t prompt_tokens = 0, remembered_tokens = 0, answer_tokens = 0;
    Json own = Json::object();
  };
  void end(const End& end);
  void fail(const std::string& why);

  /// The response as it stands.
  Json body() const;

 private:
  enum class Open : std::uint8_t { nothing, reasoning, message, call };

  void tell(const char* type, Json event);
  void tell_of_item(const char* type, Json more);
  void tell_whole(const char* type);
  void open(Open kind, Json item);
  void open_message();
  void open_reasoning();
  void open_call(const std::string& name);
  void say(Open kind, const std::string& text, Json& own);
  void add_arguments(const std::string& text, Json& own);
  void close(const char* status);
  void note(const Step& step);
  std::string next_id(const char* prefix) const { return item_id(prefix, head_.id, output_.size()); }

  Head head_;
  Listener listener_;
  Json output_ = Json::array();
  Open open_ = Open::nothing;
  std::int64_t events_ = 0;
  std::size_t calls_ = 0;
  const char* status_ = "in_progress";
  Json incomplete_ = nullptr, error_ = nullptr, completed_at_ = nullptr, usage_ = nullptr, own_ = nullptr;
  // Tokens that have shown nothing yet: whose they are is known when something comes of them.
  Json waiting_ = Json::array();  // their log-probabilities
  std::int64_t waiting_tokens_ = 0, reasoning_tokens_ = 0;
};

}  // namespace gka::serve
