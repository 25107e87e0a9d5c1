#include "kernels/cuda/fused.h"

#include "kernels/cuda/vectors.cuh"
#include "kernels/cuda/warp_rows.cuh"

namespace gka::kernels::cuda {
namespace {

constexpr int kN = kFusedVector;
using Eight = Numbers<kN>;

__device__ __forceinline__ std::int64_t own_vector() { return block() * kThreads + thread(); }
std::int64_t grid_for(std::int64_t vectors) { return (vectors + kThreads - 1) / kThreads; }

// ---- SwiGLU -----------------------------------------------------------------------------------------------------

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

// ---- Sum and norm -----------------------------------------------------------------------------------------------

/// A row in the registers of a team, kVectors vectors of each member.
template <typename TeamOf>
struct Row {
  static constexpr int kVectors = (TeamOf::kSize + TeamOf::kMembers * kN - 1) / (TeamOf::kMembers * kN);
  Eight part[kVectors];

  __device__ static int channel(int v) { return (v * TeamOf::kMembers + TeamOf::member()) * kN; }

  /// 0 behind the end.
  template <DType kType>
  __device__ __forceinline__ void read(const void* data, std::int64_t row, int width) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      part[v] = channel(v) < width ? read_vector<kType, kN>(data, row * width + channel(v)) : Eight{};
    }
  }
};

/// body(v, i) for each of a member's numbers.
template <typename TeamOf, typename Body>
__device__ __forceinline__ void each_number(Body&& body) {
#pragma unroll
  for (int v = 0; v < Row<TeamOf>::kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kN; ++i) body(v, i);
  }
}

template <DType kType>
__device__ __forceinline__ float root_of(const AddNorm& a, float squares) {
  return inverse_as<kType>(sqrt_as<kType>(squares / static_cast<float>(a.width) + a.eps));
}

template <DType kType, typename TeamOf>
__global__ void __launch_bounds__(kThreads) add_norm_rows(const __grid_constant__ AddNorm a, void* sum, void* normed) {
  using Own = Row<TeamOf>;
  const std::int64_t row = TeamOf::index();
  if (row >= a.rows) return;
  const int width = static_cast<int>(a.width);
  Own x;
  x.template read<kType>(a.x, row, width);
  if (a.y != nullptr) {
    Own y;
    y.template read<kType>(a.y, row, width);
    each_number<TeamOf>([&](int v, int i) { x.part[v].x[i] += y.part[v].x[i]; });
#pragma unroll
    for (int v = 0; v < Own::kVectors; ++v) {
      x.part[v] = rounded<kType>(x.part[v]);  // the norm of what the backward pass will see
      if (Own::channel(v) < width) write_vector<kType, kN>(sum, row * width + Own::channel(v), x.part[v]);
    }
  }
  float squares = 0;
  each_number<TeamOf>([&](int v, int i) { squares += x.part[v].x[i] * x.part[v].x[i]; });
  const float root = root_of<kType>(a, TeamOf::sum(squares));
#pragma unroll
  for (int v = 0; v < Own::kVectors; ++v) {
    if (Own::channel(v) >= width) continue;
    const Eight weight = read_vector<DType::float32, kN>(a.weight, Own::channel(v));
#pragma unroll
    for (int i = 0; i < kN; ++i) x.part[v].x[i] *= root * weight.x[i];
    write_vector<kType, kN>(normed, row * width + Own::channel(v), x.part[v]);
  }
}

