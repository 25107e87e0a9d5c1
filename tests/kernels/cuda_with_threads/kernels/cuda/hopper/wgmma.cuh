// A stand-in for src/kernels/cuda/hopper/wgmma.cuh, with the threads of device.cuh's second stand-in: products, bulk
// copies and barriers do what the card's do, as late as they may. A product reads its operands in shared memory, and
// its sums are there, when its warp waits for it; a bulk copy leaves NaN until somebody has waited for its barrier; one
// to global memory takes place when its thread waits. So what is read too early, or overwritten too early, is seen.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <type_traits>
#include <vector>

#include "kernels/cuda/device.cuh"

namespace gka::kernels::cuda {

// ---- What CUDA knows by itself ----------------------------------------------------------------------------------

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  std::uint32_t x, y;
};
struct alignas(16) uint4 {
  std::uint32_t x, y, z, w;
};
struct __half {
  std::uint16_t bits;
};

inline float __half2float(__half x) { return half_to_float(x.bits); }
template <typename T>
T __ldg(const T* p) {
  return *p;
}
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline double __hiloint2double(int high, int low) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(static_cast<std::uint32_t>(high)) << 32 |
                               static_cast<std::uint32_t>(low));
}
inline int __popcll(long long x) { return std::popcount(static_cast<unsigned long long>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a & 0xffffu, b & 0xffffu) | std::max(a >> 16, b >> 16) << 16;
}
template <typename T, typename U>
T atomicOr(T* to, U bits) {
  return std::exchange(*to, *to | static_cast<T>(bits));
}
template <typename T>
T atomicMax(T* to, T value) {
  return std::exchange(*to, std::max(*to, value));
}
template <typename T>
T atomicAdd(T* to, T value) {
  return std::exchange(*to, *to + value);
}

template <typename T>
T __shfl_sync(unsigned, T value, int from) {
  return from_all_lanes(value)[static_cast<unsigned>(from) % kLanes];
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int bits) {
  return from_all_lanes(value)[lane() ^ bits];
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int apart) {
  return from_all_lanes(value)[lane() >= apart ? lane() - apart : lane()];
}
inline unsigned __ballot_sync(unsigned, bool holds) {
  const int* all = from_all_lanes(holds ? 1 : 0);
  unsigned bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<unsigned>(all[i]) << i;
  return bits;
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  const unsigned* all = from_all_lanes(value);
  return *std::min_element(all, all + kLanes);
}
inline void __syncwarp() { sync_warp(); }
inline int __syncthreads_or(int holds) { return any_thread(holds != 0) ? 1 : 0; }

}  // namespace gka::kernels::cuda

namespace gka::kernels::cuda::hopper {

/// From the head of shared memory, which begins at a multiple of 1,024.
inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(static_cast<const char*>(p) - machine.shared);
}
inline char* tile_memory() { return machine.shared; }
inline int opaque(int value) { return value; }
inline float logarithm(float x) { return std::log2(std::fabs(x)); }

[[noreturn]] inline void stop(const char* why) {
  std::fprintf(stderr, "%s\n", why);
  std::abort();
}

// ---- Products ---------------------------------------------------------------------------------------------------

template <int kCount>
void hold(float (&)[kCount]) {}

template <int kColumns = 64>
std::uint64_t descriptor(const void* tile, int rows) {
  constexpr std::uint64_t kSwizzle = std::uint64_t{kColumns == 64 ? 1 : 2} << 62;
  constexpr std::uint64_t kGroup = std::uint64_t{8 * kColumns * 2 / 16} << 32;
  return kSwizzle | kGroup | static_cast<std::uint64_t>((rows * kColumns * 2) >> 4) << 16 | shared_address(tile) >> 4;
}
template <int kColumns = 64>
std::uint64_t k_major_step(std::uint64_t first, int s, int rows) {
  constexpr int kSteps = kColumns / 16;
  return first + static_cast<std::uint64_t>((s / kSteps * rows * kColumns * 2 + s % kSteps * 32) >> 4);
}
template <int kColumns = 64>
std::uint64_t mn_major_step(std::uint64_t first, int s) {
  return first + static_cast<std::uint64_t>((s * 16 * kColumns * 2) >> 4);
}

