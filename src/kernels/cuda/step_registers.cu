// One token for many sequences, a block of threads per (sequence, head): Chebyshev with an adaptive ridge, D and V of
// 64 or 128, float32 states. The work is to read and write H and U once, 0.54 GB for 256 sequences of 8 heads; the 30
// products with H are hidden behind that if they never touch memory.
//
// So H_t lives in registers, 64 numbers per thread for D = 128 and 256 threads, from the update to the last iteration.
// A warp has D/8 rows; lane l has rows l/8, l/8 + 4, … of them and every eighth group of four columns. One product is
// then D/32 vectors of x from shared memory, D²/256 multiply-adds, and a sum over eight lanes in which each step halves
// the rows a lane still carries: at its end a lane has one row, and that row's x, which it updates and puts up for the
// others. One barrier per iteration. U comes in by asynchronous copies meanwhile, each thread's own part, so nobody
// waits for others; two blocks fit on a multiprocessor, and one's loads run under the other's iterations.
//
// A crowd of heads has a shape of its own (in a GKA block on trial): half as many threads with twice as many rows each,
// three blocks to a multiprocessor that begin one after the other, and only the upper half of H read.
//
// What a token brings and what becomes of the answer stands apart (Alone, InBlock): numbers from memory, or all that a
// GKA block does between its projections, by the same device functions as the kernels of its parts.
#include "kernels/cuda/step_registers.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "kernels/cuda/gated_rms_norm_vectors.cuh"
#include "kernels/cuda/gates.cuh"
#include "kernels/cuda/hopper/schedule.h"
#include "kernels/cuda/short_conv_vectors.cuh"
#include "kernels/cuda/step_block.h"
#include "kernels/cuda/thread_block.cuh"
#include "kernels/cuda/trial.h"
#include "kernels/schedule.h"
#include "kernels/system_scale.h"

namespace gka::kernels::cuda {
namespace {

/// A block takes a head, and a multiprocessor has kResident of them at once. `meet` is a barrier of those who have H.
struct Few {
  static constexpr int kBlock = 256, kBlockWarps = kBlock / kLanes, kResident = 2;
  static constexpr bool kNeighbours = false;  // the rows of a lane
  using Omega = double;                       // behind the table's end
  __device__ static void meet() { sync(); }
};
/// Where a multiprocessor has one head at most and nothing hides what it waits for: kBlock threads have H and
/// iterate, as many others bring the token and have U in registers, write it while those iterate, and read it at once
/// when z is there. Whatever can be asked for before the kernels ahead have ended is.
struct Lone {
  static constexpr int kBlock = 128, kBlockWarps = kBlock / kLanes, kThreads = 2 * kBlock;
  static constexpr bool kNeighbours = false;
  using Omega = double;
  __device__ static void meet() { sync_some<kBlock>(1); }

  static bool suits(std::int64_t heads, int multiprocessors) { return heads <= multiprocessors; }
};
/// In a GKA block on trial. With fewer threads an iteration is quicker, for they read x from shared memory less often,
/// and three blocks fit; of H only the upper half is read.
struct Crowd {
  static constexpr int kBlock = 128, kBlockWarps = kBlock / kLanes, kResident = 3;
  static constexpr bool kNeighbours = true;
  using Omega = float;  // a division of doubles takes registers that H needs
  __device__ static void meet() { sync(); }
  /// Cycles between the starts of the blocks of a multiprocessor, about 4 µs: what one needs to bring its state. From
  /// then on one's loads run under another's iterations; begun together they would all load, then all iterate.
  static constexpr int kApart = 7000;
  /// A multiprocessor's shared memory, less the kilobyte that each block costs, in three parts.
  static constexpr int kSharedBytes = (228 / kResident - 1) * 1024;

  /// It pays where every multiprocessor has blocks enough to take turns.
  static bool suits(std::int64_t heads, int multiprocessors) { return heads >= kResident * multiprocessors; }
};

inline constexpr int kTable = 64;
/// The most steps of a schedule for spectra that reach less far than 1.
inline constexpr int kMostFewer = hopper::kShortest + 2 * (hopper::kReaches - 1);

/// s_i and m_i of the iterations on [ridge, top + ridge].
template <int kSteps>
struct StepWeights {
  float start = 0;
  float s[kSteps + 1] = {}, m[kSteps + 1] = {};

  /// The last weight m + 1.
  double fill(double ridge, double top) {
    Schedule schedule(Solver::chebyshev, top + ridge, ridge);
    start = static_cast<float>(schedule.start().s);
    double omega = 0;
    for (int i = 1; i <= kSteps; ++i) {
      const Coefficients c = schedule.step(i);
      s[i] = static_cast<float>(c.s);
      m[i] = static_cast<float>(c.m);
      omega = 1 + c.m;
    }
    return omega;
  }
};

/// The same for all tokens; behind the table's end the recurrence goes on from omega.
///
/// Early: a budget of hopper::kBudget iterations and more is spent no further than what is proven to be enough, as
/// sequences on Hopper are: `enough` steps, or fewer of those for spectra that reach less far, which are for heads with
/// tr H/‖H‖_F ≥ spread[i]. Steps are taken in float32, and what a step leaves of a direction is in proportion to what x
/// has of it, so heads of few keys need no more than others.
struct Table {
  StepWeights<kTable> all;
  double sum = 0, ratio = 0, omega = 0;

