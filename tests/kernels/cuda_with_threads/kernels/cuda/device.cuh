// A second stand-in for src/kernels/cuda/device.cuh, with as many threads per block as on a GPU, for kernels whose
// threads work in lockstep: shuffles and barriers do here what they do there.
//
// The threads of a block are contexts that take turns. At a shuffle a thread gives way to the others of its warp, which
// must all take it. At a barrier its warp waits for the block, or for those who share the barrier: until then one warp
// runs after the other, in one block from the first, in the next from the last, so that a missing barrier is seen.
// Asynchronous copies leave NaN, and what was to be copied when the thread waits for it. Where all wait for each other
// the program ends.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/contexts.h"
#include "kernels/host_numbers.h"

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __noinline__
#define __forceinline__ inline
#define __shared__ static

namespace gka::kernels::cuda {

inline constexpr int kThreads = 512;
inline constexpr int kLanes = 32;
inline constexpr int kWarps = kThreads / kLanes;

/// An asynchronous copy that nobody has waited for yet.
struct Copy {
  void* to;
  const void* from;  // nullptr: zeros
  std::size_t bytes;
  int group;
};

/// What a thread waits for: nothing; the whole block; or something that it looks for again whenever others have run.
/// From kSome on: the threads that share a barrier, by its number.
enum Waits : int { kRuns, kForBlock, kLooks, kSome };

struct Machine {
  static constexpr int kSharedBytes = 227 * 1024;
  static constexpr std::size_t kStackBytes = 64 * 1024;

