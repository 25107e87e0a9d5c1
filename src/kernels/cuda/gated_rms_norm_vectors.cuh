// The gated RMS norm of short rows that lie one behind the other: a thread takes eight neighbouring channels in one
// load, and dim / 8 neighbouring lanes are a row. Where a row lies is then no question, and many rows are under way at
// once. The gate and its gradient may be columns of something wider: their tokens lie evenly apart.
#pragma once

#include "gka/block_kernels.h"
#include "kernels/cuda/vectors.cuh"
#include "kernels/cuda/warp_rows.cuh"

namespace gka::kernels::cuda::vectors {

inline constexpr int kPart = 8;       // channels of a thread
inline constexpr int kRowsEach = 16;  // rows of a thread, backward; forward half as many
// Of these forward under way together.
template <DType kType>
inline constexpr int kAtOnce = kType == DType::float32 ? 2 : 4;

using Part = Numbers<kPart>;

__device__ __forceinline__ float sum_row(float value, int lanes) {
  for (int apart = lanes / 2; apart > 0; apart /= 2) value += from_lane(value, apart);
  return value;
}

/// This thread's channels of the weight.
__device__ inline Part weight_of(const GatedRmsNorm& n, int lanes) {
  Part weight;
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    weight.x[i] = given(n.weight) ? read<float>(n.weight, thread() % lanes * kPart + i) : 1.0f;
  }
  return weight;
}

/// What multiplies a row: nothing, or an activation of a gate.
enum class Gating { none, silu, sigmoid };

template <DType kType, Gating kGating>
__device__ __forceinline__ Activated<float> opened(float gate) {
  if constexpr (kGating == Gating::none) {
    return {1.0f, 0.0f};
  } else {
    return activated(kGating == Gating::silu ? Activation::silu : Activation::sigmoid, gate, sigmoid_as<kType>(gate));
  }
}

/// 1 / √(mean(x²) + eps) of a row of which each of so many lanes has kN channels.
template <DType kType, int kN>
__device__ __forceinline__ float root_of(const GatedRmsNorm& n, const Numbers<kN>& x, int lanes) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kN; ++i) squares += x.x[i] * x.x[i];
  const float mean = sum_row(squares, lanes) / static_cast<float>(n.dim);
  return inverse_as<kType>(sqrt_as<kType>(mean + static_cast<float>(n.eps)));
}

/// Vectors of a token, and by how many tokens and vectors the next of a thread is further, kThreads on.
struct Tokens {
  int vectors, whole, rest;
};
/// Where a thread is among arrays whose tokens lie evenly apart: only its first vector takes a division.
struct Walk {
  std::int64_t token;
  int vector;

  __device__ Walk(std::int64_t first, const Tokens& tokens)
      : token(quotient(first, tokens.vectors)), vector(static_cast<int>(first - token * tokens.vectors)) {}
  __device__ __forceinline__ void go_on(const Tokens& tokens) {
    token += tokens.whole;
    vector += tokens.rest;
    if (vector < tokens.vectors) return;
    vector -= tokens.vectors;
    ++token;
  }
  __device__ __forceinline__ std::int64_t place(std::int64_t step) const { return token * step + vector * kPart; }
};

/// 0 behind the end: such threads take part in sums all the same.
template <DType kType>
__device__ __forceinline__ Held<kType, kPart> hold_part(const View& view, std::int64_t at, bool there) {
  if (!there) return {};
  return hold_vector<kType, kPart>(view.data, at);
}

