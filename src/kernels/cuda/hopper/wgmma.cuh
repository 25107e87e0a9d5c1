// The few Hopper instructions the kernels here use, as thin functions: matrix products of a warpgroup (wgmma), bulk
// copies that complete on a barrier, stmatrix. What is not obvious:
//
// - Every operand tile in shared memory is made of *blocks* of 64 columns: rows of 128 bytes under the 128-byte swizzle
//   (16-byte unit u of row r lies at unit u ^ (r & 7)). One and the same block is a K-major operand (its rows are the
//   other dimension) and an MN-major one (its rows are the dimension that is summed over). A tile of 32 columns is one
//   block of rows of 64 bytes under the 64-byte swizzle (unit u ^ (r / 2 & 3)).
// - An accumulator of 64×N holds, in thread l of warp w, value 4i + {0, 1} at row 16w + l/4, columns 8i + 2(l%4) + {0,
// 1}
//   and 4i + {2, 3} eight rows below. Rounded to bf16 and packed in pairs, values 8s … 8s + 7 are the A operand of step
//   s (16 columns) of the next product: an iterate never has to leave the registers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace gka::kernels::cuda::hopper {

using bf16 = __nv_bfloat16;

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// The same number, of which the compiler knows nothing: what is computed from it is computed where it is used, not
/// once before a loop and kept in registers that the loop needs.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

/// The block's shared memory, from a multiple of 1,024 on: what is swizzled begins at such.
__device__ inline char* tile_memory() {
  extern __shared__ __align__(1024) char tile_bytes[];
  return tile_bytes;
}
/// log₂ |x| nearly, −∞ for 0.
__device__ __forceinline__ float logarithm(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(fabsf(x)));
  return y;
}

// ---- Products ---------------------------------------------------------------------------------------------------

/// Before products that read registers (accumulators, A) written by ordinary instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Until at most kLeft groups are under way.
template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