  int enough = 0;  // 0: all iterations are taken
  int reaches = 0;
  float spread[hopper::kReaches] = {};
  StepWeights<kMostFewer> fewer[hopper::kReaches];
};

/// For rounding, where traces and norms are found.
inline constexpr double kSpreadMargin = 1.005;
/// With less of a ridge millions of steps would be enough, and soon more than an int holds: all there are are taken.
inline constexpr double kLeastRidge = 1e-12;

Table table_of(const Options& options, std::int64_t dim, bool early) {
  const double ridge = options.ridge;
  Table table;
  table.sum = 1 + 2 * ridge;
  table.ratio = 1 / table.sum;
  table.omega = table.all.fill(ridge, 1);
  if (!early || !options.refine || ridge < kLeastRidge) return table;
  table.enough = hopper::enough_steps(hopper::rate_of(ridge, 1));
  for (int i = 0; i < hopper::kReaches; ++i) {
    const int steps = hopper::kShortest + 2 * i;
    const double reach = hopper::reach_of(ridge, steps);
    if (steps >= table.enough || reach >= 1) break;
    table.fewer[i].fill(ridge, reach);
    table.spread[i] = static_cast<float>(kSpreadMargin * hopper::spread_for(reach, static_cast<double>(dim)));
    table.reaches = i + 1;
  }
  return table;
}

/// What a head takes of a table.
struct Steps {
  float start;
  const float *s, *m;
  int count;

  __device__ Steps(const Table& table, std::int64_t iterations, float spread)
      : start(table.all.start), s(table.all.s), m(table.all.m), count(static_cast<int>(iterations)) {
    if (table.enough == 0 || iterations < hopper::kBudget) return;
    count = count < table.enough ? count : table.enough;
    for (int i = 0; i < table.reaches; ++i) {
      const int fewer = hopper::kShortest + 2 * i;
      if (fewer >= count || !(spread >= table.spread[i])) continue;
      start = table.fewer[i].start;
      s = table.fewer[i].s;
      m = table.fewer[i].m;
      count = fewer;
      return;
    }
  }
};

/// The sum over those who have H, the same bits for every thread. `parts` has room for a number per warp and is free
/// again after the next barrier.
template <typename Shape, typename T>
__device__ __forceinline__ T sum_block(T value, T (&parts)[Shape::kBlockWarps]) {
  value = sum_lanes(value);
  if (lane() == 0) parts[warp()] = value;
  Shape::meet();
  T total = 0;
#pragma unroll
  for (int w = 0; w < Shape::kBlockWarps; ++w) total += parts[w];
  return total;
}

/// Where a crowd's H lies in shared memory on its way: the squares of 32 × 32 on and above the diagonal, one after the
/// other. In rows 4n to 4n + 3 of a square a vector of four columns lies where its number differs by n in its bits, so
/// that eight lanes that read a row, or four numbers each of a column, find them in different banks.
template <int kDim>
struct UpperHalf {
  static constexpr int kSide = 32, kSquare = kSide * kSide, kAcross = kDim / kSide;
  static constexpr int kSize = kAcross * (kAcross + 1) / 2 * kSquare;

  __device__ static int square(int i, int j) { return (i * (2 * kAcross - i - 1) / 2 + j) * kSquare; }
  /// Of a number in its square.
  __device__ static int at(int row, int column) { return row * kSide + ((column ^ row) & ~3) + column % 4; }

  template <typename Shape>
  __device__ static void copy(const float* from, float* to) {
    constexpr int kRowsAtOnce = Shape::kBlock / (kSide / 4);
    const int row = thread() / (kSide / 4), column = thread() % (kSide / 4) * 4;
#pragma unroll
    for (int i = 0; i < kAcross; ++i) {
#pragma unroll
      for (int j = i; j < kAcross; ++j) {
#pragma unroll
        for (int r = row; r < kSide; r += kRowsAtOnce) {
          copy_async(to + square(i, j) + at(r, column), from + (i * kSide + r) * kDim + j * kSide + column);
        }
      }
    }
  }
};

template <typename Shape, int kDim>
struct Tile {
  static constexpr int kOfWarp = kDim / Shape::kBlockWarps;  // rows
  static constexpr int kRows = kOfWarp / 4;                  // of a lane
  static constexpr int kVectors = kDim / 32;                 // of four columns
  static_assert(kRows == 2 || kRows == 4 || kRows == 8);

  float h[kRows][kVectors][4];

  __device__ static int row(int a) {
    return warp() * kOfWarp + lane() / 8 * (Shape::kNeighbours ? kRows : 1) + (Shape::kNeighbours ? 1 : 4) * a;
  }
  __device__ static int column(int b) { return lane() % 8 * 4 + 32 * b; }
  /// The row whose sum `product` leaves with this lane, and whether it is the one of several that speaks for it.
  __device__ static int own_row() { return row(lane() % 8 / (8 / kRows)); }
  __device__ static bool speaks() { return lane() % (8 / kRows) == 0; }

  __device__ __forceinline__ void load(const float* from) {
#pragma unroll
    for (int a = 0; a < kRows; ++a) {
#pragma unroll
      for (int b = 0; b < kVectors; ++b) {
        const Vec<float> v = cuda::load(from + row(a) * kDim + column(b));
#pragma unroll
        for (int c = 0; c < 4; ++c) h[a][b][c] = v.x[c];
      }
    }
  }