inline float number_of(std::uint16_t bits, bool half) {
  return half ? half_to_float(bits) : bits_to_float(static_cast<std::uint32_t>(bits) << 16);
}

/// An operand in shared memory: number (i, k), with k what is summed over. The swizzle, 128 or 64 bytes, exchanges
/// units of 16 bytes by bits of their address from 128 up. 0: the operand is in registers.
struct SharedOperand {
  std::uint32_t start, block, group;  // bytes: of a block, of eight rows
  int width;                          // of a row, as a power of two: division takes longer than all else here
  bool mn, half;

  SharedOperand(std::uint64_t of, bool mn, bool half)
      : start(static_cast<std::uint32_t>(of & 0x3fff) << 4),
        block(static_cast<std::uint32_t>(of >> 16 & 0x3fff) << 4),
        group(static_cast<std::uint32_t>(of >> 32 & 0x3fff) << 4),
        width(of >> 62 == 1 ? 7 : 6),
        mn(mn),
        half(half) {
    if (of != 0 && of >> 62 != 1 && of >> 62 != 2) stop("an operand with another swizzle than of 128 or 64 bytes");
  }
  float at(int i, int k) const {
    const auto row = static_cast<std::uint32_t>(mn ? k : i), column = static_cast<std::uint32_t>(mn ? i : k);
    std::uint32_t place = start + row / 8 * group + (row % 8 << width);
    place += (column * 2 & ((1u << width) - 1)) + (column * 2 >> width) * block;
    place ^= (place >> 7 & ((1u << width) / 16 - 1)) << 4;
    std::uint16_t bits = 0;
    std::memcpy(&bits, machine.shared + place, 2);
    return number_of(bits, half);
  }
};

/// A product that a lane has queued: `d` has 16, 32 or 64 of its numbers, of 32, 64 or 128 columns.
struct Queued {
  float* d;
  int count;
  std::uint32_t a[4];  // in registers
  std::uint64_t shared_a, b;
  bool from_shared, mn_a, mn_b, half;
  int add;
};
/// What a thread has queued, and how much of it in each group that was committed.
struct Queue {
  std::vector<Queued> products;
  std::vector<std::size_t> groups;
};
inline std::vector<Queue>& queues() {
  static std::vector<Queue> all;
  if (all.size() < machine.contexts.size()) all.resize(machine.contexts.size());
  return all;
}

/// Four columns at once: a product of numbers one by one is what these tests would take most of their time for, above
/// all under the sanitizers, which look at each.
using FourColumns [[gnu::vector_size(16)]] = float;

/// One product of a warp: 16 of its 64 rows.
inline void multiply_warp(const Queue* lanes, std::size_t which) {
  const Queued& first = lanes[0].products[which];
  const int columns = 2 * first.count;
  const SharedOperand left(first.shared_a, first.mn_a, first.half), right(first.b, first.mn_b, first.half);
  float a[16][16];
  FourColumns b[16][32];
  float* sums_of[kLanes];
  for (int i = 0; i < kLanes; ++i) sums_of[i] = lanes[i].products[which].d;
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      if (first.from_shared) {
        a[row][k] = left.at(warp() % 4 * 16 + row, k);
        continue;
      }
      const std::uint32_t two = lanes[row % 8 * 4 + k % 8 / 2].products[which].a[k / 8 * 2 + row / 8];
      a[row][k] = number_of(static_cast<std::uint16_t>(k % 2 == 0 ? two : two >> 16), first.half);
    }
  }
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < columns; ++n) b[k][n / 4][n % 4] = right.at(n, k);
  }
  for (int row = 0; row < 16; ++row) {
    for (int four = 0; four < columns / 4; ++four) {
      FourColumns sums = {};
      for (int k = 0; k < 16; ++k) sums += a[row][k] * b[k][four];
      for (int i = 0; i < 4; ++i) {
        const int n = 4 * four + i;
        float& d = sums_of[row % 8 * 4 + n % 8 / 2][n / 8 * 4 + row / 8 * 2 + n % 2];
        d = (first.add != 0 ? d : 0) + sums[i];
      }
    }
  }
}

