// The training loop behind `gka train`.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "train/config.h"

namespace gka::train {

enum class Start : std::uint8_t { fresh, resume };

enum class Outcome : std::uint8_t { finished, stopped };

/// The loss or a gradient is not finite any more: the training file made sense, and these numbers led nowhere.
struct Diverged : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Trains into config.output until the steps are done or a signal asks to stop. Everything that goes wrong is thrown as
/// one sentence, after a note of it in the run's folder.
Outcome train(const Config& config, Start start);

}  // namespace gka::train
