#include "train/run.h"

#include <sys/file.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "base/folders.h"
#include "train/events.h"

namespace gka::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMetrics = "metrics.jsonl";
constexpr const char* kEvents = "events.out.tfevents.gka";  // TensorBoard looks for the middle of this name

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

fs::path lock_path(const fs::path& run) { return run / "lock"; }

/// A file of gka's holds the number of a process and a line end, or nothing yet.
bool looks_like_a_lock(const std::string& text) {
  return text.find_first_not_of("0123456789\n") == std::string::npos && text.size() < 24;
}

template <typename Value>
Value value_or(const Json& object, const char* key, Value preset) {
  const auto found = object.find(key);
  Value value{};
  return found != object.end() && json::read(*found, value) ? value : preset;
}

template <typename Value>
std::optional<Value> find_number(const Json& line, const char* key) {
  const auto found = line.find(key);
  if (found == line.end() || !found->is_number()) return std::nullopt;
  return found->get<Value>();
}

}  // namespace

RunLock::RunLock(const fs::path& run)
    : path_(lock_path(run)),
      made_(!fs::exists(fs::symlink_status(path_))),
      file_(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666)) {
  if (!file_.open()) throw file_error("write", path_);
  if (!looks_like_a_lock(read_text(path_))) {
    throw std::runtime_error(
        "'" + path_.string() +
        "' is in the way: it is not a lock of gka's; move it, or choose another folder for the run.");
  }
  if (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
    auto owner = read_text(path_);
    while (owner.ends_with('\n')) owner.pop_back();
    throw std::runtime_error("another process (" + owner + ") is training into '" + run.string() +
                             "'; wait until it ends, or choose another folder for this run.");
  }
  const auto owner = std::to_string(::getpid()) + "\n";
  try {
    if (::ftruncate(file_.get(), 0) != 0) throw file_error("write", path_);
    write_all(file_, path_, owner);
  } catch (const std::exception&) {
    remove();
    throw;
  }
}