inline void wgmma_fence() {}
inline void wgmma_commit() {
  Queue& own = queues()[self()];
  own.groups.push_back(own.products.size());
}
/// The first lane of the warp to come here again does it for all of them.
template <int kLeft>
void wgmma_wait() {
  sync_warp();
  const auto first = self() / kLanes * kLanes;
  Queue* const lanes = &queues()[first];
  auto& own = queues()[self()];
  for (int i = 0; i < kLanes; ++i) {
    if (lanes[i].products.size() != own.products.size()) stop("lanes of a warp have queued different products");
  }
  if (own.groups.size() > kLeft) {
    const std::size_t finished = own.groups[own.groups.size() - kLeft - 1];
    for (std::size_t i = 0; i < finished; ++i) multiply_warp(lanes, i);
    for (int i = 0; i < kLanes; ++i) {
      auto& [products, groups] = lanes[i];
      products.erase(products.begin(), products.begin() + static_cast<std::ptrdiff_t>(finished));
      groups.erase(groups.begin(), groups.end() - kLeft);
      for (std::size_t& group : groups) group -= finished;
    }
  }
  sync_warp();
}

inline void queue_product(Queued product) { queues()[self()].products.push_back(product); }

template <bool kMn, bool kHalf = false, int kCount>
void mma(float (&d)[kCount], const std::uint32_t* a, std::uint64_t b, int add = 1) {
  queue_product({.d = d,
                 .count = kCount,
                 .a = {a[0], a[1], a[2], a[3]},
                 .shared_a = 0,
                 .b = b,
                 .from_shared = false,
                 .mn_a = false,
                 .mn_b = kMn,
                 .half = kHalf,
                 .add = add});
}
template <bool kMnA, bool kMnB, bool kHalf = false, int kCount>
void mma(float (&d)[kCount], std::uint64_t a, std::uint64_t b, int add = 1) {
  queue_product({.d = d,
                 .count = kCount,
                 .a = {},
                 .shared_a = a,
                 .b = b,
                 .from_shared = true,
                 .mn_a = kMnA,
                 .mn_b = kMnB,
                 .half = kHalf,
                 .add = add});
}

// ---- Copies -----------------------------------------------------------------------------------------------------

inline void publish() {}
template <int, bool>
void set_registers() {}

/// A barrier in shared memory, by its address: a phase ends when all have arrived and, then, somebody waits for its
/// copies.
struct PhaseBarrier {
  int arrivals = 1, missing = 1, parity = 0;
  std::int64_t announced = 0;
  std::vector<Copy> copies;

