// The loop: a batch in parts through the model, the gradient clipped, a step of AdamW, a line of metrics; now and then
// an evaluation and a checkpoint.
//
// All that decides what comes next is in the checkpoint: weights, the optimiser's averages, the position in the data
// and torch's random numbers. Evaluation reads a source of its own and changes none of these.
#include "train/trainer.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <future>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "data/source.h"
#include "models/checkpoint.h"
#include "models/dtypes.h"
#include "train/checkpoint.h"
#include "train/device.h"
#include "train/fault.h"
#include "train/learner.h"
#include "train/progress.h"
#include "train/random_state.h"
#include "train/run.h"
#include "train/schedule.h"
#include "train/stop.h"
#include "train/text.h"
#include "train/token_files.h"

namespace gka::train {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

std::string how_to_continue(const fs::path& run) { return "`gka train " + run.string() + " --resume`"; }

/// Sources draw from the run's seed unless the file gives them one.
std::unique_ptr<data::Source> open_seeded(const Config& config, Json source, data::Split split) {
  if (!source.contains("seed")) source["seed"] = config.seed;
  return data::open_source(nlohmann::json(source), split, config.verify ? data::Verify::yes : data::Verify::no);
}

/// The folder with weights that `from` means: a checkpoint or a model itself, or a run, whose newest checkpoint counts.
fs::path folder_of_weights(const fs::path& from) {
  if (!is_run(from)) return from;
  const auto saved = list_checkpoints(from);
  if (saved.empty()) throw std::runtime_error("the run '" + from.string() + "' has no checkpoint to start from yet.");
  return saved.back().path;
}

class Trainer {
 public:
  Trainer(const Config& config, Start start, const StopSignals& signals);
  Outcome run();

 private:
  struct Measured {
    double loss, gradient_norm;
    std::int64_t tokens;
  };
  struct Evaluation {
    double loss, accuracy;
  };
  struct Parts {
    std::vector<data::Batch> batches;
    std::int64_t tokens = 0;
  };

  void start_from(const fs::path& folder);
  void resume_from(const SavedStep& saved);
  void save();
  void save_files(const fs::path& folder) const;
  std::string say_start() const;

  Parts next_parts();
  at::Tensor backward(const Parts& parts);
  at::Tensor work_on(const Parts& parts);
  Measured step();
  Evaluation evaluate();
  void report(const Measured& measured, const std::optional<Evaluation>& evaluation, double seconds);
  [[noreturn]] void explain_not_finite(const Parts& parts, double loss) const;
  bool due(std::int64_t every) const { return every > 0 && (step_ % every == 0 || step_ == config_.steps); }

  const Config& config_;
  const StopSignals& signals_;
  Compute compute_;
  Determinism determinism_;
  Learner learner_;
  Schedule schedule_;
  std::unique_ptr<data::Source> source_, eval_source_;
  const std::optional<std::string> tokenizer_ = tokenizer_of(config_.data);  // read now: files may go meanwhile
  const Json data_ = checksums_of_data(sources_of(config_));
  Progress progress_;
  std::optional<MetricsFile> metrics_;
  std::future<Parts> upcoming_;  // being taken from the source, not yet trained on
  std::int64_t position_ = 0;    // of the source before those

