// What the targets of training look like, for the floors that make them and those that read them.
#pragma once

#include <cstdint>

namespace gka {

/// The label of a position that counts neither in the loss nor in the accuracy; torch's cross entropy has it too.
inline constexpr std::int64_t kIgnoredLabel = -100;

}  // namespace gka
