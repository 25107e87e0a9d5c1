// `gka vision`: train a model for images, measure it, ask it.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/model_inputs.h"
#include "cli/progress.h"
#include "cli/table.h"
#include "models/config.h"
#include "models/placement.h"
#include "models/safetensors.h"
#include "models/vision.h"
#include "train/text.h"
#include "train/vision.h"

namespace gka::cli {
namespace {

constexpr int kStopped = 128 + SIGINT;  // as a shell reports it: what was asked for is not done
constexpr std::int64_t kFive = 5;
constexpr std::int64_t kShownImages = 10;

struct Arguments {
  // train
  std::string config, out;
  bool resume = false;
  Json changes = Json::object();  // what the command line says, by the keys of VisionSettings
  // eval, classify
  ModelArguments model;
  std::string data, logits;
  std::int64_t batch = 256;
  std::vector<std::int64_t> indices;
  bool json = false;
};

// ---- train

Json settings_of(const Arguments& arguments) {
  auto settings = arguments.resume ? train::read_vision_settings(arguments.out) : Json::object();
  const auto& changes = arguments.changes;
  if (changes.contains("epochs") && changes.contains("steps")) {
    throw std::runtime_error("--epochs and --steps both say how long to train; give one of them.");
  }
  for (const char* key : {"epochs", "steps"}) {
    if (changes.contains("epochs") || changes.contains("steps")) settings.erase(key);
  }
  settings.update(changes);
  if (changes.contains("data")) settings["data"] = std::filesystem::absolute(changes["data"].get<std::string>());
  if (!settings.contains("data")) throw std::runtime_error("train takes images to learn from: --data FOLDER.");
  if (!arguments.config.empty()) {
    const auto& name = arguments.config;
    const auto images = train::images_file(settings["data"].get<std::string>(), "train");
    const auto given = train::complete_config(models::read_json(name), images, name);
    settings["model"] = to_json(models::parse_vision_config(given, name));
  }
  if (!settings.contains("model"))
    throw std::runtime_error("train takes a model's configuration: gka vision train CONFIG.");
  return settings;
}

int train_model(const Arguments& arguments) {
  if (arguments.out.empty()) throw std::runtime_error("train takes a folder for the run: --out RUN.");
  const auto settings = train::parse_vision_settings(settings_of(arguments), "the run's settings");
  const auto start = arguments.resume ? train::Start::resume : train::Start::fresh;
  return train::train_vision(settings, arguments.out, start) == train::Outcome::finished ? 0 : kStopped;
}

// ---- eval and classify

struct Loaded {
  models::VisionModel model;
  std::optional<at::ScalarType> dtype;
};

Loaded load_images_model(const ModelArguments& arguments) {
  const auto device = models::device_named("--device", arguments.device);
  const auto dtype = models::dtype_on("--dtype", arguments.dtype, device);
  const auto parameters = dtype == at::kDouble ? at::kDouble : at::kFloat;
  return {models::load_vision(model_folder(arguments.model), device, parameters), dtype};
}

Json scores_to_json(const train::VisionScores& scores, const models::VisionConfig& config) {
  const auto share = [&](double value) {
    return Json{{"value", value}, {"stderr", train::VisionScores::standard_error(value, scores.images)}};
  };
  Json json{{"images", scores.images}, {"loss", scores.loss}, {"top1", share(scores.top1())}};
  if (config.classes > kFive) json["top5"] = share(scores.top5());
  json["classes"] = Json::array();
  for (std::size_t i = 0; i < scores.of_class.size(); ++i) {
    const auto images = scores.of_class[i];
    const auto accuracy = static_cast<double>(scores.right_of_class[i]) / static_cast<double>(images);
    json["classes"].push_back({{"class", config.class_name(static_cast<std::int64_t>(i))},
                               {"images", images},
                               {"accuracy", images > 0 ? Json(accuracy) : Json(nullptr)}});
  }
  return json;
}

void print_scores(const Json& scores) {
  std::printf("%lld images, loss %.4f\n", scores["images"].get<long long>(), scores["loss"].get<double>());
  for (const char* key : {"top1", "top5"}) {
    if (!scores.contains(key)) continue;
    const auto& share = scores[key];
    std::printf("%s %.4f ± %.4f\n", key, share["value"].get<double>(), share["stderr"].get<double>());
  }
  std::vector<Row> rows{{"class", "images", "accuracy"}};
  for (const auto& entry : scores["classes"]) {
    const auto& accuracy = entry["accuracy"];
    rows.push_back({entry["class"].get<std::string>(), entry["images"].dump(),
                    accuracy.is_null() ? "–" : train::print("%.4f", accuracy.get<double>())});
  }
  std::cout << layout(rows, {false, true, true});
}

int evaluate(const Arguments& arguments) {
  const auto [model, dtype] = load_images_model(arguments.model);
  const auto file = train::images_file(arguments.data, "test");
  const auto set = train::read_images(file, model.config());
  std::optional<models::SafetensorsWriter> logits;
  Interruptible signals(arguments.logits);
  if (!arguments.logits.empty()) {
    signals.writes_file(arguments.logits);
    logits.emplace(arguments.logits,
                   std::vector<models::SafetensorsWriter::Planned>{
                       {.name = "logits", .dtype = at::kFloat, .shape = {set.count(), model.config().classes}}});
  }
  LiveLine line;
  std::vector<at::Tensor> parts;
  train::VisionEvaluation options{.batch = arguments.batch, .dtype = dtype};
  if (logits) options.on_logits = [&](const at::Tensor& part) { parts.push_back(part); };
  options.on_progress = [&](std::int64_t done) {
    line.show([&] { return std::to_string(done) + " of " + std::to_string(set.count()) + " images"; });
  };
  const auto scores = train::evaluate_vision(model, set, options);
  line.clear();
  if (logits) {
    logits->write(at::cat(parts));
    signals.finish_file([&] { logits->commit(); });
  }
  const auto json = scores_to_json(scores, model.config());
  if (arguments.json) {
    std::cout << json.dump(2) << "\n";
  } else {
    print_scores(json);
  }
  return 0;
}

/// What the model makes of one image: its likeliest classes, each with its probability.
struct Answer {
  std::int64_t image = 0;
  std::optional<std::string> label{};
  std::vector<std::pair<std::string, double>> likely{};
};

std::vector<Answer> ask(const Arguments& arguments) {
  const auto [model, dtype] = load_images_model(arguments.model);
  const auto& config = model.config();
  const auto set = train::read_images(train::images_file(arguments.data, "test"), config, train::Labels::optional);
  auto indices = arguments.indices;
  for (std::int64_t i = 0; arguments.indices.empty() && i < std::min(kShownImages, set.count()); ++i) {
    indices.push_back(i);
  }
  const at::NoGradGuard no_gradients;
  std::vector<Answer> answers;
  for (const auto index : indices) {
    if (index < 0 || index >= set.count()) {
      throw std::runtime_error("--index is " + std::to_string(index) + ", and " + arguments.data +
                               " has the images 0 to " + std::to_string(set.count() - 1));
    }
    const auto logits = model.forward(set.images.narrow(0, index, 1), {.dtype = dtype}).to(at::kCPU);
    const auto [chances, classes] = logits.softmax(-1)[0].topk(std::min(kFive, config.classes));
    auto& answer = answers.emplace_back(Answer{.image = index});
    if (set.labels.defined()) answer.label = config.class_name(set.labels[index].item<std::int64_t>());
    for (std::int64_t i = 0; i < classes.size(0); ++i) {
      answer.likely.emplace_back(config.class_name(classes[i].item<std::int64_t>()), chances[i].item<double>());
    }
  }
  return answers;
}

int classify(const Arguments& arguments) {
  const auto answers = ask(arguments);
  if (arguments.json) {
    Json all = Json::array();
    for (const auto& answer : answers) {
      Json likely = Json::array();
      for (const auto& [name, chance] : answer.likely) likely.push_back({{"class", name}, {"probability", chance}});
      all.push_back({{"image", answer.image}, {"likely", likely}});
      if (answer.label) all.back()["label"] = *answer.label;
    }
    std::cout << all.dump(2) << "\n";
    return 0;
  }
  for (const auto& answer : answers) {
    std::cout << "image " << answer.image << (answer.label ? ", labelled " + *answer.label : std::string()) << "\n";
    std::vector<Row> rows;
    for (const auto& [name, chance] : answer.likely) rows.push_back({"  " + name, train::print("%.4f", chance)});
    std::cout << layout(rows, {false, true});
  }
  return 0;
}

// ---- The command line

using Run = int (*)(const Arguments&);

CLI::App* add_verb(CLI::App& app, const char* name, const char* summary, const std::shared_ptr<Run>& chosen, Run run) {
  auto* verb = app.add_subcommand(name, summary);
  verb->parse_complete_callback([chosen, run] { *chosen = run; });
  return verb;
}

/// An option that is a key of the run's settings.
template <typename Value>
void add_setting(CLI::App& app, const std::shared_ptr<Arguments>& arguments, const char* option, const char* key,
                 const std::string& help, const char* type) {
  app.add_option_function<Value>(
         option, [arguments, key](const Value& value) { arguments->changes[key] = value; }, help)
      ->type_name(type);
}

void declare_train_verb(CLI::App& app, const std::shared_ptr<Arguments>& arguments) {
  const auto number = [&](const char* option, const char* key, const char* help) {
    add_setting<double>(app, arguments, option, key, help, "NUMBER");
  };
  const auto whole = [&](const char* option, const char* key, const char* help) {
    add_setting<std::int64_t>(app, arguments, option, key, help, "N");
  };
  const auto text = [&](const char* option, const char* key, const std::string& help, const char* type) {
    add_setting<std::string>(app, arguments, option, key, help, type);
  };
  app.add_option("config", arguments->config,
                 "A model's configuration (configs/vision/fashion.json); image_size, channels, classes and\n"
                 "class_names are taken from the images where it leaves them out")
      ->type_name("CONFIG");
  text("--data", "data", "A data set: a folder with train.safetensors and test.safetensors", "FOLDER");
  app.add_option("--out", arguments->out, "The folder of the run")->type_name("RUN");
  number("--epochs", "epochs", "Passes over the training images (default: 10)");
  whole("--steps", "steps", "Batches to train on, instead of --epochs");
  whole("--batch", "batch", "Images in a batch (default: 128)");
  number("--lr", "learning_rate", "The highest learning rate (default: 5e-4); it falls to a hundredth, as a cosine");
  number("--weight-decay", "weight_decay", "Weight decay of matrices and convolutions (default: 0.05)");
  number("--warmup", "warmup", "Fraction of the steps in which the rate rises (default: 0.05)");
  number("--label-smoothing", "label_smoothing", "Share of a label that goes to all classes (default: 0.1)");
  text("--augment", "augment",
       "Random changes to images: flip, crop (moved by up to an eighth), flip,crop (default) or none", "WHAT");
  whole("--seed", "seed",
        "Seed of weights, order and random changes (default: 0); the order does not depend on the mixer");
  text("--device", "device", "cpu, cuda or cuda:N (default: a GPU where there is one)", "DEVICE");
  text("--dtype", "dtype", "Type of activations: " + models::list_dtypes() + " (bfloat16 on a GPU, float32 elsewhere)",
       "TYPE");
  whole("--eval-every", "eval_every", "Steps between evaluations on the test images (default: an epoch)");
  whole("--checkpoint-every", "checkpoint_every", "Steps between checkpoints (default: an epoch)");
  whole("--keep", "keep", "Checkpoints to keep (default: 2)");
  app.add_flag("--resume", arguments->resume, "Continue the run in --out with its own settings, to the same bits");
  app.footer(
      "Examples:\n"
      "  gka vision train configs/vision/fashion.json --data data/fashion --out runs/fashion --epochs 5\n"
      "  gka vision train --out runs/fashion --resume                 continue after Ctrl-C or a crash\n"
      "  gka vision train --out runs/fashion --resume --epochs 10     and for longer\n"
      "\n"
      "Ctrl-C finishes the step, saves and says how to resume. `gka runs` lists runs, `gka plot` draws them; "
      "RUN/latest\n"
      "is the newest model, with its accuracy on the test images in RUN/metrics.jsonl.");
}

/// MODEL, --device, --dtype, --json.
void declare_model(CLI::App& app, const std::shared_ptr<Arguments>& arguments) {
  app.add_option("MODEL", arguments->model.model,
                 "A model's folder, or a run of `gka vision train` (its newest checkpoint)")
      ->required();
  app.add_option("--device", arguments->model.device, "cpu, cuda or cuda:N (default: a GPU where there is one)");
  app.add_option("--dtype", arguments->model.dtype,
                 "Type of activations: " + models::list_dtypes() + " (default: float32)");
  app.add_flag("--json", arguments->json, "Print JSON");
}

void declare_eval_verb(CLI::App& app, const std::shared_ptr<Arguments>& arguments) {
  declare_model(app, arguments);
  app.add_option("--data", arguments->data, "A file of images, or a data set (its test.safetensors)")
      ->required()
      ->type_name("FILE|FOLDER");
  app.add_option("--batch", arguments->batch, "Images at a time (default: 256)")->check(CLI::Range(1, 1 << 20));
  app.add_option("--logits", arguments->logits, "Write the logits [images, classes] to this safetensors file")
      ->type_name("FILE");
  app.footer(
      "Examples:\n"
      "  gka vision eval runs/fashion --data data/fashion\n"
      "  gka vision eval runs/fashion --data data/fashion/train.safetensors --json");
}

void declare_classify_verb(CLI::App& app, const std::shared_ptr<Arguments>& arguments) {
  declare_model(app, arguments);
  app.add_option("FILE", arguments->data, "A file of images (safetensors), or a data set (its test.safetensors)")
      ->required();
  app.add_option("--index", arguments->indices, "Which images, counted from 0 (default: the first ten)")
      ->type_name("I…");
  app.footer(
      "Example:\n"
      "  gka vision classify runs/fashion data/fashion --index 3 17");
}

}  // namespace

Action declare_vision(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  const auto chosen = std::make_shared<Run>(nullptr);
  app.require_subcommand(1);
  declare_train_verb(*add_verb(app, "train", "Train a model for images, or resume a run", chosen, train_model),
                     arguments);
  declare_eval_verb(*add_verb(app, "eval", "Measure a model's accuracy on images", chosen, evaluate), arguments);
  declare_classify_verb(*add_verb(app, "classify", "Classify images", chosen, classify), arguments);
  app.footer(
      "Examples:\n"
      "  gka vision train configs/vision/fashion.json --data data/fashion --out runs/fashion\n"
      "  gka vision eval runs/fashion --data data/fashion\n"
      "\n"
      "A data set is a folder with train.safetensors and test.safetensors, each with `images`, uint8\n"
      "[number, height, width, channels], and `labels`, int64 [number]. docs/vision.md says where to get some.");
  return [arguments, chosen] { return (*chosen)(*arguments); };
}

}  // namespace gka::cli