  void end_phase() {
    for (const Copy& copy : copies) {
      std::memcpy(copy.to, copy.from, copy.bytes);
      announced -= static_cast<std::int64_t>(copy.bytes);
    }
    if (announced != 0) stop("other bytes were announced than came");
    copies.clear();
    missing = arrivals;
    parity ^= 1;
    ++machine.events;
  }
};
inline std::map<const void*, PhaseBarrier>& phase_barriers() {
  static std::map<const void*, PhaseBarrier> all;
  return all;
}
inline void barrier_init(std::uint64_t* barrier, int arrivals = 1) {
  phase_barriers()[barrier] = {.arrivals = arrivals, .missing = arrivals, .copies = {}};
}
inline void barrier_fence() {}
inline void barrier_arrive(std::uint64_t* barrier) {
  PhaseBarrier& of = phase_barriers()[barrier];
  if (--of.missing < 0) stop("more have arrived at a barrier than it is for");
  ++machine.events;
}
inline void barrier_expect(std::uint64_t* barrier, std::uint32_t bytes) {
  phase_barriers()[barrier].announced += bytes;
  barrier_arrive(barrier);
}
inline void bulk_copy(void* to, const void* from, std::uint32_t bytes, std::uint64_t* barrier) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0 || reinterpret_cast<std::uintptr_t>(from) % 16 != 0) {
    stop("a bulk copy from or to no multiple of 16");
  }
  std::memset(to, 0xff, bytes);
  phase_barriers()[barrier].copies.push_back({to, from, bytes, 0});
}
inline void bulk_load(void* to, const void* from, std::uint32_t bytes, std::uint64_t* barrier) {
  barrier_expect(barrier, bytes);
  bulk_copy(to, from, bytes, barrier);
}
inline void barrier_wait(std::uint64_t* barrier, int phase) {
  wait_until([&] {
    PhaseBarrier& of = phase_barriers()[barrier];
    if (of.parity == phase && of.missing == 0) of.end_phase();
    return of.parity != phase;
  });
}

inline void bulk_store(void* to, const void* from, std::uint32_t bytes) {
  machine.copies[self()].push_back({to, from, bytes, -1});
}
/// Copies to global memory, those of group −1.
inline void bulk_store_finish() { finish_copies(0); }
inline void bulk_store_wait() { bulk_store_finish(); }

inline void store_matrices(std::uint32_t at, std::uint32_t m0, std::uint32_t m1, std::uint32_t m2, std::uint32_t m3) {
  struct Given {
    std::uint32_t at, words[4];
  };
  const Given* all = from_all_lanes(Given{at, {m0, m1, m2, m3}});
  // Lane l writes what belongs into its own row: row l % 8 of matrix l / 8.
  for (int column = 0; column < 8; column += 2) {
    const std::uint32_t word = all[lane() % 8 * 4 + column / 2].words[lane() / 8];
    std::memcpy(machine.shared + at + column * 2, &word, 4);
  }
}
inline void load_matrices(std::uint32_t (&to)[4], std::uint32_t at) {
  const std::uint32_t* rows = from_all_lanes(at);
  for (int m = 0; m < 4; ++m) std::memcpy(&to[m], machine.shared + rows[8 * m + lane() / 4] + lane() % 4 * 4, 4);
}

// ---- Pairs of 16-bit numbers ------------------------------------------------------------------------------------

inline std::uint32_t pack(float low, float high) { return two_bfloat16(low, high); }
inline float low(std::uint32_t word) { return bits_to_float(word << 16); }
inline float high(std::uint32_t word) { return bits_to_float(word & 0xffff0000u); }
inline std::uint32_t pack_half(float low, float high) {
  return float_to_half(low) | static_cast<std::uint32_t>(float_to_half(high)) << 16;
}
inline float2 unpack_half(std::uint32_t word) {
  return {half_to_float(static_cast<std::uint16_t>(word)), half_to_float(static_cast<std::uint16_t>(word >> 16))};
}
inline std::uint32_t pack_half_rest(float a, float b, std::uint32_t word) {
  const float2 packed = unpack_half(word);
  return pack_half(a - packed.x, b - packed.y);
}
inline std::uint32_t multiply_half(std::uint32_t a, std::uint32_t b) {
  const float2 x = unpack_half(a), y = unpack_half(b);
  return pack_half(x.x * y.x, x.y * y.y);
}
inline std::uint32_t multiply_add_half(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const float2 x = unpack_half(a), y = unpack_half(b), z = unpack_half(c);
  return pack_half(x.x * y.x + z.x, x.y * y.y + z.y);  // the product is a float
}
inline std::uint32_t pack_rest(float a, float b, std::uint32_t word) { return pack(a - low(word), b - high(word)); }

}  // namespace gka::kernels::cuda::hopper
