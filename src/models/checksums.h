// CHECKSUMS.xxh64: the XXH64 of every file of a checkpoint, in the form `xxh64sum --check` reads. What gka wrote has
// one, and is compared with it on every load; models from elsewhere have none.
#pragma once

#include <cstdint>
#include <filesystem>

namespace gka::models {

/// What a run's checkpoint has beside the model's files: the optimiser's state, and how far the run is.
inline constexpr const char* kOptimiserFile = "optimizer.safetensors";
inline constexpr const char* kProgressFile = "trainer.json";

/// All of a folder, or what a model is made of: not the optimiser's state, which is twice as large.
enum class Checked : std::uint8_t { everything, model };

/// Lists and flushes to the disk every file of the folder.
void write_checksums(const std::filesystem::path& folder);

bool has_checksums(const std::filesystem::path& folder);

/// Throws a sentence that names the file unless the folder is what was written: no file is missing or changed, and
/// none that a load would read (.json, .safetensors, merges.txt) has come from elsewhere.
void verify_folder(const std::filesystem::path& folder, Checked checked = Checked::everything);

/// The same where there are checksums.
void verify_if_listed(const std::filesystem::path& folder, Checked checked);

}  // namespace gka::models
