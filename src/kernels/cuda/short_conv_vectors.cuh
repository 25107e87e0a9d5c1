// The short convolution where it is plain: width 4, SiLU, every row one sequence; backward without states. Then a lane
// takes four neighbouring channels in one load, and the last four inputs lie in a ring of registers: token t in place t
// mod 4, in a loop over four tokens a matter of names. A warp walks a run of tokens of kLanes · 4 channels; the lanes
// of a head stand side by side. What comes next is on its way into shared memory, each lane's own numbers to a place of
// its own, so that nobody waits for another: in registers there is no room for as much as hides the memory's delay.
#pragma once

#include <span>

#include "gka/block_kernels.h"
#include "kernels/cuda/vectors.cuh"
#include "kernels/cuda/warp_rows.cuh"

namespace gka::kernels::cuda::vectors {

inline constexpr int kTaps = 4, kOwn = 4;       // channels of a lane
inline constexpr int kGroup = kLanes * kOwn;    // channels of a warp
inline constexpr std::int64_t kRunTokens = 64;  // of a warp, at most
inline constexpr int kPast = kTaps - 1;         // inputs before a token that it sees

// Backward, where a thread needs many registers, two small blocks of a multiprocessor rather than a large one: while
// one begins or ends the other has work.
inline constexpr int kBackBlock = kThreads > 256 ? 256 : kThreads, kBackWarps = kBackBlock / kLanes;

using Quad = Numbers<kOwn>;

struct Cut {
  std::int64_t groups, run, runs_per_row, runs;  // run: tokens
  int head_lanes;                                // of a head; 0: no norm
};

inline Cut cut_of(const ShortConv& k, std::int64_t run = kRunTokens) {
  const std::int64_t runs_per_row = (k.tokens + run - 1) / run;
  return {.groups = (k.channels + kGroup - 1) / kGroup,
          .run = run,
          .runs_per_row = runs_per_row,
          .runs = k.batch * runs_per_row,
          .head_lanes = k.l2_norm == L2Norm::none ? 0 : static_cast<int>(k.head_dim / kOwn)};
}

/// Forward, where a run costs no more than its first three inputs: shorter ones for a few sequences, as a prompt's
/// piece is, so that they find every multiprocessor.
inline Cut forward_cut(const ShortConv& k) {
  constexpr std::int64_t kShortest = 16, kBusy = 4096;  // warps
  std::int64_t run = kRunTokens;
  while (run > kShortest && k.batch * (k.tokens / run) * (k.channels / kGroup) < kBusy) run /= 2;
  return cut_of(k, run);
}

/// What a warp works on: tokens begin … end − 1 of a row, and of them this lane's channels.
struct Task {
  std::int64_t row, begin, end, channel;
  bool mine;  // whether the lane has channels at all; it takes part in sums all the same
};

__device__ inline Task task_of(const ShortConv& k, const Cut& cut, std::int64_t run, std::int64_t group) {
  const std::int64_t begin = run % cut.runs_per_row * cut.run, channel = group * kGroup + lane() * kOwn;
  return {run / cut.runs_per_row, begin, min(begin + cut.run, k.tokens), channel, channel < k.channels};
}

/// An array along a task's tokens, of which 0 is its first; numbers outside the row are 0.
template <DType kType>
struct Line {
  void* data;
  std::int64_t first;
  int stride;
  int begin, end;  // tokens that are there

  __device__ Line(const ShortConv& k, const View& view, const Task& task)
      : data(view.data),
        first(offset(view, task.row, task.begin, 0) + task.channel),
        stride(static_cast<int>(view.token_stride)),
        begin(task.begin > 0 ? -kPast : 0),
        end(task.mine ? static_cast<int>(min(k.tokens - task.begin, 2 * kRunTokens)) : -kPast) {}

  __device__ __forceinline__ Held<kType, kOwn> hold(int token) const {
    if (token < begin || token >= end) return {};
    return hold_vector<kType, kOwn>(data, first + token * stride);
  }
  __device__ __forceinline__ Quad read(int token) const { return let_go<kType, kOwn>(hold(token)); }
  __device__ __forceinline__ void write(int token, const Quad& numbers) const {
    write_vector<kType, kOwn>(data, first + token * stride, numbers);
  }
};

/// The next kTokens tokens of a line, as they lie in memory. A group of copies is those of kTaps tokens.
template <DType kType>
struct Coming {
  using Place = Held<kType, kOwn>;
  static constexpr int kTokens = 128 / static_cast<int>(sizeof(Place)), kGroups = kTokens / kTaps;
  static constexpr int kBytes = kTokens * kLanes * static_cast<int>(sizeof(Place));  // of a warp

