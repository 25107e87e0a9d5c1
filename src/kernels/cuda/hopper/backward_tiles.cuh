// What a warpgroup does together in the passes of the backward that are not the solve: products on the tensor cores
// (wgmma), tiles of float16 in shared memory, sums over rows and columns. An operand is one float16 (11 bits) whose
// row, or tile, is scaled by a power of two; a block is one warpgroup and has a chunk of 64 tokens.
//
// All that threads do together is here: tests/kernels/cuda_on_host has a stand-in with which the passes run on the
// host.
#pragma once

#include "kernels/cuda/hopper/backward_layout.cuh"
#include "kernels/cuda/hopper/wgmma.cuh"

namespace gka::kernels::cuda::hopper::passes {

inline constexpr int kTileThreads = 128;

__device__ __forceinline__ int tile_thread() { return static_cast<int>(threadIdx.x); }
/// The block's shared memory, from a multiple of 1,024 on: what is swizzled begins at such.
__device__ inline char* tile_memory() {
  extern __shared__ __align__(1024) char tile_bytes[];
  return tile_bytes;
}

template <typename... Parameters, typename... Arguments>
void launch_tiles(void (*kernel)(Parameters...), std::int64_t grid, int shared_bytes, void* stream,
                  Arguments&&... arguments) {
  launch_blocks_of<kTileThreads>(kernel, grid, shared_bytes, stream, std::forward<Arguments>(arguments)...);
}

/// 2^x, exactly 0 from −127 down.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// Sets bits that several threads may set at once.
__device__ __forceinline__ void mark(int* word, int bits) { atomicOr(word, bits); }

// Of memory that the kernel does not write: such loads may pass the kernel's own stores.
__device__ __forceinline__ std::uint32_t read_word(const std::uint16_t* p) {
  return __ldg(reinterpret_cast<const unsigned*>(p));
}
__device__ __forceinline__ Packed read_words(const std::uint16_t* p) {
  const uint2 words = __ldg(reinterpret_cast<const uint2*>(p));
  return {words.x, words.y};
}
__device__ __forceinline__ Unit read_unit(const std::uint16_t* p) {
  const uint4 words = __ldg(reinterpret_cast<const uint4*>(p));
  return {words.x, words.y, words.z, words.w};
}
__device__ __forceinline__ Pair read_pair(const float* p) {
  const float2 pair = __ldg(reinterpret_cast<const float2*>(p));
  return {pair.x, pair.y};
}
__device__ __forceinline__ Quad read_quad(const float* p) {
  const float4 quad = __ldg(reinterpret_cast<const float4*>(p));
  return {quad.x, quad.y, quad.z, quad.w};
}

__device__ __forceinline__ std::uint32_t pack_halves(float x, float y) { return pack_half(x, y); }
__device__ __forceinline__ std::uint32_t pack_bfloats(float x, float y) { return pack(x, y); }

// ---- Copies -----------------------------------------------------------------------------------------------------

/// Sixteen bytes from global to shared memory, or zeros; the thread that asked has them after `wait_for_copies`.
__device__ __forceinline__ void copy_sixteen(void* to, const void* from, bool zero) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(zero ? 0 : 16)
               : "memory");
}

/// Bytes from global to shared memory, both at multiples of 16.
struct Piece {
  void* to;
  const void* from;
  int bytes;
};

/// Pieces that are on their way into shared memory.
struct Arrival {
  std::uint64_t barrier;

  __device__ void init() {
    if (tile_thread() == 0) {
      barrier_init(&barrier);
      barrier_fence();
    }
  }
  /// After a barrier behind the last use of where they go in ordinary loads and products.
  template <typename... Pieces>
  __device__ void request(const Pieces&... pieces) {
    if (tile_thread() != 0) return;
    publish();
    const std::uint32_t at = shared_address(&barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"((pieces.bytes + ...))
                 : "memory");
    (start(pieces, at), ...);
  }
  __device__ void wait(int phase) { barrier_wait(&barrier, phase); }

 private:
  static __device__ void start(const Piece& piece, std::uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(piece.to)),
                 "l"(piece.from), "r"(piece.bytes), "r"(barrier)
                 : "memory");
  }
};

