// What in this folder is CUDA: threads, barriers, shared memory, launches; and in tiles.cuh and split_tiles.cuh the
// tensor cores. The rest is C++ written for one thread block that works together, and tests/kernels/cuda_on_host has a
// stand-in for these headers with which the same sources run on the host, one "thread" per block.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace gka::kernels::cuda {

inline constexpr int kThreads = 512;

inline constexpr int kLanes = 32;  // of a warp
inline constexpr int kWarps = kThreads / kLanes;

__device__ inline int thread() { return static_cast<int>(threadIdx.x); }
__device__ inline std::int64_t block() { return blockIdx.x; }
__device__ inline std::int64_t blocks() { return gridDim.x; }
__device__ inline void sync() { __syncthreads(); }
__device__ inline void sync_warp() { __syncwarp(); }
/// A barrier of kCount threads of the block, of which there are some by number.
template <int kCount>
__device__ __forceinline__ void sync_some(int which) {
  asm volatile("bar.sync %0, %1;" ::"r"(which), "n"(kCount) : "memory");
}

__device__ inline int lane() { return thread() % kLanes; }
__device__ inline int warp() { return thread() / kLanes; }
/// The sum over the lanes of a warp, the same bits in each.
template <typename T>
__device__ __forceinline__ T sum_lanes(T value) {
#pragma unroll
  for (int apart = kLanes / 2; apart > 0; apart /= 2) value += __shfl_xor_sync(0xffffffffu, value, apart);
  return value;
}

/// What the lane whose number differs in these bits has.
template <typename T>
__device__ __forceinline__ T from_lane(T value, int bits) {
  return __shfl_xor_sync(0xffffffffu, value, bits);
}

/// Whether it holds for any lane of the warp.
__device__ __forceinline__ bool any_lane(bool holds) { return __any_sync(0xffffffffu, holds) != 0; }

/// Starts a copy of 16 bytes into shared memory; the thread that asked may read them after wait_for_copies.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(from));
}
/// The same, of zeros where `there` is false.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool there) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
      "l"(from), "r"(there ? 16 : 0)
      : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// The same of 4, 8 or 16 bytes, by way of the first-level cache.
template <int kBytes>
__device__ __forceinline__ void copy_async_or_zero(void* to, const void* from, bool there) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
      "l"(from), "n"(kBytes), "r"(there ? kBytes : 0)
      : "memory");
}
/// Copies since the last call of this are a group; wait_for_groups_but leaves the last kGroups of them under way.
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kGroups>
__device__ __forceinline__ void wait_for_groups_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

/// A kernel that launch_early starts may begin while the one before it still runs, and until this call may do nothing
/// but ask for memory. The next kernel may begin from here on: it will wait in the same way.
__device__ __forceinline__ void wait_for_earlier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// The next kernel may begin now, and those behind it as each of them calls this: as many as there is room for then ask
/// for memory while this one computes. Whatever a kernel does after wait_for_earlier comes after all that was before
/// it.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// Lets at least so many cycles of the multiprocessor pass.
__device__ __forceinline__ void pause(int cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) __nanosleep(100);
}

/// Brings the line of memory that has this address into the second-level cache, which all see alike.
inline constexpr int kLineBytes = 128;
__device__ __forceinline__ void ask_for(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ inline char* shared_memory() {
  extern __shared__ __align__(16) char bytes[];
  return bytes;
}

/// Sets a flag that several threads may set at once.
__device__ inline void raise(int* flag) { atomicOr(flag, 1); }

__device__ inline float half_to_float(std::uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
__device__ inline std::uint16_t float_to_half(float value) { return __half_as_ushort(__float2half_rn(value)); }
__device__ inline float bits_to_float(std::uint32_t bits) { return __uint_as_float(bits); }
__device__ inline std::uint32_t float_to_bits(float value) { return __float_as_uint(value); }

/// Two numbers rounded to bfloat16, the first in the lower half.
__device__ __forceinline__ std::uint32_t two_bfloat16(float first, float second) {
  std::uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}

/// a · b + c of each half, rounded once.
__device__ __forceinline__ std::uint32_t fma_two_bfloat16(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t bits;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(bits) : "r"(a), "r"(b), "r"(c));
  return bits;
}
/// Four of eight bytes: those of `low` are 0 to 3, those of `high` 4 to 7, and each four bits of kWhich, from the
/// lowest, name one.
template <std::uint32_t kWhich>
__device__ __forceinline__ std::uint32_t pick_bytes(std::uint32_t low, std::uint32_t high) {
  return __byte_perm(low, high, kWhich);
}

/// 2^x, exactly 0 from −127 down.
__device__ __forceinline__ float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
/// To about two units in the last place of float32, in a fraction of the time, and 0 for results below 1e-38: for what
/// is rounded to 16 bits afterwards.
__device__ __forceinline__ float quick_exp(float x) { return power_of_two(x * 1.4426950408889634f); }
__device__ __forceinline__ float quick_inverse(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}
__device__ __forceinline__ float quick_sqrt(float x) {
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

__device__ inline bool in_shared(const void* p) { return __isShared(p) != 0; }
/// The same pointer, in a form from which the compiler sees that it needs no generic loads.
template <typename T>
__device__ __forceinline__ T* as_shared(T* p) {
  const auto offset = static_cast<unsigned>(__cvta_generic_to_shared(p) - __cvta_generic_to_shared(shared_memory()));
  return reinterpret_cast<T*>(shared_memory() + offset);
}

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("gka: ") + what + ": " + cudaGetErrorString(error));
}

