// How a problem is cut into independent pieces of work, the same for every thread count: sequences into segments of
// kSegment tokens, whose starting states are carried from one to the next in a cheap first pass; all the costly work
// is then done per (segment, head), in any order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels/problem.h"

namespace gka::kernels::cpu {

struct Segment {
  std::int64_t index = 0;  // its place in the arrays of saved states
  std::int64_t sequence = 0;
  Sequence tokens;
  bool first = false;
  bool last = false;  // of its sequence
};

/// The segments of a problem, sequence by sequence; `begin[n]` is the first of sequence n.
struct Plan {
  std::vector<Segment> segments;
  std::vector<std::int64_t> begin;
};

Plan make_plan(const Problem& problem);

/// Whether whole sequences, `per_sequence` tasks for each, keep `threads` threads evenly busy. If so a worker walks a
/// sequence from end to end; if not the segments are spread. The arithmetic is the same either way, to the bit.
bool fills_threads(const Plan& plan, std::int64_t per_sequence, int threads);
/// Whether each thread gets as many of those tasks as any other, and all are equally long.
bool divides(const Plan& plan, std::int64_t per_sequence, int threads);

/// Runs task(i, workspace) for i in [0, n), each once, taken from a counter by as many workers as the executor has
/// threads; a worker makes its workspace once. Tasks write disjoint results, so who runs what does not matter.
template <typename MakeWorkspace, typename Task>
void parallel_tasks(const Executor& executor, std::int64_t n, MakeWorkspace&& make_workspace, Task&& task) {
  if (n <= 0) return;
  std::atomic<std::int64_t> next{0};
  const auto worker = [&](int) {
    auto workspace = make_workspace();
    for (std::int64_t i = next++; i < n; i = next++) task(i, *workspace);
  };
  const int workers = static_cast<int>(std::min<std::int64_t>(std::max(executor.threads, 1), n));
  if (workers == 1) {
    worker(0);
  } else {
    executor.run(workers, worker);
  }
}

/// The executor, or one thread where there are too few elements to be worth sharing.
inline Executor for_elements(const Executor& executor, std::int64_t elements) {
  constexpr std::int64_t kWorthSharing = 1 << 15;  // some 10 µs of work, about what waking a thread takes
  return elements < kWorthSharing ? Executor{.threads = 1, .run = {}} : executor;
}

}  // namespace gka::kernels::cpu
