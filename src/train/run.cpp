#include "train/run.h"

#include <sys/file.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace gka::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMetrics = "metrics.jsonl";

fs::path lock_path(const fs::path& run) { return run / "lock"; }

/// An empty object where the file is missing or holds none.
Json read_object_if_any(const fs::path& path) {
  if (!fs::exists(path)) return Json::object();
  auto json = Json::parse(read_text(path), nullptr, /*allow_exceptions=*/false);
  return json.is_object() ? json : Json::object();
}

template <typename Value>
std::optional<Value> find_number(const Json& line, const char* key) {
  const auto found = line.find(key);
  if (found == line.end() || !found->is_number()) return std::nullopt;
  return found->get<Value>();
}

}  // namespace

RunLock::RunLock(const fs::path& run) : file_(::open(lock_path(run).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
  if (!file_.open()) throw file_error("write", lock_path(run));
  if (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
    auto owner = read_text(lock_path(run));
    while (owner.ends_with('\n')) owner.pop_back();
    throw std::runtime_error("another process (" + owner + ") is training into '" + run.string() +
                             "'; wait until it ends, or choose another folder with --set output=FOLDER.");
  }
  const auto owner = std::to_string(::getpid()) + "\n";
  if (::ftruncate(file_.get(), 0) != 0 || ::write(file_.get(), owner.data(), owner.size()) < 0) {
    throw file_error("write", lock_path(run));
  }
}

bool RunLock::is_held(const fs::path& run) {
  const Descriptor file(::open(lock_path(run).c_str(), O_RDONLY | O_CLOEXEC));
  return file.open() && ::flock(file.get(), LOCK_SH | LOCK_NB) != 0;
}

void RunLock::remove(const fs::path& run) { fs::remove(lock_path(run)); }

MetricsFile::MetricsFile(const fs::path& run, std::int64_t last_step) : path_(run / kMetrics) {
  std::string kept;
  for (const auto& line : read_metrics(run)) {
    if (line.value("step", std::int64_t{0}) <= last_step) kept += line.dump() + "\n";
  }
  write_text(path_, kept);
  file_ = Descriptor(::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC));
  if (!file_.open()) throw file_error("write", path_);
}

void MetricsFile::append(const Json& line) {
  const auto text = line.dump() + "\n";
  if (::write(file_.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) {
    throw file_error("write", path_);
  }
}

void MetricsFile::flush() {
  if (::fsync(file_.get()) != 0) throw file_error("write", path_);
}

std::vector<Json> read_metrics(const fs::path& run) {
  std::vector<Json> lines;
  if (!fs::exists(run / kMetrics)) return lines;
  std::istringstream text(read_text(run / kMetrics));
  for (std::string line; std::getline(text, line);) {
    auto json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (json.is_object()) lines.push_back(std::move(json));  // a kill may leave half a line at the end
  }
  return lines;
}

void write_state(const fs::path& run, RunState state, std::int64_t steps, const std::string& message) {
  Json json{{"state", kRunStates[static_cast<std::size_t>(state)]}, {"steps", steps}};
  if (!message.empty()) json["message"] = message;
  write_text(run / "run.json", json.dump(2) + "\n");
}

bool is_run(const fs::path& folder) { return fs::exists(folder / "train.json"); }

RunSummary summarise_run(const fs::path& run) {
  RunSummary summary;
  summary.path = run;
  const auto state = read_object_if_any(run / "run.json");
  summary.state = state.value("state", "running");
  summary.message = state.value("message", "");
  if (summary.state == "running" && !RunLock::is_held(run)) summary.state = "killed";
  summary.steps = state.value("steps", std::int64_t{0});
  for (const auto& line : read_metrics(run)) {
    summary.step = find_number<std::int64_t>(line, "step").value_or(summary.step);

    summary.seconds = find_number<double>(line, "seconds").value_or(summary.seconds);
    if (const auto loss = find_number<double>(line, "loss")) summary.loss = loss;
    if (const auto loss = find_number<double>(line, "eval_loss")) summary.eval_loss = loss;
    if (const auto accuracy = find_number<double>(line, "eval_accuracy")) summary.accuracy = accuracy;
  }
  return summary;
}

std::vector<RunSummary> list_runs(const fs::path& folder) {
  std::vector<RunSummary> runs;
  if (is_run(folder)) return {summarise_run(folder)};
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (!entry.is_directory()) continue;
    for (auto& run : list_runs(entry.path())) runs.push_back(std::move(run));
  }
  std::ranges::sort(runs, {}, &RunSummary::path);
  return runs;
}

}  // namespace gka::train
