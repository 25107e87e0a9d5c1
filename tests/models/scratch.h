// A folder of a test's own, and a check that a call fails with a sentence that contains some words.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>  // NOLINT(modernize-deprecated-headers): mkdtemp is POSIX's

#include <algorithm>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

namespace gka::models::test {

class Scratch {
 public:
  Scratch() {
    auto name = (std::filesystem::temp_directory_path() / "gka-test-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::filesystem::remove_all(path_); }

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) found.push_back(entry.path().filename());
    std::ranges::sort(found);
    return found;
  }

 private:
  std::filesystem::path path_;
};

/// What `call` throws, or nothing.
template <typename Call>
std::string complaint_of(const Call& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

}  // namespace gka::models::test

/// The expression throws, and what it says contains `words`.
#define EXPECT_ERROR(expression, words) \
  EXPECT_PRED_FORMAT2(testing::IsSubstring, words, gka::models::test::complaint_of([&] { (void)(expression); }))
