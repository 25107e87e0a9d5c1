// Drawing a token from logits: the kernel's own source on the host, with all its threads, against the definition.
#define cuda cuda_with_threads
#include "kernels/cuda/sample.cu"
#undef cuda

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace gka::kernels::test {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

std::vector<float> random_logits(std::int64_t count) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> logits(static_cast<std::size_t>(count));
  for (auto& logit : logits) logit = random() % 7 == 0 ? kNever : normal(random);
  return logits;
}

std::vector<double> run(const std::vector<float>& logits, std::int64_t tokens, const std::vector<double>& how) {
  std::vector<double> drawn(how.size(), -1);
  cuda_with_threads::sample({.rows = static_cast<std::int64_t>(how.size() / 2),
                             .tokens = tokens,
                             .stride = tokens + 3,
                             .logits = logits.data(),
                             .how = how.data(),
                             .drawn = drawn.data()},
                            {});
  return drawn;
}

TEST(Sample, IsTheFirstTokenWhoseRunningSumIsAboveTheShare) {
  for (const std::int64_t tokens : {1, 127, 128, 5000}) {
    const std::vector<double> how{1, 0, 0.7, 0.3, 0, 0.5, 2, 0.9999999, 0.05, 0.6};
    const auto rows = std::ssize(how) / 2;
    auto logits = random_logits(rows * (tokens + 3));
    for (std::int64_t row = 0; row < rows; ++row) logits[static_cast<std::size_t>(row * (tokens + 3) + tokens / 2)] = 9;
    const auto drawn = run(logits, tokens, how);
    for (std::int64_t row = 0; row < rows; ++row) {
      const float* own = logits.data() + row * (tokens + 3);
      const double temperature = how[static_cast<std::size_t>(2 * row)];
      double all = 0, plain = 0, running = 0;
      const auto weight = [&](std::int64_t i) { return std::exp((own[i] - 9.0) / temperature); };
      for (std::int64_t i = 0; i < tokens; ++i) {
        plain += std::exp(own[i] - 9.0);
        if (temperature > 0) all += weight(i);
      }
      std::int64_t want = tokens / 2;
      if (temperature > 0) {
        for (want = 0; want < tokens - 1; ++want) {
          if ((running += weight(want)) > all * how[static_cast<std::size_t>(2 * row + 1)]) break;
        }
      }
      EXPECT_EQ(drawn[static_cast<std::size_t>(2 * row)], static_cast<double>(want)) << tokens << " " << row;
      EXPECT_NEAR(drawn[static_cast<std::size_t>(2 * row + 1)], own[want] - 9.0 - std::log(plain), 1e-5);
    }
  }
}

TEST(Sample, OfLogitsThatAreNotNumbersHasNoLogProbability) {
  std::vector<float> logits(203, 1.0F);
  logits[77] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(run(logits, 200, {1, 0.5})[1]));
  EXPECT_TRUE(std::isnan(run(logits, 200, {0, 0.5})[1]));
}

}  // namespace
}  // namespace gka::kernels::test
