// A column of S depends on no other. A block has some columns of one head of one sequence, eight threads a column with
// an eighth of its rows in registers each; what a token needs of all rows is a sum over eight lanes.
//
// Backward, a segment of tokens at a time from the last: the states of the segment are made again from the kept one
// (`before` has S after a token's decay and before its write), then walked back (`slope` has the gradient of S after
// the write), and what sums over columns follows for all tokens of the segment at once.
#include "kernels/cuda/recurrence.h"

#include "kernels/cuda/thread_block.cuh"

namespace gka::kernels::cuda {
namespace {

inline constexpr int kParts = 8;  // threads of a column
inline constexpr int kSegment = static_cast<int>(kRecurrenceSegment);

/// Sizes for keys of at most kKeys numbers.
template <int kKeys>
struct Shape {
  static constexpr int kColumns = static_cast<int>(recurrence_columns(kKeys));
  static constexpr int kBlock = kColumns * kParts;
  static constexpr int kRows = kKeys / kParts;  // of a thread
  static constexpr int kState = kKeys + 4;      // a column of S in shared memory: columns start in different banks

  /// Row i of this thread: vectors of four, every eighth.
  __device__ static int row(int part, int i) { return (i / 4 * kParts + part) * 4 + i % 4; }
};

/// A segment's inputs. Behind the sequence's end all is such that nothing happens.
template <int kKeys>
struct Segment {
  static constexpr int kColumns = Shape<kKeys>::kColumns;
  alignas(16) float q[kSegment][kKeys], k[kSegment][kKeys], decay[kSegment][kKeys];
  alignas(16) float v[kSegment][kColumns], d_o[kSegment][kColumns];
  float beta[kSegment];
};

template <int kKeys>
struct Slopes {
  static constexpr int kColumns = Shape<kKeys>::kColumns;
  alignas(16) float before[kSegment][kColumns][Shape<kKeys>::kState], slope[kSegment][kColumns][Shape<kKeys>::kState];
  alignas(16) float write[kSegment][kColumns], d_write[kSegment][kColumns];  // u / β and its gradient's / β
};

/// Which part of the work a block has.
template <int kKeys>
struct Place {
  std::int64_t sequence, head, heads, first_column, part, first, tokens, first_state;

  __device__ explicit Place(const Recurrence& r) {
    const std::int64_t blocks = (r.value_dim + Shape<kKeys>::kColumns - 1) / Shape<kKeys>::kColumns;
    part = block() % blocks;
    first_column = part * Shape<kKeys>::kColumns;
    head = block() / blocks % r.heads;
    heads = r.heads;
    sequence = block() / blocks / r.heads;
    first = r.bounds != nullptr ? r.bounds[sequence] : sequence * r.length;
    tokens = r.bounds != nullptr ? r.bounds[sequence + 1] - first : r.length;
    first_state = first / kSegment + sequence;
  }

