// Files as the rest of the house wants them: read whole, mapped into memory, or written so that a reader never meets
// half of one. Every failure is one sentence with the path and the system's reason.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/lost_pages.h"

namespace gka {

/// "cannot write out.bin: No space left on device"; what errno says now.
inline std::runtime_error file_error(const std::string& verb, const std::filesystem::path& path) {
  const int code = errno;
  return std::runtime_error("cannot " + verb + " " + path.string() + ": " + std::generic_category().message(code));
}

/// A file descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }

  int get() const { return number_; }
  bool open() const { return number_ >= 0; }
  /// False where the last bytes could not be written; a network file system says so only here.
  bool close() { return ::close(std::exchange(number_, -1)) == 0; }

 private:
  int number_;
};

/// A regular file open for reading, and what the system says about it. Anything else is refused without waiting: a FIFO
/// that nobody writes would hang whoever opens it.
struct OpenFile {
  Descriptor descriptor;
  struct stat about{};
  std::size_t size() const { return static_cast<std::size_t>(about.st_size); }
};
inline OpenFile open_regular(const std::filesystem::path& path) {
  OpenFile file{Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK))};
  if (!file.descriptor.open() || ::fstat(file.descriptor.get(), &file.about) != 0) throw file_error("open", path);
  if (!S_ISREG(file.about.st_mode)) throw std::runtime_error("cannot read " + path.string() + ": it is not a file");
  return file;
}

/// The bytes of a file, paged in as they are touched. Copies share the mapping, and writing to it changes this
/// process's copy alone. For files too large to copy; where one shrinks in the meantime, base/lost_pages.h has the last
/// word.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path) {
    const auto file = open_regular(path);
    size_ = file.size();
    if (size_ == 0) return;
    void* start = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file.descriptor.get(), 0);
    if (start == MAP_FAILED) throw file_error("map", path);
    auto* noted = note_mapping(start, size_, path.string());
    bytes_ = std::shared_ptr<char>(static_cast<char*>(start), [size = size_, noted](char* mapped) {
      forget_mapping(noted);
      ::munmap(mapped, size);
    });
  }

  char* data() const { return bytes_.get(); }
  std::size_t size() const { return size_; }
  std::string_view text() const { return {bytes_.get(), size_}; }
  /// Keeps the mapping alive for whoever holds it.
  std::shared_ptr<char> owner() const { return bytes_; }

 private:
  std::shared_ptr<char> bytes_;
  std::size_t size_ = 0;
};

/// All of a file, as long as it is at that moment.
inline std::string read_text(const std::filesystem::path& path) {
  const auto file = open_regular(path);
  std::string text(file.size(), '\0');
  std::size_t have = 0;
  while (have < text.size()) {
    const auto got = ::read(file.descriptor.get(), text.data() + have, text.size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw file_error("read", path);
    if (got == 0) break;
    have += static_cast<std::size_t>(got);
  }
  text.resize(have);
  return text;
}

/// All of the bytes, in as many calls as that takes.
inline void write_all(const Descriptor& file, const std::filesystem::path& path, std::string_view bytes) {
  constexpr std::size_t kMost = std::size_t{1} << 30;  // one call writes less than 2 GiB
  while (!bytes.empty()) {
    const auto written = ::write(file.get(), bytes.data(), std::min(bytes.size(), kMost));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw file_error("write", path);
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
}

/// A file that appears whole or not at all: written beside its name, flushed to the disk and renamed by `commit`, and
/// removed when never committed. It is locked while it is written, so that the next to write the same name can tell
/// what a killed process left there from what another one is still writing, and removes it.
class NewFile {
 public:
  explicit NewFile(std::filesystem::path path) : path_(std::move(path)) {
    remove_abandoned();
    beside_ = path_;
    beside_ += kBeside + std::to_string(::getpid());
    file_ = Descriptor(::open(beside_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (!file_.open()) throw file_error("write", path_);
    ::flock(file_.get(), LOCK_EX | LOCK_NB);  // where locks are not to be had, nothing is removed either
  }
  NewFile(NewFile&& other) noexcept = default;
  ~NewFile() {
    if (file_.open()) ::unlink(beside_.c_str());
  }

  void write(const void* data, std::size_t size) { write({static_cast<const char*>(data), size}); }
  void write(std::string_view text) { write_all(file_, path_, text); }
  /// Over what was written before, where a file learns at its end what belongs at its start.
  void write_at(std::size_t offset, const void* data, std::size_t size) {
    if (::lseek(file_.get(), static_cast<off_t>(offset), SEEK_SET) < 0) throw file_error("write", path_);
    write(data, size);
    if (::lseek(file_.get(), 0, SEEK_END) < 0) throw file_error("write", path_);
  }

  void commit() {
    if (::fsync(file_.get()) != 0) throw file_error("write", path_);
    const bool closed = file_.close();
    if (!closed || ::rename(beside_.c_str(), path_.c_str()) != 0) {
      const auto error = file_error("write", path_);
      ::unlink(beside_.c_str());
      throw error;
    }
  }

 private:
  static constexpr const char* kBeside = ".writing-";

  void remove_abandoned() const {
    std::error_code none;
    const auto folder = path_.has_parent_path() ? path_.parent_path() : std::filesystem::path(".");
    const auto start = path_.filename().string() + kBeside;
    for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
      if (!entry.path().filename().string().starts_with(start)) continue;
      const Descriptor other(::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
      if (other.open() && ::flock(other.get(), LOCK_EX | LOCK_NB) == 0) ::unlink(entry.path().c_str());
    }
  }

  std::filesystem::path path_, beside_;
  Descriptor file_;
};

inline void write_text(const std::filesystem::path& path, std::string_view text) {
  NewFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace gka