  std::int64_t step_ = 0, tokens_ = 0, saved_step_ = 0;
  bool reached_ = false;  // stop_accuracy
  double seconds_ = 0, step_seconds_ = 0;
  Clock::time_point begun_ = Clock::now();
};

Trainer::Trainer(const Config& config, Start start, const StopSignals& signals)
    : config_(config),
      signals_(signals),
      compute_(choose_compute(config)),
      determinism_(compute_.device),
      learner_(config, compute_),
      schedule_{.peak = config.learning_rate,
                .warmup = config.warmup,
                .final = config.final_learning_rate,
                .steps = config.steps},
      source_(open_seeded(config, config.data, data::Split::train)),
      progress_(stderr, config.log_every) {
  if (config.eval_every > 0) {
    eval_source_ = open_seeded(config, config.eval_data.is_null() ? config.data : config.eval_data, data::Split::eval);
  }
  for (const auto* source : {source_.get(), eval_source_.get()}) {
    if (source && source->vocab_size() > learner_.decoder().config().vocab_size) {
      throw std::runtime_error("the data has tokens up to " + std::to_string(source->vocab_size() - 1) +
                               ", but the model's vocab_size is " +
                               std::to_string(learner_.decoder().config().vocab_size) +
                               "; set model.vocab_size to at least " + std::to_string(source->vocab_size()) + ".");
    }
  }
  // Too little to evaluate on shows now, not hours later.
  for (std::int64_t i = 0; eval_source_ && i < config.eval_batches; ++i) {
    eval_source_->next(config.micro_batch(), config.length);
  }
  if (const auto longest = source_->longest(config.length); longest != config.length) {
    throw std::runtime_error("length is " + std::to_string(config.length) +
                             ", but the longest sequence of the data has " + std::to_string(longest) +
                             " tokens; set length=" + std::to_string(longest) + ".");
  }
  const auto saved = list_checkpoints(config.output);
  if (!config.from.empty() && saved.empty()) start_from(config.from);
  if (start == Start::resume && !saved.empty()) resume_from(saved.back());
  // What a save had left to do when it was killed. Not before the newest is known to be whole: it may have to go.
  tidy_checkpoints(config.output, static_cast<std::size_t>(config.keep));
}

std::string Trainer::say_start() const {
  const std::string type(models::name_of_dtype(compute_.activations));
  return config_.output.string() + ": " + short_count(static_cast<double>(learner_.decoder().parameters().count())) +
         " parameters, " + type + " on " + compute_.device.str() + "; " + source_->describe() + "; " +
         (step_ > 0 ? "continues after step " + std::to_string(step_) + " of " : "") + std::to_string(config_.steps) +
         " steps of " + short_count(static_cast<double>(config_.batch_tokens)) + " tokens";
}

void Trainer::start_from(const fs::path& from) {
  const auto folder = folder_of_weights(from);
  if (!fs::is_directory(folder)) {
    throw std::runtime_error("there is no checkpoint '" + folder.string() + "' to start from; check the path.");
  }
  check_tokenizer(config_, folder);
  models::verify_if_listed(folder, models::Checked::model);
  models::load_weights(learner_.decoder(), models::Weights(folder));
}

void Trainer::resume_from(const SavedStep& saved) {
  if (fs::is_directory(saved.path / "distributed")) {
    throw std::runtime_error("the checkpoint '" + saved.path.string() +
                             "' is of several processes; `torchrun … -m gka.train " + config_.output.string() +
                             " --resume` goes on from it, and --from " + config_.output.string() +
                             " --set output=FOLDER starts a new run from its weights.");
  }
  try {
    verify_folder(saved.path);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(error.what()) + "; remove that folder, and " +
                             how_to_continue(config_.output) + " goes on from the checkpoint before it.");
  }
  models::load_weights(learner_.decoder(), models::Weights(saved.path));
  const auto state = models::SafetensorsFile(saved.path / models::kOptimiserFile).tensors();
  learner_.optimiser().load(state);
  restore_random(state, compute_.device);
  const auto progress = models::read_json(saved.path / models::kProgressFile);  // what we wrote: its checksum was right
  step_ = saved_step_ = progress.at("step").get<std::int64_t>();
  tokens_ = progress.at("tokens").get<std::int64_t>();
  seconds_ = progress.at("seconds").get<double>();
  const bool was_last = step_ == parse(progress.at("settings")).steps;
  reached_ = progress.at("finished").get<bool>() && !was_last;  // by its accuracy
  check_same_data(sources_of(config_), progress.value("data", Json::object()), step_, config_.output);
  if (step_ > config_.steps) {
    throw std::runtime_error("the run has taken " + std::to_string(step_) + " steps already; steps is " +
                             std::to_string(config_.steps) + ", and it takes at least as many.");
  }
  source_->seek(progress.at("position").get<std::int64_t>());
  if (compute_.device.is_cpu()) progress_.note_threads(progress.at("threads").get<int>(), at::get_num_threads());
}

