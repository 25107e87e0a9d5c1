// A second stand-in for src/kernels/cuda/device.cuh, with as many threads per block as on a GPU, for kernels whose
// threads work in lockstep: shuffles and barriers do here what they do there.
//
// The threads of a block are contexts that take turns. At a barrier, or at a shuffle, a thread gives way to the next;
// the round comes back to it when all have arrived there. So a kernel must take the same barriers and shuffles in all
// threads of a block, whatever the warp.
#pragma once

#include <ucontext.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/host_numbers.h"

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __noinline__
#define __forceinline__ inline

namespace gka::kernels::cuda {

inline constexpr int kThreads = 512;
inline constexpr int kLanes = 32;
inline constexpr int kWarps = kThreads / kLanes;

struct Machine {
  static constexpr int kSharedBytes = 227 * 1024;
  static constexpr std::size_t kStackBytes = 64 * 1024;

  alignas(16) char shared[kSharedBytes];
  std::int64_t block = 0;
  int thread = 0;
  ucontext_t round;
  std::vector<ucontext_t> contexts;
  std::vector<bool> done;
  std::vector<double> shuffled[2];  // by turns, so that a value outlives the shuffle after it
  std::vector<int> shuffles;
  void (*run)(void*) = nullptr;
  void* body = nullptr;
};
inline Machine machine;

inline int thread() { return machine.thread; }
inline std::int64_t block() { return machine.block; }
inline int lane() { return thread() % kLanes; }
inline int warp() { return thread() / kLanes; }
inline char* shared_memory() { return machine.shared; }
inline void raise(int* flag) { *flag = 1; }

inline void sync() { swapcontext(&machine.contexts[static_cast<std::size_t>(machine.thread)], &machine.round); }

template <typename T>
T from_lane(T value, int bits) {
  const auto own = static_cast<std::size_t>(thread());
  auto& values = machine.shuffled[machine.shuffles[own]++ % 2];
  values[own] = static_cast<double>(value);
  sync();
  return static_cast<T>(values[own ^ static_cast<std::size_t>(bits)]);
}
template <typename T>
T sum_lanes(T value) {
  for (int apart = kLanes / 2; apart > 0; apart /= 2) value += from_lane(value, apart);
  return value;
}

struct CurrentDevice {
  explicit CurrentDevice(int) {}
};

inline void copy_async(void* to, const void* from) { std::memcpy(to, from, 16); }
inline void wait_for_copies() {}
template <int kBytes>
void copy_async_or_zero(void* to, const void* from, bool there) {
  if (there) {
    std::memcpy(to, from, kBytes);
  } else {
    std::memset(to, 0, kBytes);
  }
}
inline void end_group() {}
template <int kGroups>
void wait_for_groups_but() {}

inline void enter() {
  machine.run(machine.body);
  machine.done[static_cast<std::size_t>(machine.thread)] = true;
  sync();
}

/// Runs one block: all threads up to their next wait, again and again.
inline void run_block(int threads) {
  const auto count = static_cast<std::size_t>(threads);
  machine.contexts.resize(count);
  machine.done.assign(count, false);
  machine.shuffles.assign(count, 0);
  for (auto& values : machine.shuffled) values.assign(count, 0);
  const auto stacks = std::make_unique<char[]>(count * Machine::kStackBytes);
  for (std::size_t i = 0; i < count; ++i) {
    ucontext_t& context = machine.contexts[i];
    getcontext(&context);
    context.uc_stack.ss_sp = stacks.get() + i * Machine::kStackBytes;
    context.uc_stack.ss_size = Machine::kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, enter, 0);
  }
  for (bool more = true; more;) {
    more = false;
    for (machine.thread = 0; machine.thread < threads; ++machine.thread) {
      const auto i = static_cast<std::size_t>(machine.thread);
      if (machine.done[i]) continue;
      swapcontext(&machine.round, &machine.contexts[i]);
      more = true;
    }
  }
}

template <int kBlock, typename... Parameters, typename... Arguments>
void launch_blocks_of(void (*kernel)(Parameters...), std::int64_t grid, int, void*, const Arguments&... arguments) {
  auto body = [&] { kernel(arguments...); };
  machine.body = &body;
  machine.run = [](void* p) { (*static_cast<decltype(body)*>(p))(); };
  for (machine.block = 0; machine.block < grid; ++machine.block) {
    std::memset(machine.shared, 0xff, Machine::kSharedBytes);  // NaN, as far as anybody reads before writing
    run_block(kBlock);
  }
}
template <int kBlock, typename... Parameters, typename... Arguments>
void launch_early(void (*kernel)(Parameters...), std::int64_t grid, int bytes, int, void* stream,
                  const Arguments&... arguments) {
  launch_blocks_of<kBlock>(kernel, grid, bytes, stream, arguments...);
}
inline void wait_for_earlier() {}

}  // namespace gka::kernels::cuda
