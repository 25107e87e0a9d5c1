// Which path takes a call on a GPU: every rule in one place. Plain C++, so that a machine without a GPU can test it;
// dispatch.cu asks the card and runs what is chosen.
//
// The Hopper kernels carry part of the operator, and less exactly than float32: `kCarried` is what they compute at all,
// `kExact` where that is within the bounds of docs/benchmarks.md. All else is the plain path's.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "gka/kernels.h"
#include "kernels/cuda/hopper/schedule.h"
#include "kernels/cuda/hopper/sizes.h"

namespace gka::kernels::cuda {

// ---- What the Hopper kernels take ---------------------------------------------------------------------------------

namespace hopper {

/// Iterations with a constant ridge.
inline constexpr std::int64_t kMostBesideConstant = 30;

struct Rule {
  bool (*holds)(const Problem&);
  const char* otherwise;
};

/// Whether the passes take a problem's keys of more than 128 channels.
inline bool takes_wide(const Problem& p) {
  return p.key_dim <= kWideSize && p.options.part == Part::both && p.options.ridge_mode == RidgeMode::adaptive;
}

inline constexpr Rule kCarried[] = {
    {[](const Problem& p) { return p.q.dtype == DType::bfloat16 || p.q.dtype == DType::float16; },
     "the Hopper kernels take bfloat16 and float16"},
    {[](const Problem& p) {
       return p.options.part == Part::both ||
              (p.options.part == Part::solve && p.options.ridge_mode == RidgeMode::adaptive);
     },
     "the Hopper kernels run the whole operator, or ridge_solve with the adaptive ridge"},
    {[](const Problem& p) { return p.options.solver == Solver::chebyshev; },
     "the Hopper kernels solve by Chebyshev only"},
    {[](const Problem& p) {
       return p.options.ridge_mode == RidgeMode::adaptive || p.options.ridge_diagonal == nullptr;
     },
     "the Hopper kernels take no diagonal of ridges"},
    {[](const Problem& p) { return p.options.decay_keys; }, "the Hopper kernels decay H and U alike"},
    {[](const Problem& p) { return p.key_dim <= kLargeSize || takes_wide(p); },
     "the Hopper kernels take more than 128 key channels in the whole operator with the adaptive ridge only"},
    {[](const Problem& p) { return p.options.iterations <= kMostSteps; },
     "the Hopper kernels take up to 64 iterations"},
    {[](const Problem& p) { return p.options.chunk == 0 || p.options.chunk == kChunk; },
     "the Hopper kernels have chunks of 64 tokens"},
};
inline constexpr Rule kExact[] = {
    // The gradient of the steps that were taken needs their schedule, which is not the plain path's.
    {[](const Problem& p) { return p.options.gradient == Gradient::implicit; },
     "the Hopper kernels have the implicit gradient only"},
    {[](const Problem& p) { return p.options.ridge >= kSmallestRidge; },
     "the Hopper kernels take a ridge of 0.005 or more"},
    // λ/‖H‖_F is known when all is under way, and with strong decay ‖H‖_F is about that of one key, which is 1. What
    // float16 loses of H grows with the square of the steps.
    {[](const Problem& p) { return p.options.ridge_mode == RidgeMode::adaptive || p.options.ridge >= kUsualRidge; },
     "the Hopper kernels take a constant ridge of 0.02 or more"},
    {[](const Problem& p) {
       return p.options.ridge_mode == RidgeMode::adaptive || p.options.iterations <= kMostBesideConstant;
     },
     "the Hopper kernels take up to 30 iterations with a constant ridge"},
};

inline const char* first_broken(std::span<const Rule> rules, const Problem& p) {
  for (const Rule& rule : rules) {
    if (!rule.holds(p)) return rule.otherwise;
  }
  return "";
}

/// Why they cannot run a problem's forward pass; empty if they can.
inline const char* why_not_carried(const Problem& p) { return first_broken(kCarried, p); }
/// The same of its backward pass.
inline const char* why_not_carried(const Problem& p, const Gradients& g) {
  if (const char* why = why_not_carried(p); *why != 0) return why;
  if (p.key_dim % 4 != 0 || (p.options.part == Part::both && p.value_dim % 4 != 0)) {
    return "the Hopper kernels' backward pass takes channels in multiples of 4";
  }
  if (g.d_o.dtype != p.q.dtype) return "the Hopper kernels take a gradient of o in the type of q";
  for (const View* view : {&g.d_q, &g.d_k, &g.d_v}) {
    if (view->dtype == DType::float64) return "the Hopper kernels write no float64";
  }
  return "";
}

/// Why a problem is not theirs, wherever it runs: what Saved holds depends on this and the card alone.
inline const char* why_not(const Problem& p) {
  const char* why = first_broken(kExact, p);
  return *why != 0 ? why : why_not_carried(p);
}
inline const char* why_not(const Problem& p, const Outputs& out) {
  if (const char* why = why_not(p); *why != 0) return why;
  if (out.report.examines()) return "the Hopper kernels report certainty only";
  if (out.o.dtype == DType::float64) return "the Hopper kernels write no float64";
  return "";
}
inline const char* why_not(const Problem& p, const Gradients& g) {
  const char* why = why_not(p);
  return *why != 0 ? why : why_not_carried(p, g);
}

}  // namespace hopper

// ---- Path and card ------------------------------------------------------------------------------------------------

/// What GKA_GPU asks for.
enum class Asked : std::uint8_t { nothing, plain, hopper };

inline Asked parse_asked(const char* variable) {
  const std::string_view name = variable != nullptr ? variable : "";
  if (name.empty()) return Asked::nothing;
  if (name == "plain") return Asked::plain;
  if (name == "hopper") return Asked::hopper;
  throw std::invalid_argument("GKA_GPU=" + std::string(name) + " is not known; it takes one of hopper, plain");
}

#ifdef GKA_HAS_HOPPER
constexpr bool kHopperBuilt = true;
#else
constexpr bool kHopperBuilt = false;
#endif

/// What a build on a card offers: the card's compute capability, ten times (0: there is no card), and whether the
/// Hopper kernels were built.
struct Offer {
  int capability = 0;
  bool hopper_built = false;

  bool has_card() const { return capability >= 80; }
  bool runs_hopper() const { return hopper_built && capability == 90; }
};

/// `why_not_hopper`: the call's own reason, empty if there is none.
inline Choice choose_path(const char* why_not_hopper, const Offer& offer, Asked asked) {
  if (offer.capability == 0) return {Path::none, "this machine has no CUDA device"};
  if (!offer.has_card()) return {Path::none, "the card is older than compute capability 8.0"};
  if (!offer.hopper_built) return {Path::plain, "this library was built without them (GKA_HOPPER=ON)"};
  if (asked == Asked::plain) return {Path::plain, "GKA_GPU=plain switches them off"};
  if (!offer.runs_hopper()) {
    if (asked == Asked::hopper) throw std::invalid_argument("GKA_GPU=hopper: the card is no Hopper card");
    return {Path::plain, "they need a card of compute capability 9.0"};
  }
  return *why_not_hopper != 0 ? Choice{Path::plain, why_not_hopper} : Choice{Path::hopper, ""};
}

}  // namespace gka::kernels::cuda
