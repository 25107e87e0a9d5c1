// The folder of a run: who trains into it, how it stands, and what it measured.
//
//   train.json      every setting, after defaults and --set
//   run.json        how it stands
//   metrics.jsonl   one line per step
//   events.out.…    the same for TensorBoard
//   checkpoints/    step-000001000, …
//   lock            held by the process that trains; the system lets go of it however that process ends
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/fields.h"
#include "base/files.h"

namespace gka::train {

/// Held while an object of this kind lives.
class RunLock {
 public:
  /// Throws a sentence with the other process's number where one trains into the folder.
  explicit RunLock(const std::filesystem::path& run);

  /// Whether some process holds the lock of this folder.
  static bool is_held(const std::filesystem::path& run);

  /// Removes the file of a lock that will not be needed again, if this object made it.
  void remove();
  /// That file, if this object made it.
  std::vector<std::filesystem::path> made() const;

 private:
  std::filesystem::path path_;
  bool made_;
  Descriptor file_;
};

/// The folder of a run, or of another file that is made, with those above it. What it had to make and stands empty in
/// the end goes again.
class RunFolder {
 public:
  explicit RunFolder(const std::filesystem::path& run);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  /// The folders it had to make, the deepest first.
  const std::vector<std::filesystem::path>& made() const { return made_; }

 private:
  std::vector<std::filesystem::path> made_{};  // the deepest first
};

/// Leaves no trace of a run of so many steps that never began, and everything that was there before it; of one that did
/// begin, a note of what went wrong, unless it is finished and was asked for more than it can do. A full disk takes no
/// notes, but the sentence still reaches the user.
void note_failure(const std::filesystem::path& run, std::int64_t steps, RunLock& lock,
                  const std::string& sentence) noexcept;

/// What a signal before the first step removes again.
std::vector<std::filesystem::path> made_for(const RunLock& lock, const RunFolder& folder);

/// metrics.jsonl, one JSON object per line and step, and beside it the same numbers for TensorBoard.
class MetricsFile {
 public:
  /// Keeps the lines up to `last_step` and appends after them.
  MetricsFile(const std::filesystem::path& run, std::int64_t last_step);
  void append(const Json& line);
  /// To the disk.
  void flush();

 private:
  struct Appended {
    explicit Appended(std::filesystem::path where) : path(std::move(where)) {}
    /// The file has this text from here on, and is there whole or as it was.
    void begin(const std::string& text);
    void append(const std::string& text);
    std::filesystem::path path;
    Descriptor file{};
  };
  Appended metrics_, events_;
};

/// The complete lines of a run's metrics.jsonl; none where there is no such file.
std::vector<Json> read_metrics(const std::filesystem::path& run);

enum class RunState : std::uint8_t { running, finished, stopped, failed };
inline constexpr std::array<std::string_view, 4> kRunStates{"running", "finished", "stopped", "failed"};

/// Notes in run.json how the run of so many steps stands; `message` says why it failed.
void write_state(const std::filesystem::path& run, RunState state, std::int64_t steps, const std::string& message = {});

struct RunSummary {
  std::filesystem::path path;
  /// A name of RunState, "killed" (it was running and no process holds its lock), or "damaged" (`message` says how).
  std::string state;
  std::int64_t step = 0, steps = 0;
  std::optional<double> loss, eval_loss, accuracy;
  double seconds = 0;
  std::string message;
};

bool is_run(const std::filesystem::path& folder);
/// Whether the run in this folder ever finished a step; one that did not may be replaced.
bool has_begun(const std::filesystem::path& run);
/// Never throws for what it finds in the folder.
RunSummary summarise_run(const std::filesystem::path& run);

/// The runs at `folder` and below it, by path. A folder that cannot be read is a run that is "damaged"; one that was
/// seen already, through a link, is not entered again.
std::vector<RunSummary> list_runs(const std::filesystem::path& folder);

}  // namespace gka::train