/// The compiler takes the results of a product for known as soon as it is queued: this keeps whatever reads them behind
/// the wait that comes before it, and whatever wrote them before the products that come after it.
template <int kCount>
__device__ __forceinline__ void hold(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Where products find an operand in shared memory, whose blocks have kColumns columns and `rows` rows: its address,
/// the distance between its blocks (MN-major operands of more columns than one has), the bytes of eight rows, the
/// swizzle.
template <int kColumns = 64>
__device__ __forceinline__ std::uint64_t descriptor(const void* tile, int rows) {
  static_assert(kColumns == 64 || kColumns == 32);
  constexpr std::uint64_t kSwizzle = std::uint64_t{kColumns == 64 ? 1 : 2} << 62;
  constexpr std::uint64_t kGroup = std::uint64_t{8 * kColumns * 2 / 16} << 32;
  const std::uint64_t address = (shared_address(tile) & 0x3ffff) >> 4;
  return kSwizzle | kGroup | static_cast<std::uint64_t>((rows * kColumns * 2) >> 4) << 16 | address;
}
/// Step s (16 of what is summed over) of such an operand.
template <int kColumns = 64>
__device__ __forceinline__ std::uint64_t k_major_step(std::uint64_t first, int s, int rows) {
  constexpr int kSteps = kColumns / 16;
  return first + static_cast<std::uint64_t>((s / kSteps * rows * kColumns * 2 + s % kSteps * 32) >> 4);
}
template <int kColumns = 64>
__device__ __forceinline__ std::uint64_t mn_major_step(std::uint64_t first, int s) {
  return first + static_cast<std::uint64_t>((s * 16 * kColumns * 2) >> 4);
}

// clang-format off
#define GKA_F8(d, i) "+f"(d[i]), "+f"(d[i+1]), "+f"(d[i+2]), "+f"(d[i+3]), "+f"(d[i+4]), "+f"(d[i+5]), "+f"(d[i+6]), "+f"(d[i+7])
#define GKA_F32(d, i) GKA_F8(d, i), GKA_F8(d, i+8), GKA_F8(d, i+16), GKA_F8(d, i+24)
#define GKA_D8 "{%0,%1,%2,%3,%4,%5,%6,%7}"
#define GKA_D16 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"
#define GKA_D32 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define GKA_D64 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
                "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}"

/// d (+)= A B for 16 of what is summed over: A from registers, B from shared memory (kMn: MN-major). `add` = 0 starts
/// from zero. Operands are bf16, or float16 with kHalf.
template <bool kMn, bool kHalf = false>
__device__ __forceinline__ void mma(float (&d)[16], const std::uint32_t* a, std::uint64_t b, int add = 1) {
  if constexpr (kHalf) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 " GKA_D16 ", {%16,%17,%18,%19}, %20, p, 1, 1, %22;}\n"
               : GKA_F8(d, 0), GKA_F8(d, 8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kMn ? 1 : 0));
  } else {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " GKA_D16 ", {%16,%17,%18,%19}, %20, p, 1, 1, %22;}\n"
               : GKA_F8(d, 0), GKA_F8(d, 8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kMn ? 1 : 0));
  }
}
template <bool kMn, bool kHalf = false>
__device__ __forceinline__ void mma(float (&d)[32], const std::uint32_t* a, std::uint64_t b, int add = 1) {
  if constexpr (kHalf) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " GKA_D32 ", {%32,%33,%34,%35}, %36, p, 1, 1, %38;}\n"
               : GKA_F32(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kMn ? 1 : 0));
  } else {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " GKA_D32 ", {%32,%33,%34,%35}, %36, p, 1, 1, %38;}\n"
               : GKA_F32(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kMn ? 1 : 0));
  }
}
template <bool kMn, bool kHalf = false>
__device__ __forceinline__ void mma(float (&d)[64], const std::uint32_t* a, std::uint64_t b, int add = 1) {
  if constexpr (kHalf) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " GKA_D64 ", {%64,%65,%66,%67}, %68, p, 1, 1, %70;}\n"
               : GKA_F32(d, 0), GKA_F32(d, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kMn ? 1 : 0));
  } else {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " GKA_D64 ", {%64,%65,%66,%67}, %68, p, 1, 1, %70;}\n"
               : GKA_F32(d, 0), GKA_F32(d, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kMn ? 1 : 0));
  }
}
/// The same with A from shared memory too.
template <bool kMnA, bool kMnB, bool kHalf = false>
__device__ __forceinline__ void mma(float (&d)[8], std::uint64_t a, std::uint64_t b, int add = 1) {
  if constexpr (kHalf) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %10, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 " GKA_D8 ", %8, %9, p, 1, 1, %11, %12;}\n"
               : GKA_F8(d, 0) : "l"(a), "l"(b), "r"(add), "n"(kMnA ? 1 : 0), "n"(kMnB ? 1 : 0));
  } else {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %10, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 " GKA_D8 ", %8, %9, p, 1, 1, %11, %12;}\n"
               : GKA_F8(d, 0) : "l"(a), "l"(b), "r"(add), "n"(kMnA ? 1 : 0), "n"(kMnB ? 1 : 0));
  }
}
template <bool kMnA, bool kMnB, bool kHalf = false>
__device__ __forceinline__ void mma(float (&d)[16], std::uint64_t a, std::uint64_t b, int add = 1) {
  if constexpr (kHalf) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %18, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 " GKA_D16 ", %16, %17, p, 1, 1, %19, %20;}\n"
               : GKA_F8(d, 0), GKA_F8(d, 8) : "l"(a), "l"(b), "r"(add), "n"(kMnA ? 1 : 0), "n"(kMnB ? 1 : 0));
  } else {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %18, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 " GKA_D16 ", %16, %17, p, 1, 1, %19, %20;}\n"
               : GKA_F8(d, 0), GKA_F8(d, 8) : "l"(a), "l"(b), "r"(add), "n"(kMnA ? 1 : 0), "n"(kMnB ? 1 : 0));
  }
}
template <bool kMnA, bool kMnB, bool kHalf = false>
__device__ __forceinline__ void mma(float (&d)[32], std::uint64_t a, std::uint64_t b, int add = 1) {
  if constexpr (kHalf) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " GKA_D32 ", %32, %33, p, 1, 1, %35, %36;}\n"
               : GKA_F32(d, 0) : "l"(a), "l"(b), "r"(add), "n"(kMnA ? 1 : 0), "n"(kMnB ? 1 : 0));
  } else {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " GKA_D32 ", %32, %33, p, 1, 1, %35, %36;}\n"
               : GKA_F32(d, 0) : "l"(a), "l"(b), "r"(add), "n"(kMnA ? 1 : 0), "n"(kMnB ? 1 : 0));
  }
}
template <bool kMnA, bool kMnB, bool kHalf = false>
__device__ __forceinline__ void mma(float (&d)[64], std::uint64_t a, std::uint64_t b, int add = 1) {
  if constexpr (kHalf) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " GKA_D64 ", %64, %65, p, 1, 1, %67, %68;}\n"
               : GKA_F32(d, 0), GKA_F32(d, 32) : "l"(a), "l"(b), "r"(add), "n"(kMnA ? 1 : 0), "n"(kMnB ? 1 : 0));
  } else {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " GKA_D64 ", %64, %65, p, 1, 1, %67, %68;}\n"
               : GKA_F32(d, 0), GKA_F32(d, 32) : "l"(a), "l"(b), "r"(add), "n"(kMnA ? 1 : 0), "n"(kMnB ? 1 : 0));
  }
}
#undef GKA_F8
#undef GKA_F32
#undef GKA_D8
#undef GKA_D16
#undef GKA_D32
#undef GKA_D64
// clang-format on

