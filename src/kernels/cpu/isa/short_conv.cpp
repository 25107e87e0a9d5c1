// The short convolution by runs of tokens and blocks of channels, channels as lanes. A run walks its tokens once and
// keeps the last W inputs of its block in the first-level cache; runs are cut the same way for every thread count, and
// the gradients of weight and bias, which sum over tokens, are summed run by run and then over the runs in their order.
//
// Runs know nothing of sequences: one may hold the end of one sequence and the start of the next. Backward, a token's
// input gradient is complete W − 1 tokens later, so a run reads that many tokens beyond its end.
#include <memory>
#include <vector>

#include "kernels/cpu/backend.h"
#include "kernels/cpu/isa/activation.h"
#include "kernels/cpu/isa/chunk.h"
#include "kernels/cpu/isa/entry.h"
#include "kernels/cpu/plan.h"

namespace gka::kernels::cpu::GKA_ISA {
namespace {

inline constexpr std::int64_t kRun = 256;            // tokens
inline constexpr std::int64_t kBlockChannels = 256;  // at least; whole heads
inline constexpr int kMaxWidth = static_cast<int>(kMaxConvWidth);

/// Some heads next to each other. In the workspace each head starts at a whole vector.
struct Block {
  std::int64_t first = 0;  // channel
  int heads = 0;
  int dim = 0;  // channels of a head; all of the block's where heads do not matter
  int stride = 0;

  int size() const { return heads * stride; }
};

template <typename T>
struct Cut {
  std::int64_t blocks = 0, runs_per_row = 0, runs = 0;
  std::int64_t head = 0, heads_per_block = 0, channels = 0;
  int largest = 0;  // of Block::size()

  explicit Cut(const ShortConv& k) : channels(k.channels) {
    const bool by_head = k.l2_norm != L2Norm::none;
    head = by_head ? k.head_dim : std::min(channels, kBlockChannels);
    heads_per_block = by_head ? (kBlockChannels + head - 1) / head : 1;
    blocks = head > 0 ? (channels + head * heads_per_block - 1) / (head * heads_per_block) : 0;
    runs_per_row = (k.tokens + kRun - 1) / kRun;
    runs = k.batch * runs_per_row;
    largest = static_cast<int>(heads_per_block) * padded<T>(head);
  }

  Block block(std::int64_t i) const {
    const std::int64_t first = i * head * heads_per_block, left = channels - first;
    const std::int64_t dim = std::min(head, left);
    return {.first = first,
            .heads = static_cast<int>(std::min(heads_per_block, left / dim)),
            .dim = static_cast<int>(dim),
            .stride = padded<T>(dim)};
  }
};

/// A row of a block's channels from memory, element `at` being the block's first channel.
template <typename T>
void read_block(const View& view, std::int64_t at, const Block& block, T* to) {
  for (int h = 0; h < block.heads; ++h) read_row(view, at + h * block.dim, block.dim, to + h * block.stride);
}
template <typename T>
void write_block(const View& view, std::int64_t at, const Block& block, const T* from) {
  for (int h = 0; h < block.heads; ++h) write_row(view, at + h * block.dim, block.dim, from + h * block.stride);
}

/// The array itself where its numbers are T, which is how states and convolutions' weights mostly are.
template <typename T>
T* numbers_of(const View& view) {
  return view.dtype == (sizeof(T) == 8 ? DType::float64 : DType::float32) ? static_cast<T*>(view.data) : nullptr;
}

/// Column j of a [channels, columns] array that starts at element `at`.
template <typename T>
void read_column(const View& view, std::int64_t at, std::int64_t columns, std::int64_t j, const Block& block, T* to) {
  with_type(view.dtype, [&](auto type) {
    const auto* from = static_cast<const decltype(type)*>(view.data) + at + block.first * columns + j;
    for (int h = 0; h < block.heads; ++h) {
      for (int i = 0; i < block.dim; ++i) to[h * block.stride + i] = convert<T>(from[(h * block.dim + i) * columns]);
    }
  });
}
/// Columns 0 … kColumns − 1, which are all there are, in one pass.
template <int kColumns, typename T>
void read_columns(const T* from, const Block& block, T* const* to) {
  T* __restrict__ rows[kColumns];
  for (int h = 0; h < block.heads; ++h) {
    for (int j = 0; j < kColumns; ++j) rows[j] = to[j] + h * block.stride;
    const T* head = from + static_cast<std::int64_t>(h) * block.dim * kColumns;
    for (int i = 0; i < block.dim; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kColumns; ++j) rows[j][i] = head[i * kColumns + j];
    }
  }
}
template <int kColumns, typename T>
void write_columns(T* to, const Block& block, T* const* from) {
  const T* rows[kColumns];
  for (int h = 0; h < block.heads; ++h) {
    for (int j = 0; j < kColumns; ++j) rows[j] = from[j] + h * block.stride;
    T* __restrict__ head = to + static_cast<std::int64_t>(h) * block.dim * kColumns;
    for (int i = 0; i < block.dim; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kColumns; ++j) head[i * kColumns + j] = rows[j][i];
    }
  }
}

