// One token for many sequences, a block of 256 threads per (sequence, head): Chebyshev with an adaptive ridge, D and V
// of 64 or 128, float32 states. The work is to read and write H and U once, 0.54 GB for 256 sequences of 8 heads; the
// 30 products with H are hidden behind that if they never touch memory.
//
// So H_t lives in registers, 64 numbers per thread for D = 128, from the update to the last iteration. A warp has D/8
// rows; lane l has rows l/8, l/8 + 4, … of them and every eighth group of four columns. One product is then D/32
// vectors of x from shared memory, D²/256 multiply-adds, and a sum over eight lanes in which each step halves the rows
// a lane still carries: at its end a lane has one row, and that row's x, which it updates and puts up for the others.
// One barrier per iteration. U comes in by asynchronous copies meanwhile, each thread's own part, so nobody waits for
// others; two blocks fit on a multiprocessor, and one's loads run under the other's iterations.
//
// What a token brings and what becomes of the answer stands apart (Alone, InBlock): numbers from memory, or all that a
// GKA block does between its projections, by the same device functions as the kernels of its parts.
#include "kernels/cuda/step_registers.h"

#include <limits>

#include "kernels/cuda/gated_rms_norm_vectors.cuh"
#include "kernels/cuda/gates.cuh"
#include "kernels/cuda/short_conv_vectors.cuh"
#include "kernels/cuda/step_block.h"
#include "kernels/cuda/thread_block.cuh"
#include "kernels/schedule.h"
#include "kernels/system_scale.h"

namespace gka::kernels::cuda {
namespace {

inline constexpr int kBlock = 256;
inline constexpr int kBlockWarps = kBlock / kLanes;
inline constexpr int kTable = 64;

/// s_i and m_i of the iterations, the same for all tokens; behind the table's end the recurrence goes on from omega.
struct Table {
  float start = 0;
  float s[kTable + 1] = {}, m[kTable + 1] = {};
  double sum = 0, ratio = 0, omega = 0;
};

Table table_of(double ridge) {
  Table table{.sum = 1 + 2 * ridge, .ratio = 1 / (1 + 2 * ridge)};
  Schedule schedule(Solver::chebyshev, 1 + ridge, ridge);
  table.start = static_cast<float>(schedule.start().s);
  for (int i = 1; i <= kTable; ++i) {
    const Coefficients c = schedule.step(i);
    table.s[i] = static_cast<float>(c.s);
    table.m[i] = static_cast<float>(c.m);
    table.omega = 1 + c.m;
  }
  return table;
}

/// The sum over the block, the same bits for every thread. `parts` has room for a number per warp and is free again
/// after the next barrier.
template <typename T>
__device__ __forceinline__ T sum_block(T value, T* parts) {
  value = sum_lanes(value);
  if (lane() == 0) parts[warp()] = value;
  sync();
  T total = 0;
#pragma unroll
  for (int w = 0; w < kBlockWarps; ++w) total += parts[w];
  return total;
}

template <int kDim>
struct Tile {
  static constexpr int kRows = kDim / 32;     // of a lane
  static constexpr int kVectors = kDim / 32;  // of four columns
  static_assert(kRows == 2 || kRows == 4);

  float h[kRows][kVectors][4];

  __device__ static int row(int a) { return warp() * (kDim / kBlockWarps) + lane() / 8 + 4 * a; }
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

  /// H ← γH + kkᵀ with √β in k, here and in memory. A γ of 0 selects: what it forgets may be NaN.
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
        store(to + row(a) * kDim + column(b), v);
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

template <int kDim, int kValues>
struct Shared {
  float q[kDim], k[kDim], v[kValues];
  float x[2][kDim];
  float z[kDim];
  float o[kBlock * 4];  // a vector per thread
  float parts[kBlockWarps];
  double wide_parts[kBlockWarps];
};

/// U by vectors of four, thread t has vectors t, t + 256, …: always the same columns.
template <int kDim, int kValues>
struct ValueTile {
  static constexpr int kAcross = kValues / 4;
  static constexpr int kCount = kDim * kAcross / kBlock;
  static constexpr int kRowsAtOnce = kBlock / kAcross;