// ---- Copies -----------------------------------------------------------------------------------------------------

/// What ordinary stores wrote to shared memory becomes visible to products and bulk copies (after a barrier).
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// A phase completes with `arrivals`, and with the bytes that were announced.
__device__ __forceinline__ void barrier_init(std::uint64_t* barrier, int arrivals = 1) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
/// Registers of this warpgroup's threads from here on: each role of a kernel is one branch that begins with this.
template <int kCount, bool kMore>
__device__ __forceinline__ void set_registers() {
  if constexpr (kMore) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
  }
}
__device__ __forceinline__ void barrier_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// Announces bytes, and arrives: the phase completes when they are there.
__device__ __forceinline__ void barrier_expect(std::uint64_t* barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
/// One thread: announced bytes from global to shared memory (both aligned to 16).
__device__ __forceinline__ void bulk_copy(void* to, const void* from, std::uint32_t bytes, std::uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
/// One thread: the two in one; `barrier` completes its phase with these bytes.
__device__ __forceinline__ void bulk_load(void* to, const void* from, std::uint32_t bytes, std::uint64_t* barrier) {
  barrier_expect(barrier, bytes);
  bulk_copy(to, from, bytes, barrier);
}
__device__ __forceinline__ void barrier_wait(std::uint64_t* barrier, int phase) {
  asm volatile(
      "{.reg .pred p;\n"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra WAIT;\n"
      "DONE:}\n" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

/// One thread: the other way. `bulk_store_wait`: until shared memory may be written again.
__device__ __forceinline__ void bulk_store(void* to, const void* from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void bulk_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_store_finish() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

/// Four 8×8 matrices of bf16 in accumulator order; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(std::uint32_t at, std::uint32_t m0, std::uint32_t m1, std::uint32_t m2,
                                               std::uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(m0), "r"(m1), "r"(m2),
               "r"(m3)
               : "memory");
}

/// The other way.
__device__ __forceinline__ void load_matrices(std::uint32_t (&to)[4], std::uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at)
               : "memory");
}

// ---- Pairs of bf16 ----------------------------------------------------------------------------------------------

__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  std::uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
__device__ __forceinline__ float low(std::uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high(std::uint32_t word) { return __uint_as_float(word & 0xffff0000u); }
/// The same for float16, of which the solve's operands are made: 11 bits where bf16 has 8.
__device__ __forceinline__ std::uint32_t pack_half(float low, float high) {
  std::uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
__device__ __forceinline__ float2 unpack_half(std::uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}
__device__ __forceinline__ std::uint32_t pack_half_rest(float a, float b, std::uint32_t word) {
  const float2 packed = unpack_half(word);
  return pack_half(a - packed.x, b - packed.y);
}
__device__ __forceinline__ std::uint32_t multiply_half(std::uint32_t a, std::uint32_t b) {
  const __half2 product = __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const std::uint32_t*>(&product);
}
/// a b + c.
__device__ __forceinline__ std::uint32_t multiply_add_half(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const __half2 sum = __hfma2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b),
                              *reinterpret_cast<const __half2*>(&c));
  return *reinterpret_cast<const std::uint32_t*>(&sum);
}
/// What `word` = pack(a, b) lost.
__device__ __forceinline__ std::uint32_t pack_rest(float a, float b, std::uint32_t word) {
  return pack(a - low(word), b - high(word));
}

}  // namespace gka::kernels::cuda::hopper