template <typename T, typename From>
void write_column(const View& view, std::int64_t at, std::int64_t columns, std::int64_t j, const Block& block,
                  const From* from) {
  with_type(view.dtype, [&](auto type) {
    using Stored = decltype(type);
    auto* to = static_cast<Stored*>(view.data) + at + block.first * columns + j;
    for (int h = 0; h < block.heads; ++h) {
      for (int i = 0; i < block.dim; ++i) {
        to[(h * block.dim + i) * columns] = convert<Stored>(from[h * block.stride + i]);
      }
    }
  });
}

/// W rows that move up by one, the oldest making room for the newest.
template <typename T>
struct Ring {
  Buffer<T> storage;
  T* row[kMaxWidth] = {};
  int width = 0;

  void allocate(int rows, int size) {
    width = rows;
    storage.resize(static_cast<std::int64_t>(rows) * size);
    std::fill_n(storage.get(), static_cast<std::int64_t>(rows) * size, T{0});  // padding stays 0
    for (int i = 0; i < rows; ++i) row[i] = storage + static_cast<std::int64_t>(i) * size;
  }
  void clear(int size) {
    for (int i = 0; i < width; ++i) std::fill_n(row[i], size, T{0});
  }
  T* newest() { return row[width - 1]; }
  void advance() { std::rotate(row, row + 1, row + width); }
};

template <typename T>
struct Workspace {
  Ring<T> inputs;            // row j is input t − W + 1 + j
  Ring<T> d_inputs;          // the same positions
  Ring<T> weight, d_weight;  // tap by tap, does not move
  Buffer<T> bias, d_bias, s, slope, d_y, row;
  std::int64_t loaded = -1;  // the first channel of the block whose weights these are

  Workspace(const ShortConv& k, const Cut<T>& cut, bool backward) {
    const int width = static_cast<int>(k.width);
    inputs.allocate(width, cut.largest);
    weight.allocate(width, cut.largest);
    for (auto* buffer : {&bias, &s}) zeros(*buffer, cut.largest);
    if (!backward) return;
    d_inputs.allocate(width, cut.largest);
    d_weight.allocate(width, cut.largest);
    for (auto* buffer : {&d_bias, &slope, &d_y, &row}) zeros(*buffer, cut.largest);
  }

  /// Once for all tasks of a block that follow each other.
  void load_weights(const ShortConv& k, const Block& block) {
    if (loaded == block.first) return;
    loaded = block.first;
    weight.clear(block.size());
    inputs.clear(block.size());
    std::fill_n(bias.get(), block.size(), T{0});
    if (const auto* taps = k.width == 4 ? numbers_of<T>(k.weight) : nullptr; taps != nullptr) {
      read_columns<4>(taps + block.first * 4, block, weight.row);
    } else {
      for (int j = 0; j < weight.width; ++j) read_column<T>(k.weight, 0, k.width, j, block, weight.row[j]);
    }
    if (k.bias) read_column<T>(k.bias, 0, 1, 0, block, bias.get());
  }

 private:
  static void zeros(Buffer<T>& buffer, int n) {
    buffer.resize(n);
    std::fill_n(buffer.get(), n, T{0});
  }
};

/// One sequence, or as much of it as a run sees.
struct Line {
  std::int64_t n = 0;
  std::int64_t row = 0;  // of the batch
  std::int64_t begin = 0, end = 0;
};

