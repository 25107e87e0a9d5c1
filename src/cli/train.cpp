// `gka train`: a training file, changes to it, and where to begin.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "train/config.h"
#include "train/trainer.h"

namespace gka::cli {
namespace {

constexpr int kStopped = 128 + SIGINT;  // as a shell reports it: what was asked for is not done

constexpr const char* kExamples =
    "Examples:\n"
    "  gka train configs/tiny/gka.train.json                          a new run in runs/tiny-gka\n"
    "  gka train tiny.json --set learning_rate=3e-3 --set output=runs/b\n"
    "  gka train runs/tiny-gka --resume                               continue after Ctrl-C, a crash or a power cut\n"
    "  gka train long.json --from runs/tiny-gka                       a new run from the weights of another\n"
    "  ls sweep/*.json | gka train -                                  many small runs in one process\n"
    "\n"
    "Ctrl-C finishes the step, saves and says how to resume. docs/training.md explains the rest.";

struct TrainOptions {
  std::string config, from;
  std::vector<std::string> assignments;
  bool resume = false, keys = false, no_verify = false;
};

std::string as_json(const std::string& path) try { return Json(path).dump(); } catch (const Json::exception&) {
  throw std::runtime_error("--from takes a path in UTF-8, and got other bytes");
}

/// The two ways to say how long to train; the newer of two --set would win, and which one that is nobody should guess.
void check_assignments(const TrainOptions& options) {
  const auto has = [&](std::string_view key) {
    return std::ranges::any_of(options.assignments, [&](const std::string& word) {
      return word.starts_with(key) && word.substr(key.size()) != "null";  // null takes back what the file says
    });
  };
  if (has("steps=") && has("tokens=")) {
    throw std::runtime_error("--set steps and --set tokens both say how long to train; give one of them.");
  }
}

train::Outcome train_file(const std::string& file, const TrainOptions& options) {
  auto settings = train::read_settings(file);
  for (const auto& assignment : options.assignments) train::assign(settings, assignment);
  if (!options.from.empty()) train::assign(settings, "from=" + as_json(options.from));
  auto config = train::parse(settings);
  config.verify = !options.no_verify;
  return train::train(config, options.resume ? train::Start::resume : train::Start::fresh);
}

/// Trains the files named on standard input, as they come. Each is answered by a line, so that another program can hand
/// out the work: "finished FILE", "diverged FILE: " or "failed FILE: " and the sentence.
int train_listed(const TrainOptions& options) {
  int status = 0;
  for (std::string file; std::getline(std::cin, file);) {
    if (file.empty()) continue;
    const auto say = [&](const char* what, const std::exception& error) {
      std::cout << what << " " << file << ": " << sentence_of(error) << std::endl;
      status = 1;
    };
    try {
      if (train_file(file, options) == train::Outcome::stopped) return kStopped;
      std::cout << "finished " << file << std::endl;
    } catch (const train::Diverged& error) {
      say("diverged", error);
    } catch (const std::exception& error) {
      say("failed", error);
    }
  }
  return status;
}

int run_training(const TrainOptions& options) {
  if (options.keys) {
    std::cout << train::describe_keys();
    return 0;
  }
  if (options.config.empty()) throw std::runtime_error("train takes a training file: gka train CONFIG.");
  check_assignments(options);
  if (options.resume && !options.from.empty()) {
    throw std::runtime_error(
        "--resume continues a run and --from starts a new one from other weights; give one of them.");
  }
  if (options.config == "-") return train_listed(options);
  return train_file(options.config, options) == train::Outcome::finished ? 0 : kStopped;
}

}  // namespace

Action declare_train(CLI::App& app) {
  const auto options = std::make_shared<TrainOptions>();
  app.add_option("config", options->config,
                 "A training file (JSON), the folder of a run, or - for a list of them on standard input")
      ->type_name("CONFIG");
  app.add_option("--set", options->assignments, "Change one key of the training file; may be given several times")
      ->type_name("KEY=VALUE")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_flag("--resume", options->resume, "Continue the run in the output folder, to the same bits");
  app.add_option("--from", options->from, "Start a new run from the weights of a checkpoint, run or model")
      ->type_name("FOLDER");
  app.add_flag("--no-verify", options->no_verify, "Do not check token files against their checksums");
  app.add_flag("--keys", options->keys, "List the keys of a training file");
  app.footer(kExamples);
  return [options] { return run_training(*options); };
}

}  // namespace gka::cli
