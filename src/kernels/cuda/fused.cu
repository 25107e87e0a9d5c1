#include "kernels/cuda/fused.h"

#include "kernels/cuda/vectors.cuh"

namespace gka::kernels::cuda {
namespace {

constexpr int kN = kFusedVector;
using Eight = Numbers<kN>;

__device__ __forceinline__ std::int64_t own_vector() { return block() * kThreads + thread(); }
std::int64_t grid_for(std::int64_t vectors) { return (vectors + kThreads - 1) / kThreads; }

__device__ __forceinline__ float sigmoid(float z) { return 1.0f / (1.0f + exp(-z)); }

// ---- SwiGLU -----------------------------------------------------------------------------------------------------

template <DType kType>
__global__ void __launch_bounds__(kThreads) multiply_gated(const __grid_constant__ SwiGlu s, void* y) {
  const std::int64_t at = own_vector() * kN;
  if (at >= s.size) return;
  const Eight gate = read_vector<kType, kN>(s.gate, at), up = read_vector<kType, kN>(s.up, at);
  Eight out;
#pragma unroll
  for (int i = 0; i < kN; ++i) out.x[i] = gate.x[i] * sigmoid(gate.x[i]) * up.x[i];
  write_vector<kType, kN>(y, at, out);
}

template <DType kType>
__global__ void __launch_bounds__(kThreads)
    differentiate_gated(const __grid_constant__ SwiGlu s, const void* d_y, void* d_gate, void* d_up) {
  const std::int64_t at = own_vector() * kN;
  if (at >= s.size) return;
  const Eight gate = read_vector<kType, kN>(s.gate, at), up = read_vector<kType, kN>(s.up, at);
  const Eight slope = read_vector<kType, kN>(d_y, at);
  Eight to_gate, to_up;
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const float open = sigmoid(gate.x[i]);
    to_up.x[i] = slope.x[i] * gate.x[i] * open;
    to_gate.x[i] = slope.x[i] * up.x[i] * open * (1.0f + gate.x[i] * (1.0f - open));
  }
  write_vector<kType, kN>(d_gate, at, to_gate);
  write_vector<kType, kN>(d_up, at, to_up);
}

// ---- Rotary embedding -------------------------------------------------------------------------------------------

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

// ---- Cross entropy ----------------------------------------------------------------------------------------------

/// Of some of a row's numbers: the largest, where it is, and Σ exp(number − largest).
struct Summary {
  float largest, sum;
  int place;

  __device__ __forceinline__ void join(const Summary& other) {
    if (other.sum == 0) return;  // of no numbers
    if (sum == 0) {
      *this = other;
      return;
    }
    const bool theirs = other.largest > largest || (other.largest == largest && other.place < place);
    const float top = other.largest > largest ? other.largest : largest;
    // Equal ones first: the difference of two infinities is no number.
    const float own = largest == top ? 1.0f : exp(largest - top);
    sum = sum * own + other.sum * (other.largest == top ? 1.0f : exp(other.largest - top));
    largest = top;
    if (theirs) place = other.place;
  }
};

/// Of all threads' summaries, in one order for every thread.
__device__ inline Summary join_threads(const Summary& own) {
  constexpr int kLast = 16;
  Summary* parts = reinterpret_cast<Summary*>(shared_memory());
  parts[thread()] = own;
  sync();
  Summary folded{};
  if (thread() < kLast) {
    for (int i = thread(); i < kThreads; i += kLast) folded.join(parts[i]);
  }
  sync();
  if (thread() < kLast) parts[thread()] = folded;
  sync();
  Summary total{};
  for (int i = 0; i < least(kLast, kThreads); ++i) total.join(parts[i]);
  return total;
}

/// A row per block, which reads it twice; the second time it comes from the cache.
template <DType kType>
__global__ void __launch_bounds__(kThreads) cross_entropy_rows(const __grid_constant__ CrossEntropy c) {
  const std::int64_t row = block(), first = row * c.stride, label = c.labels[row];
  const int classes = static_cast<int>(c.classes), width = static_cast<int>(c.stride);
  Summary own{};
  for (int at = thread() * kN; at < classes; at += kThreads * kN) {
    const Eight logits = read_vector<kType, kN>(c.logits, first + at);
    Summary here{logits.x[0], 1, at};
    for (int i = 1; i < kN && at + i < classes; ++i) {
      if (logits.x[i] > here.largest) here = {logits.x[i], 1, at + i};
    }
    if (finite(here.largest)) {
      here.sum = 0;
      for (int i = 0; i < kN && at + i < classes; ++i) here.sum += exp(logits.x[i] - here.largest);
    }
    own.join(here);
  }
  const Summary all = join_threads(own);
  const bool counts = label >= 0 && label < c.classes;
  if (thread() == 0) {
    const float chosen = counts ? read_as<float, kType>(c.logits, first + label) : 0;
    c.losses[row] = counts ? all.largest + log(all.sum) - chosen : 0;
    if (c.predicted != nullptr) c.predicted[row] = all.place;
  }
  if (c.scale == nullptr) return;
  sync();  // the label's logit has been read
  const float scale = counts ? *c.scale : 0, factor = scale / all.sum;
  for (int at = thread() * kN; at < width; at += kThreads * kN) {
    Eight numbers = read_vector<kType, kN>(c.logits, first + at);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const bool inside = at + i < classes && counts;
      numbers.x[i] = inside ? exp(numbers.x[i] - all.largest) * factor - (at + i == label ? scale : 0) : 0;
    }
    write_vector<kType, kN>(c.logits, first + at, numbers);
  }
}

template <typename Body>
void with_type_of(DType dtype, const Device& device, Body&& body) {
  const CurrentDevice current(device.index);
  with_vectors_of(dtype, body);
}

}  // namespace

void swiglu(const SwiGlu& s, void* y, const Device& device) {
  with_type_of(s.dtype, device, [&](auto type) {
    launch(multiply_gated<decltype(type)::type>, grid_for(s.size / kN), 0, device.stream, s, y);
  });
}

void swiglu_backward(const SwiGlu& s, const void* d_y, void* d_gate, void* d_up, const Device& device) {
  with_type_of(s.dtype, device, [&](auto type) {
    launch(differentiate_gated<decltype(type)::type>, grid_for(s.size / kN), 0, device.stream, s, d_y, d_gate, d_up);
  });
}

void rotate(const Rotation& r, void* y, const Device& device) {
  with_type_of(r.dtype, device, [&](auto type) {
    launch(turn_rows<decltype(type)::type>, grid_for(r.tokens * r.heads * (r.half / kN)), 0, device.stream, r, y);
  });
}

void cross_entropy(const CrossEntropy& c, const Device& device) {
  with_type_of(c.dtype, device, [&](auto type) {
    launch(cross_entropy_rows<decltype(type)::type>, c.rows, kThreads * static_cast<int>(sizeof(Summary)),
           device.stream, c);
  });
}

}  // namespace gka::kernels::cuda
