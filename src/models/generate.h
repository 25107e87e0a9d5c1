// Continues texts token by token: the prompts go through the model once, packed, and leave their states; each further
// token is one step of all sequences that go on.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "models/decoder.h"
#include "models/sampler.h"

namespace gka::models {

struct GenerateOptions {
  std::int64_t max_tokens = 0;
  /// Sequence n draws with seed + n, so that it does not depend on which others there are.
  Sampling sampling{};
  /// Called with every token as it comes: (sequence, token, whether it is the sequence's last).
  std::function<void(std::size_t sequence, std::int64_t token, bool last)> on_token{};
};

/// The new tokens of each sequence. A sequence ends with one of the model's eos_token_id, which is among them, or after
/// max_tokens. An empty prompt throws.
std::vector<std::vector<std::int64_t>> generate(const Decoder& decoder,
                                                const std::vector<std::vector<std::int64_t>>& prompts,
                                                const GenerateOptions& options);

}  // namespace gka::models