/// dx = d_sum + r e − r³ mean(x ⊙ e) x with e = d_normed ⊙ w. A block leaves its rows' sum for the weight in `kept`.
template <DType kType, typename TeamOf>
__global__ void __launch_bounds__(kThreads)
    differentiate_add_norm(const __grid_constant__ AddNorm a, const __grid_constant__ AddNormGradients g, float* kept) {
  using Own = Row<TeamOf>;
  const int width = static_cast<int>(a.width);
  Own d_weight{};
  for (std::int64_t row = TeamOf::index(); row < a.rows; row += blocks() * TeamOf::kTeams) {
    // All of a row is under way before the first of it is needed, in as few registers as it will lie in.
    Held<kType, kN> x[Own::kVectors], d_normed[Own::kVectors], d_sum[Own::kVectors];
#pragma unroll
    for (int v = 0; v < Own::kVectors; ++v) {
      const bool mine = Own::channel(v) < width;
      const std::int64_t at = row * width + Own::channel(v);
      x[v] = mine ? hold_vector<kType, kN>(a.x, at) : Held<kType, kN>{};
      d_normed[v] = mine ? hold_vector<kType, kN>(g.d_normed, at) : Held<kType, kN>{};
      d_sum[v] = mine && g.d_sum != nullptr ? hold_vector<kType, kN>(g.d_sum, at) : Held<kType, kN>{};
    }
    float squares = 0, along = 0;
#pragma unroll
    for (int v = 0; v < Own::kVectors; ++v) {
      if (Own::channel(v) >= width) continue;
      const Eight at = let_go<kType, kN>(x[v]), slope = let_go<kType, kN>(d_normed[v]);
      const Eight weight = read_vector<DType::float32, kN>(a.weight, Own::channel(v));
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        squares += at.x[i] * at.x[i];
        along += at.x[i] * slope.x[i] * weight.x[i];
      }
    }
    const float root = root_of<kType>(a, TeamOf::sum(squares));
    const float bend = root * root * root * TeamOf::sum(along) / static_cast<float>(a.width);
#pragma unroll
    for (int v = 0; v < Own::kVectors; ++v) {
      if (Own::channel(v) >= width) continue;
      const Eight at = let_go<kType, kN>(x[v]), slope = let_go<kType, kN>(d_normed[v]);
      const Eight weight = read_vector<DType::float32, kN>(a.weight, Own::channel(v));
      Eight d_x = let_go<kType, kN>(d_sum[v]);
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const float normed = root * slope.x[i];
        d_weight.part[v].x[i] += normed * at.x[i];
        d_x.x[i] += normed * weight.x[i] - bend * at.x[i];
      }
      write_vector<kType, kN>(g.d_x, row * width + Own::channel(v), d_x);
    }
  }
  // The teams of a block in their order, one at a time: a row of sums is all that shared memory holds.
  float* sums = reinterpret_cast<float*>(shared_memory());
  for (int team = 0; team < TeamOf::kTeams; ++team) {
    sync();
    if (TeamOf::kTeams > 1 && warp() != team) continue;
    each_number<TeamOf>([&](int v, int i) {
      const int c = Own::channel(v) + i;
      if (c < width) sums[c] = d_weight.part[v].x[i] + (team > 0 ? sums[c] : 0);
    });
  }
  sync();
  each(width, [&](int c) { kept[block() * width + c] = sums[c]; });
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

constexpr float kInfinity = __builtin_huge_valf();

/// Of some of a row's numbers: the largest, where it is, and Σ exp(number − largest).
template <DType kType>
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
    const float own = largest == top ? 1.0f : exp_as<kType>(largest - top);
    sum = sum * own + other.sum * (other.largest == top ? 1.0f : exp_as<kType>(other.largest - top));
    largest = top;
    if (theirs) place = other.place;
  }

  /// With the summaries of the lanes that differ in bits below `lanes`.
  __device__ __forceinline__ void join_lanes(int lanes) {
    for (int apart = lanes / 2; apart > 0; apart /= 2) {
      join({from_lane(largest, apart), from_lane(sum, apart), from_lane(place, apart)});
    }
  }
};

/// Of all threads' summaries, the same for every thread.
template <DType kType>
__device__ inline Summary<kType> join_threads(Summary<kType> own) {
  static_assert(kWarps <= kLanes);
  auto* parts = reinterpret_cast<Summary<kType>*>(shared_memory());
  own.join_lanes(kLanes);
  if (lane() == 0) parts[warp()] = own;
  sync();
  if (warp() == 0) {
    own = parts[lane() % kWarps];
    own.join_lanes(kWarps);
    if (lane() == 0) parts[kWarps] = own;
  }
  sync();
  return parts[kWarps];
}

constexpr int kJoinBytes = (kWarps + 1) * static_cast<int>(sizeof(Summary<DType::float32>)) / 16 * 16 + 16;

