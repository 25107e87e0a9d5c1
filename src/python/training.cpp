// What `python -m gka.train` shares with `gka train`: the training file, the batches and their order, the first
// weights, the loss, the folder of a run. So both read, draw, say and refuse alike. Structures go over as JSON.
#include <ATen/Context.h>
#include <ATen/core/Dict.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/fields.h"
#include "base/labels.h"
#include "data/source.h"
#include "models/checkpoint.h"
#include "models/checksums.h"
#include "models/config.h"
#include "models/decoder.h"
#include "models/loss.h"
#include "train/config.h"
#include "train/progress.h"
#include "train/run.h"
#include "train/text.h"
#include "train/token_files.h"

namespace gka::python {
namespace {

using WeightsByName = c10::Dict<std::string, at::Tensor>;

class Source final : public torch::CustomClassHolder {
 public:
  Source(const std::string& json, bool eval, bool verify)
      : source_(data::open_source(nlohmann::json(Json::parse(json)), eval ? data::Split::eval : data::Split::train,
                                  verify ? data::Verify::yes : data::Verify::no)) {}

  std::tuple<at::Tensor, at::Tensor, std::optional<at::Tensor>> next(std::int64_t batch, std::int64_t tokens) {
    auto [inputs, targets, bounds] = source_->next(batch, tokens);
    return {inputs, targets, bounds.defined() ? std::optional(bounds) : std::nullopt};
  }
  std::int64_t position() const { return source_->position(); }
  void seek(std::int64_t position) { source_->seek(position); }
  std::int64_t vocab_size() const { return source_->vocab_size(); }
  std::int64_t longest(std::int64_t tokens) const { return source_->longest(tokens); }
  std::string describe() const { return source_->describe(); }

 private:
  std::unique_ptr<data::Source> source_;
};

class RunLock final : public torch::CustomClassHolder {
 public:
  explicit RunLock(const std::string& run) : lock_(run) {}
  void remove() { lock_.remove(); }

 private:
  train::RunLock lock_;
};

class MetricsFile final : public torch::CustomClassHolder {
 public:
  MetricsFile(const std::string& run, std::int64_t last_step) : file_(run, last_step) {}
  void append(const std::string& line) { file_.append(Json::parse(line)); }
  void flush() { file_.flush(); }

