// Ctrl-C, SIGTERM and a closed terminal. Before a loop begins one ends the process at once; then the first asks the
// loop to end in good order, and the second ends the process.
#pragma once

#include <filesystem>
#include <vector>

namespace gka::train {

/// Listens while it lives; before and after, a signal does what it did.
class StopSignals {
 public:
  /// `made`: what a signal removes that comes before `begin`, in this order: files, and folders that then stand empty.
  explicit StopSignals(const std::vector<std::filesystem::path>& made);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// From here on there is something to end in good order.
  void begin();
  /// The signal that came since, or 0.
  int received() const;

 private:
  using Handler = void (*)(int);
  Handler on_broken_pipe_;  // before
};

}  // namespace gka::train