/// A row's numbers from `at` on, −∞ behind its classes.
template <DType kType>
__device__ __forceinline__ Eight read_classes(const void* row, int at, int classes) {
  Eight logits = read_vector<kType, kN>(row, at);
  if (at + kN > classes) {
#pragma unroll
    for (int i = 0; i < kN; ++i) logits.x[i] = at + i < classes ? logits.x[i] : -kInfinity;
  }
  return logits;
}

/// Of the vectors that this thread has of a row.
template <DType kType>
__device__ inline Summary<kType> own_summary(const void* row, int classes, bool with_place) {
  constexpr int kStride = kThreads * kN;
  Summary<kType> own{-kInfinity, 0, classes};
#pragma unroll 4
  for (int at = thread() * kN; at < classes; at += kStride) {
    const Eight logits = read_classes<kType>(row, at, classes);
#pragma unroll
    for (int i = 0; i < kN; ++i) own.largest = logits.x[i] > own.largest ? logits.x[i] : own.largest;
  }
  const float top = finite(own.largest) ? own.largest : 0;  // ∞ − ∞ is no number
#pragma unroll 4
  for (int at = thread() * kN; at < classes; at += kStride) {
    const Eight logits = read_classes<kType>(row, at, classes);
#pragma unroll
    for (int i = 0; i < kN; ++i) own.sum += exp_as<kType>(logits.x[i] - top);
  }
  for (int at = thread() * kN; with_place && own.place == classes && at < classes; at += kStride) {
    const Eight logits = read_classes<kType>(row, at, classes);
#pragma unroll
    for (int i = kN; i-- > 0;) own.place = logits.x[i] == own.largest ? at + i : own.place;
  }
  return own;
}

/// A row per block. Where kHeld, it lies in shared memory from the first look at it to the last; else it is read from
/// memory three times.
template <DType kType, bool kHeld>
__global__ void __launch_bounds__(kThreads, 2) cross_entropy_rows(const __grid_constant__ CrossEntropy c) {
  constexpr int kBytes = kType == DType::float32 ? 4 : 2;
  const std::int64_t index = block(), label = c.labels[index];
  const int classes = static_cast<int>(c.classes), width = static_cast<int>(c.stride);
  char* const there = static_cast<char*>(c.logits) + index * c.stride * kBytes;
  char* const row = kHeld ? shared_memory() + kJoinBytes : there;
  if constexpr (kHeld) {  // each thread what it will read itself
    for (int at = thread() * kN; at < width; at += kThreads * kN) {
      for (int byte = 0; byte < kN * kBytes; byte += 16)
        copy_async(row + at * kBytes + byte, there + at * kBytes + byte);
    }
    wait_for_copies();
  }
  const auto all = join_threads(own_summary<kType>(row, classes, c.predicted != nullptr));
  const bool counts = label >= 0 && label < c.classes;
  if (thread() == 0) {
    const float chosen = counts ? read_as<float, kType>(there, label) : 0;
    c.losses[index] = counts ? all.largest + log(all.sum) - chosen : 0;
    if (c.predicted != nullptr) c.predicted[index] = all.place;
  }
  if (c.scale == nullptr) return;
  sync();  // the label's logit has been read
  const float scale = counts ? *c.scale : 0, factor = scale / all.sum;
#pragma unroll 2
  for (int at = thread() * kN; at < width; at += kThreads * kN) {
    Eight numbers = read_vector<kType, kN>(row, at);
#pragma unroll
    for (int i = 0; i < kN; ++i) numbers.x[i] = exp_as<kType>(numbers.x[i] - all.largest) * factor;
    if (!counts || at + kN > classes || (label >= at && label < at + kN)) {
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        numbers.x[i] = at + i < classes && counts ? numbers.x[i] - (at + i == label ? scale : 0) : 0;
      }
    }
    write_vector<kType, kN>(there, at, numbers);
  }
}

// ---- Gates ------------------------------------------------------------------------------------------------------

struct Softplus {
  float value, slope;
};
/// z itself where it is large, as torch has it.
__device__ __forceinline__ Softplus softplus(float z) {
  if (z > 20) return {z, 1};
  const float e = exp(z);
  return {log1pf(e), e / (1.0f + e)};
}