template <DType kType, Gating kGating>
__global__ void __launch_bounds__(kThreads, 2)
    norm_rows(const __grid_constant__ GatedRmsNorm n, const View y, std::int64_t count, int lanes, const Tokens tokens,
              std::int64_t gate_step) {
  wait_for_earlier();
  const Part weight = weight_of(n, lanes);
  constexpr int kSome = kAtOnce<kType>;
  std::int64_t at = block() * (kRowsEach / 2) * kThreads + thread();
  Walk walk(at, tokens);
  for (int round = 0; round < kRowsEach / 2; round += kSome) {
    Held<kType, kPart> rows[kSome], gates[kSome];
#pragma unroll
    for (int a = 0; a < kSome; ++a) {
      const bool there = at + a * kThreads < count;
      rows[a] = hold_part<kType>(n.x, (at + a * kThreads) * kPart, there);
      if constexpr (kGating != Gating::none) gates[a] = hold_part<kType>(n.gate, walk.place(gate_step), there);
      walk.go_on(tokens);
    }
#pragma unroll
    for (int a = 0; a < kSome; ++a, at += kThreads) {
      Part x = let_go<kType, kPart>(rows[a]);
      const float root = root_of<kType>(n, x, lanes);
      Part gate{};
      if constexpr (kGating != Gating::none) gate = let_go<kType, kPart>(gates[a]);
#pragma unroll
      for (int i = 0; i < kPart; ++i) x.x[i] *= root * weight.x[i] * opened<kType, kGating>(gate.x[i]).value;
      if (at < count) write_vector<kType, kPart>(y.data, at * kPart, x);
    }
  }
}

/// dx = r e − r³ mean(x ⊙ e) x with e = dy ⊙ w ⊙ act(gate). A block leaves its rows' sum for the weight in `kept`.
/// Where there is a place for it, y comes once more, with the bits that norm_rows gave it.
template <DType kType, Gating kGating>
__global__ void __launch_bounds__(kThreads, 2)
    differentiate_rows(const __grid_constant__ GatedRmsNorm n, const __grid_constant__ GatedRmsNormGradients g,
                       const View y, std::int64_t count, int lanes, const Tokens tokens, std::int64_t gate_step,
                       std::int64_t d_gate_step, float* kept) {
  const Part weight = weight_of(n, lanes);
  Part d_weight{};
  std::int64_t at = block() * kRowsEach * kThreads + thread();
  Walk walk(at, tokens);
  for (int a = 0; a < kRowsEach; ++a, at += kThreads, walk.go_on(tokens)) {
    const bool there = at < count;
    const Part x = let_go<kType, kPart>(hold_part<kType>(n.x, at * kPart, there));
    const Part d_y = let_go<kType, kPart>(hold_part<kType>(g.d_y, at * kPart, there));
    Part gate{};
    if constexpr (kGating != Gating::none) {
      gate = let_go<kType, kPart>(hold_part<kType>(n.gate, walk.place(gate_step), there));
    }
    const float root = root_of<kType>(n, x, lanes);
    Part e, d_gate, d_x, again;
    float along = 0;
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      const Activated<float> open = opened<kType, kGating>(gate.x[i]);
      const float normed = d_y.x[i] * x.x[i] * root;
      e.x[i] = d_y.x[i] * weight.x[i] * open.value;
      along += x.x[i] * e.x[i];
      d_weight.x[i] += normed * open.value;
      d_gate.x[i] = normed * weight.x[i] * open.slope;
      again.x[i] = x.x[i] * (root * weight.x[i] * open.value);
    }
    const float bend = root * root * root * sum_row(along, lanes) / static_cast<float>(n.dim);
#pragma unroll
    for (int i = 0; i < kPart; ++i) d_x.x[i] = root * e.x[i] - bend * x.x[i];
    if (!there) continue;
    write_vector<kType, kPart>(g.d_x.data, at * kPart, d_x);
    if (given(y)) write_vector<kType, kPart>(y.data, at * kPart, again);
    if (kGating != Gating::none && given(g.d_gate)) {
      write_vector<kType, kPart>(g.d_gate.data, walk.place(d_gate_step), d_gate);
    }
  }
  float* parts = reinterpret_cast<float*>(shared_memory());  // [kThreads][kPart]
#pragma unroll
  for (int i = 0; i < kPart; ++i) parts[thread() * kPart + i] = d_weight.x[i];
  sync();
  const int dim = static_cast<int>(n.dim);
  each(dim, [&](int c) {
    float total = 0;
    for (int at = c; at < kThreads * kPart; at += dim) total += parts[at];
    kept[block() * dim + c] = total;
  });
}

