// For tests only: dying at a chosen moment, exactly as under `kill -9`. Only builds with tests (GKA_BUILD_TESTS) have
// it.
#pragma once

#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

namespace gka::train {

/// With GKA_TEST_FAULT=place@step in the environment the process kills itself when it comes by.
inline void fault_point([[maybe_unused]] std::string_view place, [[maybe_unused]] std::int64_t step) {
#ifdef GKA_TEST_FAULTS
  const char* wanted = std::getenv("GKA_TEST_FAULT");
  if (wanted && std::string(place) + "@" + std::to_string(step) == wanted) ::kill(::getpid(), SIGKILL);
#endif
}

}  // namespace gka::train
