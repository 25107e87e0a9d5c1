// Stores pairs of keys and values in one memory, asks for every value back, and says how close the answers are: with
// the ridge regression of Gated KalmaNet (alpha = 1) and without it (alpha = 0, linear attention). Then the gradient
// of that recall, to show that the layer trains.
#include <ATen/ATen.h>
#include <gka/gka.h>

#include <cstdio>

namespace {

constexpr int kPairs = 48;
constexpr int kWidth = 64;

at::Tensor unit_rows(const at::Tensor& x) { return x / x.norm(2, /*dim=*/-1, /*keepdim=*/true); }

double relative_error(const at::Tensor& a, const at::Tensor& b) { return ((a - b).norm() / b.norm()).item<double>(); }

/// What the memory answers when asked for `keys`. beta = 0 writes nothing, so asking does not disturb it.
at::Tensor recall(const at::Tensor& keys, const gka::State& memory, double alpha) {
  const auto gate = at::zeros({1, kPairs, 1});
  const auto no_values = at::zeros({1, kPairs, 1, kWidth});
  return gka::gated_kalmanet(keys, keys, no_values, {}, gate, gate + alpha, {.initial_state = memory}).o;
}

}  // namespace

int main() {
  at::manual_seed(1);
  const auto keys = unit_rows(at::randn({1, kPairs, 1, kWidth}));  // [batch, tokens, heads, channels]
  auto values = at::randn({1, kPairs, 1, kWidth});

  const auto written = gka::gated_kalmanet(keys, keys, values, {}, {}, {}, {.output_final_state = true});
  const double kalman = relative_error(recall(keys, written.final_state, 1.0), values);
  const double linear = relative_error(recall(keys, written.final_state, 0.0), values);
  std::printf("gka %s: %d pairs in a memory of width %d\n", gka::version(), kPairs, kWidth);
  std::printf("  relative error of recall, Gated KalmaNet    %.3f\n", kalman);
  std::printf("  relative error of recall, linear attention  %.3f\n", linear);

  values.requires_grad_();
  const auto answers = gka::gated_kalmanet(keys, keys, values).o;
  (answers - values).square().mean().backward();
  std::printf("  gradient of the recall loss for the values  %.3e\n", values.grad().norm().item<double>());
  return kalman < linear ? 0 : 1;
}
