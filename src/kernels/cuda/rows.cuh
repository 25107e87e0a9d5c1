// Rows of channels over the lanes of a warp: lane l has channels l, l + 32, l + 64, … of a row of up to kSize, so every
// load and store is coalesced whatever the row's alignment. On the host a warp is one lane that has them all.
#pragma once

#include "kernels/cuda/block.cuh"

namespace gka::kernels::cuda {

__host__ __device__ inline bool given(const View& view) { return view.data != nullptr; }

/// An element as it lies in memory (float64 beside float32 arithmetic excepted): loads of several rows are under way
/// before the first is converted, that is, waited for.
template <typename T>
struct Raw {
  using type = std::uint32_t;
};
template <>
struct Raw<double> {
  using type = double;
};

template <typename T>
__device__ __forceinline__ typename Raw<T>::type load_raw(const View& view, std::int64_t at) {
  if constexpr (sizeof(T) == 8) {
    return read<double>(view, at);
  } else {
    if (view.dtype == DType::float32) return static_cast<const std::uint32_t*>(view.data)[at];
    if (view.dtype == DType::float64)
      return float_to_bits(static_cast<float>(static_cast<const double*>(view.data)[at]));
    return static_cast<const std::uint16_t*>(view.data)[at];
  }
}

template <typename T>
__device__ __forceinline__ T from_raw(typename Raw<T>::type raw, DType dtype) {
  if constexpr (sizeof(T) == 8) {
    return raw;
  } else {
    if (dtype == DType::bfloat16) return bits_to_float(raw << 16);
    if (dtype == DType::float16) return half_to_float(static_cast<std::uint16_t>(raw));
    return bits_to_float(raw);
  }
}

/// kCount channels for each of a team of kTeam threads.
template <typename T, int kCount, int kTeam>
struct RawRow {
  typename Raw<T>::type bits[kCount];

  /// Channels from `member` on, as far as there are; element `at` is the row's first.
  __device__ __forceinline__ void load(const View& view, std::int64_t at, int channels, int member) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int c = i * kTeam + member;
      bits[i] = c < channels ? load_raw<T>(view, at + c) : typename Raw<T>::type{0};
    }
  }
  __device__ __forceinline__ T get(int i, DType dtype) const { return from_raw<T>(bits[i], dtype); }
};

template <typename T>
struct Activated {
  T value;
  T slope;
};

template <typename T>
__device__ __forceinline__ Activated<T> activate(Activation activation, T z) {
  if (activation == Activation::none) return {z, T{1}};
  const T sigmoid = T{1} / (T{1} + exp(-z)), rest = T{1} - sigmoid;
  if (activation == Activation::sigmoid) return {sigmoid, sigmoid * rest};
  return {z * sigmoid, sigmoid * (T{1} + z * rest)};
}

}  // namespace gka::kernels::cuda
