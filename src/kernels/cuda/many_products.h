// x Wᵀ for some tens of rows of x and several matrices of int8 (kernels/products.h) in one launch: what decoding many
// sequences asks for. Bytes are multiplied as they are stored, the scale of a group after its products.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gka/kernels.h"
#include "kernels/products.h"

namespace gka::kernels::cuda {

struct ManyProducts {
  static constexpr int kMostMatrices = 8;
  static constexpr std::int64_t kMostRows = 64;      // beyond it pays to make numbers of the bytes (int8_rows.h)
  static constexpr std::int64_t kDeep = kInt8Group;  // of the depth, at a time
  static constexpr std::int64_t kColumns = 64;       // outputs of a block
  struct Matrix {
    const void* weight = nullptr;  // [outputs, depth] of int8, aligned to 16 bytes
    void* y = nullptr;             // [rows, outputs], contiguous
    std::int64_t outputs = 0;
    constexpr std::int64_t tiles() const { return (outputs + kColumns - 1) / kColumns; }
  };

  std::int64_t rows = 0, depth = 0;
  const void* x = nullptr;  // [rows, depth] of bfloat16, contiguous, aligned
  int count = 0;
  Matrix of[kMostMatrices] = {};

  constexpr std::int64_t tiles() const {
    std::int64_t all = 0;
    for (int m = 0; m < count; ++m) all += of[m].tiles();
    return all;
  }
  /// Into how many parts the depth is cut, so that a large card is busy: each of two groups at least.
  constexpr std::int64_t splits() const {
    constexpr std::int64_t kBlocks = 2 * 132;
    const auto groups = depth / kDeep, most = std::max<std::int64_t>(groups / 2, 1);
    const auto wanted = std::clamp<std::int64_t>(kBlocks / std::max<std::int64_t>(tiles(), 1), 1, most);
    const auto each = (groups + wanted - 1) / wanted;
    return (groups + each - 1) / each;
  }
};

constexpr bool has_many_products(std::int64_t rows, std::int64_t depth) {
  return rows > 0 && rows <= ManyProducts::kMostRows && depth > 0 && depth % ManyProducts::kDeep == 0 &&
         int8_row_bytes(depth) % 16 == 0;
}

void many_products(const ManyProducts& p, const Device& device);

}  // namespace gka::kernels::cuda
