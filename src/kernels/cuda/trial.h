// Kernels on trial: they agree with the reference on the host, thread by thread, and no card has run them as they are,
// or none has shown that they pay. Each is off until GKA_TRIAL names it (`GKA_TRIAL=crowd_step,…`, or `all`);
// docs/kernels.md says what each is for, and one that a card has run and timed loses its line here.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace gka::kernels::cuda {

enum class Trial : std::uint8_t {
  crowd_step,    // step_registers.cu: a GKA block's token for three heads and more to a multiprocessor
  lesser_solve,  // hopper/forward.cuh: the solve leaves a quarter of the card to another stream's kernels
  increments,    // hopper/solve_increments.cuh: the solve without residuals and rounded iterates
  sketch,        // sketch.cu: what a solve in the dimensions of a sketch has around it
};

inline constexpr std::pair<std::string_view, Trial> kTrials[] = {
    {"crowd_step", Trial::crowd_step},
    {"increments", Trial::increments},
    {"lesser_solve", Trial::lesser_solve},
    {"sketch", Trial::sketch},
};

/// Whether `asked`, a list of names with commas between them, has this one.
inline bool names_trial(std::string_view asked, Trial trial) {
  bool named = false;
  while (!asked.empty()) {
    const auto comma = asked.find(',');
    const auto name = asked.substr(0, comma);
    asked = comma == std::string_view::npos ? std::string_view() : asked.substr(comma + 1);
    bool known = name == "all";
    named |= known;
    for (const auto& [known_name, entry] : kTrials) {
      known |= name == known_name;
      named |= name == known_name && entry == trial;
    }
    if (!known) {
      std::string names;
      for (const auto& entry : kTrials) names += ", " + std::string(entry.first);
      throw std::invalid_argument("GKA_TRIAL: '" + std::string(name) + "' is not known; it takes all" + names);
    }
  }
  return named;
}

/// Read at each call, as GKA_GPU is, so that a test can compare a trial with what it would replace in one process.
inline bool on_trial(Trial trial) {
  const char* asked = std::getenv("GKA_TRIAL");
  return asked != nullptr && names_trial(asked, trial);
}

}  // namespace gka::kernels::cuda