  __device__ static int row(int i) { return thread() / kAcross + i * kRowsAtOnce; }
  __device__ static int column() { return thread() % kAcross * 4; }
  __device__ static int at(int i) { return row(i) * kValues + column(); }
};

/// ‖H‖_F. Squares in float32 serve unless they leave its range.
template <int kDim, typename Room>
__device__ __forceinline__ double norm_of(const Tile<kDim>& tile, Room& room) {
  const float squares = sum_block(tile.template squares<float>(), room.parts);
  if (squares > 1e-30f && squares < 1e30f) return sqrt(static_cast<double>(squares));
  return sqrt(sum_block(tile.template squares<double>(), room.wide_parts));
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

  __device__ static float read_gate(const View& view, std::int64_t b, std::int64_t head, float otherwise) {
    return view.data != nullptr ? read<float>(view, offset(view, b, 0, head)) : otherwise;
  }
  __device__ static OpenGates gates(const Call& s, std::int64_t b, std::int64_t head) {
    return {read_gate(s.log_decay, b, head, 0), read_gate(s.beta, b, head, 1), read_gate(s.alpha, b, head, 1)};
  }

  template <int kDim, int kValues>
  __device__ static void token(const Call& s, std::int64_t b, std::int64_t, std::int64_t head, const Weight& weight,
                               Shared<kDim, kValues>& room) {
    const int t = thread();
    if (t < kDim) {
      room.q[t] = read<float>(s.q, offset(s.q, b, 0, head) + t);
      room.k[t] = weight(read<float>(s.k, offset(s.k, b, 0, head) + t));
    } else if (t - kDim < kValues) {
      room.v[t - kDim] = weight(read<float>(s.v, offset(s.v, b, 0, head) + t - kDim));
    }
  }

  /// From sums of `kParts` rows in room.o.
  template <int kParts, int kDim, int kValues>
  __device__ static void answer(const Call& s, std::int64_t b, std::int64_t head, const Shared<kDim, kValues>& room,
                                float scale) {
    const int t = thread();
    if (t >= kValues) return;
    float o = 0;
    for (int part = 0; part < kParts; ++part) o += room.o[part * kValues + t];
    write(s.o, offset(s.o, b, 0, head) + t, o * scale);
  }
};

/// The step of a block whose numbers have a type of their own. They are rounded to it where the kernels of the parts
/// would write them, so both ways remember the same.
template <DType kType>
struct InBlock {
  using Call = StepBlock;

  __device__ static const Step& step(const Call& call) { return call.step; }

  __device__ static OpenGates gates(const Call& p, std::int64_t b, std::int64_t head) {
    const auto open = [&](int kind, float otherwise) {
      return kind < 0 ? otherwise : open_gate_of<kType>(p.gates, b, kind, static_cast<int>(head));
    };
    return {open(p.log_decay, 0), open(p.beta, 1), open(p.alpha, 1)};
  }

  /// A warp each for q, k and v.
  template <int kDim, int kValues>
  __device__ static void token(const Call& p, std::int64_t b, std::int64_t slot, std::int64_t head,
                               const Weight& weight, Shared<kDim, kValues>& room) {
    const int which = warp();
    if (which > 2) return;
    const ShortConvStep& conv = p.convs[which];
    const int dim = which < 2 ? kDim : kValues, first = lane() * vectors::kOwn;
    const int head_lanes = conv.conv.l2_norm == L2Norm::none ? 0 : dim / vectors::kOwn;
    auto y = vectors::convolve_token<kType>(conv, b, slot, head * dim + first, first < dim, head_lanes);
    if (first >= dim) return;
    y = rounded<kType>(y);
    float* to = which == 0 ? room.q : which == 1 ? room.k : room.v;
#pragma unroll
    for (int i = 0; i < vectors::kOwn; ++i) to[first + i] = which == 0 ? y.x[i] : weight(y.x[i]);
  }

