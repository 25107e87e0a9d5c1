// Products of bfloat16 tiles in shared memory on tensor cores, by one warp: 16 rows and 8·kAcross columns at a time,
// sums in float32 registers. Written for mma.sync, which every card from Ampere on has.
//
// A tile is row-major, its rows kPad numbers longer than their contents, so that the eight rows of 16 bytes which one
// ldmatrix fetches lie in different banks. Either operand may be read as it lies or transposed: ldmatrix turns 8 × 8
// blocks on the way.
//
// tests/kernels/cuda_with_threads has a stand-in for this header.
#pragma once

#include "kernels/cuda/device.cuh"

namespace gka::kernels::cuda::memory {

using Bits = std::uint16_t;  // a bfloat16

inline constexpr int kPad = 8;

__device__ __forceinline__ float low_half(std::uint32_t two) { return bits_to_float(two << 16); }
__device__ __forceinline__ float high_half(std::uint32_t two) { return bits_to_float(two & 0xffff0000u); }

/// Four 8 × 8 blocks; lane l says where row l % 8 of block l / 8 begins.
template <bool kTransposed>
__device__ __forceinline__ void load_blocks(std::uint32_t (&to)[4], const Bits* row) {
  const auto from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
  }
}

/// sums += A[16 × 16] · B[16 × 8].
__device__ __forceinline__ void multiply_add(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// An 8 × 8 block whose row lane / 4 has the lane's two numbers at columns 2 (lane % 4) and the next, transposed.
__device__ __forceinline__ std::uint32_t transposed(std::uint32_t two) {
  std::uint32_t turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(two));
  return turned;
}

/// Starts a copy of so many bytes, all threads of the block together; `arrived` waits for it. Both ends are aligned to
/// 16 bytes. Hopper has an engine for it, and one thread asks; elsewhere it is one of the block's groups of copies.
template <int kBlock>
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int bytes, std::uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  if (thread() != 0) return;
  const auto place = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(place), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(from), "r"(bytes), "r"(place)
               : "memory");
#else
  for (int i = 16 * thread(); i < bytes; i += 16 * kBlock) {
    copy_async(static_cast<char*>(to) + i, static_cast<const char*>(from) + i);
  }
#endif
}

/// Makes barriers ready for copies, before the block's next sync.
__device__ __forceinline__ void make_barriers([[maybe_unused]] std::uint64_t* barriers, [[maybe_unused]] int count) {
#if __CUDA_ARCH__ >= 900
  if (thread() != 0) return;
  for (int i = 0; i < count; ++i) {
    const auto place = static_cast<unsigned>(__cvta_generic_to_shared(barriers + i));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(place) : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/// Waits for the copy that a barrier's phase counts, 0 and 1 in turn.
__device__ __forceinline__ void wait_for_bytes([[maybe_unused]] std::uint64_t* barrier, [[maybe_unused]] int phase) {
#if __CUDA_ARCH__ >= 900
  const auto place = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(place),
      "r"(phase)
      : "memory");
#endif
}

}  // namespace gka::kernels::cuda::memory