__device__ __forceinline__ float open_gate(float z) { return 1.0f / (1.0f + exp(-z)); }

/// A number of one kind of gate, and what its gradient is times.
struct GateValue {
  float value, slope;
};
__device__ __forceinline__ GateValue value_of(Gate gate, float z, float factor) {
  if (gate == Gate::log_decay) {
    const Softplus s = softplus(z);
    return {factor * s.value, factor * s.slope};
  }
  const float open = open_gate(z), slope = open * (1.0f - open);
  if (gate == Gate::sigmoid) return {open, slope};
  const float above = open + kAboveZero;
  return {above * above, 2 * above * slope};
}

/// −exp(A_log) of a head; 1 for gates that have none.
__device__ __forceinline__ float factor_of(const Gates& g, int kind, int head) {
  return g.kinds[kind].gate == Gate::log_decay ? -exp(g.kinds[kind].a_log[head]) : 1.0f;
}
__device__ __forceinline__ float bias_of(const Gates& g, int kind, int head) {
  return g.kinds[kind].bias != nullptr ? g.kinds[kind].bias[head] : 0.0f;
}

/// A thread per token and column.
template <DType kType>
__global__ void __launch_bounds__(kThreads) open_gates(const __grid_constant__ Gates g) {
  const int columns = g.count * g.heads;
  const std::int64_t at = own_vector(), token = quotient(at, columns);
  if (token >= g.tokens) return;
  const int column = static_cast<int>(at - token * columns), kind = column / g.heads, head = column % g.heads;
  const float z = read_as<float, kType>(g.projected, token * g.stride + column) + bias_of(g, kind, head);
  g.kinds[kind].value[token * g.heads + head] = value_of(g.kinds[kind].gate, z, factor_of(g, kind, head)).value;
}

/// A block takes every blocks()-th stretch of kStretch tokens, and a thread one column of some of them. `kept`
/// [2][blocks, columns] gets the block's sums for biases and for A_log.
constexpr int kStretch = 64;
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    differentiate_gates(const __grid_constant__ Gates g, void* d_projected, float* kept) {
  const int columns = g.count * g.heads;
  const int rows = max(1, kThreads / columns);              // tokens at a time
  float* sums = reinterpret_cast<float*>(shared_memory());  // [2][rows][columns]
  for (int first = 0; first < columns; first += kThreads) {
    const int column = first + thread() % min(columns, kThreads), row = thread() / columns;
    const bool mine = column < columns && row < rows;
    float to_bias = 0, to_a_log = 0;
    if (mine) {
      const int kind = column / g.heads, head = column % g.heads;
      const float factor = factor_of(g, kind, head), bias = bias_of(g, kind, head);
      for (std::int64_t start = block() * kStretch; start < g.tokens; start += blocks() * kStretch) {
        const std::int64_t end = min(start + kStretch, g.tokens);
        for (std::int64_t token = start + row; token < end; token += rows) {
          const float z = read_as<float, kType>(g.projected, token * g.stride + column) + bias;
          const GateValue gate = value_of(g.kinds[kind].gate, z, factor);
          const float* d_value = g.kinds[kind].d_value;
          const float slope = d_value != nullptr ? d_value[token * g.heads + head] : 0.0f, d_z = slope * gate.slope;
          write(View{.data = d_projected, .dtype = kType}, token * columns + column, d_z);
          to_bias += d_z;
          to_a_log += slope * gate.value;
        }
      }
      sums[row * columns + column] = to_bias;
      sums[(rows + row) * columns + column] = to_a_log;
    }
  }
  sync();
  each(2 * columns, [&](int n) {
    const int part = n / columns, column = n % columns;
    float total = 0;
    for (int row = 0; row < rows; ++row) total += sums[(part * rows + row) * columns + column];
    kept[(part * blocks() + block()) * columns + column] = total;
  });
}

template <typename Body>
void with_type_of(DType dtype, const Device& device, Body&& body) {
  const CurrentDevice current(device.index);
  with_vectors_of(dtype, body);
}

/// What a team of more than a warp adds up in.
constexpr int kSums = kWarps * static_cast<int>(sizeof(float));

