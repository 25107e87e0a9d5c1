// A model that is served: its engine, and what turns text into its tokens and back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <memory>
#include <string>

#include "infer/engine.h"
#include "serve/chat.h"

namespace gka::serve {

struct JsonTokens;  // the vocabulary as answers in JSON need it, made when the first is asked for; grammar.cpp
std::shared_ptr<JsonTokens> make_json_tokens();

struct Model {
  std::string name;
  std::filesystem::path folder;
  Encoder encoder;
  ChatTemplate chat;
  std::unique_ptr<infer::Engine> engine;
  Json defaults = Json::object();  // fields of a request that does not have them: how its folder says to draw
  std::int64_t created = std::time(nullptr);

  const data::Tokenizer& tokenizer() const { return encoder.tokenizer(); }
  bool ends(std::int64_t token) const { return std::ranges::find(end_tokens, token) != end_tokens.end(); }
  Tokens end_tokens{};
  std::shared_ptr<JsonTokens> json_tokens = make_json_tokens();

  /// A token for a reader: its text, or its bytes where they are only part of a character.
  std::string shown(std::int64_t token) const;
  std::string_view bytes(std::int64_t token) const;
};

/// What a folder's generation_config.json says of temperature, top_p, top_k, min_p and repetition_penalty.
Json sampling_defaults(const std::filesystem::path& folder);
/// A body with the model's defaults where it has none of its own.
Json with_defaults(Json body, const Model& model);

}  // namespace gka::serve
