#include "data/verified.h"

#include <cstdlib>
#include <exception>

#include "base/files.h"

namespace gka::data {
namespace {

/// Beyond this the list starts anew: about 20,000 files.
constexpr std::size_t kLongest = std::size_t{2} << 20;

std::filesystem::path cache_folder() {
  if (const char* named = std::getenv("XDG_CACHE_HOME"); named && *named) return named;
  if (const char* home = std::getenv("HOME"); home && *home) return std::filesystem::path(home) / ".cache";
  return {};
}

}  // namespace

std::string mark_of(const std::filesystem::path& path, std::uint64_t checksum) {
  const auto about = open_regular(path).about;
  std::string mark;
  for (const auto number :
       {static_cast<std::uint64_t>(about.st_dev), static_cast<std::uint64_t>(about.st_ino),
        static_cast<std::uint64_t>(about.st_size), static_cast<std::uint64_t>(about.st_mtim.tv_sec),
        static_cast<std::uint64_t>(about.st_mtim.tv_nsec), static_cast<std::uint64_t>(about.st_ctim.tv_sec),
        static_cast<std::uint64_t>(about.st_ctim.tv_nsec), checksum}) {
    mark += std::to_string(number) + " ";
  }
  mark.back() = '\n';
  return mark;
}

VerifiedFiles::VerifiedFiles() {
  if (const auto folder = cache_folder(); !folder.empty()) path_ = folder / "gka" / "verified";
}

bool VerifiedFiles::has(const std::string& mark) const try {
  const auto list = path_.empty() ? std::string() : "\n" + read_text(path_);
  return list.find("\n" + mark) != std::string::npos;
} catch (const std::exception&) {
  return false;
}

void VerifiedFiles::add(const std::string& mark) const try {
  if (path_.empty()) return;
  std::filesystem::create_directories(path_.parent_path());
  const Descriptor file(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0666));
  struct stat about{};
  if (!file.open() || ::fstat(file.get(), &about) != 0) return;
  if (static_cast<std::size_t>(about.st_size) > kLongest && ::ftruncate(file.get(), 0) != 0) return;
  write_all(file, path_, mark);
} catch (const std::exception&) {
}

}  // namespace gka::data
