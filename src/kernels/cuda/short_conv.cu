// The short convolution: a warp walks a run of tokens of one group of channels (a head, or 128 channels where heads do
// not matter) and keeps the last inputs, the taps and, backward, the gradients under way in registers, so every input
// is read once but for the few tokens that neighbouring runs share.
//
// Runs know nothing of sequences: one may hold the end of one sequence and the start of the next. Backward, a token's
// input gradient is complete W − 1 tokens later, so a run reads that many tokens beyond its end. The gradients of
// weight and bias are summed per run, per block of runs, and then over the blocks in their order.
#include <algorithm>
#include <span>
#include <stdexcept>
#include <utility>

#include "gka/block_kernels.h"
#include "kernels/cuda/short_conv_vectors.cuh"
#include "kernels/cuda/warp_rows.cuh"

namespace gka::kernels::cuda {
namespace {

inline constexpr std::int64_t kRun = 32;  // tokens
inline constexpr int kAhead = 4;          // tokens whose loads are under way at a time

/// How channels and tokens are cut.
struct Cut {
  std::int64_t group = 0, groups = 0, runs_per_row = 0, runs = 0;
};

Cut cut_of(const ShortConv& k) {
  Cut cut;
  cut.group = k.l2_norm != L2Norm::none ? k.head_dim : 128;
  cut.groups = (k.channels + cut.group - 1) / cut.group;
  cut.runs_per_row = (k.tokens + kRun - 1) / kRun;
  cut.runs = k.batch * cut.runs_per_row;
  return cut;
}

/// The channels of one group that are this lane's. kWidth is the width the code is written for: narrower filters have
/// `skip` taps less, the oldest.
template <typename T, int kGroup, int kWidth>
struct Lane {
  static constexpr int kCount = kGroup / kLanes;
  using Input = RawRow<T, kCount, kLanes>;

  std::int64_t first;  // the group's first channel
  int channels;        // of the group
  int skip;
  T weight[kCount][kWidth], bias[kCount];
  T input[kCount][kWidth];  // [j] is that of token t − kWidth + 1 + j

  __device__ Lane(const ShortConv& k, const Cut& cut, std::int64_t group)
      : first(group * cut.group),
        channels(static_cast<int>(min(cut.group, k.channels - first))),
        skip(kWidth - static_cast<int>(k.width)) {
    typename Raw<T>::type raw[kCount][kWidth + 1];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool mine = channel(i) < channels;
      const std::int64_t c = first + channel(i);
      raw[i][kWidth] = mine && given(k.bias) ? load_raw<T>(k.bias, c) : 0;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        raw[i][j] = mine && j >= skip ? load_raw<T>(k.weight, c * k.width + j - skip) : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      bias[i] = from_raw<T>(raw[i][kWidth], k.bias.dtype);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) weight[i][j] = from_raw<T>(raw[i][j], k.weight.dtype);
    }
  }

  __device__ static int channel(int i) { return i * kLanes + lane(); }

  __device__ void push(int i, T value) {
#pragma unroll
    for (int j = 0; j + 1 < kWidth; ++j) input[i][j] = input[i][j + 1];
    input[i][kWidth - 1] = value;
  }

  /// Taps that do not exist select; a weight of 0 would keep a NaN.
  __device__ __forceinline__ T convolve(int i) const {
    T z = bias[i];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (j >= skip) z += weight[i][j] * input[i][j];
    }
    return z;
  }
};

struct Line {
  std::int64_t n, row, begin, end;
};

/// The sequence of a token; without cu_seqlens its row.
__device__ Line line_of(const ShortConv& k, std::int64_t row, std::int64_t token) {
  if (k.cu_seqlens == nullptr) return {row, row, 0, k.tokens};
  std::int64_t low = 0, high = k.sequences;  // cu_seqlens[low] ≤ token < cu_seqlens[high]
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (k.cu_seqlens[middle] <= token ? low : high) = middle;
  }
  return {low, row, k.cu_seqlens[low], k.cu_seqlens[low + 1]};
}

/// Where channel c of sequence n keeps input `position` of those before its first token; −1 where it keeps none.
__device__ inline std::int64_t in_state(const ShortConv& k, const Line& line, std::int64_t position, std::int64_t c) {
  const std::int64_t before = k.width - 1, j = before + position - line.begin;
  return j < 0 ? -1 : (line.n * k.channels + c) * before + j;
}

