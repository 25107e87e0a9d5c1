#include "cli/model_inputs.h"

#include <CLI/CLI.hpp>
#include <charconv>
#include <filesystem>
#include <stdexcept>
#include <string_view>

#include "base/files.h"
#include "base/json.h"
#include "data/model_tokenizer.h"
#include "data/token_file.h"
#include "models/checkpoint.h"
#include "models/placement.h"

namespace gka::cli {
namespace {

void check_token(std::int64_t token, std::int64_t vocabulary, const std::string& where) {
  if (token >= 0 && token < vocabulary) return;
  throw std::runtime_error("token " + std::to_string(token) + " of " + where +
                           " is outside the model's vocabulary of " + std::to_string(vocabulary) + " tokens");
}

std::filesystem::path checkpoint_of(const ModelArguments& arguments) { return model_folder(arguments.model); }

constexpr std::string_view kWhite = " \t\r\f\v";

Tokens parse_line(std::string_view line, std::int64_t vocabulary, const std::string& where) {
  Tokens tokens;
  for (auto start = line.find_first_not_of(kWhite); start != std::string_view::npos;
       start = line.find_first_not_of(kWhite, start)) {
    const auto end = std::min(line.find_first_of(kWhite, start), line.size());
    const auto word = line.substr(start, end - start);
    std::int64_t token = 0;
    const auto parsed = std::from_chars(word.data(), word.data() + word.size(), token);
    if (parsed.ec != std::errc() || parsed.ptr != word.data() + word.size()) {
      throw std::runtime_error("'" + std::string(word.substr(0, 40)) + "' of " + where + " is not a token number");
    }
    check_token(token, vocabulary, where);
    tokens.push_back(token);
    start = end;
  }
  return tokens;
}

}  // namespace

std::filesystem::path model_folder(const std::filesystem::path& folder) {
  const auto latest = folder / "latest";
  return !std::filesystem::exists(folder / "config.json") && std::filesystem::exists(latest / "config.json") ? latest
                                                                                                             : folder;
}

std::filesystem::path new_folder(const std::string& out) {
  if (out.empty()) throw std::runtime_error("--out is empty; it takes the name of the folder to make");
  const auto path = std::filesystem::absolute(out).lexically_normal();
  auto folder = path.has_filename() ? path : path.parent_path();
  if (std::filesystem::exists(folder)) throw std::runtime_error("--out is " + out + ", which is there already");
  return folder;
}

void add_model_arguments(CLI::App& app, ModelArguments& arguments) {
  app.add_option("MODEL", arguments.model,
                 "A folder with config.json and weights, or a training run (its newest checkpoint)")
      ->required();
  app.add_option("--device", arguments.device, "cpu, cuda or cuda:N (default: a GPU where there is one)");
  app.add_option("--dtype", arguments.dtype,
                 models::list_dtypes() + " (default: float32 on the CPU, elsewhere the checkpoint's own)");
  add_weights_option(app, arguments.weights);
  app.add_option("--tokenizer", arguments.tokenizer,
                 "For a model without a tokenizer: bytes, a tokenizer.json or a folder with one");
}

void add_weights_option(CLI::App& app, std::string& weights) {
  app.add_option("--weights", weights,
                 "Type of the weight matrices: " + list_names<models::WeightsAs>() +
                     " (default: stored, where bfloat16 is mapped and not copied; int8 is half of that)");
}

CLI::Option* add_cache_option(CLI::App& app, std::string& kv_cache_dtype) {
  return app
      .add_option("--kv-cache-dtype", kv_cache_dtype,
                  "Type of attention's cached keys and values: auto (the activations' type) or int8 (half of bfloat16)")
      ->check(CLI::IsMember({"auto", "int8"}));
}

models::Decoder load(const ModelArguments& arguments) {
  const auto device = models::device_named("--device", arguments.device);
  return models::load_model(checkpoint_of(arguments),
                            {.device = device,
                             .dtype = models::dtype_on("--dtype", arguments.dtype, device),
                             .weights = models::weights_named("--weights", arguments.weights)});
}

data::Tokenizer load_tokenizer(const ModelArguments& arguments) {
  const auto folder = checkpoint_of(arguments);
  if (!arguments.tokenizer.empty()) {
    auto named = data::Tokenizer::load(arguments.tokenizer);
    data::check_model_tokenizer(folder, named.fingerprint(), "--tokenizer " + arguments.tokenizer);
    return named;
  }
  if (!std::filesystem::exists(folder / "tokenizer.json") && !std::filesystem::exists(folder / "vocab.json")) {
    if (!std::filesystem::exists(folder / "config.json"))
      (void)models::load_config(folder);  // there is no model at all
    throw std::runtime_error(
        "the model " + arguments.model +
        " has no tokenizer.json; name one with --tokenizer ('bytes' for a model of bytes), or give token "
        "numbers with --ids");
  }
  return data::Tokenizer::load(folder.string());
}

std::optional<std::int64_t> first_token(const ModelArguments& arguments, const data::Tokenizer& tokenizer) {
  const auto file = checkpoint_of(arguments) / "tokenizer_config.json";
  if (arguments.tokenizer.empty() && std::filesystem::exists(file)) {
    const auto config = parse_json(read_text(file), file.string());
    for (const char* key : {"bos_token", "eos_token"}) {
      const auto found = config.is_object() ? config.find(key) : config.end();
      if (found == config.end()) continue;
      const auto& text = found->is_object() && found->contains("content") ? (*found)["content"] : *found;
      if (!text.is_string()) continue;
      if (const auto token = tokenizer.find(text.get<std::string>())) return *token;
    }
  }
  return tokenizer.end_of_document();
}

std::vector<Tokens> read_ids(const std::string& path, std::int64_t vocabulary) {
  const MappedFile file(path);
  auto text = file.text();
  const auto last = text.find_last_not_of(" \t\r\n\f\v");
  if (last == std::string_view::npos) throw std::runtime_error(path + " has no token numbers in it");
  text = text.substr(0, last + 1);
  std::vector<Tokens> sequences;
  for (std::size_t start = 0; start <= text.size();) {
    const auto end = std::min(text.find('\n', start), text.size());
    const auto where = "line " + std::to_string(sequences.size() + 1) + " of " + path;
    sequences.push_back(parse_line(text.substr(start, end - start), vocabulary, where));
    if (sequences.back().empty())
      throw std::runtime_error(where + " is empty; each line is a sequence of token numbers");
    start = end + 1;
  }
  return sequences;
}

std::vector<Tokens> read_token_file(const ModelArguments& arguments, const std::string& path, std::int64_t vocabulary) {
  const data::TokenFile file(path);
  data::check_model_tokenizer(checkpoint_of(arguments), file.header().tokenizer, path);
  std::vector<Tokens> sequences;
  const auto offsets = file.offsets();
  for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
    Tokens document(offsets[i + 1] - offsets[i]);
    if (document.empty()) continue;
    file.read(static_cast<std::int64_t>(offsets[i]), document);
    for (const auto token : document) check_token(token, vocabulary, "document " + std::to_string(i) + " of " + path);
    sequences.push_back(std::move(document));
  }
  if (sequences.empty()) throw std::runtime_error(path + " has no tokens in it");
  return sequences;
}

Tokens encode(const data::Tokenizer& tokenizer, const std::string& text, const std::string& what,
              std::int64_t vocabulary) {
  const auto ids = tokenizer.encode(text, data::Specials::yes);
  if (ids.empty()) throw std::runtime_error(what + " is empty; the model needs at least one token");
  for (const auto id : ids) check_token(id, vocabulary, what);
  return {ids.begin(), ids.end()};
}

}  // namespace gka::cli
