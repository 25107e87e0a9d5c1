// The CPU kernels' work on torch's own threads.
//
// Compile with -fopenmp and do not link an OpenMP library: at::parallel_for is a header that emits OpenMP calls, and
// left undefined they resolve to the runtime that libtorch loaded, whose thread pool and thread count are the ones
// torch.set_num_threads governs. A second runtime would have its own, and so clang, whose calls only its own runtime
// answers, compiles without: then each call starts as many threads as torch would take.
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#include "ops/backends.h"

namespace gka::ops {
namespace {

void on_threads(int workers, const std::function<void()>& worker) {
#ifdef _OPENMP
  at::parallel_for(0, workers, 1, [&](std::int64_t, std::int64_t) { worker(); });
#else
  kernels::thread_executor(workers).run(workers, [&](int) { worker(); });
#endif
}

// Pieces of work differ in length (the tail of a sequence, an empty one), so threads take the next piece when free.
void run(int n, const std::function<void(int)>& body) {
  std::atomic<int> next = 0;
  const int workers = std::min(n, at::get_num_threads());
  on_threads(workers, [&] {
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
