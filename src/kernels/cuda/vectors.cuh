// Several neighbouring numbers at a time, as float32 whatever they are stored as: one load or store for 4 or 8 numbers
// of 16 bits, one per 4 of float32.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>

#include "kernels/cuda/thread_block.cuh"

namespace gka::kernels::cuda {

/// In 32 bits where that will do, which takes a third of the time.
__device__ inline std::int64_t quotient(std::int64_t a, std::int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
  return a / b;
}

template <int kN>
struct Numbers {
  float x[kN];
};

/// kN numbers of 16 bits as they lie in memory.
template <int kN>
struct alignas(2 * kN) Words {
  std::uint32_t x[kN / 2];
};

/// float16 or bfloat16 as they lie in memory, and back.
template <DType kType, int kN>
__device__ __forceinline__ Numbers<kN> unpack(const Words<kN>& words) {
  Numbers<kN> numbers;
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const std::uint16_t half = static_cast<std::uint16_t>(words.x[i / 2] >> (i % 2 * 16));
    numbers.x[i] = read_as<float, kType>(&half, 0);
  }
  return numbers;
}
template <DType kType, int kN>
__device__ __forceinline__ Words<kN> pack(const Numbers<kN>& numbers) {
  Words<kN> words;
#pragma unroll
  for (int i = 0; i < kN; i += 2) {
    if constexpr (kType == DType::bfloat16) {
      words.x[i / 2] = two_bfloat16(numbers.x[i], numbers.x[i + 1]);
    } else {
      words.x[i / 2] = float_to_half(numbers.x[i]) | static_cast<std::uint32_t>(float_to_half(numbers.x[i + 1])) << 16;
    }
  }
  return words;
}

/// What memory of a type keeps of the numbers.
template <DType kType, int kN>
__device__ __forceinline__ Numbers<kN> rounded(const Numbers<kN>& numbers) {
  if constexpr (kType == DType::float32) {
    return numbers;
  } else {
    return unpack<kType>(pack<kType>(numbers));
  }
}

/// kN numbers as a thread holds those that it will need later: 16-bit ones take half the registers.
template <DType kType, int kN>
struct HeldAs {
  using type = Words<kN>;
};
template <int kN>
struct HeldAs<DType::float32, kN> {
  using type = Numbers<kN>;
};
template <DType kType, int kN>
using Held = typename HeldAs<kType, kN>::type;

template <DType kType, int kN>
__device__ __forceinline__ Numbers<kN> let_go(const Held<kType, kN>& held) {
  if constexpr (kType == DType::float32) {
    return held;
  } else {
    return unpack<kType>(held);
  }
}

/// Functions as exact as the type that their results end in.
template <DType kType>
__device__ __forceinline__ float inverse_as(float x) {
  return kType == DType::float32 ? 1.0f / x : quick_inverse(x);
}
template <DType kType>
__device__ __forceinline__ float sqrt_as(float x) {
  return kType == DType::float32 ? sqrt(x) : quick_sqrt(x);
}
template <DType kType>
__device__ __forceinline__ float exp_as(float x) {
  return kType == DType::float32 ? exp(x) : quick_exp(x);
}
template <DType kType>
__device__ __forceinline__ float sigmoid_as(float z) {
  return inverse_as<kType>(1.0f + exp_as<kType>(-z));
}

/// `at` is a multiple of kN, and the data aligned to so many numbers (float32: to 16 bytes).
template <DType kType, int kN>
__device__ __forceinline__ Held<kType, kN> hold_vector(const void* data, std::int64_t at) {
  if constexpr (kType == DType::float32) {
    Numbers<kN> numbers;
    const float* from = static_cast<const float*>(data) + at;
#pragma unroll
    for (int v = 0; v < kN; v += kVector) {
      const Vec<float> part = load(from + v);
#pragma unroll
      for (int i = 0; i < kVector; ++i) numbers.x[v + i] = part.x[i];
    }
    return numbers;
  } else {
    return *reinterpret_cast<const Words<kN>*>(static_cast<const std::uint16_t*>(data) + at);
  }
}
template <DType kType, int kN>
__device__ __forceinline__ Numbers<kN> read_vector(const void* data, std::int64_t at) {
  return let_go<kType, kN>(hold_vector<kType, kN>(data, at));
}

template <DType kType, int kN>
__device__ __forceinline__ void write_vector(void* data, std::int64_t at, const Numbers<kN>& numbers) {
  if constexpr (kType == DType::float32) {
    float* to = static_cast<float*>(data) + at;
#pragma unroll
    for (int v = 0; v < kN; v += kVector) {
      Vec<float> part;
#pragma unroll
      for (int i = 0; i < kVector; ++i) part.x[i] = numbers.x[v + i];
      store(to + v, part);
    }
  } else {
    *reinterpret_cast<Words<kN>*>(static_cast<std::uint16_t*>(data) + at) = pack<kType>(numbers);
  }
}

/// Whether views of one type can be read and written kN numbers at a time: their strides are multiples of it, and they
/// begin at one.
template <int kN>
bool in_vectors(DType dtype, std::initializer_list<const View*> views) {
  const std::int64_t number = dtype == DType::float32 ? 4 : 2;
  for (const View* view : views) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(view->data) % (number * kN) == 0;
    if (view->dtype != dtype || !aligned || view->batch_stride % kN != 0 || view->token_stride % kN != 0 ||
        view->head_stride % kN != 0) {
      return false;
    }
  }
  return dtype != DType::float64;
}

/// body(Storage<dtype>{}) on the host, for all types but float64.
template <typename Body>
void with_vectors_of(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::float32: return body(Storage<DType::float32>{});
    case DType::float16: return body(Storage<DType::float16>{});
    case DType::bfloat16: return body(Storage<DType::bfloat16>{});
    case DType::float64: break;
  }
  throw std::invalid_argument("gka: numbers of float64 are not read as vectors");
}

}  // namespace gka::kernels::cuda
