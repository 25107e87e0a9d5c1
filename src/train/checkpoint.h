// Checkpoints: folders that exist whole or not at all, and that notice when a byte of them has changed.
//
// A folder is filled beside its name, every file is flushed to the disk, and only then is it renamed; CHECKSUMS.xxh64
// in it lists its files in the form `xxh64sum --check` reads.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "models/checksums.h"

namespace gka::train {

/// Under which name a folder is filled until it has its own.
std::filesystem::path unfinished_path(const std::filesystem::path& folder);

/// Calls `fill` with an empty folder, and gives that folder its name once all of it is on the disk. Whatever goes
/// wrong, nothing of that name appears and the rest is removed.
void write_folder(const std::filesystem::path& folder, const std::function<void(const std::filesystem::path&)>& fill);

using models::has_checksums;
using models::verify_folder;

struct SavedStep {
  std::int64_t step;
  std::filesystem::path path;
};

/// Where the checkpoint of a step lies in a run.
std::filesystem::path checkpoint_path(const std::filesystem::path& run, std::int64_t step);

/// The checkpoints of a run, oldest first.
std::vector<SavedStep> list_checkpoints(const std::filesystem::path& run);

/// "make room there, then COMMAND goes on after step 8.": for a run whose disk was full.
std::string after_making_room(const std::filesystem::path& run, const std::string& command);

/// A link in the run to its newest checkpoint, for `gka generate runs/x/latest`.
std::filesystem::path latest_path(const std::filesystem::path& run);
void point_to_latest(const std::filesystem::path& run, const std::filesystem::path& checkpoint);

/// Removes what an interrupted save left behind, and all but the newest `keep` checkpoints, and points `latest` to the
/// newest: the rest of a save, which can be done again at any time.
void tidy_checkpoints(const std::filesystem::path& run, std::size_t keep);

}  // namespace gka::train
