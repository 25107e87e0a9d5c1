#include "kernels/cpu/plan.h"

namespace gka::kernels::cpu {

Plan make_plan(const Problem& p) {
  Plan plan;
  for (std::int64_t n = 0; n < p.sequences; ++n) {
    plan.begin.push_back(static_cast<std::int64_t>(plan.segments.size()));
    const Sequence whole = sequence(p, n);
    for (std::int64_t t = 0; t < whole.length; t += kSegment) {
      const std::int64_t length = std::min(kSegment, whole.length - t);
      plan.segments.push_back({.index = static_cast<std::int64_t>(plan.segments.size()),
                               .sequence = n,
                               .tokens = {.batch = whole.batch, .begin = whole.begin + t, .length = length},
                               .first = t == 0,
                               .last = t + length == whole.length});
    }
  }
  plan.begin.push_back(static_cast<std::int64_t>(plan.segments.size()));
  return plan;
}

}  // namespace gka::kernels::cpu