  /// What lies below the diagonal is read where it is mirrored, and turned by fours.
  __device__ __forceinline__ void load_half(const float* half) {
    using Half = UpperHalf<kDim>;
    const int i = row(0) / Half::kSide, own = row(0) % Half::kSide, column = lane() % 8 * 4;
#pragma unroll
    for (int b = 0; b < kVectors; ++b) {
      const bool below = b < i;
      const float* from = half + (below ? Half::square(b, i) : Half::square(i, b));
#pragma unroll
      for (int a = 0; a < kRows; ++a) {
        const Vec<float> v =
            cuda::load(from + (below ? Half::at(column + a % 4, own + a / 4 * 4) : Half::at(own + a, column)));
#pragma unroll
        for (int c = 0; c < 4; ++c) h[a][b][c] = v.x[c];
      }
#pragma unroll
      for (int a = 0; a < kRows; ++a) {
#pragma unroll
        for (int c = 0; c < a % 4; ++c) {
          float &here = h[a][b][c], &there = h[a - a % 4 + c][b][a % 4];
          const float kept = here;
          here = below ? there : here;
          there = below ? kept : there;
        }
      }
    }
  }

  /// H ← γH + kkᵀ with √β in k; with a place for it, in memory too. A γ of 0 selects: what it forgets may be NaN.
  template <bool kStores = true>
  __device__ __forceinline__ void update(float gamma, const float* k, float* to) {
#pragma unroll
    for (int a = 0; a < kRows; ++a) {
      const float ka = k[row(a)];
#pragma unroll
      for (int b = 0; b < kVectors; ++b) {
        const Vec<float> kb = cuda::load(k + column(b));
        Vec<float> v;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          h[a][b][c] = (gamma == 0 ? 0.0f : gamma * h[a][b][c]) + ka * kb.x[c];
          v.x[c] = h[a][b][c];
        }
        if constexpr (kStores) cuda::store(to + row(a) * kDim + column(b), v);
      }
    }
  }
  __device__ __forceinline__ void store(float* to) const {
#pragma unroll
    for (int a = 0; a < kRows; ++a) {
#pragma unroll
      for (int b = 0; b < kVectors; ++b) {
        Vec<float> v;
#pragma unroll
        for (int c = 0; c < 4; ++c) v.x[c] = h[a][b][c];
        cuda::store(to + row(a) * kDim + column(b), v);
      }
    }
  }

  /// Σ h² in T.
  template <typename T>
  __device__ __forceinline__ T squares() const {
    T total = 0;
#pragma unroll
    for (int a = 0; a < kRows; ++a) {
#pragma unroll
      for (int b = 0; b < kVectors; ++b) {
#pragma unroll
        for (int c = 0; c < 4; ++c) total += static_cast<T>(h[a][b][c]) * static_cast<T>(h[a][b][c]);
      }
    }
    return total;
  }

  /// (H x) of the own row.
  __device__ __forceinline__ float product(const float* x) const {
    float part[kRows] = {};
#pragma unroll
    for (int b = 0; b < kVectors; ++b) {
      const Vec<float> v = cuda::load(x + column(b));
#pragma unroll
      for (int a = 0; a < kRows; ++a) {
#pragma unroll
        for (int c = 0; c < 4; ++c) part[a] += h[a][b][c] * v.x[c];
      }
    }
    int bit = 4;
#pragma unroll
    for (int left = kRows; left > 1; left /= 2, bit /= 2) {
      const bool upper = (lane() & bit) != 0;
#pragma unroll
      for (int a = 0; a < left / 2; ++a) {
        const float sent = upper ? part[a] : part[a + left / 2];
        const float kept = upper ? part[a + left / 2] : part[a];
        part[a] = kept + from_lane(sent, bit);
      }
    }
#pragma unroll
    for (; bit > 0; bit /= 2) part[0] += from_lane(part[0], bit);
    return part[0];
  }
};

template <typename Shape, int kDim, int kValues>
struct Shared {
  float q[kDim], k[kDim], v[kValues];
  float x[2][kDim];
  float z[kDim];
  float o[Shape::kBlock * 4];  // a vector per thread
  float sigma;                 // for those who have U alone
  float parts[Shape::kBlockWarps], traces[Shape::kBlockWarps];
  double wide_parts[Shape::kBlockWarps];
};

/// U by vectors of four, thread t has vectors t, t + kBlock, …: always the same columns.
template <typename Shape, int kDim, int kValues>
struct ValueTile {
  static constexpr int kAcross = kValues / 4;
  static constexpr int kCount = kDim * kAcross / Shape::kBlock;
  static constexpr int kRowsAtOnce = Shape::kBlock / kAcross;

  __device__ static int own() { return std::is_same_v<Shape, Lone> ? thread() % Shape::kBlock : thread(); }
  __device__ static int row(int i) { return own() / kAcross + i * kRowsAtOnce; }
  __device__ static int column() { return thread() % kAcross * 4; }
  __device__ static int at(int i) { return row(i) * kValues + column(); }

  /// Asks for its vectors from kBegin on.
  template <int kBegin, int kEnd>
  __device__ static __forceinline__ void copy(const float* from, float* to) {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) copy_async(to + at(i), from + at(i));
  }
  /// Brings what lies from vectors kBegin on as far as the second-level cache.
  template <int kBegin>
  __device__ static __forceinline__ void ask(const float* from) {
    constexpr int kLine = kLineBytes / 4;
    for (int i = kBegin * kRowsAtOnce * kValues + thread() * kLine; i < kDim * kValues; i += Shape::kBlock * kLine) {
      ask_for(from + i);
    }
  }
};

