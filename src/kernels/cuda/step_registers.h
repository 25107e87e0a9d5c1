// The one-token step with H in registers, for the sizes and options that decoding mostly has.
#pragma once

#include "gka/kernels.h"

namespace gka::kernels::cuda {

/// Runs the step and returns true, or returns false and leaves it to the general one. On the current device.
bool step_in_registers(const Step& step, const Device& device);

}  // namespace gka::kernels::cuda
