// Ctrl-C, SIGTERM and a closed terminal: the first asks a loop to end in good order, the second ends the process at
// once.
#pragma once

namespace gka::train {

/// Listens while it lives; before and after, a signal does what it did.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The signal that came, or 0.
  int received() const;

 private:
  using Handler = void (*)(int);
  Handler on_broken_pipe_;  // before
};

}  // namespace gka::train