  const Line<kType>& line;
  Place* places;  // [kTokens][kLanes], from this lane's on

  __device__ Coming(const Line<kType>& of, int index)
      : line(of), places(reinterpret_cast<Place*>(shared_memory() + index * kBytes) + lane()) {}

  __device__ __forceinline__ Place* place(int token) const { return places + token % kTokens * kLanes; }
  __device__ __forceinline__ void ask(int token) const {
    constexpr int kNumber = kType == DType::float32 ? 4 : 2;
    const bool there = token < line.end;
    const char* from = static_cast<const char*>(line.data);
    copy_async_or_zero<sizeof(Place)>(place(token), there ? from + (line.first + token * line.stride) * kNumber : from,
                                      there);
  }
  __device__ __forceinline__ Quad take(int token) const { return let_go<kType, kOwn>(*place(token)); }
};

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

/// Whether a token's channels are brought to unit length, and over how many lanes.
enum class Heads { none, of_a_warp, of_some_lanes };

struct Sums {
  float first, second;
};
/// Two sums over the lanes of a head, the same in each. Half of the lanes add up the one and half the other, and tell
/// each other in the end: that is six exchanges, not ten.
template <Heads kHeads>
__device__ __forceinline__ Sums sum_head(const Sums& of, int head_lanes) {
  const int half = (kHeads == Heads::of_a_warp ? kLanes : head_lanes) / 2;
  if (half == 0) return of;
  const bool upper = (lane() & half) != 0;
  float own = (upper ? of.second : of.first) + from_lane(upper ? of.first : of.second, half);
#pragma unroll
  for (int apart = half / 2; apart > 0; apart /= 2) own += from_lane(own, apart);
  const float other = from_lane(own, half);
  return upper ? Sums{other, own} : Sums{own, other};
}

/// z = Σ_j w_j x_{t − 3 + j} of the token in place `at` of the ring.
__device__ __forceinline__ Quad convolve(const Taps& taps, const Quad (&ring)[kTaps], int at) {
  Quad z;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    z.x[i] = 0;
#pragma unroll
    for (int j = 0; j < kTaps; ++j) z.x[i] += taps.w[i][j] * ring[(at + 1 + j) % kTaps].x[i];
  }
  return z;
}

template <DType kType>
__device__ __forceinline__ Activated<float> silu_as(float z) {
  return activated(Activation::silu, z, sigmoid_as<kType>(z));
}

/// y = by · s over one head, and ds = by · dy − bend (s · dy) s.
struct Scale {
  float by, bend;
};
template <DType kType>
__device__ __forceinline__ Scale scale_of(const ShortConv& k, float squares) {
  // One formula for both norms, so that nothing is computed twice to choose from: ε is inside the root or behind it.
  const float eps = static_cast<float>(k.eps);
  const float inside = k.l2_norm == L2Norm::rsqrt ? eps : 0.0f, behind = k.l2_norm == L2Norm::rsqrt ? 0.0f : eps;
  const float length = sqrt_as<kType>(squares + inside), by = inverse_as<kType>(length + behind);
  return {by, length > 0 ? by * by * inverse_as<kType>(length) : 0.0f};
}

/// Input `back` tokens before a row's first one, from the state that came in.
__device__ __forceinline__ Quad read_state(const ShortConv& k, const Task& task, int back) {
  Quad numbers{};
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const std::int64_t at = (task.row * k.channels + task.channel + i) * kPast + kPast - back;
    if (task.mine) numbers.x[i] = gka::kernels::cuda::read<float>(k.initial_state, at);
  }
  return numbers;
}

