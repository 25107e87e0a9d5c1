// The one matrix product everything here is made of:
//
//   C[m × n] = (start +) A[m × k] · B[k × n]        A(i, l) = a[i·row + l·step], B and C by rows of whole vectors
//
// B's and C's columns are lanes; A is read one number at a time and broadcast, so A may lie either way round and m and
// k may be anything. Sizes are small (tens to hundreds) and operands sit in the first- or second-level cache: a
// register tile of kTileRows × kTileVectors accumulators walks over k and nothing is packed.
#pragma once

#include "kernels/cpu/isa/simd.h"

namespace gka::kernels::cpu::GKA_ISA {

// Accumulators + kTileVectors of B + one broadcast must fit the register file: 32 registers with AVX-512, 16 before.
inline constexpr int kTileRows = kVectorBytes == 64 ? 12 : 6;
inline constexpr int kTileVectors = 2;

template <typename T>
struct Left {
  const T* data;
  std::int64_t row;   // from one row of A to the next
  std::int64_t step;  // from one column of A to the next
};

/// What a product is added to: nothing, or from · by · again + more · more_by · more_again, `from` possibly C itself.
/// (Two factors, where their product would underflow before what it scales does.)
template <typename T>
struct Start {
  const T* from = nullptr;
  std::int64_t ld = 0;  // of both
  T by = 1, again = 1;
  const T* more = nullptr;
  T more_by = 1, more_again = 1;

  Start at(std::int64_t i, std::int64_t j) const {
    Start moved = *this;
    if (from != nullptr) moved.from += i * ld + j;
    if (more != nullptr) moved.more += i * ld + j;
    return moved;
  }
};

template <typename T, int kRows, int kVectors>
struct Tile {
  Vec<T> acc[kRows][kVectors];

  void clear() {
    for (auto& row : acc) {
      for (auto& v : row) v = Vec<T>{};
    }
  }

  void begin(const Start<T>& start) {
    if (start.from == nullptr) {
      clear();
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
          acc[i][j] = load(start.from + i * start.ld + j * kLanes<T>) * start.by * start.again;
        }
      }
    }
    if (start.more == nullptr) return;
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        acc[i][j] += load(start.more + i * start.ld + j * kLanes<T>) * start.more_by * start.more_again;
      }
    }
  }

  void store_to(T* c, std::int64_t ldc) const {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) store(c + i * ldc + j * kLanes<T>, acc[i][j]);
    }
  }

  /// acc[:, kFirst…] += A[:, from … to) · B[from … to), all pointers at k = 0.
  template <int kFirst = 0, bool kUnitRow = true>
  [[gnu::always_inline]] void multiply(Left<T> a, const T* b, std::int64_t ldb, int from, int to) {
    const std::int64_t row = kUnitRow ? 1 : a.row;
    const T* pa = a.data + from * a.step;
    const T* pb = b + from * ldb;
    for (int l = from; l < to; ++l, pa += a.step, pb += ldb) {
      Vec<T> column[kVectors];
#pragma GCC unroll 4
      for (int j = kFirst; j < kVectors; ++j) column[j] = load(pb + j * kLanes<T>);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const Vec<T> x = broadcast(pa[i * row]);
#pragma GCC unroll 4
        for (int j = kFirst; j < kVectors; ++j) acc[i][j] += x * column[j];
      }
    }
  }
};

template <typename T, int kRows, int kVectors, bool kUnitRow>
void gemm_tile(int k, Left<T> a, const T* b, std::int64_t ldb, T* c, std::int64_t ldc, const Start<T>& start) {
  Tile<T, kRows, kVectors> tile;
  tile.begin(start);
  tile.template multiply<0, kUnitRow>(a, b, ldb, 0, k);
  tile.store_to(c, ldc);
}

template <int N>
struct Constant {
  static constexpr int value = N;
};

template <int kRows, typename Body>
int tiles_of(int i, int m, Body&& body) {
  for (; i + kRows <= m; i += kRows) body(Constant<kRows>{}, i);
  return i;
}

/// Calls body(Constant<rows>, i) for tiles that cover rows 0 … m − 1: whole ones, then a few smaller (a tile of its own
/// for every remainder would cost more to compile than it saves).
template <typename Body>
void for_row_tiles(int m, Body&& body) {
  int i = tiles_of<kTileRows>(0, m, body);
  if constexpr (kTileRows > 8) i = tiles_of<8>(i, m, body);
  i = tiles_of<4>(i, m, body);
  tiles_of<1>(i, m, body);
}

template <typename T, int kVectors, bool kUnitRow>
void gemm_columns(int m, int k, Left<T> a, const T* b, std::int64_t ldb, T* c, std::int64_t ldc,
                  const Start<T>& start) {
  for_row_tiles(m, [&](auto rows, int i) {
    gemm_tile<T, decltype(rows)::value, kVectors, kUnitRow>(k, {a.data + i * a.row, a.row, a.step}, b, ldb, c + i * ldc,
                                                            ldc, start.at(i, 0));
  });
}

/// n counts elements and is a whole number of vectors. `upper`: only what lies on and above C's diagonal is wanted.
template <typename T>
void gemm(int m, int n, int k, Left<T> a, const T* b, std::int64_t ldb, T* c, std::int64_t ldc,
          const Start<T>& start = {}, bool upper = false) {
  constexpr int kStep = kTileVectors * kLanes<T>;
  const auto columns = [&]<int kVectors>(Constant<kVectors>, int j) {
    const int rows = upper && j + kVectors * kLanes<T> < m ? j + kVectors * kLanes<T> : m;
    if (a.row == 1) {
      gemm_columns<T, kVectors, true>(rows, k, a, b + j, ldb, c + j, ldc, start.at(0, j));
    } else {
      gemm_columns<T, kVectors, false>(rows, k, a, b + j, ldb, c + j, ldc, start.at(0, j));
    }
  };
  int j = 0;
  for (; j + kStep <= n; j += kStep) columns(Constant<kTileVectors>{}, j);
  if (j < n) columns(Constant<1>{}, j);
}

/// C += A · B.
template <typename T>
void add_gemm(int m, int n, int k, Left<T> a, const T* b, std::int64_t ldb, T* c, std::int64_t ldc) {
  gemm<T>(m, n, k, a, b, ldb, c, ldc, {.from = c, .ld = ldc});
}

/// Below its diagonal the n × n matrix m becomes what it is above; rows are whole vectors.
template <typename T>
void mirror(T* m, int n, std::int64_t ld) {
  constexpr int kSide = kLanes<T>;
  Index<T> lane{};
#pragma GCC unroll 16
  for (int i = 0; i < kSide; ++i) lane[i] = i;
  for (int i = 0; i < n; i += kSide) {
    for (int j = i; j < n; j += kSide) {
      Vec<T> square[kSide];
      for (int r = 0; r < kSide; ++r) square[r] = i + r < n ? load(m + (i + r) * ld + j) : Vec<T>{};
      transpose<T>(square);
      for (int r = 0; r < kSide && j + r < n; ++r) {
        T* at = m + (j + r) * ld + i;
        store(at, i == j ? (lane < r ? square[r] : load(at)) : square[r]);
      }
    }
  }
}

/// S = start + A · B, known to be symmetric: half of it is computed.
template <typename T>
void symmetric_gemm(int n, int k, Left<T> a, const T* b, std::int64_t ldb, T* s, std::int64_t ld,
                    const Start<T>& start) {
  gemm<T>(n, padded<T>(n), k, a, b, ldb, s, ld, start, true);
  mirror(s, n, ld);
}

}  // namespace gka::kernels::cpu::GKA_ISA
