// What a run's token files say about the model that is trained on them: its tokenizer and the token that ends a text.
#pragma once

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

}  // namespace gka::train
