// The loop for images: a batch through the model and back, the gradient clipped, a step of AdamW, a line of metrics;
// now and then the test images and a checkpoint.
//
// Which images a step sees follows from the seed and the step alone. All else that decides what comes next is in the
// checkpoint: weights, the norms' statistics, the optimiser's averages and torch's random numbers.
#include "train/vision.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/topk.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <future>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "base/files.h"
#include "base/labels.h"
#include "layers/functions.h"
#include "models/decoder.h"
#include "models/dtypes.h"
#include "models/placement.h"
#include "train/adamw.h"
#include "train/checkpoint.h"
#include "train/device.h"
#include "train/fault.h"
#include "train/progress.h"
#include "train/random_state.h"
#include "train/run.h"
#include "train/schedule.h"
#include "train/stop.h"
#include "train/text.h"

namespace gka::train {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// MambaVision's, where no option says otherwise.
constexpr double kClip = 5, kFinalRate = 0.01;
constexpr std::array kBetas{0.9, 0.999};
constexpr double kDefaultEpochs = 10;
constexpr std::int64_t kMostSteps = std::int64_t{1} << 40;
constexpr std::int64_t kLogEvery = 50, kFive = 5;

std::string how_to_continue(const fs::path& run) { return "`gka vision train --out " + run.string() + " --resume`"; }

Compute choose_compute(const VisionSettings& settings) {
  const auto device = models::device_named("--device", settings.device);
  const auto usual = device.is_cpu() ? at::kFloat : at::kBFloat16;
  const auto activations = settings.dtype.empty() ? usual : *models::dtype_on("--dtype", settings.dtype, device);
  return {device, activations, activations == at::kDouble ? at::kDouble : at::kFloat};
}

models::VisionModel draw_model(const VisionSettings& settings, const Compute& compute) {
  const auto seed = static_cast<std::uint64_t>(settings.seed);
  seed_torch(compute.device, seed);
  return models::VisionModel(models::parse_vision_config(settings.model, "model"),
                             {.device = compute.device,
                              .dtype = compute.parameters,
                              .generator = seed_torch(at::kCPU, seed),
                              .requires_grad = true});
}

/// Labels of a batch, on the device of the logits.
at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& labels, double smoothing) {
  return at::cross_entropy_loss(logits, layers::upload(labels, logits.device()), /*weight=*/{}, at::Reduction::Mean,
                                kIgnoredLabel, smoothing);
}

class VisionTrainer {
 public:
  VisionTrainer(const VisionSettings& settings, const fs::path& run, Start start, const StopSignals& signals);
  Outcome run();
  std::int64_t steps() const { return steps_; }

 private:
  struct Measured {
    double loss, gradient_norm;
  };

  void resume_from(const SavedStep& saved);
  void save();
  void save_files(const fs::path& folder) const;
  Measured step();
  Measured work_on(const ImageBatch& batch);
  [[noreturn]] void explain_not_finite(const std::string& where) const;
  void report(const Measured& measured, const std::optional<VisionScores>& scores, double seconds);
  std::string say_start() const;
  bool due(std::int64_t every) const {
    const auto steps = every > 0 ? every : epoch_steps_;
    return step_ % steps == 0 || step_ == steps_;
  }

  const VisionSettings& settings_;
  const fs::path& run_;
  const StopSignals& signals_;
  Compute compute_;
  Determinism determinism_;
  models::VisionModel model_;
  AdamW optimiser_;
  ImageSet images_, test_;
  ImageBatches batches_;
  std::int64_t epoch_steps_, steps_;
  Schedule schedule_;
  Progress progress_;
  std::optional<MetricsFile> metrics_;
  std::future<ImageBatch> upcoming_;

  std::int64_t step_ = 0, saved_step_ = 0;
  double seconds_ = 0, step_seconds_ = 0;
  Clock::time_point begun_ = Clock::now();
};