template <DType kType, Heads kHeads>
__global__ void __launch_bounds__(kThreads, 2)
    convolve_runs(const __grid_constant__ ShortConv k, const View y, const Cut cut) {
  const std::int64_t at = block() * kWarps + warp();
  if (at >= cut.runs * cut.groups) return;
  const Task task = task_of(k, cut, at / cut.groups, at % cut.groups);
  const Taps taps(k, task);
  const Line<kType> from(k, k.x, task), to(k, y, task);
  const Coming<kType> coming(from, warp());
  const int count = static_cast<int>(task.end - task.begin);
  for (int t = 0; t < coming.kTokens; ++t) {
    coming.ask(t);
    if (t % kTaps == kPast) end_group();
  }
  Quad ring[kTaps];
#pragma unroll
  for (int j = 1; j < kTaps; ++j) {
    ring[j] = task.begin == 0 && given(k.initial_state) ? read_state(k, task, kTaps - j) : from.read(j - kTaps);
  }
  for (int t = 0; t < count; t += kTaps) {
    wait_for_groups_but<Coming<kType>::kGroups - 1>();
#pragma unroll
    for (int pair = 0; pair < kTaps; pair += 2) {
      Quad s[2];
      float squares[2] = {};
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const int a = pair + p;
        ring[a] = coming.take(t + a);
        coming.ask(t + a + coming.kTokens);
        s[p] = convolve(taps, ring, a);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
          s[p].x[i] = silu_as<kType>(s[p].x[i]).value;
          squares[p] += s[p].x[i] * s[p].x[i];
        }
      }
      if constexpr (kHeads != Heads::none) {
        const Sums sums = sum_head<kHeads>({squares[0], squares[1]}, cut.head_lanes);
        const float by[] = {scale_of<kType>(k, sums.first).by, scale_of<kType>(k, sums.second).by};
#pragma unroll
        for (int i = 0; i < 2 * kOwn; ++i) s[i / kOwn].x[i % kOwn] *= by[i / kOwn];
      }
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if (task.mine && t + pair + p < count) to.write(t + pair + p, s[p]);
      }
    }
    end_group();
  }
  wait_for_copies();
}

/// dz of the token in place `at` of the ring, from its dy.
template <DType kType, Heads kHeads>
__device__ __forceinline__ Quad differentiate(const ShortConv& k, const Cut& cut, const Taps& taps,
                                              const Quad (&ring)[kTaps], int at, const Quad& d_y) {
  const Quad z = convolve(taps, ring, at);
  Activated<float> s[kOwn];
  Quad d_z;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) s[i] = silu_as<kType>(z.x[i]);
  if constexpr (kHeads == Heads::none) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) d_z.x[i] = d_y.x[i] * s[i].slope;
  } else {
    float squares = 0, along = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      squares += s[i].value * s[i].value;
      along += s[i].value * d_y.x[i];
    }
    const Sums sums = sum_head<kHeads>({squares, along}, cut.head_lanes);
    const Scale scale = scale_of<kType>(k, sums.first);
    const float bend = scale.bend != 0 ? scale.bend * sums.second : 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) d_z.x[i] = (scale.by * d_y.x[i] - bend * s[i].value) * s[i].slope;
  }
  return d_z;
}

/// A block has kBackWarps runs of one group and leaves the sum of their taps' gradients, [kTaps][kGroup], in `kept`.
template <DType kType, Heads kHeads>
__global__ void __launch_bounds__(kBackBlock, 2)
    differentiate_runs(const __grid_constant__ ShortConv k, const __grid_constant__ ShortConvGradients g, const Cut cut,
                       float* kept) {
  const std::int64_t run = block() / cut.groups * kBackWarps + warp();
  Task task = task_of(k, cut, min(run, cut.runs - 1), block() % cut.groups);
  if (run >= cut.runs) task.end = task.begin;
  const Taps taps(k, task);
  const Line<kType> from(k, k.x, task), above(k, g.d_y, task), to(k, g.d_x, task);
  const int count = static_cast<int>(task.end - task.begin);
  const Coming<kType> coming(from, 2 * warp()), d_coming(above, 2 * warp() + 1);
  for (int t = 0; t < coming.kTokens; ++t) {
    coming.ask(t);
    d_coming.ask(t);
    if (t % kTaps == kPast) end_group();
  }
  float d_taps[kOwn][kTaps] = {};
  Quad ring[kTaps], slopes[kTaps] = {};  // x, and dz, of the same tokens
#pragma unroll
  for (int j = 1; j < kTaps; ++j) ring[j] = from.read(j - kTaps);
  // An input is complete kPast tokens later, so a run goes that far beyond its end.
  const int last = count > 0 ? count + kPast : 0;
  for (int t = 0; t < last; t += kTaps) {
    wait_for_groups_but<Coming<kType>::kGroups - 1>();
#pragma unroll
    for (int a = 0; a < kTaps; ++a) {
      ring[a] = coming.take(t + a);
      const Quad d_y = d_coming.take(t + a);
      coming.ask(t + a + coming.kTokens);
      d_coming.ask(t + a + coming.kTokens);
      slopes[a] = differentiate<kType, kHeads>(k, cut, taps, ring, a, d_y);
      Quad d_x;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        d_x.x[i] = 0;
        const float d_z = t + a < count ? slopes[a].x[i] : 0.0f;
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          d_x.x[i] += taps.w[i][kTaps - 1 - j] * slopes[(a + 1 + j) % kTaps].x[i];
          d_taps[i][j] += d_z * ring[(a + 1 + j) % kTaps].x[i];
        }
      }
      const int done = t + a - kPast;
      if (task.mine && done >= 0 && done < count) to.write(done, d_x);
    }
    end_group();
  }
  wait_for_copies();
  sync();                                                    // what was coming has been taken
  float* parts = reinterpret_cast<float*>(shared_memory());  // [kBackWarps][kTaps][kGroup]
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) parts[(warp() * kTaps + j) * kGroup + lane() * kOwn + i] = d_taps[i][j];
  }
  sync();
  for (int n = thread(); n < kTaps * kGroup; n += kBackBlock) {
    float total = 0;
    for (int w = 0; w < kBackWarps; ++w) total += parts[w * kTaps * kGroup + n];
    kept[block() * kTaps * kGroup + n] = total;
  }
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
  for (const View* view : views) {  // a run's numbers are counted in 32 bits
    if (view->token_stride > (std::int64_t{1} << 23)) return false;
  }
  return k.width == kTaps && k.activation == Activation::silu && k.channels % kOwn == 0 && k.cu_seqlens == nullptr &&
         !given(k.bias) && whole_heads && in_vectors<kOwn>(k.x.dtype, views);
}

