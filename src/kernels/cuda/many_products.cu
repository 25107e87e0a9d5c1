// A block has 64 outputs and all rows of x. Both come to shared memory 64 of the depth at a time, some stages ahead;
// eight warps share the tile, 32 rows each. Which of sixteen numbers stands where in a product is free as long as both
// sides agree: a lane takes four neighbours of either side, so that four bytes of weights are one word. Bytes become
// bfloat16, which holds them exactly, as in attention/paged_int8.cu, and since a stage is a group, its sums are
// multiplied with the group's scale as they join the others.
//
// Where there are few outputs the depth is cut among blocks, and a second, small kernel adds up what they found, in
// order.
#include "kernels/cuda/many_products.h"

#include <stdexcept>

#include "kernels/cuda/memory/mma.cuh"

namespace gka::kernels::cuda {
namespace many {

using memory::Bits;

constexpr int kOwnWarps = 8, kBlock = kOwnWarps * kLanes;
constexpr int kDeep = ManyProducts::kDeep, kColumns = ManyProducts::kColumns;
constexpr int kWarpRows = 32;
constexpr int kStages = 4;          // under way
constexpr int kPitch = kDeep + 16;  // of bfloat16: eight rows of four neighbours lie in different banks

struct alignas(8) Two {
  std::uint32_t of[2];
};

__device__ __forceinline__ Two four_of(const Bits* from) { return *reinterpret_cast<const Two*>(from); }

/// Bytes 2 kHalf and 2 kHalf + 1 of a word, as two bfloat16.
template <int kHalf>
__device__ __forceinline__ std::uint32_t two_of(std::uint32_t bytes) {
  const std::uint32_t placed = pick_bytes<kHalf == 0 ? 0x4140 : 0x4342>(bytes, 0x43434343u);
  return fma_two_bfloat16(placed & 0xff7fff7fu, 0x3f803f80u, (placed & 0xff80ff80u) ^ 0x80008000u);
}

struct Weights {
  char numbers[kColumns][kDeep + 16];
  float scales[kColumns];

  __device__ __forceinline__ void fetch(const ManyProducts::Matrix& matrix, std::int64_t depth, std::int64_t first,
                                        std::int64_t from) {
    const std::int64_t bytes = int8_row_bytes(depth);
    const char* rows = static_cast<const char*>(matrix.weight);
    for (int i = thread(); i < kColumns * kDeep / 16; i += kBlock) {
      const int row = i / (kDeep / 16), at = i % (kDeep / 16) * 16;
      const bool there = first + row < matrix.outputs;
      copy_async_or_zero<16>(&numbers[row][at], rows + (there ? (first + row) * bytes + from + at : 0), there);
    }
    if (thread() < kColumns) {
      const bool there = first + thread() < matrix.outputs;
      const std::int64_t at = there ? (first + thread()) * bytes + depth + from / kInt8Group * 4 : 0;
      copy_async_or_zero<4>(&scales[thread()], rows + at, there);
    }
  }
  __device__ __forceinline__ Two four(int row, int at) const {
    const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(&numbers[row][at]);
    return {{two_of<0>(word), two_of<1>(word)}};
  }
};

template <int kRows>
struct Stage {
  Bits x[kRows][kPitch];
  Weights weights;

  __device__ __forceinline__ void fetch_x(const ManyProducts& p, std::int64_t from) {
    for (int i = thread(); i < kRows * kDeep / 8; i += kBlock) {
      const int row = i / (kDeep / 8), at = i % (kDeep / 8) * 8;
      const bool there = row < p.rows;
      const Bits* own = static_cast<const Bits*>(p.x) + (there ? row * p.depth + from + at : 0);
      copy_async_or_zero<16>(&x[row][at], own, there);
    }
  }
};

/// Which part of which matrix a block has.
struct Tile {
  int matrix = 0;
  std::int64_t first = 0;   // output
  std::int64_t column = 0;  // of all matrices' tiles laid side by side
  std::int64_t split = 0;

  __device__ static __forceinline__ Tile of(const ManyProducts& p, std::int64_t splits) {
    Tile t;
    t.split = block() % splits;
    std::int64_t at = block() / splits;
    t.column = at * kColumns;
    while (at >= p.of[t.matrix].tiles()) at -= p.of[t.matrix++].tiles();
    t.first = at * kColumns;
    return t;
  }
};

/// A warp's part of a tile: 32 rows of x, and of the tile's columns so many that all warps together have all of both.
template <int kRows>
struct WarpPart {
  static constexpr int kRowWarps = kRows / kWarpRows, kWarpColumns = kColumns / (kOwnWarps / kRowWarps);
  static constexpr int kAcross = kWarpColumns / 8;
  int row, column, own, four;  // of the tile; this lane's row and numbers of a product's operands
  float sums[2][kAcross][4] = {};

  __device__ __forceinline__ WarpPart()
      : row(warp() % kRowWarps * kWarpRows),
        column(warp() / kRowWarps * kWarpColumns),
        own(lane() / 4),
        four(lane() % 4 * 4) {}