void Trainer::save_files(const fs::path& folder) const {
  models::save_model(learner_.decoder(), folder);
  if (tokenizer_) write_text(folder / "tokenizer.json", *tokenizer_);
  models::write_tokenizer_config(folder, learner_.decoder().config());
  fault_point("save", step_);
  auto state = learner_.optimiser().state();
  keep_random(state, compute_.device);
  models::write_safetensors(folder / models::kOptimiserFile, state);
  const Json progress{{"step", step_},
                      {"tokens", tokens_},
                      {"seconds", seconds_},
                      {"position", position_},
                      {"finished", reached_ || step_ == config_.steps},
                      {"threads", at::get_num_threads()},
                      {"data", data_},
                      {"settings", config_.settings}};
  write_text(folder / models::kProgressFile, progress.dump(2) + "\n");
}

void Trainer::save() {
  if (saved_step_ == step_) return;
  try {
    metrics_->flush();
    const auto folder = checkpoint_path(config_.output, step_);
    write_folder(folder, [&](const fs::path& unfinished) { save_files(unfinished); });
    fault_point("saved", step_);
    saved_step_ = step_;
    tidy_checkpoints(config_.output, static_cast<std::size_t>(config_.keep));
  } catch (const std::exception& error) {
    throw std::runtime_error("step " + std::to_string(step_) + " could not be saved (" + error.what() + "); " +
                             after_making_room(config_.output, how_to_continue(config_.output)));
  }
}

Trainer::Parts Trainer::next_parts() {
  Parts parts;
  for (std::int64_t i = 0; i < config_.accumulation; ++i) {
    const auto& batch = parts.batches.emplace_back(source_->next(config_.micro_batch(), config_.length));
    parts.tokens += batch.inputs.numel();
  }
  return parts;
}

at::Tensor Trainer::backward(const Parts& parts) try {
  return learner_.backward(parts.batches);
} catch (const models::LayerError& error) {
  // On the CPU an operator refuses a NaN before it reaches the loss.
  if (!error.not_finite) throw;
  explain_not_finite(parts, std::nan(""));
}

/// The loss and the gradient's length, on the device.
at::Tensor Trainer::work_on(const Parts& parts) {
  if (learner_.plays(parts.batches)) return learner_.play(parts.batches[0], schedule_(step_));
  const auto loss = backward(parts);
  fault_point("step", step_);
  return learner_.update(loss, schedule_(step_));
}

Trainer::Measured Trainer::step() {
  const auto parts = upcoming_.valid() ? upcoming_.get() : next_parts();
  position_ = source_->position();
  if (step_ < config_.steps) upcoming_ = std::async(std::launch::async, [this] { return next_parts(); });
  const auto both = work_on(parts);
  const auto read = both.cpu();  // the one moment a step waits for a GPU
  const Measured measured{read[0].item<double>(), read[1].item<double>(), parts.tokens};
  if (!std::isfinite(measured.loss) || !std::isfinite(measured.gradient_norm)) explain_not_finite(parts, measured.loss);
  return measured;
}