/// A tile to global memory, after `publish` and a barrier.
__device__ inline void send_tile(void* to, const void* from, int bytes) {
  if (tile_thread() == 0) bulk_store(to, from, static_cast<std::uint32_t>(bytes));
}
/// Until it is there.
__device__ inline void finish_sending() {
  if (tile_thread() == 0) bulk_store_finish();
}
/// Until what was sent has been read. A barrier must follow before it is overwritten.
__device__ inline void wait_until_sent() {
  if (tile_thread() == 0) bulk_store_wait();
}

// ---- Tiles ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ std::uint64_t described(const Tile& tile) { return descriptor(tile.data, tile.rows * 128); }

/// For every unit of eight columns of 64 rows: measure(row, unit, load(row, unit), of_row) adds to what its row has in
/// common, and finish(row, unit, loaded, of_row) gets it. kAtOnce loads are under way at a time.
template <int kTops, int kSums, int kAtOnce, typename Load, typename Measure, typename Finish>
__device__ __forceinline__ void sweep_rows(Load&& load, Measure&& measure, Finish&& finish) {
  constexpr int kUnits = kWidth / 8, kApart = kTileThreads / kUnits;
  const int unit = tile_thread() % kUnits;
#pragma unroll 1
  for (int first = tile_thread() / kUnits; first < kChunk; first += kApart * kAtOnce) {
    decltype(load(0, 0)) values[kAtOnce];
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) values[a] = load(first + kApart * a, unit);
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      OfRow<kTops, kSums> of{};
      measure(first + kApart * a, unit, values[a], of);
#pragma unroll
      for (int reach = kUnits / 2; reach > 0; reach /= 2) {
#pragma unroll
        for (int i = 0; i < kTops; ++i) of.top[i] = most(of.top[i], __shfl_xor_sync(0xffffffffu, of.top[i], reach));
#pragma unroll
        for (int i = 0; i < kSums; ++i) of.sum[i] += __shfl_xor_sync(0xffffffffu, of.sum[i], reach);
      }
      finish(first + kApart * a, unit, values[a], of);
    }
  }
}

/// The largest of all threads' words, for every thread; `parts` is room for 4. A barrier inside.
__device__ __forceinline__ std::uint32_t most_of_threads(std::uint32_t own, std::uint32_t* parts) {
#pragma unroll
  for (int reach = 16; reach > 0; reach /= 2) own = most(own, __shfl_xor_sync(0xffffffffu, own, reach));
  if (tile_thread() % 32 == 0) parts[tile_thread() / 32] = own;
  sync();
  return most(most(parts[0], parts[1]), most(parts[2], parts[3]));
}
/// Every unit of a state: body(row, unit).
template <typename Body>
__device__ __forceinline__ void each_unit_of_state(Body&& body) {
  constexpr int kUnits = kWidth / 8;
#pragma unroll 4
  for (int i = tile_thread(); i < kWidth * kUnits; i += kTileThreads) body(i / kUnits, i % kUnits);
}

/// The sum of all threads' numbers, for every thread; `parts` is room for 4 numbers.
__device__ inline float sum_of_threads(float own, float* parts) {
  own = sum_lanes(own);
  if (tile_thread() % 32 == 0) parts[tile_thread() / 32] = own;
  sync();
  return parts[0] + parts[1] + (parts[2] + parts[3]);
}

/// The sum of values[0 … c] in thread c < 64, of which each such thread gives its own; `carry` is room for one.
/// Barriers inside.
__device__ inline double add_up(double value, double* carry) {
  const int c = tile_thread();
#pragma unroll
  for (int reach = 1; reach < 32; reach *= 2) {
    const double other = __shfl_up_sync(0xffffffffu, value, reach);
    if (c % 32 >= reach) value += other;
  }
  sync();
  if (c == 31) *carry = value;
  sync();
  return c >= 32 && c < 64 ? value + *carry : value;
}
/// body(c, value of thread c) for the 64 threads of a scan.
template <typename Value, typename Body>
__device__ __forceinline__ void scan_tokens(double* carry, Value&& value, Body&& body) {
  const int c = tile_thread();
  const double sum = add_up(c < kChunk ? value(c) : 0, carry);
  if (c < kChunk) body(c, sum);
  sync();
}

