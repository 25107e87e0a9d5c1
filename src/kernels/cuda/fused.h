// What a decoder does besides mixing tokens, fused: each reads and writes memory once where torch's own operations
// would several times. Arrays are contiguous and aligned to 16 bytes, their last dimensions multiples of kFusedVector;
// arithmetic is in float32.
#pragma once

#include <cstdint>

#include "gka/kernels.h"

namespace gka::kernels::cuda {

/// Numbers that are read and written at a time.
inline constexpr std::int64_t kFusedVector = 8;

/// y = SiLU(gate) ⊙ up, `size` numbers each.
struct SwiGlu {
  std::int64_t size = 0;
  DType dtype = DType::float32;  // not float64
  const void* gate = nullptr;
  const void* up = nullptr;
};
void swiglu(const SwiGlu& s, void* y, const Device& device);
void swiglu_backward(const SwiGlu& s, const void* d_y, void* d_gate, void* d_up, const Device& device);

/// Channel i of the first half of each of tokens × heads rows of 2 · half turns with channel i + half by an angle of
/// its token's; sign −1 turns back.
struct Rotation {
  std::int64_t tokens = 0, heads = 0, half = 0;
  DType dtype = DType::float32;  // not float64
  const void* x = nullptr;
  const float* cos = nullptr;  // [tokens, half]
  const float* sin = nullptr;
  float sign = 1;
};
void rotate(const Rotation& r, void* y, const Device& device);

/// Per row: loss = log Σ exp(logits) − logits[label], 0 where the label is negative.
struct CrossEntropy {
  std::int64_t rows = 0, classes = 0, stride = 0;  // stride ≥ classes
  DType dtype = DType::float32;                    // not float64
  void* logits = nullptr;
  const std::int64_t* labels = nullptr;
  /// Where given, logits are replaced by *scale · (softmax − one-hot), and by 0 behind the classes.
  const float* scale = nullptr;
  float* losses = nullptr;
  std::int64_t* predicted = nullptr;  // the first of the largest; may be left out
};
void cross_entropy(const CrossEntropy& c, const Device& device);

}  // namespace gka::kernels::cuda