/// ‖H‖_F and its inverse, and tr H of the parts that threads have of it. Squares in float32 serve unless they leave its
/// range.
struct Norms {
  double norm, inverse;
  float trace;
};
template <typename Shape, int kDim, typename Room>
__device__ __forceinline__ Norms norms_of(const Tile<Shape, kDim>& tile, Room& room, float trace) {
  trace = sum_lanes(trace);
  if (lane() == 0) room.traces[warp()] = trace;
  const float squares = sum_block<Shape>(tile.template squares<float>(), room.parts);
  trace = 0;
#pragma unroll
  for (const float part : room.traces) trace += part;
  if (squares > 1e-30f && squares < 1e30f) {
    const float norm = sqrt(squares);
    return {norm, 1.0f / norm, trace};
  }
  const double norm = sqrt(sum_block<Shape>(tile.template squares<double>(), room.wide_parts));
  return {norm, 1 / norm, trace};
}

struct OpenGates {
  float log_decay = 0, beta = 1, alpha = 1;
};

/// k and v as they are written, with √β.
struct Weight {
  float root;
  bool writes;  // else nothing is written, whatever k and v hold

  __device__ explicit Weight(float beta) : root(sqrt(beta)), writes(beta != 0) {}
  __device__ __forceinline__ float operator()(float x) const { return writes ? root * x : 0.0f; }
};

/// The step by itself.
struct Alone {
  using Call = Step;

  __device__ static const Step& step(const Call& call) { return call; }
  static DType dtype(const Call& call) { return call.q.dtype; }

  __device__ static float read_gate(const View& view, std::int64_t b, std::int64_t head, float otherwise) {
    return view.data != nullptr ? read<float>(view, offset(view, b, 0, head)) : otherwise;
  }
  __device__ static OpenGates gates(const Call& s, std::int64_t b, std::int64_t head) {
    return {read_gate(s.log_decay, b, head, 0), read_gate(s.beta, b, head, 1), read_gate(s.alpha, b, head, 1)};
  }

  /// By Shape::kBlock threads, of which this one is number t; by threads of their own for v where there are as many.
  template <typename Shape, int kDim, int kValues>
  __device__ static void token(const Call& s, std::int64_t b, std::int64_t, std::int64_t head, const Weight& weight,
                               Shared<Shape, kDim, kValues>& room, int t) {
    static_assert(Shape::kBlock >= kDim && Shape::kBlock >= kValues);
    constexpr bool kOwn = Shape::kBlock >= kDim + kValues;
    if (t < kDim) {
      room.q[t] = read<float>(s.q, offset(s.q, b, 0, head) + t);
      room.k[t] = weight(read<float>(s.k, offset(s.k, b, 0, head) + t));
    } else if (kOwn && t - kDim < kValues) {
      room.v[t - kDim] = weight(read<float>(s.v, offset(s.v, b, 0, head) + t - kDim));
    }
    if (!kOwn && t < kValues) room.v[t] = weight(read<float>(s.v, offset(s.v, b, 0, head) + t));
  }

  /// What the answer needs beside o, and what can be asked for before there is a token.
  struct Norm {
    template <int kValues>
    __device__ static Norm of(const Call&, std::int64_t, std::int64_t) {
      return {};
    }
  };
  __device__ static void ask(const Call&, std::int64_t, std::int64_t, int) {}

  /// From sums of `kParts` rows in room.o.
  template <int kParts, typename Shape, int kDim, int kValues>
  __device__ static void answer(const Call& s, std::int64_t b, std::int64_t head,
                                const Shared<Shape, kDim, kValues>& room, float scale, const Norm&) {
    const int t = thread();
    if (t >= kValues) return;
    float o = 0;
    for (int part = 0; part < kParts; ++part) o += room.o[part * kValues + t];
    write(s.o, offset(s.o, b, 0, head) + t, o * scale);
  }
};

/// How many heads have q (k, v) in common. In 32 bits: a longer division takes registers that H needs.
__host__ __device__ inline int sharing(const StepBlock& p, int which) {
  const std::int64_t dim = which < 2 ? p.step.key_dim : p.step.value_dim;
  return static_cast<int>(p.step.heads * dim) / static_cast<int>(p.convs[which].conv.channels);
}

/// The step of a block whose numbers have a type of their own. They are rounded to it where the kernels of the parts
/// would write them, so both ways remember the same.
///
/// kGrouped: what several heads share was convolved by a kernel before this one, for no head knows when the others have
/// read the inputs that a convolution keeps.
template <DType kType, bool kGrouped>
struct InBlock {
  using Call = StepBlock;

  __device__ static const Step& step(const Call& call) { return call.step; }
  static DType dtype(const Call&) { return kType; }

  __device__ static OpenGates gates(const Call& p, std::int64_t b, std::int64_t head) {
    const auto open = [&](int kind, float otherwise) {
      return kind < 0 ? otherwise : open_gate_of<kType>(p.gates, b, kind, static_cast<int>(head));
    };
    return {open(p.log_decay, 0), open(p.beta, 1), open(p.alpha, 1)};
  }

  /// A warp each for q, k and v.
  template <typename Shape, int kDim, int kValues>
  __device__ static void token(const Call& p, std::int64_t b, std::int64_t slot, std::int64_t head,
                               const Weight& weight, Shared<Shape, kDim, kValues>& room, int t) {
    const int which = t / kLanes;
    if (which > 2) return;
    const ShortConvStep& conv = p.convs[which];
    const int dim = which < 2 ? kDim : kValues, first = lane() * vectors::kOwn;
    const int head_lanes = conv.conv.l2_norm == L2Norm::none ? 0 : dim / vectors::kOwn;
    vectors::Quad y{};
    if (const int shared = kGrouped ? sharing(p, which) : 1; shared > 1) {
      const int own = static_cast<int>(head) / shared;
      if (first < dim) y = read_vector<kType, vectors::kOwn>(conv.y.data, offset(conv.y, b, 0, 0) + own * dim + first);
    } else {
      y = vectors::convolve_token<kType>(conv, b, slot, head * dim + first, first < dim, head_lanes);
    }
    if (first >= dim) return;
    y = rounded<kType>(y);
    float* to = which == 0 ? room.q : which == 1 ? room.k : room.v;
#pragma unroll
    for (int i = 0; i < vectors::kOwn; ++i) to[first + i] = which == 0 ? y.x[i] : weight(y.x[i]);
  }