  /// Token t of the sequence among the rows of [tokens, heads].
  __device__ std::int64_t row(std::int64_t t) const { return (first + t) * heads + head; }
};

/// Reads or writes this thread's rows of a column of S, which lies in memory as [K, V].
template <int kKeys, typename Body>
__device__ __forceinline__ void each_row(const Recurrence& r, std::int64_t column, Body&& body) {
  if (column >= r.value_dim) return;
#pragma unroll
  for (int i = 0; i < Shape<kKeys>::kRows; ++i) {
    const int row = Shape<kKeys>::row(thread() % kParts, i);
    if (row < r.key_dim) body(i, row * r.value_dim + column);
  }
}

template <int kKeys>
__device__ __forceinline__ void load_segment(Segment<kKeys>& s, const Recurrence& r, const Place<kKeys>& place,
                                             std::int64_t from, const float* d_o) {
  constexpr int kBlock = Shape<kKeys>::kBlock, kColumns = Shape<kKeys>::kColumns;
  for (int n = thread(); n < kSegment * kKeys; n += kBlock) {
    const int t = n / kKeys, c = n % kKeys;
    const bool there = from + t < place.tokens && c < r.key_dim;
    const std::int64_t row = place.row(from + t), at = row * r.key_dim + c;
    s.q[t][c] = there ? r.q[at] : 0;
    s.k[t][c] = there ? r.k[at] : 0;
    s.decay[t][c] = there && r.log_decay != nullptr ? expf(r.log_decay[r.per_channel ? at : row]) : 1;
  }
  for (int n = thread(); n < kSegment * kColumns; n += kBlock) {
    const int t = n / kColumns, j = n % kColumns;
    const bool there = from + t < place.tokens && place.first_column + j < r.value_dim;
    const std::int64_t at = place.row(from + t) * r.value_dim + place.first_column + j;
    s.v[t][j] = there ? r.v[at] : 0;
    if (d_o != nullptr) s.d_o[t][j] = there ? d_o[at] : 0;
  }
  for (int t = thread(); t < kSegment; t += kBlock) {
    const bool there = from + t < place.tokens;
    s.beta[t] = !there ? 0 : r.beta != nullptr ? r.beta[place.row(from + t)] : 1;
  }
  sync();
}

/// The sum over the threads of a column, the same bits in each.
__device__ __forceinline__ float sum_parts(float value) {
#pragma unroll
  for (int apart = kParts / 2; apart > 0; apart /= 2) value += from_lane(value, apart);
  return value;
}

template <int kKeys>
__global__ void __launch_bounds__(Shape<kKeys>::kBlock)
    run_forward(const __grid_constant__ Recurrence r, const __grid_constant__ RecurrenceOutputs out) {
  using S = Shape<kKeys>;
  auto& s = *reinterpret_cast<Segment<kKeys>*>(shared_memory());
  const Place<kKeys> place(r);
  const int j = thread() / kParts, part = thread() % kParts;
  const std::int64_t column = place.first_column + j, state_size = r.key_dim * r.value_dim;
  float state[S::kRows] = {};
  if (r.initial != nullptr) {
    const float* from = r.initial + (place.sequence * r.heads + place.head) * state_size;
    each_row<kKeys>(r, column, [&](int i, std::int64_t at) { state[i] = from[at]; });
  }
  for (std::int64_t from = 0; from < place.tokens; from += kSegment) {
    load_segment(s, r, place, from, nullptr);
    if (out.states != nullptr) {
      float* to = out.states + ((place.first_state + from / kSegment) * r.heads + place.head) * state_size;
      each_row<kKeys>(r, column, [&](int i, std::int64_t at) { to[at] = state[i]; });
    }
    for (int t = 0; t < kSegment; ++t) {
      float held = 0, asked = 0, both = 0;  // Sᵀk, Sᵀq, kᵀq
      float keys[S::kRows];
#pragma unroll
      for (int i = 0; i < S::kRows; ++i) {
        const int row = S::row(part, i);
        state[i] *= s.decay[t][row];
        keys[i] = s.k[t][row];
        held += keys[i] * state[i];
        asked += s.q[t][row] * state[i];
        both += s.q[t][row] * keys[i];
      }
      held = sum_parts(held), asked = sum_parts(asked), both = sum_parts(both);
      const float write = s.beta[t] * (s.v[t][j] - (r.delta ? held : 0));
#pragma unroll
      for (int i = 0; i < S::kRows; ++i) state[i] += keys[i] * write;
      if (part == 0 && from + t < place.tokens && column < r.value_dim) {
        out.o[place.row(from + t) * r.value_dim + column] = r.scale * (asked + both * write);
      }
    }
    sync();
  }
  if (out.final != nullptr) {
    float* to = out.final + (place.sequence * r.heads + place.head) * state_size;
    each_row<kKeys>(r, column, [&](int i, std::int64_t at) { to[at] = state[i]; });
  }
}

/// Fills `before` and `write`.
template <int kKeys>
__device__ __forceinline__ void make_states(const Segment<kKeys>& s, Slopes<kKeys>& slopes, bool delta,
                                            float (&state)[Shape<kKeys>::kRows]) {
  using S = Shape<kKeys>;
  const int j = thread() / kParts, part = thread() % kParts;
  for (int t = 0; t < kSegment; ++t) {
    float held = 0;
#pragma unroll
    for (int i = 0; i < S::kRows; ++i) {
      const int row = S::row(part, i);
      state[i] *= s.decay[t][row];
      slopes.before[t][j][row] = state[i];
      held += s.k[t][row] * state[i];
    }
    held = sum_parts(held);
    const float write = s.v[t][j] - (delta ? held : 0);
    if (part == 0) slopes.write[t][j] = write;
#pragma unroll
    for (int i = 0; i < S::kRows; ++i) state[i] += s.k[t][S::row(part, i)] * (s.beta[t] * write);
  }
}

/// Fills `slope` and `d_write`. Takes the gradient of the state behind the segment to that of the one before it.
template <int kKeys>
__device__ __forceinline__ void walk_back(const Segment<kKeys>& s, Slopes<kKeys>& slopes, bool delta, float scale,
                                          float (&slope)[Shape<kKeys>::kRows]) {
  using S = Shape<kKeys>;
  const int j = thread() / kParts, part = thread() % kParts;
  for (int t = kSegment - 1; t >= 0; --t) {
    float to_write = 0;
#pragma unroll
    for (int i = 0; i < S::kRows; ++i) {
      const int row = S::row(part, i);
      slope[i] += scale * s.q[t][row] * s.d_o[t][j];
      slopes.slope[t][j][row] = slope[i];
      to_write += s.k[t][row] * slope[i];
    }
    to_write = sum_parts(to_write);
    if (part == 0) slopes.d_write[t][j] = to_write;
    const float held = delta ? s.beta[t] * to_write : 0;
#pragma unroll
    for (int i = 0; i < S::kRows; ++i) {
      const int row = S::row(part, i);
      slope[i] = s.decay[t][row] * (slope[i] - s.k[t][row] * held);
    }
  }
}

/// What sums over the block's columns: the gradients of q, k, the decays and β, and beside them that of v.
template <int kKeys>
__device__ __forceinline__ void sum_columns(const Segment<kKeys>& s, const Slopes<kKeys>& slopes, const Recurrence& r,
                                            const RecurrenceGradients& to, const Place<kKeys>& place,
                                            std::int64_t from) {
  constexpr int kBlock = Shape<kKeys>::kBlock, kColumns = Shape<kKeys>::kColumns;
  for (int n = thread(); n < kSegment * kKeys; n += kBlock) {
    const int t = n / kKeys, c = n % kKeys;
    float state_out = 0, state_write = 0, slope_write = 0, slope_state = 0, write_out = 0, write_write = 0;
#pragma unroll 4
    for (int j = 0; j < kColumns; ++j) {
      const float before = slopes.before[t][j][c], slope = slopes.slope[t][j][c];
      const float d_o = s.d_o[t][j], write = slopes.write[t][j], d_write = slopes.d_write[t][j];
      state_out += before * d_o;
      state_write += before * d_write;
      slope_write += slope * write;
      slope_state += slope * before;
      write_out += write * d_o;
      write_write += write * d_write;
    }
    if (from + t >= place.tokens || c >= r.key_dim) continue;
    const float beta = s.beta[t], k = s.k[t][c], held = r.delta ? beta * state_write : 0;
    const std::int64_t row = place.part * r.tokens * r.heads + place.row(from + t), at = row * r.key_dim + c;
    to.d_q[at] = r.scale * (state_out + k * beta * write_out);
    to.d_k[at] = beta * slope_write - held;
    if (to.d_log_decay != nullptr) to.d_log_decay[at] = slope_state - k * held;
    if (to.d_beta != nullptr && c == 0) to.d_beta[row] = write_write;
  }
  for (int n = thread(); n < kSegment * kColumns; n += kBlock) {
    const int t = n / kColumns, j = n % kColumns;
    if (from + t >= place.tokens || place.first_column + j >= r.value_dim) continue;
    to.d_v[place.row(from + t) * r.value_dim + place.first_column + j] = s.beta[t] * slopes.d_write[t][j];
  }
}

template <int kKeys>
__global__ void __launch_bounds__(Shape<kKeys>::kBlock)
    run_backward(const __grid_constant__ Recurrence r, const __grid_constant__ RecurrenceGradients to) {
  using S = Shape<kKeys>;
  auto& s = *reinterpret_cast<Segment<kKeys>*>(shared_memory());
  auto& slopes = *reinterpret_cast<Slopes<kKeys>*>(shared_memory() + sizeof(Segment<kKeys>));
  const Place<kKeys> place(r);
  const std::int64_t column = place.first_column + thread() / kParts, state_size = r.key_dim * r.value_dim;
  const std::int64_t own = (place.sequence * r.heads + place.head) * state_size;
  float slope[S::kRows] = {};
  if (to.d_final != nullptr) {
    each_row<kKeys>(r, column, [&](int i, std::int64_t at) { slope[i] = to.d_final[own + at]; });
  }
  for (std::int64_t n = (place.tokens + kSegment - 1) / kSegment - 1; n >= 0; --n) {
    load_segment(s, r, place, n * kSegment, to.d_o);
    float state[S::kRows] = {};
    const float* kept = to.states + ((place.first_state + n) * r.heads + place.head) * state_size;
    each_row<kKeys>(r, column, [&](int i, std::int64_t at) { state[i] = kept[at]; });
    make_states(s, slopes, r.delta, state);
    walk_back(s, slopes, r.delta, r.scale, slope);
    sync();
    sum_columns(s, slopes, r, to, place, n * kSegment);
    sync();
  }
  if (to.d_initial != nullptr) {
    each_row<kKeys>(r, column, [&](int i, std::int64_t at) { to.d_initial[own + at] = slope[i]; });
  }
}

template <int kValue>
struct Keys {
  static constexpr int value = kValue;
};

/// body(Keys<n>{}) with the smallest n that holds the keys.
template <typename Body>
auto with_keys(std::int64_t key_dim, Body&& body) {
  if (key_dim <= 32) return body(Keys<32>{});
  return key_dim <= 64 ? body(Keys<64>{}) : body(Keys<128>{});
}

}  // namespace

void recurrence(const Recurrence& r, const RecurrenceOutputs& out, const Device& device) {
  const CurrentDevice current(device.index);
  with_keys(r.key_dim, [&](auto keys) {
    constexpr int kKeys = decltype(keys)::value;
    launch_blocks_of<Shape<kKeys>::kBlock>(run_forward<kKeys>, r.sequences * r.heads * recurrence_parts(r),
                                           sizeof(Segment<kKeys>), device.stream, r, out);
  });
}

void recurrence_backward(const Recurrence& r, const RecurrenceGradients& gradients, const Device& device) {
  const CurrentDevice current(device.index);
  with_keys(r.key_dim, [&](auto keys) {
    constexpr int kKeys = decltype(keys)::value;
    launch_blocks_of<Shape<kKeys>::kBlock>(run_backward<kKeys>, r.sequences * r.heads * recurrence_parts(r),
                                           sizeof(Segment<kKeys>) + sizeof(Slopes<kKeys>), device.stream, r, gradients);
  });
}

}  // namespace gka::kernels::cuda