// ---- Products ---------------------------------------------------------------------------------------------------

/// A 64×64 left operand in registers: float16, rows scaled by powers of two; kLo: and what that lost.
template <bool kLo>
struct Left {
  std::uint32_t hi[16], lo[kLo ? 16 : 1];
  float factor[2];  // what a row of a product is to be multiplied by
};

/// 64 · kBlocks rows and kN columns in the registers of the warpgroup.
template <int kBlocks, int kN>
class Product {
 public:
  /// A number for each row, or column, that this thread has to do with.
  struct OfRows {
    float x[2 * kBlocks];
  };
  struct OfColumns {
    float x[kN / 4];
  };
  static __device__ __forceinline__ OfRows of_rows(const float* values) {
    OfRows own;
#pragma unroll
    for (int r = 0; r < 2 * kBlocks; ++r) own.x[r] = values[first_row() + 64 * (r / 2) + 8 * (r % 2)];
    return own;
  }
  static __device__ __forceinline__ OfColumns of_columns(const float* values) {
    OfColumns own;
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      const Pair pair = *reinterpret_cast<const Pair*>(values + 8 * i + first_column());
      own.x[2 * i] = pair.x;
      own.x[2 * i + 1] = pair.y;
    }
    return own;
  }

  /// body(at, x, y), which may change the numbers.
  template <typename Body>
  __device__ __forceinline__ void each(Body&& body) {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < kN / 2; i += 2) body(at(m, i), c_[m][i], c_[m][i + 1]);
    }
  }
  /// The same with the numbers of another one at the same place.
  template <typename Body>
  __device__ __forceinline__ void each_with(const Product& other, Body&& body) {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < kN / 2; i += 2) {
        body(at(m, i), c_[m][i], c_[m][i + 1], other.c_[m][i], other.c_[m][i + 1]);
      }
    }
  }

  /// = A B, with A of 64 rows and 128 columns; kAdd: += A B.
  template <Lies kLies, bool kAdd = false>
  __device__ __forceinline__ void multiply(const Tile& a, const Tile& b) {
    static_assert(kBlocks == 1);
    const std::uint64_t left = described(a), right = described(b);
    begin<kAdd>();
#pragma unroll
    for (int s = 0; s < kWidth / 16; ++s) {
      mma<false, kLies == Lies::by_depth, true>(
          c_[0], k_major_step(left, s, a.rows),
          kLies == Lies::by_depth ? mn_major_step(right, s) : k_major_step(right, s, b.rows), kAdd || s > 0);
    }
    end();
  }
  /// = A B with A in registers; B has 64 rows, which are summed over.
  template <bool kLo>
  __device__ __forceinline__ void multiply(const Left<kLo>& a, const Tile& b) {
    static_assert(kBlocks == 1);
    const std::uint64_t right = described(b);
    begin<false>();
#pragma unroll
    for (int s = 0; s < kChunk / 16; ++s) mma<true, true>(c_[0], a.hi + 4 * s, mn_major_step(right, s), s > 0);
    if constexpr (kLo) {
#pragma unroll
      for (int s = 0; s < kChunk / 16; ++s) mma<true, true>(c_[0], a.lo + 4 * s, mn_major_step(right, s));
    }
    end();
  }
  /// = AᵀB over the 64 rows of both; kAdd: += AᵀB.
  template <bool kAdd>
  __device__ __forceinline__ void outer(const Tile& a, const Tile& b) {
    const std::uint64_t right = described(b);
    begin<kAdd>();
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      const std::uint64_t left = descriptor(a.data + m * a.rows * 64, a.rows * 128);
#pragma unroll
      for (int s = 0; s < kChunk / 16; ++s) {
        mma<true, true, true>(c_[m], mn_major_step(left, s), mn_major_step(right, s), kAdd || s > 0);
      }
    }
    end();
  }

  /// The numbers value(at, x, y) as a left operand.
  template <bool kLo, typename Value>
  __device__ __forceinline__ Left<kLo> as_left(Value&& value) {
    static_assert(kBlocks == 1 && kN == kChunk);
    float v[kN / 2];
    float top[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kN / 2; i += 2) {
      const Pair pair = value(at(0, i), c_[0][i], c_[0][i + 1]);
      v[i] = pair.x;
      v[i + 1] = pair.y;
      top[i / 2 % 2] = fmaxf(top[i / 2 % 2], fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
    Left<kLo> left;
    float up[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 1));
      top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffffu, top[r], 2));
      const Scale scale = scale_of(float_to_bits(top[r]));
      left.factor[r] = scale.down;
      up[r] = scale.up;
    }
