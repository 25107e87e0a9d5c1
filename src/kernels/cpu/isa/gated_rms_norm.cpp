// The gated RMS norm, a row at a time, channels as lanes. The weight's gradient, which sums over rows, is summed over
// runs of rows that are cut the same way for every thread count, and then over the runs in their order.
#include <memory>
#include <vector>

#include "kernels/cpu/backend.h"
#include "kernels/cpu/isa/activation.h"
#include "kernels/cpu/isa/chunk.h"
#include "kernels/cpu/isa/entry.h"
#include "kernels/cpu/plan.h"

namespace gka::kernels::cpu::GKA_ISA {
namespace {

/// Elements of a run of rows, about: 32 KiB of float32.
inline constexpr std::int64_t kRunElements = 8192;

std::int64_t rows_of(const GatedRmsNorm& n) { return n.batch * n.tokens * n.heads; }
std::int64_t rows_per_run(const GatedRmsNorm& n) { return std::max<std::int64_t>(1, kRunElements / n.dim); }
std::int64_t runs_of(const GatedRmsNorm& n) { return (rows_of(n) + rows_per_run(n) - 1) / rows_per_run(n); }

std::int64_t offset_of_row(const GatedRmsNorm& n, const View& view, std::int64_t row) {
  return offset(view, row / n.heads / n.tokens, row / n.heads % n.tokens, row % n.heads);
}

template <typename T>
struct Rows {
  int size;
  Buffer<T> x, gate, weight, d_y, result, d_gate, d_weight;

  Rows(const GatedRmsNorm& n, bool backward) : size(padded<T>(n.dim)) {
    for (auto* buffer : {&x, &gate, &weight, &result}) zeros(*buffer);
    if (backward) {
      for (auto* buffer : {&d_y, &d_gate, &d_weight}) zeros(*buffer);
    }
    if (n.weight) {
      read_row(n.weight, 0, static_cast<int>(n.dim), weight.get());
    } else {
      std::fill_n(weight.get(), n.dim, T{1});
    }
  }

  void zeros(Buffer<T>& buffer) const {
    buffer.resize(size);
    std::fill_n(buffer.get(), size, T{0});
  }
};

template <typename T>
T inverse_root(const GatedRmsNorm& n, const Rows<T>& r) {
  Vec<T> squares = {};
  for (int i = 0; i < r.size; i += kLanes<T>) squares += load(r.x + i) * load(r.x + i);
  return T(1) / std::sqrt(sum_lanes<T>(squares) / static_cast<T>(n.dim) + static_cast<T>(n.eps));
}

template <typename T>
void forward_row(const GatedRmsNorm& n, const View& y, std::int64_t row, Rows<T>& r) {
  const int dim = static_cast<int>(n.dim);
  read_row(n.x, offset_of_row(n, n.x, row), dim, r.x.get());
  if (n.gate) read_row(n.gate, offset_of_row(n, n.gate, row), dim, r.gate.get());
  const T root = inverse_root(n, r);
  for (int i = 0; i < r.size; i += kLanes<T>) {
    Vec<T> value = load(r.x + i) * root * load(r.weight + i);
    if (n.gate) value *= activated<T>(n.activation, load(r.gate + i));
    store(r.result + i, value);
  }
  write_row(y, offset_of_row(n, y, row), dim, r.result.get());
}

/// dx = r e − r³ mean(x ⊙ e) x with e = dy ⊙ w ⊙ act(gate).
template <typename T>
void backward_row(const GatedRmsNorm& n, const GatedRmsNormGradients& g, std::int64_t row, Rows<T>& r) {
  const int dim = static_cast<int>(n.dim);
  read_row(n.x, offset_of_row(n, n.x, row), dim, r.x.get());
  read_row(g.d_y, offset_of_row(n, g.d_y, row), dim, r.d_y.get());
  if (n.gate) read_row(n.gate, offset_of_row(n, n.gate, row), dim, r.gate.get());
  const T root = inverse_root(n, r);
  Vec<T> along = {};
  for (int i = 0; i < r.size; i += kLanes<T>) {
    const Vec<T> x = load(r.x + i), d_y = load(r.d_y + i), weight = load(r.weight + i);
    Vec<T> passed = d_y;
    if (n.gate) {
      const Activated<T> gate = activate<T>(n.activation, load(r.gate + i));
      passed *= gate.value;
      store(r.d_gate + i, d_y * x * root * weight * gate.slope);
    }
    const Vec<T> e = passed * weight;
    along += x * e;
    store(r.result + i, e);
    store(r.d_weight + i, load(r.d_weight + i) + passed * x * root);
  }
  const T bend = root * root * root * sum_lanes<T>(along) / static_cast<T>(n.dim);
  for (int i = 0; i < r.size; i += kLanes<T>) {
    store(r.result + i, load(r.result + i) * root - load(r.x + i) * bend);
  }
  if (g.d_x) write_row(g.d_x, offset_of_row(n, g.d_x, row), dim, r.result.get());
  if (g.d_gate) write_row(g.d_gate, offset_of_row(n, g.d_gate, row), dim, r.d_gate.get());
}

template <typename Body>
void for_each_row(const GatedRmsNorm& n, std::int64_t run, Body&& body) {
  const std::int64_t begin = run * rows_per_run(n), end = std::min(begin + rows_per_run(n), rows_of(n));
  for (std::int64_t row = begin; row < end; ++row) body(row);
}

template <typename T>
void forward_as(const GatedRmsNorm& n, const View& y, const Executor& executor) {
  parallel_tasks(
      executor, runs_of(n), [&] { return std::make_unique<Rows<T>>(n, false); },
      [&](std::int64_t run, Rows<T>& r) {
        for_each_row(n, run, [&](std::int64_t row) { forward_row(n, y, row, r); });
      });
}

template <typename T>
void backward_as(const GatedRmsNorm& n, const GatedRmsNormGradients& g, const Executor& executor) {
  const std::int64_t runs = runs_of(n);
  Buffer<T> sums(runs * n.dim);
  parallel_tasks(
      executor, runs, [&] { return std::make_unique<Rows<T>>(n, true); },
      [&](std::int64_t run, Rows<T>& r) {
        std::fill_n(r.d_weight.get(), r.size, T{0});
        for_each_row(n, run, [&](std::int64_t row) { backward_row(n, g, row, r); });
        std::copy_n(r.d_weight.get(), n.dim, sums + run * n.dim);
      });
  if (!g.d_weight) return;
  std::vector<double> total(static_cast<std::size_t>(n.dim), 0.0);
  for (std::int64_t run = 0; run < runs; ++run) {
    for (std::int64_t i = 0; i < n.dim; ++i) total[static_cast<std::size_t>(i)] += sums[run * n.dim + i];
  }
  write_row(g.d_weight, 0, static_cast<int>(n.dim), total.data());
}

}  // namespace

void gated_rms_norm(const GatedRmsNorm& norm, const View& y, const Executor& executor) {
  const Executor workers = for_elements(executor, rows_of(norm) * norm.dim);
  norm.x.dtype == DType::float64 ? forward_as<double>(norm, y, workers) : forward_as<float>(norm, y, workers);
}

void gated_rms_norm_backward(const GatedRmsNorm& norm, const GatedRmsNormGradients& gradients,
                             const Executor& executor) {
  const Executor workers = for_elements(executor, rows_of(norm) * norm.dim);
  norm.x.dtype == DType::float64 ? backward_as<double>(norm, gradients, workers)
                                 : backward_as<float>(norm, gradients, workers);
}

}  // namespace gka::kernels::cpu::GKA_ISA