/// Batches that have shown every image once.
std::int64_t steps_of(double epochs, std::int64_t images, std::int64_t batch) {
  const double wanted = std::ceil(epochs * static_cast<double>(images) / static_cast<double>(batch));
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(std::min(wanted, static_cast<double>(kMostSteps))));
}

VisionTrainer::VisionTrainer(const VisionSettings& settings, const fs::path& run, Start start,
                             const StopSignals& signals)
    : settings_(settings),
      run_(run),
      signals_(signals),
      compute_(choose_compute(settings)),
      determinism_(compute_.device),
      model_(draw_model(settings, compute_)),
      optimiser_(model_.parameters().all(), {.betas = kBetas, .weight_decay = settings.weight_decay, .clip = kClip}),
      images_(read_images(images_file(settings.data, "train"), model_.config())),
      test_(read_images(images_file(settings.data, "test"), model_.config())),
      batches_(images_, static_cast<std::uint64_t>(settings.seed), parse_augmentation(settings.augment),
               settings.batch),
      epoch_steps_(steps_of(1, images_.count(), settings.batch)),
      steps_(settings.steps ? *settings.steps
                            : steps_of(settings.epochs.value_or(kDefaultEpochs), images_.count(), settings.batch)),
      schedule_{.peak = settings.learning_rate, .warmup = settings.warmup, .final = kFinalRate, .steps = steps_},
      progress_(stderr, kLogEvery) {
  const auto saved = list_checkpoints(run);
  if (start == Start::resume && !saved.empty()) resume_from(saved.back());
  // What a save had left to do when it was killed. Not before the newest is known to be whole: it may have to go.
  tidy_checkpoints(run, static_cast<std::size_t>(settings.keep));
}

std::string VisionTrainer::say_start() const {
  const auto& config = model_.config();
  return run_.string() + ": " + short_count(static_cast<double>(model_.parameters().count())) + " parameters (" +
         config.mixer + "), " + std::string(models::name_of_dtype(compute_.activations)) + " on " +
         compute_.device.str() + "; " + std::to_string(images_.count()) + " images of " +
         std::to_string(config.classes) + " classes, " + std::to_string(test_.count()) + " for the test; " +
         (step_ > 0 ? "continues after step " + std::to_string(step_) + " of " : "") + std::to_string(steps_) +
         " steps of " + std::to_string(settings_.batch) + " images";
}

void VisionTrainer::resume_from(const SavedStep& saved) {
  try {
    verify_folder(saved.path);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string(error.what()) + "; remove that folder, and " + how_to_continue(run_) +
                             " goes on from the checkpoint before it.");
  }
  models::load_vision_weights(model_, saved.path);
  const auto state = models::SafetensorsFile(saved.path / models::kOptimiserFile).tensors();
  optimiser_.load(state);
  restore_random(state, compute_.device);
  const auto progress = read_json_file(saved.path / models::kProgressFile);  // what we wrote: its checksum was right
  step_ = saved_step_ = progress.at("step").get<std::int64_t>();
  seconds_ = progress.at("seconds").get<double>();
  if (step_ > steps_) {
    throw std::runtime_error("the run has taken " + std::to_string(step_) + " steps already, and is to take " +
                             std::to_string(steps_) + "; --steps or --epochs takes at least as many.");
  }
  if (compute_.device.is_cpu()) progress_.note_threads(progress.at("threads").get<int>(), at::get_num_threads());
}

void VisionTrainer::save_files(const fs::path& folder) const {
  models::save_vision(model_, folder);
  fault_point("save", step_);
  auto state = optimiser_.state();
  keep_random(state, compute_.device);
  models::write_safetensors(folder / models::kOptimiserFile, state);
  const Json progress{{"step", step_}, {"seconds", seconds_}, {"threads", at::get_num_threads()}};
  write_text(folder / models::kProgressFile, progress.dump(2) + "\n");
}

