// Ctrl-C, SIGTERM and a closed terminal: the first asks a loop to end in good order, the second ends the process at
// once.
#pragma once

namespace gka::train {

/// Listens while it lives; before and after, a signal does what it did.
class StopSignals {
 public:
  /// `notice` is what the first signal writes to standard error; it lives as long as the process.
  explicit StopSignals(const char* notice = "\nfinishing this step, then saving; once more ends at once\n");
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The signal that came, or 0.
  int received() const;
};

}  // namespace gka::train
