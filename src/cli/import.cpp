// `gka import` and `gka export`: a model from elsewhere in our layout, and a model of ours as a folder that others
// open. Both are the same steps, since the layout is Hugging Face's: read, check every tensor, write beside, rename.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/model_inputs.h"
#include "data/described_tokenizer.h"
#include "data/tokenizer.h"
#include "models/dtypes.h"
#include "models/import.h"
#include "train/checkpoint.h"

namespace gka::cli {
namespace {

namespace fs = std::filesystem;

struct Arguments {
  std::string source;
  std::string out;
  std::string dtype;
  std::string weights;
};

/// How the numbers are written.
struct Written {
  std::optional<at::ScalarType> dtype{};
  bool int8 = false;
};

/// What a folder may hold about its tokenizer, taken along as it is.
constexpr const char* kTokenizerFiles[] = {"tokenizer.json",
                                           "tokenizer_config.json",
                                           "vocab.json",
                                           "merges.txt",
                                           "chat_template.jinja",
                                           "added_tokens.json",
                                           "special_tokens_map.json",
                                           "generation_config.json"};

bool is_gguf(const fs::path& path) { return fs::is_regular_file(path) && path.extension() == ".gguf"; }

data::DescribedTokenizer described_tokenizer(const models::Gguf& content, const std::string& where) {
  const auto key = [](const char* name) { return "tokenizer.ggml." + std::string(name); };
  data::DescribedTokenizer described{
      .model = content.get<std::string>(key("model"), where),
      .words = content.get_or<std::string>(key("pre"), where, "default"),
      .tokens = content.get<std::vector<std::string>>(key("tokens"), where),
      .kinds = {},
      .merges = content.get_or<std::vector<std::string>>(key("merges"), where, {}),
      .first = {},
  };
  for (const auto kind : content.get_or<std::vector<std::int64_t>>(key("token_type"), where, {})) {
    described.kinds.push_back(static_cast<data::DescribedKind>(std::clamp<std::int64_t>(kind, 0, 6)));
  }
  if (content.get_or<bool>(key("add_bos_token"), where, described.words == "llama-bpe")) {
    described.first = content.get<std::int64_t>(key("bos_token_id"), where);
  }
  return described;
}

void write_gguf_tokenizer(const models::GgufFile& file, const models::ModelConfig& config, const fs::path& folder) {
  const auto where = file.path().string();
  const auto& content = file.content();
  if (!content.metadata.contains("tokenizer.ggml.model")) return;
  try {
    write_text(folder / "tokenizer.json", data::tokenizer_json(described_tokenizer(content, where)));
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(where + " cannot be imported: " + error.what());
  }
  models::write_tokenizer_config(folder, config,
                                 content.get_or<std::string>("tokenizer.chat_template", where, std::string()));
}

void import_gguf(const fs::path& path, const fs::path& folder, const Written& as) {
  const models::GgufFile file(path);
  const auto model = models::open_gguf(file);
  write_gguf_tokenizer(file, model.config, folder);
  models::write_foreign(model, folder, as.dtype, as.int8);
}

void import_folder(const fs::path& source, const fs::path& folder, const Written& as) {
  const auto model = models::open_folder(source);
  models::write_foreign(model, folder, as.dtype, as.int8);
  for (const char* name : kTokenizerFiles) {
    if (fs::exists(source / name)) fs::copy_file(source / name, folder / name);
  }
  if (!fs::exists(folder / "tokenizer_config.json")) models::write_tokenizer_config(folder, model.config);
}

/// A tokenizer that came along is tried at once: better here than at the first prompt.
void check_tokenizer(const fs::path& folder) {
  if (fs::exists(folder / "tokenizer.json")) data::Tokenizer::load(folder.string());
}

std::optional<at::ScalarType> type_named(const std::string& name) {
  if (name.empty()) return std::nullopt;
  if (const auto dtype = models::dtype_named(name)) return dtype;
  throw std::runtime_error("--dtype takes one of " + models::list_dtypes() + ", and got '" + name + "'");
}

Written written_as(const Arguments& arguments) {
  if (!arguments.weights.empty() && arguments.weights != "int8") {
    throw std::runtime_error("--weights takes int8 (other types are --dtype's), and got '" + arguments.weights + "'");
  }
  return {.dtype = type_named(arguments.dtype), .int8 = arguments.weights == "int8"};
}

int run(const Arguments& arguments) {
  const fs::path source(arguments.source);
  const auto as = written_as(arguments);
  if (!fs::exists(source)) {
    throw std::runtime_error("there is no '" + source.string() +
                             "'; SOURCE is a model's folder, a run or a .gguf file");
  }
  const auto folder = new_folder(arguments.out);
  if (fs::is_regular_file(source) && !is_gguf(source)) {
    throw std::runtime_error(source.string() +
                             " is neither a folder with config.json and safetensors nor a .gguf file");
  }
  Interruptible signals(arguments.out);
  signals.fills_folder(folder, train::unfinished_path(folder));
  train::write_folder(folder, [&](const fs::path& unfinished) {
    if (is_gguf(source)) {
      import_gguf(source, unfinished, as);
    } else {
      import_folder(model_folder(source), unfinished, as);
    }
    check_tokenizer(unfinished);
  });
  std::fprintf(stderr, "gka: wrote %s\n", arguments.out.c_str());
  return 0;
}

Action declare(CLI::App& app, const char* source_help) {
  const auto arguments = std::make_shared<Arguments>();
  app.add_option("SOURCE", arguments->source, source_help)->required();
  app.add_option("--out", arguments->out, "The folder to create")->required()->type_name("FOLDER");
  app.add_option("--dtype", arguments->dtype,
                 models::list_dtypes() + " (by default the source's own; float32 for quantised files, which is exact)");
  app.add_option(
      "--weights", arguments->weights,
      "int8: projections, embedding and head in bytes with a scale for every 64 numbers; gka alone reads it");
  return [arguments] { return run(*arguments); };
}

}  // namespace

Action declare_import(CLI::App& app) {
  app.footer(
      "Examples:\n"
      "  gka import SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2\n"
      "  gka import Qwen3-0.6B/ --out qwen3 --dtype bfloat16");
  return declare(app, "A Hugging Face folder (Llama, Qwen2, Qwen3, hybrid_qwen3) or a GGUF file");
}

Action declare_export(CLI::App& app) {
  app.footer(
      "Example:\n"
      "  gka export runs/mine --out mine --dtype bfloat16");
  return declare(app, "A model's folder, or a training run (its newest checkpoint)");
}

}  // namespace gka::cli
