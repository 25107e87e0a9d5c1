// Picks the path of a call: the Hopper kernels where they carry it, else the plain path, which carries everything.
// GKA_GPU in the environment forces one; it is read at each call (it is one getenv), so a test can compare both in one
// process.
#include <cstdlib>
#include <string_view>

#include "kernels/cuda/plain.h"
#include "kernels/cuda/segments.cuh"

#ifdef GKA_HAS_HOPPER
#include "kernels/cuda/hopper/hopper.h"
#endif

namespace gka::kernels::cuda {
namespace {

#ifdef GKA_HAS_HOPPER
/// Whether the Hopper kernels run what they carry when nobody asks for them.
constexpr bool kHopperUnasked = true;

/// Iterations that leave room for the residual in their middle, without which float16 steps are not exact enough.
constexpr std::int64_t kFewest = 20;

/// With less the few steps they take are not enough: dk was up to 7e-2 off at 0.012.
constexpr double kSmallestRidge = 0.02;

enum class Asked : std::uint8_t { nothing, plain, hopper };

Asked asked() {
  const char* text = std::getenv("GKA_GPU");
  const std::string_view name = text != nullptr ? text : "";
  if (name.empty()) return Asked::nothing;
  if (name == "plain") return Asked::plain;
  if (name == "hopper") return Asked::hopper;
  throw std::invalid_argument("GKA_GPU=" + std::string(name) + " is not known; it takes one of hopper, plain");
}

/// The same for every problem.
std::string why_never(int device) {
  const Asked path = asked();
  if (path == Asked::plain) return "GKA_GPU=plain switches them off";
  if (path == Asked::nothing && !kHopperUnasked) return "they run on request only (GKA_GPU=hopper)";
  if (hopper::runs_on(device)) return "";
  if (path == Asked::hopper) throw std::invalid_argument("GKA_GPU=hopper: " + describe(device) + " is no Hopper card");
  return "they need a card of compute capability 9.0";
}
#endif

}  // namespace

#ifdef GKA_HAS_HOPPER

namespace {

/// Why they do not take a problem, wherever it runs.
std::string why_not_this(const Problem& problem) {
  // The gradient of the steps that were taken needs their schedule, which is not the plain path's.
  if (problem.options.gradient != Gradient::implicit) return "the Hopper kernels have the implicit gradient only";
  if (problem.options.refine && problem.options.iterations < kFewest) {
    return "the Hopper kernels refine from 20 iterations on";
  }
  if (problem.options.ridge < kSmallestRidge) return "the Hopper kernels take a ridge of 0.02 or more";
  const char* reason = hopper::unsupported(problem);
  return reason != nullptr ? reason : "";
}

/// Whether Saved holds tiles. Problem and device alone decide, so that either backward pass may follow either forward
/// pass.
bool saves_tiles(const Problem& problem, int device) {
  return hopper::runs_on(device) && why_not_this(problem).empty() && hopper::keeps_tiles(problem);
}

/// Saved with room for H and U as the plain path has them, in scratch.
Saved plain_saved(const Problem& problem, Saved saved, const Device& device) {
  const std::int64_t rows = segments_of(problem) * problem.heads * problem.key_dim;
  saved.h = allocate<float>(device, rows * problem.key_dim);
  saved.u = allocate<float>(device, rows * problem.value_dim);
  return saved;
}

void plain_forward(const Problem& problem, const Outputs& outputs, const Device& device) {
  if (outputs.saved.h == nullptr || !saves_tiles(problem, device.index)) {
    return plain::forward(problem, outputs, device);
  }
  Outputs own = outputs;
  own.saved = plain_saved(problem, outputs.saved, device);
  plain::forward(problem, own, device);
  hopper::save_tiles(problem, own.saved, outputs.saved, device);
}

void plain_backward(const Problem& problem, const Saved& saved, const Gradients& gradients, const Device& device) {
  if (!saves_tiles(problem, device.index)) return plain::backward(problem, saved, gradients, device);
  const Saved own = plain_saved(problem, saved, device);
  hopper::restore_states(problem, saved, own, device);
  plain::backward(problem, own, gradients, device);
}

}  // namespace

std::string why_not_hopper(const Problem& problem, int device) {
  std::string never = why_never(device);
  return !never.empty() ? never : why_not_this(problem);
}

bool hopper_takes_backward(const Problem& problem) {
  Gradients gradients;
  gradients.d_o.dtype = problem.q.dtype;
  return hopper::takes_backward(problem, gradients) || hopper::takes_backward_in_blocks(problem, gradients);
}

void forward(const Problem& problem, const Outputs& outputs, const Device& device) {
  const Report& r = outputs.report;
  const bool reports = r.norm || r.ridge || r.residual || r.true_residual || r.variance || r.x;
  const bool fast = !reports && outputs.o.dtype != DType::float64 && why_not_hopper(problem, device.index).empty();
  (fast ? hopper::forward : plain_forward)(problem, outputs, device);
}

void backward(const Problem& problem, const Saved& saved, const Gradients& gradients, const Device& device) {
  const bool fast = why_not_hopper(problem, device.index).empty();
  const auto run = fast && hopper::takes_backward(problem, gradients)             ? hopper::backward
                   : fast && hopper::takes_backward_in_blocks(problem, gradients) ? hopper::backward_in_blocks
                                                                                  : plain_backward;
  run(problem, saved, gradients, device);
}

#else

std::string why_not_hopper(const Problem&, int) { return "this library was built without them (GKA_HOPPER=ON)"; }
bool hopper_takes_backward(const Problem&) { return false; }

void forward(const Problem& problem, const Outputs& outputs, const Device& device) {
  plain::forward(problem, outputs, device);
}

void backward(const Problem& problem, const Saved& saved, const Gradients& gradients, const Device& device) {
  plain::backward(problem, saved, gradients, device);
}

#endif

}  // namespace gka::kernels::cuda
