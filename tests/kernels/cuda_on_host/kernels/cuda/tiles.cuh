// A stand-in for src/kernels/cuda/tiles.cuh: the same parts of numbers and the same three products, a whole tile by the
// one thread there is.
#pragma once

#include <cstring>

#include "kernels/cuda/device.cuh"

namespace gka::kernels::cuda {

template <int kAcross>
struct WarpTile {
  static constexpr int kRows = 16, kColumns = 8 * kAcross;
  static constexpr int kWidth = 2;
  static constexpr int kVectors = kRows * kColumns / kWidth;

  float sums[kRows][kColumns];

  static int row(int v) { return v * kWidth / kColumns; }
  static int column(int v) { return v * kWidth % kColumns; }
  float* vector(int v) { return sums[row(v)] + column(v); }
  void clear() { std::memset(sums, 0, sizeof sums); }

  void multiply(const float* a, int row, int step, int rows, const float* b, int ldb, int columns, int k) {
    for (int l = 0; l < k; ++l, b += ldb) {
      float high[kColumns], low[kColumns];
      for (int j = 0; j < columns; ++j) {
        high[j] = rounded(b[j]);
        low[j] = cut(b[j] - high[j]);
      }
      for (int i = 0; i < rows; ++i) {
        const float x = a[i * row + l * step], x_high = rounded(x), x_low = cut(x - x_high);
        for (int j = 0; j < columns; ++j) sums[i][j] += x_low * high[j] + x_high * low[j] + x_high * high[j];
      }
    }
  }

 private:
  static float cut(float x) { return bits_to_float(float_to_bits(x) & 0xffffe000u); }
  static float rounded(float x) { return bits_to_float((float_to_bits(x) + 0x1000u) & 0xffffe000u); }
};

}  // namespace gka::kernels::cuda
