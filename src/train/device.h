// Where a run computes: which device and type its settings mean here, how much memory is in use, and the switches that
// make a device compute the same bits every time.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <set>
#include <string>

#include "train/config.h"

namespace gka::train {

struct Compute {
  at::Device device;
  at::ScalarType activations;
  at::ScalarType parameters;  // and the optimiser's averages
};

/// Throws one sentence where the device asked for is not here.
Compute choose_compute(const Config& config);

/// Bytes in use: of the process on the CPU, the most so far by tensors on a GPU.
double memory_in_use(at::Device device);
/// Bytes in tensors on a GPU now; of the process on the CPU.
double memory_now(at::Device device);
/// Hands memory that no tensor uses back to the GPU and counts the most in use from here on; nothing on the CPU.
void reset_memory(at::Device device);
/// Waits until the device has done all it was asked to.
void wait_for(at::Device device);

/// While it lives, operations that have a deterministic form take it, and torch says once, not at every step, which
/// have none.
class Determinism {
 public:
  explicit Determinism(at::Device device);
  ~Determinism();
  Determinism(const Determinism&) = delete;
  Determinism& operator=(const Determinism&) = delete;

 private:
  struct Once final : c10::WarningHandler {
    void process(const c10::Warning& warning) override;
    std::set<std::string> said;
  };

  bool on_;
  Once once_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

}  // namespace gka::train
