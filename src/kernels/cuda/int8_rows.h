// Matrices of int8 with a scale for every 64 numbers of a row (kernels/products.h) as the bfloat16 numbers they stand
// for, in one pass: what products of many rows multiply with.
#pragma once

#include <cstdint>

#include "gka/kernels.h"
#include "kernels/products.h"

namespace gka::kernels::cuda {

struct Int8Rows {
  static constexpr int kMostMatrices = 8;
  struct Matrix {
    const void* stored = nullptr;  // aligned to 16 bytes
    void* numbers = nullptr;       // [rows, in] of bfloat16, contiguous, aligned to 16 bytes
    std::int64_t rows = 0;
  };
  std::int64_t in = 0;
  int count = 0;
  Matrix of[kMostMatrices] = {};
};

/// Sixteen numbers of a row are one thread's, and lie so that they are read and written at once.
constexpr bool has_int8_rows(std::int64_t in) { return in > 0 && in % 16 == 0 && int8_row_bytes(in) % 16 == 0; }

void expand(const Int8Rows& r, const Device& device);

}  // namespace gka::kernels::cuda
