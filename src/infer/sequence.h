// One request on its way through the engine.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "infer/engine.h"
#include "infer/pool.h"
#include "infer/sampling.h"
#include "infer/snapshots.h"

namespace gka::infer {

class Scheduler;
using Tokens = std::vector<std::int64_t>;

struct Sequence {
  RequestId id = 0;
  std::chrono::steady_clock::time_point arrived = std::chrono::steady_clock::now();
  Request request;
  Sink sink;
  Tokens tokens;                   // the memory's, the prompt's, and those that came
  std::int64_t prompt = 0;         // how many of them stood there at the start
  std::int64_t before = 0;         // of those, how many are the memory's
  std::int64_t iterations = 0;     // of GKA's solver
  Cuts cuts{};                     // of the memory before it, and of one that it is read for
  std::set<std::int64_t> marks{};  // grid points where a snapshot is worth it
  // For the engine's own ends: before the prompt is looked up (each time, where it has to wait for room), and once it
  // is read, before anything is drawn.
  std::function<void(Scheduler&, Sequence&)> on_begin{}, on_read{};

  // While it has a place in the pool:
  std::int64_t slot = -1;
  Pages pages{};             // of its tokens in order, but for those that attention has forgotten:
  std::int64_t dropped = 0;  // so many, by the cuts up to `read`
  bool begun = false;
  std::int64_t read = 0;           // tokens its state has seen
  models::DecoderState state{};    // until the prompt is read; then the slot holds it
  at::Tensor hidden{};             // [C], of the last token read
  std::vector<float> certainty{};  // there, per GKA layer
  std::vector<TokenEvent> scored{};
  std::map<std::int64_t, std::int64_t> came{};  // tokens of the answer, and how often
  std::set<std::int64_t> seen{};                // every token so far, where a penalty asks for it
  std::vector<bool> mask{};
  Usage usage{};

  /// What its states at token `point` depend on besides the tokens before it.
  Kind kind_at(std::int64_t point) const;
  std::int64_t left_to_read() const { return prompt - read; }
  std::int64_t generated() const { return static_cast<std::int64_t>(tokens.size()) - prompt; }
};

/// What a draw of a sequence has to obey: the next, or the one after `ahead` more, which must not depend on them.
/// Asks the request's filter.
Row row_of(Sequence& sequence, const std::vector<std::int64_t>& end_tokens, std::int64_t vocabulary,
           std::int64_t ahead = 0);

/// Whether what a draw has to obey depends on the token before it.
bool looks_back(const Request& request);

/// Whether the token that came last ends the sequence, and how.
Finish finish_of(const Sequence& sequence, const std::vector<std::int64_t>& end_tokens);

}  // namespace gka::infer
