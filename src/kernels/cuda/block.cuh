// What one thread block does together: loops over elements, sums, matrix products, and where its arrays lie. Every
// function here that writes ends with a barrier, so what one leaves behind the next one may read.
#pragma once

#include "gka/kernels.h"
#include "kernels/cuda/device.cuh"
#include "kernels/views.h"

namespace gka::kernels::cuda {

/// Tokens of a chunk at most. Arrays of one vector per token keep *tokens as lanes*: D rows of kStride numbers, the
/// first kMaxChunk of them lanes. Rows are four numbers longer than that, or every row would start in the same bank.
inline constexpr int kMaxChunk = 64;
inline constexpr int kStride = kMaxChunk + 4;
/// Numbers that are loaded at a time.
inline constexpr int kVector = 4;

__host__ __device__ constexpr int padded(int n) { return (n + kVector - 1) / kVector * kVector; }

template <typename T>
struct alignas(16) Vec {
  T x[kVector];
};

template <typename T>
__device__ __forceinline__ Vec<T> load(const T* p) {
  return *reinterpret_cast<const Vec<T>*>(p);
}
template <typename T>
__device__ __forceinline__ void store(T* p, const Vec<T>& v) {
  *reinterpret_cast<Vec<T>*>(p) = v;
}
template <typename T>
__device__ __forceinline__ Vec<T> broadcast(T value) {
  return {value, value, value, value};
}
template <typename T>
__device__ __forceinline__ Vec<T> operator+(Vec<T> a, const Vec<T>& b) {
  for (int i = 0; i < kVector; ++i) a.x[i] += b.x[i];
  return a;
}
template <typename T>
__device__ __forceinline__ Vec<T> operator-(Vec<T> a, const Vec<T>& b) {
  for (int i = 0; i < kVector; ++i) a.x[i] -= b.x[i];
  return a;
}
template <typename T>
__device__ __forceinline__ Vec<T> operator*(Vec<T> a, const Vec<T>& b) {
  for (int i = 0; i < kVector; ++i) a.x[i] *= b.x[i];
  return a;
}
template <typename T>
__device__ __forceinline__ Vec<T> operator/(Vec<T> a, const Vec<T>& b) {
  for (int i = 0; i < kVector; ++i) a.x[i] /= b.x[i];
  return a;
}

template <typename T>
__device__ inline bool finite(T x) {
  return x - x == 0;
}
template <typename T>
__host__ __device__ constexpr T least(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
__host__ __device__ constexpr T most(T a, T b) {
  return a < b ? b : a;
}

__device__ inline double not_a_number() { return bits_to_float(0x7fc00000u); }

/// Calls body(T{}) with the type a call computes in. Float64 can be left out of a build (GKA_CUDA_FLOAT64): it is half
/// of what there is to compile.
template <typename Body>
void with_arithmetic(DType states, Body&& body) {
#if defined(GKA_CUDA_FLOAT64) && !GKA_CUDA_FLOAT64
  if (states == DType::float64) throw std::runtime_error("gka: built without float64 on the GPU (GKA_CUDA_FLOAT64)");
#else
  if (states == DType::float64) return body(double{});
#endif
  body(float{});
}

// ---- Loops ------------------------------------------------------------------------------------------------------

template <typename Body>
__device__ __forceinline__ void each(int n, Body&& body) {
  for (int i = thread(); i < n; i += kThreads) body(i);
  sync();
}

/// put(i, get(i)) for every i, several of the loads under way at a time: for what lies in global memory.
template <typename Get, typename Put>
__device__ __forceinline__ void move(int n, Get&& get, Put&& put) {
  constexpr int kAtOnce = 8;
  for (int first = thread(); first < n; first += kAtOnce * kThreads) {
    decltype(get(0)) values[kAtOnce];
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {  // behind the end its own first one once more: nobody else writes that
      values[a] = get(first + a * kThreads < n ? first + a * kThreads : first);
    }
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      if (first + a * kThreads < n) put(first + a * kThreads, values[a]);
    }
  }
  sync();
}

/// body(i, c, at) for every row i and lane c of an array of lanes.
template <typename Body>
__device__ __forceinline__ void each_lane(int rows, int lanes, Body&& body) {
  for (int n = thread(); n < rows * kMaxChunk; n += kThreads) {
    const int i = n / kMaxChunk, c = n % kMaxChunk;
    if (c < lanes) body(i, c, i * kStride + c);
  }
  sync();
}

/// The same, kVector lanes from c on at a time.
template <typename Body>
__device__ __forceinline__ void each_vector(int rows, int lanes, Body&& body) {
  constexpr int kAcross = kMaxChunk / kVector;
  for (int n = thread(); n < rows * kAcross; n += kThreads) {
    const int i = n / kAcross, c = n % kAcross * kVector;
    if (c < lanes) body(i, c, i * kStride + c);
  }
  sync();
}

/// What has to be done one after another.
template <typename Body>
__device__ __forceinline__ void alone(Body&& body) {
  if (thread() == 0) body();
  sync();
}

template <typename T>
__device__ void clear_lanes(T* values, int rows, int lanes) {
  each_vector(rows, lanes, [&](int, int, int at) { store(values + at, Vec<T>{}); });
}
template <typename T>
__device__ void copy_lanes(const T* from, int rows, int lanes, T* to) {
  each_vector(rows, lanes, [&](int, int, int at) { store(to + at, load(from + at)); });
}

// ---- Memory -----------------------------------------------------------------------------------------------------

/// Room at the head of shared memory for sums across threads.
inline constexpr int kScratchBytes = 8 * most(kThreads, kMaxChunk * 4);
__device__ inline double* scratch() { return reinterpret_cast<double*>(shared_memory()); }

/// Hands out a block's arrays: from shared memory while there is some, then from the block's part of global memory
/// (which stays in the second-level cache). Whoever asks first gets the fast memory. The host runs the same requests to
/// learn how much of each a kernel needs.
struct Arena {
  char* fast = nullptr;
  std::int64_t fast_limit = 0;
  char* slow = nullptr;
  std::int64_t fast_used = 0;
  std::int64_t slow_used = 0;

