// What this build of gka holds, what this machine can run of it, and which kernel a call takes. No torch in this
// header.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gka/kernels.h"

namespace gka {

/// "0.1.0"
const char* version();

struct BackendInfo {
  std::string name;        // reference, cpu, cuda, hopper
  bool built = false;      // compiled into this library
  bool available = false;  // and able to run on this machine
  std::string detail;      // instruction set and threads, or why it cannot run
};

std::vector<BackendInfo> backends();

/// As much of a call as decides which kernel it takes. The defaults are those of `gated_kalmanet`.
struct CallInfo {
  std::string device = "cpu";  // the type of device, as torch spells it
  int device_index = 0;
  kernels::DType dtype = kernels::DType::float32;
  std::int64_t key_dim = 128;
  std::int64_t value_dim = 128;
  Solver solver = Solver::chebyshev;
  Gradient gradient = Gradient::implicit;
  RidgeMode ridge_mode = RidgeMode::adaptive;
  std::int64_t iterations = 30;
  bool decay_keys = true;
  double ridge = 0.02;
  kernels::Part part = kernels::Part::both;
  bool refine = true;
  bool report = false;  // of gated_kalmanet_report
};

struct KernelChoice {
  std::string kernel;  // the name of a backend; empty: nothing in this build runs the call
  std::string reason;  // why not a faster one; and whose the backward pass is, where that is another's
};

KernelChoice choose_kernel(const CallInfo& call);

}  // namespace gka