bool RunLock::is_held(const fs::path& run) {
  const Descriptor file(::open(lock_path(run).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  return file.open() && ::flock(file.get(), LOCK_SH | LOCK_NB) != 0;
}

void RunLock::remove() {
  if (made_) fs::remove(path_);
}

std::vector<fs::path> RunLock::made() const {
  return made_ ? std::vector{fs::absolute(path_)} : std::vector<fs::path>{};
}

std::vector<fs::path> made_for(const RunLock& lock, const RunFolder& folder) {
  auto made = lock.made();
  made.insert(made.end(), folder.made().begin(), folder.made().end());
  return made;
}

MetricsFile::MetricsFile(const fs::path& run, std::int64_t last_step)
    : metrics_(run / kMetrics), events_(run / kEvents) {
  auto lines = read_metrics(run);
  std::erase_if(lines, [&](const Json& line) { return value_or<std::int64_t>(line, "step", 0) > last_step; });
  // When an older line was measured is not noted: as if the run had gone on without a pause until now.
  const auto seconds = [](const Json& line) { return value_or(line, "seconds", 0.0); };
  const double began = now() - (lines.empty() ? 0.0 : seconds(lines.back()));
  std::string text, events = events_header(began);
  for (const auto& line : lines) {
    text += line.dump() + "\n";
    events += event_of(line, began + seconds(line));
  }
  metrics_.begin(text);
  events_.begin(events);
}

void MetricsFile::append(const Json& line) {
  metrics_.append(line.dump() + "\n");
  events_.append(event_of(line, now()));
}

void MetricsFile::Appended::begin(const std::string& text) {
  write_text(path, text);
  file = Descriptor(::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC));
  if (!file.open()) throw file_error("write", path);
}

void MetricsFile::Appended::append(const std::string& text) { write_all(file, path, text); }

void MetricsFile::flush() {
  if (::fsync(metrics_.file.get()) != 0) throw file_error("write", metrics_.path);
}

std::vector<Json> read_metrics(const fs::path& run) {
  std::vector<Json> lines;
  if (!fs::exists(run / kMetrics)) return lines;
  std::istringstream text(read_text(run / kMetrics));
  for (std::string line; std::getline(text, line);) {
    auto json = parse_json_if_any(line);
    if (json.is_object()) lines.push_back(std::move(json));  // a kill may leave half a line at the end
  }
  return lines;
}

void write_state(const fs::path& run, RunState state, std::int64_t steps, const std::string& message) {
  Json json{{"state", kRunStates[static_cast<std::size_t>(state)]}, {"steps", steps}};
  if (!message.empty()) json["message"] = message;
  write_text(run / "run.json", json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

RunFolder::RunFolder(const fs::path& run) {
  std::error_code error;
  for (auto path = fs::absolute(run).lexically_normal(); !fs::exists(path, error); path = path.parent_path()) {
    made_.push_back(path);
  }
  make_folder(run);
}

RunFolder::~RunFolder() {
  std::error_code not_empty;
  for (const auto& path : made_) fs::remove(path, not_empty);
}

namespace {

bool is_finished(const fs::path& run) {
  const auto state = parse_json_if_any(fs::exists(run / "run.json") ? read_text(run / "run.json") : "");
  return state.is_object() && state.value("state", Json()) == kRunStates[static_cast<std::size_t>(RunState::finished)];
}

}  // namespace

void note_failure(const fs::path& run, std::int64_t steps, RunLock& lock, const std::string& sentence) noexcept {
  try {
    if (is_finished(run)) return;  // nothing was begun: it is "running" from there on
    if (is_run(run)) {
      write_state(run, RunState::failed, steps, sentence);
    } else {
      lock.remove();
    }
  } catch (const std::exception&) {
  }
}

bool is_run(const fs::path& folder) { return fs::exists(folder / "train.json"); }

bool has_begun(const fs::path& run) {
  std::error_code none;
  const auto checkpoints = run / "checkpoints";
  return (fs::is_directory(checkpoints, none) && !fs::is_empty(checkpoints, none)) || !read_metrics(run).empty();
}

namespace {

void read_state(RunSummary& summary) {
  const auto path = summary.path / "run.json";
  summary.state = "running";
  if (fs::exists(path)) {
    const auto state = read_json_file(path);
    summary.state.clear();
    if (state.is_object()) json::read(state.value("state", Json("running")), summary.state);
    if (std::ranges::find(kRunStates, summary.state) == kRunStates.end()) {
      throw std::runtime_error(path.string() + " does not say how the run stands");
    }
    summary.message = value_or<std::string>(state, "message", "");
    summary.steps = value_or<std::int64_t>(state, "steps", 0);
  }
  if (summary.state == "running" && !RunLock::is_held(summary.path)) summary.state = "killed";
}

void read_numbers(RunSummary& summary) {
  for (const auto& line : read_metrics(summary.path)) {
    summary.step = value_or(line, "step", summary.step);
    summary.seconds = value_or(line, "seconds", summary.seconds);
    if (const auto loss = find_number<double>(line, "loss")) summary.loss = loss;
    if (const auto loss = find_number<double>(line, "eval_loss")) summary.eval_loss = loss;
    if (const auto accuracy = find_number<double>(line, "eval_accuracy")) summary.accuracy = accuracy;
  }
}

using Seen = std::set<std::pair<dev_t, ino_t>>;

bool first_time(const fs::path& folder, Seen& seen) {
  struct stat about{};
  return ::stat(folder.c_str(), &about) == 0 && S_ISDIR(about.st_mode) &&
         seen.emplace(about.st_dev, about.st_ino).second;
}

void add_runs(const fs::path& folder, Seen& seen, std::vector<RunSummary>& runs) {
  if (!first_time(folder, seen)) return;
  std::error_code error;
  if (fs::exists(folder / "train.json", error)) return runs.push_back(summarise_run(folder));
  for (auto entry = fs::directory_iterator(folder, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    add_runs(entry->path(), seen, runs);
  }
  if (!error) return;
  auto& run = runs.emplace_back();
  run.path = folder;
  run.state = "damaged";
  run.message = "cannot read the folder: " + error.message();
}

}  // namespace

RunSummary summarise_run(const fs::path& run) {
  RunSummary summary;
  summary.path = run;
  try {
    read_state(summary);
    read_numbers(summary);
  } catch (const std::exception& error) {
    summary.state = "damaged";
    summary.message = error.what();
  }
  return summary;
}

std::vector<RunSummary> list_runs(const fs::path& folder) {
  std::vector<RunSummary> runs;
  Seen seen;
  add_runs(folder, seen, runs);
  std::ranges::sort(runs, {}, &RunSummary::path);
  return runs;
}

}  // namespace gka::train