template <Heads kHeads_>
struct HeadsAs {
  static constexpr Heads kHeads = kHeads_;
};

/// body(Storage, HeadsAs): the code for a type and for the heads.
template <typename Body>
void with_heads(const ShortConv& k, const Cut& cut, Body&& body) {
  with_vectors_of(k.x.dtype, [&](auto type) {
    if (cut.head_lanes == 0) return body(type, HeadsAs<Heads::none>{});
    if (cut.head_lanes == kLanes) return body(type, HeadsAs<Heads::of_a_warp>{});
    body(type, HeadsAs<Heads::of_some_lanes>{});
  });
}

inline void forward(const ShortConv& k, const View& y, const Device& device) {
  const CurrentDevice current(device.index);
  const Cut cut = forward_cut(k);
  with_heads(k, cut, [&]<typename Type, typename As>(Type, As) {
    launch_blocks_of<kThreads>(convolve_runs<Type::type, As::kHeads>, (cut.runs * cut.groups + kWarps - 1) / kWarps,
                               kWarps * Coming<Type::type>::kBytes, device.stream, k, y, cut);
  });
}

inline void backward(const ShortConv& k, const ShortConvGradients& g, const Device& device) {
  const CurrentDevice current(device.index);
  const Cut cut = cut_of(k);
  const std::int64_t blocks_per_group = (cut.runs + kBackWarps - 1) / kBackWarps,
                     blocks = blocks_per_group * cut.groups;
  constexpr int kKept = kTaps * kGroup * static_cast<int>(sizeof(float));
  float* kept = static_cast<float*>(device.allocate(static_cast<std::size_t>(blocks * kKept)));
  with_heads(k, cut, [&]<typename Type, typename As>(Type, As) {
    constexpr int kShared = kBackWarps * max(2 * Coming<Type::type>::kBytes, kKept);
    launch_blocks_of<kBackBlock>(differentiate_runs<Type::type, As::kHeads>, blocks, kShared, device.stream, k, g, cut,
                                 kept);
  });
  if (!given(g.d_weight)) return;
  launch(sum_taps, (k.channels * kTaps + kLanes - 1) / kLanes, kThreads * 8, device.stream, k, g.d_weight, cut,
         static_cast<const float*>(kept), blocks_per_group);
}

// ---- One token of several convolutions ---------------------------------------------------------------------------

inline constexpr int kMostSteps = 3;
inline constexpr int kStepWarps = kLanes == 1 ? 1 : 4, kStepBlock = kStepWarps * kLanes;

struct Steps {
  ShortConvStep of[kMostSteps];
  int groups[kMostSteps], head_lanes[kMostSteps];
  int count = 0;
};

/// Sixteen taps of four channels, from float32 or the inputs' own type.
template <DType kType>
__device__ __forceinline__ void read_taps(const ShortConv& k, std::int64_t channel, Quad (&taps)[kOwn]) {
  if (k.weight.dtype == DType::float32) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) taps[i] = read_vector<DType::float32, kTaps>(k.weight.data, (channel + i) * kTaps);
  } else {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) taps[i] = read_vector<kType, kTaps>(k.weight.data, (channel + i) * kTaps);
  }
}

