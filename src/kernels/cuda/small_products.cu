// A warp has kOutputs rows of a weight and all rows of x: lanes read 16 bytes each, side by side, and add up what they
// have; the sum over the lanes comes last. Nothing is kept in shared memory: x is small and stays in the first-level
// cache, and weights are seen once. They are asked for before x is there, while the kernel that makes it still runs.
#include "kernels/cuda/small_products.h"

#include <algorithm>

#include "kernels/cuda/vectors.cuh"

namespace gka::kernels::cuda {
namespace {

constexpr int kTogether = 8;                    // numbers that a lane reads at a time
constexpr int kOwnWarps = kLanes == 1 ? 1 : 4;  // of a block
constexpr int kOwnThreads = kOwnWarps * kLanes;

/// sums[o][r] = weight row first + o · apart times row r of x, the same in every lane.
template <DType kType, int kOutputs, int kRows>
__device__ __forceinline__ void multiply(const SmallProducts& p, const void* const (&weights)[kOutputs],
                                         const std::int64_t (&first)[kOutputs], float (&sums)[kOutputs][kRows]) {
  constexpr int kAhead = kRows == 1 ? 4 : 2;  // as many loads of each weight are under way at once
  constexpr std::int64_t kStep = std::int64_t{kLanes} * kTogether;
  for (int o = 0; o < kOutputs; ++o) {
    for (int r = 0; r < kRows; ++r) sums[o][r] = 0;
  }
  for (std::int64_t begin = lane() * kTogether; begin < p.depth; begin += kAhead * kStep) {
    Words<kTogether> held[kAhead][kOutputs];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const std::int64_t at = begin + a * kStep;
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        if (at < p.depth) held[a][o] = hold_vector<kType, kTogether>(weights[o], first[o] + at);
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const std::int64_t at = begin + a * kStep;
      if (at >= p.depth) break;
      Numbers<kTogether> weight[kOutputs];
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) weight[o] = unpack<kType>(held[a][o]);
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

/// A row of a weight, which lies in memory whatever the kernels before this one do.
__device__ __forceinline__ void ask_for_row(const SmallProducts& p, const void* weight, std::int64_t output) {
  const std::int64_t bytes = 2 * p.depth;
  const char* row = static_cast<const char*>(weight) + output * bytes;
  for (std::int64_t at = lane() * kLineBytes; at < bytes; at += kLanes * kLineBytes) ask_for(row + at);
}

template <DType kType>
__device__ __forceinline__ void put(void* y, std::int64_t at, float value) {
  const Words<2> both = pack<kType>(Numbers<2>{{value, 0}});
  static_cast<std::uint16_t*>(y)[at] = static_cast<std::uint16_t>(both.x[0]);
}

template <DType kType, int kRows>
__global__ void __launch_bounds__(kOwnThreads) multiply_few(const __grid_constant__ SmallProducts p) {
  std::int64_t output = block() * kOwnWarps + warp();
  int which = 0;
  while (which < p.count && output >= p.of[which].outputs) output -= p.of[which++].outputs;
  if (which == p.count) return;
  const SmallProducts::Matrix& matrix = p.of[which];
  ask_for_row(p, matrix.weight, output);
  wait_for_earlier();
  float sums[1][kRows];
  multiply<kType, 1, kRows>(p, {matrix.weight}, {output * p.depth}, sums);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (lane() == 0 && r < p.rows) put<kType>(matrix.y, r * matrix.outputs + output, sums[0][r]);
  }
}

template <DType kType, int kRows>
__global__ void __launch_bounds__(kOwnThreads) multiply_pair(const __grid_constant__ SmallProducts p) {
  const std::int64_t output = block() * kOwnWarps + warp();
  if (output >= p.of[0].outputs) return;
  for (int i = 0; i < 2; ++i) ask_for_row(p, p.of[i].weight, output);
  wait_for_earlier();
  float sums[2][kRows];
  multiply<kType, 2, kRows>(p, {p.of[0].weight, p.of[1].weight}, {output * p.depth, output * p.depth}, sums);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    // Rounded in between, as two products and a fused SwiGLU would.
    const Numbers<2> both = rounded<kType>(Numbers<2>{{sums[0][r], sums[1][r]}});
    const float y = both.x[0] * sigmoid_as<kType>(both.x[0]) * both.x[1];
    if (lane() == 0 && r < p.rows) put<kType>(p.of[0].y, r * p.of[0].outputs + output, y);
  }
}

template <DType kType, int kRows>
void start(const SmallProducts& p, const Device& device) {
  std::int64_t outputs = 0;
  for (int i = 0; i < (p.gated ? 1 : p.count); ++i) outputs += p.of[i].outputs;
  const auto kernel = p.gated ? multiply_pair<kType, kRows> : multiply_few<kType, kRows>;
  launch_early<kOwnThreads>(kernel, (outputs + kOwnWarps - 1) / kOwnWarps, 0, device.index, device.stream, p);
}

template <DType kType>
void start_as(const SmallProducts& p, const Device& device) {
  if (p.rows <= 1) return start<kType, 1>(p, device);
  if (p.rows <= 4) return start<kType, 4>(p, device);
  return start<kType, SmallProducts::kMostRows>(p, device);
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
