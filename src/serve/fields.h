// What a request may ask for: one table with the name, kind, range, default and meaning of every field. It reads
// bodies, words the errors, and writes openapi.json.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "serve/problem.h"

namespace gka::serve {

/// A body of /v1/completions, /v1/chat/completions or /v1/responses. What is `Json` is looked at by whoever uses it.
struct Ask {
  std::string model, memory, suffix, instructions, previous_response_id, prompt_cache_key, safety_identifier, user;
  Json prompt, messages, tools, tool_choice, response_format, template_values, stop, stop_token_ids, logit_bias,
      stream_options, iterations, logprobs, modalities, ignored;
  Json input, text, include, metadata, reasoning, service_tier, truncation, conversation,
      context_management;  // of responses
  std::int64_t n = 1;
  std::optional<std::int64_t> max_tokens, max_completion_tokens, best_of, seed, top_logprobs, prompt_logprobs,
      max_tool_calls;
  std::int64_t min_tokens = 0, top_k = 0;
  double temperature = 1, top_p = 1, min_p = 0, repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  bool stream = false, echo = false, ignore_eos = false, certainty = false, return_token_ids = false,
       token_ids_as_texts = false, skip_special_tokens = true, include_stop = false, add_generation_prompt = true,
       continue_final_message = false, separate_reasoning = true, parallel_tool_calls = true, background = false,
       store = true;
  std::optional<bool> add_special_tokens;
};

enum Endpoint : unsigned { kCompletions = 1, kChat = 2, kBoth = 3, kResponses = 4, kTalk = 6, kEvery = 7 };

/// What an endpoint calls the fields that all of them have.
struct Called {
  std::string prompt, format, longest;
};
Called called(Endpoint endpoint);

using Member = std::variant<bool Ask::*, std::optional<bool> Ask::*, std::int64_t Ask::*,
                            std::optional<std::int64_t> Ask::*, double Ask::*, std::string Ask::*, Json Ask::*>;

/// The names that some fields take.
using Names = std::span<const std::string_view>;
inline constexpr std::string_view kEfforts[] = {"none", "minimal", "low", "medium", "high", "xhigh", "max"};
inline constexpr std::string_view kSummaries[] = {"auto", "concise", "detailed"};
inline constexpr std::string_view kReasoningContexts[] = {"auto", "current_turn", "all_turns"};
inline constexpr std::string_view kVerbosities[] = {"low", "medium", "high"};
inline constexpr std::string_view kTruncations[] = {"disabled"};
inline constexpr std::string_view kTiers[] = {"auto", "default", "flex", "scale", "priority", "fast", "ultrafast"};

struct Field {
  std::string_view name;
  Member member;
  unsigned endpoints;
  double low, high;           // of numbers
  std::string_view fallback;  // as JSON; "": none
  std::string_view schema;    // as JSON Schema, where the kind of the member does not say it all
  std::string_view about;
};

std::span<const Field> fields();

/// Throws Problem with the field's name where a value is of the wrong kind or out of range, or a field is unknown.
Ask read_ask(const Json& body, Endpoint endpoint);

/// The schema, or null: what a client leaves out it may also send as null.
Json or_null(Json schema);

/// The fields of an endpoint as a JSON Schema.
Json schema_of(Endpoint endpoint);

/// What a body may have that makes a memory, or forks one.
struct MemoryField {
  std::string_view name, schema, about;
};
std::span<const MemoryField> memory_fields();

}  // namespace gka::serve