  template <typename T>
  __host__ __device__ T* take(std::int64_t n) {
    // A tile at the edge of a matrix reads, and drops, up to seven numbers behind it.
    const std::int64_t bytes = ((n + 7) * static_cast<std::int64_t>(sizeof(T)) + 15) / 16 * 16;
    if (fast_used + bytes <= fast_limit) {
      fast_used += bytes;
      return reinterpret_cast<T*>(fast + (fast_used - bytes));
    }
    slow_used += bytes;
    return reinterpret_cast<T*>(slow + (slow_used - bytes));
  }
};

// ---- Elements of any type ---------------------------------------------------------------------------------------

template <typename T, DType kType>
__device__ __forceinline__ T read_as(const void* data, std::int64_t at) {
  if constexpr (kType == DType::float64) {
    return static_cast<T>(static_cast<const double*>(data)[at]);
  } else if constexpr (kType == DType::float32) {
    return static_cast<T>(static_cast<const float*>(data)[at]);
  } else if constexpr (kType == DType::float16) {
    return static_cast<T>(half_to_float(static_cast<const std::uint16_t*>(data)[at]));
  } else {
    const std::uint32_t upper = static_cast<const std::uint16_t*>(data)[at];
    return static_cast<T>(bits_to_float(upper << 16));
  }
}

template <DType kType>
struct Storage {
  static constexpr DType type = kType;
};

/// Calls body(Storage<dtype>{}): what branches on the type does so once, outside the loop.
template <typename Body>
__device__ __forceinline__ decltype(auto) with_storage(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::float64: return body(Storage<DType::float64>{});
    case DType::float32: return body(Storage<DType::float32>{});
    case DType::float16: return body(Storage<DType::float16>{});
    case DType::bfloat16: break;
  }
  return body(Storage<DType::bfloat16>{});
}

template <typename T>
__device__ T read(const View& view, std::int64_t at) {
  return with_storage(view.dtype, [&](auto storage) { return read_as<T, decltype(storage)::type>(view.data, at); });
}

/// Through float32 for the 16-bit types, to the nearest, ties to even.
template <typename T>
__device__ void write(const View& view, std::int64_t at, T value) {
  switch (view.dtype) {
    case DType::float64: static_cast<double*>(view.data)[at] = static_cast<double>(value); return;
    case DType::float32: static_cast<float*>(view.data)[at] = static_cast<float>(value); return;
    case DType::float16: static_cast<std::uint16_t*>(view.data)[at] = float_to_half(static_cast<float>(value)); return;
    case DType::bfloat16: break;
  }
  const std::uint32_t bits = float_to_bits(static_cast<float>(value));
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const std::uint32_t rounded = nan ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  static_cast<std::uint16_t*>(view.data)[at] = static_cast<std::uint16_t>(rounded);
}

// ---- Sums -------------------------------------------------------------------------------------------------------

/// The sum of term(i) over i in [0, n), the same for every thread.
template <typename Term>
__device__ double sum(int n, Term&& term) {
  constexpr int kLast = 16;
  double* parts = scratch();
  double own = 0;
  for (int i = thread(); i < n; i += kThreads) own += term(i);
  parts[thread()] = own;
  sync();
  double folded = 0;
  if (thread() < kLast) {
    for (int i = thread(); i < kThreads; i += kLast) folded += parts[i];
  }
  sync();
  if (thread() < kLast) parts[thread()] = folded;
  sync();
  double total = 0;
  for (int i = 0; i < least(kLast, kThreads); ++i) total += parts[i];
  sync();
  return total;
}

