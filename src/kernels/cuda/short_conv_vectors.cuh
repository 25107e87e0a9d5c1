// The short convolution where it is plain: width 4, every row one sequence from its start, no states. Then a lane takes
// four neighbouring channels in one load, and a window of inputs slides along in registers without a look at what a
// token is. A warp walks a run of tokens of kLanes · 4 channels; the lanes of a head stand side by side.
#pragma once

#include "gka/block_kernels.h"
#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/vectors.cuh"

namespace gka::kernels::cuda::vectors {

inline constexpr int kTaps = 4, kOwn = 4;       // channels of a lane
inline constexpr int kGroup = kLanes * kOwn;    // channels of a warp
inline constexpr std::int64_t kRunTokens = 64;  // of a warp
inline constexpr int kSteps = 2;                // tokens whose loads are under way at a time
inline constexpr int kPast = kTaps - 1;         // inputs before a token that it sees

using Quad = Numbers<kOwn>;

struct Cut {
  std::int64_t groups, runs_per_row, runs;
  int head_lanes;  // of a head; 0: no norm
};

inline Cut cut_of(const ShortConv& k) {
  const std::int64_t runs_per_row = (k.tokens + kRunTokens - 1) / kRunTokens;
  return {.groups = (k.channels + kGroup - 1) / kGroup,
          .runs_per_row = runs_per_row,
          .runs = k.batch * runs_per_row,
          .head_lanes = k.l2_norm == L2Norm::none ? 0 : static_cast<int>(k.head_dim / kOwn)};
}

/// What a warp works on: tokens begin … end − 1 of a row, and of them this lane's channels.
struct Task {
  std::int64_t row, begin, end, channel;
  bool mine;  // whether the lane has channels at all; it takes part in sums all the same
};

__device__ inline Task task_of(const ShortConv& k, const Cut& cut, std::int64_t run, std::int64_t group) {
  const std::int64_t begin = run % cut.runs_per_row * kRunTokens, channel = group * kGroup + lane() * kOwn;
  return {run / cut.runs_per_row, begin, least(begin + kRunTokens, k.tokens), channel, channel < k.channels};
}

/// Numbers of a token of a row; 0 outside it.
template <DType kType>
__device__ __forceinline__ Quad read_token(const ShortConv& k, const View& view, const Task& task, std::int64_t token) {
  if (!task.mine || token < 0 || token >= k.tokens) return {};
  return read_vector<kType, kOwn>(view.data, offset(view, task.row, token, 0) + task.channel);
}

struct Taps {
  float w[kOwn][kTaps];

  __device__ Taps(const ShortConv& k, const Task& task) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        w[i][j] = task.mine ? read<float>(k.weight, (task.channel + i) * kTaps + j) : 0.0f;
      }
    }
  }
};

/// The sum over the lanes of a head, the same in each.
__device__ __forceinline__ float sum_head(float value, int head_lanes) {
  for (int apart = head_lanes / 2; apart > 0; apart /= 2) value += from_lane(value, apart);
  return value;
}

/// z = Σ_j w_j x_{t − 3 + j} of the token at `window[kPast]`.
__device__ __forceinline__ Quad convolve(const Taps& taps, const Quad* window) {
  Quad z;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    z.x[i] = 0;
#pragma unroll
    for (int j = 0; j < kTaps; ++j) z.x[i] += taps.w[i][j] * window[j].x[i];
  }
  return z;
}

/// y = by · s over one head, and ds = by · dy − bend (s · dy) s.
struct Scale {
  float by, bend;
};
__device__ __forceinline__ Scale scale_of(const ShortConv& k, float squares) {
  if (k.l2_norm == L2Norm::rsqrt) {
    const float by = 1.0f / sqrt(squares + static_cast<float>(k.eps));
    return {by, by * by * by};
  }
  const float length = sqrt(squares), by = 1.0f / (length + static_cast<float>(k.eps));
  return {by, length > 0 ? by * by / length : 0.0f};
}

