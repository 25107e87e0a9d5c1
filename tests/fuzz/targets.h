// One function per format that gka reads. Each takes any bytes, does with them what gka would do with a file of them,
// and returns; a sentence thrown is the right answer to most. What must not happen: a crash, a hang, memory without
// bound, an exception that is no std::exception with a sentence of ours.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace gka::fuzz {

using Bytes = std::span<const std::byte>;

int fuzz_safetensors(Bytes bytes);
int fuzz_config(Bytes bytes);
int fuzz_training_file(Bytes bytes);
int fuzz_tokenizer(Bytes bytes);
int fuzz_tokens(Bytes bytes);
int fuzz_run(Bytes bytes);  // metrics.jsonl and run.json
int fuzz_pattern(Bytes bytes);
int fuzz_request(Bytes bytes);   // as it comes from a socket
int fuzz_template(Bytes bytes);  // of a chat

struct Target {
  std::string_view name;  // and the folder of its corpus
  int (*run)(Bytes bytes);
};
inline constexpr std::array<Target, 9> kTargets{{
    {"safetensors", fuzz_safetensors},
    {"config", fuzz_config},
    {"training_file", fuzz_training_file},
    {"tokenizer", fuzz_tokenizer},
    {"tokens", fuzz_tokens},
    {"run", fuzz_run},
    {"pattern", fuzz_pattern},
    {"request", fuzz_request},
    {"template", fuzz_template},
}};

inline std::string_view text_of(Bytes bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

/// A file with these bytes that lies in memory, for what reads by path.
class MemoryFile {
 public:
  explicit MemoryFile(Bytes bytes) : file_(::memfd_create("gka-fuzz", MFD_CLOEXEC)) {
    const auto text = text_of(bytes);
    if (file_ < 0 || ::write(file_, text.data(), text.size()) != static_cast<ssize_t>(text.size())) std::abort();
  }
  ~MemoryFile() { ::close(file_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(file_); }

 private:
  int file_;
};

/// Calls `body`; its sentences are fine, and messages of libraries are not.
template <typename Body>
int expect_sentence(Body&& body) {
  try {
    body();
  } catch (const nlohmann::json::exception& error) {
    std::cerr << "a library's message reached the user: " << error.what() << "\n";
    std::abort();
  } catch (const std::bad_alloc&) {
    std::cerr << "memory was asked for without bound\n";
    std::abort();
  } catch (const std::exception& error) {
    const std::string_view text = error.what();
    if (text.size() < 12 || text.find(' ') == std::string_view::npos) {  // "stoul", "vector::_M_range_check"
      std::cerr << "not a sentence: " << text << "\n";
      std::abort();
    }
  }
  return 0;
}

}  // namespace gka::fuzz
