// Numbers as the backward passes keep them: tiles of float16 in the order in which the tensor cores want them, and the
// powers of two by which rows and tiles are scaled.
#pragma once

#include "kernels/cuda/hopper/sizes.h"
#include "kernels/cuda/thread_block.cuh"

namespace gka::kernels::cuda::hopper::bwd {

struct alignas(8) Pair {
  float x, y;
};
struct alignas(8) Packed {
  std::uint32_t words[2];
};
/// Eight 16-bit numbers.
struct alignas(16) Unit {
  std::uint32_t words[4];
};

__device__ __forceinline__ Pair unpack_halves(std::uint32_t word) {
  return {half_to_float(static_cast<std::uint16_t>(word)), half_to_float(static_cast<std::uint16_t>(word >> 16))};
}
__device__ __forceinline__ Pair unpack_bfloats(std::uint32_t word) {
  return {bits_to_float(word << 16), bits_to_float(word & 0xffff0000u)};
}

/// The bits of |x|, in the order of sizes: infinities and then NaN come last.
__device__ __forceinline__ std::uint32_t size_bits(float x) { return float_to_bits(x) & 0x7fffffffu; }

/// The power of two below a number given by its bits, and its inverse; 1 where they are not usual.
struct Scale {
  float down, up;
};
__device__ __forceinline__ Scale scale_of(std::uint32_t top) {
  const std::uint32_t exponent = top & 0x7f800000u;
  if (exponent < 0x08000000u || exponent > 0x76000000u) return {1, 1};
  return {bits_to_float(exponent), bits_to_float(0x7f000000u - exponent)};
}

/// 1/x of a power of two.
__device__ __forceinline__ float inverse_of_power(float x) { return bits_to_float(0x7f000000u - float_to_bits(x)); }

/// float16 in blocks of 64 columns, or one of 32, swizzled as the products want them.
struct Tile {
  std::uint16_t* data;
  int rows;
  int columns = 64;  // of a block

  static __device__ __forceinline__ int place(int rows, int row, int column, int columns = 64) {
    const int block = columns == 64 ? column >> 6 : 0, swizzle = columns == 64 ? row & 7 : row >> 1 & 3;
    return (block * rows + row) * columns + ((((column >> 3) & (columns / 8 - 1)) ^ swizzle) << 3) + (column & 7);
  }
  __device__ __forceinline__ std::uint16_t* at(int row, int column) const {
    return data + place(rows, row, column, columns);
  }
  __device__ __forceinline__ Pair pair(int row, int column) const {
    return unpack_halves(*reinterpret_cast<const std::uint32_t*>(at(row, column)));
  }
  __device__ __forceinline__ Unit unit(int row, int u) const { return *reinterpret_cast<const Unit*>(at(row, 8 * u)); }
  __device__ __forceinline__ void put(int row, int u, const Unit& unit) const {
    *reinterpret_cast<Unit*>(at(row, 8 * u)) = unit;
  }
};

/// A tile of D columns.
template <int D>
__device__ __forceinline__ Tile tile_of(std::uint16_t* data, int rows = kChunk) {
  return {data, rows, kBlockColumns<D>};
}

/// A place in a product: the pair of numbers at (row, column) and (row, column + 1), and where to find what was kept
/// for the row (r) and for the columns (c, c + 1).
struct At {
  int row, column, r, c;
};
/// How the second operand of a product lies: its rows are the columns of the result, or what is summed over.
enum class Major : std::uint8_t { k, mn };

}  // namespace gka::kernels::cuda::hopper::bwd
