// What a run's token files say about the model that is trained on them: its tokenizer and the token that ends a text.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "train/config.h"

namespace gka::train {

/// The tokenizer that made the token files, for the model's folder: the copy `gka tokenize` left beside the first of
/// them, or that of bytes, which needs none. Nothing where the source is no token file.
std::optional<std::string> tokenizer_of(const Json& source);

/// What ends a document in the token files ends a text of the model: a configuration that was written for another
/// tokenizer gives way, and `say` tells.
Config with_end_token(Config config, const std::function<void(const std::string&)>& say);

/// Throws one sentence where the folder of the model a run starts from keeps another tokenizer than the token files'.
void check_tokenizer(const Config& config, const std::filesystem::path& folder);

/// Both sources of a run, for the two below.
Json sources_of(const Config& config);

/// The checksum of every token file by its path, as its header has it: what a run has been trained and evaluated on.
Json checksums_of_data(const Json& source);

/// Throws one sentence where a file has another one now: the position in the data would mean other text, and what was
/// kept for evaluation would be trained on.
void check_same_data(const Json& source, const Json& before, std::int64_t step, const std::filesystem::path& run);

}  // namespace gka::train
