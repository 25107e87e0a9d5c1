// The gated RMS norm, one row at a time: y = r x ⊙ w ⊙ act(gate) with r = (mean(x²) + eps)^−½. With e = dy ⊙ w ⊙
// act(gate), dx = r e − r³ mean(x ⊙ e) x.
#include "gka/block_kernels.h"
#include "kernels/checks.h"
#include "kernels/reference/activation.h"
#include "kernels/reference/element.h"
#include "kernels/reference/matrix.h"

namespace gka::kernels::reference {
namespace {

template <typename Body>
void for_each_row(const GatedRmsNorm& n, Body body) {
  for (std::int64_t b = 0; b < n.batch; ++b)
    for (std::int64_t t = 0; t < n.tokens; ++t)
      for (std::int64_t h = 0; h < n.heads; ++h) body([=](const View& view) { return offset(view, b, t, h); });
}

Activated gate_of(const GatedRmsNorm& n, std::int64_t at) {
  if (!n.gate) return {.value = 1, .slope = 0};
  return activate(n.activation, read_element(n.gate, at, 0));
}

template <typename At>
double inverse_root(const GatedRmsNorm& n, At at) {
  double squares = 0;
  for (std::int64_t i = 0; i < n.dim; ++i) {
    const double x = read_element(n.x, at(n.x) + i, 0);
    squares += x * x;
  }
  return 1 / std::sqrt(squares / static_cast<double>(n.dim) + n.eps);
}

}  // namespace

void gated_rms_norm(const GatedRmsNorm& n, const View& y) {
  check(n, y);
  for_each_row(n, [&](auto at) {
    const double r = inverse_root(n, at);
    for (std::int64_t i = 0; i < n.dim; ++i) {
      const double x = read_element(n.x, at(n.x) + i, 0);
      write_element(y, at(y) + i, x * r * read_element(n.weight, i, 1) * gate_of(n, at(n.gate) + i).value);
    }
  });
}

void gated_rms_norm_backward(const GatedRmsNorm& n, const GatedRmsNormGradients& g) {
  check(n, g);
  Vector d_weight(static_cast<std::size_t>(n.dim), 0.0);
  for_each_row(n, [&](auto at) {
    const double r = inverse_root(n, at);
    double along = 0;  // mean(x ⊙ e)
    for (std::int64_t i = 0; i < n.dim; ++i) {
      const double e =
          read_element(g.d_y, at(g.d_y) + i, 0) * read_element(n.weight, i, 1) * gate_of(n, at(n.gate) + i).value;
      along += e * read_element(n.x, at(n.x) + i, 0) / static_cast<double>(n.dim);
    }
    for (std::int64_t i = 0; i < n.dim; ++i) {
      const double x = read_element(n.x, at(n.x) + i, 0), d_y = read_element(g.d_y, at(g.d_y) + i, 0),
                   w = read_element(n.weight, i, 1);
      const Activated gate = gate_of(n, at(n.gate) + i);
      write_element(g.d_x, at(g.d_x) + i, r * d_y * w * gate.value - r * r * r * along * x);
      write_element(g.d_gate, at(g.d_gate) + i, d_y * x * r * w * gate.slope);
      d_weight[static_cast<std::size_t>(i)] += d_y * x * r * gate.value;
    }
  });
  for (std::int64_t i = 0; i < n.dim; ++i) write_element(g.d_weight, i, d_weight[static_cast<std::size_t>(i)]);
}

}  // namespace gka::kernels::reference
