// The engine of engine.h for C, and for languages that call C: plain structs and functions of libgka_engine.so, as
// python/gka/_engine.py declares them again. Valid C11.
//
//   GkaOptions options = {0};
//   void* engine = gka_engine_load("model", &options);
//   if (engine == NULL) puts(gka_error());
//
// A function that fails returns null (or a negative number) and leaves one sentence in gka_error(), which is the
// calling thread's own. It fails where a pointer is null that leads to something: an engine, a request, a list that is
// not empty; those that free take a null. Many threads may use an engine or a tokenizer at once, a stream one at a
// time. Texts are UTF-8 and end with 0; all that comes in is copied before the call returns. A fork has no engine: load
// it there.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/// Zero is the default of every field.
typedef struct GkaOptions {
  const char *device, *dtype, *weights, *memories;                   // null: automatic; no folder
  int64_t slots, context, step_tokens, snapshot_bytes, cache_bytes;  // as EngineOptions has them
  int32_t deterministic;
  const char* kv_cache_dtype;  // null: automatic
} GkaOptions;

typedef struct GkaRequest {
  const int64_t* prompt;
  int64_t prompt_tokens;
  const int64_t* stop;
  int64_t stop_tokens;
  const int64_t* bias;  // tokens, and what is added to their logits
  const float* bias_values;
  int64_t biases;
  const char* memory;         // null: none
  double temperature;         // 0: the likeliest token each time
  double top_p;               // 1: off; 0 is refused
  double min_p;               // 0: off
  double repetition_penalty;  // 1: off; 0 is refused
  double presence_penalty, frequency_penalty;
  int64_t top_k, max_tokens, min_tokens, top_logprobs;
  int64_t iterations;  // −1: the model's own, −2: auto
  uint64_t seed;
  int32_t ignore_eos, prompt_logprobs, certainty;
} GkaRequest;

/// Pointers are good until the next call for the same stream.
typedef struct GkaEvent {
  int32_t kind;    // 1: a token of the prompt, 2: a new token, 3: the end
  int32_t finish;  // at the end: 1 stop, 2 length, 3 cancelled, 4 error
  int64_t token;
  double logprob, certainty;  // NaN: none
  int64_t tops;
  const int64_t* top_tokens;
  const float* top_logprobs;
  int64_t prompt_tokens, completion_tokens, remembered_tokens;
  int64_t kept_tokens;  // of the memory's, those that attention still sees; −1: there is no memory
  const char* message;  // at the end: what went wrong, or why no more was remembered
} GkaEvent;

/// Texts are good until the thread's next call that fills one.
typedef struct GkaMemory {
  const char *id, *name;
  int64_t tokens, state_bytes, cache_bytes, created;  // created: unix seconds
  int64_t kept_tokens;                                // its last tokens, that attention still sees
} GkaMemory;

const char* gka_error(void);

void* gka_engine_load(const char* model, const GkaOptions* options);  // null: all of them zero
void gka_engine_free(void* engine);                                   // free its streams first
int64_t gka_engine_vocabulary(void* engine);
int64_t gka_engine_context(void* engine);

void* gka_engine_submit(void* engine, const GkaRequest* request);
/// 1: an event; 0: none came in so many milliseconds (at most a year's); −1: the stream is over.
int32_t gka_stream_next(void* stream, GkaEvent* event, int64_t milliseconds);
void gka_stream_cancel(void* stream);  // its end comes soon
void gka_stream_free(void* stream);    // cancels what still runs

/// Reads the tokens once and keeps what the model remembers of them; `id`: after those of that memory, null: from the
/// start. Attention keeps the last `keep_tokens` of them, −1: all. 0, or −1 where it fails.
int32_t gka_memory_create(void* engine, const char* id, const int64_t* tokens, int64_t count, const char* name,
                          int64_t keep_tokens, GkaMemory* memory);
/// How many there are; writes as many as there is room for.
int64_t gka_memory_list(void* engine, GkaMemory* memories, int64_t room);
int32_t gka_memory_delete(void* engine, const char* id);  // 1: it is gone; 0: there is none

void* gka_tokenizer_load(const char* name);
void gka_tokenizer_free(void* tokenizer);
/// Both return how many there are, and write as many as there is room for. A number that is no token's adds nothing.
int64_t gka_tokenizer_encode(void* tokenizer, const char* text, int64_t bytes, int64_t* ids, int64_t room);
int64_t gka_tokenizer_decode(void* tokenizer, const int64_t* ids, int64_t count, char* text, int64_t room);
/// How many bytes one token adds to a text, and where they are while the tokenizer lives: perhaps a part of a
/// character, nothing for a special token.
int64_t gka_tokenizer_piece(void* tokenizer, int64_t id, const char** bytes);

#ifdef __cplusplus
}
#endif
