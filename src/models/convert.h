// Replaces attention layers of a trained model by memories that take over its projections: the first step of making a
// hybrid of it. What a memory has beyond q, k, v and output starts as in training, convolutions as the identity;
// learning the rest is training's.
#pragma once

#include <cstdint>
#include <string>

#include "models/decoder.h"

namespace gka::models {

/// `pattern` has a token for every layer. Where it differs from the model's, there is attention in the model now and a
/// memory with projections of q, k, v and output in the pattern (key and value heads are copied for a memory that has
/// one for every query head). Throws one sentence where that is not so.
Decoder replace_attention(const Decoder& source, const std::string& pattern, std::uint64_t seed = 0);

}  // namespace gka::models
