// A model's folder keeps its tokenizer, and numbers of another one mean other texts to the model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace gka::data {

/// Throws one sentence where the folder has a tokenizer and `fingerprint` (Tokenizer's, or a token file's) is not of
/// it; `what` says who brings the other. A folder without one, or with one gka does not read, goes with any.
void check_model_tokenizer(const std::filesystem::path& folder, std::uint64_t fingerprint, const std::string& what);

}  // namespace gka::data
