// A model that continues and scores many sequences at once: submit, stream, cancel. Tokens only: no text, no HTTP, and
// no torch in this header.
//
//   auto engine = gka::Engine::load("model");
//   engine->submit({.prompt = tokens, .max_tokens = 64},
//                  {.on_token = [](const gka::TokenEvent& event) { … }, .on_end = [](gka::Finish, …) { … }});
//
// What a request answers depends on the request and the model alone: its prompt is cut by rules that look at the prompt
// only, its draws come from its own seed, and what an earlier prompt left behind (a snapshot) gives the very numbers
// that reading the prompt anew would give. docs/inference.md says where batching may still change the last bits.
//
// Any thread may call any function of an engine. A Sink's functions and a filter run on the engine's own thread: they
// may submit, cancel and ask for stats, but not wait for the engine (drain, create_memory, fork_memory, the
// destructor). A fork has no such thread: load the engine in the process that uses it.
#pragma once

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace gka::infer {

struct Sampling {
  double temperature = 1.0;  // 0: the likeliest token each time (greedy)
  double top_p = 1.0;        // among the fewest tokens that hold this much of the probability; in (0, 1]
  std::int64_t top_k = 0;    // among so many likeliest tokens; 0: off
  double min_p = 0.0;        // among tokens at least this likely, as a share of the likeliest; in [0, 1]
  /// A token that stood in the prompt or came already: its logit is divided by it (multiplied where negative).
  double repetition_penalty = 1.0;
  double presence_penalty = 0.0;   // subtracted from the logit of a token that came already
  double frequency_penalty = 0.0;  // and this, times how often it came
  std::vector<std::pair<std::int64_t, float>> logit_bias{};
  std::uint64_t seed = 0;  // a request's tokens depend on it, the model and the request alone
};

enum class Finish : std::uint8_t { none, stop, length, cancelled, error };

/// Restricts the next token (grammars, JSON). Called on the engine's thread before each draw: fills one bit per token
/// of the vocabulary (allowed = 1) given the tokens generated so far; returns false for "no restriction now". What it
/// throws ends the request with Finish::error.
class TokenFilter {
 public:
  virtual ~TokenFilter() = default;
  virtual bool allowed(std::span<const std::int64_t> generated, std::vector<bool>& mask) = 0;
};

struct TopLogprob {
  std::int64_t token;
  float logprob;
};

/// One token that came: generated (the one that stops included), or one of the prompt (prompt_logprobs).
struct TokenEvent {
  std::int64_t token = 0;
  /// Of the model's own distribution, before penalties, temperature and truncation. NaN for the first token of all,
  /// which nothing came before.
  float logprob = 0;
  std::vector<TopLogprob> top{};  // as many as asked for, best first; of the same numbers as `logprob`
  /// The share of the queries that lies in what was read, 0 to 1: the mean over GKA layers and heads; and per layer:
  std::optional<float> certainty{};
  std::vector<float> layer_certainty{};
};

struct Usage {
  std::int64_t prompt_tokens = 0;  // the memory's tokens included
  std::int64_t completion_tokens = 0;
  std::int64_t remembered_tokens = 0;  // of the prompt (and memory), taken from a snapshot
  std::string why_not_more{};          // one sentence where nothing, or not all that could be, was remembered
  double queued_seconds = 0;           // from the request to the first look at its prompt
  /// Of the memory's tokens, those that attention still sees (MemoryInfo); none where the request names no memory.
  std::optional<std::int64_t> kept_tokens{};
};

struct Request {
  std::vector<std::int64_t> prompt{};
  Sampling sampling{};
  std::int64_t max_tokens = 16;             // 0: read (and score) the prompt only
  std::int64_t min_tokens = 0;              // what would stop the answer is not drawn before
  std::vector<std::int64_t> stop_tokens{};  // besides the model's own end tokens
  bool ignore_eos = false;
  std::int64_t top_logprobs = 0;  // how many alternatives each token comes with
  bool prompt_logprobs = false;   // score the prompt's tokens too
  bool certainty = false;
  std::optional<std::int64_t> iterations{};  // GKA solver steps for this request; none: the model's own
  bool auto_iterations = false;              // as many as Chebyshev's bound asks for, the model's own at the most
  std::string memory{};                      // id of a memory that stands before the prompt; "": none
  std::vector<std::int64_t> boundaries{};    // prompt positions worth a snapshot (ends of messages)
  std::shared_ptr<TokenFilter> filter{};
};

/// Receives what happens to one request, on the engine's thread, in order; must return quickly. A function may be
/// empty. Where one throws a std::exception, its request ends with Finish::error and that sentence; what on_end throws
/// is lost.
struct Sink {
  std::function<void(const std::vector<TokenEvent>& prompt)> on_prompt{};  // once, when it is read (prompt_logprobs)
  std::function<void(const TokenEvent& token)> on_token{};
  std::function<void(Finish finish, const Usage& usage, const std::string& error)> on_end{};  // exactly once
  /// With prompt_logprobs: the model's float32 logits after each token of the prompt, in order, one row at a time.
  std::function<void(std::span<const float> logits)> on_logits{};
};

struct Stats {
  std::int64_t running = 0, waiting = 0, slots = 0, slots_in_use = 0;
  std::int64_t cache_bytes = 0, cache_bytes_in_use = 0, snapshot_bytes = 0, snapshots = 0;
  std::int64_t steps = 0, prompt_tokens = 0, generated_tokens = 0, remembered_tokens = 0;
  std::int64_t snapshot_hits = 0, snapshot_misses = 0;
};

struct MemoryInfo {
  std::string id{}, name{};
  std::int64_t tokens = 0, state_bytes = 0, cache_bytes = 0, created = 0;  // created: unix seconds
  std::int64_t kept_tokens = 0;  // its last tokens, that attention still sees; all of them unless fewer were asked for
};

struct EngineOptions {
  std::int64_t slots = 0;            // sequences at once; 0: what fits
  std::int64_t context = 0;          // longest sequence; 0: the model's, or what fits
  std::int64_t step_tokens = 0;      // token budget of one step; 0: the engine's choice
  std::int64_t snapshot_bytes = 0;   // 0: the engine's choice; -1: none
  std::int64_t cache_bytes = 0;      // of attention's caches, all sequences together; 0: the engine's choice
  std::int64_t queue = 1024;         // requests that may wait
  std::string device{}, dtype{};     // "": automatic
  std::string weights{};             // "" or "stored", "float32", "bfloat16", "int8" (docs/inference.md)
  std::string kv_cache_dtype{};      // of attention's caches; "" or "auto": the activations', "int8": half of bfloat16
  std::filesystem::path memories{};  // folder; empty: memories live in RAM only
  bool deterministic = false;        // no answer changes in a single bit with what else runs; slower
  std::function<void(double fraction)> on_load{};
};

/// Why a request was not taken: what a server turns into 400, 404 or 429.
struct Refused : std::exception {
  enum class Reason : std::uint8_t { bad_request, unknown_memory, too_long, queue_full, stopping };
  Refused(Reason why, std::string what_field, std::string sentence)
      : reason(why), field(std::move(what_field)), message(std::move(sentence)) {}
  const char* what() const noexcept override { return message.c_str(); }
  Reason reason;
  std::string field, message;
};

using RequestId = std::uint64_t;

class Engine {
 public:
  /// A folder with config.json and weights, or a training run (its newest checkpoint). Throws a std::exception (where
  /// torch is at fault a c10::Error) with one sentence.
  static std::unique_ptr<Engine> load(const std::filesystem::path& model, const EngineOptions& options = {});
  /// Cancels what still runs: on_end of each comes first.
  virtual ~Engine() = default;

  virtual RequestId submit(Request request, Sink sink) = 0;  // throws Refused
  virtual void cancel(RequestId id) = 0;  // frees its slot at the next step; nothing where that request is over
  virtual Stats stats() const = 0;
  virtual void drain() = 0;  // refuse new requests, finish the running ones

  /// Blocks until it is read. With `keep_tokens` attention's caches keep only the pages (of 64 tokens) of so many last
  /// tokens: whatever comes behind the memory sees those and, in recurrent states and windows, what the whole text left
  /// there. A fork goes on from what its memory kept.
  virtual MemoryInfo create_memory(std::vector<std::int64_t> tokens, std::string name,
                                   std::optional<std::int64_t> keep_tokens = {}) = 0;
  virtual MemoryInfo fork_memory(const std::string& id, std::vector<std::int64_t> more, std::string name,
                                 std::optional<std::int64_t> keep_tokens = {}) = 0;
  /// Those that this model made. Several engines may share a folder: each finds what the others put there.
  virtual std::vector<MemoryInfo> memories() const = 0;
  virtual std::optional<MemoryInfo> memory(const std::string& id) const = 0;  // one of them
  virtual bool delete_memory(const std::string& id) = 0;

  virtual std::int64_t vocabulary() const = 0;
  virtual std::int64_t context() const = 0;
  virtual std::vector<std::int64_t> end_tokens() const = 0;
  virtual std::int64_t iterations() const = 0;  // the model's own; 0: it has no GKA layer
};

}  // namespace gka::infer

namespace gka {
using infer::Engine;
using infer::EngineOptions;
using infer::Finish;
using infer::MemoryInfo;
using infer::Refused;
using infer::Request;
using infer::RequestId;
using infer::Sampling;
using infer::Sink;
using infer::TokenEvent;
using infer::TokenFilter;
using infer::Usage;
}  // namespace gka
