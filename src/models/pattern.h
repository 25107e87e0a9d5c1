// The pattern string of a model: which mixer each block has, `*-GKA-*-GKA`, one token per block joined by `-`.
//
// A number and `x` repeat what follows, a token or a group in brackets: `4x(3xGKA-*)` is GKA-GKA-GKA-* four times over.
// The published form has no repeats, and that is what `join_pattern` writes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace gka::models {

/// The tokens, repeats written out. Throws one sentence with the position where the pattern cannot be read.
std::vector<std::string> expand_pattern(std::string_view pattern);

std::string join_pattern(const std::vector<std::string>& tokens);

}  // namespace gka::models