  /// By one warp: four channels a lane.
  template <int kParts, int kDim, int kValues>
  __device__ static void answer(const Call& p, std::int64_t b, std::int64_t head, const Shared<kDim, kValues>& room,
                                float scale) {
    if (warp() > 0) return;
    constexpr int kOwn = 4, kRowLanes = kValues / kOwn;
    const int first = lane() * kOwn;
    const bool mine = first < kValues;
    Numbers<kOwn> o{}, gate{};
    if (mine) {
      for (int part = 0; part < kParts; ++part) {
        const Vec<float> sums = load(room.o + part * kValues + first);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) o.x[i] += sums.x[i];
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) o.x[i] *= scale;
      o = rounded<kType>(o);
      if (given(p.norm.gate)) {
        gate = read_vector<kType, kOwn>(p.norm.gate.data, offset(p.norm.gate, b, 0, head) + first);
      }
    }
    const float root = vectors::root_of<kType>(p.norm, o, kRowLanes);
    if (!mine) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float opened =
          !given(p.norm.gate) ? 1.0f : activated(p.norm.activation, gate.x[i], sigmoid_as<kType>(gate.x[i])).value;
      const float weight = given(p.norm.weight) ? read<float>(p.norm.weight, first + i) : 1.0f;
      o.x[i] *= root * weight * opened;
    }
    write_vector<kType, kOwn>(p.y.data, offset(p.y, b, 0, head) + first, o);
  }
};

/// U ← γU + βkvᵀ and parts of Uᵀz in one pass over U, of which `staged` has this thread's part; with σU and x̃, not U
/// and σx̃: see recall.cuh.
template <int kDim, int kValues>
__device__ __forceinline__ void write_and_read_values(Shared<kDim, kValues>& room, const float* staged, float* u,
                                                      float gamma, float sigma) {
  using Values = ValueTile<kDim, kValues>;
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

template <int kDim, int kValues, typename Ends>
__global__ void __launch_bounds__(kBlock, 2)
    step_kernel(const __grid_constant__ typename Ends::Call call, const __grid_constant__ Table table) {
  using Room = Shared<kDim, kValues>;
  using Values = ValueTile<kDim, kValues>;
  Room& room = *reinterpret_cast<Room*>(shared_memory());
  float* staged = reinterpret_cast<float*>(shared_memory() + (sizeof(Room) + 15) / 16 * 16);
  const Step& s = Ends::step(call);

  wait_for_earlier();
  const std::int64_t b = block() / s.heads, head = block() % s.heads;
  const std::int64_t slot = s.state_indices != nullptr ? s.state_indices[b] : b, at = slot * s.heads + head;
  float* h = static_cast<float*>(s.h) + at * kDim * kDim;
  float* u = static_cast<float*>(s.u) + at * kDim * kValues;
  Tile<kDim> tile;
  tile.load(h);
#pragma unroll
  for (int i = 0; i < Values::kCount; ++i) copy_async(staged + Values::at(i), u + Values::at(i));

  const OpenGates gates = Ends::gates(call, b, head);
  const float alpha = gates.alpha, gamma = exp(gates.log_decay);
  Ends::template token<kDim, kValues>(call, b, slot, head, Weight(gates.beta), room);
  const int t = thread();
  sync();

  tile.update(s.options.decay_keys ? gamma : 1.0f, room.k, h);
  const double f = norm_of(tile, room);
  const double inverse = 1 / f;
  const bool solved = inverse > 0 && inverse <= static_cast<double>(std::numeric_limits<float>::max());
  const float sigma = solved ? static_cast<float>(inverse) : 1.0f, ridge = static_cast<float>(s.options.ridge);

  const int row = Tile<kDim>::own_row();
  const float q = room.q[row];
  float now = table.start * q, before = 0;
  if (Tile<kDim>::speaks()) room.x[0][row] = now;
  sync();
  const int iterations =
      !solved ? 0 : static_cast<int>(s.iterations != nullptr ? s.iterations[b] : s.options.iterations);
  double omega = table.omega;
  for (int i = 1; i <= iterations; ++i) {
    float step = 0, momentum = 0;
    if (i <= kTable) {
      step = table.s[i];
      momentum = table.m[i];
    } else {
      omega = 4 / (4 - table.ratio * table.ratio * omega);
      step = static_cast<float>(2 * omega / table.sum);
      momentum = static_cast<float>(omega - 1);
    }
    const float hx = tile.product(room.x[(i - 1) & 1]);
    const float next = now + momentum * (now - before) - step * (sigma * hx + ridge * now - q);
    before = now;
    now = next;
    if (Tile<kDim>::speaks()) room.x[i & 1][row] = now;
    sync();
  }

  if (Tile<kDim>::speaks()) {
    const float from_x = solved ? alpha : 0.0f;
    const float from_q = (1 - alpha) * (solved ? static_cast<float>(f) : 1.0f);
    room.z[row] = (from_x != 0 ? from_x * now : 0.0f) + (from_q != 0 ? from_q * q : 0.0f);
  }
  if (s.certainty != nullptr) {
    const bool counts = Tile<kDim>::speaks();
    const float dots = sum_block(counts && solved ? q * now : 0.0f, room.parts);
    sync();  // `parts` is read before it is written again
    const float squares = sum_block(counts ? q * q : 0.0f, room.parts);
    if (t == 0) {
      s.certainty[block()] = f != f ? f : certainty_of(solved ? sigma : 0, static_cast<double>(ridge * dots), squares);
    }
  }
  sync();
  write_and_read_values<kDim, kValues>(room, staged, u, gamma, sigma);
  const float scale = static_cast<float>(f != f ? f : s.options.scale);
  Ends::template answer<Values::kRowsAtOnce, kDim, kValues>(call, b, head, room, scale);
}

template <int kDim, int kValues, typename Ends>
void run_with(const Step& s, const typename Ends::Call& call, const Device& device) {
  constexpr int kBytes = (sizeof(Shared<kDim, kValues>) + 15) / 16 * 16 + kDim * kValues * 4;
  launch_early<kBlock>(step_kernel<kDim, kValues, Ends>, s.batch * s.heads, kBytes, device.index, device.stream, call,
                       table_of(s.options.ridge));
}
template <int kDim, int kValues>
void run(const Step& s, const Device& device) {
  run_with<kDim, kValues, Alone>(s, s, device);
}
template <int kDim, int kValues>
void run_block(const StepBlock& block, const Device& device) {
  with_vectors_of(block.convs[0].conv.x.dtype, [&](auto type) {
    run_with<kDim, kValues, InBlock<decltype(type)::type>>(block.step, block, device);
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
    const bool by_head = conv.conv.l2_norm == L2Norm::none || conv.conv.head_dim == dim;
    if (conv.conv.x.dtype != dtype || conv.conv.channels != s.heads * dim || !by_head || !vectors::takes(conv)) {
      return false;
    }
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
