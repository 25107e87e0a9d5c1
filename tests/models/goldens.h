// The checkpoints of GKA_GOLDENS, else of ../shared/goldens beside the repository; tests that need them say that they
// were skipped where there are none.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

namespace gka::models::test {

inline std::filesystem::path repository() {
  return std::filesystem::path(__FILE__).parent_path().parent_path().parent_path();
}

inline std::filesystem::path goldens() {
  if (const char* folder = std::getenv("GKA_GOLDENS")) return folder;
  return repository().parent_path() / "shared" / "goldens";
}

}  // namespace gka::models::test

#define SKIP_WITHOUT_GOLDENS()                                              \
  if (!std::filesystem::exists(gka::models::test::goldens() / "README.md")) \
  GTEST_SKIP() << "no goldens at " << gka::models::test::goldens() << ": set GKA_GOLDENS"
