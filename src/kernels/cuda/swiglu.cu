// y = SiLU(gate) ⊙ up. The backward pass computes y again where it is asked for: that costs less than to keep it.
#include "kernels/cuda/fused.cuh"

namespace gka::kernels::cuda {
namespace {

/// Where this thread's numbers begin in y, and in gate and up; behind the end: y < 0.
struct Gated {
  std::int64_t y, parts;
};
__device__ __forceinline__ Gated own_gated(const SwiGlu& s) {
  const std::int64_t at = own_vector() * kN, row = quotient(at, s.width);
  return {row < s.rows ? at : -1, row * s.stride + at - row * s.width};
}

template <DType kType>
__global__ void __launch_bounds__(kThreads) multiply_gated(const __grid_constant__ SwiGlu s, void* y) {
  const Gated at = own_gated(s);
  if (at.y < 0) return;
  const Eight gate = read_vector<kType, kN>(s.gate, at.parts), up = read_vector<kType, kN>(s.up, at.parts);
  Eight out;
#pragma unroll
  for (int i = 0; i < kN; ++i) out.x[i] = gate.x[i] * sigmoid_as<kType>(gate.x[i]) * up.x[i];
  write_vector<kType, kN>(y, at.y, out);
}

template <DType kType>
__global__ void __launch_bounds__(kThreads)
    differentiate_gated(const __grid_constant__ SwiGlu s, const __grid_constant__ SwiGluGradients g) {
  const Gated at = own_gated(s);
  if (at.y < 0) return;
  const Eight gate = read_vector<kType, kN>(s.gate, at.parts), up = read_vector<kType, kN>(s.up, at.parts);
  const Eight slope = read_vector<kType, kN>(g.d_y, at.y);
  Eight to_gate, to_up, y;
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const float open = sigmoid_as<kType>(gate.x[i]), passed = gate.x[i] * open;
    y.x[i] = passed * up.x[i];
    to_up.x[i] = slope.x[i] * passed;
    to_gate.x[i] = slope.x[i] * up.x[i] * open * (1.0f + gate.x[i] * (1.0f - open));
  }
  write_vector<kType, kN>(g.d_gate, at.parts, to_gate);
  write_vector<kType, kN>(g.d_up, at.parts, to_up);
  if (g.y != nullptr) write_vector<kType, kN>(g.y, at.y, y);
}

}  // namespace

void swiglu(const SwiGlu& s, void* y, const Device& device) {
  with_type_of(s.dtype, device, [&](auto type) {
    launch(multiply_gated<decltype(type)::type>, grid_for(s.rows * s.width / kN), 0, device.stream, s, y);
  });
}

void swiglu_backward(const SwiGlu& s, const SwiGluGradients& g, const Device& device) {
  with_type_of(s.dtype, device, [&](auto type) {
    launch(differentiate_gated<decltype(type)::type>, grid_for(s.rows * s.width / kN), 0, device.stream, s, g);
  });
}

}  // namespace gka::kernels::cuda