/// Input `position` of a line: a token, or what came before the first one.
template <typename T>
__device__ __forceinline__ typename Raw<T>::type load_input(const ShortConv& k, const Line& line, std::int64_t position,
                                                            std::int64_t c) {
  if (position >= line.begin) return load_raw<T>(k.x, offset(k.x, line.row, position, 0) + c);
  const std::int64_t at = given(k.initial_state) ? in_state(k, line, position, c) : -1;
  return at < 0 ? 0 : load_raw<T>(k.initial_state, at);
}
template <typename T>
__device__ __forceinline__ T input_from(const ShortConv& k, const Line& line, std::int64_t position,
                                        typename Raw<T>::type raw) {
  return from_raw<T>(raw, position >= line.begin ? k.x.dtype : k.initial_state.dtype);
}

/// The inputs before `token`.
template <typename T, int kGroup, int kWidth>
__device__ __forceinline__ void read_history(const ShortConv& k, const Line& line, std::int64_t token,
                                             Lane<T, kGroup, kWidth>& own) {
  typename Raw<T>::type raw[own.kCount][kWidth];
#pragma unroll
  for (int j = 1; j < kWidth; ++j) {
#pragma unroll
    for (int i = 0; i < own.kCount; ++i) {
      const bool mine = own.channel(i) < own.channels && j > own.skip;
      raw[i][j] = mine ? load_input<T>(k, line, token - kWidth + j, own.first + own.channel(i)) : 0;
    }
  }
#pragma unroll
  for (int j = 1; j < kWidth; ++j) {
#pragma unroll
    for (int i = 0; i < own.kCount; ++i) own.input[i][j] = input_from<T>(k, line, token - kWidth + j, raw[i][j]);
  }
}

/// y = by · s over one head, and ds = by · dy − bend (s · dy) s.
template <typename T>
struct Norm {
  T by, bend;
};
template <typename T>
__device__ __forceinline__ Norm<T> norm_of(const ShortConv& k, T squares) {
  if (k.l2_norm == L2Norm::rsqrt) {
    const T by = T{1} / sqrt(squares + static_cast<T>(k.eps));
    return {by, by * by * by};
  }
  const T length = sqrt(squares), by = T{1} / (length + static_cast<T>(k.eps));
  return {by, length > 0 ? by * by / length : T{0}};
}

/// y of the newest input.
template <typename T, int kGroup, int kWidth>
__device__ __forceinline__ void forward_token(const ShortConv& k, const Lane<T, kGroup, kWidth>& own, const View& y,
                                              std::int64_t at) {
  T s[own.kCount], squares = 0;
#pragma unroll
  for (int i = 0; i < own.kCount; ++i) {
    s[i] = activate(k.activation, own.convolve(i)).value;
    squares += s[i] * s[i];
  }
  const T by = k.l2_norm != L2Norm::none ? norm_of(k, sum_lanes(squares)).by : T{1};
#pragma unroll
  for (int i = 0; i < own.kCount; ++i) {
    if (own.channel(i) < own.channels) write(y, at + own.first + own.channel(i), s[i] * by);
  }
}

struct Run {
  std::int64_t row, begin, end;
};

__device__ inline Run run_of(const ShortConv& k, const Cut& cut, std::int64_t i) {
  const std::int64_t begin = i % cut.runs_per_row * kRun;
  return {i / cut.runs_per_row, begin, min(begin + kRun, k.tokens)};
}

/// One sequence's part of a run.
template <typename T, int kGroup, int kWidth>
__device__ __forceinline__ void forward_line(const ShortConv& k, const View& y, const Line& line, std::int64_t from,
                                             std::int64_t to, Lane<T, kGroup, kWidth>& own) {
  read_history(k, line, from, own);
  for (std::int64_t t = from; t < to; t += kAhead) {
    typename Lane<T, kGroup, kWidth>::Input next[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (t + a < to) next[a].load(k.x, offset(k.x, line.row, t + a, 0) + own.first, own.channels, lane());
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (t + a >= to) break;
#pragma unroll
      for (int i = 0; i < own.kCount; ++i) own.push(i, next[a].get(i, k.x.dtype));
      forward_token(k, own, y, offset(y, line.row, t + a, 0));
    }
  }
}

