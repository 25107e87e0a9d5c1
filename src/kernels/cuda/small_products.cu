// A warp has kOutputs rows of a weight and all rows of x: lanes read 16 bytes each, side by side, and add up what they
// have; the sum over the lanes comes last. Nothing is kept in shared memory: x is small and stays in the first-level
// cache, and weights are seen once. They are asked for before x is there, while the kernel that makes it still runs.
#include "kernels/cuda/small_products.h"

#include <algorithm>

#include "kernels/cuda/vectors.cuh"
#include "kernels/products.h"

namespace gka::kernels::cuda {
namespace {

constexpr int kTogether = 8;                    // numbers that a lane reads at a time
constexpr int kOwnWarps = kLanes == 1 ? 1 : 4;  // of a block
constexpr int kOwnThreads = kOwnWarps * kLanes;

/// Rows of weights of x's own type.
template <DType kType>
struct Plain {
  using Held = Words<kTogether>;
  __device__ static std::int64_t row_bytes(std::int64_t depth) { return 2 * depth; }
  __device__ static __forceinline__ Held hold(const char* row, std::int64_t, std::int64_t at) {
    return hold_vector<kType, kTogether>(row, at);
  }
  __device__ static __forceinline__ Numbers<kTogether> numbers(const Held& held) { return unpack<kType>(held); }
};

/// Bytes with a scale for each group, which follow the row's numbers. Rows begin at multiples of four bytes.
struct Bytes {
  struct Held {
    std::uint32_t word[2];
    float scale;
  };
  static_assert(kTogether == 8 && kInt8Group % kTogether == 0);
  __device__ static std::int64_t row_bytes(std::int64_t depth) {
    return (depth + kInt8Group - 1) / kInt8Group * (kInt8Group + 4);
  }
  __device__ static __forceinline__ Held hold(const char* row, std::int64_t depth, std::int64_t at) {
    const auto* words = reinterpret_cast<const std::uint32_t*>(row + at);
    const std::int64_t groups = (depth + kInt8Group - 1) / kInt8Group;
    const auto* scales = reinterpret_cast<const float*>(row + groups * kInt8Group);
    return {{words[0], words[1]}, scales[at / kInt8Group]};
  }
  __device__ static __forceinline__ Numbers<kTogether> numbers(const Held& held) {
    Numbers<kTogether> numbers;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      numbers.x[i] = held.scale * static_cast<float>(static_cast<std::int8_t>(held.word[i / 4] >> (i % 4 * 8) & 0xff));
    }
    return numbers;
  }
};

/// sums[o][r] = row o of the weights times row r of x, the same in every lane.
template <DType kType, typename Stored, int kOutputs, int kRows>
__device__ __forceinline__ void multiply(const SmallProducts& p, const char* const (&rows)[kOutputs],
                                         float (&sums)[kOutputs][kRows]) {
  constexpr int kAhead = kRows == 1 ? 4 : 2;  // as many loads of each weight are under way at once
  constexpr std::int64_t kStep = std::int64_t{kLanes} * kTogether;
  for (int o = 0; o < kOutputs; ++o) {
    for (int r = 0; r < kRows; ++r) sums[o][r] = 0;
  }
  for (std::int64_t begin = lane() * kTogether; begin < p.depth; begin += kAhead * kStep) {
    typename Stored::Held held[kAhead][kOutputs];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const std::int64_t at = begin + a * kStep;
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        if (at < p.depth) held[a][o] = Stored::hold(rows[o], p.depth, at);
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const std::int64_t at = begin + a * kStep;
      if (at >= p.depth) break;
      Numbers<kTogether> weight[kOutputs];
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) weight[o] = Stored::numbers(held[a][o]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (r >= p.rows) break;
        const Numbers<kTogether> x = read_vector<kType, kTogether>(p.x, r * p.depth + at);
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
          for (int i = 0; i < kTogether; ++i) sums[o][r] += weight[o].x[i] * x.x[i];
        }
      }
    }
  }
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[o][r] = sum_lanes(sums[o][r]);
  }
}

