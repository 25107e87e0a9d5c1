#include "gka/engine_c.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/tokenizer.h"
#include "infer/engine.h"

namespace {

using gka::data::Token;
using gka::data::Tokenizer;
using gka::infer::Engine;
using gka::infer::Finish;
using gka::infer::TokenEvent;
using gka::infer::Usage;

thread_local std::string last_error;

/// What a caller's pointer leads to; a null is refused by its name.
template <typename T>
T& thing_at(T* pointer, const std::string& name) {
  if (pointer == nullptr) throw std::invalid_argument(name + " is null");
  return *pointer;
}

Tokenizer& tokenizer_at(void* handle) { return thing_at(static_cast<Tokenizer*>(handle), "tokenizer"); }
Engine& engine_at(void* handle) { return thing_at(static_cast<Engine*>(handle), "engine"); }

/// `count` things of the caller's; where there are none, the pointer may be null.
template <typename T>
std::span<T> list_at(T* first, std::int64_t count, const std::string& name) {
  if (count < 0)
    throw std::invalid_argument("the length of " + name + " takes at least 0, got " + std::to_string(count));
  if (count > 0) thing_at(first, name);
  return {first, static_cast<std::size_t>(count)};
}

/// As many of the found as there is room for go to the caller. How many were found.
template <typename Found, typename T>
std::int64_t hand_over(const Found& found, T* first, std::int64_t room, const std::string& name) {
  const auto count = std::clamp<std::int64_t>(room, 0, std::ssize(found));
  std::copy_n(found.begin(), count, list_at(first, count, name).data());
  return std::ssize(found);
}

/// The result of `call`, or `failed` with the sentence kept.
template <typename Result, typename Call>
Result guarded(Result failed, const Call& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    last_error = error.what();
    last_error.resize(std::min(last_error.size(), last_error.find('\n')));  // torch's go on with a stack trace
    return failed;
  } catch (...) {  // no exception may leave a function of C
    last_error = "something was thrown that is no std::exception";
    return failed;
  }
}

enum Kind : std::int32_t { prompt_token = 1, new_token = 2, the_end = 3 };

struct Event {
  Kind kind = new_token;
  TokenEvent token{};
  Finish finish = Finish::none;
  Usage usage{};
  std::string message{};
};

/// What happened to one request and was not asked for yet. The engine's thread and the caller share it.
struct Mailbox {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Event> events;

  void put(Event event) {
    {
      const std::lock_guard lock(mutex);
      events.push_back(std::move(event));
    }
    changed.notify_all();
  }
};

struct Stream {
  Engine* engine = nullptr;
  gka::infer::RequestId id = 0;
  std::shared_ptr<Mailbox> mailbox = std::make_shared<Mailbox>();
  Event current{};
  std::vector<std::int64_t> top_tokens;
  std::vector<float> top_logprobs;
  bool over = false;
};

/// No token has a number of more than 32 bits, and −1 is none either.
Token token_of(std::int64_t id) { return std::in_range<Token>(id) ? static_cast<Token>(id) : Token{-1}; }

std::string text_or_empty(const char* text) { return text != nullptr ? text : ""; }

gka::infer::Request request_of(const GkaRequest& r) {
  gka::infer::Request request;
  const auto prompt = list_at(r.prompt, r.prompt_tokens, "prompt");
  request.prompt.assign(prompt.begin(), prompt.end());
  const auto stop = list_at(r.stop, r.stop_tokens, "stop");
  request.stop_tokens.assign(stop.begin(), stop.end());
  const auto biased = list_at(r.bias, r.biases, "bias");
  const auto added = list_at(r.bias_values, r.biases, "bias_values");
  for (std::size_t i = 0; i < biased.size(); ++i) request.sampling.logit_bias.emplace_back(biased[i], added[i]);
  auto& sampling = request.sampling;
  sampling.temperature = r.temperature;
  sampling.top_p = r.top_p;
  sampling.top_k = r.top_k;
  sampling.min_p = r.min_p;
  sampling.repetition_penalty = r.repetition_penalty;
  sampling.presence_penalty = r.presence_penalty;
  sampling.frequency_penalty = r.frequency_penalty;
  sampling.seed = r.seed;
  request.max_tokens = r.max_tokens;
  request.min_tokens = r.min_tokens;
  request.top_logprobs = r.top_logprobs;
  request.auto_iterations = r.iterations == -2;
  if (r.iterations != -1 && r.iterations != -2) request.iterations = r.iterations;
  request.ignore_eos = r.ignore_eos != 0;
  request.prompt_logprobs = r.prompt_logprobs != 0;
  request.certainty = r.certainty != 0;
  request.memory = text_or_empty(r.memory);
  return request;
}

