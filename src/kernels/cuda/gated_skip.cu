// y = (x + skip ∘ v) ⊙ SiLU(gate). Backward a block has a stretch of rows, its threads a vector of columns each, which
// they go down: so a thread's share of the gradient of `skip` is a sum in its registers.
#include "kernels/cuda/fused.cuh"

namespace gka::kernels::cuda {
namespace {

template <DType kType>
__global__ void __launch_bounds__(kThreads) gate_skipped(const __grid_constant__ GatedSkip s, void* y) {
  const std::int64_t at = own_vector() * kN, row = quotient(at, s.width), column = at - row * s.width;
  if (row >= s.rows) return;
  const Eight x = read_vector<kType, kN>(s.x, row * s.x_stride + column);
  const Eight v = read_vector<kType, kN>(s.v, row * s.v_stride + column);
  const Eight gate = read_vector<kType, kN>(s.gate, row * s.gate_stride + column);
  const float skip = s.skip[quotient(column, s.head_dim)];
  Eight out;
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    out.x[i] = (x.x[i] + skip * v.x[i]) * (gate.x[i] * sigmoid_as<kType>(gate.x[i]));
  }
  write_vector<kType, kN>(y, at, out);
}

template <DType kType>
__global__ void __launch_bounds__(kThreads)
    differentiate_skipped(const __grid_constant__ GatedSkip s, const __grid_constant__ GatedSkipGradients g) {
  const std::int64_t first = block() * GatedSkip::kStretch, vectors = s.width / kN;
  const std::int64_t end = first + GatedSkip::kStretch < s.rows ? first + GatedSkip::kStretch : s.rows;
  for (std::int64_t vector = thread(); vector < vectors; vector += kThreads) {
    const std::int64_t column = vector * kN;
    const float skip = s.skip[quotient(column, s.head_dim)];
    float sum = 0;
#pragma unroll 2
    for (std::int64_t row = first; row < end; ++row) {
      const Eight x = read_vector<kType, kN>(s.x, row * s.x_stride + column);
      const Eight v = read_vector<kType, kN>(s.v, row * s.v_stride + column);
      const Eight gate = read_vector<kType, kN>(s.gate, row * s.gate_stride + column);
      const Eight slope = read_vector<kType, kN>(g.d_y, row * s.width + column);
      Eight to_x, to_v, to_gate;
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const float open = sigmoid_as<kType>(gate.x[i]);
        to_x.x[i] = slope.x[i] * gate.x[i] * open;
        to_v.x[i] = skip * to_x.x[i];
        sum += to_x.x[i] * v.x[i];
        to_gate.x[i] = slope.x[i] * (x.x[i] + skip * v.x[i]) * open * (1.0f + gate.x[i] * (1.0f - open));
      }
      write_vector<kType, kN>(g.d_x, row * s.width + column, to_x);
      write_vector<kType, kN>(g.d_v, row * s.width + column, to_v);
      write_vector<kType, kN>(g.d_gate, row * s.width + column, to_gate);
    }
    g.d_skip[block() * vectors + vector] = sum;
  }
}

}  // namespace

void gated_skip(const GatedSkip& s, void* y, const Device& device) {
  with_type_of(s.dtype, device, [&](auto type) {
    launch(gate_skipped<decltype(type)::type>, grid_for(s.rows * s.width / kN), 0, device.stream, s, y);
  });
}

void gated_skip_backward(const GatedSkip& s, const GatedSkipGradients& g, const Device& device) {
  with_type_of(s.dtype, device, [&](auto type) {
    launch(differentiate_skipped<decltype(type)::type>, s.stretches(), 0, device.stream, s, g);
  });
}

}  // namespace gka::kernels::cuda
