// Matrix products of one thread block on the tensor cores (mma.sync), for the passes of the backward that are not the
// solve. A number is kept as the sum of two bfloat16, hi + lo (16 bits of mantissa); what came in as bfloat16 is exact
// and has no lo. A product of two such arrays is two or three products of bfloat16.
//
// Everything warps do together is here: tests/kernels/cuda_on_host has a stand-in with which the passes run on the
// host.
#pragma once

#include "kernels/cuda/block.cuh"

namespace gka::kernels::cuda::hopper::passes {

inline constexpr int kTileThreads = 256;
inline constexpr int kTileWarps = kTileThreads / 32;

__device__ inline char* tile_memory() { return shared_memory(); }
__device__ __forceinline__ int tile_thread() { return static_cast<int>(threadIdx.x); }

template <typename... Parameters, typename... Arguments>
void launch_tiles(void (*kernel)(Parameters...), std::int64_t grid, int shared_bytes, void* stream,
                  Arguments&&... arguments) {
  if (grid <= 0) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "sizing shared memory");
  kernel<<<static_cast<unsigned>(grid), kTileThreads, static_cast<std::size_t>(shared_bytes),
           static_cast<cudaStream_t>(stream)>>>(std::forward<Arguments>(arguments)...);
  check(cudaGetLastError(), "starting a kernel");
}

/// 2^x, exactly 0 from −127 down.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Asks for memory that will be read later, 128 bytes of it or more.
__device__ __forceinline__ void announce_line(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}
__device__ __forceinline__ void announce(const void* from, int bytes) {
  for (int at = tile_thread() * 128; at < bytes; at += kTileThreads * 128) {
    announce_line(static_cast<const char*>(from) + at);
  }
}

/// Sixteen bytes from global to shared memory, or zeros; there after `wait_for_copies` and a barrier.
__device__ __forceinline__ void copy_sixteen(void* to, const void* from, bool zero) {
  const auto at = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(zero ? 0 : 16) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

struct alignas(8) Pair {
  float x, y;
};
struct alignas(16) Quad {
  float x[4];
};
struct alignas(8) Packed {
  std::uint32_t words[2];
};

// Of memory that the kernel does not write: such loads may pass the kernel's own stores.
__device__ __forceinline__ std::uint32_t read_word(const std::uint16_t* p) {
  return __ldg(reinterpret_cast<const unsigned*>(p));
}
__device__ __forceinline__ Packed read_words(const std::uint16_t* p) {
  const uint2 words = __ldg(reinterpret_cast<const uint2*>(p));
  return {words.x, words.y};
}
__device__ __forceinline__ Pair read_pair(const float* p) {
  const float2 pair = __ldg(reinterpret_cast<const float2*>(p));
  return {pair.x, pair.y};
}
__device__ __forceinline__ Quad read_quad(const float* p) {
  const float4 quad = __ldg(reinterpret_cast<const float4*>(p));
  return {quad.x, quad.y, quad.z, quad.w};
}

/// Rows of bfloat16 in shared memory, `ld` apart; ld is an odd multiple of 8, so that eight rows lie in different
/// banks.
struct Rows {
  std::uint16_t* hi;
  std::uint16_t* lo;  // null: hi is all there is
  int ld;

  __device__ __forceinline__ Rows top() const { return {hi, nullptr, ld}; }
  __device__ __forceinline__ Rows from_column(int i) const { return {hi + i, lo == nullptr ? nullptr : lo + i, ld}; }
};

/// Two numbers as bfloat16, the first in the lower half.
__device__ __forceinline__ std::uint32_t pack_pair(float x, float y) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(y), "f"(x));
  return packed;
}
__device__ __forceinline__ Pair unpack_pair(std::uint32_t packed) {
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
}

struct SplitPair {
  std::uint32_t hi, lo;
};
__device__ __forceinline__ SplitPair split_pair(Pair p) {
  const std::uint32_t hi = pack_pair(p.x, p.y);
  const Pair kept = unpack_pair(hi);
  return {hi, pack_pair(p.x - kept.x, p.y - kept.y)};
}