void VisionTrainer::save() {
  if (saved_step_ == step_) return;
  try {
    metrics_->flush();
    write_folder(checkpoint_path(run_, step_), [&](const fs::path& unfinished) { save_files(unfinished); });
    saved_step_ = step_;
    tidy_checkpoints(run_, static_cast<std::size_t>(settings_.keep));
  } catch (const std::exception& error) {
    throw std::runtime_error("step " + std::to_string(step_) + " could not be saved (" + error.what() + "); " +
                             after_making_room(run_, how_to_continue(run_)));
  }
}

void VisionTrainer::explain_not_finite(const std::string& where) const {
  throw Diverged("the loss is no number any more at step " + std::to_string(step_) + (where.empty() ? "" : ": ") +
                 where + "; start a new run with a lower --lr (it was " + print("%g", settings_.learning_rate) +
                 ") or more --warmup.");
}

VisionTrainer::Measured VisionTrainer::work_on(const ImageBatch& batch) try {
  optimiser_.zero_gradients();
  const auto logits =
      model_.forward(layers::upload(batch.images, compute_.device), {.training = true, .dtype = compute_.activations});
  const auto loss = loss_of(logits, batch.labels, settings_.label_smoothing);
  loss.backward();
  fault_point("step", step_);
  const auto length = optimiser_.step(schedule_(step_));
  return {loss.item<double>(), length.item<double>()};
} catch (const models::LayerError& error) {
  // On the CPU an operator refuses a NaN before it reaches the loss.
  if (!error.not_finite) throw;
  explain_not_finite("the first values that are not finite are those of " + error.layer);
}

VisionTrainer::Measured VisionTrainer::step() {
  const auto batch = upcoming_.valid() ? upcoming_.get() : batches_.batch(step_ - 1);
  if (step_ < steps_) upcoming_ = std::async(std::launch::async, [this, next = step_] { return batches_.batch(next); });
  const auto measured = work_on(batch);
  if (!std::isfinite(measured.loss) || !std::isfinite(measured.gradient_norm)) explain_not_finite("");
  return measured;
}

void VisionTrainer::report(const Measured& measured, const std::optional<VisionScores>& scores, double seconds) {
  // Over about the last twenty steps, so that the time left does not jump.
  step_seconds_ = step_seconds_ == 0 ? seconds : 0.95 * step_seconds_ + 0.05 * seconds;
  StepReport report{.step = step_,
                    .steps = steps_,
                    .loss = measured.loss,
                    .learning_rate = schedule_(step_),
                    .gradient_norm = measured.gradient_norm,
                    .tokens_per_second = static_cast<double>(settings_.batch) / seconds,
                    .memory_bytes = memory_in_use(compute_.device),
                    .seconds_left = step_seconds_ * static_cast<double>(steps_ - step_),
                    .eval_loss = {},
                    .eval_accuracy = {},
                    .counted = "images"};
  const auto images = step_ * settings_.batch;
  Json line{{"step", step_},
            {"images", images},
            {"epoch", static_cast<double>(images) / static_cast<double>(images_.count())},
            {"loss", report.loss},
            {"learning_rate", report.learning_rate},
            {"gradient_norm", report.gradient_norm},
            {"images_per_second", std::round(report.tokens_per_second)},
            {"memory_bytes", report.memory_bytes},
            {"seconds", seconds_}};
  if (scores) {
    line["eval_loss"] = *(report.eval_loss = scores->loss);
    line["eval_accuracy"] = *(report.eval_accuracy = scores->top1());
  }
  try {
    metrics_->append(line);
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string(error.what()) + "; " + after_making_room(run_, how_to_continue(run_)));
  }
  progress_.step(report);
}

