// Products of float32 activations with a model's weights as they are stored:
//
//   y[m, n] = Σ_k x[m, k] W[n, k]        W: float32, bfloat16, or int8 with a scale for every kInt8Group numbers of a
//   row
//
// A number of y depends on its row of x and its row of W alone, to the bit: not on how many rows there are, nor on the
// number of threads.
#pragma once

#include <cstdint>
#include <span>

#include "gka/kernels.h"

namespace gka::kernels {

enum class StoredAs : std::uint8_t { float32, bfloat16, int8 };

/// Of a row of int8: its numbers, filled up with zeros to whole groups, then a float32 scale for each group.
inline constexpr std::int64_t kInt8Group = 64;
constexpr std::int64_t int8_groups(std::int64_t in) { return (in + kInt8Group - 1) / kInt8Group; }
constexpr std::int64_t int8_row_bytes(std::int64_t in) { return int8_groups(in) * (kInt8Group + 4); }

/// W and where its part of y goes. Rows of W lie without gaps.
struct StoredMatrix {
  const void* data = nullptr;
  StoredAs type = StoredAs::float32;
  std::int64_t out = 0;
  float* y = nullptr;
  std::int64_t y_stride = 0;  // from one row of y to the next
};

/// Several matrices with the same x.
struct Products {
  const float* x = nullptr;
  std::int64_t rows = 0;
  std::int64_t in = 0;
  std::int64_t x_stride = 0;
  std::span<const StoredMatrix> matrices{};
};

constexpr std::int64_t row_bytes(StoredAs type, std::int64_t in) {
  switch (type) {
    case StoredAs::float32: return 4 * in;
    case StoredAs::bfloat16: return 2 * in;
    case StoredAs::int8: return int8_row_bytes(in);
  }
  return 0;
}

/// A row of `in` numbers to int8_row_bytes(in) bytes: the largest of a group becomes ±127. And back.
void to_int8(const float* from, std::int64_t in, void* row);
void from_int8(const void* row, std::int64_t in, float* to);

namespace cpu {
void products(const Products& products, const Executor& executor);
}

}  // namespace gka::kernels
