// Threads for programs without torch: started for each call and joined at its end. A call is milliseconds of work, so
// a pool would buy little and own state.
#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "gka/kernels.h"

namespace gka::kernels {

Executor thread_executor(int threads) {
  if (threads <= 0) threads = std::max(1u, std::thread::hardware_concurrency());
  const auto run = [](int n, const std::function<void(int)>& body) {
    std::exception_ptr failure;
    std::mutex mutex;
    const auto guarded = [&](int i) {
      try {
        body(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
      }
    };
    std::vector<std::jthread> helpers;
    for (int i = 1; i < n; ++i) helpers.emplace_back(guarded, i);
    if (n > 0) guarded(0);
    helpers.clear();
    if (failure) std::rethrow_exception(failure);
  };
  return {.threads = threads, .run = run};
}

}  // namespace gka::kernels
