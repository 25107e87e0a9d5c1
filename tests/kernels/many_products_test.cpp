// Products of many rows: the kernel's own source on the host, with all its threads, against sums in float64.
#define cuda cuda_with_threads
#include "kernels/cuda/many_products.cu"
#undef cuda

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <vector>

namespace gka::kernels::test {
namespace {

using cuda_with_threads::ManyProducts;

struct ManyCase {
  std::int64_t rows, depth;
  std::vector<std::int64_t> outputs;
};

double number(std::uint16_t half) { return std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16); }

TEST(ManyProducts, AreTheSumsOfProductsWithWeightsAsTheyAreStored) {
  const ManyCase cases[]{
      {.rows = 9, .depth = 256, .outputs = {64, 3}},  // the depth in parts
      {.rows = 33, .depth = 256, .outputs = {70}},    // an end of a tile
      {.rows = 64, .depth = 512, .outputs = {8, 64, 16}},
  };
  for (const auto& c : cases) {
    std::mt19937 random(4);
    std::normal_distribution<float> normal;
    const auto halves = [&](std::int64_t count) {
      std::vector<std::uint16_t> drawn(static_cast<std::size_t>(count));
      for (auto& half : drawn) half = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(normal(random)) >> 16);
      return drawn;
    };
    const auto x = halves(c.rows * c.depth);
    ManyProducts call{.rows = c.rows, .depth = c.depth, .x = x.data()};
    std::vector<std::vector<std::uint16_t>> weights, y;
    std::vector<std::vector<char>> bytes;
    std::vector<std::vector<float>> exact;
    for (const auto outputs : c.outputs) {
      weights.push_back(halves(outputs * c.depth));
      y.emplace_back(static_cast<std::size_t>(c.rows * outputs), 0x7fc0);
      bytes.emplace_back(static_cast<std::size_t>(outputs * int8_row_bytes(c.depth)));
      auto& numbers = exact.emplace_back(weights.back().size());
      for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(number(weights.back()[i]));
      for (std::int64_t row = 0; row < outputs; ++row) {
        void* stored = bytes.back().data() + row * int8_row_bytes(c.depth);
        to_int8(numbers.data() + row * c.depth, c.depth, stored);
        from_int8(stored, c.depth, numbers.data() + row * c.depth);
      }
    }
    for (const auto outputs : c.outputs) {
      const auto m = static_cast<std::size_t>(call.count++);
      call.of[m] = {.weight = bytes[m].data(), .y = y[m].data(), .outputs = outputs};
    }
    std::vector<std::unique_ptr<char[]>> scratch;
    cuda_with_threads::Device device;
    device.allocate = [&](std::size_t size) {
      scratch.push_back(std::make_unique<char[]>(size));
      return scratch.back().get();
    };
    cuda_with_threads::many_products(call, device);
    for (std::size_t m = 0; m < c.outputs.size(); ++m) {
      for (std::int64_t row = 0; row < c.rows; ++row) {
        for (std::int64_t output = 0; output < c.outputs[m]; ++output) {
          double sum = 0, size = 0;
          for (std::int64_t d = 0; d < c.depth; ++d) {
            const double term = number(x[static_cast<std::size_t>(row * c.depth + d)]) *
                                exact[m][static_cast<std::size_t>(output * c.depth + d)];
            sum += term;
            size += std::abs(term);
          }
          ASSERT_NEAR(number(y[m][static_cast<std::size_t>(row * c.outputs[m] + output)]), sum,
                      4e-3 * std::abs(sum) + 1e-6 * size)
              << m << " " << row << " " << output;
        }
      }
    }
  }
}

TEST(ManyProducts, CutTheDepthWhereOutputsAreFewAndNeverIntoNothing) {
  ManyProducts call{.rows = 64, .depth = 2816, .count = 1};
  for (const std::int64_t outputs : {8, 1024, 4096, 50257}) {
    call.of[0].outputs = outputs;
    const auto splits = call.splits(), groups = call.depth / ManyProducts::kDeep, each = (groups + splits - 1) / splits;
    EXPECT_LT((splits - 1) * each, groups) << outputs;
    EXPECT_GE(each, 2) << outputs;
    EXPECT_EQ(splits == 1, outputs > 8192) << outputs;
  }
}

}  // namespace
}  // namespace gka::kernels::test
