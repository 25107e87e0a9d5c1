// What the tests of the CPU kernels share: forcing an instruction set, threads, how many random cases to run.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels/expect.h"

namespace gka::kernels::test {

inline constexpr const char* kInstructionSets[] = {"portable", "avx2", "avx512"};

/// A variable of the environment for the life of the object.
class Forced {
 public:
  Forced(const char* variable, const char* value) : variable_(variable) { setenv(variable, value, 1); }
  Forced(const Forced&) = delete;
  ~Forced() { unsetenv(variable_); }

 private:
  const char* variable_;
};

/// GKA_CPU for the life of the object.
class ForcedInstructionSet {
 public:
  explicit ForcedInstructionSet(const char* name) : forced_("GKA_CPU", name) {}

  bool available() const {
    try {
      cpu::instruction_set();
      return true;
    } catch (const std::invalid_argument&) {
      return false;
    }
  }

 private:
  Forced forced_;
};

inline const Executor& executor() {
  static const Executor two_threads = thread_executor(2);
  return two_threads;
}

/// Random cases per test: GKA_TEST_CASES, or enough for CI. At least two: some tests take half as many, and none may
/// end without one.
inline std::uint64_t case_count() {
  const char* text = std::getenv("GKA_TEST_CASES");
  return text != nullptr ? std::max(2ULL, std::strtoull(text, nullptr, 10)) : 150;
}

}  // namespace gka::kernels::test
