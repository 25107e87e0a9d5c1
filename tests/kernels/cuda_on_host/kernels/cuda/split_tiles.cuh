// A stand-in for src/kernels/cuda/split_tiles.cuh: the same three products, a whole tile by the one thread there is.
#pragma once

#include <cstring>

#include "kernels/cuda/device.cuh"

namespace gka::kernels::cuda {

struct SplitArray {
  std::uint16_t *high, *low;
  int ld;

  SplitArray from(int row, int column) const { return {high + row * ld + column, low + row * ld + column, ld}; }
  float of(const std::uint16_t* part, int row, int column) const { return half_to_float(part[row * ld + column]); }
};

inline bool near(const SplitArray&) { return true; }

template <int kDown>
struct SplitTile {
  static constexpr int kRows = 16 * kDown, kColumns = 16;
  static constexpr int kWidth = 2, kVectors = kRows * kColumns / kWidth;

  float sums[kRows][kColumns];

  static int row(int v) { return v * kWidth / kColumns; }
  static int column(int v) { return v * kWidth % kColumns; }
  float* vector(int v) { return sums[row(v)] + column(v); }
  void clear() { std::memset(sums, 0, sizeof sums); }
  void fold() {}

  template <bool kFar>
  void multiply(const SplitArray& a, const SplitArray& b, int k) {
    add(a, k, [&](int l, int j, const std::uint16_t* part) { return b.of(part, j, l); }, b);
  }
  void multiply_rows(const SplitArray& a, const SplitArray& b, int k) {
    add(a, k, [&](int l, int j, const std::uint16_t* part) { return b.of(part, l, j); }, b);
  }

 private:
  template <typename Right>
  void add(const SplitArray& a, int k, Right&& right, const SplitArray& b) {
    for (int l = 0; l < k; ++l) {
      float high[kColumns], low[kColumns];
      for (int j = 0; j < kColumns; ++j) {
        high[j] = right(l, j, b.high);
        low[j] = right(l, j, b.low);
      }
      for (int i = 0; i < kRows; ++i) {
        const float x_high = a.of(a.high, i, l), x_low = a.of(a.low, i, l);
        for (int j = 0; j < kColumns; ++j) sums[i][j] += x_low * high[j] + x_high * low[j] + x_high * high[j];
      }
    }
  }
};

}  // namespace gka::kernels::cuda