/// body(Storage, Team): the narrowest team that holds a row.
template <typename Body>
void with_rows_of(const AddNorm& a, const Device& device, Body&& body) {
  with_type_of(a.dtype, device, [&](auto type) {
    if (a.width <= 256) return body(type, Team<false, 256>{});
    if (a.width <= 1024) return body(type, Team<false, 1024>{});
    body(type, Team<true, kMaxAddNorm>{});
  });
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

void add_norm(const AddNorm& a, void* sum, void* normed, const Device& device) {
  with_rows_of(a, device, [&]<typename Type, typename TeamOf>(Type, TeamOf) {
    launch(add_norm_rows<Type::type, TeamOf>, (a.rows + TeamOf::kTeams - 1) / TeamOf::kTeams, kSums, device.stream, a,
           sum, normed);
  });
}

void add_norm_backward(const AddNorm& a, const AddNormGradients& g, const Device& device) {
  with_rows_of(a, device, [&]<typename Type, typename TeamOf>(Type, TeamOf) {
    const std::int64_t grid = min((a.rows + TeamOf::kTeams - 1) / TeamOf::kTeams,
                                  static_cast<std::int64_t>(2 * multiprocessors(device.index)));
    const auto numbers = static_cast<std::size_t>(grid * a.width);
    float* kept = static_cast<float*>(device.allocate(numbers * sizeof(float) + 1));
    const int shared = max(kSums, static_cast<int>(a.width * sizeof(float)));
    launch(differentiate_add_norm<Type::type, TeamOf>, grid, shared, device.stream, a, g, kept);
    sum_blocks(static_cast<const float*>(kept), grid, a.width, {.data = g.d_weight, .dtype = DType::float32}, device);
  });
}

void gates(const Gates& g, const Device& device) {
  with_type_of(g.dtype, device, [&](auto type) {
    launch(open_gates<decltype(type)::type>, grid_for(g.tokens * g.count * g.heads), 0, device.stream, g);
  });
}

void gates_backward(const Gates& g, void* d_projected, float* d_bias, float* d_a_log, const Device& device) {
  const std::int64_t columns = g.count * g.heads;
  const std::int64_t grid =
      min((g.tokens + kStretch - 1) / kStretch, static_cast<std::int64_t>(2 * multiprocessors(device.index)));
  const auto numbers = static_cast<std::size_t>(2 * grid * columns);
  float* kept = static_cast<float*>(device.allocate(numbers * sizeof(float) + 1));
  const auto shared = static_cast<int>(2 * max(std::int64_t{kThreads}, columns) * sizeof(float));
  with_type_of(g.dtype, device, [&](auto type) {
    launch(differentiate_gates<decltype(type)::type>, grid, shared, device.stream, g, d_projected, kept);
  });
  const auto total = [&](const float* of, float* to) {
    sum_blocks(of, grid, columns, {.data = to, .dtype = DType::float32}, device);
  };
  total(kept, d_bias);
  total(kept + grid * columns, d_a_log);
}

void rotate(const Rotation& r, void* y, const Device& device) {
  with_type_of(r.dtype, device, [&](auto type) {
    launch(turn_rows<decltype(type)::type>, grid_for(r.tokens * r.heads * (r.half / kN)), 0, device.stream, r, y);
  });
}

void cross_entropy(const CrossEntropy& c, const Device& device) {
  with_type_of(c.dtype, device, [&](auto type) {
    constexpr DType kType = decltype(type)::type;
    const std::int64_t bytes = kJoinBytes + c.stride * (kType == DType::float32 ? 4 : 2);
    // Two blocks of a multiprocessor, so that one computes while the other's row is on its way.
    constexpr std::int64_t kReserved = 1024;  // of each block, by CUDA
    if (2 * (bytes + kReserved) <= shared_memory_per_block(device.index) + kReserved) {
      launch_blocks_of<kThreads>(cross_entropy_rows<kType, true>, c.rows, static_cast<int>(bytes), device.stream, c);
    } else {
      launch(cross_entropy_rows<kType, false>, c.rows, kJoinBytes, device.stream, c);
    }
  });
}

}  // namespace gka::kernels::cuda
