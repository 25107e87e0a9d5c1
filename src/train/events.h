// A run's metrics as TensorBoard reads them: `tensorboard --logdir runs` shows every run there. Nothing of TensorBoard
// is needed to write them.
#pragma once

#include <cstdint>
#include <string>

#include "base/fields.h"

namespace gka::train {

/// The first record of a file of events.
std::string events_header(double wall_time);

/// A record with every number of a line of metrics.jsonl under its name, at the line's step; `wall_time` in seconds
/// since 1970.
std::string event_of(const Json& line, double wall_time);

}  // namespace gka::train
