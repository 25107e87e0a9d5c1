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

bool fills_threads(const Plan& plan, std::int64_t per_sequence, int threads) {
  std::int64_t longest = 0;
  for (std::size_t n = 0; n + 1 < plan.begin.size(); ++n)
    longest = std::max(longest, plan.begin[n + 1] - plan.begin[n]);
  const auto total = static_cast<std::int64_t>(plan.segments.size()) * per_sequence;
  return threads <= 1 || 2 * longest * threads <= total;
}

bool divides(const Plan& plan, std::int64_t per_sequence, int threads) {
  const auto sequences = static_cast<std::int64_t>(plan.begin.size()) - 1;
  for (std::int64_t n = 0; n < sequences; ++n) {
    if (plan.begin[n + 1] - plan.begin[n] != plan.begin[1] - plan.begin[0]) return false;
  }
  return sequences * per_sequence % std::max(threads, 1) == 0;
}

}  // namespace gka::kernels::cpu