/// Numbers from one token to the next.
inline std::int64_t step_of(const GatedRmsNorm& n, const View& view) {
  if (n.tokens > 1) return view.token_stride;
  return n.batch > 1 ? view.batch_stride : n.heads * n.dim;
}
/// A token's rows one behind the other, and tokens evenly apart.
inline bool is_even(const GatedRmsNorm& n, const View& view) {
  return (n.heads == 1 || view.head_stride == n.dim) && step_of(n, view) >= n.heads * n.dim &&
         (n.batch == 1 || view.batch_stride == n.tokens * step_of(n, view));
}
inline bool is_dense(const GatedRmsNorm& n, const View& view) {
  return is_even(n, view) && step_of(n, view) == n.heads * n.dim;
}
inline Tokens tokens_of(const GatedRmsNorm& n) {
  const int vectors = static_cast<int>(n.heads * (n.dim / kPart));
  return {vectors, kThreads / vectors, kThreads % vectors};
}

/// Whether a call is one of these; `views` are the arrays as large as x, and `gates` those like the gate.
inline bool takes(const GatedRmsNorm& n, std::initializer_list<const View*> views,
                  std::initializer_list<const View*> gates) {
  const std::int64_t lanes = n.dim / kPart;
  if (n.x.dtype == DType::float64 || (given(n.gate) && n.activation == Activation::none)) return false;
  if (n.dim % kPart != 0 || lanes > kLanes || (lanes & (lanes - 1)) != 0) return false;
  if (n.heads > (std::int64_t{1} << 24)) return false;  // a token's vectors are counted in 32 bits
  for (const View* view : views) {
    if (given(*view) && (!is_dense(n, *view) || !in_vectors<kPart>(n.x.dtype, {view}))) return false;
  }
  for (const View* view : gates) {
    if (given(*view) && (!is_even(n, *view) || !in_vectors<kPart>(n.x.dtype, {view}))) return false;
  }
  return true;
}

inline std::int64_t vectors_of(const GatedRmsNorm& n) { return n.batch * n.tokens * n.heads * (n.dim / kPart); }
inline std::int64_t blocks_of(const GatedRmsNorm& n, int rows_each) {
  const std::int64_t of_block = static_cast<std::int64_t>(kThreads) * rows_each;
  return (vectors_of(n) + of_block - 1) / of_block;
}

template <Gating kGating_>
struct GatingAs {
  static constexpr Gating kGating = kGating_;
};

/// body(Storage, GatingAs): the code for a type and for the gate.
template <typename Body>
void with_gating(const GatedRmsNorm& n, Body&& body) {
  with_vectors_of(n.x.dtype, [&](auto type) {
    if (!given(n.gate)) return body(type, GatingAs<Gating::none>{});
    if (n.activation == Activation::silu) return body(type, GatingAs<Gating::silu>{});
    body(type, GatingAs<Gating::sigmoid>{});
  });
}

inline void forward(const GatedRmsNorm& n, const View& y, const Device& device) {
  const CurrentDevice current(device.index);
  with_gating(n, [&]<typename Type, typename As>(Type, As) {
    launch_early<kThreads>(norm_rows<Type::type, As::kGating>, blocks_of(n, kRowsEach / 2), 0, device.index,
                           device.stream, n, y, vectors_of(n), static_cast<int>(n.dim / kPart), tokens_of(n),
                           step_of(n, n.gate));
  });
}

/// Returns the blocks' sums for the weight, [blocks, dim].
inline const float* backward(const GatedRmsNorm& n, const GatedRmsNormGradients& g, const View& y,
                             const Device& device) {
  const CurrentDevice current(device.index);
  const std::int64_t blocks = blocks_of(n, kRowsEach);
  float* kept = static_cast<float*>(device.allocate(static_cast<std::size_t>(blocks * n.dim) * sizeof(float) + 1));
  with_gating(n, [&]<typename Type, typename As>(Type, As) {
    launch(differentiate_rows<Type::type, As::kGating>, blocks, kThreads * kPart * static_cast<int>(sizeof(float)),
           device.stream, n, g, y, vectors_of(n), static_cast<int>(n.dim / kPart), tokens_of(n), step_of(n, n.gate),
           step_of(n, g.d_gate), kept);
  });
  return kept;
}

}  // namespace gka::kernels::cuda::vectors
