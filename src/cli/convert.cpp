// `gka convert`: a hybrid from a trained model, whose chosen attention layers become memories with their projections.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>

#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/model_inputs.h"
#include "models/checkpoint.h"
#include "models/convert.h"
#include "train/checkpoint.h"

namespace gka::cli {
namespace {

namespace fs = std::filesystem;

struct Arguments {
  std::string model, pattern, out;
  std::uint64_t seed = 0;
};

int run(const Arguments& arguments) {
  const auto folder = new_folder(arguments.out);
  Interruptible signals(arguments.out);
  signals.fills_folder(folder, train::unfinished_path(folder));
  const auto source = model_folder(arguments.model);
  const auto converted = models::replace_attention(models::load_model(source), arguments.pattern, arguments.seed);
  train::write_folder(folder, [&](const fs::path& unfinished) {
    models::save_model(converted, unfinished);
    for (const char* name : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json",
                             "merges.txt", "generation_config.json"}) {
      if (fs::exists(source / name)) fs::copy_file(source / name, unfinished / name);
    }
  });
  std::fprintf(stderr, "gka: wrote %s\n", arguments.out.c_str());
  return 0;
}

}  // namespace

Action declare_convert(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  app.add_option("MODEL", arguments->model, "A model with attention: a folder, or a training run")->required();
  app.add_option("--pattern", arguments->pattern, "The new pattern, such as 14x(*-GKA); attention stays where it has *")
      ->required();
  app.add_option("--out", arguments->out, "The folder to create")->required()->type_name("FOLDER");
  app.add_option("--seed", arguments->seed, "Seed of the weights that do not come from attention's projections")
      ->capture_default_str();
  app.footer(
      "Example:\n"
      "  gka convert smollm2 --pattern '15x(*-GKA)' --out hybrid     then gka train … --from hybrid");
  return [arguments] { return run(*arguments); };
}

}  // namespace gka::cli
