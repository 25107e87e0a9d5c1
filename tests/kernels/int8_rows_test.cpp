// Matrices of bytes as bfloat16: the kernel's own source on the host, against what the format says each number is.
#define cuda cuda_with_threads
#include "kernels/cuda/int8_rows.cu"
#undef cuda

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace gka::kernels::test {
namespace {

TEST(Int8Rows, AreTheNumbersTheyStandForRoundedOnce) {
  constexpr std::int64_t kIn = 256, kRows[]{3, 1, 70};  // more pieces than a block has threads
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> plain(3);
  std::vector<std::vector<char>> stored(3);
  std::vector<std::vector<std::uint16_t>> numbers(3);
  cuda_with_threads::Int8Rows call{.in = kIn, .count = 3};
  for (std::size_t m = 0; m < 3; ++m) {
    const auto rows = kRows[m];
    plain[m].resize(static_cast<std::size_t>(rows * kIn));
    stored[m].resize(static_cast<std::size_t>(rows * int8_row_bytes(kIn)) + 16);
    numbers[m].resize(plain[m].size(), 0x7fc0);
    for (std::int64_t row = 0; row < rows; ++row) {
      std::vector<float> drawn(kIn);
      for (auto& number : drawn) number = normal(random);
      void* to = stored[m].data() + row * int8_row_bytes(kIn);
      to_int8(drawn.data(), kIn, to);
      from_int8(to, kIn, plain[m].data() + row * kIn);
    }
    call.of[m] = {.stored = stored[m].data(), .numbers = numbers[m].data(), .rows = rows};
  }
  cuda_with_threads::expand(call, {});
  for (std::size_t m = 0; m < 3; ++m) {
    for (std::size_t i = 0; i < plain[m].size(); ++i) {
      ASSERT_EQ(numbers[m][i], static_cast<std::uint16_t>(cuda_with_threads::two_bfloat16(plain[m][i], 0)))
          << m << " " << i;
    }
  }
}

TEST(Int8Rows, AreThereWhereRowsBeginAtWholeVectors) {
  using cuda_with_threads::has_int8_rows;
  EXPECT_TRUE(has_int8_rows(1024));
  EXPECT_TRUE(has_int8_rows(2816));
  EXPECT_FALSE(has_int8_rows(72));
  EXPECT_FALSE(has_int8_rows(64));
}

}  // namespace
}  // namespace gka::kernels::test