/// y of four neighbouring channels of a lane, and their place in the state shifted by the new input. What the lane
/// needs is under way before the first of it is looked at: the three inputs that each of its channels keeps are twelve
/// neighbours. All lanes of a head take part; one that has no channels (`mine`) reads and writes nothing.
template <DType kType>
__device__ __forceinline__ Quad convolve_token(const ShortConvStep& step, std::int64_t b, std::int64_t slot,
                                               std::int64_t channel, bool mine, int head_lanes) {
  const ShortConv& k = step.conv;
  const std::int64_t past = (slot * k.channels + channel) * kPast;
  Quad now{}, kept[kPast] = {}, taps[kOwn] = {};
  if (mine) {
    Held<kType, kOwn> held[kPast];
#pragma unroll
    for (int j = 0; j < kPast; ++j) held[j] = hold_vector<kType, kOwn>(step.state.data, past + j * kOwn);
    const Held<kType, kOwn> newest = hold_vector<kType, kOwn>(k.x.data, offset(k.x, b, 0, 0) + channel);
    read_taps<kType>(k, channel, taps);
    now = let_go<kType, kOwn>(newest);
#pragma unroll
    for (int j = 0; j < kPast; ++j) kept[j] = let_go<kType, kOwn>(held[j]);
  }
  Quad s;
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    float z = 0;
#pragma unroll
    for (int j = 0; j < kPast; ++j) z += taps[i].x[j] * kept[(i * kPast + j) / kOwn].x[(i * kPast + j) % kOwn];
    z += taps[i].x[kPast] * now.x[i];
    s.x[i] = silu_as<kType>(z).value;
    squares += s.x[i] * s.x[i];
  }
  if (head_lanes > 0) {
    for (int apart = head_lanes / 2; apart > 0; apart /= 2) squares += from_lane(squares, apart);
    const float by = scale_of<kType>(k, squares).by;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) s.x[i] *= by;
  }
  if (!mine) return s;
  Quad next[kPast];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int j = 0; j < kPast; ++j) {
      const int from = i * kPast + j + 1;
      next[(from - 1) / kOwn].x[(from - 1) % kOwn] = j + 1 < kPast ? kept[from / kOwn].x[from % kOwn] : now.x[i];
    }
  }
#pragma unroll
  for (int j = 0; j < kPast; ++j) write_vector<kType, kOwn>(step.state.data, past + j * kOwn, next[j]);
  return s;
}

/// A warp per sequence and group of channels.
template <DType kType>
__global__ void __launch_bounds__(kStepBlock) step_quads(const __grid_constant__ Steps steps) {
  wait_for_earlier();
  int task = static_cast<int>(block()) * kStepWarps + warp(), which = 0;
  while (which < steps.count && task >= static_cast<int>(steps.of[which].conv.batch) * steps.groups[which]) {
    task -= static_cast<int>(steps.of[which].conv.batch) * steps.groups[which];
    ++which;
  }
  if (which == steps.count) return;
  const ShortConvStep& step = steps.of[which];
  const int b = task / steps.groups[which];
  const std::int64_t slot = step.state_indices != nullptr ? step.state_indices[b] : b;
  const std::int64_t channel = task % steps.groups[which] * kGroup + lane() * kOwn;
  const bool mine = channel < step.conv.channels;
  const Quad s = convolve_token<kType>(step, b, slot, channel, mine, steps.head_lanes[which]);
  if (mine) write_vector<kType, kOwn>(step.y.data, offset(step.y, b, 0, 0) + channel, s);
}

inline bool takes(const ShortConvStep& step) {
  ShortConv k = step.conv;
  k.cu_seqlens = nullptr;
  k.initial_state = {};
  const auto aligned = [](const View& view) { return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0; };
  const bool taps = (k.weight.dtype == DType::float32 || k.weight.dtype == k.x.dtype) && aligned(k.weight);
  return taps && step.state.dtype == k.x.dtype && aligned(step.state) &&
         k.batch * k.channels < (std::int64_t{1} << 30) && takes(k, {&k.x, &step.y});
}

/// Up to kMostSteps that `takes` takes, of one type.
inline void step(std::span<const ShortConvStep> several, const Device& device) {
  const CurrentDevice current(device.index);
  Steps steps;
  std::int64_t tasks = 0;
  for (const ShortConvStep& one : several) {
    const Cut cut = cut_of(one.conv);
    steps.of[steps.count] = one;
    steps.groups[steps.count] = static_cast<int>(cut.groups);
    steps.head_lanes[steps.count++] = cut.head_lanes;
    tasks += one.conv.batch * cut.groups;
  }
  with_vectors_of(several.front().conv.x.dtype, [&](auto type) {
    launch_early<kStepBlock>(step_quads<decltype(type)::type>, (tasks + kStepWarps - 1) / kStepWarps, 0, device.index,
                             device.stream, steps);
  });
}

}  // namespace gka::kernels::cuda::vectors