void Trainer::explain_not_finite(const Parts& parts, double loss) const {
  const at::NoGradGuard no_gradients;
  auto options = learner_.forward_options();
  options.recompute = false;
  std::string where;
  for (const auto& part : parts.batches) {
    if (!where.empty()) break;
    if (const auto name = first_not_finite(learner_.decoder(), part.inputs, learner_.sequences_of(part), options)) {
      where = "the first values that are not finite are those of " + *name;
    }
  }
  // The backward pass goes from the last parameter to the first.
  const auto& parameters = learner_.decoder().parameters().all();
  for (auto parameter = parameters.rbegin(); parameter != parameters.rend() && where.empty(); ++parameter) {
    const auto& gradient = parameter->value.grad();
    if (gradient.defined() && !gradient.isfinite().all().item<bool>()) {
      where =
          "all layers put out finite values, and the first gradient that is not finite is that of " + parameter->name;
    }
  }
  if (where.empty()) where = "every layer and gradient is finite, but their sum is not";
  const auto saved = list_checkpoints(config_.output);
  throw Diverged(print("the loss is %g at step %lld: ", loss, static_cast<long long>(step_)) + where +
                 "; start a new run with a lower learning_rate (it was " + print("%g", config_.learning_rate) +
                 ") or more warmup" +
                 (saved.empty() ? std::string(".")
                                : ", with --from " + saved.back().path.string() + " to keep what was learned."));
}

Trainer::Evaluation Trainer::evaluate() {
  const at::NoGradGuard no_gradients;
  eval_source_->seek(0);
  double loss = 0;
  data::Accuracy accuracy;
  for (std::int64_t i = 0; i < config_.eval_batches; ++i) {
    const auto batch = eval_source_->next(config_.micro_batch(), config_.length);
    const auto part = learner_.loss(batch, {.predict = true});
    const auto right = data::accuracy(part.predicted.cpu(), batch.targets);
    loss += part.mean.item<double>() * static_cast<double>(right.tokens);
    accuracy += right;
  }
  const bool task = (config_.eval_data.is_null() ? config_.data : config_.eval_data).contains("task");
  return {loss / static_cast<double>(std::max<std::int64_t>(1, accuracy.tokens)),
          task ? accuracy.exact_match() : accuracy.token_accuracy()};
}

void Trainer::report(const Measured& measured, const std::optional<Evaluation>& evaluation, double seconds) {
  // Over about the last twenty steps, so that the time left does not jump.
  step_seconds_ = step_seconds_ == 0 ? seconds : 0.95 * step_seconds_ + 0.05 * seconds;
  StepReport report{.step = step_,
                    .steps = config_.steps,
                    .loss = measured.loss,
                    .learning_rate = schedule_(step_),
                    .gradient_norm = measured.gradient_norm,
                    .tokens_per_second = static_cast<double>(measured.tokens) / seconds,
                    .memory_bytes = memory_in_use(compute_.device),
                    .seconds_left = step_seconds_ * static_cast<double>(config_.steps - step_),
                    .eval_loss = {},
                    .eval_accuracy = {}};
  Json line{{"step", step_},
            {"tokens", tokens_},
            {"loss", report.loss},
            {"learning_rate", report.learning_rate},
            {"gradient_norm", report.gradient_norm},
            {"tokens_per_second", std::round(report.tokens_per_second)},
            {"memory_bytes", report.memory_bytes},
            {"seconds", seconds_}};
  if (evaluation) {
    line["eval_loss"] = *(report.eval_loss = evaluation->loss);
    line["eval_accuracy"] = *(report.eval_accuracy = evaluation->accuracy);
  }
  try {
    metrics_->append(line);
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string(error.what()) + "; " +
                             after_making_room(config_.output, how_to_continue(config_.output)));
  }
  progress_.step(report);
}

Outcome Trainer::run() {
  metrics_.emplace(config_.output, step_);
  progress_.say(say_start());
  const double seconds_before = seconds_;
  while (step_ < config_.steps && !reached_) {
    const auto started = Clock::now();
    ++step_;
    const auto measured = step();
    const double seconds = seconds_since(started);
    tokens_ += measured.tokens;

    std::optional<Evaluation> evaluation;
    if (eval_source_ && due(config_.eval_every)) evaluation = evaluate();
    reached_ = evaluation && config_.stop_accuracy && evaluation->accuracy >= *config_.stop_accuracy;
    seconds_ = seconds_before + seconds_since(begun_);
    report(measured, evaluation, seconds);

    const bool stop = signals_.received() != 0;
    if (stop || reached_ || step_ == config_.steps || due(config_.checkpoint_every)) save();
    if (stop && !reached_ && step_ < config_.steps) {
      progress_.say("stopped after step " + std::to_string(step_) + ", saved; " + how_to_continue(config_.output) +
                    " goes on from there.");
      return Outcome::stopped;
    }
  }
  progress_.say("finished after step " + std::to_string(step_) + " in " + short_duration(seconds_) +
                "; the weights are in " + latest_path(config_.output).string());
  return Outcome::finished;
}

