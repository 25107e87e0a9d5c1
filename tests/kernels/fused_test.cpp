// The decoder's fused operations, their CUDA sources on the host: against the formulas in float64.
#define cuda cuda_on_host
#include "kernels/cuda/add_norm.cu"
#include "kernels/cuda/cross_entropy.cu"
#include "kernels/cuda/gated_skip.cu"
#include "kernels/cuda/gates.cu"
#include "kernels/cuda/rotary.cu"
#include "kernels/cuda/swiglu.cu"
#undef cuda

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cuda_on_host/scratch.h"

namespace gka::kernels::test {
namespace {

using Floats = std::vector<float>;

Floats draw(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  Floats values(count);
  for (auto& value : values) value = 2 * normal(engine);
  return values;
}

template <typename Body>
void on_host(Body&& body) {
  with_scratch<cuda_on_host::Device>(body);
}

double silu(double z) { return z / (1 + std::exp(-z)); }

TEST(Fused, SwiGluIsItsFormulaAndItsGradientTheDifferenceQuotient) {
  // Gate and up side by side in rows of 40.
  constexpr int kRows = 3, kWidth = 16, kStride = 40;
  const auto both = draw(kRows * kStride, 1), d_y = draw(kRows * kWidth, 3);
  Floats y(kRows * kWidth), again(kRows * kWidth), d_both(kRows * kStride, 7.0f);
  const cuda_on_host::SwiGlu call{.rows = kRows,
                                  .width = kWidth,
                                  .stride = kStride,
                                  .dtype = DType::float32,
                                  .gate = both.data(),
                                  .up = both.data() + kWidth};
  on_host([&](const auto& device) {
    cuda_on_host::swiglu(call, y.data(), device);
    cuda_on_host::swiglu_backward(
        call, {.d_y = d_y.data(), .d_gate = d_both.data(), .d_up = d_both.data() + kWidth, .y = again.data()}, device);
  });
  EXPECT_EQ(again, y);
  for (int i = 0; i < kRows * kWidth; ++i) {
    const int at = i / kWidth * kStride + i % kWidth;
    const double gate = both[at], up = both[at + kWidth], h = 1e-5;
    const double slope = (silu(gate + h) - silu(gate - h)) / (2 * h);
    EXPECT_NEAR(y[i], silu(gate) * up, 1e-5);
    EXPECT_NEAR(d_both[at + kWidth], d_y[i] * silu(gate), 1e-5);
    EXPECT_NEAR(d_both[at], d_y[i] * up * slope, 1e-5);
  }
  EXPECT_EQ(d_both[2 * kWidth], 7.0f);  // what lies behind them stays
}

TEST(Fused, AGatedSkipIsItsFormulaAndItsGradientsDifferenceQuotients) {
  constexpr int kRows = 70, kHeads = 3, kHeadDim = 16, kWidth = kHeads * kHeadDim;  // more than one stretch of rows
  constexpr int kX = kWidth + 8, kV = kWidth, kGate = kWidth + 16;                  // strides
  const auto x = draw(kRows * kX, 31), v = draw(kRows * kV, 32), gate = draw(kRows * kGate, 33);
  const auto skip = draw(kHeads, 34), d_y = draw(kRows * kWidth, 35);
  Floats y(d_y.size()), d_x(y), d_v(y), d_gate(y), parts(2 * kWidth / 8);
  const cuda_on_host::GatedSkip call{.rows = kRows,
                                     .width = kWidth,
                                     .head_dim = kHeadDim,
                                     .x_stride = kX,
                                     .v_stride = kV,
                                     .gate_stride = kGate,
                                     .dtype = DType::float32,
                                     .x = x.data(),
                                     .v = v.data(),
                                     .gate = gate.data(),
                                     .skip = skip.data()};
  ASSERT_EQ(call.stretches(), 2);
  on_host([&](const auto& device) {
    cuda_on_host::gated_skip(call, y.data(), device);
    cuda_on_host::gated_skip_backward(
        call,
        {.d_y = d_y.data(), .d_x = d_x.data(), .d_v = d_v.data(), .d_gate = d_gate.data(), .d_skip = parts.data()},
        device);
  });
  double d_skip[kHeads] = {}, want[kHeads] = {};
  for (int i = 0; i < kRows * kWidth; ++i) {
    const int row = i / kWidth, column = i % kWidth, head = column / kHeadDim;
    const double value = v[row * kV + column], z = gate[row * kGate + column], h = 1e-5;
    const double sum = x[row * kX + column] + skip[head] * value, slope = (silu(z + h) - silu(z - h)) / (2 * h);
    EXPECT_NEAR(y[i], sum * silu(z), 1e-4);
    EXPECT_NEAR(d_x[i], d_y[i] * silu(z), 1e-4);
    EXPECT_NEAR(d_v[i], d_y[i] * silu(z) * skip[head], 1e-4);
    EXPECT_NEAR(d_gate[i], d_y[i] * sum * slope, 1e-4);
    want[head] += d_y[i] * silu(z) * value;
  }
  for (std::size_t i = 0; i < parts.size(); ++i) d_skip[i % (kWidth / 8) / (kHeadDim / 8)] += parts[i];
  for (int head = 0; head < kHeads; ++head) EXPECT_NEAR(d_skip[head], want[head], 1e-2);
}

/// Of rows of sums: Σ slopes ⊙ (sum + the norm of it), so that both results have a gradient.
double through_norm(const std::vector<double>& x, const Floats& weight, const Floats& d_sum, const Floats& d_normed,
                    double eps) {
  const auto width = weight.size();
  double total = 0;
  for (std::size_t row = 0; row < x.size(); row += width) {
    double squares = 0;
    for (std::size_t c = 0; c < width; ++c) squares += x[row + c] * x[row + c];
    const double root = 1 / std::sqrt(squares / static_cast<double>(width) + eps);
    for (std::size_t c = 0; c < width; ++c) {
      total += d_sum[row + c] * x[row + c] + d_normed[row + c] * x[row + c] * root * weight[c];
    }
  }
  return total;
}

TEST(Fused, ASumAndItsNormAreTheirFormulasAndTheirGradientsDifferenceQuotients) {
  constexpr double kEps = 1e-3, kStep = 1e-5;
  for (const int width : {8, 264, 1032}) {  // one for each kind of team
    const int rows = width < 100 ? 20 : 3;
    const auto size = static_cast<std::size_t>(rows * width);
    const auto x = draw(size, 11), y = draw(size, 12), d_sum = draw(size, 14), d_normed = draw(size, 15);
    auto weight = draw(static_cast<std::size_t>(width), 13);
    Floats sum(size), normed(size), alone(size), d_x(size), d_weight(weight.size());
    cuda_on_host::AddNorm call{.rows = rows,
                               .width = width,
                               .dtype = DType::float32,
                               .x = x.data(),
                               .y = y.data(),
                               .weight = weight.data(),
                               .eps = static_cast<float>(kEps)};
    on_host([&](const auto& device) {
      cuda_on_host::add_norm(call, sum.data(), normed.data(), device);
      call.x = sum.data(), call.y = nullptr;
      cuda_on_host::add_norm(call, nullptr, alone.data(), device);
      cuda_on_host::add_norm_backward(
          call, {.d_sum = d_sum.data(), .d_normed = d_normed.data(), .d_x = d_x.data(), .d_weight = d_weight.data()},
          device);
    });
    EXPECT_EQ(alone, normed);
    std::vector<double> at(sum.begin(), sum.end());
    const auto value = [&] { return through_norm(at, weight, d_sum, d_normed, kEps); };
    double expected = 0;
    for (std::size_t i = 0; i < size; ++i) {
      EXPECT_EQ(sum[i], x[i] + y[i]);
      expected += static_cast<double>(d_sum[i]) * sum[i] + static_cast<double>(d_normed[i]) * normed[i];
    }
    EXPECT_NEAR(value(), expected, 1e-5 * static_cast<double>(size));
    for (std::size_t i = 0; i < size; i += 7) {
      const double here = at[i];
      at[i] = here + kStep;
      const double above = value();
      at[i] = here - kStep;
      EXPECT_NEAR(d_x[i], (above - value()) / (2 * kStep), 1e-4) << width << " " << i;
      at[i] = here;
    }
    for (std::size_t c = 0; c < weight.size(); c += 5) {  // the value is linear in the weight
      double slope = 0;
      for (std::size_t i = c; i < size; i += weight.size()) slope += d_normed[i] * normed[i] / weight[c];
      EXPECT_NEAR(d_weight[c], slope, 1e-4) << width << " " << c;
    }
  }
}

/// Of gate kind k (decay, σ, squared σ) at z.
double gate_at(int kind, double z, double a_log) {
  const double open = 1 / (1 + std::exp(-z));
  if (kind == 0) return -std::exp(a_log) * std::log1p(std::exp(z));
  return kind == 1 ? open : (open + 1e-6) * (open + 1e-6);
}

TEST(Fused, GatesAreTheirFormulasAndTheirGradientsDifferenceQuotients) {
  constexpr int kTokens = 150, kHeads = 3, kKinds = 3, kColumns = kKinds * kHeads;  // more than one stretch of tokens
  constexpr int kStride = kColumns + 5;
  const auto projected = draw(kTokens * kStride, 21), bias = draw(kColumns, 22), a_log = draw(kHeads, 23);
  const auto d_value = draw(kKinds * kTokens * kHeads, 24);
  Floats value(d_value.size()), d_projected(kTokens * kColumns), d_bias(kColumns), d_a_log(kColumns);
  cuda_on_host::Gates call{.tokens = kTokens,
                           .heads = kHeads,
                           .count = kKinds,
                           .dtype = DType::float32,
                           .projected = projected.data(),
                           .stride = kStride};
  for (int kind = 0; kind < kKinds; ++kind) {
    call.kinds[kind] = {.gate = static_cast<cuda_on_host::Gate>(kind),
                        .bias = bias.data() + kind * kHeads,
                        .a_log = a_log.data(),
                        .value = value.data() + kind * kTokens * kHeads,
                        .d_value = d_value.data() + kind * kTokens * kHeads};
  }
  on_host([&](const auto& device) {
    cuda_on_host::gates(call, device);
    cuda_on_host::gates_backward(call, d_projected.data(), d_bias.data(), d_a_log.data(), device);
  });
  std::vector<double> to_bias(kColumns), to_a_log(kHeads);
  for (int at = 0; at < kTokens * kColumns; ++at) {
    const int token = at / kColumns, column = at % kColumns, kind = column / kHeads, head = column % kHeads;
    const int place = (kind * kTokens + token) * kHeads + head;
    const double z = static_cast<double>(projected[token * kStride + column]) + bias[column], h = 1e-5;
    const double slope = (gate_at(kind, z + h, a_log[head]) - gate_at(kind, z - h, a_log[head])) / (2 * h);
    EXPECT_NEAR(value[place], gate_at(kind, z, a_log[head]), 1e-5 * (1 + std::abs(value[place])));
    EXPECT_NEAR(d_projected[at], d_value[place] * slope, 1e-4 * (1 + std::abs(slope)));
    to_bias[column] += d_value[place] * slope;
    if (kind == 0) to_a_log[head] += d_value[place] * gate_at(kind, z, a_log[head]);
  }
  for (int column = 0; column < kColumns; ++column) EXPECT_NEAR(d_bias[column], to_bias[column], 1e-2);
  for (int head = 0; head < kHeads; ++head) EXPECT_NEAR(d_a_log[head], to_a_log[head], 1e-2);
}

TEST(Fused, ARotationTurnsEveryPairByItsTokensAngleAndBack) {
  constexpr int kTokens = 3, kHeads = 2, kHalf = 8, kSize = kTokens * kHeads * 2 * kHalf;
  const auto x = draw(kSize, 4), angles = draw(kTokens * kHalf, 5);
  Floats cos, sin, y(kSize), back(kSize);
  for (const auto angle : angles) cos.push_back(std::cos(angle)), sin.push_back(std::sin(angle));
  cuda_on_host::Rotation call{.tokens = kTokens,
                              .heads = kHeads,
                              .half = kHalf,
                              .dtype = DType::float32,
                              .x = x.data(),
                              .cos = cos.data(),
                              .sin = sin.data()};
  on_host([&](const auto& device) {
    cuda_on_host::rotate(call, y.data(), device);
    call.x = y.data(), call.sign = -1;
    cuda_on_host::rotate(call, back.data(), device);
  });
  for (int row = 0; row < kTokens * kHeads; ++row) {
    for (int i = 0; i < kHalf; ++i) {
      const int low = row * 2 * kHalf + i, high = low + kHalf;
      const double angle = angles[row / kHeads * kHalf + i];
      EXPECT_NEAR(y[low], x[low] * std::cos(angle) - x[high] * std::sin(angle), 1e-5);
      EXPECT_NEAR(y[high], x[high] * std::cos(angle) + x[low] * std::sin(angle), 1e-5);
      EXPECT_NEAR(back[low], x[low], 1e-5);
      EXPECT_NEAR(back[high], x[high], 1e-5);
    }
  }
}

/// Rows that shared memory holds, and rows that it does not.
class CrossEntropy : public testing::TestWithParam<int> {};

TEST_P(CrossEntropy, LeavesItsGradientInThePlaceOfTheLogits) {
  constexpr int kRows = 4;
  const int kClasses = GetParam(), kStride = kClasses + 5;
  const std::int64_t labels[kRows] = {0, 18, -100, 7};
  const auto before = draw(kRows * kStride, 6);
  const float scale = 0.5f;
  auto logits = before;
  Floats losses(kRows);
  std::int64_t predicted[kRows];
  const cuda_on_host::CrossEntropy call{.rows = kRows,
                                        .classes = kClasses,
                                        .stride = kStride,
                                        .dtype = DType::float32,
                                        .logits = logits.data(),
                                        .labels = labels,
                                        .scale = &scale,
                                        .losses = losses.data(),
                                        .predicted = predicted};
  on_host([&](const auto& device) { cuda_on_host::cross_entropy(call, device); });
  for (int row = 0; row < kRows; ++row) {
    const float* z = before.data() + row * kStride;
    const float* gradient = logits.data() + row * kStride;
    double sum = 0;
    for (int i = 0; i < kClasses; ++i) sum += std::exp(static_cast<double>(z[i]));
    const bool counts = labels[row] >= 0;
    EXPECT_NEAR(losses[row], counts ? std::log(sum) - z[labels[row]] : 0, 1e-5);
    EXPECT_EQ(predicted[row], std::max_element(z, z + kClasses) - z);
    for (int i = 0; i < kStride; ++i) {
      const double slope = std::exp(static_cast<double>(z[i])) / sum - (i == labels[row] ? 1 : 0);
      EXPECT_NEAR(gradient[i], counts && i < kClasses ? scale * slope : 0, 1e-6) << row << " " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, CrossEntropy, testing::Values(19, 20'003));

TEST(Fused, WithoutAScaleTheLogitsStayAndANaNReachesTheLoss) {
  auto logits = draw(16, 7);
  logits[11] = std::nanf("");
  const auto before = logits;
  const std::int64_t labels[2] = {3, 3};
  Floats losses(2);
  on_host([&](const auto& device) {
    cuda_on_host::cross_entropy({.rows = 2,
                                 .classes = 8,
                                 .stride = 8,
                                 .dtype = DType::float32,
                                 .logits = logits.data(),
                                 .labels = labels,
                                 .losses = losses.data()},
                                device);
  });
  EXPECT_TRUE(std::isfinite(losses[0]));
  EXPECT_TRUE(std::isnan(losses[1]));
  EXPECT_EQ(std::memcmp(logits.data(), before.data(), 16 * sizeof(float)), 0);
}

}  // namespace
}  // namespace gka::kernels::test
