// The engine for languages that are not C++: plain structs and functions of libgka_engine.so, as python/gka/_engine.py
// declares them again. A function that fails returns null (or a negative number) and leaves one sentence in
// gka_error().
#pragma once

#include <cstdint>

extern "C" {

struct GkaOptions {
  const char *device, *dtype, *weights, *memories;                        // null: automatic; no folder
  std::int64_t slots, context, step_tokens, snapshot_bytes, cache_bytes;  // as EngineOptions has them
  std::int32_t deterministic;
  const char* kv_cache_dtype;  // null: automatic
};

struct GkaRequest {
  const std::int64_t* prompt;
  std::int64_t prompt_tokens;
  const std::int64_t* stop;
  std::int64_t stop_tokens;
  const std::int64_t* bias;  // tokens, and what is added to their logits
  const float* bias_values;
  std::int64_t biases;
  const char* memory;  // null: none
  double temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  std::int64_t top_k, max_tokens, min_tokens, top_logprobs;
  std::int64_t iterations;  // −1: the model's own, −2: auto
  std::uint64_t seed;
  std::int32_t ignore_eos, prompt_logprobs, certainty;
};

/// Pointers are good until the next call for the same stream.
struct GkaEvent {
  std::int32_t kind;    // 1: a token of the prompt, 2: a new token, 3: the end
  std::int32_t finish;  // at the end: 1 stop, 2 length, 3 cancelled, 4 error
  std::int64_t token;
  double logprob, certainty;  // NaN: none
  std::int64_t tops;
  const std::int64_t* top_tokens;
  const float* top_logprobs;
  std::int64_t prompt_tokens, completion_tokens, remembered_tokens;
  std::int64_t kept_tokens;  // of the memory's, those that attention still sees; −1: there is no memory
  const char* message;       // at the end: what went wrong, or why no more was remembered
};

/// Texts are good until the thread's next call that fills one.
struct GkaMemory {
  const char *id, *name;
  std::int64_t tokens, state_bytes, cache_bytes, created;  // created: unix seconds
  std::int64_t kept_tokens;                                // its last tokens, that attention still sees
};

const char* gka_error();

void* gka_engine_load(const char* model, const GkaOptions* options);
void gka_engine_free(void* engine);  // free its streams first
std::int64_t gka_engine_vocabulary(void* engine);
std::int64_t gka_engine_context(void* engine);

void* gka_engine_submit(void* engine, const GkaRequest* request);
/// 1: an event; 0: none came in so many milliseconds; −1: the stream is over.
std::int32_t gka_stream_next(void* stream, GkaEvent* event, std::int64_t milliseconds);
void gka_stream_cancel(void* stream);  // its end comes soon
void gka_stream_free(void* stream);    // cancels what still runs

/// Reads the tokens once and keeps what the model remembers of them; `id`: after those of that memory, null: from the
/// start. Attention keeps the last `keep_tokens` of them, −1: all. 0, or −1 where it fails.
std::int32_t gka_memory_create(void* engine, const char* id, const std::int64_t* tokens, std::int64_t count,
                               const char* name, std::int64_t keep_tokens, GkaMemory* memory);
/// How many there are; writes as many as there is room for.
std::int64_t gka_memory_list(void* engine, GkaMemory* memories, std::int64_t room);
std::int32_t gka_memory_delete(void* engine, const char* id);  // 1: it is gone; 0: there is none

void* gka_tokenizer_load(const char* name);
void gka_tokenizer_free(void* tokenizer);
/// Both return how many there are, and write as many as there is room for.
std::int64_t gka_tokenizer_encode(void* tokenizer, const char* text, std::int64_t bytes, std::int64_t* ids,
                                  std::int64_t room);
std::int64_t gka_tokenizer_decode(void* tokenizer, const std::int64_t* ids, std::int64_t count, char* text,
                                  std::int64_t room);
/// How many bytes one token adds to a text, and where they are while the tokenizer lives: perhaps a part of a
/// character, nothing for a special token.
std::int64_t gka_tokenizer_piece(void* tokenizer, std::int64_t id, const char** bytes);
}