 private:
  train::MetricsFile file_;
};

/// A training file with `--set` and everything that was left out, and what follows from it.
std::string training_settings(const std::string& path, const std::vector<std::string>& assignments) {
  auto settings = train::read_settings(path);
  for (const auto& assignment : assignments) train::assign(settings, assignment);
  const auto config = train::parse(settings);
  return Json{{"settings", config.settings}, {"steps", config.steps}, {"micro_batch", config.micro_batch()}}.dump();
}

/// The model's configuration as the token files want it, and the notes to say about it.
std::string training_model(const std::string& settings) {
  Json notes = Json::array();
  const auto config = train::with_end_token(train::parse(Json::parse(settings)),
                                            [&](const std::string& note) { notes.push_back(note); });
  return Json{{"model", config.model}, {"notes", notes}}.dump();
}

std::string training_difference(const std::string& before, const std::string& now) {
  return std::string(train::first_difference(Json::parse(before), Json::parse(now)).value_or(""));
}

std::optional<std::string> training_tokenizer(const std::string& data) {
  return train::tokenizer_of(Json::parse(data));
}

std::string checksums_of_data(const std::string& data) { return train::checksums_of_data(Json::parse(data)).dump(); }

void check_same_data(const std::string& data, const std::string& before, std::int64_t step, const std::string& run) {
  train::check_same_data(Json::parse(data), Json::parse(before), step, run);
}

/// Throws where the model in `folder` keeps another tokenizer than that of the token files.
void check_training_tokenizer(const std::string& settings, const std::string& folder) {
  train::check_tokenizer(train::parse(Json::parse(settings)), folder);
}

models::ModelConfig config_of(const std::string& json) {
  return models::parse_training_config(Json::parse(json), "model");
}

/// The weights `gka train` starts from with that seed, which also seeds all of torch on the CPU.
WeightsByName draw_weights(const std::string& json, std::int64_t seed, at::ScalarType dtype) {
  const auto config = config_of(json);
  auto generator = at::globalContext().defaultGenerator(at::kCPU);
  generator.set_current_seed(static_cast<std::uint64_t>(seed));
  const models::Decoder decoder(config, {.device = at::kCPU, .dtype = dtype, .generator = generator});
  WeightsByName weights;
  for (const auto& parameter : decoder.parameters().all()) {
    weights.insert(models::stored_name(config, parameter.name), parameter.value);
  }
  return weights;
}

/// The parameters that AdamW lets decay.
std::vector<std::string> decaying_parameters(const std::string& json) {
  const auto config = config_of(json);
  const models::Decoder shape(config, {.device = at::kMeta});
  std::vector<std::string> names;
  for (const auto& parameter : shape.parameters().all()) {
    if (parameter.weight_decay == layers::WeightDecay::yes) {
      names.push_back(models::stored_name(config, parameter.name));
    }
  }
  return names;
}

std::string describe_step(const std::string& json) {
  const auto report = Json::parse(json);
  const auto optional = [&](const char* key) {
    const auto found = report.find(key);
    return found == report.end() ? std::nullopt : std::optional(found->get<double>());
  };
  return train::describe_step({.step = report.at("step").get<std::int64_t>(),
                               .steps = report.at("steps").get<std::int64_t>(),
                               .loss = report.at("loss").get<double>(),
                               .learning_rate = report.at("learning_rate").get<double>(),
                               .gradient_norm = report.at("gradient_norm").get<double>(),
                               .tokens_per_second = report.at("tokens_per_second").get<double>(),
                               .memory_bytes = report.at("memory_bytes").get<double>(),
                               .seconds_left = report.at("seconds_left").get<double>(),
                               .eval_loss = optional("eval_loss"),
                               .eval_accuracy = optional("eval_accuracy")});
}

/// The sum over the targets divided by `divisor`, and where asked for the likeliest token at each target.
std::tuple<at::Tensor, std::optional<at::Tensor>> head_loss(const at::Tensor& hidden, const at::Tensor& weight,
                                                            const at::Tensor& labels, double divisor, bool predict) {
  const auto loss = models::sliced_cross_entropy(hidden, weight, labels, {.divisor = divisor, .predict = predict});
  return {loss.mean, predict ? std::optional(loss.predicted) : std::nullopt};
}

/// Targets, right ones, answers, right ones.
std::vector<std::int64_t> count_right(const at::Tensor& predicted, const at::Tensor& targets) {
  const auto counted = data::accuracy(predicted, targets);
  return {counted.tokens, counted.right_tokens, counted.answers, counted.right_answers};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(gka, m) {
  m.class_<Source>("Source")
      .def(torch::init<std::string, bool, bool>())
      .def("next", &Source::next)
      .def("position", &Source::position)
      .def("seek", &Source::seek)
      .def("vocab_size", &Source::vocab_size)
      .def("longest", &Source::longest)
      .def("describe", &Source::describe);
  m.class_<RunLock>("RunLock").def(torch::init<std::string>()).def("remove", &RunLock::remove);
  m.class_<MetricsFile>("MetricsFile")
      .def(torch::init<std::string, std::int64_t>())
      .def("append", &MetricsFile::append)
      .def("flush", &MetricsFile::flush);
  m.def("training_settings(str path, str[] assignments) -> str", training_settings);
  m.def("training_model(str settings) -> str", training_model);
  m.def("training_difference(str before, str now) -> str", training_difference);
  m.def("training_tokenizer(str data) -> str?", training_tokenizer);
  m.def("check_training_tokenizer(str settings, str folder) -> ()", check_training_tokenizer);
  m.def("training_checksums(str data) -> str", checksums_of_data);
  m.def("check_training_data(str data, str before, int step, str run) -> ()", check_same_data);
  m.def("draw_weights(str json, int seed, ScalarType dtype) -> Dict(str, Tensor)", draw_weights);
  m.def("decaying_parameters(str json) -> str[]", decaying_parameters);
  m.def("describe_step(str report) -> str", describe_step);
  m.def("short_count(float value) -> str", [](double value) { return train::short_count(value); });
  m.def("short_duration(float seconds) -> str", [](double seconds) { return train::short_duration(seconds); });
  m.def("head_loss(Tensor hidden, Tensor weight, Tensor labels, float divisor, bool predict) -> (Tensor, Tensor?)",
        head_loss);
  m.def("ignored_label() -> int", [] { return kIgnoredLabel; });
  m.def("count_right(Tensor predicted, Tensor targets) -> int[]", count_right);
  m.def("write_checksums(str folder) -> ()", [](const std::string& folder) { models::write_checksums(folder); });
  m.def("verify_folder(str folder) -> ()", [](const std::string& folder) { models::verify_folder(folder); });
}

}  // namespace gka::python