template <typename T, int kGroup, int kWidth>
__global__ void __launch_bounds__(kThreads)
    convolve_runs(const __grid_constant__ ShortConv k, const View y, const Cut cut) {
  const std::int64_t task = block() * kWarps + warp();
  if (task >= cut.runs * cut.groups) return;
  Lane<T, kGroup, kWidth> own(k, cut, task % cut.groups);
  const Run run = run_of(k, cut, task / cut.groups);
  for (std::int64_t t = run.begin; t < run.end;) {
    const Line line = line_of(k, run.row, t);
    forward_line(k, y, line, t, min(line.end, run.end), own);
    t = line.end;
  }
}

// ---- Backward ---------------------------------------------------------------------------------------------------

/// What a warp sums: gradients of inputs that are not complete, and of the taps.
template <typename T, int kGroup, int kWidth>
struct Sums {
  static constexpr int kCount = kGroup / kLanes;
  T d_input[kCount][kWidth];  // as Lane::input
  T d_weight[kCount][kWidth], d_bias[kCount];

  __device__ Sums() : d_input{}, d_weight{}, d_bias{} {}
};

template <typename T, int kGroup, int kWidth>
__device__ __forceinline__ void backward_token(const ShortConv& k, const Lane<T, kGroup, kWidth>& own,
                                               const T (&d_y)[kGroup / kLanes], bool sums_taps,
                                               Sums<T, kGroup, kWidth>& sums) {
  Activated<T> s[own.kCount];
  T squares = 0, along = 0;
#pragma unroll
  for (int i = 0; i < own.kCount; ++i) {
    s[i] = activate(k.activation, own.convolve(i));
    squares += s[i].value * s[i].value;
    along += s[i].value * d_y[i];
  }
  Norm<T> norm{T{1}, T{0}};
  if (k.l2_norm != L2Norm::none) {
    norm = norm_of(k, sum_lanes(squares));
    norm.bend *= norm.bend != 0 ? sum_lanes(along) : T{0};
  }
#pragma unroll
  for (int i = 0; i < own.kCount; ++i) {
    T d_s = norm.by * d_y[i];
    if (k.l2_norm != L2Norm::none) d_s -= norm.bend * s[i].value;
    const T d_z = d_s * s[i].slope;
    if (sums_taps) sums.d_bias[i] += d_z;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (j < own.skip) continue;
      sums.d_input[i][j] += own.weight[i][j] * d_z;
      if (sums_taps) sums.d_weight[i][j] += own.input[i][j] * d_z;
    }
  }
}

/// Hands out the oldest input's gradient, to which nothing will be added any more, and moves up by one. Gradients of
/// tokens outside the run are another run's; the first token's run has the initial state's.
template <typename T, int kGroup, int kWidth>
__device__ __forceinline__ void finish_oldest(const ShortConv& k, const ShortConvGradients& g, const Line& line,
                                              const Run& run, std::int64_t position, const Lane<T, kGroup, kWidth>& own,
                                              Sums<T, kGroup, kWidth>& sums) {
  const bool is_token = position >= line.begin;
  const std::int64_t owner = is_token ? position : line.begin;
  const bool wanted = owner >= run.begin && owner < run.end;
#pragma unroll
  for (int i = 0; i < own.kCount; ++i) {
    const std::int64_t c = own.first + own.channel(i);
    if (wanted && own.channel(i) < own.channels) {
      T value = sums.d_input[i][0];
      const std::int64_t last = position - (line.end - (k.width - 1));  // place in the final state
      if (given(g.d_final_state) && last >= 0) {
        value += read<T>(g.d_final_state, (line.n * k.channels + c) * (k.width - 1) + last);
      }
      if (is_token) {
        if (given(g.d_x)) write(g.d_x, offset(g.d_x, line.row, position, 0) + c, value);
      } else if (const std::int64_t at = in_state(k, line, position, c); given(g.d_initial_state) && at >= 0) {
        write(g.d_initial_state, at, value);
      }
    }
#pragma unroll
    for (int j = 0; j + 1 < kWidth; ++j) sums.d_input[i][j] = sums.d_input[i][j + 1];
    sums.d_input[i][kWidth - 1] = 0;
  }
}

