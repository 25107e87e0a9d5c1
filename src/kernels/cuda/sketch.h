// What lies between queries and keys and a sketch of them (ops/sketch.h): P of each head [low, wide] makes `low`
// numbers of `wide` channels. Each of these reads and writes memory once; bfloat16, sums in float32.
#pragma once

#include <cstdint>

#include "gka/kernels.h"
#include "kernels/cuda/memory/memory.h"

namespace gka::kernels::cuda {

/// Rows of all arrays begin at 16 bytes.
struct Sketch {
  static constexpr std::int64_t kStretch = 1024;  // tokens whose part of P's gradient is one sum

  std::int64_t tokens = 0, heads = 0;
  std::int64_t wide = 0, low = 0;  // as has_sketch takes them
  const void* p = nullptr;         // [heads, low, wide], contiguous
  const float* alpha = nullptr;    // [tokens, heads]; may be left out

  constexpr std::int64_t stretches() const { return (tokens + kStretch - 1) / kStretch; }
};

constexpr bool has_sketch(std::int64_t wide, std::int64_t low) {
  return (low == 32 || low == 64) && wide % 64 == 0 && wide > 0 && wide <= 256;
}

/// to [tokens, heads, wide] = base + Pᵀ low, with α (1 − α) base + α Pᵀ low.
void from_sketch(const Sketch& s, const MemoryRows& base, const MemoryRows& low, void* to, const Device& device);

/// The gradients of from_sketch with α, where d is that of its result; those of rows are contiguous.
struct SketchGradients {
  MemoryRows d, base, low;
  void* d_base = nullptr;
  void* d_low = nullptr;
  float* d_alpha = nullptr;
};
void from_sketch_backward(const Sketch& s, const SketchGradients& g, const Device& device);

/// Σ_tokens low xᵀ of every head, with α Σ α low xᵀ, in parts to be added up: [stretches, heads, low, wide].
void sketch_products(const Sketch& s, const MemoryRows& low, const MemoryRows& x, float* parts, const Device& device);

}  // namespace gka::kernels::cuda
