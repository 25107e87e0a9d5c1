// The rotary embedding: channels i and i + half of a row turn by an angle of the row's token.
#include "kernels/cuda/fused.cuh"

namespace gka::kernels::cuda {
namespace {

template <DType kType>
__global__ void __launch_bounds__(kThreads) turn_rows(const __grid_constant__ Rotation r, void* y) {
  const std::int64_t across = r.half / kN, row = own_vector() / across;
  if (row >= r.tokens * r.heads) return;
  const std::int64_t channel = own_vector() % across * kN;
  const std::int64_t angle = row / r.heads * r.half + channel, at = row * 2 * r.half + channel;
  const Eight cos = read_vector<DType::float32, kN>(r.cos, angle), sin = read_vector<DType::float32, kN>(r.sin, angle);
  const Eight first = read_vector<kType, kN>(r.x, at), second = read_vector<kType, kN>(r.x, at + r.half);
  Eight low, high;
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const float s = r.sign * sin.x[i];
    low.x[i] = first.x[i] * cos.x[i] - second.x[i] * s;
    high.x[i] = second.x[i] * cos.x[i] + first.x[i] * s;
  }
  write_vector<kType, kN>(y, at, low);
  write_vector<kType, kN>(y, at + r.half, high);
}

}  // namespace

void rotate(const Rotation& r, void* y, const Device& device) {
  with_type_of(r.dtype, device, [&](auto type) {
    launch(turn_rows<decltype(type)::type>, grid_for(r.tokens * r.heads * (r.half / kN)), 0, device.stream, r, y);
  });
}

}  // namespace gka::kernels::cuda
