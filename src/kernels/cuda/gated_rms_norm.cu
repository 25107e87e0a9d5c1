// The gated RMS norm: a team (a warp, for wide rows a block) has a row in registers and reads everything once. Backward
// a team walks over the rows of its run, so that the weight's gradient is summed in registers too: per run, and then
// over the runs in their order.
#include "gka/block_kernels.h"
#include "kernels/cuda/fused.h"
#include "kernels/cuda/gated_rms_norm_vectors.cuh"
#include "kernels/cuda/warp_rows.cuh"

namespace gka::kernels::cuda {
namespace {

inline constexpr std::int64_t kRunRows = 32;  // backward, by warps

__device__ inline std::int64_t offset_of_row(const GatedRmsNorm& n, const View& view, std::int64_t row) {
  return offset(view, row / n.heads / n.tokens, row / n.heads % n.tokens, row % n.heads);
}
std::int64_t rows_of(const GatedRmsNorm& n) { return n.batch * n.tokens * n.heads; }

template <typename T, typename TeamOf>
__device__ __forceinline__ T inverse_root(const GatedRmsNorm& n, const T (&x)[TeamOf::kCount]) {
  T squares = 0;
#pragma unroll
  for (int i = 0; i < TeamOf::kCount; ++i) squares += x[i] * x[i];
  return T{1} / sqrt(TeamOf::sum(squares) / static_cast<T>(n.dim) + static_cast<T>(n.eps));
}

template <typename T, typename TeamOf>
__device__ __forceinline__ void read_weight(const GatedRmsNorm& n, T (&weight)[TeamOf::kCount]) {
#pragma unroll
  for (int i = 0; i < TeamOf::kCount; ++i) {
    weight[i] = given(n.weight) && TeamOf::channel(i) < n.dim ? read<T>(n.weight, TeamOf::channel(i)) : T{1};
  }
}

template <typename T, typename TeamOf>
__global__ void __launch_bounds__(kThreads)
    norm_rows(const __grid_constant__ GatedRmsNorm n, const View y, std::int64_t rows) {
  const std::int64_t row = TeamOf::index();
  if (row >= rows) return;
  const int dim = static_cast<int>(n.dim);
  RawRow<T, TeamOf::kCount, TeamOf::kMembers> raw_x, raw_gate;
  raw_x.load(n.x, offset_of_row(n, n.x, row), dim, TeamOf::member());
  if (given(n.gate)) raw_gate.load(n.gate, offset_of_row(n, n.gate, row), dim, TeamOf::member());
  T x[TeamOf::kCount], weight[TeamOf::kCount];
  read_weight<T, TeamOf>(n, weight);
#pragma unroll
  for (int i = 0; i < TeamOf::kCount; ++i) x[i] = raw_x.get(i, n.x.dtype);
  const T root = inverse_root<T, TeamOf>(n, x);
  const std::int64_t to = offset_of_row(n, y, row);
#pragma unroll
  for (int i = 0; i < TeamOf::kCount; ++i) {
    const T gate = given(n.gate) ? activate(n.activation, raw_gate.get(i, n.gate.dtype)).value : T{1};
    if (TeamOf::channel(i) < dim) write(y, to + TeamOf::channel(i), x[i] * root * weight[i] * gate);
  }
}

/// dx = r e − r³ mean(x ⊙ e) x with e = dy ⊙ w ⊙ act(gate).
template <typename T, typename TeamOf>
__device__ __forceinline__ void backward_row(const GatedRmsNorm& n, const GatedRmsNormGradients& g, std::int64_t row,
                                             const T (&weight)[TeamOf::kCount], T (&d_weight)[TeamOf::kCount]) {
  const int dim = static_cast<int>(n.dim);
  RawRow<T, TeamOf::kCount, TeamOf::kMembers> raw_x, raw_gate, raw_d_y;
  raw_x.load(n.x, offset_of_row(n, n.x, row), dim, TeamOf::member());
  raw_d_y.load(g.d_y, offset_of_row(n, g.d_y, row), dim, TeamOf::member());
  if (given(n.gate)) raw_gate.load(n.gate, offset_of_row(n, n.gate, row), dim, TeamOf::member());
  T x[TeamOf::kCount], e[TeamOf::kCount], along = 0;
#pragma unroll
  for (int i = 0; i < TeamOf::kCount; ++i) x[i] = raw_x.get(i, n.x.dtype);
  const T root = inverse_root<T, TeamOf>(n, x);
#pragma unroll
  for (int i = 0; i < TeamOf::kCount; ++i) {
    const T d_y = raw_d_y.get(i, g.d_y.dtype);
    const Activated<T> gate =
        given(n.gate) ? activate(n.activation, raw_gate.get(i, n.gate.dtype)) : Activated<T>{T{1}, T{0}};
    e[i] = d_y * weight[i] * gate.value;
    along += x[i] * e[i];
    d_weight[i] += d_y * gate.value * x[i] * root;
    if (given(g.d_gate) && TeamOf::channel(i) < dim) {
      write(g.d_gate, offset_of_row(n, g.d_gate, row) + TeamOf::channel(i), d_y * x[i] * root * weight[i] * gate.slope);
    }
  }
  const T bend = root * root * root * TeamOf::sum(along) / static_cast<T>(n.dim);
  if (!given(g.d_x)) return;
  const std::int64_t to = offset_of_row(n, g.d_x, row);
#pragma unroll
  for (int i = 0; i < TeamOf::kCount; ++i) {
    if (TeamOf::channel(i) < dim) write(g.d_x, to + TeamOf::channel(i), root * e[i] - bend * x[i]);
  }
}

/// A team per run of rows; `kept` [runs, dim] gets each block's sum of its teams' runs.
template <typename T, typename TeamOf>
__global__ void __launch_bounds__(kThreads)
    differentiate_rows(const __grid_constant__ GatedRmsNorm n, const __grid_constant__ GatedRmsNormGradients g,
                       std::int64_t rows, T* kept) {
  T weight[TeamOf::kCount], d_weight[TeamOf::kCount] = {};
  read_weight<T, TeamOf>(n, weight);
  const std::int64_t begin = TeamOf::index() * kRunRows, end = min(begin + kRunRows, rows);
  for (std::int64_t row = begin; row < end; ++row) backward_row<T, TeamOf>(n, g, row, weight, d_weight);

  T* parts = reinterpret_cast<T*>(shared_memory());  // [kTeams][kSize]
  sync();
#pragma unroll
  for (int i = 0; i < TeamOf::kCount; ++i) {
    parts[(TeamOf::kTeams > 1 ? warp() : 0) * TeamOf::kSize + TeamOf::channel(i)] = d_weight[i];
  }
  sync();
  each(static_cast<int>(n.dim), [&](int c) {
    T total = 0;
    for (int team = 0; team < TeamOf::kTeams; ++team) total += parts[team * TeamOf::kSize + c];
    kept[block() * n.dim + c] = total;
  });
}

// ---- Launches ---------------------------------------------------------------------------------------------------

template <typename T, typename TeamOf>
void forward_as(const GatedRmsNorm& n, const View& y, const Device& device) {
  const std::int64_t rows = rows_of(n);
  launch(norm_rows<T, TeamOf>, (rows + TeamOf::kTeams - 1) / TeamOf::kTeams, kWarps * static_cast<int>(sizeof(T)),
         device.stream, n, y, rows);
}

template <typename T, typename TeamOf>
void backward_as(const GatedRmsNorm& n, const GatedRmsNormGradients& g, const Device& device) {
  const std::int64_t rows = rows_of(n), per_block = kRunRows * TeamOf::kTeams;
  const std::int64_t blocks = (rows + per_block - 1) / per_block;
  T* kept = static_cast<T*>(device.allocate(static_cast<std::size_t>(blocks * n.dim) * sizeof(T) + 1));
  constexpr int kShared = TeamOf::kTeams * TeamOf::kSize * static_cast<int>(sizeof(T));
  if constexpr (kShared > 48 * 1024) resident_blocks(differentiate_rows<T, TeamOf>, kShared);  // allows it so much
  launch(differentiate_rows<T, TeamOf>, blocks, kShared, device.stream, n, g, rows, kept);
  if (given(g.d_weight)) sum_blocks(static_cast<const T*>(kept), blocks, n.dim, g.d_weight, device);
}

/// body(T{}, Team{}): the narrowest team that holds a row.
template <typename Body>
void with_team(const GatedRmsNorm& n, const Device& device, Body&& body) {
  const CurrentDevice current(device.index);
  with_arithmetic(n.x.dtype, [&](auto zero) {
    if (n.dim <= 128) return body(zero, Team<false, 128>{});
    if (n.dim <= 512) return body(zero, Team<false, 512>{});
    body(zero, Team<true, kMaxNormDim>{});
  });
}

}  // namespace

void gated_rms_norm(const GatedRmsNorm& norm, const View& y, const Device& device) {
  if (vectors::takes(norm, {&norm.x, &y}, {&norm.gate})) return vectors::forward(norm, y, device);
  with_team(norm, device, [&]<typename T, typename TeamOf>(T, TeamOf) { forward_as<T, TeamOf>(norm, y, device); });
}

void gated_rms_norm_backward(const GatedRmsNorm& norm, const GatedRmsNormGradients& gradients, const View& y,
                             const Device& device) {
  if (given(gradients.d_x) &&
      vectors::takes(norm, {&norm.x, &gradients.d_y, &gradients.d_x, &y}, {&norm.gate, &gradients.d_gate})) {
    const float* kept = vectors::backward(norm, gradients, y, device);
    if (given(gradients.d_weight)) {
      sum_blocks(kept, vectors::blocks_of(norm, vectors::kRowsEach), norm.dim, gradients.d_weight, device);
    }
    return;
  }
  if (given(y)) gated_rms_norm(norm, y, device);
  with_team(norm, device,
            [&]<typename T, typename TeamOf>(T, TeamOf) { backward_as<T, TeamOf>(norm, gradients, device); });
}

void gated_rms_norm_backward(const GatedRmsNorm& norm, const GatedRmsNormGradients& gradients, const Device& device) {
  gated_rms_norm_backward(norm, gradients, {}, device);
}

}  // namespace gka::kernels::cuda