/// One sequence's part of a run and the tokens behind it that its inputs reach.
template <typename T, int kGroup, int kWidth>
__device__ __forceinline__ void backward_line(const ShortConv& k, const ShortConvGradients& g, const Line& line,
                                              const Run& run, std::int64_t from, Lane<T, kGroup, kWidth>& own,
                                              Sums<T, kGroup, kWidth>& sums) {
  const std::int64_t to = min(line.end, run.end + kWidth - 1);
  read_history(k, line, from, own);
  for (std::int64_t t = from; t < to; t += kAhead) {
    typename Lane<T, kGroup, kWidth>::Input next[kAhead], d_next[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (t + a >= to) break;
      next[a].load(k.x, offset(k.x, run.row, t + a, 0) + own.first, own.channels, lane());
      d_next[a].load(g.d_y, offset(g.d_y, run.row, t + a, 0) + own.first, own.channels, lane());
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (t + a >= to) break;
      T d_y[own.kCount];
#pragma unroll
      for (int i = 0; i < own.kCount; ++i) {
        own.push(i, next[a].get(i, k.x.dtype));
        d_y[i] = d_next[a].get(i, g.d_y.dtype);
      }
      backward_token(k, own, d_y, t + a < run.end, sums);
      finish_oldest(k, g, line, run, t + a - (kWidth - 1), own, sums);
    }
  }
  if (to < line.end) return;  // the rest is the next run's
  for (int j = 0; j < kWidth - 1; ++j) finish_oldest(k, g, line, run, to - (kWidth - 1) + j, own, sums);
}

/// The sums of a block's runs, [kWidth + 1][kGroup] numbers, the bias's last.
template <typename T, int kGroup, int kWidth>
__device__ void keep_sums(const Sums<T, kGroup, kWidth>& sums, T* to) {
  T* parts = reinterpret_cast<T*>(shared_memory());  // [kWarps][kGroup]
#pragma unroll
  for (int j = 0; j <= kWidth; ++j) {
#pragma unroll
    for (int i = 0; i < sums.kCount; ++i) {
      parts[warp() * kGroup + i * kLanes + lane()] = j < kWidth ? sums.d_weight[i][j < kWidth ? j : 0] : sums.d_bias[i];
    }
    sync();
    each(kGroup, [&](int c) {
      T total = 0;
      for (int w = 0; w < kWarps; ++w) total += parts[w * kGroup + c];
      to[j * kGroup + c] = total;
    });
  }
}

/// A block has kWarps runs of one group.
template <typename T, int kGroup, int kWidth>
__global__ void __launch_bounds__(kThreads)
    differentiate_runs(const __grid_constant__ ShortConv k, const __grid_constant__ ShortConvGradients g, const Cut cut,
                       T* kept) {
  Lane<T, kGroup, kWidth> own(k, cut, block() % cut.groups);
  Sums<T, kGroup, kWidth> sums;
  const std::int64_t at = block() / cut.groups * kWarps + warp();
  if (at < cut.runs) {
    const Run run = run_of(k, cut, at);
    for (std::int64_t t = run.begin; t < run.end;) {
      const Line line = line_of(k, run.row, t);
      backward_line(k, g, line, run, t, own, sums);
      t = line.end;
    }
  }
  keep_sums(sums, kept + block() * (kWidth + 1) * kGroup);
}

/// d_weight and d_bias, an element per thread.
template <typename T, int kGroup, int kWidth>
__global__ void __launch_bounds__(kThreads)
    sum_blocks(const __grid_constant__ ShortConv k, const __grid_constant__ ShortConvGradients g, const Cut cut,
               const T* kept, std::int64_t blocks_per_group) {
  const int skip = kWidth - static_cast<int>(k.width);
  const std::int64_t n = block() * kThreads + thread();  // tap by tap, so that neighbours read neighbours
  if (n >= k.channels * (k.width + 1)) return;
  const std::int64_t j = n / k.channels, c = n % k.channels, group = c / cut.group;
  double total = 0;
  for (std::int64_t b = 0; b < blocks_per_group; ++b) {
    total += kept[((b * cut.groups + group) * (kWidth + 1) + j + skip) * kGroup + c % cut.group];
  }
  if (j == k.width && given(g.d_bias)) write(g.d_bias, c, total);
  if (j < k.width && given(g.d_weight)) write(g.d_weight, c * k.width + j, total);
}