#pragma unroll
    for (int i = 0; i < kN / 2; i += 2) {
      const float x = v[i] * up[i / 2 % 2], y = v[i + 1] * up[i / 2 % 2];
      left.hi[i / 2] = pack_half(x, y);
      if constexpr (kLo) left.lo[i / 2] = pack_half_rest(x, y, left.hi[i / 2]);
    }
    return left;
  }

  /// out[row] = Σ over columns of term(at, x, y). A barrier must follow.
  template <typename Term>
  __device__ __forceinline__ void row_sums(float* out, Term&& term) {
    static_assert(kBlocks == 1);
    float total[2] = {0, 0};
    each([&](const At& at, float x, float y) { total[at.r] += term(at, x, y); });
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[r] += __shfl_xor_sync(0xffffffffu, total[r], 1);
      total[r] += __shfl_xor_sync(0xffffffffu, total[r], 2);
      if (tile_thread() % 4 == 0) out[first_row() + 8 * r] = total[r];
    }
  }
  /// out[column] = Σ over rows; `parts` is room for 4 · kN numbers. Barriers inside; one must follow.
  __device__ __forceinline__ void column_sums(float* parts, float* out) {
    static_assert(kBlocks == 1);
    const int warp = tile_thread() / 32;
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      float x = c_[0][4 * i] + c_[0][4 * i + 2], y = c_[0][4 * i + 1] + c_[0][4 * i + 3];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, step);
        y += __shfl_xor_sync(0xffffffffu, y, step);
      }
      if (tile_thread() % 32 < 4) {
        parts[warp * kN + 8 * i + first_column()] = x;
        parts[warp * kN + 8 * i + first_column() + 1] = y;
      }
    }
    sync();
    const int c = tile_thread();
    if (c < kN) out[c] = parts[c] + parts[kN + c] + (parts[2 * kN + c] + parts[3 * kN + c]);
  }
  /// The largest bits of a number's size, for every thread; `parts` is room for 4 words. A barrier inside.
  __device__ __forceinline__ std::uint32_t largest(std::uint32_t* parts) {
    std::uint32_t top = 0;
    each([&](const At&, float x, float y) { top = most(top, most(size_bits(x), size_bits(y))); });
    return most_of_threads(top, parts);
  }
  /// As a tile, times `by`.
  __device__ __forceinline__ void store(const Tile& to, float by) {
    const int lane = tile_thread() % 32, matrix = lane / 8, row = tile_thread() / 32 * 16 + matrix % 2 * 8 + lane % 8;
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int i = 0; i < kN / 2; i += 8) {
        std::uint32_t w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = pack_half(c_[m][i + 2 * j] * by, c_[m][i + 2 * j + 1] * by);
        store_matrices(shared_address(to.at(64 * m + row, (i / 4 + matrix / 2) * 8)), w[0], w[1], w[2], w[3]);
      }
    }
  }

 private:
  float c_[kBlocks][kN / 2];

  static __device__ __forceinline__ int first_row() { return tile_thread() / 32 * 16 + tile_thread() % 32 / 4; }
  static __device__ __forceinline__ int first_column() { return tile_thread() % 4 * 2; }
  static __device__ __forceinline__ At at(int m, int i) {
    return {first_row() + 64 * m + 8 * (i / 2 % 2), i / 4 * 8 + first_column(), 2 * m + i / 2 % 2, i / 4 * 2};
  }
  template <bool kAdd>
  __device__ __forceinline__ void begin() {
    if constexpr (kAdd) {
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) hold(c_[m]);
    }
    wgmma_fence();
  }
  __device__ __forceinline__ void end() {
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) hold(c_[m]);
  }
};

}  // namespace gka::kernels::cuda::hopper::passes
