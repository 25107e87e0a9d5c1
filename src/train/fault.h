// For tests only: dying at a chosen moment, exactly as under `kill -9`.
#pragma once

#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

namespace gka::train {

/// With GKA_TEST_FAULT=place@step in the environment the process kills itself when it comes by.
inline void fault_point(std::string_view place, std::int64_t step) {
  const char* wanted = std::getenv("GKA_TEST_FAULT");
  if (wanted && std::string(place) + "@" + std::to_string(step) == wanted) ::kill(::getpid(), SIGKILL);
}

}  // namespace gka::train
