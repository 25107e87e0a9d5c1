// x Wᵀ for a few rows of x and several matrices in one launch: what decoding asks for, where each weight is read once
// and used a few times, and a launch takes as long as the bytes of a layer. So what stands before and after a product
// in a block of a model comes along: the norm of x, SwiGLU of two products, the sum with the residual stream. A row's
// numbers do not depend on how many rows there are.
#pragma once

#include <cstdint>

#include "gka/kernels.h"

namespace gka::kernels::cuda {

struct SmallProducts {
  static constexpr int kMostRows = 8, kMostMatrices = 8;
  struct Matrix {
    const void* weight = nullptr;  // [outputs, depth] of bfloat16 or int8 (products.h), contiguous, aligned to 16 bytes
    void* y = nullptr;             // [rows, outputs], contiguous
    std::int64_t outputs = 0;
  };

  std::int64_t rows = 0, depth = 0;  // depth: a multiple of 8
  bool int8 = false;                 // the weights, all of them
  const void* x = nullptr;           // [rows, depth] of bfloat16, contiguous, aligned
  const float* norm = nullptr;       // [depth], aligned: the products are of norm ⊙ x / rms(x)
  float eps = 0;
  const void* onto = nullptr;  // [rows, outputs] of the only matrix, of x's type: y gets the sum of it and the product
  int count = 0;
  Matrix of[kMostMatrices] = {};
  bool gated =
      false;  // two matrices of the same size: the first y gets SiLU(x W_0ᵀ) ⊙ x W_1ᵀ, the second is not written
};

/// Whether there are products of so much: x has to lie in shared memory.
constexpr bool has_small_products(std::int64_t rows, std::int64_t depth) {
  return rows <= SmallProducts::kMostRows && rows * depth <= 48 * 1024;
}

void small_products(const SmallProducts& p, const Device& device);

}  // namespace gka::kernels::cuda
