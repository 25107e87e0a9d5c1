// A stand-in for src/kernels/cuda/device.cuh with which the CUDA kernels compile as plain C++: blocks run one after
// another, each with a single thread. Their arithmetic, their indices and their cut are then tested on machines without
// a GPU; what only many threads show (a missing barrier) is left to a GPU.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "kernels/host_numbers.h"

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __noinline__
#define __forceinline__

namespace gka::kernels::cuda {

inline constexpr int kThreads = 1;
inline constexpr int kLanes = 1;
inline constexpr int kWarps = 1;

struct Machine {
  static constexpr int kSharedBytes = 100 * 1024;  // small enough that larger arrays of a test lie elsewhere
  alignas(16) char shared[kSharedBytes];
  std::int64_t block = 0;
  std::int64_t blocks = 0;
};
inline Machine machine;

inline int thread() { return 0; }
inline std::int64_t block() { return machine.block; }
inline std::int64_t blocks() { return machine.blocks; }
inline void sync() {}
inline void sync_warp() {}
inline int lane() { return 0; }
inline int warp() { return 0; }
template <typename T>
T sum_lanes(T value) {
  return value;
}
template <typename T>
T from_lane(T value, int) {
  return value;
}
inline void copy_async(void* to, const void* from, bool there = true) {
  there ? std::memcpy(to, from, 16) : std::memset(to, 0, 16);
}
inline void wait_for_copies() {}
template <int kBytes>
void copy_async_or_zero(void* to, const void* from, bool there) {
  there ? std::memcpy(to, from, kBytes) : std::memset(to, 0, kBytes);
}
inline void end_group() {}
template <int>
void wait_for_groups_but() {}
inline void wait_for_earlier() {}
inline void let_next_start() {}
inline constexpr int kLineBytes = 128;
inline void ask_for(const void*) {}
inline char* shared_memory() { return machine.shared; }
inline void raise(int* flag) { *flag = 1; }

inline bool in_shared(const void* p) { return p >= machine.shared && p < machine.shared + Machine::kSharedBytes; }
template <typename T>
T* as_shared(T* p) {
  return p;
}

inline int multiprocessors(int) { return 3; }
inline int shared_memory_per_block(int) { return Machine::kSharedBytes; }
template <typename... Parameters>
int resident_blocks(void (*)(Parameters...), int, int = kThreads) {
  return 1;
}

struct CurrentDevice {
  explicit CurrentDevice(int) {}
};

/// All of it is NaN when a block begins, as far as anybody reads before writing. Filled anew is what the block before
/// had asked for, and no more may it have written: to fill the whole for every block takes longer than most blocks.
inline void leave_shared(int bytes) {
  for (int i = bytes; i < std::min(bytes + 64, Machine::kSharedBytes); ++i) {
    if (machine.shared[i] == static_cast<char>(0xff)) continue;
    std::fputs("a block has written beyond the shared memory it was launched with\n", stderr);
    std::abort();
  }
  std::memset(machine.shared, 0xff, static_cast<std::size_t>(bytes));
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), std::int64_t grid, int bytes, void*, Arguments&&... arguments) {
  [[maybe_unused]] static const auto filled = std::memset(machine.shared, 0xff, Machine::kSharedBytes);
  machine.blocks = grid;
  for (machine.block = 0; machine.block < grid; ++machine.block) {
    kernel(arguments...);
    leave_shared(bytes);
  }
}
template <int kBlock, typename... Parameters, typename... Arguments>
void launch_blocks_of(void (*kernel)(Parameters...), std::int64_t grid, int bytes, void* stream,
                      Arguments&&... arguments) {
  launch(kernel, grid, bytes, stream, std::forward<Arguments>(arguments)...);
}
template <int kBlock, typename... Parameters, typename... Arguments>
void launch_early(void (*kernel)(Parameters...), std::int64_t grid, int bytes, int, void* stream,
                  Arguments&&... arguments) {
  launch(kernel, grid, bytes, stream, std::forward<Arguments>(arguments)...);
}

}  // namespace gka::kernels::cuda