gka::infer::Sink sink_of(const std::shared_ptr<Mailbox>& mailbox) {
  gka::infer::Sink sink;
  const auto put_token = [mailbox](Kind kind, const TokenEvent& token) {
    Event event;
    event.kind = kind;
    event.token = token;
    mailbox->put(std::move(event));
  };
  sink.on_prompt = [put_token](const std::vector<TokenEvent>& prompt) {
    for (const auto& token : prompt) put_token(prompt_token, token);
  };
  sink.on_token = [put_token](const TokenEvent& token) { put_token(new_token, token); };
  sink.on_end = [mailbox](Finish finish, const Usage& usage, const std::string& error) {
    Event event;
    event.kind = the_end;
    event.finish = finish;
    event.usage = usage;
    event.message = error.empty() ? usage.why_not_more : error;
    mailbox->put(std::move(event));
  };
  return sink;
}

/// Whether something came, which is then the stream's current event. The longest wait is a year, because the clock
/// cannot add up any number of milliseconds.
bool wait_for_event(Stream& stream, std::int64_t milliseconds) {
  constexpr std::int64_t kYear = std::chrono::milliseconds(std::chrono::years(1)).count();
  auto& [mutex, changed, events] = *stream.mailbox;
  std::unique_lock lock(mutex);
  const auto patience = std::chrono::milliseconds(std::clamp<std::int64_t>(milliseconds, 0, kYear));
  if (!changed.wait_for(lock, patience, [&events = events] { return !events.empty(); })) return false;
  stream.current = std::move(events.front());
  events.pop_front();
  return true;
}

std::int32_t next_event(Stream& stream, GkaEvent& event, std::int64_t milliseconds) {
  if (stream.over) return -1;
  if (!wait_for_event(stream, milliseconds)) return 0;
  const auto& current = stream.current;
  stream.over = current.kind == the_end;
  stream.top_tokens.clear();
  stream.top_logprobs.clear();
  for (const auto& top : current.token.top) {
    stream.top_tokens.push_back(top.token);
    stream.top_logprobs.push_back(top.logprob);
  }
  event = {.kind = current.kind,
           .finish = static_cast<std::int32_t>(current.finish),
           .token = current.token.token,
           .logprob = current.token.logprob,
           .certainty = current.token.certainty.value_or(std::numeric_limits<float>::quiet_NaN()),
           .tops = static_cast<std::int64_t>(stream.top_tokens.size()),
           .top_tokens = stream.top_tokens.data(),
           .top_logprobs = stream.top_logprobs.data(),
           .prompt_tokens = current.usage.prompt_tokens,
           .completion_tokens = current.usage.completion_tokens,
           .remembered_tokens = current.usage.remembered_tokens,
           .kept_tokens = current.usage.kept_tokens.value_or(-1),
           .message = current.message.c_str()};
  return 1;
}

thread_local std::vector<gka::infer::MemoryInfo> last_memories;

GkaMemory plain(const gka::infer::MemoryInfo& memory) {
  return {.id = memory.id.c_str(),
          .name = memory.name.c_str(),
          .tokens = memory.tokens,
          .state_bytes = memory.state_bytes,
          .cache_bytes = memory.cache_bytes,
          .created = memory.created,
          .kept_tokens = memory.kept_tokens};
}

}  // namespace

const char* gka_error() { return last_error.c_str(); }

void* gka_engine_load(const char* model, const GkaOptions* asked) {
  return guarded<void*>(nullptr, [&]() -> void* {
    const GkaOptions o = asked != nullptr ? *asked : GkaOptions{};
    gka::infer::EngineOptions options;
    options.device = text_or_empty(o.device);
    options.dtype = text_or_empty(o.dtype);
    options.weights = text_or_empty(o.weights);
    options.memories = text_or_empty(o.memories);
    options.slots = o.slots;
    options.context = o.context;
    options.step_tokens = o.step_tokens;
    options.snapshot_bytes = o.snapshot_bytes;
    options.cache_bytes = o.cache_bytes;
    options.deterministic = o.deterministic != 0;
    options.kv_cache_dtype = text_or_empty(o.kv_cache_dtype);
    return Engine::load(&thing_at(model, "model"), options).release();
  });
}

void gka_engine_free(void* engine) { delete static_cast<Engine*>(engine); }

