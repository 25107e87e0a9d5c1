// Products with stored weights, in every instruction set this machine has, against sums in float64.
#include "kernels/products.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cpu_support.h"

namespace gka::kernels {
namespace {

struct Stored {
  std::vector<char> bytes;
  std::vector<float> numbers;  // what they stand for
};

Stored stored_matrix(StoredAs type, std::int64_t out, std::int64_t in, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Stored stored{.bytes = std::vector<char>(static_cast<std::size_t>(out * row_bytes(type, in))), .numbers = {}};
  std::vector<float> row(static_cast<std::size_t>(in));
  for (std::int64_t n = 0; n < out; ++n) {
    char* place = stored.bytes.data() + n * row_bytes(type, in);
    for (std::int64_t k = 0; k < in; ++k) {
      auto& number = row[static_cast<std::size_t>(k)];
      number = normal(random);
      if (type != StoredAs::bfloat16) continue;
      const auto half = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(number) >> 16);
      std::memcpy(place + 2 * k, &half, sizeof half);
      number = std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16);
    }
    if (type == StoredAs::float32) std::memcpy(place, row.data(), row.size() * sizeof(float));
    if (type == StoredAs::int8) {
      to_int8(row.data(), in, place);
      from_int8(place, in, row.data());
    }
    stored.numbers.insert(stored.numbers.end(), row.begin(), row.end());
  }
  return stored;
}

std::vector<float> normal_numbers(std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(static_cast<std::size_t>(count));
  for (auto& number : numbers) number = normal(random);
  return numbers;
}

class EveryStored : public testing::TestWithParam<StoredAs> {};

TEST_P(EveryStored, GivesTheSumsAndEachRowItsBitsWhateverTheOthers) {
  for (const char* isa : test::kInstructionSets) {
    const test::ForcedInstructionSet forced(isa);
    if (!forced.available()) continue;
    for (const auto& [in, out] : {std::pair{64, 24}, {1, 3}, {31, 17}, {200, 1}, {513, 70}}) {
      const std::int64_t most = 15;
      const auto w = stored_matrix(GetParam(), out, in, 1);
      const auto x = normal_numbers(most * in, 2);
      std::vector<float> first(static_cast<std::size_t>(most * out));
      for (std::int64_t rows = most; rows > 0; rows -= rows > 8 ? 3 : 1) {
        std::vector<float> y(static_cast<std::size_t>(rows * out), -1.0F);
        const StoredMatrix matrix{
            .data = w.bytes.data(), .type = GetParam(), .out = out, .y = y.data(), .y_stride = out};
        cpu::products({.x = x.data(), .rows = rows, .in = in, .x_stride = in, .matrices = {&matrix, 1}},
                      thread_executor(rows % 2 == 0 ? 1 : 2));
        if (rows == most) first = y;
        for (std::size_t i = 0; i < y.size(); ++i) ASSERT_EQ(y[i], first[i]) << isa << " " << rows << " rows, " << i;
      }
      for (std::int64_t m = 0; m < most; ++m) {
        for (std::int64_t n = 0; n < out; ++n) {
          double sum = 0, size = 0;
          for (std::int64_t k = 0; k < in; ++k) {
            const double term =
                double{x[static_cast<std::size_t>(m * in + k)]} * w.numbers[static_cast<std::size_t>(n * in + k)];
            sum += term;
            size += std::abs(term);
          }
          EXPECT_NEAR(first[static_cast<std::size_t>(m * out + n)], sum, 1e-6 * size) << isa << " " << m << " " << n;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Products, EveryStored, testing::Values(StoredAs::float32, StoredAs::bfloat16, StoredAs::int8));

TEST(Products, OfSeveralMatricesAreThoseOfEach) {
  const std::int64_t in = 96, rows = 3;
  const auto x = normal_numbers(rows * in, 5);
  const auto a = stored_matrix(StoredAs::bfloat16, 40, in, 6), b = stored_matrix(StoredAs::int8, 700, in, 7);
  std::vector<float> together(rows * 740), alone(rows * 740);
  const auto matrix = [](const Stored& w, StoredAs type, std::int64_t out, float* y) {
    return StoredMatrix{.data = w.bytes.data(), .type = type, .out = out, .y = y, .y_stride = 740};
  };
  const auto run = [&](std::vector<StoredMatrix> matrices) {
    cpu::products({.x = x.data(), .rows = rows, .in = in, .x_stride = in, .matrices = matrices}, thread_executor(2));
  };
  run({matrix(a, StoredAs::bfloat16, 40, together.data()), matrix(b, StoredAs::int8, 700, together.data() + 40)});
  run({matrix(a, StoredAs::bfloat16, 40, alone.data())});
  run({matrix(b, StoredAs::int8, 700, alone.data() + 40)});
  EXPECT_EQ(together, alone);
}

TEST(Int8, KeepsTheLargestOfAGroupAndIsOffByHalfAStepAtMost) {
  const std::int64_t in = 150;
  auto row = normal_numbers(in, 8);
  for (std::size_t i = 64; i < 128; ++i) row[i] *= 1e-6F;  // a group of its own scale
  row[140] = 1e30F;
  std::vector<char> bytes(static_cast<std::size_t>(int8_row_bytes(in)));
  std::vector<float> back(row.size());
  to_int8(row.data(), in, bytes.data());
  from_int8(bytes.data(), in, back.data());
  for (std::size_t begin = 0; begin < row.size(); begin += kInt8Group) {
    const auto end = std::min(begin + kInt8Group, row.size());
    float largest = 0;
    for (auto i = begin; i < end; ++i) largest = std::max(largest, std::abs(row[i]));
    for (auto i = begin; i < end; ++i) EXPECT_LE(std::abs(back[i] - row[i]), 0.5001F * largest / 127) << i;
  }
}

TEST(Int8, ZeroStaysZero) {
  std::vector<float> row(70, 0.0F), back(70, 1.0F);
  row[69] = 1e-42F;  // below what a scale can hold
  std::vector<char> bytes(static_cast<std::size_t>(int8_row_bytes(70)));
  to_int8(row.data(), 70, bytes.data());
  from_int8(bytes.data(), 70, back.data());
  EXPECT_EQ(back, std::vector<float>(70, 0.0F));
}

}  // namespace
}  // namespace gka::kernels
