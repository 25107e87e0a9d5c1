// The mixers under test: one of every kind, and of the kinds with choices one per choice.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "layers/config.h"
#include "layers/mixers.h"
#include "layers/parameters.h"

namespace gka::layers::test {

struct Case {
  std::string name;
  std::string token;
  MixerConfig config;
};

/// Small enough for finite differences: 12 wide, 4 heads of 4 channels, 2 key/value heads.
const std::vector<Case>& cases();

/// A mixer with its parameters; all of them random, those that start at zero or one too.
struct Built {
  std::unique_ptr<Parameters> parameters;
  std::unique_ptr<Mixer> mixer;
};
Built build(const Case& c, at::ScalarType dtype = at::kDouble, std::uint64_t seed = 1);

/// Normal numbers [shape] from a seed.
at::Tensor random(at::IntArrayRef shape, std::uint64_t seed, at::ScalarType dtype = at::kDouble);

/// ‖a − b‖ / ‖b‖, or ‖a − b‖ where b is zero.
double relative_error(const at::Tensor& a, const at::Tensor& b);

/// Where the tests run: GKA_TEST_DEVICE, or the CPU.
at::Device device();

}  // namespace gka::layers::test
