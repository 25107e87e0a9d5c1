// Every mixer once more, as plainly as it can be said: one sequence, one token at a time, in float64.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "layers/config.h"
#include "layers/parameters.h"

namespace gka::layers::test {

/// y [T,C] of the mixer with this token for x [T,C], with the parameters (float64) of that mixer.
at::Tensor reference(std::string_view token, const MixerConfig& config, const Parameters& parameters,
                     const at::Tensor& x);

}  // namespace gka::layers::test
