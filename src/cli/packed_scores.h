// How likely a model finds the last tokens of many sequences, read as training reads them: packed one behind the other,
// thousands of tokens in one pass. On a GPU a short sequence by itself is hundreds of launches that compute next to
// nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "models/decoder.h"

namespace gka::cli {

/// A sequence of which the last `scored` tokens count, fewer than it has.
struct Ending {
  std::span<const std::int64_t> tokens;
  std::int64_t scored = 0;
};

struct ScoredEnding {
  std::vector<double> log_probabilities{};  // of each that counts, given all before it
  bool greedy = true;                       // each was the likeliest
};

/// So many tokens in a pass where nobody says otherwise.
std::int64_t usual_pass(at::Device device);

/// In the order of `endings`. A pass has up to `tokens` tokens, or one sequence that is longer. `seen` hears how many
/// are done.
std::vector<ScoredEnding> score_packed(const models::Decoder& decoder, std::span<const Ending> endings,
                                       std::int64_t tokens, const std::function<void(std::size_t)>& seen = {});

}  // namespace gka::cli
