// Files as the rest of the house wants them: read whole, mapped into memory, or written so that a reader never meets
// half of one. Every failure is one sentence with the path and the system's reason.
#pragma once

#include <fcntl.h>
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

/// The bytes of a file, paged in as they are touched. Copies share the mapping, and writing to it changes this
/// process's copy alone.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path) {
    const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file.open()) throw file_error("open", path);
    struct stat about{};
    if (::fstat(file.get(), &about) != 0) throw file_error("open", path);
    if (!S_ISREG(about.st_mode)) throw std::runtime_error("cannot read " + path.string() + ": it is not a file");
    size_ = static_cast<std::size_t>(about.st_size);
    if (size_ == 0) return;
    void* start = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file.get(), 0);
    if (start == MAP_FAILED) throw file_error("map", path);
    bytes_ = std::shared_ptr<char>(static_cast<char*>(start), [size = size_](char* mapped) { ::munmap(mapped, size); });
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

inline std::string read_text(const std::filesystem::path& path) { return std::string(MappedFile(path).text()); }

/// A file that appears whole or not at all: written beside its name, flushed to the disk and renamed by `commit`, and
/// removed when never committed.
class NewFile {
 public:
  explicit NewFile(std::filesystem::path path) : path_(std::move(path)) {
    beside_ = path_;
    beside_ += ".writing-" + std::to_string(::getpid());
    file_ = Descriptor(::open(beside_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (!file_.open()) throw file_error("write", path_);
  }
  NewFile(NewFile&& other) noexcept = default;
  ~NewFile() {
    if (file_.open()) ::unlink(beside_.c_str());
  }

  void write(const void* data, std::size_t size) {
    constexpr std::size_t kMost = std::size_t{1} << 30;  // one call writes less than 2 GiB
    const char* from = static_cast<const char*>(data);
    while (size > 0) {
      const auto written = ::write(file_.get(), from, std::min(size, kMost));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) throw file_error("write", path_);
      from += written;
      size -= static_cast<std::size_t>(written);
    }
  }
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Over what was written before, where a file learns at its end what belongs at its start.
  void write_at(std::size_t offset, const void* data, std::size_t size) {
    if (::pwrite(file_.get(), data, size, static_cast<off_t>(offset)) != static_cast<ssize_t>(size)) {
      throw file_error("write", path_);
    }
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
  std::filesystem::path path_, beside_;
  Descriptor file_;
};

inline void write_text(const std::filesystem::path& path, std::string_view text) {
  NewFile file(path);
  file.write(text);
  file.commit();
}

}  // namespace gka
