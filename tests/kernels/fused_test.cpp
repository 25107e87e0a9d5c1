// The decoder's fused operations, their CUDA sources on the host: against the formulas in float64.
#define cuda cuda_on_host
#include "kernels/cuda/fused.cu"
#undef cuda

#include <gtest/gtest.h>

#include <cmath>
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
  const auto gate = draw(40, 1), up = draw(40, 2), d_y = draw(40, 3);
  Floats y(40), d_gate(40), d_up(40);
  const cuda_on_host::SwiGlu call{.size = 40, .dtype = DType::float32, .gate = gate.data(), .up = up.data()};
  on_host([&](const auto& device) {
    cuda_on_host::swiglu(call, y.data(), device);
    cuda_on_host::swiglu_backward(call, d_y.data(), d_gate.data(), d_up.data(), device);
  });
  for (int i = 0; i < 40; ++i) {
    const double h = 1e-5, slope = (silu(gate[i] + h) - silu(gate[i] - h)) / (2 * h);
    EXPECT_NEAR(y[i], silu(gate[i]) * up[i], 1e-5);
    EXPECT_NEAR(d_up[i], d_y[i] * silu(gate[i]), 1e-5);
    EXPECT_NEAR(d_gate[i], d_y[i] * up[i] * slope, 1e-5);
  }
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

TEST(Fused, CrossEntropyLeavesItsGradientInThePlaceOfTheLogits) {
  constexpr int kRows = 4, kClasses = 19, kStride = 24;
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
