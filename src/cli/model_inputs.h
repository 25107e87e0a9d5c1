// What `gka score` and `gka generate` share: where and in which type a model runs, and the sequences it is given.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "models/decoder.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace gka::cli {

struct ModelArguments {
  std::string model;      // a checkpoint folder
  std::string device;     // left out: a GPU where there is one
  std::string dtype;      // empty: float32 on the CPU, the checkpoint's own elsewhere
  std::string weights;    // empty: as stored
  std::string tokenizer;  // empty: the model's folder
};

/// MODEL, --device, --dtype, --weights and --tokenizer.
void add_model_arguments(CLI::App& app, ModelArguments& arguments);

/// The folder of a model; of a training run, its newest checkpoint.
std::filesystem::path model_folder(const std::filesystem::path& folder);
/// What --out names, with or without a slash at its end. Throws where it is there already.
std::filesystem::path new_folder(const std::string& out);

/// For inference.
models::Decoder load(const ModelArguments& arguments);

void add_weights_option(CLI::App& app, std::string& weights);
CLI::Option* add_cache_option(CLI::App& app, std::string& kv_cache_dtype);

/// Throws one sentence that says what to do where the model has no tokenizer beside it, or another one is named.
data::Tokenizer load_tokenizer(const ModelArguments& arguments);

/// What a text begins with where nothing comes before it: tokenizer_config.json's bos_token, its eos_token, or what
/// separates documents.
std::optional<std::int64_t> first_token(const ModelArguments& arguments, const data::Tokenizer& tokenizer);

using Tokens = std::vector<std::int64_t>;

/// Token numbers separated by white space, one sequence per line. Throws one sentence with the line where something is
/// not a number below `vocabulary`, a line in between is empty, or there is nothing at all.
std::vector<Tokens> read_ids(const std::string& path, std::int64_t vocabulary);

/// The documents of a token file, but empty ones. Throws where another tokenizer than the model's made it.
std::vector<Tokens> read_token_file(const ModelArguments& arguments, const std::string& path, std::int64_t vocabulary);

/// One sequence. Throws where it has no tokens, or one that the model does not have.
Tokens encode(const data::Tokenizer& tokenizer, const std::string& text, const std::string& what,
              std::int64_t vocabulary);

}  // namespace gka::cli