/// ‖m‖_F in float64 whatever the scale of m.
template <typename T>
__device__ __noinline__ double frobenius(const T* m, int n) {
  const auto norm = [&](double scale) { return sqrt(sum(n, [&](int i) { return (m[i] * scale) * (m[i] * scale); })); };
  const double plain = norm(1.0);
  if constexpr (sizeof(T) == 8) {
    // Squares of float64 leave the range of float64; rescale by a power of two and try again.
    if (plain < 1e-140) return norm(0x1p+500) * 0x1p-500;
    if (plain > 1e+140) return norm(0x1p-500) * 0x1p+500;
  }
  return plain;
}

template <typename T>
__device__ __noinline__ double inner_product(const T* a, const T* b, int n) {
  return sum(n, [&](int i) { return static_cast<double>(a[i]) * b[i]; });
}

/// out[c] = Σ_i a[i][c] b[i][c], one dot product per token. A lane's sum does not depend on how many lanes there are.
template <typename T>
__device__ __noinline__ void lane_dot(const T* a, const T* b, int n, int lanes, T* out) {
  constexpr int kParts = 4;
  T* parts = reinterpret_cast<T*>(scratch());
  each(kParts * kMaxChunk, [&](int at) {
    const int part = at / kMaxChunk, c = at % kMaxChunk;
    T total = 0;
#pragma unroll 8
    for (int i = part; i < n; i += kParts) total += c < lanes ? a[i * kStride + c] * b[i * kStride + c] : T{0};
    parts[at] = total;
  });
  each(lanes, [&](int c) {
    out[c] = (parts[c] + parts[kMaxChunk + c]) + (parts[2 * kMaxChunk + c] + parts[3 * kMaxChunk + c]);
  });
}

// ---- Matrix products --------------------------------------------------------------------------------------------

/// A(i, l) = data[i·row + l·step]; one of the two is 1, the other a multiple of kVector.
template <typename T>
struct Left {
  const T* data;
  int row;
  int step;

  __device__ __forceinline__ Left from_row(int i) const { return {data + i * row, row, step}; }
};

/// kRows × kVector numbers of a product, in registers.
template <typename T, int kRows>
struct Tile {
  Vec<T> acc[kRows];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) acc[r] = Vec<T>{};
  }

  /// acc += A[0 … rows, 0 … k) · B[0 … k), both from the tile's first row and column on.
  __device__ __forceinline__ void multiply(const Left<T>& a, int rows, const T* b, int ldb, int k) {
    a.row == 1 ? multiply_columns(a.data, a.step, b, ldb, k) : multiply_rows(a.data, a.row, rows, b, ldb, k);
  }

 private:
  /// A's columns contiguous; behind the last row it may read what it does not use.
  __device__ __forceinline__ void multiply_columns(const T* a, int lda, const T* b, int ldb, int k) {
#pragma unroll 4
    for (int l = 0; l < k; ++l) {
      Vec<T> column[kRows / kVector];
#pragma unroll
      for (int r = 0; r < kRows / kVector; ++r) column[r] = load(a + l * lda + r * kVector);
      const Vec<T> row = load(b + l * ldb);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) acc[r].x[j] += column[r / kVector].x[r % kVector] * row.x[j];
      }
    }
  }

  /// A's rows contiguous.
  __device__ __forceinline__ void multiply_rows(const T* a, int lda, int rows, const T* b, int ldb, int k) {
    int at[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) at[r] = least(r, rows - 1) * lda;
    int l = 0;
    for (; l + kVector <= k; l += kVector) {
      Vec<T> block[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) block[r] = load(a + at[r] + l);
#pragma unroll
      for (int n = 0; n < kVector; ++n) {
        const Vec<T> row = load(b + (l + n) * ldb);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int j = 0; j < kVector; ++j) acc[r].x[j] += block[r].x[n] * row.x[j];
        }
      }
    }
    for (; l < k; ++l) {
      const Vec<T> row = load(b + l * ldb);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) acc[r].x[j] += a[at[r] + l] * row.x[j];
      }
    }
  }
};

/// value · zeta, in two steps where zeta itself would lose bits to underflow before the product does; a zeta of 0
/// forgets, whatever it was.
template <typename T>
__device__ __forceinline__ T fade(T value, double zeta) {
  if (zeta == 0) return T{0};
  if (zeta < (sizeof(T) == 8 ? 0x1p-511 : 0x1p-63)) {
    return value * static_cast<T>(sqrt(zeta)) * static_cast<T>(sqrt(zeta));
  }
  return value * static_cast<T>(zeta);
}

