// torch's random numbers: seeded when a run begins, kept in its checkpoints, and taken up again where it goes on.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <string>

#include "models/safetensors.h"

namespace gka::train {

/// torch's own generator of the device, which begins anew from this seed.
at::Generator seed_torch(at::Device device, std::uint64_t seed);

/// Adds the states of the CPU's generator and of the device's to what is saved.
void keep_random(models::Tensors& state, at::Device device);
/// Takes up those that were saved.
void restore_random(const models::Tensors& state, at::Device device);

}  // namespace gka::train
