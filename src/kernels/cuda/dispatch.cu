// Runs a call on the path that choose.h names for it. GKA_GPU in the environment is read at each call (it is one
// getenv), so a test can compare both paths in one process.
#include <cstdlib>

#include "kernels/cuda/choose.h"
#include "kernels/cuda/group_sums.cuh"
#include "kernels/cuda/plain.h"
#include "kernels/cuda/saved.h"
#include "kernels/cuda/segments.cuh"

#ifdef GKA_HAS_HOPPER
#include "kernels/cuda/hopper/hopper.h"
#endif

namespace gka::kernels::cuda {

#ifndef GKA_HAS_HOPPER
namespace hopper {  // never chosen
constexpr auto forward = plain::forward;
constexpr auto backward = plain::backward;
}  // namespace hopper
#endif

namespace {

/// Ten times the device's compute capability; 0 where there is no such device.
int capability_of(int device) {
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    cudaGetLastError();  // or the next launch would report it
    return 0;
  }
  return 10 * major + minor;
}

Offer offer_of(int device) { return {.capability = capability_of(device), .hopper_built = kHopperBuilt}; }

template <typename Results>
Choice choose_for(const Problem& problem, const Results& results, int device) {
  const Asked asked = kHopperBuilt ? parse_asked(std::getenv("GKA_GPU")) : Asked::nothing;
  return choose_path(hopper::why_not(problem, results), offer_of(device), asked);
}

[[noreturn]] void fail(const Choice& choice) { throw std::runtime_error(std::string("gka: ") + choice.why); }

#ifdef GKA_HAS_HOPPER

/// Whether Saved holds tiles. Problem and card alone decide, so that either backward pass may follow either forward
/// pass.
bool saves_tiles(const Problem& problem, int device) {
  return offer_of(device).runs_hopper() && *hopper::why_not(problem) == 0 && hopper::keeps_tiles(problem);
}

/// Saved with room for H and U as the plain path has them, in scratch.
Saved in_scratch(const Problem& problem, Saved saved, const Device& device) {
  const SavedBytes bytes = plain_saved(problem);
  saved.h = allocate<char>(device, bytes.h);
  saved.u = allocate<char>(device, bytes.u);
  return saved;
}

void plain_forward(const Problem& problem, const Outputs& outputs, const Device& device) {
  if (outputs.saved.h == nullptr || !saves_tiles(problem, device.index)) {
    return plain::forward(problem, outputs, device);
  }
  Outputs own = outputs;
  own.saved = in_scratch(problem, outputs.saved, device);
  plain::forward(problem, own, device);
  hopper::save_tiles(problem, own.saved, outputs.saved, device);
}

void plain_backward(const Problem& problem, const Saved& saved, const Gradients& gradients, const Device& device) {
  if (!saves_tiles(problem, device.index)) return plain::backward(problem, saved, gradients, device);
  const Saved own = in_scratch(problem, saved, device);
  hopper::restore_states(problem, saved, own, device);
  plain::backward(problem, own, gradients, device);
}

#else

constexpr auto plain_forward = plain::forward;
constexpr auto plain_backward = plain::backward;

#endif

/// Hopper's passes write dk and dv of every head. Where heads share keys or values that goes to scratch of the same
/// type (as dk and dv of keys that were repeated would be), and its sums to where they belong.
void hopper_backward(const Problem& problem, const Saved& saved, const Gradients& gradients, const Device& device) {
  Gradients own = gradients;
  const auto room = [&](const View& out, std::int64_t group, std::int64_t channels) {
    if (!out || group == 1) return out;
    View by_head = contiguous_view<float>(problem, nullptr, channels);
    by_head.dtype = out.dtype;
    by_head.data = allocate<char>(device, problem.batch * by_head.batch_stride * bytes_of(out.dtype));
    return by_head;
  };
  own.d_k = room(gradients.d_k, problem.key_group, problem.key_dim);
  own.d_v = room(gradients.d_v, problem.value_group, problem.value_dim);
  hopper::backward(problem, saved, own, device);
  const CurrentDevice current(device.index);
  const auto sum = [&](const View& by_head, const View& out, std::int64_t group, std::int64_t channels) {
    if (out && group > 1) start_group_sums<float>(problem, by_head, channels, group, out, device);
  };
  sum(own.d_k, gradients.d_k, problem.key_group, problem.key_dim);
  sum(own.d_v, gradients.d_v, problem.value_group, problem.value_dim);
}

}  // namespace

Choice choose(const Problem& problem, const Outputs& outputs, int device) {
  return choose_for(problem, outputs, device);
}
Choice choose(const Problem& problem, const Gradients& gradients, int device) {
  return choose_for(problem, gradients, device);
}

void forward(const Problem& problem, const Outputs& outputs, const Device& device) {
  const Choice choice = choose(problem, outputs, device.index);
  switch (choice.path) {
    case Path::none: fail(choice);
    case Path::plain: return plain_forward(problem, outputs, device);
    case Path::hopper: return hopper::forward(problem, outputs, device);
  }
}

void backward(const Problem& problem, const Saved& saved, const Gradients& gradients, const Device& device) {
  const Choice choice = choose(problem, gradients, device.index);
  switch (choice.path) {
    case Path::none: fail(choice);
    case Path::plain: return plain_backward(problem, saved, gradients, device);
    case Path::hopper: return hopper_backward(problem, saved, gradients, device);
  }
}

}  // namespace gka::kernels::cuda