std::int64_t gka_engine_vocabulary(void* engine) {
  return guarded<std::int64_t>(-1, [&] { return engine_at(engine).vocabulary(); });
}

std::int64_t gka_engine_context(void* engine) {
  return guarded<std::int64_t>(-1, [&] { return engine_at(engine).context(); });
}

void* gka_engine_submit(void* engine, const GkaRequest* request) {
  return guarded<void*>(nullptr, [&]() -> void* {
    auto stream = std::make_unique<Stream>();
    stream->engine = &engine_at(engine);
    stream->id = stream->engine->submit(request_of(thing_at(request, "request")), sink_of(stream->mailbox));
    return stream.release();
  });
}

std::int32_t gka_stream_next(void* handle, GkaEvent* event, std::int64_t milliseconds) {
  return guarded<std::int32_t>(-1, [&] {
    auto& stream = thing_at(static_cast<Stream*>(handle), "stream");
    return next_event(stream, thing_at(event, "event"), milliseconds);
  });
}

void gka_stream_cancel(void* handle) {
  guarded(false, [&] {
    const auto& stream = thing_at(static_cast<Stream*>(handle), "stream");
    if (!stream.over) stream.engine->cancel(stream.id);
    return true;
  });
}

void gka_stream_free(void* handle) {
  if (handle == nullptr) return;
  gka_stream_cancel(handle);
  delete static_cast<Stream*>(handle);
}

std::int32_t gka_memory_create(void* handle, const char* id, const std::int64_t* tokens, std::int64_t count,
                               const char* name, std::int64_t keep_tokens, GkaMemory* memory) {
  return guarded<std::int32_t>(-1, [&] {
    auto& engine = engine_at(handle);
    auto& told = thing_at(memory, "memory");
    const auto read = list_at(tokens, count, "tokens");
    std::vector<std::int64_t> own(read.begin(), read.end());
    const auto keep = keep_tokens == -1 ? std::nullopt : std::optional(keep_tokens);
    last_memories = {id != nullptr ? engine.fork_memory(id, std::move(own), text_or_empty(name), keep)
                                   : engine.create_memory(std::move(own), text_or_empty(name), keep)};
    told = plain(last_memories.front());
    return 0;
  });
}

std::int64_t gka_memory_list(void* engine, GkaMemory* memories, std::int64_t room) {
  return guarded<std::int64_t>(-1, [&] {
    last_memories = engine_at(engine).memories();
    std::vector<GkaMemory> found;
    for (const auto& memory : last_memories) found.push_back(plain(memory));
    return hand_over(found, memories, room, "memories");
  });
}

std::int32_t gka_memory_delete(void* engine, const char* id) {
  return guarded<std::int32_t>(-1, [&] { return engine_at(engine).delete_memory(&thing_at(id, "id")) ? 1 : 0; });
}

void* gka_tokenizer_load(const char* name) {
  return guarded<void*>(nullptr, [&]() -> void* { return new auto(Tokenizer::load(&thing_at(name, "name"))); });
}

void gka_tokenizer_free(void* tokenizer) { delete static_cast<Tokenizer*>(tokenizer); }

std::int64_t gka_tokenizer_encode(void* tokenizer, const char* text, std::int64_t bytes, std::int64_t* ids,
                                  std::int64_t room) {
  return guarded<std::int64_t>(-1, [&] {
    const auto read = list_at(text, bytes, "text");
    const auto found = tokenizer_at(tokenizer).encode({read.data(), read.size()}, gka::data::Specials::yes);
    return hand_over(found, ids, room, "ids");
  });
}

std::int64_t gka_tokenizer_decode(void* tokenizer, const std::int64_t* ids, std::int64_t count, char* text,
                                  std::int64_t room) {
  return guarded<std::int64_t>(-1, [&] {
    std::vector<Token> tokens;
    for (const auto id : list_at(ids, count, "ids")) tokens.push_back(token_of(id));
    return hand_over(tokenizer_at(tokenizer).decode(tokens, gka::data::Specials::no), text, room, "text");
  });
}

std::int64_t gka_tokenizer_piece(void* tokenizer, std::int64_t id, const char** bytes) {
  return guarded<std::int64_t>(-1, [&] {
    const auto& known = tokenizer_at(tokenizer);
    const auto token = token_of(id);
    const auto piece = known.is_special(token) ? std::string_view() : known.bytes_of(token);
    thing_at(bytes, "bytes") = piece.data();
    return static_cast<std::int64_t>(piece.size());
  });
}
