// What one thread block does together: loops over elements, sums, matrix products, and where its arrays lie. Every
// function here that writes ends with a barrier, so what one leaves behind the next one may read.
#pragma once

#include <type_traits>

#include "gka/kernels.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/tiles.cuh"
#include "kernels/views.h"

namespace gka::kernels::cuda {

/// Tokens of a chunk at most. Arrays of one vector per token keep *tokens as lanes*: D rows of kStride numbers, the
/// first kMaxChunk of them lanes. Rows of such arrays, and of matrices in shared memory, are kApart numbers longer than
/// they need to be: what a warp reads for a tensor core, eight numbers of each of four rows, then lies in different
/// banks.
inline constexpr int kMaxChunk = 64;
inline constexpr int kApart = 8;
inline constexpr int kStride = kMaxChunk + kApart;
/// Numbers that are loaded at a time.
inline constexpr int kVector = 4;

__host__ __device__ constexpr int padded(int n) { return (n + kVector - 1) / kVector * kVector; }

template <typename T, int kWidth = kVector>
struct alignas(kWidth * sizeof(T) < 16 ? kWidth * sizeof(T) : 16) Vec {
  static constexpr int width = kWidth;
  T x[kWidth];
};

template <int kWidth = kVector, typename T>
__device__ __forceinline__ Vec<T, kWidth> load(const T* p) {
  return *reinterpret_cast<const Vec<T, kWidth>*>(p);
}
template <typename T, int kWidth>
__device__ __forceinline__ void store(T* p, const Vec<T, kWidth>& v) {
  *reinterpret_cast<Vec<T, kWidth>*>(p) = v;
}
template <int kWidth = kVector, typename T>
__device__ __forceinline__ Vec<T, kWidth> broadcast(T value) {
  Vec<T, kWidth> v;
  for (int i = 0; i < kWidth; ++i) v.x[i] = value;
  return v;
}
template <typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> operator+(Vec<T, kWidth> a, const Vec<T, kWidth>& b) {
  for (int i = 0; i < kWidth; ++i) a.x[i] += b.x[i];
  return a;
}
template <typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> operator-(Vec<T, kWidth> a, const Vec<T, kWidth>& b) {
  for (int i = 0; i < kWidth; ++i) a.x[i] -= b.x[i];
  return a;
}
template <typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> operator*(Vec<T, kWidth> a, const Vec<T, kWidth>& b) {
  for (int i = 0; i < kWidth; ++i) a.x[i] *= b.x[i];
  return a;
}
template <typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> operator/(Vec<T, kWidth> a, const Vec<T, kWidth>& b) {
  for (int i = 0; i < kWidth; ++i) a.x[i] /= b.x[i];
  return a;
}

template <typename T>
__device__ inline bool finite(T x) {
  return x - x == 0;
}
template <typename T>
__host__ __device__ constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
__host__ __device__ constexpr T max(T a, T b) {
  return a < b ? b : a;
}

/// 0 where the factor is, also for what is not finite.
template <typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> masked(Vec<T, kWidth> values, const Vec<T, kWidth>& factor) {
  for (int v = 0; v < kWidth; ++v) values.x[v] = factor.x[v] == 0 ? T{0} : values.x[v] * factor.x[v];
  return values;
}

/// A number of neighbours, to choose a Vec by.
template <int kWidth>
struct Width {
  static constexpr int value = kWidth;
};

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

/// Channels of one token that a thread moves at a time: neighbours where tokens have rows, and neighbouring threads
/// have neighbouring tokens, so both sides of a transposition are read and written in whole sectors.
inline constexpr int kRun = 8;

/// body(c, i, count) for the runs of n channels of every token: channels i … i + count − 1.
template <typename Body>
__device__ __forceinline__ void each_run(int tokens, int n, Body&& body) {
  for (int at = thread(); at < (n + kRun - 1) / kRun * kMaxChunk; at += kThreads) {
    const int c = at % kMaxChunk, i = at / kMaxChunk * kRun;
    if (c < tokens) body(c, i, min(kRun, n - i));
  }
  sync();
}

/// to[r][j] = by(r, from[r][j]) for rows of n numbers; in both, rows are a multiple of kVector apart if `n` is one.
template <typename T, typename By>
__device__ __forceinline__ void move_rows(int rows, int n, const T* from, int ld_from, T* to, int ld_to, By&& by) {
  if (n % kVector != 0) {
    return move(
        rows * n, [&](int at) { return from[at / n * ld_from + at % n]; },
        [&](int at, T value) { to[at / n * ld_to + at % n] = by(at / n, value); });
  }
  constexpr int kAtOnce = 4;
  for (int first = warp(); first < rows; first += kAtOnce * kWarps) {
    for (int j = lane() * kVector; j < n; j += kLanes * kVector) {
      Vec<T> values[kAtOnce];
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        const int row = first + a * kWarps < rows ? first + a * kWarps : first;
        values[a] = load(from + row * ld_from + j);
      }
#pragma unroll
      for (int a = 0; a < kAtOnce; ++a) {
        const int row = first + a * kWarps;
        if (row >= rows) continue;
        for (T& x : values[a].x) x = by(row, x);
        store(to + row * ld_to + j, values[a]);
      }
    }
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
inline constexpr int kScratchBytes = 8 * max(kThreads, kMaxChunk * 4);
__device__ inline double* scratch() { return reinterpret_cast<double*>(shared_memory()); }

/// Hands out a block's arrays: from shared memory while there is some, then from the block's part of global memory
/// (which stays in the second-level cache). Whoever asks first gets the fast memory. The host runs the same requests to
/// learn how much of each a kernel needs.
struct Arena {
  static constexpr int kBehind = 63;

  char* fast = nullptr;
  std::int64_t fast_limit = 0;
  char* slow = nullptr;
  std::int64_t fast_used = 0;
  std::int64_t slow_used = 0;

  template <typename T>
  __host__ __device__ T* take(std::int64_t n) {
    // A tile at the edge of a matrix reads, and drops, what is behind it.
    const std::int64_t bytes = ((n + kBehind) * static_cast<std::int64_t>(sizeof(T)) + 15) / 16 * 16;
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
    static_assert(kType == DType::bfloat16);
    const std::uint32_t upper = static_cast<const std::uint16_t*>(data)[at];
    return static_cast<T>(bits_to_float(upper << 16));
  }
}

template <DType kType>
struct Storage {
  static constexpr DType type = kType;
  using Number = std::conditional_t<kType == DType::float64, double,
                                    std::conditional_t<kType == DType::float32, float, std::uint16_t>>;
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

/// Whether runs from `first` on, `apart` elements apart, are aligned to 16 bytes.
template <DType kType>
__device__ __forceinline__ bool runs_aligned(const void* data, std::int64_t first, std::int64_t apart) {
  constexpr int kBytes = static_cast<int>(bytes_of(kType));
  return (reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(first * kBytes)) % 16 == 0 &&
         apart * kBytes % 16 == 0;
}

/// `count` elements from `at` on, and 0 behind them; `aligned`: to 16 bytes.
template <typename T, DType kType>
__device__ __forceinline__ void read_run(const void* data, std::int64_t at, int count, bool aligned, T (&to)[kRun]) {
  using Stored = typename Storage<kType>::Number;
  Vec<Stored, kRun> run{};
  const Stored* from = static_cast<const Stored*>(data) + at;
  if (aligned && count == kRun) {
    run = load<kRun>(from);
  } else {
    for (int i = 0; i < kRun; ++i) {
      if (i < count) run.x[i] = from[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i) to[i] = read_as<T, kType>(run.x, i);
}

template <typename T>
__device__ T read(const View& view, std::int64_t at) {
  return with_storage(view.dtype, [&](auto storage) { return read_as<T, decltype(storage)::type>(view.data, at); });
}

/// Through float32 for the 16-bit types, to the nearest, ties to even.
template <DType kType, typename T>
__device__ __forceinline__ typename Storage<kType>::Number stored(T value) {
  if constexpr (kType == DType::float64 || kType == DType::float32) {
    return static_cast<typename Storage<kType>::Number>(value);
  } else if constexpr (kType == DType::float16) {
    return float_to_half(static_cast<float>(value));
  } else {
    static_assert(kType == DType::bfloat16);
    const std::uint32_t bits = float_to_bits(static_cast<float>(value));
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return static_cast<std::uint16_t>(nan ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

template <typename T>
__device__ void write(const View& view, std::int64_t at, T value) {
  with_storage(view.dtype, [&](auto storage) {
    using S = decltype(storage);
    static_cast<typename S::Number*>(view.data)[at] = stored<S::type>(value);
  });
}

template <DType kType, typename T>
__device__ __forceinline__ void write_run(void* data, std::int64_t at, int count, bool aligned, const T (&from)[kRun]) {
  using Stored = typename Storage<kType>::Number;
  Vec<Stored, kRun> run;
#pragma unroll
  for (int i = 0; i < kRun; ++i) run.x[i] = stored<kType>(from[i]);
  Stored* to = static_cast<Stored*>(data) + at;
  if (aligned && count == kRun) {
    store(to, run);
  } else {
    for (int i = 0; i < kRun; ++i) {
      if (i < count) to[i] = run.x[i];
    }
  }
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
  for (int i = 0; i < min(kLast, kThreads); ++i) total += parts[i];
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

/// out[c] = max_i |a[i][c]|.
template <typename T>
__device__ __noinline__ void lane_largest(const T* a, int n, int lanes, T* out) {
  constexpr int kParts = 4;
  T* parts = reinterpret_cast<T*>(scratch());
  each(kParts * kMaxChunk, [&](int at) {
    const int c = at % kMaxChunk;
    T top = 0;
#pragma unroll 8
    for (int i = at / kMaxChunk; i < n; i += kParts) {
      const T value = c < lanes ? a[i * kStride + c] : T{0};
      top = max(top, value < 0 ? -value : value);
    }
    parts[at] = top;
  });
  each(lanes, [&](int c) {
    out[c] = max(max(parts[c], parts[kMaxChunk + c]), max(parts[2 * kMaxChunk + c], parts[3 * kMaxChunk + c]));
  });
}

/// put(c, Σ_i term(i, c)) for every token, in float64.
template <typename Term, typename Put>
__device__ __forceinline__ void sum_channels(int n, int len, Term&& term, Put&& put) {
  constexpr int kParts = 4;
  double* parts = scratch();
  each(kParts * kMaxChunk, [&](int at) {
    const int c = at % kMaxChunk;
    double total = 0;
#pragma unroll 8
    for (int i = at / kMaxChunk; i < n && c < len; i += kParts) total += term(i, c);
    parts[at] = total;
  });
  each(len, [&](int c) {
    put(c, (parts[c] + parts[kMaxChunk + c]) + (parts[2 * kMaxChunk + c] + parts[3 * kMaxChunk + c]));
  });
}

/// out[c] = fold over j ≤ c of term(c, j), from 0 on, for every token of a chunk. It does not depend on how many tokens
/// there are.
template <typename Term, typename Fold>
__device__ __forceinline__ void fold_earlier(int len, Term&& term, Fold&& fold, double* out) {
  constexpr int kParts = 4;
  double* parts = scratch();
  each(kParts * kMaxChunk, [&](int at) {
    const int part = at / kMaxChunk, c = at % kMaxChunk;
    double total = 0;
#pragma unroll 8
    for (int j = part; j <= c && c < len; j += kParts) total = fold(total, term(c, j));
    parts[at] = total;
  });
  each(len, [&](int c) {
    out[c] = fold(fold(parts[c], parts[kMaxChunk + c]), fold(parts[2 * kMaxChunk + c], parts[3 * kMaxChunk + c]));
  });
}

// ---- Matrix products --------------------------------------------------------------------------------------------

//
// float32 goes by warps to tensor cores (tiles.cuh), float64 by threads.

/// A(i, l) = data[i·row + l·step]; one of the two is 1, the other a multiple of kVector.
template <typename T>
struct Left {
  const T* data;
  int row;
  int step;

  __device__ __forceinline__ Left from_row(int i) const { return {data + i * row, row, step}; }
};

/// kRows × kVector numbers of a product, in a thread's registers.
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
    for (int r = 0; r < kRows; ++r) at[r] = min(r, rows - 1) * lda;
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
    body(i, min(kRows, m - i), t % across * kVector);
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

/// Calls body(i, rows, j, columns) for the tiles of an m × n matrix, a warp each.
template <typename Tile, typename Body>
__device__ __forceinline__ void each_warp_tile(int m, int n, Body&& body) {
  const int across = (n + Tile::kColumns - 1) / Tile::kColumns, tiles = (m + Tile::kRows - 1) / Tile::kRows * across;
  for (int t = warp(); t < tiles; t += kWarps) {
    const int i = t / across * Tile::kRows, j = t % across * Tile::kColumns;
    body(i, min(Tile::kRows, m - i), j, min(Tile::kColumns, n - j));
  }
  sync();
}

/// Calls body(v, i, j) for every vector of a warp's tile that lies in the matrix.
template <typename Tile, typename Body>
__device__ __forceinline__ void each_in_tile(int rows, int columns, Body&& body) {
#pragma unroll
  for (int v = 0; v < Tile::kVectors; ++v) {
    const int i = Tile::row(v), j = Tile::column(v);
    if (i < rows && j < columns) body(v, i, j);
  }
}

template <typename Tile>
__device__ __forceinline__ Vec<float, Tile::kWidth> values_of(Tile& tile, int v) {
  Vec<float, Tile::kWidth> values;
#pragma unroll
  for (int n = 0; n < Tile::kWidth; ++n) values.x[n] = tile.vector(v)[n];
  return values;
}

/// Calls body(WarpTile) with the widest tiles of which there are enough to go round.
template <typename Body>
__device__ __forceinline__ void with_tiles(int m, int n, Body&& body) {
  const auto enough = [&](int columns) { return (m + 15) / 16 * ((n + columns - 1) / columns) >= kWarps; };
  if (enough(WarpTile<8>::kColumns)) {
    body(WarpTile<8>{});
  } else if (enough(WarpTile<4>::kColumns)) {
    body(WarpTile<4>{});
  } else {
    body(WarpTile<2>{});
  }
}

template <typename Tile>
__device__ __noinline__ void gemm_by_warps(int m, int n, int k, Left<float> a, const float* b, int ldb, float* c,
                                           int ldc, double keep) {
  each_warp_tile<Tile>(m, n, [&](int i, int rows, int j, int columns) {
    Tile tile;
    tile.clear();
    tile.multiply(a.data + i * a.row, a.row, a.step, rows, b + j, ldb, columns, k);
    using Pair = Vec<float, Tile::kWidth>;
    Pair before[Tile::kVectors] = {};
    c += i * ldc + j;
    if (keep != 0) {
      each_in_tile<Tile>(rows, columns, [&](int v, int r, int l) { before[v] = load<Tile::kWidth>(c + r * ldc + l); });
    }
    each_in_tile<Tile>(rows, columns, [&](int v, int r, int l) {
      for (float& x : before[v].x) x = keep == 1 ? x : fade(x, keep);
      store(c + r * ldc + l, before[v] + values_of(tile, v));
    });
    c -= i * ldc + j;
  });
}

/// C[m × n] ← keep · C + A[m × k] · B[k × n]; n is a multiple of kVector.
template <typename T>
__device__ void gemm(int m, int n, int k, Left<T> a, const T* b, int ldb, T* c, int ldc, double keep = 0) {
  if constexpr (sizeof(T) == 4) {
    with_tiles(m, n, [&]<typename Tile>(Tile) { gemm_by_warps<Tile>(m, n, k, a, b, ldb, c, ldc, keep); });
  } else {
    gemm_tiles<T, 4>(m, n, k, a, b, ldb, c, ldc, keep);
  }
}

// ---- The products of a chunk ------------------------------------------------------------------------------------
//
// What token c gets from the state before the chunk is scaled per lane; what it gets from the tokens j ≤ c of its own
// chunk goes through a len × lanes matrix of scores, masked.

/// Σ_j tokens(·, j) scores[j][c] with scores[j][c] = mask[j][c] Σ_l keys(j, l) x[l][c]. A mask of 0 clears, also what
/// is not finite.
template <typename T>
struct FromTokens {
  int len;
  Left<T> keys;
  const T* mask;
  T* scores;  // room
  Left<T> tokens;
};

/// For `finish` that needs nothing early.
template <typename T>
struct NothingEarly {
  template <int kWidth>
  __device__ __forceinline__ Vec<T, kWidth> operator()(int, int, Width<kWidth>) const {
    return {};
  }
};

/// Scores of 16 tokens for 16 others. Of every 16 such tiles six have nothing to compute; the columns are shifted so
/// that each quarter of a multiprocessor gets its share of the others.
template <typename T>
__device__ __forceinline__ void score_tile(const FromTokens<T>& from, int lanes, int k, const T* x, int t) {
  using Tile = WarpTile<2>;
  const int across = (lanes + Tile::kColumns - 1) / Tile::kColumns, down = t / across;
  const int j = down * Tile::kRows, c = (t + across + 1 - down % across) % across * Tile::kColumns;
  const int rows = min(Tile::kRows, from.len - j), columns = min(Tile::kColumns, lanes - c);
  Vec<T, Tile::kWidth> factor[Tile::kVectors] = {};
  each_in_tile<Tile>(rows, columns, [&](int v, int r, int l) {
    factor[v] = load<Tile::kWidth>(from.mask + (j + r) * kStride + c + l);
  });
  Tile tile;
  tile.clear();
  if (c + columns > j) {
    const Left<T> keys = from.keys.from_row(j);
    tile.multiply(keys.data, keys.row, keys.step, rows, x + c, kStride, columns, k);
  }
  each_in_tile<Tile>(rows, columns, [&](int v, int r, int l) {
    store(from.scores + (j + r) * kStride + c + l, masked(values_of(tile, v), factor[v]));
  });
}

/// Each warp multiplies its part of the state before the scores, so that those have company.
template <typename T, typename Tile, typename Early, typename Finish>
__device__ __forceinline__ void chunk_product_by_warps(int m, int lanes, int k, Left<T> state, const T* x,
                                                       const T* scale, const FromTokens<T>& from, Early&& early,
                                                       Finish&& finish) {
  constexpr int kWidth = Tile::kWidth;
  constexpr bool kRoom = Tile::kVectors <= 8;  // in registers, for what is early while tokens are multiplied
  const int across = (lanes + Tile::kColumns - 1) / Tile::kColumns,
            tiles = (m + Tile::kRows - 1) / Tile::kRows * across;
  const int score_tiles = (from.len + 15) / 16 * ((lanes + 15) / 16);
  bool scored = false;
  for (int t = warp(); t < tiles || !scored; t += kWarps) {
    const int i = t / across * Tile::kRows, c = t % across * Tile::kColumns;
    const int rows = min(Tile::kRows, m - i), columns = min(Tile::kColumns, lanes - c);
    Tile tile;
    tile.clear();
    if (t < tiles) {
      tile.multiply(state.data + i * state.row, state.row, state.step, rows, x + c, kStride, columns, k);
#pragma unroll
      for (int v = 0; v < Tile::kVectors; ++v) {
        const auto scaled = masked(values_of(tile, v), load<kWidth>(scale + c + Tile::column(v)));
#pragma unroll
        for (int n = 0; n < kWidth; ++n) tile.vector(v)[n] = scaled.x[n];
      }
    }
    if (!scored) {
      for (int n = warp(); n < score_tiles; n += kWarps) score_tile(from, lanes, k, x, n);
      sync();
      scored = true;
    }
    if (t >= tiles) break;
    Vec<T, kWidth> known[Tile::kVectors] = {};
    const auto ask = [&] {
      each_in_tile<Tile>(rows, columns, [&](int v, int r, int l) { known[v] = early(i + r, c + l, Width<kWidth>{}); });
    };
    if (kRoom) ask();
    const Left<T> tokens = from.tokens.from_row(i);
    tile.multiply(tokens.data, tokens.row, tokens.step, rows, from.scores + c, kStride, columns,
                  min(from.len, c + columns));
    if (!kRoom) ask();
    each_in_tile<Tile>(rows, columns, [&](int v, int r, int l) { finish(i + r, c + l, values_of(tile, v), known[v]); });
  }
  sync();
}

template <typename T, typename Early, typename Finish>
__device__ __forceinline__ void chunk_product_by_threads(int m, int lanes, int k, Left<T> state, const T* x,
                                                         const T* scale, const FromTokens<T>& from, Early&& early,
                                                         Finish&& finish) {
  constexpr int kRows = 4;
  each_tile<kRows>(from.len, lanes, [&](int j, int rows, int c) {
    Tile<T, kRows> tile;
    tile.clear();
    if (c + kVector > j) tile.multiply(from.keys.from_row(j), rows, x + c, kStride, k);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int at = (j + r) * kStride + c;
      if (r < rows) store(from.scores + at, masked(tile.acc[r], load(from.mask + at)));
    }
  });
  each_tile<kRows>(m, lanes, [&](int i, int rows, int c) {
    Tile<T, kRows> tile;
    tile.clear();
    tile.multiply(state.from_row(i), rows, x + c, kStride, k);
    const Vec<T> factor = load(scale + c);
#pragma unroll
    for (int r = 0; r < kRows; ++r) tile.acc[r] = masked(tile.acc[r], factor);
    tile.multiply(from.tokens.from_row(i), rows, from.scores + c, kStride, min(from.len, c + kVector));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < rows) finish(i + r, c, tile.acc[r], early(i + r, c, Width<kVector>{}));
    }
  });
}

/// Calls finish(i, c, value, early(i, c, width)) with the vectors of scale_c Σ_l state(i, l) x[l][c] + what comes from
/// the tokens; `early` is for what has a long way. kShared: all operands are in shared memory, except the mask. What
/// `finish` writes is not x.
template <typename T, bool kShared, typename Early, typename Finish>
__device__ __forceinline__ void chunk_product(int m, int lanes, int k, Left<T> state, const T* x, const T* scale,
                                              FromTokens<T> from, Early&& early, Finish&& finish) {
  if constexpr (kShared) {
    state.data = as_shared(state.data);
    x = as_shared(x);
    from.keys.data = as_shared(from.keys.data);
    from.tokens.data = as_shared(from.tokens.data);
    from.scores = as_shared(from.scores);
  }
  if constexpr (sizeof(T) == 4) {
    with_tiles(m, lanes, [&]<typename Tile>(Tile) {
      chunk_product_by_warps<T, Tile>(m, lanes, k, state, x, scale, from, early, finish);
    });
  } else {
    chunk_product_by_threads<T>(m, lanes, k, state, x, scale, from, early, finish);
  }
}

}  // namespace gka::kernels::cuda
