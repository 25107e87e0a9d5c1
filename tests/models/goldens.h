// The checkpoints of tests/goldens.
#pragma once

#include <filesystem>

namespace gka::models::test {

inline std::filesystem::path repository() {
  return std::filesystem::path(__FILE__).parent_path().parent_path().parent_path();
}

inline std::filesystem::path goldens() { return repository() / "tests" / "goldens"; }

}  // namespace gka::models::test
