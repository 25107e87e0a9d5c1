#include "gka/engine_c.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/tokenizer.h"
#include "infer/engine.h"

namespace {

using gka::infer::Engine;
using gka::infer::Finish;
using gka::infer::TokenEvent;
using gka::infer::Usage;

thread_local std::string last_error;

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

std::string text_or_empty(const char* text) { return text != nullptr ? text : ""; }

gka::infer::Request request_of(const GkaRequest& r) {
  gka::infer::Request request;
  request.prompt.assign(r.prompt, r.prompt + r.prompt_tokens);
  request.stop_tokens.assign(r.stop, r.stop + r.stop_tokens);
  for (std::int64_t i = 0; i < r.biases; ++i) request.sampling.logit_bias.emplace_back(r.bias[i], r.bias_values[i]);
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
  if (r.iterations >= 0) request.iterations = r.iterations;
  request.auto_iterations = r.iterations == -2;
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

void* gka_engine_load(const char* model, const GkaOptions* o) {
  return guarded<void*>(nullptr, [&]() -> void* {
    gka::infer::EngineOptions options;
    options.device = text_or_empty(o->device);
    options.dtype = text_or_empty(o->dtype);
    options.weights = text_or_empty(o->weights);
    options.memories = text_or_empty(o->memories);
    options.slots = o->slots;
    options.context = o->context;
    options.step_tokens = o->step_tokens;
    options.snapshot_bytes = o->snapshot_bytes;
    options.cache_bytes = o->cache_bytes;
    options.deterministic = o->deterministic != 0;
    options.kv_cache_dtype = text_or_empty(o->kv_cache_dtype);
    return Engine::load(text_or_empty(model), options).release();
  });
}

void gka_engine_free(void* engine) { delete static_cast<Engine*>(engine); }
std::int64_t gka_engine_vocabulary(void* engine) { return static_cast<Engine*>(engine)->vocabulary(); }
std::int64_t gka_engine_context(void* engine) { return static_cast<Engine*>(engine)->context(); }

void* gka_engine_submit(void* engine, const GkaRequest* request) {
  return guarded<void*>(nullptr, [&]() -> void* {
    auto stream = std::make_unique<Stream>();
    stream->engine = static_cast<Engine*>(engine);
    stream->id = stream->engine->submit(request_of(*request), sink_of(stream->mailbox));
    return stream.release();
  });
}

std::int32_t gka_stream_next(void* handle, GkaEvent* event, std::int64_t milliseconds) {
  auto& stream = *static_cast<Stream*>(handle);
  if (stream.over) return -1;
  {
    std::unique_lock lock(stream.mailbox->mutex);
    const auto some = [&] { return !stream.mailbox->events.empty(); };
    if (!stream.mailbox->changed.wait_for(lock, std::chrono::milliseconds(milliseconds), some)) return 0;
    stream.current = std::move(stream.mailbox->events.front());
    stream.mailbox->events.pop_front();
  }
  const auto& current = stream.current;
  stream.over = current.kind == the_end;
  stream.top_tokens.clear();
  stream.top_logprobs.clear();
  for (const auto& top : current.token.top) {
    stream.top_tokens.push_back(top.token);
    stream.top_logprobs.push_back(top.logprob);
  }
  *event = {.kind = current.kind,
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

void gka_stream_cancel(void* handle) {
  const auto& stream = *static_cast<Stream*>(handle);
  if (!stream.over) stream.engine->cancel(stream.id);
}

void gka_stream_free(void* handle) {
  const std::unique_ptr<Stream> stream(static_cast<Stream*>(handle));
  if (!stream->over) stream->engine->cancel(stream->id);
}

std::int32_t gka_memory_create(void* handle, const char* id, const std::int64_t* tokens, std::int64_t count,
                               const char* name, std::int64_t keep_tokens, GkaMemory* memory) {
  return guarded<std::int32_t>(-1, [&] {
    auto& engine = *static_cast<Engine*>(handle);
    std::vector<std::int64_t> own(tokens, tokens + count);
    const auto keep = keep_tokens == -1 ? std::nullopt : std::optional(keep_tokens);
    last_memories = {id != nullptr ? engine.fork_memory(id, std::move(own), text_or_empty(name), keep)
                                   : engine.create_memory(std::move(own), text_or_empty(name), keep)};
    *memory = plain(last_memories.front());
    return 0;
  });
}

std::int64_t gka_memory_list(void* engine, GkaMemory* memories, std::int64_t room) {
  return guarded<std::int64_t>(-1, [&] {
    last_memories = static_cast<Engine*>(engine)->memories();
    const auto count = std::ssize(last_memories);
    for (std::int64_t i = 0; i < std::min<std::int64_t>(room, count); ++i) {
      memories[i] = plain(last_memories[static_cast<std::size_t>(i)]);
    }
    return static_cast<std::int64_t>(count);
  });
}

std::int32_t gka_memory_delete(void* engine, const char* id) {
  return guarded<std::int32_t>(-1, [&] { return static_cast<Engine*>(engine)->delete_memory(id) ? 1 : 0; });
}

void* gka_tokenizer_load(const char* name) {
  return guarded<void*>(nullptr, [&]() -> void* { return new auto(gka::data::Tokenizer::load(text_or_empty(name))); });
}

void gka_tokenizer_free(void* tokenizer) { delete static_cast<gka::data::Tokenizer*>(tokenizer); }

std::int64_t gka_tokenizer_encode(void* tokenizer, const char* text, std::int64_t bytes, std::int64_t* ids,
                                  std::int64_t room) {
  return guarded<std::int64_t>(-1, [&] {
    const auto found = static_cast<gka::data::Tokenizer*>(tokenizer)->encode({text, static_cast<std::size_t>(bytes)},
                                                                             gka::data::Specials::yes);
    std::copy_n(found.begin(), std::min<std::int64_t>(room, std::ssize(found)), ids);
    return static_cast<std::int64_t>(found.size());
  });
}

std::int64_t gka_tokenizer_decode(void* tokenizer, const std::int64_t* ids, std::int64_t count, char* text,
                                  std::int64_t room) {
  return guarded<std::int64_t>(-1, [&] {
    const std::vector<gka::data::Token> tokens(ids, ids + count);
    const auto found = static_cast<gka::data::Tokenizer*>(tokenizer)->decode(tokens, gka::data::Specials::no);
    std::copy_n(found.begin(), std::min<std::int64_t>(room, std::ssize(found)), text);
    return static_cast<std::int64_t>(found.size());
  });
}

std::int64_t gka_tokenizer_piece(void* tokenizer, std::int64_t id, const char** bytes) {
  const auto& known = *static_cast<gka::data::Tokenizer*>(tokenizer);
  const auto token = static_cast<gka::data::Token>(id);
  const auto piece = known.is_special(token) ? std::string_view() : known.bytes_of(token);
  *bytes = piece.data();
  return static_cast<std::int64_t>(piece.size());
}
