// One request on its way: its choices in the engine, and the response or the stream of events they become.
//
// The engine's thread leaves what happens in a list; the server's thread takes it from there, so that neither waits for
// the other and text, JSON and sockets cost the engine nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "serve/http.h"
#include "serve/metrics.h"
#include "serve/plan.h"
#include "serve/response.h"
#include "serve/response_store.h"
#include "serve/text_stream.h"

namespace gka::serve {

class Completion : public std::enable_shared_from_this<Completion> {
 public:
  struct Surroundings {
    std::function<void(std::function<void()>)> post;  // to the server's thread
    Metrics* metrics;
    std::function<void(const Completion&, const std::string& outcome)> on_done;  // on the server's thread, once
    std::function<void(KeptResponse response)> keep{};                           // a response that is to be kept
  };

  Completion(std::string id, std::shared_ptr<http::Exchange> exchange, Surroundings surroundings);

  /// On any thread: hands the choices to the engine. Throws Problem where it refuses; nothing runs then.
  void submit(Plan plan);
  /// On the server's thread: the client has gone, or the server is told to stop.
  void abandon(const std::string& why);
  /// On the server's thread: the request failed before it was submitted.
  void refuse(const Problem& problem);
  /// On the server's thread: a stream that has been silent for so long (a long prompt is being read, or waits its turn)
  /// gets a line that clients skip, so that nobody between takes the connection for dead.
  void beat(std::chrono::milliseconds silence);
  /// On the server's thread: ends it with an error, also in mid-stream.
  void fail(const Problem& problem);

  const std::string& id() const { return id_; }
  infer::Usage usage() const;
  double seconds() const;
  std::string model() const { return plan_.model ? plan_.model->name : std::string(); }
  http::Exchange& exchange() const { return *exchange_; }
  std::size_t choices() const { return choices_.size(); }
  // On the server's thread, while it may still be on its way to the engine:
  std::size_t tokens_so_far() const;
  std::string model_if_known() const;
  bool streaming() const { return plan_.ask.stream; }
  std::string text() const;                         // of the first choice, for a log that may have it
  const Json& refusal() const { return refusal_; }  // for a log

 private:
  using Clock = std::chrono::steady_clock;
  struct End {
    infer::Finish finish;
    infer::Usage usage;
    std::string error;
  };
  struct Event {
    std::size_t choice;
    std::variant<std::vector<infer::TokenEvent>, infer::TokenEvent, End> what;
  };
  struct Choice {
    TextStream text;
    AnswerParser parser;
    bool begun = false, over = false;
    std::string finish{};
    infer::Usage usage{};
    std::vector<infer::TokenEvent> prompt{}, tokens{};
    std::string content{}, reasoning{};
    std::vector<ToolCall> calls{};
    std::optional<infer::TokenEvent> last_token{};
    std::size_t offset = 0;  // characters of text so far, for logprobs
    Clock::time_point first{}, last{};
    /// Nothing more counts: a stop text came, or the one call there may be.
    bool ended() const { return text.stopped() || parser.over(); }
  };
  struct Delta {  // what one token adds
    std::vector<Part> parts{};
    const infer::TokenEvent* token = nullptr;
    bool last = false;
    bool thinking = false;  // the token belongs to reasoning
  };

  infer::Sink sink_for(std::size_t choice);
  void push(Event event);
  void drain();
  void on_prompt(std::size_t at, std::vector<infer::TokenEvent> prompt);
  void on_token(std::size_t at, infer::TokenEvent token, const End* end);
  void on_end(std::size_t at, const End& end);
  void begin_choice(std::size_t at);
  bool stops(std::size_t at, std::int64_t token) const;
  bool is_last(std::size_t at, const infer::TokenEvent& token) const;
  void close_choice(std::size_t at, const End& end);
  void cancel(std::size_t at);
  void finish_if_over();
  void cancel_all();
  bool is_ready() const;

  void open_stream();
  void stream(const Json& event);
  void hold(const Json& event);
  void write_held();
  void stream_delta(std::size_t at, const Delta& delta);
  void respond(const Delta& delta);
  void end_response();
  Json take_parts(std::size_t at, const std::vector<Part>& parts);
  Json chunk() const;
  Json whole() const;
  Json choice_json(std::size_t at) const;
  Json usage_json() const;
  Json gka_json() const;
  Json text_logprobs(const Choice& choice, std::span<const infer::TokenEvent> tokens, std::size_t& offset) const;
  Json chat_logprobs(std::span<const infer::TokenEvent> tokens) const;
  Json prompt_logprobs(const Choice& choice) const;
  std::string name_of(std::int64_t token) const;

  std::string id_;
  std::shared_ptr<http::Exchange> exchange_;
  Surroundings surroundings_;
  Plan plan_;
  std::vector<Choice> choices_;
  std::optional<ResponseAnswer> response_;  // the one choice, as the Responses API tells of it
  std::string held_;                        // events of a response that go out together
  std::int64_t created_;
  Clock::time_point start_ = Clock::now(), written_ = start_;  // the stream, last
  bool done_ = false;
  Json refusal_ = Json::object();

  mutable std::mutex mutex_;  // of what follows
  std::vector<Event> events_;
  std::vector<infer::RequestId> ids_;
  bool posted_ = false, ready_ = false, gone_ = false;
};

}  // namespace gka::serve