  static constexpr int kOwn = 4;  // channels of a lane, of o

  struct Norm {
    Numbers<kOwn> gate{}, weight{{1, 1, 1, 1}};

    template <int kValues>
    __device__ static Norm of(const Call& p, std::int64_t b, std::int64_t head) {
      Norm norm;
      const int first = lane() * kOwn;
      if (warp() > 0 || first >= kValues) return norm;
      if (given(p.norm.gate)) {
        norm.gate = read_vector<kType, kOwn>(p.norm.gate.data, offset(p.norm.gate, b, 0, head) + first);
      }
      if (given(p.norm.weight)) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) norm.weight.x[i] = read<float>(p.norm.weight, first + i);
      }
      return norm;
    }
  };

  /// Taps, and the inputs that a slot keeps: a line of each a thread.
  __device__ static void ask(const Call& p, std::int64_t slot, std::int64_t head, int t) {
    const int which = t / kLanes;
    if (which > 2) return;
    const ShortConvStep& conv = p.convs[which];
    const std::int64_t dim = which < 2 ? p.step.key_dim : p.step.value_dim, first = head * dim;
    if (conv.conv.channels != p.step.heads * dim) return;
    const auto ask_from = [&](const View& view, std::int64_t at, std::int64_t count) {
      const std::int64_t line = lane() * kLineBytes, bytes = bytes_of(view.dtype);
      if (line < count * bytes) ask_for(static_cast<const char*>(view.data) + at * bytes + line);
    };
    ask_from(conv.conv.weight, first * conv.conv.width, dim * conv.conv.width);
    ask_from(conv.state, (slot * conv.conv.channels + first) * (conv.conv.width - 1), dim * (conv.conv.width - 1));
  }

  /// By one warp: four channels a lane.
  template <int kParts, typename Shape, int kDim, int kValues>
  __device__ static void answer(const Call& p, std::int64_t b, std::int64_t head,
                                const Shared<Shape, kDim, kValues>& room, float scale, const Norm& norm) {
    if (warp() > 0) return;
    constexpr int kRowLanes = kValues / kOwn;
    const int first = lane() * kOwn;
    const bool mine = first < kValues;
    Numbers<kOwn> o{};
    if (mine) {
      for (int part = 0; part < kParts; ++part) {
        const Vec<float> sums = load(room.o + part * kValues + first);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) o.x[i] += sums.x[i];
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) o.x[i] *= scale;
      o = rounded<kType>(o);
    }
    const float root = vectors::root_of<kType>(p.norm, o, kRowLanes);
    if (!mine) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float gate = norm.gate.x[i];
      const float opened =
          !given(p.norm.gate) ? 1.0f : activated(p.norm.activation, gate, sigmoid_as<kType>(gate)).value;
      o.x[i] *= root * norm.weight.x[i] * opened;
    }
    write_vector<kType, kOwn>(p.y.data, offset(p.y, b, 0, head) + first, o);
  }
};

/// What a head's system was scaled by.
struct Scale {
  double norm;  // ‖H‖_F
  float sigma;  // its inverse; 1 where nothing is solved
};

/// Leaves z = q + α(x − q), scaled, in room.z. By all who have H: `met` is called when they all do, and the next
/// barrier is the caller's.
template <typename Shape, int kDim, typename Room, typename Met>
__device__ __forceinline__ Scale solve(const Step& s, const Table& table, const Tile<Shape, kDim>& tile, Room& room,
                                       std::int64_t b, float alpha, float trace, Met&& met) {
  using HTile = Tile<Shape, kDim>;
  const auto [f, inverse, sum] = norms_of(tile, room, trace);
  met();
  const bool solved = inverse > 0 && inverse <= static_cast<double>(std::numeric_limits<float>::max());
  const float sigma = solved ? static_cast<float>(inverse) : 1.0f, ridge = static_cast<float>(s.options.ridge);

  const Steps steps(table, s.iterations != nullptr ? s.iterations[b] : s.options.iterations,
                    sum * static_cast<float>(inverse));
  const int row = HTile::own_row(), iterations = solved ? steps.count : 0;
  const float q = room.q[row];
  float now = steps.start * q, before = 0;
  if (HTile::speaks()) room.x[0][row] = now;
  Shape::meet();
  using Omega = typename Shape::Omega;
  auto omega = static_cast<Omega>(table.omega);
  for (int i = 1; i <= iterations; ++i) {
    float step = 0, momentum = 0;
    if (i <= kTable) {
      step = steps.s[i];
      momentum = steps.m[i];
    } else {
      omega = 4 / (4 - static_cast<Omega>(table.ratio) * static_cast<Omega>(table.ratio) * omega);
      step = static_cast<float>(2 * omega / static_cast<Omega>(table.sum));
      momentum = static_cast<float>(omega - 1);
    }
    const float hx = tile.product(room.x[(i - 1) & 1]);
    const float next = now + momentum * (now - before) - step * (sigma * hx + ridge * now - q);
    before = now;
    now = next;
    if (HTile::speaks()) room.x[i & 1][row] = now;
    Shape::meet();
  }

  if (HTile::speaks()) {
    const float from_x = solved ? alpha : 0.0f;
    const float from_q = (1 - alpha) * (solved ? static_cast<float>(f) : 1.0f);
    room.z[row] = (from_x != 0 ? from_x * now : 0.0f) + (from_q != 0 ? from_q * q : 0.0f);
  }
  if (s.certainty != nullptr) {
    const bool counts = HTile::speaks();
    const float dots = sum_block<Shape>(counts && solved ? q * now : 0.0f, room.parts);
    Shape::meet();  // `parts` is read before it is written again
    const float squares = sum_block<Shape>(counts ? q * q : 0.0f, room.parts);
    if (thread() == 0) {
      s.certainty[block()] = f != f ? f : certainty_of(solved ? sigma : 0, static_cast<double>(ridge * dots), squares);
    }
  }
  return {f, sigma};
}