/// Columns `column` and column + 1 (even) of a row.
__device__ __forceinline__ void store_pair(const Rows& to, int row, int column, float x, float y) {
  const int at = row * to.ld + column;
  const SplitPair split = split_pair({x, y});
  *reinterpret_cast<std::uint32_t*>(to.hi + at) = split.hi;
  if (to.lo != nullptr) *reinterpret_cast<std::uint32_t*>(to.lo + at) = split.lo;
}
/// Four columns from a multiple of 4 on.
__device__ __forceinline__ void store_quad(const Rows& to, int row, int column, const Quad& q) {
  const int at = row * to.ld + column;
  const SplitPair a = split_pair({q.x[0], q.x[1]}), b = split_pair({q.x[2], q.x[3]});
  *reinterpret_cast<uint2*>(to.hi + at) = {a.hi, b.hi};
  if (to.lo != nullptr) *reinterpret_cast<uint2*>(to.lo + at) = {a.lo, b.lo};
}
__device__ __forceinline__ Pair load_pair(const Rows& from, int row, int column) {
  const int at = row * from.ld + column;
  Pair value = unpack_pair(*reinterpret_cast<const std::uint32_t*>(from.hi + at));
  if (from.lo != nullptr) {
    const Pair rest = unpack_pair(*reinterpret_cast<const std::uint32_t*>(from.lo + at));
    value = {value.x + rest.x, value.y + rest.y};
  }
  return value;
}

__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], const std::uint16_t* p, bool transposed) {
  const auto at = static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
  if (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at));
  }
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// The sum of all threads' numbers, for every thread; `parts` is room for kTileWarps numbers.
__device__ inline float sum_of_threads(float own, float* parts) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) own += __shfl_xor_sync(0xffffffffu, own, step);
  if (tile_thread() % 32 == 0) parts[tile_thread() / 32] = own;
  sync();
  float total = 0;
#pragma unroll
  for (int w = 0; w < kTileWarps; ++w) total += parts[w];
  sync();
  return total;
}

/// values[c] becomes the sum of values[0 … c], c < 64.
__device__ inline void add_up(double* values) {
  const int c = tile_thread();
  double sum = c < 64 ? values[c] : 0;
#pragma unroll
  for (int reach = 1; reach < 32; reach *= 2) {
    const double other = __shfl_up_sync(0xffffffffu, sum, reach);
    if (c % 32 >= reach) sum += other;
  }
  if (c == 31) values[31] = sum;
  sync();
  if (c >= 32 && c < 64) sum += values[31];
  sync();
  if (c < 64) values[c] = sum;
  sync();
}

/// For every row one warp, four columns a thread: use(row, column, load(row, column), sums) adds to kSums numbers,
/// whose totals finish(row, sums) gets. Loads of several rows are under way at a time.
template <int kSums, typename Load, typename Use, typename Finish>
__device__ __forceinline__ void sum_rows(int rows, int columns, Load&& load, Use&& use, Finish&& finish) {
  constexpr int kAtOnce = 4;
  const int column = tile_thread() % 32 * 4;
  for (int first = tile_thread() / 32; first < rows; first += kTileWarps * kAtOnce) {
    decltype(load(0, 0)) values[kAtOnce];
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      const int row = first + a * kTileWarps;
      if (row < rows && column < columns) values[a] = load(row, column);
    }
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      const int row = first + a * kTileWarps;
      if (row >= rows) continue;
      float sums[kSums] = {};
      if (column < columns) use(row, column, values[a], sums);
#pragma unroll
      for (float& s : sums) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) s += __shfl_xor_sync(0xffffffffu, s, step);
      }
      if (tile_thread() % 32 == 0) finish(row, sums);
    }
  }
}

/// How an operand lies in shared memory: as the rows or as the columns of the matrix it stands for.
enum class Lies : std::uint8_t { as_is, transposed };
/// Which part of A (m, k) is known to be 0: that with k > m, or with k < m.
enum class Zero : std::uint8_t { nowhere, above, below };

/// A place in a product: the pair of numbers at (row, column) and (row, column + 1), and where to find what was kept
/// for the row (r) and for the columns (c, c + 1).
struct At {
  int row, column, r, c;
};

/// kM × kN numbers in the registers of the block's eight warps, kWarpsM of them above each other.
template <int kM, int kN, int kWarpsM>
class Product {
  static constexpr int kWarpsN = kTileWarps / kWarpsM;
  static constexpr int kWarpRows = kM / kWarpsM, kWarpColumns = kN / kWarpsN;
  static constexpr int kTilesM = kWarpRows / 16, kTilesN = kWarpColumns / 8;
  static_assert(kWarpRows % 16 == 0 && kWarpColumns % 16 == 0);