/// A new run needs a folder without one; a run to be continued must be the same one.
void check_folder(const Config& config, Start start) {
  const auto& run = config.output;
  if (start == Start::fresh) {
    if (!is_run(run) && !list_checkpoints(run).empty()) {
      throw std::runtime_error("'" + run.string() +
                               "' holds checkpoints of a run that has lost its train.json; move "
                               "them, or choose another folder with --set output=FOLDER.");
    }
    if (!is_run(run) || !has_begun(run)) return;
    throw std::runtime_error("'" + run.string() + "' already holds a run; " + how_to_continue(run) +
                             " continues it, --set output=FOLDER starts another one elsewhere.");
  }
  const auto before = parse(read_settings(run));
  auto now = config.settings;
  for (const char* key : {"steps", "tokens"}) now[key] = before.settings.at(key);  // a run may go on for longer
  if (const auto key = first_difference(before.settings, now)) {
    const std::string name(*key);
    throw std::runtime_error("the run in '" + run.string() + "' has another " + name + " (" +
                             before.settings.at(name).dump().substr(0, 60) + ") than this one (" +
                             config.settings.at(name).dump().substr(0, 60) + "); resume it with its own settings, " +
                             how_to_continue(run) + ", or start a new run from its weights with --from " +
                             run.string() + " --set output=FOLDER.");
  }
}

/// Whether the run was to take another number of steps than it is to take now.
bool has_other_length(const Config& config) {
  const auto before = read_settings(config.output);
  return std::ranges::any_of(std::array{"steps", "tokens"}, [&](const char* key) {
    return before.value(key, Json()) != config.settings.value(key, Json());
  });
}

/// torch's errors go on for many lines, and the first is the sentence. Where memory is short it says how much, not what
/// to do.
std::string sentence_of(const std::string& text) {
  auto sentence = text.substr(0, text.find('\n'));
  if (sentence.find("out of memory") != std::string::npos || sentence.find("allocate memory") != std::string::npos) {
    sentence += " Raise accumulation, or set checkpoint_activations=true.";
  }
  return sentence;
}

}  // namespace

Outcome train(const Config& config, Start start) {
  const auto& run = config.output;
  if (start == Start::resume && !is_run(run)) {
    throw std::runtime_error("there is no run in '" + run.string() + "' to resume; leave out --resume to start one.");
  }
  const RunFolder folder(run);
  RunLock lock(run);
  check_folder(config, start);
  const auto failed = [&](const std::string& sentence) {
    note_failure(run, config.steps, lock, sentence);
    return std::runtime_error(sentence);
  };
  try {
    StopSignals signals(made_for(lock, folder));
    const auto adapted = with_end_token(config, [](const auto& line) { std::fprintf(stderr, "%s\n", line.c_str()); });
    Trainer trainer(adapted, start, signals);
    signals.begin();
    if (start == Start::fresh || has_other_length(config)) {
      write_text(run / "train.json", config.settings.dump(2) + "\n");
    }
    write_state(run, RunState::running, config.steps);
    const auto outcome = trainer.run();
    write_state(run, outcome == Outcome::finished ? RunState::finished : RunState::stopped, config.steps);
    return outcome;
  } catch (const Diverged& error) {
    note_failure(run, config.steps, lock, error.what());
    throw;
  } catch (const c10::Error& error) {
    throw failed(sentence_of(error.what_without_backtrace()));
  } catch (const std::exception& error) {
    throw failed(sentence_of(error.what()));
  }
}

}  // namespace gka::train