/// A row of a weight, asked for: it lies in memory whatever the kernels before this one do.
template <typename Stored>
__device__ __forceinline__ const char* row_of(const SmallProducts& p, const void* weight, std::int64_t output) {
  const std::int64_t bytes = Stored::row_bytes(p.depth);
  const char* row = static_cast<const char*>(weight) + output * bytes;
  for (std::int64_t at = lane() * kLineBytes; at < bytes; at += kLanes * kLineBytes) ask_for(row + at);
  return row;
}

template <DType kType>
__device__ __forceinline__ void put(void* y, std::int64_t at, float value) {
  const Words<2> both = pack<kType>(Numbers<2>{{value, 0}});
  static_cast<std::uint16_t*>(y)[at] = static_cast<std::uint16_t>(both.x[0]);
}

template <DType kType, typename Stored, int kRows>
__global__ void __launch_bounds__(kOwnThreads) multiply_few(const __grid_constant__ SmallProducts p) {
  std::int64_t output = block() * kOwnWarps + warp();
  int which = 0;
  while (which < p.count && output >= p.of[which].outputs) output -= p.of[which++].outputs;
  if (which == p.count) return;
  const SmallProducts::Matrix& matrix = p.of[which];
  const char* const rows[] = {row_of<Stored>(p, matrix.weight, output)};
  wait_for_earlier();
  float sums[1][kRows];
  multiply<kType, Stored, 1, kRows>(p, rows, sums);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (lane() == 0 && r < p.rows) put<kType>(matrix.y, r * matrix.outputs + output, sums[0][r]);
  }
}

template <DType kType, typename Stored, int kRows>
__global__ void __launch_bounds__(kOwnThreads) multiply_pair(const __grid_constant__ SmallProducts p) {
  const std::int64_t output = block() * kOwnWarps + warp();
  if (output >= p.of[0].outputs) return;
  const char* const rows[] = {row_of<Stored>(p, p.of[0].weight, output), row_of<Stored>(p, p.of[1].weight, output)};
  wait_for_earlier();
  float sums[2][kRows];
  multiply<kType, Stored, 2, kRows>(p, rows, sums);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // Rounded in between, as two products and a fused SwiGLU would.
    const Numbers<2> both = rounded<kType>(Numbers<2>{{sums[0][r], sums[1][r]}});
    const float y = both.x[0] * sigmoid_as<kType>(both.x[0]) * both.x[1];
    if (lane() == 0 && r < p.rows) put<kType>(p.of[0].y, r * p.of[0].outputs + output, y);
  }
}

template <DType kType, typename Stored, int kRows>
void start(const SmallProducts& p, const Device& device) {
  std::int64_t outputs = 0;
  for (int i = 0; i < (p.gated ? 1 : p.count); ++i) outputs += p.of[i].outputs;
  const auto kernel = p.gated ? multiply_pair<kType, Stored, kRows> : multiply_few<kType, Stored, kRows>;
  launch_early<kOwnThreads>(kernel, (outputs + kOwnWarps - 1) / kOwnWarps, 0, device.index, device.stream, p);
}

template <DType kType, typename Stored>
void start_with(const SmallProducts& p, const Device& device) {
  if (p.rows <= 1) return start<kType, Stored, 1>(p, device);
  if (p.rows <= 4) return start<kType, Stored, 4>(p, device);
  return start<kType, Stored, SmallProducts::kMostRows>(p, device);
}

template <DType kType>
void start_as(const SmallProducts& p, const Device& device) {
  p.int8 ? start_with<kType, Bytes>(p, device) : start_with<kType, Plain<kType>>(p, device);
}

}  // namespace

void small_products(const SmallProducts& p, const Device& device) {
  if (p.rows > SmallProducts::kMostRows || p.count > SmallProducts::kMostMatrices || p.depth % kTogether != 0) {
    throw std::logic_error("gka: small_products was called with more than it takes");
  }
  const CurrentDevice current(device.index);
  p.dtype == DType::float16 ? start_as<DType::float16>(p, device) : start_as<DType::bfloat16>(p, device);
}

}  // namespace gka::kernels::cuda
