#include "train/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "base/files.h"
#include "base/folders.h"

namespace gka::train {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kUnfinished = ".unfinished-";
constexpr std::string_view kStep = "step-";

/// To the disk, whoever wrote it; for a folder that is the names in it.
void flush(const fs::path& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.open() || ::fsync(file.get()) != 0) throw file_error("write", path);
}

}  // namespace

fs::path unfinished_path(const fs::path& folder) {
  return folder.parent_path() / (std::string(kUnfinished) + folder.filename().string());
}

void write_folder(const fs::path& folder, const std::function<void(const fs::path&)>& fill) {
  const auto parent = folder.parent_path();
  const auto unfinished = unfinished_path(folder);
  make_folder(parent);
  fs::remove_all(unfinished);
  try {
    make_folder(unfinished);
    fill(unfinished);
    models::write_checksums(unfinished);
    flush(unfinished);
    fs::rename(unfinished, folder);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(unfinished, ignored);
    throw;
  }
  flush(parent);
}

fs::path checkpoint_path(const fs::path& run, std::int64_t step) {
  char name[32];
  std::snprintf(name, sizeof(name), "%s%09lld", kStep.data(), static_cast<long long>(step));
  return run / "checkpoints" / name;
}

std::vector<SavedStep> list_checkpoints(const fs::path& run) {
  std::vector<SavedStep> saved;
  const auto folder = run / "checkpoints";
  if (!fs::is_directory(folder)) return saved;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    if (!entry.is_directory() || !name.starts_with(kStep)) continue;
    std::int64_t step = 0;
    const auto* end = name.data() + name.size();
    const auto read = std::from_chars(name.data() + kStep.size(), end, step);
    if (read.ec == std::errc() && read.ptr == end) saved.push_back({step, entry.path()});
  }
  std::ranges::sort(saved, {}, &SavedStep::step);
  return saved;
}

std::string after_making_room(const fs::path& run, const std::string& command) {
  const auto saved = list_checkpoints(run);
  return "make room there, then " + command + " goes on " +
         (saved.empty() ? "from the beginning." : "after step " + std::to_string(saved.back().step) + ".");
}

fs::path latest_path(const fs::path& run) { return run / "latest"; }

void point_to_latest(const fs::path& run, const fs::path& checkpoint) {
  const auto beside = run / ".latest";
  fs::remove(beside);
  fs::create_directory_symlink(fs::relative(checkpoint, run), beside);
  fs::rename(beside, latest_path(run));
}

void tidy_checkpoints(const fs::path& run, std::size_t keep) {
  const auto folder = run / "checkpoints";
  if (!fs::is_directory(folder)) return;
  auto saved = list_checkpoints(run);
  if (!saved.empty()) point_to_latest(run, saved.back().path);
  if (saved.size() > keep) {
    saved.resize(saved.size() - keep);
    // Renamed first: a folder of which half is removed must not look like a checkpoint.
    for (const auto& old : saved) fs::rename(old.path, unfinished_path(old.path));
  }
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with(kUnfinished)) fs::remove_all(entry.path());
  }
}

}  // namespace gka::train