/// Calls body(line, from) for each sequence with tokens in [from, to) of a row, in order.
template <typename Body>
void for_each_line(const ShortConv& k, std::int64_t row, std::int64_t from, std::int64_t to, Body&& body) {
  if (k.cu_seqlens == nullptr) return body(Line{.n = row, .row = row, .begin = 0, .end = k.tokens}, from);
  const auto* after = std::upper_bound(k.cu_seqlens, k.cu_seqlens + k.sequences + 1, from);
  for (std::int64_t n = after - k.cu_seqlens - 1; n < k.sequences && k.cu_seqlens[n] < to; ++n) {
    const Line line{.n = n, .row = 0, .begin = k.cu_seqlens[n], .end = k.cu_seqlens[n + 1]};
    if (line.begin < line.end) body(line, std::max(from, line.begin));
  }
}

/// Input `position` of a line: a token, or what came before the first one.
template <typename T>
void read_input(const ShortConv& k, const Line& line, std::int64_t position, const Block& block, T* to) {
  const std::int64_t before = k.width - 1;
  if (position >= line.begin) {
    read_block(k.x, offset(k.x, line.row, position, 0) + block.first, block, to);
  } else if (k.initial_state) {
    read_column<T>(k.initial_state, line.n * k.channels * before, before, before + position - line.begin, block, to);
  } else {
    std::fill_n(to, block.size(), T{0});
  }
}

/// The inputs before `token`, so that the next advance makes room for its own.
template <typename T>
void read_history(const ShortConv& k, const Line& line, std::int64_t token, const Block& block, Ring<T>& inputs) {
  for (int j = 1; j < inputs.width; ++j) read_input(k, line, token - inputs.width + j, block, inputs.row[j]);
}

/// A workspace's rows at one token. A copy on the stack: the compiler has to assume that a store into a row changes
/// whatever else lies in memory, the pointers of the workspace too. kWidth 0: any width.
template <typename T, int kWidth>
struct Rows {
  static constexpr int kMost = kWidth > 0 ? kWidth : kMaxWidth;

  int width;
  const T *weight[kMost], *input[kMost];
  const T *bias, *d_y;
  T *s, *slope;
  T *d_input[kMost], *d_weight[kMost], *d_bias;

  explicit Rows(const Workspace<T>& w)
      : width(kWidth > 0 ? kWidth : w.inputs.width),
        bias(w.bias),
        d_y(w.d_y),
        s(w.s),
        slope(w.slope),
        d_bias(w.d_bias) {
    for (int j = 0; j < width; ++j) {
      weight[j] = w.weight.row[j];
      input[j] = w.inputs.row[j];
      d_input[j] = w.d_inputs.row[j];
      d_weight[j] = w.d_weight.row[j];
    }
  }

  [[gnu::always_inline]] Vec<T> convolve(int i) const {
    Vec<T> z = load(bias + i);
#pragma GCC unroll 4
    for (int j = 0; j < width; ++j) z += load(weight[j] + i) * load(input[j] + i);
    return z;
  }
};

template <typename T>
[[gnu::always_inline]] inline void add(T* to, Vec<T> value) {
  store(to, load(to) + value);
}

/// y = by · s over one head, and ds = by · dy − bend (s · dy) s.
template <typename T>
struct Norm {
  T by = 1;
  T bend = 0;
};
template <typename T>
Norm<T> norm_of(const ShortConv& k, T squares) {
  if (k.l2_norm == L2Norm::none) return {};
  if (k.l2_norm == L2Norm::rsqrt) {
    const T by = T(1) / std::sqrt(squares + static_cast<T>(k.eps));
    return {by, by * by * by};
  }
  const T length = std::sqrt(squares), by = T(1) / (length + static_cast<T>(k.eps));
  return {by, length > 0 ? by * by / length : T{0}};
}

/// y of the newest input, into w.s.
template <typename T, int kWidth>
void forward_token(const ShortConv& k, const Block& block, const Workspace<T>& w) {
  const Rows<T, kWidth> r(w);
  const Activation activation = k.activation;
  for (int start = 0; start < block.size(); start += block.stride) {
    Vec<T> squares = {};
    for (int i = start; i < start + block.stride; i += kLanes<T>) {
      const Vec<T> s = activated<T>(activation, r.convolve(i));
      squares += s * s;
      store(r.s + i, s);
    }
    if (k.l2_norm == L2Norm::none) continue;
    const T by = norm_of(k, sum_lanes<T>(squares)).by;
    for (int i = start; i < start + block.stride; i += kLanes<T>) store(r.s + i, load(r.s + i) * by);
  }
}