template <DType kType>
__global__ void __launch_bounds__(kThreads)
    convolve_runs(const __grid_constant__ ShortConv k, const View y, const Cut cut) {
  const std::int64_t at = block() * kWarps + warp();
  if (at >= cut.runs * cut.groups) return;
  const Task task = task_of(k, cut, at / cut.groups, at % cut.groups);
  const Taps taps(k, task);
  Quad window[kPast + kSteps];
#pragma unroll
  for (int j = 0; j < kPast; ++j) window[j] = read_token<kType>(k, k.x, task, task.begin - kPast + j);
#pragma unroll
  for (int a = 0; a < kSteps; ++a) window[kPast + a] = read_token<kType>(k, k.x, task, task.begin + a);
  for (std::int64_t t = task.begin; t < task.end; t += kSteps) {
    Quad next[kSteps];
#pragma unroll
    for (int a = 0; a < kSteps; ++a) next[a] = read_token<kType>(k, k.x, task, t + kSteps + a);
#pragma unroll
    for (int a = 0; a < kSteps; ++a) {
      Quad s = convolve(taps, window + a);
      float squares = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        s.x[i] = activate(k.activation, s.x[i]).value;
        squares += s.x[i] * s.x[i];
      }
      if (cut.head_lanes > 0) {
        const float by = scale_of(k, sum_head(squares, cut.head_lanes)).by;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) s.x[i] *= by;
      }
      if (task.mine && t + a < task.end) {
        write_vector<kType, kOwn>(y.data, offset(y, task.row, t + a, 0) + task.channel, s);
      }
    }
#pragma unroll
    for (int j = 0; j < kPast; ++j) window[j] = window[j + kSteps];
#pragma unroll
    for (int a = 0; a < kSteps; ++a) window[kPast + a] = next[a];
  }
}

/// dz of the token at `window[kPast]`, from its dy.
__device__ __forceinline__ Quad differentiate(const ShortConv& k, const Cut& cut, const Taps& taps, const Quad* window,
                                              const Quad& d_y) {
  const Quad z = convolve(taps, window);
  Activated<float> s[kOwn];
  float squares = 0, along = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    s[i] = activate(k.activation, z.x[i]);
    squares += s[i].value * s[i].value;
    along += s[i].value * d_y.x[i];
  }
  Scale scale{1, 0};
  if (cut.head_lanes > 0) {
    scale = scale_of(k, sum_head(squares, cut.head_lanes));
    along = sum_head(along, cut.head_lanes);
  }
  Quad d_z;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const float bent = scale.bend != 0 ? scale.bend * along * s[i].value : 0.0f;
    d_z.x[i] = (scale.by * d_y.x[i] - bent) * s[i].slope;
  }
  return d_z;
}

/// A block has kWarps runs of one group and leaves the sum of their taps' gradients, [kTaps][kGroup], in `kept`.
template <DType kType>
__global__ void __launch_bounds__(kThreads)
    differentiate_runs(const __grid_constant__ ShortConv k, const __grid_constant__ ShortConvGradients g, const Cut cut,
                       float* kept) {
  const std::int64_t run = block() / cut.groups * kWarps + warp();
  Task task = task_of(k, cut, least(run, cut.runs - 1), block() % cut.groups);
  if (run >= cut.runs) task.end = task.begin;
  const Taps taps(k, task);
  float d_taps[kOwn][kTaps] = {};
  Quad window[kPast + kSteps], slopes[kPast + kSteps] = {};  // x, and dz, of the same tokens
#pragma unroll
  for (int j = 0; j < kPast; ++j) window[j] = read_token<kType>(k, k.x, task, task.begin - kPast + j);
  Quad d_y[kSteps];
#pragma unroll
  for (int a = 0; a < kSteps; ++a) {
    window[kPast + a] = read_token<kType>(k, k.x, task, task.begin + a);
    d_y[a] = read_token<kType>(k, g.d_y, task, task.begin + a);
  }
  // An input is complete kPast tokens later, so a run goes that far beyond its end.
  const std::int64_t last = task.end > task.begin ? task.end + kPast : task.begin;
  for (std::int64_t t = task.begin; t < last; t += kSteps) {
    Quad next[kSteps], d_next[kSteps];
#pragma unroll
    for (int a = 0; a < kSteps; ++a) {
      next[a] = read_token<kType>(k, k.x, task, t + kSteps + a);
      d_next[a] = read_token<kType>(k, g.d_y, task, t + kSteps + a);
    }
#pragma unroll
    for (int a = 0; a < kSteps; ++a) {
      slopes[kPast + a] = differentiate(k, cut, taps, window + a, d_y[a]);
      Quad d_x;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        d_x.x[i] = 0;
        const float d_z = t + a < task.end ? slopes[kPast + a].x[i] : 0.0f;
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          d_x.x[i] += taps.w[i][kTaps - 1 - j] * slopes[a + j].x[i];
          d_taps[i][j] += d_z * window[a + j].x[i];
        }
      }
      const std::int64_t done = t + a - kPast;
      if (task.mine && done >= task.begin && done < task.end) {
        write_vector<kType, kOwn>(g.d_x.data, offset(g.d_x, task.row, done, 0) + task.channel, d_x);
      }
    }
