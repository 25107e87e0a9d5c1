// Bounded by memory: a lane reads 16 bytes at a time and writes 32. It asks for its first bytes before it waits for the
// kernels ahead of it, for weights are there already; where the numbers go may still be somebody's.
#include "kernels/cuda/int8_rows.h"

#include "kernels/cuda/device.cuh"

namespace gka::kernels::cuda {
namespace int8_rows {

constexpr int kOwn = 16;  // numbers of a piece
constexpr int kOwnWarps = 8, kBlock = kOwnWarps * kLanes;
constexpr std::int64_t kMostBlocks = 132 * 8;

struct alignas(16) Words {
  std::uint32_t of[4];
};

/// A row of some matrix.
struct Row {
  const char* stored;
  std::uint16_t* to;

  /// Number i of all; false: there are not so many.
  __device__ __forceinline__ bool find(const Int8Rows& r, std::int64_t i) {
    for (int m = 0; m < r.count; ++m) {
      if (i < r.of[m].rows) {
        stored = static_cast<const char*>(r.of[m].stored) + i * int8_row_bytes(r.in);
        to = static_cast<std::uint16_t*>(r.of[m].numbers) + i * r.in;
        return true;
      }
      i -= r.of[m].rows;
    }
    return false;
  }
};

/// By the digits of 2²³ + n, where n is what lies there plus 128.
__device__ __forceinline__ float byte_of(std::uint32_t word, int which) {
  return bits_to_float(0x4b000000u | ((word ^ 0x80808080u) >> (8 * which) & 0xffu)) - 8388736.0f;
}

__device__ __forceinline__ void write_out(const Words& bytes, float scale, std::uint16_t* to) {
  Words out[2];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      out[w / 2].of[w % 2 * 2 + half] =
          two_bfloat16(byte_of(bytes.of[w], 2 * half) * scale, byte_of(bytes.of[w], 2 * half + 1) * scale);
    }
  }
  auto* vectors = reinterpret_cast<Words*>(to);
  vectors[0] = out[0];
  vectors[1] = out[1];
}

/// A warp takes a row at a time, two pieces of each lane together.
__global__ void __launch_bounds__(kBlock) expand_rows(const __grid_constant__ Int8Rows r) {
  let_next_start();
  const int pieces = static_cast<int>(r.in / kOwn), groups = static_cast<int>(int8_groups(r.in));
  bool waited = false;
  Row row;
  for (std::int64_t i = block() * kOwnWarps + warp(); row.find(r, i); i += blocks() * kOwnWarps) {
    const auto* scales = reinterpret_cast<const float*>(row.stored + groups * kInt8Group);
    for (int first = lane(); first < pieces; first += 2 * kLanes) {
      const int second = first + kLanes < pieces ? first + kLanes : first;
      const Words one = *reinterpret_cast<const Words*>(row.stored + first * kOwn);
      const Words other = *reinterpret_cast<const Words*>(row.stored + second * kOwn);
      const float of_one = scales[first * kOwn / kInt8Group], of_other = scales[second * kOwn / kInt8Group];
      if (!waited) wait_for_earlier();
      waited = true;
      write_out(one, of_one, row.to + first * kOwn);
      write_out(other, of_other, row.to + second * kOwn);
    }
  }
  if (!waited) wait_for_earlier();
}

}  // namespace int8_rows

void expand(const Int8Rows& r, const Device& device) {
  using namespace int8_rows;
  const CurrentDevice current(device.index);
  std::int64_t rows = 0;
  for (int m = 0; m < r.count; ++m) rows += r.of[m].rows;
  const std::int64_t blocks = (rows + kOwnWarps - 1) / kOwnWarps;
  launch_early<kBlock>(expand_rows, blocks < kMostBlocks ? blocks : kMostBlocks, 0, device.index, device.stream, r);
}

}  // namespace gka::kernels::cuda