/// From w.d_y of the newest input: its part of the inputs' gradients, and, of tokens that are the run's own, of the
/// weights'.
template <typename T, int kWidth>
void backward_token(const ShortConv& k, const Block& block, bool own, const Workspace<T>& w) {
  const Rows<T, kWidth> r(w);
  const Activation activation = k.activation;
  const bool normalises = k.l2_norm != L2Norm::none;
  for (int start = 0; start < block.size(); start += block.stride) {
    Vec<T> squares = {}, along = {};
    for (int i = start; i < start + block.stride; i += kLanes<T>) {
      const Activated<T> a = activate<T>(activation, r.convolve(i));
      squares += a.value * a.value;
      along += a.value * load(r.d_y + i);
      store(r.s + i, a.value);
      store(r.slope + i, a.slope);
    }
    Norm<T> norm;
    if (normalises) norm = norm_of(k, sum_lanes<T>(squares));
    const T bend = norm.bend != 0 ? norm.bend * sum_lanes<T>(along) : T{0};
    for (int i = start; i < start + block.stride; i += kLanes<T>) {
      Vec<T> d_s = load(r.d_y + i) * norm.by;
      if (normalises) d_s -= bend * load(r.s + i);
      const Vec<T> d_z = d_s * load(r.slope + i);
#pragma GCC unroll 4
      for (int j = 0; j < r.width; ++j) add<T>(r.d_input[j] + i, load(r.weight[j] + i) * d_z);
      if (!own) continue;
      add<T>(r.d_bias + i, d_z);
#pragma GCC unroll 4
      for (int j = 0; j < r.width; ++j) add<T>(r.d_weight[j] + i, load(r.input[j] + i) * d_z);
    }
  }
}

struct Run {
  std::int64_t row = 0, begin = 0, end = 0;
};

Run run_of(const ShortConv& k, std::int64_t runs_per_row, std::int64_t i) {
  const std::int64_t begin = i % runs_per_row * kRun;
  return {.row = i / runs_per_row, .begin = begin, .end = std::min(begin + kRun, k.tokens)};
}

template <typename T, int kWidth>
void forward_run(const ShortConv& k, const View& y, const Run& run, const Block& block, Workspace<T>& w) {
  w.load_weights(k, block);
  for_each_line(k, run.row, run.begin, run.end, [&](const Line& line, std::int64_t from) {
    read_history(k, line, from, block, w.inputs);
    for (std::int64_t t = from; t < std::min(line.end, run.end); ++t) {
      w.inputs.advance();
      read_input(k, line, t, block, w.inputs.newest());
      forward_token<T, kWidth>(k, block, w);
      write_block(y, offset(y, run.row, t, 0) + block.first, block, w.s.get());
    }
  });
}

/// The gradient of input `position`, which nothing will be added to any more: by token or into the initial state. Those
/// of tokens outside the run are another run's.
template <typename T>
void finish_input(const ShortConv& k, const ShortConvGradients& g, const Line& line, const Run& run, const Block& block,
                  std::int64_t position, T* d_input, T* scratch) {
  const std::int64_t before = k.width - 1, state = line.n * k.channels * before;
  const bool is_token = position >= line.begin;
  const std::int64_t owner = is_token ? position : line.begin;  // the first token's run has the initial state's
  if (owner < run.begin || owner >= run.end) return;
  if (g.d_final_state && position >= line.end - before) {
    read_column<T>(g.d_final_state, state, before, position - (line.end - before), block, scratch);
    for (int i = 0; i < block.size(); ++i) d_input[i] += scratch[i];
  }
  if (is_token) {
    if (g.d_x) write_block(g.d_x, offset(g.d_x, line.row, position, 0) + block.first, block, d_input);
  } else if (g.d_initial_state) {
    write_column<T>(g.d_initial_state, state, before, before + position - line.begin, block, d_input);
  }
}

