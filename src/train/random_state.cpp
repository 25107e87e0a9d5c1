#include "train/random_state.h"

#include <ATen/Context.h>

namespace gka::train {

at::Generator seed_torch(at::Device device, std::uint64_t seed) {
  auto generator = at::globalContext().defaultGenerator(device);
  generator.set_current_seed(seed);
  return generator;
}

void keep_random(models::Tensors& state, at::Device device) {
  for (const auto each : {at::Device(at::kCPU), device}) {
    state["random." + each.str()] = at::globalContext().defaultGenerator(each).get_state();
  }
}

void restore_random(const models::Tensors& state, at::Device device) {
  for (const auto each : {at::Device(at::kCPU), device}) {
    const auto random = state.find("random." + each.str());
    if (random == state.end()) continue;
    auto generator = at::globalContext().defaultGenerator(each);
    generator.set_state(random->second.clone());
  }
}

}  // namespace gka::train