Outcome VisionTrainer::run() {
  metrics_.emplace(run_, step_);
  progress_.say(say_start());
  const double seconds_before = seconds_;
  while (step_ < steps_) {
    const auto started = Clock::now();
    ++step_;
    const auto measured = step();
    const double seconds = seconds_since(started);

    std::optional<VisionScores> scores;
    if (due(settings_.eval_every) && (signals_.received() == 0 || step_ == steps_)) {
      scores = evaluate_vision(model_, test_, {.dtype = compute_.activations});
    }
    seconds_ = seconds_before + seconds_since(begun_);
    report(measured, scores, seconds);

    const bool stop = signals_.received() != 0;
    if (stop || due(settings_.checkpoint_every)) save();
    if (stop && step_ < steps_) {
      progress_.say("stopped after step " + std::to_string(step_) + ", saved; " + how_to_continue(run_) +
                    " goes on from there.");
      return Outcome::stopped;
    }
  }
  progress_.say("finished after step " + std::to_string(step_) + " in " + short_duration(seconds_) +
                "; the model is in " + latest_path(run_).string());
  return Outcome::finished;
}

/// A new run needs a folder without one; a run to be continued must be the same one, but may go on for longer than it
/// was to.
void check_folder(const VisionSettings& settings, const fs::path& run, Start start) {
  if (start == Start::fresh) {
    if (!has_begun(run)) return;
    throw std::runtime_error("'" + run.string() + "' already holds a run; " + how_to_continue(run) +
                             " continues it, another --out starts one elsewhere.");
  }
  // How long it goes on, and what changes nothing that is computed.
  constexpr std::array<std::string_view, 5> kFree{"epochs", "steps", "eval_every", "checkpoint_every", "keep"};
  const auto before = read_vision_settings(run);
  const auto now = write_fields([&](auto&& visit) { VisionSettings::fields(settings, visit); });
  for (const auto& [key, value] : now.items()) {
    if (std::ranges::find(kFree, key) != kFree.end() || (before.contains(key) && before[key] == value)) continue;
    throw std::runtime_error("the run in '" + run.string() + "' has another " + key + " (" +
                             shown(before.value(key, Json())) + ") than this one (" + shown(value) +
                             "); resume it with its own, " + how_to_continue(run) + ".");
  }
}

}  // namespace

VisionSettings parse_vision_settings(const Json& json, const std::string& where) {
  VisionSettings settings;
  const auto unknown = [](const std::string&, const std::string& complaint) { throw std::runtime_error(complaint); };
  read_fields(json, where, unknown, [&](auto&& visit) { VisionSettings::fields(settings, visit); });
  const auto require = [&](bool fine, const char* key, const char* takes) {
    if (!fine) throw std::runtime_error("'" + std::string(key) + "' of " + where + " takes " + takes);
  };
  const auto whole = [&](const char* key, std::int64_t value, std::int64_t least, std::int64_t most) {
    const auto takes = "a whole number from " + std::to_string(least) + " to " + std::to_string(most);
    require(value >= least && value <= most, key, takes.c_str());
  };
  require(!settings.epochs || !settings.steps, "epochs", "nothing where 'steps' says how long to train");
  if (settings.epochs) require(*settings.epochs > 0 && *settings.epochs <= 1e6, "epochs", "a number above 0");
  if (settings.steps) whole("steps", *settings.steps, 1, kMostSteps);
  whole("batch", settings.batch, 1, 1 << 20);
  require(settings.learning_rate > 0 && std::isfinite(settings.learning_rate), "learning_rate", "a number above 0");
  require(settings.weight_decay >= 0 && std::isfinite(settings.weight_decay), "weight_decay", "a number from 0 on");
  require(settings.warmup >= 0 && settings.warmup <= 1, "warmup", "a fraction of the steps, from 0 to 1");
  require(settings.label_smoothing >= 0 && settings.label_smoothing < 1, "label_smoothing",
          "a number from 0 to below 1");
  whole("seed", settings.seed, 0, kMostSteps);
  whole("eval_every", settings.eval_every, 0, kMostSteps);
  whole("checkpoint_every", settings.checkpoint_every, 0, kMostSteps);
  whole("keep", settings.keep, 1, 1 << 20);
  (void)parse_augmentation(settings.augment);
  return settings;
}