// ---- States and steps -------------------------------------------------------------------------------------------

__device__ inline Line sequence_of(const ShortConv& k, std::int64_t n) {
  if (k.cu_seqlens == nullptr) return {n, n, 0, k.tokens};
  return {n, 0, k.cu_seqlens[n], k.cu_seqlens[n + 1]};
}

/// Final states from the inputs alone, a number per thread.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    write_final_states(const __grid_constant__ ShortConv k, const View final_state) {
  const std::int64_t n = block() * kThreads + thread(), before = k.width - 1;
  if (n >= k.sequences * k.channels * before) return;
  const Line line = sequence_of(k, n / before / k.channels);
  const std::int64_t position = line.end - before + n % before;
  write(final_state, n, input_from<T>(k, line, position, load_input<T>(k, line, position, n / before % k.channels)));
}

/// An empty sequence hands its state through, and the gradient back.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    hand_back_states(const __grid_constant__ ShortConv k, const __grid_constant__ ShortConvGradients g) {
  const std::int64_t n = block() * kThreads + thread(), before = k.width - 1;
  if (n >= k.sequences * k.channels * before) return;
  const Line line = sequence_of(k, n / before / k.channels);
  if (line.begin == line.end) write(g.d_initial_state, n, given(g.d_final_state) ? read<T>(g.d_final_state, n) : T{0});
}

/// Convolutions of one launch: a block has up to three, and each alone is over before the next begins.
struct Steps {
  ShortConvStep of[kMostShortConvs];
  Cut cut[kMostShortConvs];
  int count = 0;

  __host__ __device__ std::int64_t tasks(int i) const { return of[i].conv.batch * cut[i].groups; }
};

/// A warp per sequence and group.
template <typename T, int kGroup, int kWidth>
__global__ void __launch_bounds__(kThreads) step_groups(const __grid_constant__ Steps steps) {
  std::int64_t task = block() * kWarps + warp();
  int which = 0;
  while (which < steps.count && task >= steps.tasks(which)) task -= steps.tasks(which++);
  if (which == steps.count) return;
  const ShortConvStep& step = steps.of[which];
  const Cut& cut = steps.cut[which];
  ShortConv k = step.conv;
  const std::int64_t b = task / cut.groups, slot = step.state_indices != nullptr ? step.state_indices[b] : b;
  k.initial_state = step.state;
  Lane<T, kGroup, kWidth> own(k, cut, task % cut.groups);
  read_history(k, {slot, b, 0, 1}, 0, own);
#pragma unroll
  for (int i = 0; i < own.kCount; ++i) {
    const bool mine = own.channel(i) < own.channels;
    own.push(i, mine ? read<T>(k.x, offset(k.x, b, 0, 0) + own.first + own.channel(i)) : T{0});
#pragma unroll
    for (int j = 1; j < kWidth; ++j) {
      if (!mine || j <= own.skip) continue;
      write(step.state, (slot * k.channels + own.first + own.channel(i)) * (k.width - 1) + j - own.skip - 1,
            own.input[i][j]);
    }
  }
  forward_token(k, own, step.y, offset(step.y, b, 0, 0));
}

// ---- Launches ---------------------------------------------------------------------------------------------------

std::int64_t blocks_for(std::int64_t threads) { return (threads + kThreads - 1) / kThreads; }

template <typename T, int kGroup, int kWidth>
void forward_as(const ShortConv& k, const ShortConvOutputs& out, const Device& device) {
  if (vectors::takes(k, {&k.x, &out.y})) {
    vectors::forward(k, out.y, device);
  } else {
    const Cut cut = cut_of(k);
    launch(convolve_runs<T, kGroup, kWidth>, (cut.runs * cut.groups + kWarps - 1) / kWarps, 0, device.stream, k, out.y,
           cut);
  }
  const std::int64_t numbers = given(out.final_state) ? k.sequences * k.channels * (k.width - 1) : 0;
  launch(write_final_states<T>, blocks_for(numbers), 0, device.stream, k, out.final_state);
}

