// What a decoder does besides mixing tokens, fused: each reads and writes memory once where torch's own operations
// would several times. Arrays are contiguous and aligned to 16 bytes, their last dimensions multiples of kFusedVector;
// arithmetic is in float32.
#pragma once

#include <cstdint>

#include "gka/block_kernels.h"
#include "gka/kernels.h"

namespace gka::kernels::cuda {

/// Numbers that are read and written at a time.
inline constexpr std::int64_t kFusedVector = 8;

/// y = SiLU(gate) ⊙ up, rows of `width` numbers each; those of gate and up, and of their gradients, begin every
/// `stride` numbers, those of y one behind the other.
struct SwiGlu {
  std::int64_t rows = 0, width = 0, stride = 0;
  DType dtype = DType::float32;  // not float64
  const void* gate = nullptr;
  const void* up = nullptr;
};
void swiglu(const SwiGlu& s, void* y, const Device& device);
/// Writes y once more where it is given: that costs less than to keep it.
struct SwiGluGradients {
  const void* d_y = nullptr;
  void* d_gate = nullptr;
  void* d_up = nullptr;
  void* y = nullptr;
};
void swiglu_backward(const SwiGlu& s, const SwiGluGradients& g, const Device& device);

/// gated_rms_norm_backward that writes y once more, likewise.
void gated_rms_norm_backward(const GatedRmsNorm& norm, const GatedRmsNormGradients& gradients, const View& y,
                             const Device& device);

/// y = (x + skip ∘ v) ⊙ SiLU(gate), rows of `width` numbers in heads of `head_dim`, a multiple of kFusedVector, with a
/// number of `skip` for each head. Rows begin every `…_stride` numbers, those of y and of the gradients one behind the
/// other.
struct GatedSkip {
  static constexpr std::int64_t kStretch = 64;  // rows of a block, backward

  std::int64_t rows = 0, width = 0, head_dim = 0, x_stride = 0, v_stride = 0, gate_stride = 0;
  DType dtype = DType::float32;  // not float64
  const void* x = nullptr;
  const void* v = nullptr;
  const void* gate = nullptr;
  const float* skip = nullptr;

  std::int64_t stretches() const { return (rows + kStretch - 1) / kStretch; }
};
void gated_skip(const GatedSkip& s, void* y, const Device& device);
struct GatedSkipGradients {
  const void* d_y = nullptr;
  void* d_x = nullptr;
  void* d_v = nullptr;
  void* d_gate = nullptr;
  float* d_skip = nullptr;  // in parts: [stretches, heads, head_dim / kFusedVector]
};
void gated_skip_backward(const GatedSkip& s, const GatedSkipGradients& g, const Device& device);

/// sum = x + y, normed = sum / √(mean(sum²) + eps) ⊙ weight over rows of `width` numbers, at most kMaxAddNorm. Without
/// y the sum is x itself, and not written.
inline constexpr std::int64_t kMaxAddNorm = 8192;
struct AddNorm {
  std::int64_t rows = 0, width = 0;
  DType dtype = DType::float32;  // not float64
  const void* x = nullptr;
  const void* y = nullptr;
  const float* weight = nullptr;
  float eps = 0;
};
void add_norm(const AddNorm& a, void* sum, void* normed, const Device& device);
/// `a.x` is the sum. d_x is the gradient of x and of y alike; d_sum may be left out.
struct AddNormGradients {
  const void* d_sum = nullptr;
  const void* d_normed = nullptr;
  void* d_x = nullptr;
  float* d_weight = nullptr;
};
void add_norm_backward(const AddNorm& a, const AddNormGradients& g, const Device& device);

/// GKA's gates of every token and head, from one projection of all of them: columns of kind 0 first, `heads` of each.
enum class Gate : std::uint8_t {
  log_decay,        // −exp(A_log) · softplus(z)
  sigmoid,          // σ(z)
  squared_sigmoid,  // (σ(z) + kAboveZero)²
};
inline constexpr float kAboveZero = 1e-6f;
struct Gates {
  std::int64_t tokens = 0;
  int heads = 0, count = 0;         // count: of kinds
  DType dtype = DType::float32;     // of the projection
  const void* projected = nullptr;  // [tokens, count · heads], a token every `stride` numbers
  std::int64_t stride = 0;
  struct Kind {
    Gate gate = Gate::sigmoid;
    const float* bias = nullptr;   // [heads], added to the projection; may be left out
    const float* a_log = nullptr;  // [heads], for log_decay
    float* value = nullptr;        // [tokens, heads]
    const float* d_value = nullptr;
  };
  Kind kinds[3] = {};
};
void gates(const Gates& g, const Device& device);
/// d_projected [tokens, count · heads]; d_bias and d_a_log [count · heads], of which the latter means nothing but for
/// log_decay.
void gates_backward(const Gates& g, void* d_projected, float* d_bias, float* d_a_log, const Device& device);

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