/// Calls body(i, rows, j) for the tiles of an m × n matrix: rows i … i + rows − 1, kVector columns from j on.
template <int kRows, typename Body>
__device__ __forceinline__ void each_tile(int m, int n, Body&& body) {
  const int across = n / kVector, tiles = (m + kRows - 1) / kRows * across;
  for (int t = thread(); t < tiles; t += kThreads) {
    const int i = t / across * kRows;
    body(i, least(kRows, m - i), t % across * kVector);
  }
  sync();
}

template <typename T, int kRows>
__device__ __noinline__ void gemm_tiles(int m, int n, int k, Left<T> a, const T* b, int ldb, T* c, int ldc,
                                        double keep) {
  each_tile<kRows>(m, n, [&](int i, int rows, int j) {
    Tile<T, kRows> tile;
    tile.clear();
    if (keep != 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r < rows) tile.acc[r] = load(c + (i + r) * ldc + j);
#pragma unroll
        for (int v = 0; keep != 1 && v < kVector; ++v) tile.acc[r].x[v] = fade(tile.acc[r].x[v], keep);
      }
    }
    tile.multiply(a.from_row(i), rows, b + j, ldb, k);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < rows) store(c + (i + r) * ldc + j, tile.acc[r]);
    }
  });
}

/// Tall tiles need fewer loads, but there have to be enough of them to go round, and registers.
template <typename T>
__device__ bool tall_tiles(int m, int n) {
  return sizeof(T) == 4 && (m + 7) / 8 * (n / kVector) >= kThreads;
}

/// C[m × n] ← keep · C + A[m × k] · B[k × n]; n is a multiple of kVector.
template <typename T>
__device__ void gemm(int m, int n, int k, Left<T> a, const T* b, int ldb, T* c, int ldc, double keep = 0) {
  if (tall_tiles<T>(m, n)) {
    gemm_tiles<T, 8>(m, n, k, a, b, ldb, c, ldc, keep);
  } else {
    gemm_tiles<T, 4>(m, n, k, a, b, ldb, c, ldc, keep);
  }
}

// ---- The two products of a chunk --------------------------------------------------------------------------------
//
// What token c gets from the tokens j ≤ c of its own chunk goes through a len × lanes matrix of scores, masked; what it
// gets from the state before the chunk is scaled per lane. kShared: all operands are in shared memory, except the mask.

/// scores[j][c] = mask[j][c] Σ_l keys(j, l) x[l][c]. A mask of 0 clears, also what is not finite.
template <typename T, bool kShared>
__device__ __noinline__ void masked_scores(int len, int lanes, int k, Left<T> keys, const T* x, const T* mask,
                                           T* scores) {
  constexpr int kRows = 4;
  if constexpr (kShared) {
    keys.data = as_shared(keys.data);
    x = as_shared(x);
    scores = as_shared(scores);
  }
  each_tile<kRows>(len, lanes, [&](int j, int rows, int c) {
    Tile<T, kRows> tile;
    tile.clear();
    if (c + kVector > j) tile.multiply(keys.from_row(j), rows, x + c, kStride, k);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) continue;
      const Vec<T> factor = load(mask + (j + r) * kStride + c);
#pragma unroll
      for (int v = 0; v < kVector; ++v) tile.acc[r].x[v] = factor.x[v] == 0 ? T{0} : tile.acc[r].x[v] * factor.x[v];
      store(scores + (j + r) * kStride + c, tile.acc[r]);
    }
  });
}

/// Calls finish(i, c, value) with the vectors of scale_c Σ_l state(i, l) x[l][c] + Σ_{j ≤ c} tokens(i, j) scores[j][c].
template <typename T, int kRows, bool kShared, typename Finish>
__device__ __forceinline__ void state_and_tokens(int m, int lanes, int k, Left<T> state, const T* x, const T* scale,
                                                 int len, Left<T> tokens, const T* scores, Finish&& finish) {
  if constexpr (kShared) {
    state.data = as_shared(state.data);
    x = as_shared(x);
    tokens.data = as_shared(tokens.data);
    scores = as_shared(scores);
  }
  each_tile<kRows>(m, lanes, [&](int i, int rows, int c) {
    Tile<T, kRows> tile;
    tile.clear();
    tile.multiply(state.from_row(i), rows, x + c, kStride, k);
    const Vec<T> factor = load(scale + c);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) tile.acc[r].x[v] = factor.x[v] == 0 ? T{0} : tile.acc[r].x[v] * factor.x[v];
    }
    tile.multiply(tokens.from_row(i), rows, scores + c, kStride, least(len, c + kVector));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < rows) finish(i + r, c, tile.acc[r]);
    }
  });
}

}  // namespace gka::kernels::cuda
