// Which large files were found whole: reading a token file of many gigabytes once more at every start would take longer
// than starting. A line per file in the user's cache folder ($XDG_CACHE_HOME or ~/.cache, there gka/verified).
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace gka::data {

/// What a file is known by: device, inode, size, time of the last change and the checksum it states. Whatever writes to
/// it changes one of these.
std::string mark_of(const std::filesystem::path& path, std::uint64_t checksum);

/// The list. Where there is no folder for it, or it cannot be read or written, nothing is remembered.
class VerifiedFiles {
 public:
  VerifiedFiles();

  bool has(const std::string& mark) const;
  void add(const std::string& mark) const;

 private:
  std::filesystem::path path_;
};

}  // namespace gka::data