  alignas(1024) char shared[kSharedBytes];
  int multiprocessors = 3;
  std::int64_t block = 0, blocks = 0;
  int thread = 0;
  host::Context round;
  std::vector<host::Context> contexts;
  std::unique_ptr<char[]> stacks;  // kept for the next block
  std::size_t stack_count = 0;
  std::vector<bool> done;
  std::vector<int> waits;     // Waits
  std::vector<int> meetings;  // how often a thread has met the others of its warp
  int sharing[16] = {};       // how many threads a barrier is for, by its number
  std::int64_t events = 0;    // whatever a thread that looks may have waited for
  bool any[3] = {};           // of any_thread, by turns
  std::vector<int> asked;     // how often a thread has called it
  std::vector<std::vector<Copy>> copies;
  std::vector<int> groups;          // of copies that have ended
  std::vector<double> shuffled[2];  // by turns, so that a value outlives the shuffle after it
  std::vector<int> shuffles;
  void (*run)(void*) = nullptr;
  void* body = nullptr;
};
inline Machine machine;

inline int thread() { return machine.thread; }
inline std::int64_t block() { return machine.block; }
inline std::int64_t blocks() { return machine.blocks; }
inline int multiprocessors(int) { return machine.multiprocessors; }
inline int lane() { return thread() % kLanes; }
inline int warp() { return thread() / kLanes; }
inline char* shared_memory() { return machine.shared; }
inline void raise(int* flag) { *flag = 1; }

inline std::size_t self() { return static_cast<std::size_t>(machine.thread); }
/// Lets the other threads of the warp come as far.
inline void give_way() { host::switch_context(&machine.contexts[self()], &machine.round); }
inline void wait_for(int what) {
  machine.waits[self()] = what;
  give_way();
}
inline void sync() { wait_for(kForBlock); }
/// Lets the other threads of the warp come as far, also those who still look for something.
inline void sync_warp() {
  const int own = ++machine.meetings[self()];
  const auto first = self() / kLanes * kLanes;
  const auto all_here = [&] {
    for (auto i = first; i < first + kLanes; ++i) {
      if (machine.meetings[i] < own && !machine.done[i]) return false;
    }
    return true;
  };
  give_way();
  while (!all_here()) wait_for(kLooks);
}
/// A barrier of kCount threads.
template <int kCount>
void sync_some(int which) {
  machine.sharing[which] = kCount;
  wait_for(kSome + which);
}
/// Until something holds that another thread brings about, who counts an event then.
template <typename Holds>
void wait_until(Holds&& holds) {
  while (!holds()) wait_for(kLooks);
}
/// A barrier; whether it holds for any thread of the block.
inline bool any_thread(bool holds) {
  const int turn = machine.asked[self()]++ % 3;
  machine.any[turn] |= holds;
  machine.any[(turn + 1) % 3] = false;  // which everybody has read
  sync();
  return machine.any[turn];
}

template <typename T>
T from_lane(T value, int bits) {
  const auto own = self();
  auto& values = machine.shuffled[machine.shuffles[own]++ % 2];
  values[own] = static_cast<double>(value);
  sync_warp();
  return static_cast<T>(values[own ^ static_cast<std::size_t>(bits)]);
}
template <typename T>
T sum_lanes(T value) {
  for (int apart = kLanes / 2; apart > 0; apart /= 2) value += from_lane(value, apart);
  return value;
}

/// What the lanes of this warp have, by lane; waits for all of them.
template <typename T>
const T* from_all_lanes(const T& own) {
  static std::vector<T> values[2];
  auto& now = values[machine.shuffles[self()]++ % 2];
  if (now.size() < machine.contexts.size()) now.resize(machine.contexts.size());
  now[self()] = own;
  sync_warp();
  return now.data() + warp() * kLanes;
}

inline bool any_lane(bool holds) { return sum_lanes(holds ? 1 : 0) > 0; }

struct CurrentDevice {
  explicit CurrentDevice(int) {}
};

template <int kBytes>
void copy_async_or_zero(void* to, const void* from, bool there) {
  std::memset(to, 0xff, kBytes);
  machine.copies[self()].push_back({to, there ? from : nullptr, kBytes, machine.groups[self()]});
}
inline void copy_async(void* to, const void* from, bool there = true) { copy_async_or_zero<16>(to, from, there); }
inline void end_group() { ++machine.groups[self()]; }

/// Copies of all groups before this one arrive.
inline void finish_copies(int group) {
  std::erase_if(machine.copies[self()], [&](const Copy& copy) {
    if (copy.group >= group) return false;
    if (copy.from != nullptr) {
      std::memcpy(copy.to, copy.from, copy.bytes);
    } else {
      std::memset(copy.to, 0, copy.bytes);
    }
    return true;
  });
}
inline void wait_for_copies() { finish_copies(machine.groups[self()] + 1); }
template <int kGroups>
void wait_for_groups_but() {
  finish_copies(machine.groups[self()] - kGroups);
}

inline void enter() {
  machine.run(machine.body);
  machine.done[self()] = true;
  give_way();
}

/// Runs a warp up to the next barrier or its end.
inline void run_warp(int warp, bool from_last) {
  for (bool more = true; more;) {
    more = false;
    for (int i = 0; i < kLanes; ++i) {
      machine.thread = warp * kLanes + (from_last ? kLanes - 1 - i : i);
      if (machine.done[self()] || machine.waits[self()] != kRuns) continue;
      host::switch_context(&machine.round, &machine.contexts[self()]);
      more = true;
    }
  }
}

/// Lets those go on whose barrier all have reached, and those who look. Without either, and with nothing for the latter
/// to see, none would ever go on.
inline void release(std::int64_t events_before) {
  const auto count = machine.waits.size();
  const auto waiting = [&](int what) {
    std::ptrdiff_t n = 0;
    for (std::size_t i = 0; i < count; ++i) n += !machine.done[i] && machine.waits[i] == what;
    return n;
  };
  bool goes_on = machine.events != events_before;
  const auto let_go = [&](int what) {
    std::ranges::replace(machine.waits, what, static_cast<int>(kRuns));
    goes_on |= what != kLooks;
  };
  const std::ptrdiff_t at_block = waiting(kForBlock);
  if (at_block > 0 && at_block == std::ranges::count(machine.done, false)) let_go(kForBlock);
  for (int which = 0; which < 16; ++which) {
    const std::ptrdiff_t here = waiting(kSome + which);
    if (here > 0 && here == machine.sharing[which]) let_go(kSome + which);
  }
  let_go(kLooks);
  if (goes_on || std::ranges::find(machine.done, false) == machine.done.end()) return;
  std::fputs("the threads of a block wait for each other\n", stderr);
  std::abort();
}

inline void run_block(int threads) {
  const auto count = static_cast<std::size_t>(threads);
  machine.contexts.resize(count);
  machine.done.assign(count, false);
  machine.waits.assign(count, kRuns);
  machine.meetings.assign(count, 0);
  machine.asked.assign(count, 0);
  std::ranges::fill(machine.any, false);
  machine.copies.assign(count, {});
  machine.groups.assign(count, 0);
  machine.shuffles.assign(count, 0);
  for (auto& values : machine.shuffled) values.assign(count, 0);
  if (machine.stack_count < count) {
    machine.stacks = std::make_unique_for_overwrite<char[]>(count * Machine::kStackBytes);
    machine.stack_count = count;
  }
  for (std::size_t i = 0; i < count; ++i) {
    char* const stack = machine.stacks.get() + i * Machine::kStackBytes;
    host::make_context(&machine.contexts[i], stack, Machine::kStackBytes, enter);
  }
  const int warps = threads / kLanes;
  const bool from_last = machine.block % 2 != 0;
  while (std::ranges::find(machine.done, false) != machine.done.end()) {
    const std::int64_t events = machine.events;
    for (int i = 0; i < warps; ++i) run_warp(from_last ? warps - 1 - i : i, from_last);
    release(events);
  }
}

template <int kBlock, typename... Parameters, typename... Arguments>
void launch_blocks_of(void (*kernel)(Parameters...), std::int64_t grid, int, void*, const Arguments&... arguments) {
  auto body = [&] { kernel(arguments...); };
  machine.body = &body;
  machine.run = [](void* p) { (*static_cast<decltype(body)*>(p))(); };
  machine.blocks = grid;
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
template <int kBlock = kThreads, typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), std::int64_t grid, int bytes, void* stream, const Arguments&... arguments) {
  launch_blocks_of<kBlock>(kernel, grid, bytes, stream, arguments...);
}
template <typename... Parameters>
int resident_blocks(void (*)(Parameters...), int, int = kThreads) {
  return 1;
}
inline int shared_memory_per_block(int) { return Machine::kSharedBytes; }
inline void wait_for_earlier() {}
inline void let_next_start() {}
inline void pause(int) {}
inline constexpr int kLineBytes = 128;
inline void ask_for(const void*) {}

}  // namespace gka::kernels::cuda
