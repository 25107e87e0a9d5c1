// Products of few rows: the kernel's own source on the host, with all its threads, against sums in float64.
#define cuda cuda_with_threads
#include "kernels/cuda/small_products.cu"
#undef cuda

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cpu_support.h"

namespace gka::kernels::test {
namespace {

using Multiply = void (*)(const cuda_with_threads::SmallProducts&);

/// Weights that wait in registers where they fit, as they do in the cases here; int8 as below.
void as_chosen(const cuda_with_threads::SmallProducts& p) { cuda_with_threads::small_products(p, {}); }
/// Weights through rings of shared memory, whatever fits.
void through_rings(const cuda_with_threads::SmallProducts& p) {
  using namespace cuda_with_threads::few;
  p.int8 ? start_with<Bytes>(p, {}) : start_with<Plain>(p, {});
}

/// By each of the kernels.
class SmallProducts : public testing::TestWithParam<Multiply> {
 public:
  static inline Multiply multiply = nullptr;

 protected:
  void SetUp() override { multiply = GetParam(); }
};

std::vector<float> draw(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (auto& value : values) value = 2 * normal(engine);
  return values;
}

double silu(double z) { return z / (1 + std::exp(-z)); }

/// As a number of 16 bits keeps it, and those bits.
std::uint16_t to_bfloat16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
float from_bfloat16(std::uint16_t half) {
  const std::uint32_t bits = std::uint32_t{half} << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
std::vector<std::uint16_t> draw_bfloat16(std::size_t count, unsigned seed) {
  std::vector<std::uint16_t> values;
  for (const float x : draw(count, seed)) values.push_back(to_bfloat16(x));
  return values;
}

struct SmallCase {
  static constexpr int kDepth = 72, kOutputs[3] = {5, 16, 1};
  std::vector<std::uint16_t> x = draw_bfloat16(8 * kDepth, 21), weights[3], y[3];
  SmallCase() {
    for (unsigned i = 0; i < 3; ++i) weights[i] = draw_bfloat16(static_cast<std::size_t>(kOutputs[i]) * kDepth, 22 + i);
  }
  /// Of so many rows of x.
  void run(int rows, int count, bool gated) {
    cuda_with_threads::SmallProducts call{.rows = rows, .depth = kDepth, .x = x.data(), .count = count, .gated = gated};
    for (int i = 0; i < count; ++i) {
      const auto outputs = static_cast<std::size_t>(gated ? kOutputs[0] : kOutputs[i]);
      y[i].assign(static_cast<std::size_t>(rows) * outputs, 0x7fc0);
      call.of[i] = {.weight = weights[i].data(), .y = y[i].data(), .outputs = static_cast<std::int64_t>(outputs)};
    }
    SmallProducts::multiply(call);
  }
  double exact(int which, int row, int output) const {
    double sum = 0;
    for (int c = 0; c < kDepth; ++c) {
      sum +=
          static_cast<double>(from_bfloat16(x[row * kDepth + c])) * from_bfloat16(weights[which][output * kDepth + c]);
    }
    return sum;
  }
};

TEST_P(SmallProducts, AreTheProductsAndARowsBitsDoNotDependOnTheOthers) {
  SmallCase one, all;
  one.run(1, 3, false);
  for (const int rows : {2, 4, 5, 8}) {
    all.run(rows, 3, false);
    for (int i = 0; i < 3; ++i) {
      const int outputs = SmallCase::kOutputs[i];
      for (int row = 0; row < rows; ++row) {
        for (int o = 0; o < outputs; ++o) {
          const double want = all.exact(i, row, o);
          EXPECT_NEAR(from_bfloat16(all.y[i][row * outputs + o]), want, 0.004 * std::abs(want) + 1e-3);
          EXPECT_TRUE(row > 0 || all.y[i][o] == one.y[i][o]) << rows << " rows";
        }
      }
    }
  }
}

TEST_P(SmallProducts, GatedIsSwiGluOfTheTwo) {
  SmallCase c;
  c.run(3, 2, true);
  for (int row = 0; row < 3; ++row) {
    for (int o = 0; o < SmallCase::kOutputs[0]; ++o) {
      const double want = silu(c.exact(0, row, o)) * c.exact(1, row, o);
      EXPECT_NEAR(from_bfloat16(c.y[0][row * SmallCase::kOutputs[0] + o]), want, 0.02 * std::abs(want) + 1e-2);
    }
  }
  EXPECT_EQ(c.y[1].front(), 0x7fc0) << "the second is not written";
}

/// With kOutputs outputs, three rows and the norm.
template <int kDepth, int kOutputs>
void expect_norm_and_stream() {
  constexpr int kRows = 3;
  const auto x = draw_bfloat16(kRows * kDepth, 41), stream = draw_bfloat16(kRows * kOutputs, 42);
  const auto norm = draw(kDepth, 43);
  const std::vector<std::uint16_t> weights[2]{draw_bfloat16(kOutputs * kDepth, 44),
                                              draw_bfloat16(kOutputs * kDepth, 45)};
  const auto exact = [&](int which, int row, int output) {
    double squares = 0, sum = 0;
    for (int c = 0; c < kDepth; ++c) {
      const double one = from_bfloat16(x[row * kDepth + c]);
      squares += one * one;
      sum += one * norm[c] * from_bfloat16(weights[which][output * kDepth + c]);
    }
    return sum / std::sqrt(squares / kDepth + 0.5);
  };
  for (const bool gated : {false, true}) {
    std::vector<std::uint16_t> y(kRows * kOutputs, 0x7fc0);
    cuda_with_threads::SmallProducts call{.rows = kRows,
                                          .depth = kDepth,
                                          .x = x.data(),
                                          .norm = norm.data(),
                                          .eps = 0.5F,
                                          .onto = gated ? nullptr : stream.data(),
                                          .count = gated ? 2 : 1,
                                          .gated = gated};
    for (int i = 0; i < call.count; ++i) call.of[i] = {.weight = weights[i].data(), .y = y.data(), .outputs = kOutputs};
    SmallProducts::multiply(call);
    for (int row = 0; row < kRows; ++row) {
      for (int o = 0; o < kOutputs; ++o) {
        const int at = row * kOutputs + o;
        const double product = exact(0, row, o);
        const double want = gated ? silu(product) * exact(1, row, o) : from_bfloat16(stream[at]) + product;
        // The normed row and the product are rounded on the way, and what one loses the other may enlarge.
        const double factor =
            gated && kDepth < 2056 ? std::max({1.0, std::abs(product), std::abs(exact(1, row, o))}) : 1;
        EXPECT_NEAR(from_bfloat16(y[at]), want, 0.02 * std::abs(want) + 0.3 * factor) << gated;
      }
    }
  }
}

TEST_P(SmallProducts, TakeTheNormOfTheirInputAndTheStreamTheyAreAddedToAlong) {
  expect_norm_and_stream<2056, 5>();  // more than a piece, and a part of one
  expect_norm_and_stream<520, 5>();
  expect_norm_and_stream<264, 70>();  // more outputs than blocks have at once
}

/// What the tests above run where weights wait in registers.
TEST(HeldProducts, HaveTheFormsThatTheirSizesAskFor) {
  constexpr int kBlocks = 132;
  const auto tile_of = [](std::int64_t depth, std::int64_t outputs, bool gated) {
    cuda_with_threads::SmallProducts call{.rows = 1, .depth = depth, .count = gated ? 2 : 1, .gated = gated};
    call.of[0].outputs = call.of[1].outputs = outputs;
    const auto* form = cuda_with_threads::held::find_form(call, kBlocks);
    return form != nullptr ? static_cast<int>(form->tile) : -1;
  };
  using cuda_with_threads::held::Tile;
  EXPECT_EQ(tile_of(1024, 4120, false), static_cast<int>(Tile::wide));
  EXPECT_EQ(tile_of(1024, 1024, false), static_cast<int>(Tile::narrow));
  EXPECT_EQ(tile_of(1024, 2816, true), static_cast<int>(Tile::gated));
  EXPECT_EQ(tile_of(2816, 1024, false), static_cast<int>(Tile::narrow));
  EXPECT_EQ(tile_of(1024, 50257, false), -1);
  EXPECT_EQ(tile_of(4096, 1024, false), -1);
}

TEST_P(SmallProducts, OfInt8WeightsAreThoseOfTheirNumbers) {
  constexpr int kDepth = SmallCase::kDepth, kOutputs = 6, kRows = 3;  // a group and a part of one
  SmallCase c;
  std::vector<std::int8_t> bytes[2];
  std::vector<float> numbers[2];
  for (unsigned i = 0; i < 2; ++i) {
    const auto wide = draw(kOutputs * kDepth, 31 + i);
    bytes[i].resize(static_cast<std::size_t>(kOutputs * int8_row_bytes(kDepth)));
    numbers[i].resize(wide.size());
    for (int o = 0; o < kOutputs; ++o) {
      auto* row = bytes[i].data() + o * int8_row_bytes(kDepth);
      to_int8(wide.data() + o * kDepth, kDepth, row);
      from_int8(row, kDepth, numbers[i].data() + o * kDepth);
    }
  }
  const auto exact = [&](int which, int row, int output) {
    double sum = 0;
    for (int k = 0; k < kDepth; ++k) {
      sum += static_cast<double>(from_bfloat16(c.x[row * kDepth + k])) * numbers[which][output * kDepth + k];
    }
    return sum;
  };
  for (const bool gated : {false, true}) {
    std::vector<std::uint16_t> y[2];
    cuda_with_threads::SmallProducts call{
        .rows = kRows, .depth = kDepth, .int8 = true, .x = c.x.data(), .count = 2, .gated = gated};
    for (int i = 0; i < 2; ++i) {
      y[i].assign(kRows * kOutputs, 0x7fc0);
      call.of[i] = {.weight = bytes[i].data(), .y = y[i].data(), .outputs = kOutputs};
    }
    SmallProducts::multiply(call);
    for (int row = 0; row < kRows; ++row) {
      for (int o = 0; o < kOutputs; ++o) {
        const double a = exact(0, row, o), b = exact(1, row, o), want = gated ? silu(a) * b : a;
        EXPECT_NEAR(from_bfloat16(y[0][row * kOutputs + o]), want, 0.02 * std::abs(want) + 1e-2) << gated;
        EXPECT_TRUE(gated || std::abs(from_bfloat16(y[1][row * kOutputs + o]) - b) < 0.004 * std::abs(b) + 1e-3);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, SmallProducts, testing::Values(as_chosen, through_rings),
                         [](const auto& of) { return of.param == as_chosen ? "AsChosen" : "ThroughRings"; });

}  // namespace
}  // namespace gka::kernels::test
