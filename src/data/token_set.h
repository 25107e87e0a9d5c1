// Token files as training sees them: windows of T + 1 tokens, cut side by side, shuffled anew every epoch. Nothing is
// listed in memory; which window is number i follows from the seed and i alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "data/token_file.h"
#include "data/turns.h"

namespace gka::data {

struct TokenSetFile {
  std::string path;
  double weight = 0;  // share of the windows drawn from this file; 0 in all files: each window once an epoch
};

/// Which part of every file. The cut is moved to the start of a document where one is near, so that no document is on
/// both sides.
enum class Part : std::uint8_t { train, eval };

struct TokenSetOptions {
  std::vector<TokenSetFile> files{};
  std::uint64_t seed = 0;
  double eval_fraction = 0;  // of every file, from its end
  Part part = Part::train;
  bool shuffle = true;
  bool verify = true;  // each file against its checksum, the first time it is seen
};

class TokenSet {
 public:
  explicit TokenSet(const TokenSetOptions& options);

  /// Windows in an epoch; with weights: until as many were drawn as there are.
  std::int64_t windows(std::int64_t tokens) const;

  /// Throws where a file, or all of them where they are read as one, has too few tokens for a window of so many.
  void check_length(std::int64_t tokens) const;

  /// Window number `index`, counted through all epochs: T inputs, and the T tokens that follow each of them. Returns
  /// the places in the window, after its start, at which a document starts (T itself counts).
  std::vector<std::int64_t> fill(std::int64_t index, std::span<std::int64_t> inputs,
                                 std::span<std::int64_t> targets) const;

  std::int64_t tokens() const;
  std::int64_t documents() const;
  std::int64_t vocab_size() const;
  std::size_t files() const { return files_.size(); }

 private:
  struct File {
    TokenFile file;
    std::int64_t first, count;  // the part in use
  };
  struct Place {
    std::size_t file;
    std::int64_t window;  // counted from the start of the part
    std::uint64_t epoch;  // of this file
  };

  std::int64_t windows_of(const File& file, std::int64_t tokens) const;
  void check_all(std::int64_t tokens) const;
  void check_file(const File& file, std::int64_t tokens) const;
  [[noreturn]] void fail_too_few(const std::string& what, std::int64_t count, std::int64_t tokens) const;
  Place find(std::int64_t index, std::int64_t tokens) const;
  Place find_in_all(std::int64_t index, std::int64_t tokens) const;
  Place find_by_weight(std::int64_t index, std::int64_t tokens) const;

  std::vector<File> files_;
  Turns turns_;  // of files, by weight; empty without weights
  Part part_;
  std::uint64_t seed_;
  bool shuffle_;
};

}  // namespace gka::data