/// Of o. A memory that is not finite answers as it is.
__device__ __forceinline__ float scale_of(const Step& s, const Scale& scale) {
  return static_cast<float>(scale.norm != scale.norm ? scale.norm : s.options.scale);
}

/// U ← γU + βkvᵀ and parts of Uᵀz in one pass over U, of which `staged` has this thread's part; with σU and x̃, not U
/// and σx̃: see recall.cuh.
template <typename Shape, int kDim, int kValues>
__device__ __forceinline__ void write_and_read_values(Shared<Shape, kDim, kValues>& room, const float* staged, float* u,
                                                      float gamma, float sigma) {
  using Values = ValueTile<Shape, kDim, kValues>;
  const int t = thread();
  wait_for_copies();
  const Vec<float> v = load(room.v + Values::column());
  Vec<float> sum{};
#pragma unroll
  for (int i = 0; i < Values::kCount; ++i) {
    Vec<float> element = load(staged + Values::at(i));
    const float k = room.k[Values::row(i)], z = room.z[Values::row(i)];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      element.x[c] = (gamma == 0 ? 0.0f : gamma * element.x[c]) + k * v.x[c];
      sum.x[c] += sigma * element.x[c] * z;
    }
    store(u + Values::at(i), element);
  }
  store(room.o + 4 * t, sum);
  sync();
}

/// What a block has in shared memory: its room, then U on its way; of a crowd H's upper half at the end, where the last
/// of U will lie, which is asked for when H has left.
template <typename Shape, int kDim, int kValues>
struct Layout {
  using Values = ValueTile<Shape, kDim, kValues>;
  static constexpr bool kHalf = std::is_same_v<Shape, Crowd>;
  static constexpr int kRoomBytes = (sizeof(Shared<Shape, kDim, kValues>) + 15) / 16 * 16;
  static constexpr int kValueBytes = kDim * kValues * 4, kHalfBytes = UpperHalf<kDim>::kSize * 4;
  static constexpr int kOnceBytes = Shape::kBlock * 16;  // that all threads ask for at once
  /// How many of its vectors of U a thread asks for at first.
  static constexpr int kAtFirst =
      !kHalf ? Values::kCount : std::min(Values::kCount, (Crowd::kSharedBytes - kRoomBytes - kHalfBytes) / kOnceBytes);
  static constexpr int kHalfAt = kHalf ? std::max(kValueBytes - kHalfBytes, kAtFirst* kOnceBytes) : 0;
  static constexpr int kBytes = kRoomBytes + std::max(kValueBytes, kHalf ? kHalfAt + kHalfBytes : 0);
  static_assert(!kHalf || kBytes <= Crowd::kSharedBytes);

  __device__ static float* values() { return reinterpret_cast<float*>(shared_memory() + kRoomBytes); }
  __device__ static float* half() { return reinterpret_cast<float*>(shared_memory() + kRoomBytes + kHalfAt); }
};

/// A crowd's blocks that share a multiprocessor begin one after the other. Multiprocessors are given a block each, then
/// a second one, and those who come after begin where another has ended.
template <typename Shape>
__device__ __forceinline__ void take_turns(int multiprocessors) {
  if constexpr (std::is_same_v<Shape, Crowd>) {
    const std::int64_t turn = block() / multiprocessors;
    if (turn > 0 && turn < Crowd::kResident) pause(static_cast<int>(turn) * Crowd::kApart);
  }
}