template <typename T, int kWidth>
void backward_run(const ShortConv& k, const ShortConvGradients& g, const Run& run, const Block& block,
                  Workspace<T>& w) {
  const std::int64_t before = k.width - 1;
  w.load_weights(k, block);
  w.d_weight.clear(block.size());
  std::fill_n(w.d_bias.get(), block.size(), T{0});
  std::fill_n(w.row.get(), block.size(), T{0});
  std::fill_n(w.d_y.get(), block.size(), T{0});
  for_each_line(k, run.row, run.begin, run.end, [&](const Line& line, std::int64_t from) {
    const auto finish_oldest = [&](std::int64_t position) {
      finish_input(k, g, line, run, block, position, w.d_inputs.row[0], w.row.get());
      std::fill_n(w.d_inputs.row[0], block.size(), T{0});
      w.d_inputs.advance();
    };
    read_history(k, line, from, block, w.inputs);
    w.d_inputs.clear(block.size());
    const std::int64_t to = std::min(line.end, run.end + before);
    for (std::int64_t t = from; t < to; ++t) {
      w.inputs.advance();
      read_input(k, line, t, block, w.inputs.newest());
      read_block(g.d_y, offset(g.d_y, run.row, t, 0) + block.first, block, w.d_y.get());
      backward_token<T, kWidth>(k, block, t < run.end, w);
      finish_oldest(t - before);
    }
    if (to < line.end) return;
    for (std::int64_t position = to - before; position < to; ++position) finish_oldest(position);
  });
}

/// Sums of one run, before they are summed over all: [width + 1] rows, the bias's last.
template <typename T>
void keep_sums(const Workspace<T>& w, const Block& block, T* to, int largest) {
  for (int j = 0; j < w.d_weight.width; ++j) std::copy_n(w.d_weight.row[j], block.size(), to + j * largest);
  std::copy_n(w.d_bias.get(), block.size(), to + w.d_weight.width * largest);
}

template <typename T>
void sum_runs(const ShortConv& k, const ShortConvGradients& g, const Cut<T>& cut, const T* sums, std::int64_t i) {
  const Block block = cut.block(i);
  std::vector<double> total(static_cast<std::size_t>(block.size()));
  for (std::int64_t j = 0; j <= k.width; ++j) {
    std::fill(total.begin(), total.end(), 0.0);
    for (std::int64_t run = 0; run < cut.runs; ++run) {
      const T* part = sums + ((i * cut.runs + run) * (k.width + 1) + j) * cut.largest;
      for (std::size_t c = 0; c < total.size(); ++c) total[c] += part[c];
    }
    if (j < k.width && g.d_weight) write_column<T>(g.d_weight, 0, k.width, j, block, total.data());
    if (j == k.width && g.d_bias) write_column<T>(g.d_bias, 0, 1, 0, block, total.data());
  }
}

/// The final states, from the inputs alone.
template <typename T>
void write_final_states(const ShortConv& k, const View& final_state, const Cut<T>& cut, const Executor& executor) {
  const std::int64_t before = k.width - 1;
  if (!final_state || before == 0) return;
  const auto workspace = [&] { return std::make_unique<Buffer<T>>(cut.largest); };
  parallel_tasks(executor, k.sequences * cut.blocks, workspace, [&](std::int64_t task, Buffer<T>& row) {
    const std::int64_t n = task / cut.blocks;
    const Block block = cut.block(task % cut.blocks);
    const Sequence s = sequence(k, n);
    const Line line{.n = n, .row = s.batch, .begin = s.begin, .end = s.begin + s.length};
    for (std::int64_t j = 0; j < before; ++j) {
      read_input(k, line, line.end - before + j, block, row.get());
      write_column<T>(final_state, n * k.channels * before, before, j, block, row.get());
    }
  });
}

/// An empty sequence hands its state through, and the gradient back.
template <typename T>
void hand_back_states(const ShortConv& k, const ShortConvGradients& g, const Cut<T>& cut) {
  const std::int64_t before = k.width - 1;
  if (!g.d_initial_state || before == 0) return;
  Buffer<T> row(cut.largest);
  for (std::int64_t n = 0; n < k.sequences; ++n) {
    if (sequence(k, n).length > 0) continue;
    for (std::int64_t i = 0; i < cut.blocks * before; ++i) {
      const Block block = cut.block(i / before);
      const std::int64_t state = n * k.channels * before, j = i % before;
      std::fill_n(row.get(), block.size(), T{0});
      if (g.d_final_state) read_column<T>(g.d_final_state, state, before, j, block, row.get());
      write_column<T>(g.d_initial_state, state, before, j, block, row.get());
    }
  }
}

template <typename T, int kWidth>
void forward_as(const ShortConv& k, const ShortConvOutputs& out, const Executor& executor) {
  const Cut<T> cut(k);
  parallel_tasks(
      executor, cut.runs * cut.blocks, [&] { return std::make_unique<Workspace<T>>(k, cut, false); },
      [&](std::int64_t task, Workspace<T>& w) {
        const Run run = run_of(k, cut.runs_per_row, task % cut.runs);
        forward_run<T, kWidth>(k, out.y, run, cut.block(task / cut.runs), w);
      });
  write_final_states(k, out.final_state, cut, executor);
}

