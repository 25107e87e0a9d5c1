// GKA's gates from one projection of all of them, and what goes back to the projection, biases and A_log. Sums over
// tokens go by block and then over the blocks in their order, so the same input gives the same bits.
#include "kernels/cuda/fused.cuh"
#include "kernels/cuda/gates.cuh"

namespace gka::kernels::cuda {
namespace {

/// A thread per token and column.
template <DType kType>
__global__ void __launch_bounds__(kThreads) open_gates(const __grid_constant__ Gates g) {
  wait_for_earlier();
  const int columns = g.count * g.heads;
  const std::int64_t at = own_vector(), token = quotient(at, columns);
  if (token >= g.tokens) return;
  const int column = static_cast<int>(at - token * columns), kind = column / g.heads, head = column % g.heads;
  g.kinds[kind].value[token * g.heads + head] = open_gate_of<kType>(g, token, kind, head);
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

}  // namespace

void gates(const Gates& g, const Device& device) {
  with_type_of(g.dtype, device, [&](auto type) {
    launch_early<kThreads>(open_gates<decltype(type)::type>, grid_for(g.tokens * g.count * g.heads), 0, device.index,
                           device.stream, g);
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

}  // namespace gka::kernels::cuda