#pragma unroll
    for (int j = 0; j < kPast; ++j) {
      window[j] = window[j + kSteps];
      slopes[j] = slopes[j + kSteps];
    }
#pragma unroll
    for (int a = 0; a < kSteps; ++a) {
      window[kPast + a] = next[a];
      d_y[a] = d_next[a];
    }
  }
  float* parts = reinterpret_cast<float*>(shared_memory());  // [kWarps][kTaps][kGroup]
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) parts[(warp() * kTaps + j) * kGroup + lane() * kOwn + i] = d_taps[i][j];
  }
  sync();
  each(kTaps * kGroup, [&](int n) {
    float total = 0;
    for (int w = 0; w < kWarps; ++w) total += parts[w * kTaps * kGroup + n];
    kept[block() * kTaps * kGroup + n] = total;
  });
}

/// d_weight from the blocks' sums: kWarps warps share a tap's blocks, a lane per channel.
static __global__ void __launch_bounds__(kThreads)
    sum_taps(const __grid_constant__ ShortConv k, const View d_weight, const Cut cut, const float* kept,
             std::int64_t blocks_per_group) {
  double* parts = reinterpret_cast<double*>(shared_memory());
  const std::int64_t n = block() * kLanes + lane(), c = n / kTaps, j = n % kTaps;
  double total = 0;
  for (std::int64_t b = warp(); c < k.channels && b < blocks_per_group; b += kWarps) {
    total += kept[((b * cut.groups + c / kGroup) * kTaps + j) * kGroup + c % kGroup];
  }
  parts[thread()] = total;
  sync();
  if (warp() > 0 || c >= k.channels) return;
  total = 0;
  for (int w = 0; w < kWarps; ++w) total += parts[w * kLanes + lane()];
  write(d_weight, c * kTaps + j, total);
}

/// Whether a call is one of these; `views` are the arrays as long as x.
inline bool takes(const ShortConv& k, std::initializer_list<const View*> views) {
  const std::int64_t head_lanes = k.head_dim / kOwn;
  const bool whole_heads = k.l2_norm == L2Norm::none ||
                           (k.head_dim % kOwn == 0 && head_lanes <= kLanes && (head_lanes & (head_lanes - 1)) == 0);
  return k.width == kTaps && k.channels % kOwn == 0 && k.cu_seqlens == nullptr && !given(k.bias) &&
         !given(k.initial_state) && whole_heads && in_vectors<kOwn>(k.x.dtype, views);
}

inline void forward(const ShortConv& k, const View& y, const Device& device) {
  const CurrentDevice current(device.index);
  const Cut cut = cut_of(k);
  with_vectors_of(k.x.dtype, [&](auto type) {
    launch(convolve_runs<decltype(type)::type>, (cut.runs * cut.groups + kWarps - 1) / kWarps, 0, device.stream, k, y,
           cut);
  });
}

inline void backward(const ShortConv& k, const ShortConvGradients& g, const Device& device) {
  const CurrentDevice current(device.index);
  const Cut cut = cut_of(k);
  const std::int64_t blocks_per_group = (cut.runs + kWarps - 1) / kWarps, blocks = blocks_per_group * cut.groups;
  constexpr int kKept = kTaps * kGroup * static_cast<int>(sizeof(float));
  float* kept = static_cast<float*>(device.allocate(static_cast<std::size_t>(blocks * kKept)));
  with_vectors_of(k.x.dtype, [&](auto type) {
    launch(differentiate_runs<decltype(type)::type>, blocks, kWarps * kKept, device.stream, k, g, cut, kept);
  });
  if (!given(g.d_weight)) return;
  launch(sum_taps, (k.channels * kTaps + kLanes - 1) / kLanes, kThreads * 8, device.stream, k, g.d_weight, cut,
         static_cast<const float*>(kept), blocks_per_group);
}

}  // namespace gka::kernels::cuda::vectors
