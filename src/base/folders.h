// Folders that are made.
#pragma once

#include <filesystem>
#include <stdexcept>
#include <system_error>

namespace gka {

/// The folder and those above it, as far as they are not there; throws a sentence with the system's reason.
inline void make_folder(const std::filesystem::path& folder) {
  std::error_code failure;
  std::filesystem::create_directories(folder, failure);
  if (failure) throw std::runtime_error("cannot make the folder '" + folder.string() + "': " + failure.message());
}

}  // namespace gka
