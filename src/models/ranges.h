// How large a number in a configuration may be. The limits are far beyond any model; what they are for is that products
// of two or three sizes fit 64 bits, and that a mistyped digit is refused before memory is asked for.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "models/config.h"

namespace gka::models {

/// Throws one sentence with the key, what it is and what it takes. Whether a key may be left out is checked elsewhere:
/// 0 passes, and so does a key without a limit of its own that is a whole number below 2^31.
void check_range(std::string_view key, std::int64_t value, const std::string& where);

/// Every number of the groups that hold the mixers' choices.
void check_groups(const layers::MixerConfig& mixer, const std::string& where);

/// Every number of the configuration and of its groups.
void check_ranges(const ModelConfig& config, const std::string& where);

}  // namespace gka::models
