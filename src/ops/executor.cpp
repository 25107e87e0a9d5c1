// The CPU kernels' work on torch's own threads.
//
// Compile with -fopenmp and do not link an OpenMP library: at::parallel_for is a header that emits OpenMP calls, and
// left undefined they resolve to the runtime that libtorch loaded, whose thread pool and thread count are the ones
// torch.set_num_threads governs. A second runtime would have its own.
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#include "ops/backends.h"

namespace gka::ops {
namespace {

// Pieces of work differ in length (the tail of a sequence, an empty one), so threads take the next piece when free.
void run(int n, const std::function<void(int)>& body) {
  std::atomic<int> next = 0;
  const int workers = std::min(n, at::get_num_threads());
  at::parallel_for(0, workers, 1, [&](std::int64_t, std::int64_t) {
    for (int i = next++; i < n; i = next++) body(i);
  });
}

}  // namespace

const kernels::Executor& torch_executor() {
  thread_local kernels::Executor executor;
  executor = {.threads = at::get_num_threads(), .run = run};
  return executor;
}

}  // namespace gka::ops