template <typename T, int kGroup, int kWidth>
void backward_as(const ShortConv& k, const ShortConvGradients& g, const Device& device) {
  const Cut cut = cut_of(k);
  const std::int64_t blocks_per_group = (cut.runs + kWarps - 1) / kWarps, blocks = blocks_per_group * cut.groups;
  constexpr int kKept = (kWidth + 1) * kGroup;
  T* kept = static_cast<T*>(device.allocate(static_cast<std::size_t>(blocks * kKept) * sizeof(T) + 1));
  launch(differentiate_runs<T, kGroup, kWidth>, blocks, kWarps * kGroup * static_cast<int>(sizeof(T)), device.stream, k,
         g, cut, kept);
  const std::int64_t taps = given(g.d_weight) || given(g.d_bias) ? k.channels * (k.width + 1) : 0;
  launch(sum_blocks<T, kGroup, kWidth>, blocks_for(taps), 0, device.stream, k, g, cut, kept, blocks_per_group);
  const std::int64_t numbers = given(g.d_initial_state) ? k.sequences * k.channels * (k.width - 1) : 0;
  launch(hand_back_states<T>, blocks_for(numbers), 0, device.stream, k, g);
}

template <typename T, int kGroup, int kWidth>
void step_as(const Steps& steps, const Device& device) {
  std::int64_t tasks = 0;
  for (int i = 0; i < steps.count; ++i) tasks += steps.tasks(i);
  launch(step_groups<T, kGroup, kWidth>, (tasks + kWarps - 1) / kWarps, 0, device.stream, steps);
}

template <typename T, int kGroup_, int kWidth_>
struct Shape {
  using Number = T;
  static constexpr int kGroup = kGroup_, kWidth = kWidth_;
};

/// body(Shape): the code for the sizes that published blocks have, and two for everything else.
template <typename Body>
void with_shape(const ShortConv& k, const Device& device, Body&& body) {
  const CurrentDevice current(device.index);
  with_arithmetic(k.x.dtype, [&]<typename T>(T) {
    if constexpr (sizeof(T) == 4) {
      if (k.width <= 4 && cut_of(k).group <= 128) return body(Shape<T, 128, 4>{});
      if (k.width <= 4) return body(Shape<T, 256, 4>{});
    }
    body(Shape<T, 256, 8>{});
  });
}

}  // namespace

void short_conv(const ShortConv& conv, const ShortConvOutputs& outputs, const Device& device) {
  with_shape(conv, device,
             [&]<typename S>(S) { forward_as<typename S::Number, S::kGroup, S::kWidth>(conv, outputs, device); });
}

void short_conv_backward(const ShortConv& conv, const ShortConvGradients& gradients, const Device& device) {
  if (given(gradients.d_x) && !given(gradients.d_final_state) && !given(gradients.d_bias) &&
      !given(conv.initial_state) && vectors::takes(conv, {&conv.x, &gradients.d_y, &gradients.d_x})) {
    return vectors::backward(conv, gradients, device);
  }
  with_shape(conv, device,
             [&]<typename S>(S) { backward_as<typename S::Number, S::kGroup, S::kWidth>(conv, gradients, device); });
}

void short_conv_steps(std::span<const ShortConvStep> several, const Device& device) {
  if (several.empty() || several.size() > kMostShortConvs) {
    throw std::logic_error("gka: short_conv_steps takes one to three convolutions");
  }
  Steps steps;
  const ShortConv* widest = &several.front().conv;
  for (const ShortConvStep& step : several) {
    if (step.conv.x.dtype != widest->x.dtype) throw std::logic_error("gka: short_conv_steps takes one type");
    steps.of[steps.count] = step;
    steps.cut[steps.count++] = cut_of(step.conv);
    const auto size = [](const ShortConv& k) { return std::pair(k.width > 4, cut_of(k).group > 128); };
    if (size(step.conv) > size(*widest)) widest = &step.conv;
  }
  if (std::ranges::all_of(several, [](const ShortConvStep& step) { return vectors::takes(step); })) {
    return vectors::step(several, device);
  }
  with_shape(*widest, device, [&]<typename S>(S) { step_as<typename S::Number, S::kGroup, S::kWidth>(steps, device); });
}
void short_conv_step(const ShortConvStep& step, const Device& device) { short_conv_steps({&step, 1}, device); }

}  // namespace gka::kernels::cuda