template <typename Shape, int kDim, int kValues, typename Ends>
__global__ void __launch_bounds__(Shape::kBlock, Shape::kResident)
    step_kernel(const __grid_constant__ typename Ends::Call call, const __grid_constant__ Table table,
                int multiprocessors) {
  using Room = Shared<Shape, kDim, kValues>;
  using Place = Layout<Shape, kDim, kValues>;
  using Values = typename Place::Values;
  using HTile = Tile<Shape, kDim>;
  Room& room = *reinterpret_cast<Room*>(shared_memory());
  float* staged = Place::values();
  const Step& s = Ends::step(call);

  wait_for_earlier();
  take_turns<Shape>(multiprocessors);
  const std::int64_t b = block() / s.heads, head = block() % s.heads;
  const std::int64_t slot = s.state_indices != nullptr ? s.state_indices[b] : b, at = slot * s.heads + head;
  float* h = static_cast<float*>(s.h) + at * kDim * kDim;
  float* u = static_cast<float*>(s.u) + at * kDim * kValues;
  HTile tile;
  if constexpr (Place::kHalf) {
    UpperHalf<kDim>::template copy<Shape>(h, Place::half());
    end_group();
  } else {
    tile.load(h);
  }
  Values::template copy<0, Place::kAtFirst>(u, staged);
  if constexpr (Place::kHalf) {
    end_group();
    Values::template ask<Place::kAtFirst>(u);
  }

  const OpenGates gates = Ends::gates(call, b, head);
  const float gamma = exp(gates.log_decay);
  const int t = thread();
  Ends::token(call, b, slot, head, Weight(gates.beta), room, t);
  float trace = table.reaches > 0 && t < kDim ? h[t * (kDim + 1)] : 0.0f;
  if constexpr (Place::kHalf) wait_for_groups_but<1>();
  sync();

  if constexpr (Place::kHalf) tile.load_half(Place::half());
  const float fades = s.options.decay_keys ? gamma : 1.0f;
  tile.update(fades, room.k, h);
  if (t < kDim) trace = (fades == 0 ? 0.0f : fades * trace) + room.k[t] * room.k[t];
  // All have met in norm_of and have their H.
  const auto met = [&] { Values::template copy<Place::kAtFirst, Values::kCount>(u, staged); };
  const Scale scale = solve(s, table, tile, room, b, gates.alpha, trace, met);
  const auto norm = Ends::Norm::template of<kValues>(call, b, head);  // in registers that H leaves
  sync();
  write_and_read_values(room, staged, u, gamma, scale.sigma);
  Ends::template answer<Values::kRowsAtOnce>(call, b, head, room, scale_of(s, scale), norm);
}

/// U of a head of its own in registers.
template <int kDim, int kValues>
struct ValuesOfOne {
  using Own = ValueTile<Lone, kDim, kValues>;
  static constexpr int kApart = Own::kRowsAtOnce * kValues;  // numbers between a thread's vectors
  Vec<float> u[Own::kCount];

  __device__ __forceinline__ void load_from(const float* from) {
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i) u[i] = load(from + Own::at(0) + i * kApart);
  }
  __device__ __forceinline__ void update(const Shared<Lone, kDim, kValues>& room, float gamma, float* to) {
    const Vec<float> v = load(room.v + Own::column());
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i) {
      const float k = room.k[Own::row(i)];
#pragma unroll
      for (int c = 0; c < 4; ++c) u[i].x[c] = (gamma == 0 ? 0.0f : gamma * u[i].x[c]) + k * v.x[c];
      store(to + Own::at(0) + i * kApart, u[i]);
    }
  }
  /// Parts of Uᵀz.
  __device__ __forceinline__ void answer(Shared<Lone, kDim, kValues>& room, float sigma) const {
    Vec<float> sum{};
#pragma unroll
    for (int i = 0; i < Own::kCount; ++i) {
      const float z = room.z[Own::row(i)];
#pragma unroll
      for (int c = 0; c < 4; ++c) sum.x[c] += sigma * u[i].x[c] * z;
    }
    store(room.o + 4 * (thread() % Lone::kBlock), sum);
  }
};

template <int kDim, int kValues, typename Ends>
__global__ void __launch_bounds__(Lone::kThreads, 1)
    lone_kernel(const __grid_constant__ typename Ends::Call call, const __grid_constant__ Table table) {
  let_next_start();
  auto& room = *reinterpret_cast<Shared<Lone, kDim, kValues>*>(shared_memory());
  const Step& s = Ends::step(call);
  const std::int64_t b = block() / s.heads, head = block() % s.heads;
  const auto slot_of = [&] { return s.state_indices != nullptr ? s.state_indices[b] : b; };
  const auto h_of = [&](std::int64_t slot) { return static_cast<float*>(s.h) + (slot * s.heads + head) * kDim * kDim; };
  const auto u_of = [&](std::int64_t slot) {
    return static_cast<float*>(s.u) + (slot * s.heads + head) * kDim * kValues;
  };
  const int t = thread();
  {
    // No kernel that lets the next begin early writes slots; one that did would cost lines asked for in vain.
    constexpr int kLine = kLineBytes / 4;
    const std::int64_t slot = slot_of();
    Ends::ask(call, slot, head, t);
    for (int i = t * kLine; i < kDim * kDim; i += Lone::kThreads * kLine) ask_for(h_of(slot) + i);
    for (int i = t * kLine; i < kDim * kValues; i += Lone::kThreads * kLine) ask_for(u_of(slot) + i);
  }

  wait_for_earlier();
  const std::int64_t slot = slot_of();
  float *const h = h_of(slot), *const u = u_of(slot);
  if (t < Lone::kBlock) {
    Tile<Lone, kDim> tile;
    tile.load(h);
    float trace = table.reaches > 0 && t < kDim ? h[t * (kDim + 1)] : 0.0f;
    const auto norm = Ends::Norm::template of<kValues>(call, b, head);
    const OpenGates gates = Ends::gates(call, b, head);
    const float fades = s.options.decay_keys ? exp(gates.log_decay) : 1.0f;
    sync();  // the token is there
    tile.template update<false>(fades, room.k, h);
    if (t < kDim) trace = (fades == 0 ? 0.0f : fades * trace) + room.k[t] * room.k[t];
    const Scale scale = solve(s, table, tile, room, b, gates.alpha, trace, [&] { tile.store(h); });
    if (t == 0) room.sigma = scale.sigma;
    sync();  // z is there
    sync();  // and Uᵀz
    Ends::template answer<ValueTile<Lone, kDim, kValues>::kRowsAtOnce>(call, b, head, room, scale_of(s, scale), norm);
  } else {
    ValuesOfOne<kDim, kValues> values;
    const OpenGates gates = Ends::gates(call, b, head);
    Ends::token(call, b, slot, head, Weight(gates.beta), room, t - Lone::kBlock);
    sync();
    values.load_from(u);
    values.update(room, exp(gates.log_decay), u);
    sync();
    values.answer(room, room.sigma);
    sync();
  }
}