  __device__ __forceinline__ void add(const Stage<kRows>& stage) {
    float part[2][kAcross][4] = {};
#pragma unroll
    for (int at = 0; at < kDeep; at += 16) {
      std::uint32_t rows[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Two numbers = four_of(&stage.x[row + 16 * m + 8 * half + own][at + four]);
          rows[m][half] = numbers.of[0];
          rows[m][2 + half] = numbers.of[1];
        }
      }
#pragma unroll
      for (int n = 0; n < kAcross; ++n) {
        const Two weights = stage.weights.four(column + 8 * n + own, at + four);
#pragma unroll
        for (int m = 0; m < 2; ++m) memory::multiply_add(part[m][n], rows[m], weights.of[0], weights.of[1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kAcross; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = stage.weights.scales[column + 8 * n + lane() % 4 * 2 + i % 2];
#pragma unroll
        for (int m = 0; m < 2; ++m) sums[m][n][i] += scale * part[m][n][i];
      }
    }
  }

  /// Into y, or, where the depth is split, into this split's own part.
  __device__ __forceinline__ void write(const ManyProducts& p, const Tile& t, std::int64_t splits, float* parts) const {
    const auto& matrix = p.of[t.matrix];
    const std::int64_t all = p.tiles() * kColumns;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < kAcross; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const std::int64_t at_row = row + 16 * m + i / 2 * 8 + own;
          const int at_column = column + 8 * n + lane() % 4 * 2 + i % 2;
          if (at_row >= p.rows) continue;
          if (splits > 1) {
            parts[(t.split * p.rows + at_row) * all + t.column + at_column] = sums[m][n][i];
          } else if (t.first + at_column < matrix.outputs) {
            static_cast<Bits*>(matrix.y)[at_row * matrix.outputs + t.first + at_column] =
                static_cast<Bits>(two_bfloat16(sums[m][n][i], 0));
          }
        }
      }
    }
  }
};

template <int kRows>
__global__ void __launch_bounds__(kBlock, 2)
    multiply_many(const __grid_constant__ ManyProducts p, std::int64_t splits, float* parts) {
  auto* stages = reinterpret_cast<Stage<kRows>*>(shared_memory());
  let_next_start();
  const Tile t = Tile::of(p, splits);
  const auto& matrix = p.of[t.matrix];
  const int groups = static_cast<int>(p.depth / kDeep), each = static_cast<int>((groups + splits - 1) / splits);
  const int begin = static_cast<int>(t.split) * each, end = begin + each < groups ? begin + each : groups;
  const auto fetch_weights = [&](int group) {
    stages[(group - begin) % kStages].weights.fetch(matrix, p.depth, t.first, std::int64_t{group} * kDeep);
  };
  const auto fetch_x = [&](int group) { stages[(group - begin) % kStages].fetch_x(p, std::int64_t{group} * kDeep); };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (begin + i < end) fetch_weights(begin + i);
  }
  wait_for_earlier();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (begin + i < end) fetch_x(begin + i);
    end_group();
  }

  WarpPart<kRows> own;
  for (int group = begin; group < end; ++group) {
    wait_for_groups_but<kStages - 2>();
    sync();
    if (group + kStages - 1 < end) {
      fetch_weights(group + kStages - 1);
      fetch_x(group + kStages - 1);
    }
    end_group();
    own.add(stages[(group - begin) % kStages]);
  }
  wait_for_copies();
  own.write(p, t, splits, parts);
}

/// A thread has two neighbouring outputs of a row.
__global__ void __launch_bounds__(kBlock)
    add_parts(const __grid_constant__ ManyProducts p, std::int64_t splits, const float* parts) {
  let_next_start();
  wait_for_earlier();
  const std::int64_t all = p.tiles() * kColumns, at = (block() * kBlock + thread()) * 2;
  const std::int64_t row = at / all, column = at % all;
  if (row >= p.rows) return;
  float sums[2] = {};
  for (std::int64_t s = 0; s < splits; ++s) {
    const float* own = parts + (s * p.rows + row) * all + column;
    sums[0] += own[0];
    sums[1] += own[1];
  }
  std::int64_t tile = column / kColumns;
  int m = 0;
  while (tile >= p.of[m].tiles()) tile -= p.of[m++].tiles();
  const std::int64_t first = tile * kColumns + column % kColumns;
  for (int i = 0; i < 2; ++i) {
    if (first + i >= p.of[m].outputs) continue;
    static_cast<Bits*>(p.of[m].y)[row * p.of[m].outputs + first + i] = static_cast<Bits>(two_bfloat16(sums[i], 0));
  }
}

template <int kRows>
void start(const ManyProducts& p, const Device& device) {
  const auto splits = p.splits(), all = p.tiles() * kColumns;
  float* parts = nullptr;
  if (splits > 1) {
    parts = static_cast<float*>(device.allocate(static_cast<std::size_t>(splits * p.rows * all) * sizeof(float)));
  }
  launch_early<kBlock>(multiply_many<kRows>, p.tiles() * splits, static_cast<int>(kStages * sizeof(Stage<kRows>)),
                       device.index, device.stream, p, splits, parts);
  if (splits > 1) {
    launch_early<kBlock>(add_parts, (p.rows * all / 2 + kBlock - 1) / kBlock, 0, device.index, device.stream, p, splits,
                         static_cast<const float*>(parts));
  }
}

}  // namespace many

void many_products(const ManyProducts& p, const Device& device) {
  if (!has_many_products(p.rows, p.depth) || p.count < 1 || p.count > ManyProducts::kMostMatrices) {
    throw std::logic_error("gka: many_products was called with more than it takes");
  }
  const CurrentDevice current(device.index);
  p.rows <= many::kWarpRows ? many::start<32>(p, device) : many::start<64>(p, device);
}

}  // namespace gka::kernels::cuda