template <typename T, int kWidth>
void backward_as(const ShortConv& k, const ShortConvGradients& g, const Executor& executor) {
  const Cut<T> cut(k);
  const std::int64_t per_task = (k.width + 1) * cut.largest;
  Buffer<T> sums(cut.runs * cut.blocks * per_task);
  parallel_tasks(
      executor, cut.runs * cut.blocks, [&] { return std::make_unique<Workspace<T>>(k, cut, true); },
      [&](std::int64_t task, Workspace<T>& w) {
        const Block block = cut.block(task / cut.runs);
        backward_run<T, kWidth>(k, g, run_of(k, cut.runs_per_row, task % cut.runs), block, w);
        keep_sums(w, block, sums + task * per_task, cut.largest);
      });
  const auto nothing = [] { return std::make_unique<int>(0); };
  parallel_tasks(executor, cut.blocks, nothing, [&](std::int64_t i, int&) { sum_runs<T>(k, g, cut, sums, i); });
  hand_back_states(k, g, cut);
}

template <typename T, int kWidth>
void step_as(const ShortConvStep& step, const Executor& executor) {
  const Cut<T> cut(step.conv);
  const auto workspace = [&] { return std::make_unique<Workspace<T>>(step.conv, cut, false); };
  ShortConv k = step.conv;
  k.initial_state = step.state;
  parallel_tasks(executor, k.batch * cut.blocks, workspace, [&](std::int64_t task, Workspace<T>& w) {
    const std::int64_t b = task % k.batch, slot = step.state_indices != nullptr ? step.state_indices[b] : b;
    const Block block = cut.block(task / k.batch);
    w.load_weights(k, block);
    constexpr int kBefore = kWidth > 0 ? kWidth - 1 : 1;
    T* const state = kWidth > 0 ? numbers_of<T>(step.state) : nullptr;
    T* const inputs = state != nullptr ? state + (slot * k.channels + block.first) * kBefore : nullptr;
    if (inputs != nullptr) {
      read_columns<kBefore>(inputs, block, w.inputs.row + 1);
    } else {
      read_history(k, {.n = slot, .row = b, .begin = 0, .end = 1}, 0, block, w.inputs);
    }
    w.inputs.advance();
    read_block(k.x, offset(k.x, b, 0, 0) + block.first, block, w.inputs.newest());
    forward_token<T, kWidth>(k, block, w);
    write_block(step.y, offset(step.y, b, 0, 0) + block.first, block, w.s.get());
    if (inputs != nullptr) return write_columns<kBefore>(inputs, block, w.inputs.row + 1);
    for (std::int64_t j = 1; j < k.width; ++j) {
      write_column<T>(step.state, slot * k.channels * (k.width - 1), k.width - 1, j - 1, block, w.inputs.row[j]);
    }
  });
}

/// body<T, kWidth>(): the width that published blocks have, or any.
template <typename Body>
void by_type(const ShortConv& k, Body&& body) {
  const auto by_width = [&]<typename T>(T zero) {
    if (k.width == 4) return body(zero, std::integral_constant<int, 4>{});
    body(zero, std::integral_constant<int, 0>{});
  };
  if (k.x.dtype == DType::float64) return by_width(double{});
  by_width(float{});
}

}  // namespace

void short_conv(const ShortConv& conv, const ShortConvOutputs& outputs, const Executor& executor) {
  by_type(conv, [&]<typename T, int kWidth>(T, std::integral_constant<int, kWidth>) {
    forward_as<T, kWidth>(conv, outputs, for_elements(executor, conv.batch * conv.tokens * conv.channels));
  });
}

void short_conv_backward(const ShortConv& conv, const ShortConvGradients& gradients, const Executor& executor) {
  by_type(conv, [&]<typename T, int kWidth>(T, std::integral_constant<int, kWidth>) {
    backward_as<T, kWidth>(conv, gradients, for_elements(executor, conv.batch * conv.tokens * conv.channels));
  });
}

void short_conv_step(const ShortConvStep& step, const Executor& executor) {
  by_type(step.conv, [&]<typename T, int kWidth>(T, std::integral_constant<int, kWidth>) {
    step_as<T, kWidth>(step, for_elements(executor, step.conv.batch * step.conv.channels * step.conv.width));
  });
}

}  // namespace gka::kernels::cpu::GKA_ISA