template <typename Shape, int kDim, int kValues, typename Ends>
void run_as(const Step& s, const typename Ends::Call& call, const Device& device, const Table& table,
            int multiprocessors) {
  launch_early<Shape::kBlock>(step_kernel<Shape, kDim, kValues, Ends>, s.batch * s.heads,
                              Layout<Shape, kDim, kValues>::kBytes, device.index, device.stream, call, table,
                              multiprocessors);
}
template <int kDim, int kValues, typename Ends>
void run_with(const Step& s, const typename Ends::Call& call, const Device& device) {
  // A crowd's blocks have few threads for a block's convolutions and norm: there it does not pay as it is.
  const bool crowd = std::is_same_v<Ends, Alone> || on_trial(Trial::crowd_step);
  const Table table = table_of(s.options, kDim, Ends::dtype(call) != DType::float32);
  const int count = multiprocessors(device.index);
  const std::int64_t heads = s.batch * s.heads;
  if (Lone::suits(heads, count)) {
    return launch_early<Lone::kThreads>(lone_kernel<kDim, kValues, Ends>, heads, sizeof(Shared<Lone, kDim, kValues>),
                                        device.index, device.stream, call, table);
  }
  if (crowd && Crowd::suits(heads, count)) return run_as<Crowd, kDim, kValues, Ends>(s, call, device, table, count);
  run_as<Few, kDim, kValues, Ends>(s, call, device, table, count);
}
template <int kDim, int kValues>
void run(const Step& s, const Device& device) {
  run_with<kDim, kValues, Alone>(s, s, device);
}
template <int kDim, int kValues>
void run_block(const StepBlock& block, const Device& device) {
  StepBlock call = block;
  ShortConvStep before[3];
  std::size_t count = 0;
  for (int i = 0; i < 3; ++i) {
    ShortConvStep& conv = call.convs[i];
    if (sharing(block, i) == 1) continue;
    const auto bytes = static_cast<std::size_t>(conv.conv.batch * conv.conv.channels * bytes_of(conv.conv.x.dtype));
    conv.y = {.data = device.allocate(bytes), .dtype = conv.conv.x.dtype, .batch_stride = conv.conv.channels};
    before[count++] = conv;
  }
  with_vectors_of(block.convs[0].conv.x.dtype, [&](auto type) {
    if (count == 0) return run_with<kDim, kValues, InBlock<decltype(type)::type, false>>(call.step, call, device);
    vectors::step({before, count}, device);
    run_with<kDim, kValues, InBlock<decltype(type)::type, true>>(call.step, call, device);
  });
}

struct Size {
  std::int64_t key_dim, value_dim;
  void (*run)(const Step&, const Device&);
  void (*run_block)(const StepBlock&, const Device&);
};
constexpr Size kSizes[] = {{64, 64, run<64, 64>, run_block<64, 64>},
                           {64, 128, run<64, 128>, run_block<64, 128>},
                           {128, 64, run<128, 64>, run_block<128, 64>},
                           {128, 128, run<128, 128>, run_block<128, 128>}};

/// What takes a step of this size and these options; nullptr: nothing here does.
const Size* find_size(const Step& s) {
  const Options& o = s.options;
  if (o.part != Part::both || o.solver != Solver::chebyshev || o.ridge_mode != RidgeMode::adaptive) return nullptr;
  if (s.key_group > 1 || s.value_group > 1) return nullptr;
  if (reinterpret_cast<std::uintptr_t>(s.h) % 16 != 0 || reinterpret_cast<std::uintptr_t>(s.u) % 16 != 0) {
    return nullptr;
  }
  for (const Size& size : kSizes) {
    if (size.key_dim == s.key_dim && size.value_dim == s.value_dim) return &size;
  }
  return nullptr;
}

}  // namespace

bool step_in_registers(const Step& s, const Device& device) {
  const Size* size = s.q.dtype != DType::float64 ? find_size(s) : nullptr;
  if (size != nullptr) size->run(s, device);
  return size != nullptr;
}

bool takes_step_block(const StepBlock& block) {
  const Step& s = block.step;
  const DType dtype = block.convs[0].conv.x.dtype;
  if (find_size(s) == nullptr || dtype == DType::float64 || block.gates.dtype != dtype) return false;
  for (int i = 0; i < 3; ++i) {
    ShortConvStep conv = block.convs[i];
    conv.y = conv.conv.x;
    const std::int64_t dim = i < 2 ? s.key_dim : s.value_dim;
    const std::int64_t channels = conv.conv.channels;
    const bool by_head = conv.conv.l2_norm == L2Norm::none || conv.conv.head_dim == dim;
    const bool grouped = channels > 0 && channels % dim == 0 && s.heads * dim % channels == 0;
    if (conv.conv.x.dtype != dtype || !grouped || !by_head || !vectors::takes(conv)) return false;
  }
  const bool gated = given(block.norm.gate);
  return block.norm.dim == s.value_dim && (!gated || block.norm.activation != Activation::none) &&
         in_vectors<4>(dtype, {&block.y}) && (!gated || in_vectors<4>(dtype, {&block.norm.gate}));
}

void step_block(const StepBlock& block, const Device& device) {
  const CurrentDevice current(device.index);
  find_size(block.step)->run_block(block, device);
}

}  // namespace gka::kernels::cuda