Json read_vision_settings(const fs::path& run) {
  if (!is_run(run)) {
    throw std::runtime_error("there is no run in '" + run.string() + "' to resume; leave out --resume to start one.");
  }
  auto settings = read_json_file(run / "train.json");
  if (settings.is_object() && models::is_vision(settings.value("model", Json()))) return settings;
  throw std::runtime_error("the run in '" + run.string() + "' is of a model for text: `gka train " + run.string() +
                           " --resume` continues it.");
}

Outcome train_vision(const VisionSettings& settings, const fs::path& run, Start start) {
  if (start == Start::resume) (void)read_vision_settings(run);
  const RunFolder folder(run);
  RunLock lock(run);
  check_folder(settings, run, start);
  std::int64_t steps = 0;
  // A run that was asked for something it cannot do stands as it did.
  bool noted = start == Start::fresh;
  const auto failed = [&](const std::string& text) {
    const auto sentence = text.substr(0, text.find('\n'));  // torch's errors go on for many lines
    if (noted) note_failure(run, steps, lock, sentence);
    return std::runtime_error(sentence);
  };
  try {
    StopSignals signals(made_for(lock, folder));
    VisionTrainer trainer(settings, run, start, signals);
    signals.begin();
    steps = trainer.steps();
    noted = true;
    write_text(run / "train.json",
               write_fields([&](auto&& visit) { VisionSettings::fields(settings, visit); }).dump(2) + "\n");
    write_state(run, RunState::running, steps);
    const auto outcome = trainer.run();
    write_state(run, outcome == Outcome::finished ? RunState::finished : RunState::stopped, steps);
    return outcome;
  } catch (const Diverged& error) {
    note_failure(run, steps, lock, error.what());
    throw;
  } catch (const c10::Error& error) {
    throw failed(error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw failed(error.what());
  }
}

double VisionScores::standard_error(double share, std::int64_t images) {
  return std::sqrt(share * (1 - share) / static_cast<double>(std::max<std::int64_t>(1, images)));
}

VisionScores evaluate_vision(const models::VisionModel& model, const ImageSet& set, const VisionEvaluation& options) {
  const at::NoGradGuard no_gradients;
  const auto classes = model.config().classes;
  VisionScores scores;
  scores.of_class.resize(static_cast<std::size_t>(classes));
  scores.right_of_class.resize(static_cast<std::size_t>(classes));
  double loss = 0;
  for (std::int64_t first = 0; first < set.count(); first += options.batch) {
    const auto rows = std::min(options.batch, set.count() - first);
    const auto images = layers::upload(set.images.narrow(0, first, rows), model.device());
    const auto logits = model.forward(images, {.dtype = options.dtype}).to(at::kCPU);
    const auto labels = set.labels.narrow(0, first, rows);
    loss += loss_of(logits, labels, 0).item<double>() * static_cast<double>(rows);
    const auto likely = std::get<1>(logits.topk(std::min(kFive, classes)));
    const auto hits = likely.eq(labels.unsqueeze(1));
    scores.among_five += hits.sum().item<std::int64_t>();
    const auto first_hits = hits.select(1, 0).contiguous();
    for (std::int64_t i = 0; i < rows; ++i) {
      const auto label = static_cast<std::size_t>(labels.const_data_ptr<std::int64_t>()[i * labels.stride(0)]);
      const bool right = first_hits.const_data_ptr<bool>()[i];
      ++scores.of_class[label];
      scores.right_of_class[label] += right;
      scores.right += right;
    }
    scores.images += rows;
    if (options.on_logits) options.on_logits(logits.to(at::kFloat));
    if (options.on_progress) options.on_progress(scores.images);
  }
  scores.loss = loss / static_cast<double>(scores.images);
  return scores;
}

}  // namespace gka::train