 public:
  /// A number for each row, or column, that this thread has to do with.
  struct OfRows {
    float x[2 * kTilesM];
  };
  struct OfColumns {
    float x[2 * kTilesN];
  };
  static __device__ __forceinline__ OfRows of_rows(const float* values) {
    OfRows own;
#pragma unroll
    for (int i = 0; i < 2 * kTilesM; ++i) own.x[i] = values[row_of(i)];
    return own;
  }
  static __device__ __forceinline__ OfColumns of_columns(const float* values) {
    OfColumns own;
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
      own.x[2 * j] = values[column_of(j)];
      own.x[2 * j + 1] = values[column_of(j) + 1];
    }
    return own;
  }

  __device__ __forceinline__ void clear() {
    each([](const At&, float& x, float& y) { x = y = 0; });
  }

  /// body(at, x, y), which may change the numbers.
  template <typename Body>
  __device__ __forceinline__ void each(Body&& body) {
#pragma unroll
    for (int i = 0; i < 2 * kTilesM; ++i) {
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        body(At{row_of(i), column_of(j), i, 2 * j}, c_[i / 2][j][i % 2 * 2], c_[i / 2][j][i % 2 * 2 + 1]);
      }
    }
  }
  /// The same with the numbers of another one at the same place.
  template <typename Body>
  __device__ __forceinline__ void each_with(const Product& other, Body&& body) {
#pragma unroll
    for (int i = 0; i < 2 * kTilesM; ++i) {
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        const int h = i % 2 * 2;
        body(At{row_of(i), column_of(j), i, 2 * j}, c_[i / 2][j][h], c_[i / 2][j][h + 1], other.c_[i / 2][j][h],
             other.c_[i / 2][j][h + 1]);
      }
    }
  }

  /// += A[kM × k] B[k × kN]. A lies as_is by rows [m][k]; B as_is by rows [k][n].
  template <Lies kA, Lies kB, int kDepth, Zero kZero = Zero::nowhere>
  __device__ __forceinline__ void add(const Rows& a, const Rows& b) {
#pragma unroll
    for (int l = 0; l < kDepth; l += 16) {
      Right right;
      Left left;
      load_right<kB>(right, b.hi, b.ld, l);
      load_left<kA, kZero>(left, a.hi, a.ld, l);
      multiply<kZero>(left, right, l);
      if (b.lo != nullptr) {
        Right rest;
        load_right<kB>(rest, b.lo, b.ld, l);
        multiply<kZero>(left, rest, l);
      }
      if (a.lo == nullptr) continue;
      load_left<kA, kZero>(left, a.lo, a.ld, l);
      multiply<kZero>(left, right, l);
    }
  }
  /// The same where only numbers at or below the diagonal are asked for; the others may be left out.
  template <Lies kA, Lies kB, int kDepth>
  __device__ __forceinline__ void add_lower(const Rows& a, const Rows& b) {
    if (first_column() >= first_row() + kWarpRows) return;
    add<kA, kB, kDepth>(a, b);
  }

  /// += A[kM × kDepth] B with B in global memory: load(n, l) fetches B(l, n) and B(l + 1, n) for even l, and split
  /// makes a SplitPair of it. Called once for each such pair if kWarpsM is 1. kLo: B has a lo. Loads of kAtOnce steps
  /// of 16 are under way at a time.
  template <int kDepth, int kAtOnce, bool kLo, typename Load, typename Split>
  __device__ __forceinline__ void add_from(const Rows& a, Load&& load, Split&& split) {
    static_assert(kDepth % (16 * kAtOnce) == 0);
#pragma unroll 1
    for (int first = 0; first < kDepth; first += 16 * kAtOnce) {
      decltype(load(0, 0)) b[kAtOnce][kTilesN][2];
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            b[s][j][h] = load(first_column() + 8 * j + lane() / 4, first + 16 * s + 8 * h + lane() % 4 * 2);
          }
        }
      }
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        const int l = first + 16 * s;
        Right right, rest;
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const SplitPair part = split(b[s][j][h]);
            right[j / 2][j % 2 * 2 + h] = part.hi;
            rest[j / 2][j % 2 * 2 + h] = part.lo;
          }
        }
        Left left;
        load_left<Lies::as_is, Zero::nowhere>(left, a.hi, a.ld, l);
        multiply<Zero::nowhere>(left, right, l);
        if (kLo) multiply<Zero::nowhere>(left, rest, l);
        if (a.lo == nullptr) continue;
        load_left<Lies::as_is, Zero::nowhere>(left, a.lo, a.ld, l);
        multiply<Zero::nowhere>(left, right, l);
      }
    }
  }

  /// out[row] = Σ over columns of term(at, x, y); `parts` is room for kTileWarps × kM numbers. Barriers around.
  template <typename Term>
  __device__ __forceinline__ void row_sums(float* parts, float* out, Term&& term) {
    static_assert(kWarpsM == 1);
#pragma unroll
    for (int i = 0; i < 2 * kTilesM; ++i) {
      float total = 0;
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        total += term(At{row_of(i), column_of(j), i, 2 * j}, c_[i / 2][j][i % 2 * 2], c_[i / 2][j][i % 2 * 2 + 1]);
      }
      total += __shfl_xor_sync(0xffffffffu, total, 1);
      total += __shfl_xor_sync(0xffffffffu, total, 2);
      if (lane() % 4 == 0) parts[warp() * kM + row_of(i)] = total;
    }
    sync();
    for (int row = tile_thread(); row < kM; row += kTileThreads) {
      float total = 0;
#pragma unroll
      for (int w = 0; w < kTileWarps; ++w) total += parts[w * kM + row];
      out[row] = total;
    }
    sync();
  }

  /// out[column] = Σ over the rows at or below the diagonal; `parts` is room for kWarpsM × kN numbers. Barriers around.
  __device__ __forceinline__ void lower_column_sums(float* parts, float* out) {
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
      float x = 0, y = 0;
#pragma unroll
      for (int i = 0; i < 2 * kTilesM; ++i) {
        if (row_of(i) >= column_of(j)) x += c_[i / 2][j][i % 2 * 2];
        if (row_of(i) >= column_of(j) + 1) y += c_[i / 2][j][i % 2 * 2 + 1];
      }
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, step);
        y += __shfl_xor_sync(0xffffffffu, y, step);
      }
      if (lane() / 4 == 0) {
        parts[warp() / kWarpsN * kN + column_of(j)] = x;
        parts[warp() / kWarpsN * kN + column_of(j) + 1] = y;
      }
    }
    sync();
    for (int column = tile_thread(); column < kN; column += kTileThreads) {
      float total = 0;
#pragma unroll
      for (int w = 0; w < kWarpsM; ++w) total += parts[w * kN + column];
      out[column] = total;
    }
    sync();
  }

 private:
  float c_[kTilesM][kTilesN][4];

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / 32; }
  static __device__ __forceinline__ int first_row() { return warp() / kWarpsN * kWarpRows; }
  static __device__ __forceinline__ int first_column() { return warp() % kWarpsN * kWarpColumns; }
  static __device__ __forceinline__ int row_of(int i) { return first_row() + 8 * i + lane() / 4; }
  static __device__ __forceinline__ int column_of(int j) { return first_column() + 8 * j + lane() % 4 * 2; }

  using Left = std::uint32_t[kTilesM][4];
  using Right = std::uint32_t[kTilesN / 2][4];

  /// Whether the tile of A with rows 16 · i … and columns l … may have numbers other than 0.
  template <Zero kZero>
  static __device__ __forceinline__ bool counts(int i, int l) {
    static_assert(kZero == Zero::nowhere || kWarpsM == 1);
    return !(kZero == Zero::above && l > 16 * i) && !(kZero == Zero::below && l < 16 * i);
  }

  /// Columns l … of A, all rows of the warp.
  template <Lies kA, Zero kZero>
  static __device__ __forceinline__ void load_left(Left& r, const std::uint16_t* a, int ld, int l) {
    const int eight = lane() % 8, second = lane() / 8 % 2, third = lane() / 16;
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
      if (!counts<kZero>(i, l)) continue;
      const int m = first_row() + 16 * i;
      if constexpr (kA == Lies::as_is) {
        load_matrices(r[i], a + (m + eight + 8 * second) * ld + l + 8 * third, false);
      } else {
        load_matrices(r[i], a + (l + eight + 8 * third) * ld + m + 8 * second, true);
      }
    }
  }

  /// Rows l … of B, all columns of the warp.
  template <Lies kB>
  static __device__ __forceinline__ void load_right(Right& r, const std::uint16_t* b, int ld, int l) {
    const int eight = lane() % 8, second = lane() / 8 % 2, third = lane() / 16;
#pragma unroll
    for (int j = 0; j < kTilesN / 2; ++j) {
      const int n = first_column() + 16 * j;
      if constexpr (kB == Lies::as_is) {
        load_matrices(r[j], b + (l + eight + 8 * second) * ld + n + 8 * third, true);
      } else {
        load_matrices(r[j], b + (n + eight + 8 * third) * ld + l + 8 * second, false);
      }
    }
  }

  template <Zero kZero>
  __device__ __forceinline__ void multiply(const Left& left, const Right& right, int l) {
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
      if (!counts<kZero>(i, l)) continue;
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        multiply_add(c_[i][j], left[i], right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
};

}  // namespace gka::kernels::cuda::hopper::passes
