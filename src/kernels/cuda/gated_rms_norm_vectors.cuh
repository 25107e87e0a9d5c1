// The gated RMS norm of short rows that lie one behind the other: a thread takes four neighbouring channels in one
// load, and dim / 4 neighbouring lanes are a row. Where a row lies is then no question, and many rows are under way at
// once.
#pragma once

#include "gka/block_kernels.h"
#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/vectors.cuh"

namespace gka::kernels::cuda::vectors {

inline constexpr int kPart = 4;       // channels of a thread
inline constexpr int kAtOnce = 4;     // rows of a thread, forward
inline constexpr int kRowsEach = 32;  // rows of a thread, backward

using Part = Numbers<kPart>;

__device__ __forceinline__ float sum_row(float value, int lanes) {
  for (int apart = lanes / 2; apart > 0; apart /= 2) value += from_lane(value, apart);
  return value;
}

/// This thread's channels of the weight.
__device__ inline Part weight_of(const GatedRmsNorm& n, int lanes) {
  Part weight;
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    weight.x[i] = given(n.weight) ? read<float>(n.weight, thread() % lanes * kPart + i) : 1.0f;
  }
  return weight;
}

__device__ __forceinline__ float root_of(const GatedRmsNorm& n, const Part& x, int lanes) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kPart; ++i) squares += x.x[i] * x.x[i];
  return 1.0f / sqrt(sum_row(squares, lanes) / static_cast<float>(n.dim) + static_cast<float>(n.eps));
}

/// 0 behind the end: such threads take part in sums all the same.
template <DType kType>
__device__ __forceinline__ Part read_part(const View& view, std::int64_t vector, std::int64_t count) {
  if (vector >= count || !given(view)) return {};
  return read_vector<kType, kPart>(view.data, vector * kPart);
}

template <DType kType>
__global__ void __launch_bounds__(kThreads)
    norm_rows(const __grid_constant__ GatedRmsNorm n, const View y, std::int64_t count, int lanes) {
  const Part weight = weight_of(n, lanes);
  const std::int64_t first = block() * kThreads * kAtOnce + thread();
  Part x[kAtOnce], gate[kAtOnce];
#pragma unroll
  for (int a = 0; a < kAtOnce; ++a) {
    x[a] = read_part<kType>(n.x, first + a * kThreads, count);
    gate[a] = read_part<kType>(n.gate, first + a * kThreads, count);
  }
#pragma unroll
  for (int a = 0; a < kAtOnce; ++a) {
    const float root = root_of(n, x[a], lanes);
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      x[a].x[i] *= root * weight.x[i];
      if (given(n.gate)) x[a].x[i] *= activate(n.activation, gate[a].x[i]).value;
    }
    const std::int64_t at = first + a * kThreads;
    if (at < count) write_vector<kType, kPart>(y.data, at * kPart, x[a]);
  }
}

/// dx = r e − r³ mean(x ⊙ e) x with e = dy ⊙ w ⊙ act(gate). A block leaves its rows' sum for the weight in `kept`.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    differentiate_rows(const __grid_constant__ GatedRmsNorm n, const __grid_constant__ GatedRmsNormGradients g,
                       std::int64_t count, int lanes, float* kept) {
  const Part weight = weight_of(n, lanes);
  Part d_weight{};
  for (int a = 0; a < kRowsEach; ++a) {
    const std::int64_t at = (block() * kRowsEach + a) * kThreads + thread();
    const Part x = read_part<kType>(n.x, at, count), d_y = read_part<kType>(g.d_y, at, count);
    const Part gate = read_part<kType>(n.gate, at, count);
    const float root = root_of(n, x, lanes);
    Part e, d_gate, d_x;
    float along = 0;
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      const Activated<float> open = given(n.gate) ? activate(n.activation, gate.x[i]) : Activated<float>{1.0f, 0.0f};
      const float normed = d_y.x[i] * x.x[i] * root;
      e.x[i] = d_y.x[i] * weight.x[i] * open.value;
      along += x.x[i] * e.x[i];
      d_weight.x[i] += normed * open.value;
      d_gate.x[i] = normed * weight.x[i] * open.slope;
    }
    const float bend = root * root * root * sum_row(along, lanes) / static_cast<float>(n.dim);
#pragma unroll
    for (int i = 0; i < kPart; ++i) d_x.x[i] = root * e.x[i] - bend * x.x[i];
    if (at >= count) continue;
    write_vector<kType, kPart>(g.d_x.data, at * kPart, d_x);
    if (given(g.d_gate)) write_vector<kType, kPart>(g.d_gate.data, at * kPart, d_gate);
  }
  float* parts = reinterpret_cast<float*>(shared_memory());  // [kThreads][kPart]
#pragma unroll
  for (int i = 0; i < kPart; ++i) parts[thread() * kPart + i] = d_weight.x[i];
  sync();
  const int dim = static_cast<int>(n.dim);
  each(dim, [&](int c) {
    float total = 0;
    for (int at = c; at < kThreads * kPart; at += dim) total += parts[at];
    kept[block() * dim + c] = total;
  });
}

/// Rows one behind the other.
inline bool is_dense(const GatedRmsNorm& n, const View& view) {
  return (n.heads == 1 || view.head_stride == n.dim) && (n.tokens == 1 || view.token_stride == n.heads * n.dim) &&
         (n.batch == 1 || view.batch_stride == n.tokens * n.heads * n.dim);
}

/// Whether a call is one of these; `views` are the arrays as large as x.
inline bool takes(const GatedRmsNorm& n, std::initializer_list<const View*> views) {
  const std::int64_t lanes = n.dim / kPart;
  if (n.dim % kPart != 0 || lanes > kLanes || (lanes & (lanes - 1)) != 0) return false;
  for (const View* view : views) {
    if (given(*view) && (!is_dense(n, *view) || !in_vectors<kPart>(n.x.dtype, {view}))) return false;
  }
  return true;
}

inline std::int64_t vectors_of(const GatedRmsNorm& n) { return n.batch * n.tokens * n.heads * (n.dim / kPart); }
inline std::int64_t blocks_of(const GatedRmsNorm& n, int rows_each) {
  const std::int64_t of_block = static_cast<std::int64_t>(kThreads) * rows_each;
  return (vectors_of(n) + of_block - 1) / of_block;
}

inline void forward(const GatedRmsNorm& n, const View& y, const Device& device) {
  const CurrentDevice current(device.index);
  with_vectors_of(n.x.dtype, [&](auto type) {
    launch(norm_rows<decltype(type)::type>, blocks_of(n, kAtOnce), 0, device.stream, n, y, vectors_of(n),
           static_cast<int>(n.dim / kPart));
  });
}

/// Returns the blocks' sums for the weight, [blocks, dim].
inline const float* backward(const GatedRmsNorm& n, const GatedRmsNormGradients& g, const Device& device) {
  const CurrentDevice current(device.index);
  const std::int64_t blocks = blocks_of(n, kRowsEach);
  float* kept = static_cast<float*>(device.allocate(static_cast<std::size_t>(blocks * n.dim) * sizeof(float) + 1));
  with_vectors_of(n.x.dtype, [&](auto type) {
    launch(differentiate_rows<decltype(type)::type>, blocks, kThreads * kPart * static_cast<int>(sizeof(float)),
           device.stream, n, g, vectors_of(n), static_cast<int>(n.dim / kPart), kept);
  });
  return kept;
}

}  // namespace gka::kernels::cuda::vectors