inline int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "reading a device attribute");
  return value;
}
inline int multiprocessors(int device) { return attribute(cudaDevAttrMultiProcessorCount, device); }
inline int shared_memory_per_block(int device) { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device); }

/// The device's own, for the life of the object.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    check(cudaGetDevice(&before_), "asking for the current device");
    if (device != before_) check(cudaSetDevice(device), "choosing a device");
  }
  CurrentDevice(const CurrentDevice&) = delete;
  ~CurrentDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

/// Blocks of this kernel that a multiprocessor holds at once.
template <typename... Parameters>
int resident_blocks(void (*kernel)(Parameters...), int shared_bytes, int threads = kThreads) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "sizing shared memory");
  int count = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, threads, static_cast<std::size_t>(shared_bytes)),
        "asking for occupancy");
  return count;
}

/// Blocks of kBlock threads that use `shared_bytes` of shared memory, however much that is.
template <int kBlock, typename... Parameters, typename... Arguments>
void launch_blocks_of(void (*kernel)(Parameters...), std::int64_t grid, int shared_bytes, void* stream,
                      Arguments&&... arguments) {
  if (grid <= 0) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "sizing shared memory");
  kernel<<<static_cast<unsigned>(grid), kBlock, static_cast<std::size_t>(shared_bytes),
           static_cast<cudaStream_t>(stream)>>>(std::forward<Arguments>(arguments)...);
  check(cudaGetLastError(), "starting a kernel");
}

/// Whether code for this kernel has wait_for_earlier in it, and the device knows what that is. Asked once for each by
/// each thread: the answer takes longer than a launch.
inline bool can_start_early(const void* kernel, int device) {
  thread_local std::map<std::pair<const void*, int>, bool> known;
  const auto [place, is_new] = known.try_emplace({kernel, device}, false);
  if (is_new) {
    cudaFuncAttributes compiled{};
    check(cudaFuncGetAttributes(&compiled, kernel), "asking for a kernel's version");
    place->second = compiled.ptxVersion >= 90 && attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9;
  }
  return place->second;
}

/// The same for a kernel that calls wait_for_earlier: its start, some microseconds, passes while the kernel before it
/// runs. For the short kernels of decoding, which are as many as they are short.
template <int kBlock, typename... Parameters, typename... Arguments>
void launch_early(void (*kernel)(Parameters...), std::int64_t grid, int shared_bytes, int device, void* stream,
                  Arguments&&... arguments) {
  if (grid <= 0) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "sizing shared memory");
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(kBlock);
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = can_start_early(reinterpret_cast<const void*>(kernel), device) ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), "starting a kernel");
}

template <int kBlock = kThreads, typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), std::int64_t grid, int shared_bytes, void* stream,
            Arguments&&... arguments) {
  if (grid <= 0) return;
  kernel<<<static_cast<unsigned>(grid), kBlock, static_cast<std::size_t>(shared_bytes),
           static_cast<cudaStream_t>(stream)>>>(std::forward<Arguments>(arguments)...);
  check(cudaGetLastError(), "starting a kernel");
}

}  // namespace gka::kernels::cuda
