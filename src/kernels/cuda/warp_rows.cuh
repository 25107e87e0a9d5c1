// Rows of channels over the lanes of a warp: lane l has channels l, l + 32, l + 64, … of a row of up to kSize, so every
// load and store is coalesced whatever the row's alignment. On the host a warp is one lane that has them all.
#pragma once

#include "kernels/cuda/thread_block.cuh"

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

/// From σ(z).
template <typename T>
__device__ __forceinline__ Activated<T> activated(Activation activation, T z, T sigmoid) {
  const T rest = T{1} - sigmoid;
  if (activation == Activation::sigmoid) return {sigmoid, sigmoid * rest};
  return {z * sigmoid, sigmoid * (T{1} + z * rest)};
}
template <typename T>
__device__ __forceinline__ Activated<T> activate(Activation activation, T z) {
  if (activation == Activation::none) return {z, T{1}};
  return activated<T>(activation, z, T{1} / (T{1} + exp(-z)));
}

/// Up to kSize channels over a warp or, kWide, a block.
template <bool kWide, int kSize_>
struct Team {
  static constexpr int kSize = kSize_;
  static constexpr int kMembers = kWide ? kThreads : kLanes;
  static constexpr int kTeams = kWide ? 1 : kWarps;  // of a block
  static constexpr int kCount = kSize / kMembers;

  __device__ static int member() { return kWide ? thread() : lane(); }
  __device__ static std::int64_t index() { return kWide ? block() : block() * kWarps + warp(); }
  __device__ static int channel(int i) { return i * kMembers + member(); }

  template <typename T>
  __device__ static T sum(T value) {
    value = sum_lanes(value);
    if constexpr (kWide) {
      T* parts = reinterpret_cast<T*>(shared_memory());
      sync();
      if (lane() == 0) parts[warp()] = value;
      sync();
      value = 0;
      for (int w = 0; w < kWarps; ++w) value += parts[w];
    }
    return value;
  }
};

/// total[c] = Σ_b kept[b][c]: kWarps warps share a channel's blocks, a lane per channel.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_kept(const T* kept, std::int64_t blocks, std::int64_t channels, const View total) {
  double* parts = reinterpret_cast<double*>(shared_memory());
  const std::int64_t c = block() * kLanes + lane();
  double sum = 0;
  for (std::int64_t b = warp(); c < channels && b < blocks; b += kWarps) sum += kept[b * channels + c];
  parts[thread()] = sum;
  sync();
  if (warp() > 0 || c >= channels) return;
  sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += parts[w * kLanes + lane()];
  write(total, c, sum);
}

/// What blocks have kept, [blocks, channels], added up in their order.
template <typename T>
void sum_blocks(const T* kept, std::int64_t blocks, std::int64_t channels, const View& total, const Device& device) {
  const CurrentDevice current(device.index);
  launch(sum_kept<T>, (channels + kLanes - 1) / kLanes, kThreads * 8, device.stream, kept, blocks, channels, total);
}

}  // namespace gka::kernels::cuda
